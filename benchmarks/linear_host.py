"""Where the host's time goes when it launches one linear, forward and backward, in eager mode. Writes dated results.

    python benchmarks/linear_host.py --out $OUT

Of a small linear (512 tokens, 1024 x 1024), in bf16 and in FP8 by each recipe, microseconds of a call: the device's,
the host's, and the host's with backward in the same thread. Then, by cProfile (which makes calls of Python dearer than
they are) and in one thread, the functions in which the host is. Without a GPU: a linear of 64 x 32 x 48, a stand-in for
Triton's driver (benchmarks/stand_in_driver.py) and GEMMs that return empty tensors; tensorwise scales only, for the
others' ops have no stand-in. What is left then is Python and torch's dispatcher.

Predicted before the first run on an H200, whose layer table of 2026-11-23 has 1,140 us for tensorwise and 220 for
bf16, by 620 and 230 us on a CPU with stand-ins: 620 us of Python and dispatcher, 150 in three `torch._scaled_mm`, 40 in
launches by the driver, 50 in allocations and streams, and 280 in changes of thread.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from results_io import command_line, dated_stem, device_name, heading, without_folders
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.device import uses_cuda
from fp8_ds.errors import Fp8DsError
from fp8_ds.nn import apply_plan, make_plan
from fp8_ds.scaling.granularity import OF_RECIPE
from fp8_ds.zero.parameter import Fp8Parameter
from fp8_ds.zero.payload import Fp8Payload

Step = Callable[[], object]
"""One forward and backward, or whatever else is timed."""
NUM_SAMPLES, NUM_CALLS, NUM_PROFILED, NUM_LINES = 7, 300, 500, 40
NUM_WARM = 5
SAMPLE_US, MAX_CALLS = 20_000.0, 8
"""Of a sample; so few calls because a GPU's queue takes 1,024 launches before the host has to wait."""
FIRST_ASLEEP_US, MAX_ASLEEP_US = 4_000.0, 1e6
CYCLES_PER_US = 2_000
"""Of `torch.cuda._sleep`, at 2 GHz; a device that runs faster sleeps less, and is sent to sleep again."""
STAND_INS = ("quantize_tensorwise_planes", "record_amax")
_KEEP: list[torch.library.Library] = []


def stand_in() -> None:
    """From here on this process launches, on CPU tensors, what it would launch on a GPU, and nothing starts."""
    from stand_in_driver import StandInDriver
    from triton.runtime import driver

    from fp8_ds.ops import gemm
    from fp8_ds.ops.quantize import triton as quantize
    from fp8_ds.ops.transpose import triton as transpose

    silent = StandInDriver()
    silent.writes = False
    driver.set_active(silent)
    make_library: Any = torch.library.Library
    library = make_library("fp8_ds", "IMPL")
    for name in STAND_INS:
        library.impl(name, getattr(quantize, name), "CPU", allow_override=True)
    library.impl("transpose", transpose.transpose, "CPU", allow_override=True)
    _KEEP.append(library)

    def product(a: Tensor, b: Tensor, *scales: Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype)

    torch_backend: Any = gemm.torch_backend
    torch_backend._product = product


class Taken(NamedTuple):
    """Microseconds of one call of a step."""

    device_us: float
    host_us: float


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


def make_steps(recipe: str, sizes: tuple[int, int, int], device: torch.device) -> tuple[LinearStep, LinearStep]:
    """One step in FP8, its weight FP8 bytes as ZeRO leaves them, and one in bf16.

    Args:
        recipe: of the FP8 linear.
        sizes: tokens, input and output features.
        device: of both.
    """
    m, k, n = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def linear() -> nn.Linear:
        module = nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)
        module.weight = nn.Parameter(normal(n, k))
        return module

    x, grad_output = normal(m, k), normal(m, n)
    fp8, bf16 = (LinearStep(linear(), x, grad_output) for _ in range(2))
    weight: Any = fp8.module.weight
    granularity = OF_RECIPE[recipe]
    scale, scale_inv = granularity.scales(granularity.amax(weight.detach().reshape(-1), weight.shape))
    payload = Fp8Payload("measured", scale, scale_inv, weight.dtype)
    payload.data = payload.quantize(weight.detach())
    model, config = nn.Sequential(fp8.module), LinearConfig.model_validate({"recipe": recipe})
    plan = make_plan(model, config)
    weight._fp8, weight.data, weight.__class__ = payload, payload.nominal(weight.shape), Fp8Parameter
    history = apply_plan(model, plan, config, device)
    converted: Any = fp8.module
    converted.fp8_recipe.shared = None  # every call is given the same input, and is to quantise it
    if history is not None:  # from its first update on it scales by what it remembers
        fp8()
        history.update(history.amax_local.clone())
    return fp8, bf16


