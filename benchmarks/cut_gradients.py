"""What it takes to cut gradients for all ranks in ZeRO-3: DeepSpeed's reduce-scatter and ours. Writes dated results.

    python benchmarks/cut_gradients.py --out $OUT
    python benchmarks/cut_gradients.py --scale 4096 --ranks 8 512     # on a CPU, every weight 4,096 times smaller

The gradients of a Llama-3-8B decoder layer, bf16, seven weights and two norms, are laid out for so many ranks as
`reduce_scatter_coalesced` and `fp8_ds.comm.equal_shares.reduce_scatter_shares` do. The ranks are imagined, over NCCL,
and nothing is sent: what is timed is all but the collective. Milliseconds of the host until it has launched all, and of
a GPU with the host's where the GPU waits for it; medians of 15, both ways in turns. That both hand out the same is
checked.

Predicted before the first run on a GPU: on 512 ranks 7 ms of the host for stock, a fifth of a second a step of 32
layers, and 0.1 for ours; on 8 0.15 and 0.1; the GPU 0.35 both ways where it does not wait.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from gather import LAYER
from results_io import command_line, dated_stem, device_name, heading
from torch import Tensor

from fp8_ds.comm import grouped
from fp8_ds.comm.equal_shares import reduce_scatter_shares
from fp8_ds.device import uses_cuda

HERE = Path(__file__).resolve().parent
NORMS = {"input_layernorm": 4096, "post_attention_layernorm": 4096}
WAYS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "stock": reduce_scatter_coalesced,
    "ours": reduce_scatter_shares,
}
NUM_WARM, NUM_TIMED = 3, 15


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """(of the host until it returns, until the device is done)."""
    wait = torch.cuda.synchronize if uses_cuda() else lambda: None
    wait()
    start = time.perf_counter()
    call()
    launched = time.perf_counter()
    wait()
    return 1e3 * (launched - start), 1e3 * (time.perf_counter() - start)


def measure(gradients: list[Tensor], num_ranks: int) -> dict[str, dict[str, float]]:
    """By way, of rank 1 of `num_ranks`.

    Raises:
        AssertionError: the ways hand out other shares.
    """
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    ranks = {"get_world_size": lambda *_: num_ranks, "get_rank": lambda *_: 1}
    sent: list[Any] = []
    checks = True

    def send_each(owns: Sequence[Tensor], wholes: Sequence[Tensor], op: Any, group: Any) -> None:
        sent.extend(zip(owns, wholes, strict=True) if checks else ())

    with (
        mock.patch.multiple(ds_comm, **ranks, reduce_scatter_fn=lambda *_, **__: None),
        mock.patch.object(grouped, "reduce_scatter_each", send_each),
        mock.patch.object(dist, "get_backend", lambda group: "nccl"),
    ):
        stock, ours = (reduce_scatter(gradients) for reduce_scatter in WAYS.values())
        for own, whole in sent:
            own.copy_(whole.view(num_ranks, -1)[1])
        sent.clear()
        # What is left to NCCL, which divides by a power of two.
        left = num_ranks if uses_cuda() and num_ranks & (num_ranks - 1) == 0 else 1
        assert all(one.equal(other / left) for one, other in zip(stock, ours, strict=True))
        checks = False
        for _ in range(NUM_WARM + NUM_TIMED):
            for way, reduce_scatter in WAYS.items():
                times[way].append(milliseconds(lambda reduce_scatter=reduce_scatter: reduce_scatter(gradients)))
    host_and_all = {way: [median(one) for one in zip(*times[way][NUM_WARM:], strict=True)] for way in WAYS}
    return {way: {"host_ms": host, "ms": both} for way, (host, both) in host_and_all.items()}


def report(runs: Sequence[dict[str, Any]]) -> str:
    lines = ["| ranks | stock: host, ms | in all | ours: host, ms | in all |", "|---|---|---|---|---|"]
    for run in runs:
        cells = " | ".join(f"{run[way]['host_ms']:.3f} | {run[way]['ms']:.3f}" for way in WAYS)
        lines.append(f"| {run['ranks']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="imagined")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, for dry runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if uses_cuda() else "cpu")
    sizes = [size // args.scale for size in (*LAYER.values(), *NORMS.values())]
    gradients = [torch.randn(size, device=device).bfloat16() for size in sizes]
    runs = [{"ranks": num_ranks, **measure(gradients, num_ranks)} for num_ranks in args.ranks]
    path = dated_stem(args.out, "cut-gradients").with_suffix(".json")
    facts = {"device": device_name(), "torch": torch.__version__, "command": command_line(), "scale": args.scale}
    path.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n")
    text = heading(path.stem) + report(runs)
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
