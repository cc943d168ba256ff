"""Where the host's time goes when it launches one linear, forward and backward, in eager mode. Writes dated results.

    python benchmarks/linear_host.py --out $OUT

Of a small linear (512 tokens, 1024 x 1024), in bf16 and in FP8 by each recipe, microseconds of a call: the device's,
the host's, and the host's with backward in the same thread. Then, by cProfile (which makes calls of Python dearer than
they are) and in one thread, the functions in which the host is. Without a GPU: a linear of 64 x 32 x 48, a stand-in for
Triton's driver (fp8_ds/testing/stand_in_driver.py) and GEMMs that return empty tensors; tensorwise scales only, for the
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
from typing import Any, get_args

import torch
from results_io import command_line, dated_stem, device_name, heading, without_folders
from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.device import uses_cuda
from fp8_ds.nn.layer_table import Case
from fp8_ds.nn.measure import Step, Taken, cuda_clock, make_steps

NUM_SAMPLES, NUM_CALLS, NUM_PROFILED, NUM_LINES = 7, 300, 500, 40
STAND_INS = ("quantize_tensorwise_planes", "record_amax")
_KEEP: list[torch.library.Library] = []


def stand_in() -> None:
    """From here on this process launches, on CPU tensors, what it would launch on a GPU, and nothing starts."""
    from triton.runtime import driver

    from fp8_ds.ops import gemm
    from fp8_ds.ops.quantize import triton as quantize
    from fp8_ds.ops.transpose import triton as transpose
    from fp8_ds.testing.stand_in_driver import StandInDriver

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
        grad_dtype = LinearConfig.model_validate({"recipe": recipe}).grad_dtype
        fp8, bf16 = make_steps(Case(recipe=recipe, grad_dtype=grad_dtype, backend="torch", **sizes), device)
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
