"""Column- and row-parallel linears in FP8 against the whole linear on one rank."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
from support.collectives import count_collectives
from support.inputs import many_scales
from support.ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.config import LinearConfig
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = pytest.mark.distributed

T, IN, OUT = 128, 256, 512
ODD_OUT = 384
"""With it shapes tell the products of a layer apart."""
KINDS = ("column", "row")
RECIPES = ("tensorwise", "rowwise", "blockwise")
WORLDS = (2, 4)


def operands(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, IN] and grad_output [T, OUT], each token and channel in a range of its own."""
    x = many_scales("per_row", T, IN, seed) * many_scales("per_column", T, IN, seed + 1)
    grad = many_scales("per_row", T, OUT, seed + 2) * 1e-3
    return x.to(tpar.device(), dtype), grad.to(tpar.device(), dtype)


def grads_of(name: str) -> dict[str, Any]:
    return {"grad_dtype": "e4m3", "backend": "reference"} if name == "blockwise" else {}


class _FastProducts(TorchDispatchMode):
    """Whether each FP8 product accumulates fast, by its shape, [M, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int], set[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "fp8_ds.scaled_mm.default":
            a, b, *_, fast, _ = args
            self.found.setdefault((len(a), len(b)), set()).add(fast)
        return func(*args, **(kwargs or {}))


def fast_products(name: str, value: str) -> dict[str, dict[tuple[int, int], set[bool]]]:
    """Of both kinds of layer."""
    tp = tpar.context()
    x, grad = operands(torch.bfloat16)
    found = {}
    for kind, (make, run) in tpar.RUN.items():
        with _FastProducts() as products:
            layer = tpar.linear(ODD_OUT, IN, torch.bfloat16)
            run(make(layer, tp, name, fast_accumulation=value), x, grad[:, :ODD_OUT])
        found[kind] = products.found
    return found


@pytest.mark.parametrize(("name", "value"), [("tensorwise", "output"), ("rowwise", "output_and_grad_input")])
def test_parallel_layers_accumulate_fast_where_the_configuration_says_so(ranks: Any, name: str, value: str) -> None:
    fast = LinearConfig(fast_accumulation=value).fast_gemms
    found = ranks(2).run(fast_products, name, value)[0]
    for kind, out_features in (("column", ODD_OUT // 2), ("row", ODD_OUT)):
        by_gemm: dict[str, set[bool]] = {"output": set(), "grad_input": set(), "grad_weight": set()}
        for (m, n), flags in found[kind].items():
            gemm = "grad_weight" if m == out_features else "output" if n == out_features else "grad_input"
            by_gemm[gemm] |= flags
        assert by_gemm == {gemm: {gemm in fast} for gemm in by_gemm}


# --- against one device ---


def against_whole(
    kind: str, name: str, dtype: torch.dtype, sequence_parallel: bool, data: Any = operands, **config: Any
) -> dict[str, Any]:
    """SQNR in dB of each result against the exact product: (of the parts, of the whole FP8 layer, between the two)."""
    tp = tpar.context(sequence_parallel, **config)
    x, grad = data(dtype)
    layer = tpar.linear(OUT, IN, dtype)
    exact = tpar.run_linear(tpar.linear(OUT, IN, dtype).double(), x.double(), grad.double())
    whole = tpar.run_linear(tpar.whole_fp8(layer, name, **grads_of(name)), x, grad)
    make, run = tpar.RUN[kind]
    parts = run(make(layer, tp, name, **grads_of(name)), x, grad)
    return {
        key: (sqnr_db(exact[key], parts[key]), sqnr_db(exact[key], whole[key]), sqnr_db(whole[key], parts[key]))
        for key in exact
    }


def normal(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(T, size, generator=generator) for size in (IN, OUT))
    return x.to(tpar.device(), dtype), (grad * 1e-4).to(tpar.device(), dtype)


def local_results(family: str) -> dict[tuple[str, str, bool], dict[str, Any]]:
    data = {"normal": normal, "many scales": operands}[family]
    return {
        (kind, name, sequence_parallel): against_whole(kind, name, torch.bfloat16, sequence_parallel, data)
        for kind in KINDS
        for name in RECIPES
        for sequence_parallel in (True, False)
    }


# A column-parallel weight's rows and a row-parallel weight's columns are other rows than the whole's, and with rowwise
# a gathered grad_output meets a weight that was quantised once more: 1.2 dB of grad_input.
ALLOWED_LOSS = {("row", "rowwise"): 1.5}


def test_local_scales_are_as_close_to_the_exact_product_as_one_device(ranks: Any) -> None:
    for case, found in ranks(2).run(local_results, "normal")[0].items():
        for key in ("output", "grad_input", "grad_weight"):
            parts, whole, _ = found[key]
            assert parts > whole - ALLOWED_LOSS.get(case[:2], 0.3), (case, key, parts, whole)
        assert found["grad_bias"][0] > 45, case


# Where single elements are most of a tensor, one device has them without error: its scale takes the largest to E5M2's
# or E4M3's largest. Powers of two round them like all others.
FLOOR = {"output": 26.0, "grad_input": 23.0, "grad_weight": 22.0, "grad_bias": 45.0}


def test_local_scales_hold_their_floor_where_ranges_differ_by_token_and_channel(ranks: Any) -> None:
    for case, found in ranks(4).run(local_results, "many scales")[0].items():
        for key, floor in FLOOR.items():
            assert found[key][0] > floor, (case, key, found[key])


# --- one shard far larger than the others ---


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_a_shard_a_thousand_times_larger_costs_the_others_no_bit(name: str) -> None:
    """Rank 0's weight, then its tokens, times 1024: what the other ranks compute has the same bits."""
    tp = tpar.context()
    x, grad = operands(torch.bfloat16)
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    options = grads_of(name)
    column, row = tpar.column_fp8(layer, tp, name, **options), tpar.row_fp8(layer, tp, name, **options)
    own_x, own_grad = tpar.own_rows(tp, x), tpar.own_cols(tp, grad)
    row_x, row_grad = tpar.own_cols(tp, x), tpar.own_rows(tp, grad)
    before = tpar.run_linear(column, own_x, own_grad), tpar.run_linear(row, row_x, row_grad)
    column.weight.grad = row.weight.grad = None
    if tp.rank == 0:
        with torch.no_grad():
            column.weight.mul_(1024)
            row.weight.mul_(1024)
    after = tpar.run_linear(column, own_x, own_grad), tpar.run_linear(row, row_x, row_grad)
    if tp.rank > 0:
        for key in ("output", "grad_weight"):
            assert_bitwise(before[0][key], after[0][key])
        for key in ("grad_input", "grad_weight"):
            assert_bitwise(before[1][key], after[1][key])
    column = tpar.column_fp8(layer, tp, name, **options)
    after = tpar.run_linear(column, own_x * 1024 if tp.rank == 0 else own_x, own_grad)
    first = len(own_x)
    assert_bitwise(before[0]["output"][first:], after["output"][first:])
    assert not torch.equal(before[0]["output"][:first], after["output"][:first])


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_a_shard_of_zeros_hurts_nobody(name: str) -> None:
    """One rank's x is all zeros."""
    tp = tpar.context()
    x, grad = operands(torch.bfloat16)
    x.chunk(tp.size)[1].zero_()
    column = tpar.column_fp8(tpar.linear(OUT, IN, torch.bfloat16, bias=False), tp, name, **grads_of(name))
    result = tpar.run_linear(column, tpar.own_rows(tp, x), tpar.own_cols(tp, grad))
    assert result["output"].isfinite().all()
    exact = tpar.own_cols(tp, grad).double().t() @ x.double()
    assert sqnr_db(exact, result["grad_weight"]) > 22, name


