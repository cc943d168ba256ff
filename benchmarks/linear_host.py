"""Host time of one linear, forward and backward, in eager mode: FP8 beside nn.Linear. Writes dated results.

    python benchmarks/linear_host.py --out $OUT

Medians of 1,000 calls of a small linear (512 tokens, 1024 x 1024), FP8 and bf16 in turns, in microseconds: forward,
backward, both; as they are, and with the backward in the thread that called it. The GPU is idle when a call begins, so
the host waits for nothing. Without a GPU: a linear of 64 x 32 x 48, a stand-in for Triton's driver (stand_in_driver.py)
and GEMMs that return empty tensors; tensorwise scales only, for the others' ops have no stand-in. What is left then is
Python and torch's dispatcher.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from results_io import command_line, dated_stem, device_name, heading
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.host import uses_cuda
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.parameter import Fp8Parameter
from fp8_ds.nn.linear.payload import OF_RECIPE, Fp8Payload
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.numerics.scale import AmaxHistory

NUM_WARM, NUM_CALLS = 20, 1000
STAND_INS = ("quantize_and_transpose_tensorwise", "record_amax")
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


class LinearStep:
    """One forward and backward of `module`, whose gradients are dropped."""

    def __init__(self, module: nn.Linear, x: Tensor, grad_output: Tensor) -> None:
        self.module = module
        self.x = x
        self.grad_output = grad_output

    def __call__(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Seconds of the host in forward and backward."""
        x = self.x.detach().requires_grad_()
        times = [clock()]
        y = self.module(x)
        times.append(clock())
        y.backward(self.grad_output)
        times.append(clock())
        for p in self.module.parameters():
            p.grad = None
        return times[1] - times[0], times[2] - times[1]


def make_steps(recipe: str, sizes: tuple[int, int, int], device: torch.device) -> tuple[LinearStep, LinearStep]:
    """One step in FP8, its weight FP8 bytes as ZeRO leaves them, and one in bf16."""
    m, k, n = sizes  # tokens, input and output features
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def linear() -> nn.Linear:
        module = nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)
        module.weight = nn.Parameter(normal(n, k))
        return module

    x, grad_output = normal(m, k), normal(m, n)
    fp8, bf16 = (LinearStep(linear(), x, grad_output) for _ in range(2))
    history = put_into_fp8([fp8.module], {"recipe": recipe}, device)
    if history is not None:  # from its first update on it scales by what it remembers
        fp8()
        history.update(history.amax_local.clone())
    return fp8, bf16


def put_into_fp8(linears: Sequence[nn.Linear], keys: Mapping[str, Any], device: torch.device) -> AmaxHistory | None:
    """Convert linears as an engine with this "linear" block, their weights FP8 bytes as ZeRO leaves them."""
    model, config = nn.Sequential(*linears), LinearConfig.model_validate(keys)
    plan = make_plan(model, config)
    for module in linears:
        weight: Any = module.weight
        granularity = OF_RECIPE[config.recipe]
        scale, scale_inv = granularity.scales(granularity.amax(weight.detach().reshape(-1), weight.shape))
        payload = Fp8Payload("measured", scale, scale_inv, weight.dtype)
        payload.data = payload.quantize(weight.detach())
        weight._fp8, weight.data, weight.__class__ = payload, payload.nominal(weight.shape), Fp8Parameter
    history = apply_plan(model, plan, config, device)
    for converted in model:
        assert isinstance(converted, Fp8Linear), plan.describe()
        converted.fp8_recipe.input_cache = None  # every call is given the same input, and is to quantise it
    return history


def host_times(steps: Sequence[LinearStep], on_gpu: bool) -> list[dict[str, float]]:
    """Median microseconds of each step's calls, which are made in turns; on a CPU of its own time, not neighbours'."""
    clock = time.perf_counter if on_gpu else time.process_time
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    for number in range(NUM_WARM + NUM_CALLS):
        for step, column in zip(steps, taken, strict=True):
            if on_gpu:
                torch.cuda.synchronize()
            found = step(clock)
            if number >= NUM_WARM:
                column.append(found)
    return [
        {
            "forward_us": round(1e6 * median(forward for forward, _ in column), 1),
            "backward_us": round(1e6 * median(backward for _, backward in column), 1),
            "host_us": round(1e6 * median(map(sum, column)), 1),
        }
        for column in taken
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a linear, FP8 beside nn.Linear.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()
    on_gpu = uses_cuda()
    device = torch.device("cuda" if on_gpu else "cpu")
    recipes: tuple[str, ...] = get_args(LinearConfig.model_fields["recipe"].annotation)
    m, k, n = sizes = (512, 1024, 1024) if on_gpu else (64, 32, 48)
    if not on_gpu:
        torch.set_num_threads(1)
        stand_in()
        recipes = ("tensorwise",)
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        steps = make_steps(recipe, sizes, device)
        for one_thread in (False, True):
            with torch.autograd.set_multithreading_enabled(not one_thread):
                fp8, bf16 = host_times(steps, on_gpu)
            ratio = round(fp8["host_us"] / bf16["host_us"], 2)
            rows.append({"recipe": recipe, "one_thread": one_thread, "fp8": fp8, "bf16": bf16, "ratio": ratio})
    stem = dated_stem(args.out, "linear-host")
    about = {"device": device_name(), "torch": torch.__version__, "command": command_line(), "m": m, "k": k, "n": n}
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    lines = [f"{m} x {k} x {n}, median microseconds of the host over {NUM_CALLS} calls: forward + backward = both:", ""]
    lines += ["| recipe | backward in a thread of its own | FP8 | nn.Linear in bf16 | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [" + ".join(f"{row[way][f'{part}_us']:.0f}" for part in ("forward", "backward"))
                 + f" = {row[way]['host_us']:.0f}" for way in ("fp8", "bf16")]  # fmt: skip
        threads = "no" if row["one_thread"] else "yes"
        lines.append(f"| {row['recipe']} | {threads} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    text = heading(stem.name) + "\n".join(lines) + "\n"
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