def cuda_clock(steps: Sequence[Step]) -> list[Taken]:
    """One call of each step in eager mode: what it takes the current CUDA device, and the host to launch it.

    Medians of samples taken in turns, so that a change of clock rates meets all steps alike. A sample is some calls
    that the host queues while the device sleeps, as long before each step: neither waits for the other.

    Raises:
        Fp8DsError: the host cannot queue them while the device sleeps.
    """
    for step in steps:
        for _ in range(NUM_WARM):
            step()
    first = [[_sample(step, 2, FIRST_ASLEEP_US) for _ in range(2)] for step in steps]
    slowest = max(taken.device_us for row in first for taken in row)
    num_calls = max(1, min(MAX_CALLS, round(SAMPLE_US / slowest)))
    host_us = max(min(taken.host_us for taken in row) for row in first)
    asleep_us = min(1.5 * num_calls * host_us, MAX_ASLEEP_US)
    samples = [[_sample(step, num_calls, asleep_us) for step in steps] for _ in range(NUM_SAMPLES)]
    return [Taken(*map(statistics.median, zip(*column, strict=True))) for column in zip(*samples, strict=True)]


def _sample(step: Step, num_calls: int, asleep_us: float) -> Taken:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host_us = 0.0
    while asleep_us <= MAX_ASLEEP_US:
        torch.cuda._sleep(round(asleep_us * CYCLES_PER_US))
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


def host_clock(steps: Sequence[Step]) -> list[Taken]:
    """As `cuda_clock` where the device is the host; CPU time, so that neighbours do not count."""
    samples = []
    for _ in range(NUM_SAMPLES):
        row = []
        for step in steps:
            begin = time.process_time()
            for _ in range(NUM_CALLS):
                step()
            row.append((time.process_time() - begin) * 1e6 / NUM_CALLS)
        samples.append(row)
    return [Taken(0.0, statistics.median(column)) for column in zip(*samples, strict=True)]


def profiled(step: Step) -> str:
    """The functions in which most time is spent, by their own time."""
    profile = cProfile.Profile()
    step()
    profile.enable()
    for _ in range(NUM_PROFILED):
        step()
    profile.disable()
    if uses_cuda():
        torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(NUM_LINES)
    lines = text.getvalue().splitlines()
    return without_folders("\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("List")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the host is when it launches a linear.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    on_gpu = uses_cuda()
    device = torch.device("cuda" if on_gpu else "cpu")
    clock: Callable[[Sequence[Step]], list[Taken]] = cuda_clock if on_gpu else host_clock
    recipes: tuple[str, ...] = get_args(LinearConfig.model_fields["recipe"].annotation)
    sizes = {"m": 512, "k": 1024, "n": 1024} if on_gpu else {"m": 64, "k": 32, "n": 48}
    if not on_gpu:
        torch.set_num_threads(1)
        stand_in()
        recipes = ("tensorwise",)
    rows: dict[str, dict[str, Taken]] = {}
    profiles: dict[str, str] = {}
    for recipe in recipes:
        fp8, bf16 = make_steps(recipe, (sizes["m"], sizes["k"], sizes["n"]), device)
        both = clock([fp8, bf16])
        with torch.autograd.set_multithreading_enabled(False):
            alone = clock([fp8, bf16])
            profiles[recipe] = profiled(fp8)
        for name, taken, in_one_thread in zip((recipe, f"bf16, beside {recipe}"), both, alone, strict=True):
            rows[name] = {"as it is": taken, "one thread": in_one_thread}
    stem = dated_stem(args.out, "linear-host")
    about = {"device": device_name(), "torch": torch.__version__, "command": command_line(), **sizes}
    times = {name: {way: taken._asdict() for way, taken in row.items()} for name, row in rows.items()}
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": times, "profiles": profiles}, indent=1) + "\n")
    lines = [f"{sizes}. Microseconds of one linear, forward and backward:", ""]
    lines += ["| linear | device | host | host, one thread |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['as it is'].device_us:.0f} | {row['as it is'].host_us:.0f} "
        f"| {row['one thread'].host_us:.0f} |"
        for name, row in rows.items()
    ]
    text = heading(stem.name) + "\n".join(lines) + "\n"
    for recipe, found in profiles.items():
        text += f"\n## {recipe}: {NUM_PROFILED} calls, one thread\n\n```\n{found}\n```\n"
    stem.with_suffix(".md").write_text(text)
    print("\n".join(text.splitlines()[:60]))


if __name__ == "__main__":
    main()
