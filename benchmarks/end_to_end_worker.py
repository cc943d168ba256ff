"""One arm of end_to_end.py, in a process a GPU: builds it, and times, profiles or trains it.

Reads the settings that end_to_end.py wrote (`--spec`), writes its result (`--out`, rank 0).
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import logging
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import memory_profile
import sampled_steps
import sdpa
import step_profile
import step_times
import torch
import torch.distributed as dist
from end_to_end_arms import LR, Arm, Model
from end_to_end_trainers import EngineTrainer, PlainTrainer, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.attention import describe_backend

NUM_BATCHES = 4
"""Of random tokens, which timed steps take in turn."""
WARM_STEPS = 20
"""Over which the learning rate rises when losses are compared."""
HELD_OUT = 16
"""Windows."""
MOST_EVERY = 20
"""Steps between samples of a monitor, for these to be timed one by one; the warm-up has had the first."""


class Device:
    """Synchronisation and memory of the device, zero on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def reset_peak(self) -> None:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        """GiB, the largest of all ranks."""
        values = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.on_cuda:
            values[0], values[1] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        allocated, reserved = (round(float(value) / 2**30, 3) for value in values)
        return {"peak_allocated_gib": allocated, "peak_reserved_gib": reserved}


def timed(device: Device, step: Callable[[int], Tensor], num_blocks: int, num_steps: int) -> list[float]:
    """Milliseconds per step of each block, the device idle before and after a block."""
    blocks = []
    for block in range(num_blocks):
        device.synchronize()
        start = time.perf_counter()
        for number in range(num_steps):
            step(block * num_steps + number)
        device.synchronize()
        blocks.append(1000 * (time.perf_counter() - start) / num_steps)
    return blocks


def random_batches(m: Model, device: torch.device, rank: int) -> list[Tensor]:
    """int64 [micro_batch, seq + 1] of uniform tokens."""
    generator = torch.Generator().manual_seed(17 + rank)
    shape = (m.micro_batch, m.seq + 1)
    return [torch.randint(m.vocab, shape, generator=generator).to(device) for _ in range(NUM_BATCHES)]


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def dispatches_per_linear(trainer: Trainer, device: torch.device) -> int | None:
    """Operators that one linear of the model dispatches in forward and backward; gradients are not accumulated.

    In bf16 11 (12 with three dimensions, as here), torchao tensorwise 82. None where weights are sharded.
    """
    if trainer.m.gpus > 1:
        return None
    linear = next(x for fqn, x in trainer.model.named_modules() if isinstance(x, nn.Linear) and "lm_head" not in fqn)
    x = torch.randn(2, 128, linear.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=getattr(trainer, "autocast", False))
    with _Count() as count:
        with autocast:
            y = linear(x)
        # The Parameter itself: ours answers functions of torch with a de-quantised copy.
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.grad(y, [x, linear.weight], torch.ones_like(y))
    return count.calls - 1  # without ones_like


@contextmanager
def _trace(activities: list[Any], events: list[Any], kept: Path | None) -> Iterator[None]:
    with profile(activities=activities) as prof:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        text = path.read_bytes()
    events += json.loads(text)["traceEvents"]
    if kept is not None:
        kept.write_bytes(gzip.compress(text))


def profiled(
    trainer: Trainer, device: Device, step: Callable[[int], Tensor], num_steps: int, traces: Path | None = None
) -> dict[str, Any]:
    """`device` and `host` of step_profile.py, `memory` of memory_profile.py; all ranks take the steps.

    Args:
        traces: a folder for what they were made of, in Chrome's format.
    """
    on_device: list[Any] = []
    on_both: list[Any] = []
    cuda = [ProfilerActivity.CUDA] if device.on_cuda else []
    for name, activities, events in (
        ("device", cuda or [ProfilerActivity.CPU], on_device),
        ("both", [ProfilerActivity.CPU, *cuda], on_both),
    ):
        device.synchronize()
        with _trace(activities, events, traces and traces / f"{name}.json.gz"):
            for number in range(num_steps):
                step(number)
            device.synchronize()
    result: dict[str, Any] = {
        "device": step_profile.summarize_device(on_device, num_steps),
        "host": step_profile.summarize_host(on_both, num_steps),
        "dispatches_per_linear": None,
    }
    try:
        result["dispatches_per_linear"] = dispatches_per_linear(trainer, device.device)
    except RuntimeError as error:  # a count that fails must not cost the traces
        result["dispatches_error"] = str(error)[:500]
    if device.on_cuda:
        result["memory"] = memory_profile.profile_memory(lambda: step(0))
    return result


