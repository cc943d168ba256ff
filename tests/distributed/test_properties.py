"""Whatever is drawn, over several ranks: gathers bring the owner's bytes, and linears that are cut are right to the
rounding of FP8."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_parallel as tpar
import torch
from hypothesis import strategies as st

from fp8_ds.testing.properties import check

pytestmark = pytest.mark.distributed

# --- gathers ---


@st.composite
def gathers(draw: st.DrawFn, world: int) -> dict[str, Any]:
    """Runs of some of the ranks, in order, alike or not, with gaps between them."""
    size = draw(st.sampled_from([1, 7, 64, 1000]))
    is_even = draw(st.booleans())
    runs, end = [], draw(st.integers(0, 3))
    for owner in draw(st.sets(st.integers(0, world - 1), min_size=0).map(sorted)):
        numel = size if is_even else draw(st.integers(1, size))
        runs.append((owner, end, end + numel))
        end += numel + (0 if is_even else draw(st.integers(0, 3)))
    return {
        "runs": runs,
        "total": end + draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])),
        "free_bytes": draw(st.sampled_from([0, 256])),
        "max_broadcasts": draw(st.sampled_from([0, 16])),
        "seed": draw(st.integers(0, 2**20)),
    }


def gathered(case: dict[str, Any]) -> str:
    """How it was done. Each rank checks every byte of its buffer."""
    import torch.distributed as dist

    from fp8_ds.comm import gather
    from fp8_ds.comm.gather import gather_method, gather_runs, gathered_bytes
    from fp8_ds.zero.layout import Run

    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    runs, free_bytes, total = [Run(*run) for run in case["runs"]], case["free_bytes"], case["total"]
    generator = torch.Generator().manual_seed(case["seed"])
    truth = torch.randint(0, 200, (total,), generator=generator).to(case["dtype"])
    buffer, expected = (torch.full((total,), 255, dtype=case["dtype"]) for _ in range(2))
    for run in runs:
        expected[run.start : run.stop] = truth[run.start : run.stop]
        if run.rank == rank:
            buffer[run.start : run.stop] = truth[run.start : run.stop]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MAX_BROADCASTS", case["max_broadcasts"])
        moved = gather_runs(group, buffer, runs, free_bytes)
        assert torch.equal(buffer, expected)
        assert moved == gathered_bytes(runs, world, buffer.element_size(), free_bytes)
        assert moved >= sum(run.numel for run in runs) * buffer.element_size()
        return str(gather_method(runs, world, buffer.element_size(), free_bytes))


@pytest.mark.parametrize("num", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_gather_brings_every_byte_of_its_owner(ranks: Any, world_size: int, num: int) -> None:
    methods = set()
    check(num, gathers(world_size), lambda case: methods.update(ranks(world_size).run(gathered, case)))
    assert len(methods) >= 4 and "balanced" in methods


# --- linears that are cut over two ranks ---

OPERANDS = ("input", "weight", "gradient")


@st.composite
def parallel_linears(draw: st.DrawFn) -> dict[str, Any]:
    recipe = draw(st.sampled_from(["tensorwise", "rowwise", "blockwise"]))
    sequence_parallel = draw(st.booleans())
    config: dict[str, Any] = {}
    if recipe == "tensorwise" and draw(st.booleans()):
        config["scales"] = "shared"
    if sequence_parallel:
        config["chunks"] = draw(st.sampled_from([1, 1, 2, 4]))
    return {
        "kind": draw(st.sampled_from(sorted(tpar.RUN))),
        "recipe": recipe,
        "grad_dtype": draw(st.sampled_from(["e5m2", "e4m3"])),
        "backend": draw(st.sampled_from(["torch", "reference"])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "sequence_parallel": sequence_parallel,
        "config": config,
        "sizes": [2 * draw(st.integers(1, most)) for most in (20, 100, 100)],  # tokens, input and output features
        "bias": draw(st.booleans()),
        "exponents": [draw(st.integers(-8, 6)) for _ in OPERANDS],
        "spread": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "zeros": draw(st.sampled_from(["", "", "", *OPERANDS])),
        "broken": draw(st.sampled_from(["", "", "", *OPERANDS])),
        "value": draw(st.sampled_from([float("nan"), float("inf"), -float("inf")])),
        "seed": draw(st.integers(0, 2**20)),
    }


def assert_parallel_linear(case: dict[str, Any]) -> None:
    """Results of all ranks together against the exact products of the whole layer."""
    from fp8_ds.formats import BY_NAME, E4M3
    from fp8_ds.testing.properties import break_one

    generator = torch.Generator().manual_seed(case["seed"])
    tokens, features, outputs = case["sizes"]

    def operand(index: int, *shape: int) -> Any:
        values = torch.randn(shape, generator=generator) * 10.0 ** case["exponents"][index]
        values *= torch.exp2(case["spread"] * torch.randn(shape, generator=generator))
        values *= case["zeros"] != OPERANDS[index]
        if case["broken"] == OPERANDS[index]:
            values = break_one(values, case["value"], case["seed"])
        return values.to(case["dtype"])

    x, grad = operand(0, tokens, features), operand(2, tokens, outputs)
    layer = torch.nn.Linear(features, outputs, bias=case["bias"]).to(case["dtype"])
    with torch.no_grad():
        layer.weight.copy_(operand(1, outputs, features))
        if layer.bias is not None:  # the same on all ranks
            layer.bias.copy_(torch.randn(outputs, generator=generator))
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().double() if case["bias"] else 0.0
    tp = tpar.context(case["sequence_parallel"], **case["config"])
    make, run = tpar.RUN[case["kind"]]
    options = {"grad_dtype": case["grad_dtype"], "backend": case["backend"]}
    found = run(make(layer, tp, case["recipe"], **options), x, grad)
    gradient = BY_NAME[case["grad_dtype"]]
    products = {
        "output": (x, weight, (E4M3, E4M3), bias),
        "grad_input": (grad, weight.T, (gradient, E4M3), 0.0),
        "grad_weight": (grad.T, x.T, (gradient, E4M3), 0.0),
    }
    for name, (a, b, formats, offset) in products.items():
        assert_product((case["kind"], name), found[name], (a, b), formats, offset)


def assert_product(
    what: tuple[str, str], got: torch.Tensor, operands: tuple[Any, Any], formats: tuple[Any, Any], offset: Any
) -> None:
    """`got` is the product of `operands` to what they, their alignment and the sum over ranks may be rounded."""
    from fp8_ds.testing.properties import UNITS, assert_right_or_seen, finite_part, product_and_bound, rounding_error

    a, b = map(finite_part, operands)
    errors = [rounding_error(one, fmt) for one, fmt in zip((a, b), formats, strict=True)]
    if what == (
        "row",
        "grad_input",
    ):  # rowwise scales of a weight cannot leave a sum over its rows: bf16, and FP8 again
        errors[1] = 2 * errors[1] + (2.0**-8 + UNITS["e4m3"].relative ** 2) * (b.abs() + errors[1])
    exact, bound = product_and_bound(a, b, (errors[0], errors[1]))
    if what[1] == "grad_weight":  # codes of other ranks and tokens are shifted to one scale, and may become subnormal
        floors = sum(UNITS[fmt.name].floor for fmt in formats)
        bound = bound + 2 * floors * a.shape[1] * 2 * a.abs().amax() * 2 * b.abs().amax()
    # Addends of two ranks are rounded before they are added, whatever is left of them then.
    rounding = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}[got.dtype]
    exact = exact + offset
    allowed = bound * 1.001 + 2 * rounding * (a.abs() @ b.abs().T + bound + exact.abs()) + 1e-37
    if all(bool(one.isfinite().all()) for one in operands):
        assert bool(((got.double() - exact).abs() <= allowed).all()), (what, (got.double() - exact).abs().max())
    else:
        assert_right_or_seen(got, operands[0].double() @ operands[1].double().T + offset, allowed, what)


@pytest.mark.parametrize("num", [40, pytest.param(2500, marks=pytest.mark.slow)])
def test_any_linear_cut_over_two_ranks_is_right_to_the_rounding_of_fp8(ranks: Any, num: int) -> None:
    check(num, parallel_linears(), lambda case: ranks(2).run(assert_parallel_linear, case))
