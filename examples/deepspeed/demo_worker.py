"""What each rank of demo.py runs: train.py as it is, then a report of bytes gathered and bytes resident."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train import parse_args, train


class GatheredBytes(TorchDispatchMode):
    """While active, count the bytes that gathers, DeepSpeed's own included, deliver to this rank."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Broadcasts stand in for uneven gathers. The first argument is what this rank receives.
        if func._schema.name.startswith(("c10d::allgather", "c10d::_allgather", "c10d::broadcast")):
            self.num_bytes += sum(x.nbytes for x in tree_leaves(args[:1]) if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def resident_weight_bytes(engine: Any) -> int:
    """Bytes of weights that this rank holds between steps: shards plus what stays gathered; no masters, no moments."""
    if hasattr(engine, "fp8_report"):
        return int(engine.fp8_report()["resident_weight_bytes"])
    storages = {}
    for param in engine.module.parameters():
        for tensor in (param.data, getattr(param, "ds_tensor", None)):
            if tensor is not None and tensor.numel():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    args = parse_args()
    report: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(engine: Any) -> Iterator[None]:
        with GatheredBytes() as gathered:
            yield
        report["gathered_bytes"] = gathered.num_bytes
        report["resident_weight_bytes"] = resident_weight_bytes(engine)
        report["num_linears"] = sum(isinstance(module, torch.nn.Linear) for module in engine.module.modules())
        if hasattr(engine, "fp8_report"):
            precision = engine.fp8.precision
            report["num_fp8_linears"] = len(precision.names) - len(precision.in_bf16)

    engine = train(args, around_middle_step=measure)
    report["num_params"] = sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
    if get_accelerator().device_name() == "cuda":
        report["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        largest = {key: max(each[key] for each in reports) for key in report}
        args.log.with_suffix(".report.json").write_text(json.dumps(largest))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Not by the end of Python: while that closes down, a thread of gloo may abort (docs/troubleshooting.md).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