def train_on_text(trainer: Trainer, m: Model, spec: dict[str, Any], device: torch.device, rank: int) -> dict[str, Any]:
    """Losses of `steps` steps on the same windows of text for every arm, and of held-out windows after them."""
    from fp8_ds.parity.text import Windows

    cache, num_ranks = Path(spec["text"]["cache"]), m.gpus
    windows = Windows(cache / "train.npy", m.seq, device)
    per_step = m.micro_batch * num_ranks
    order = windows.order(spec["steps"] * per_step, seed=0).view(spec["steps"], num_ranks, m.micro_batch)[:, rank]
    losses = torch.zeros(spec["steps"], device=device)
    for number in range(spec["steps"]):
        trainer.set_lr(LR * min(1.0, (number + 1) / WARM_STEPS))
        losses[number] = trainer.step(windows.batch(order[number])).float()
    held_out = Windows(cache / "held_out.npy", m.seq, device)
    num = max(m.micro_batch, min(HELD_OUT, held_out.num_windows) // m.micro_batch * m.micro_batch)
    trainer.model.eval()
    with torch.no_grad():
        after = [trainer.forward(held_out.batch(part)).double() for part in torch.arange(num).split(m.micro_batch)]
    if num_ranks > 1:
        dist.all_reduce(losses)
        losses /= num_ranks
    return {
        "losses": [round(float(loss), 5) for loss in losses],
        "held_out_loss": round(float(torch.stack(after).mean()), 5),
        "windows": spec["steps"] * per_step,
        "text_windows": windows.num_windows,
    }


# --- one arm ---


_COMPILER = "torch._dynamo.convert_frame"
"""The logger that says so."""


class InEager(logging.Handler):
    """Functions that torch.compile gave up on: past its limit of graphs of one function they run in eager.

    torch warns once each, in an output that nobody reads where the arm ends well.

    Attributes:
        functions: "'name' (file:line)" of each.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.functions: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "hit config" in str(record.msg) and isinstance(record.args, tuple):
            self.functions.append(re.sub(r"\((?:.*/)?([^/]+)\)$", r"(\1)", str(record.args[2])))

    def __enter__(self) -> InEager:
        """Hears torch's compiler from now on."""
        logging.getLogger(_COMPILER).addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger(_COMPILER).removeHandler(self)


def start(arm: Arm, m: Model, on_cuda: bool, local_rank: int) -> torch.device:
    """The device of this rank, process group made where there is one."""
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    if arm.uses_deepspeed:
        if not on_cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed()
    elif m.gpus > 1:
        dist.init_process_group("nccl" if on_cuda else "gloo")
    return device


def kernel_of_attention(arm: Arm, m: Model, device: torch.device) -> str:
    """What the arm asks for; else what SDPA picks for the model's sizes."""
    if arm.fa3 or (arm.fp8 or {}).get("attention", {}).get("backend") == "fa3":
        return describe_backend("fa3")
    return sdpa.picked(m.micro_batch, m.seq, m.heads, m.kv_heads, m.hidden // m.heads, device)


def measure(spec: dict[str, Any], local_rank: int) -> dict[str, Any]:
    """The result of the arm in `spec`."""
    began = time.monotonic()
    arm, m = Arm(**spec["arm"]), Model(**spec["model"])
    device = start(arm, m, spec["on_cuda"], local_rank)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    trainer = (EngineTrainer if arm.uses_deepspeed else PlainTrainer)(arm, m, spec, device)
    gc.collect()
    gauge = Device(device)
    result: dict[str, Any] = {
        "attention": kernel_of_attention(arm, m, device),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
        "build_seconds": round(time.monotonic() - began, 1),
        **{f"build_{name}": value for name, value in gauge.peaks().items()},
    }
    if spec["mode"] == "losses":
        result |= train_on_text(trainer, m, spec, device, rank)
        return {**result, "fp8": trainer.report()}
    batches = random_batches(m, device, rank)
    loss = torch.zeros(())

    def step(number: int) -> Tensor:
        nonlocal loss
        loss = trainer.step(batches[number % NUM_BATCHES])
        return loss

    timed(gauge, step, 1, spec["warm_up"])
    result["warm_seconds"] = round(time.monotonic() - began, 1)
    gauge.reset_peak()
    blocks = timed(gauge, step, spec["blocks"], spec["steps"])
    ms = statistics.median(blocks)
    result |= {
        "block_ms": [round(value, 3) for value in blocks],
        "step_ms": round(ms, 3),
        "tokens_per_second_per_gpu": round(1000 * m.tokens / ms, 1),
        **gauge.peaks(),
        "loss": round(float(loss), 4),
        "finite": math.isfinite(float(loss)),
        "fp8": trainer.report(),
    }
    every = (arm.fp8 or {}).get("monitor", {}).get("every", 0)
    if spec["mode"] == "speed" and 3 <= every <= MOST_EVERY:
        result["samples"] = sampled_steps.measure(step, trainer.engine.global_steps, every)
    if spec["mode"] == "profile":
        device_and_host = step_times.measure(step, 2 * spec["steps"], gauge.on_cuda)
        result["ranks"] = step_times.of_all_ranks(device_and_host)
        traces = Path(spec["traces"]) if spec["traces"] and rank == 0 else None
        result |= profiled(trainer, gauge, step, spec["profile_steps"], traces)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with InEager() as in_eager:
        result = measure(json.loads(args.spec.read_text()), args.local_rank)
    result["in_eager"] = in_eager.functions
    if not dist.is_initialized() or dist.get_rank() == 0:
        args.out.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()  # and Python's own way out, at which the last report of fp8.monitor is written


if __name__ == "__main__":
    main()