WAYS: list[dict[str, Any]] = [{}, {"gather": "bf16"}]


def broken(name: str, way: dict[str, Any]) -> list[tuple[str, str, float, bool]]:
    """(layer, tensor with one number that is not finite, the number, whether all that hangs on it shows it)."""
    tp = tpar.context(**way)
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    found = []
    for kind in KINDS:
        make, run = tpar.RUN[kind]
        for where, value in itertools.product(("x", "grad"), (math.nan, math.inf, -math.inf)):
            x, grad = operands(torch.bfloat16)
            (x if where == "x" else grad)[-3, 5] = value
            results = run(make(layer, tp, name, **grads_of(name)), x, grad)
            token = (results["output" if where == "x" else "grad_input"][-3], results["grad_weight"])
            found.append((kind, where, value, not any(bool(one.isfinite().all()) for one in token)))
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_is_seen_whatever_travels_how(ranks: Any, name: str, way: dict[str, Any]) -> None:
    for found in ranks(2).run(broken, name, way):
        assert len(found) == 12
        assert all(seen for *_, seen in found), [row for row in found if not row[-1]]


@on_ranks(2)
def test_an_input_of_another_width_is_named() -> None:
    tp = tpar.context()
    layer = tpar.linear(OUT, IN, torch.bfloat16)
    for kind in KINDS:
        with pytest.raises(ValueError, match="input: "):
            tpar.RUN[kind][0](layer, tp, "tensorwise")(torch.ones(T, IN + 16).bfloat16())


