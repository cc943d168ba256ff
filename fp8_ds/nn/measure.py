"""What one linear, forward and backward, takes device and host, in FP8 and in bf16, as it runs in eager mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8_ds.errors import Fp8DsError
from fp8_ds.nn.convert import LayerPlan, Plan, apply_plan
from fp8_ds.nn.layer_table import Case, Times
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.scaling.granularity import OF_RECIPE
from fp8_ds.zero.parameter import Fp8Parameter
from fp8_ds.zero.payload import Fp8Payload

Step = Callable[[], object]
"""One forward and backward, or whatever else is timed."""

_NUM_WARM, _NUM_SAMPLES = 5, 7
_SAMPLE_US, _MAX_CALLS = 20_000.0, 8
"""Of a sample; so few calls because a GPU's queue takes 1,024 launches before the host has to wait."""
_FIRST_ASLEEP_US, _MAX_ASLEEP_US = 4_000.0, 1e6
_CYCLES_PER_US = 2_000
"""Of `torch.cuda._sleep`, at 2 GHz; a device that runs faster sleeps less, and is sent to sleep again."""


class Taken(NamedTuple):
    """Microseconds of one call of a step."""

    device_us: float
    host_us: float


def time_case(
    case: Case, device: torch.device, clock: Callable[[Sequence[Step]], Sequence[Taken]] | None = None
) -> Times:
    """What `case` takes on `device`. Leaves no memory behind and no random number generator advanced.

    Args:
        case: what is measured.
        device: a CUDA device, unless `clock` is given.
        clock: of one call of each step; `cuda_clock` by default.
    """
    with torch.enable_grad():
        if clock is not None:
            fp8, bf16 = clock(make_steps(case, device))
        else:
            with torch.cuda.device(device):
                fp8, bf16 = cuda_clock(make_steps(case, device))
            torch.cuda.empty_cache()
    return Times(fp8_us=fp8.device_us, bf16_us=bf16.device_us, fp8_host_us=fp8.host_us, bf16_host_us=bf16.host_us)


def make_steps(case: Case, device: torch.device) -> tuple[LinearStep, LinearStep]:
    """One step in FP8, one in bf16. Each gives the gradients of the input, and of weight and bias unless frozen."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def linear() -> nn.Linear:
        module = nn.Linear(case.k, case.n, bias=case.bias, device="meta", dtype=torch.bfloat16)
        module.weight = nn.Parameter(normal(case.n, case.k), requires_grad=not case.frozen)
        if case.bias:
            module.bias = nn.Parameter(normal(case.n), requires_grad=not case.frozen)
        return module

    x, grad_output = normal(case.m, case.k), normal(case.m, case.n)
    fp8, bf16 = (LinearStep(linear(), x, grad_output) for _ in range(2))
    history = _to_fp8(fp8.module, case, device)
    if history is not None:  # from its first update on it scales by what it remembers
        fp8()
        history.update(history.amax_local.clone())
    return fp8, bf16


class LinearStep:
    """One forward and backward of `module`, whose gradients are dropped."""

    def __init__(self, module: nn.Linear, x: Tensor, grad_output: Tensor) -> None:
        self.module = module
        self.x = x
        self._grad_output = grad_output

    def __call__(self) -> None:
        self.module(self.x.detach().requires_grad_()).backward(self._grad_output)
        for p in self.module.parameters():
            p.grad = None


def _to_fp8(module: nn.Linear, case: Case, device: torch.device) -> Any:
    """`module` is an Fp8Linear as ZeRO leaves it: bytes beside a nominal weight. Returns its amax history, if any."""
    granularity = OF_RECIPE[case.recipe]
    weight: Any = module.weight
    scale, scale_inv = granularity.scales(granularity.amax(weight.detach().reshape(-1), weight.shape))
    payload = Fp8Payload("measured", scale, scale_inv, weight.dtype)
    payload.data = payload.quantize(weight.detach())
    weight._fp8 = payload
    weight.data = payload.nominal(weight.shape)
    weight.__class__ = Fp8Parameter
    plan = Plan((LayerPlan("0", case.n, case.k, True, "measured"),))
    history = apply_plan(nn.Sequential(module), plan, case.linear_config(), device)
    assert isinstance(module, Fp8Linear)
    module.fp8_recipe.shared = None  # every call is given the same input, and is to quantise it
    return history


def cuda_clock(steps: Sequence[Step]) -> list[Taken]:
    """One call of each step in eager mode: what it takes the current CUDA device, and the host to launch it.

    Medians of samples taken in turns, so that a change of clock rates meets all steps alike. A sample is some calls
    that the host queues while the device sleeps, as long before each step: neither waits for the other.

    Raises:
        Fp8DsError: the host cannot queue them while the device sleeps.
    """
    for step in steps:
        for _ in range(_NUM_WARM):
            step()
    first = [[_sample(step, 2, _FIRST_ASLEEP_US) for _ in range(2)] for step in steps]
    slowest = max(taken.device_us for row in first for taken in row)
    num_calls = max(1, min(_MAX_CALLS, round(_SAMPLE_US / slowest)))
    host_us = max(min(taken.host_us for taken in row) for row in first)
    asleep_us = min(1.5 * num_calls * host_us, _MAX_ASLEEP_US)
    samples = [[_sample(step, num_calls, asleep_us) for step in steps] for _ in range(_NUM_SAMPLES)]
    return [Taken(*map(statistics.median, zip(*column, strict=True))) for column in zip(*samples, strict=True)]


def _sample(step: Step, num_calls: int, asleep_us: float) -> Taken:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host_us = 0.0
    while asleep_us <= _MAX_ASLEEP_US:
        torch.cuda._sleep(round(asleep_us * _CYCLES_PER_US))
        begin.record()
        start = time.perf_counter()
        for _ in range(num_calls):
            step()
        end.record()
        host_us = (time.perf_counter() - start) * 1e6
        was_asleep = not begin.query()
        end.synchronize()
        if was_asleep:
            return Taken(begin.elapsed_time(end) * 1e3 / num_calls, host_us / num_calls)
        asleep_us = 2 * max(asleep_us, host_us)  # it has waited for the host: once more
    raise Fp8DsError(
        f"layer times: expected the host to queue {num_calls} calls while the GPU sleeps, got {host_us / 1e3:.0f} ms "
        "for them. Launches wait for the GPU: unset CUDA_LAUNCH_BLOCKING, and use no profiler that serialises kernels."
    )
