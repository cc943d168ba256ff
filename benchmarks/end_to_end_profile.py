"""Where the steps of one arm spend their time and memory: two traces and a memory snapshot, summed up by kind."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import memory_profile
import step_profile
import step_times
import torch
from end_to_end_trainers import Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

NUM_STEPS = 3
NUM_TIMED = 20
"""Steps timed one by one before those that are traced."""


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


def profile_steps(
    trainer: Trainer, gauge: Any, step: Callable[[int], Tensor], traces: Path | None = None
) -> dict[str, Any]:
    """`device` and `host` of step_profile.py, `memory` of memory_profile.py; all ranks take the steps.

    Args:
        gauge: of end_to_end_worker.py.
        step: of a number; called with 0 to `NUM_TIMED` - 1.
        traces: a folder for what they were made of, in Chrome's format.
    """
    timed = step_times.measure(step, NUM_TIMED, gauge.on_cuda)
    on_device: list[Any] = []
    on_both: list[Any] = []
    cuda = [ProfilerActivity.CUDA] if gauge.on_cuda else []
    for name, activities, events in (
        ("device", cuda or [ProfilerActivity.CPU], on_device),
        ("both", [ProfilerActivity.CPU, *cuda], on_both),
    ):
        gauge.synchronize()
        with _trace(activities, events, traces and traces / f"{name}.json.gz"):
            for number in range(NUM_STEPS):
                step(number)
            gauge.synchronize()
    result: dict[str, Any] = {
        "ranks": step_times.of_all_ranks(timed),
        "device": step_profile.summarize_device(on_device, NUM_STEPS),
        "host": step_profile.summarize_host(on_both, NUM_STEPS),
        "dispatches_per_linear": None,
    }
    try:
        result["dispatches_per_linear"] = dispatches_per_linear(trainer, gauge.device)
    except RuntimeError as error:  # a count that fails must not cost the traces
        result["dispatches_error"] = str(error)[:500]
    if gauge.on_cuda:
        result["memory"] = memory_profile.profile_memory(lambda: step(0))
    return result