@on_ranks(2)
def test_a_float32_input_is_refused_and_cast_by_autocast() -> None:
    tp = tpar.context()
    layer = tpar.linear(OUT, IN, torch.bfloat16)
    for kind in KINDS:
        module = tpar.RUN[kind][0](layer, tp, "tensorwise")
        x = torch.ones(T, IN if kind == "column" else IN // 2)
        with pytest.raises(RuntimeError, match=r"expected torch\.bfloat16"):
            module(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16


# --- bytes and collectives ---


def traffic(kind: str, name: str, **config: Any) -> dict[str, Any]:
    """(forward, backward): calls and bytes of one layer, after its first batch has been checked."""
    tp = tpar.context(**config)
    x, grad = operands(torch.bfloat16)
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    module = tpar.RUN[kind][0](layer, tp, name, **grads_of(name))
    x = (tpar.own_rows(tp, x) if kind == "column" else tpar.own_cols(tp, x)).requires_grad_()
    grad = tpar.own_cols(tp, grad) if kind == "column" else tpar.own_rows(tp, grad)
    output = module(x)
    with count_collectives() as forward:
        output = module(x)
    with count_collectives() as backward:
        output.backward(grad.view(output.shape))
    return {"forward": (forward.calls, forward.num_bytes), "backward": (backward.calls, backward.num_bytes)}


SCALE_BYTES = {"tensorwise": lambda tokens, cols, world: 4 * world, "rowwise": lambda tokens, cols, world: 4 * tokens,
               "blockwise": lambda tokens, cols, world: 4 * tokens * cols // 128}  # fmt: skip


@pytest.mark.parametrize(("world_size", "name"), [(2, "tensorwise"), (2, "blockwise"), (4, "rowwise")])
def test_a_gather_is_one_collective_of_a_byte_an_element_and_the_scales(ranks: Any, world_size: int, name: str) -> None:
    for kind, gathers, reduces, cols in (("column", "forward", "backward", IN), ("row", "backward", "forward", OUT)):
        for found in ranks(world_size).run(traffic, kind, name):
            calls, num_bytes = found[gathers]
            assert calls == {"all_gather": 1}
            assert num_bytes["all_gather"] == T * cols + SCALE_BYTES[name](T, cols, world_size)
            calls, num_bytes = found[reduces]
            assert calls == {"reduce_scatter": 1}
            assert num_bytes["reduce_scatter"] == 2 * T * cols // world_size


def test_in_bf16_two_bytes_an_element_travel_both_ways(ranks: Any) -> None:
    column, row = (ranks(2).run(traffic, kind, "tensorwise", gather="bf16")[0] for kind in KINDS)
    assert column["forward"] == ({"all_gather": 1}, {"all_gather": 2 * T * IN})
    assert row["backward"] == ({"all_gather": 1}, {"all_gather": 2 * T * OUT})


# --- gather in bf16 ---


@on_ranks(2)
def test_gathers_in_bf16_serve_every_recipe_and_layers_in_high_precision() -> None:
    """The layers of other recipes, and an FP8 layer on what was gathered in bf16."""
    x, grad = operands(torch.bfloat16)
    layer = tpar.linear(OUT, IN, torch.bfloat16)
    for kind in KINDS:
        make, run = tpar.RUN[kind]
        for name in ("rowwise_with_gw_hp", "tensorwise"):
            whole = tpar.run_linear(tpar.whole_fp8(layer, name), x, grad)
            parts = run(make(layer, tpar.context(gather="bf16"), name), x, grad)
            for key, expected in whole.items():
                assert sqnr_db(expected, parts[key]) > 24, (kind, name, key)
        exact = tpar.run_linear(tpar.linear(OUT, IN, torch.bfloat16), x, grad)
        parts = run(make(layer, tpar.context(), None), x, grad)
        for key, expected in exact.items():
            assert sqnr_db(expected, parts[key]) > 44, (kind, key)
