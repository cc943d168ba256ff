"""Whatever the input: a right result or an error that names what is wrong. A few hundred cases, or 10,000 (slow)."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.adam_shards import make_grad, make_inputs, make_shard
from support.linears import RECIPES, fp8_of
from support.properties import (
    UNITS,
    assert_right_or_seen,
    break_one,
    check,
    finite_part,
    product_and_bound,
    rounding_error,
)
from torch import Tensor, nn

from fp8_ds.config import Fp8Config
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.nn.linear.payload import ROW, TENSOR, TILE, per_element
from fp8_ds.numerics.formats import BY_NAME as FORMATS
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.reference import adamw_step
from fp8_ds.ops.quantize import quantize, quantize_part
from fp8_ds.testing import assert_bitwise

each_size = pytest.mark.parametrize("num", [60, pytest.param(2500, marks=pytest.mark.slow)])


# --- the "fp8" block ---

KEYS = Fp8Config.keys()
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def good_value(key: str) -> st.SearchStrategy[Any]:
    """Mostly allowed values of a key, by what docs/config.md says of them."""
    choices: list[st.SearchStrategy[Any]] = []
    for value in KEYS[key].values.split(", "):
        if value == "number":
            choices.append(st.floats(0, 1) | st.integers(0, 1))
        elif value == "integer":
            choices.append(st.integers(0, 10**9))
        elif value == "string":
            choices.append(st.text(min_size=1, max_size=8))
        elif value == "list of strings":
            choices.append(st.lists(st.text(min_size=1, max_size=8), max_size=3))
        elif value.startswith(("object of", '"fp8" by name')):
            choices.append(
                st.dictionaries(st.text(min_size=1, max_size=8), st.sampled_from(["bf16", "fp8"]), max_size=2)
            )
        else:
            choices.append(st.just(json.loads(value)))
    return st.one_of(choices)


@st.composite
def blocks(draw: st.DrawFn) -> Any:
    """A block: some keys with good values, at most two with anything, now and then a key that there is not."""
    if draw(st.integers(0, 19)) == 0:
        return draw(ANYTHING)
    block: dict[str, Any] = {"enabled": True}
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=6, unique=True))
    wild = draw(st.integers(0, 2)) if draw(st.booleans()) else 0
    for index, key in enumerate(keys):
        value = draw(ANYTHING if index < wild else good_value(key))
        place = block
        *path, name = key.split(".")[1:]
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    if draw(st.integers(0, 9)) == 0:
        block[draw(st.text(max_size=8))] = draw(ANYTHING)
    return block


def claim_block(block: Any) -> None:
    before = copy.deepcopy(block)
    try:
        config = Fp8Config.from_block(block)
    except ConfigError as error:
        message = str(error)
        assert message.startswith(("fp8", f"{message.split(' ')[0]} errors"))
        assert ", got " in message and "expected " in message
        return
    finally:
        assert repr(block) == repr(before)
    assert Fp8Config.from_block(config.model_dump(mode="json", exclude_unset=True)) == config
    json.dumps(config.to_state())
    for key, value in block.items():  # nothing that was written is dropped
        read = getattr(config, key)
        for name, inner in value.items() if isinstance(value, dict) else ():
            found = getattr(read, name)
            assert found == (tuple(inner) if isinstance(inner, list) else inner), (key, name)
    for stage in range(4):
        try:
            config.validate_with({"zero_optimization": {"stage": stage}})
        except ConfigError as error:
            assert "expected" in str(error)


@each_size
def test_any_block_is_read_as_it_is_or_refused_by_name(num: int) -> None:
    check(num, blocks(), claim_block)


# --- the linear ---

WEIGHT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
DTYPES = (*WEIGHT_DTYPES, torch.float64, torch.int64)
OPERANDS = ("input", "weight", "gradient")
LAYOUTS = ("contiguous", "transposed", "every second", "expanded", "offset")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values (the first row's, if expanded) in another memory layout."""
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "every second":
        return torch.stack([values, values + 1], dim=-1).flatten(1)[:, ::2]
    if layout == "expanded":
        return values[:1].expand(values.shape)
    if layout == "offset":
        return torch.cat([values.new_ones(3), values.flatten()])[3:].view(values.shape)
    return values


@st.composite
def linears(draw: st.DrawFn) -> dict[str, Any]:
    lead = draw(st.lists(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 5), min_size=1, max_size=3))
    return {
        "lead": lead,
        "sizes": (draw(st.integers(1, 70)), draw(st.integers(1, 70))),
        "recipe": draw(st.sampled_from(sorted(RECIPES))),
        "history": draw(st.sampled_from(["fresh", "zeros", -6, -1, 0, 1, 6])),
        "grad_dtype": draw(st.sampled_from(["e5m2", "e4m3"])),
        "backend": draw(st.sampled_from(["torch", "reference"])),
        "dtype": draw(st.sampled_from(WEIGHT_DTYPES)),
        "input_dtype": draw(st.sampled_from([None, None, None, *DTYPES])),  # None: the weight's
        "extra_features": draw(st.sampled_from([0] * 12 + [-1, 1])),
        "bias": draw(st.booleans()),
        "exponents": draw(st.tuples(*[st.integers(-12, 8)] * 3)),
        "spread": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "layouts": draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))),
        "zeros": draw(st.sampled_from(["", "", "", *OPERANDS])),
        "broken": draw(st.sampled_from(["", "", "", "", *OPERANDS])),
        "value": draw(st.sampled_from([float("nan"), float("inf"), -float("inf")])),
        "seed": draw(st.integers(0, 2**20)),
    }


def values_of(case: dict[str, Any], shape: tuple[int, ...], index: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    spread, exponent = case["spread"], case["exponents"][index]
    if torch.float16 in (case["dtype"], case["input_dtype"]):  # holds 6e-8 to 65504
        spread, exponent = min(spread, 1.0), min(max(exponent, -3), 1)
    values *= torch.exp2(spread * torch.randn(shape, generator=generator)) * 10.0**exponent
    values = values * (case["zeros"] != OPERANDS[index])
    return break_one(values, case["value"], case["seed"]) if case["broken"] == OPERANDS[index] else values


def history_of(case: dict[str, Any], x: Tensor, grad: Tensor) -> AmaxHistory:
    """For input and grad_output: without an update, or as if their last amaxes had been 0 or 2**k times today's."""
    history = AmaxHistory(2, (E4M3.max, FORMATS[case["grad_dtype"]].max))
    if case["history"] != "fresh":
        factor = 0.0 if case["history"] == "zeros" else 2.0 ** case["history"]
        amaxes = [float(finite_part(one).abs().amax()) if one.numel() else 0.0 for one in (x, grad)]
        history.update(torch.tensor(amaxes) * factor)
    return history


ROUNDINGS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
"""Of results in these dtypes, beside that of the operands to FP8: relative; sums and a bias included."""
SUBNORMALS = {torch.float16: 2.0**-23}
"""Likewise, absolute, where results may be as small."""


def claim_linear(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    (features, outputs), dtype = case["sizes"], case["dtype"]
    x_dtype = case["input_dtype"] or dtype
    tokens = torch.Size(case["lead"]).numel()
    linear = nn.Linear(features, outputs, bias=case["bias"]).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(values_of(case, (outputs, features), 1, generator))
    got_features = max(features + case["extra_features"], 0)
    x = laid_out(values_of(case, (tokens, got_features), 0, generator).to(x_dtype), case["layouts"][0])
    grad = laid_out(values_of(case, (tokens, outputs), 2, generator).to(x_dtype), case["layouts"][1])
    history = history_of(case, x, grad)
    backend = "reference" if (case["recipe"], case["grad_dtype"]) == ("blockwise", "e5m2") else case["backend"]
    module = fp8_of(linear, case["recipe"], history=history, grad_dtype=case["grad_dtype"], backend=backend)
    leaf = x.detach().requires_grad_(x.is_floating_point())
    is_right = got_features == features and x_dtype == dtype
    try:
        output = module(leaf.view(*case["lead"], got_features) if x.is_contiguous() else leaf)
        assert is_right, "an input that does not fit is taken"
        output.reshape(tokens, outputs).backward(grad)
    except (Fp8DsError, ValueError, RuntimeError) as error:
        assert not is_right, error
        assert "expected" in str(error) and ", got " in str(error)
        return
    assert module.weight.grad is not None and leaf.grad is not None
    if case["recipe"] == "delayed":
        for recorded, one in zip(history.amax_local, (x, grad), strict=True):
            expected = one.abs().amax().float() if one.numel() else torch.zeros(())
            assert bool(recorded.isnan() if expected.isnan() else recorded == expected)
    scales = history.scale_inv.tolist() if case["recipe"] == "delayed" and history.ready else [None, None]
    results = (output.reshape(tokens, outputs), leaf.grad, module.weight.grad)
    assert_linear(case, linear, (x, grad), scales, results)


def assert_linear(
    case: dict[str, Any], linear: nn.Linear, inputs: tuple[Tensor, Tensor], scales: list[Any], results: tuple[Any, ...]
) -> None:
    """Output and gradients are right.

    Args:
        linear: in high precision.
        inputs: input [T, I] and grad_output [T, O].
        scales: scale_inv of each of these, if it does not follow from them.
        results: output, grad_input and grad_weight in FP8.
    """
    (x, grad), weight, gradient = inputs, linear.weight.detach(), FORMATS[case["grad_dtype"]]
    x_error = rounding_error(finite_part(x), E4M3, scales[0])
    weight_error = rounding_error(finite_part(weight), E4M3)
    grad_error = rounding_error(finite_part(grad), gradient, scales[1])
    bias = linear.bias.detach().double() if linear.bias is not None else 0.0
    # In high precision the product is of the input's dtype, and is rounded to the weight's then.
    through = (weight.dtype, x.dtype) if "gw_hp" in case["recipe"] else (weight.dtype,)
    products = (
        ("output", x, weight, (x_error, weight_error), bias, (x.dtype,)),
        ("grad_input", grad, weight.T, (grad_error, weight_error.T), 0.0, (x.dtype,)),
        ("grad_weight", grad.T, x.T, (grad_error.T, x_error.T), 0.0, through),
    )
    for got, (what, a, b, errors, offset, kinds) in zip(results, products, strict=True):
        exact, bound = product_and_bound(finite_part(a), finite_part(b), errors)
        exact = exact + offset
        rounding, least = max(ROUNDINGS[kind] for kind in kinds), max(SUBNORMALS.get(kind, 1e-37) for kind in kinds)
        allowed = bound * 1.001 + rounding * (exact.abs() + bound) + least
        assert got.shape == exact.shape and got.dtype == kinds[0]
        if bool(a.isfinite().all() and b.isfinite().all()):
            beyond = exact.abs() + allowed > torch.finfo(got.dtype).max  # of float16
            right = (got.double() - exact).abs() <= allowed
            assert bool((right | beyond).all()), (what, (got.double() - exact).abs().max())
        else:
            assert_right_or_seen(got, a.double() @ b.double().T + offset, allowed, what)


@each_size
def test_any_linear_is_right_to_the_rounding_of_fp8_and_hides_no_infinity_or_nan(num: int) -> None:
    check(num, linears(), claim_linear)


# --- shards: of weights, and of the optimizer ---


@st.composite
def cuts(draw: st.DrawFn, numel: int, multiple: int = 1) -> list[int]:
    """Edges of the parts of `numel` elements on 1 to 16 ranks, empty parts among them."""
    places = draw(st.lists(st.integers(0, numel // multiple), max_size=15))
    return sorted([0, *(place * multiple for place in places), numel])


@st.composite
def cut_weights(draw: st.DrawFn) -> Any:
    shape = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    granularity = draw(st.sampled_from([TENSOR, ROW, TILE]))
    return shape, granularity, draw(cuts(shape[0] * shape[1])), draw(st.integers(0, 2**20)), draw(st.integers(-30, 20))


def claim_cut_weight(case: Any) -> None:
    shape, granularity, edges, seed, exponent = case
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.exp2(
        3 * torch.randn(shape, generator=generator) + exponent
    )
    flat = weight.view(-1)
    whole_scale, whole_inv = granularity.scales(granularity.amax(flat, shape))
    expected = quantize(weight, per_element(whole_scale, shape), E4M3).view(-1)
    amaxes = [granularity.amax(flat[a:b], shape, a) for a, b in itertools.pairwise(edges)]
    scale, scale_inv = granularity.scales(torch.stack(amaxes).amax(0))
    assert_bitwise(scale_inv, whole_inv)
    for a, b in itertools.pairwise(edges):
        if granularity == TENSOR:
            part = quantize(flat[a:b], scale, E4M3)
        else:
            block = (granularity.block[0], granularity.block[1] or shape[1])
            part = quantize_part(flat[a:b], scale, a, shape[1], block, E4M3)
        assert_bitwise(part, expected[a:b])
    values = (expected.float() * per_element(whole_inv, shape).expand(shape).reshape(-1)).double()
    amax = per_element(granularity.amax(flat, shape).view_as(whole_inv), shape).expand(shape).reshape(-1).double()
    allowed = flat.double().abs() * 2.0**-4 * 1.001 + amax * UNITS["e4m3"].floor + 1e-37
    assert bool(((values - flat.double()).abs() <= allowed).all())


@each_size
def test_any_cut_of_a_weight_over_ranks_gives_the_bytes_of_the_whole(num: int) -> None:
    check(num, cut_weights(), claim_cut_weight)


@st.composite
def cut_shards(draw: st.DrawFn) -> Any:
    numel = draw(st.integers(1, 1500))
    return {
        "numel": numel,
        "edges": draw(cuts(numel, 128)),
        "format": draw(st.sampled_from(sorted(BY_NAME))),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "scale": draw(st.integers(0, 3)),
        "decoupled": draw(st.booleans()),
        "step": draw(st.integers(1, 2000)),
        "seed": draw(st.integers(0, 1000)),
        "break": draw(st.sampled_from([0.0, 0.0, 0.0, float("nan"), float("inf")])),
    }


def part_of(shard: AdamShard, start: int, stop: int) -> AdamShard:
    """Elements [start, stop) of a shard that starts at 0, on a rank of their own; `start` is a multiple of 128."""
    part = copy.copy(shard)
    part.start, part.numel = start, stop - start
    groups = slice(start // 128, -(-stop // 128) if stop > start else start // 128)
    elements = slice(groups.start * 128, groups.stop * 128)
    part.hi = shard.hi[start:stop].clone()
    part.lo = None if shard.lo is None else shard.lo[elements].clone()
    part.m, part.v = shard.m[elements].clone(), shard.v[elements].clone()
    part.m_scale_inv, part.v_scale_inv = shard.m_scale_inv[groups].clone(), shard.v_scale_inv[groups].clone()
    return part


def claim_cut_shard(case: dict[str, Any]) -> None:
    fmt = BY_NAME[case["format"]]
    whole = make_shard(fmt, case["numel"], 0, case["seed"], case["scale"])
    grad = make_grad(whole, case["dtype"], case["seed"])
    if case["break"]:
        grad[case["numel"] // 2] = case["break"]
    parts = [part_of(whole, a, b) for a, b in zip(case["edges"], case["edges"][1:], strict=False)]
    inputs = [make_inputs(case["step"], decoupled=case["decoupled"], seed=case["seed"]) for _ in (whole, *parts)]
    adamw_step([whole], [grad], inputs[0])
    for part, own in zip(parts, inputs[1:], strict=True):
        adamw_step([part], [grad[part.start : part.start + part.numel].clone()], own)
        expected = part_of(whole, part.start, part.start + part.numel)
        for name in ("hi", "lo", "m", "v", "m_scale_inv", "v_scale_inv"):
            mine, theirs = getattr(part, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
    amax = torch.stack([own.amax for own in inputs[1:]])
    assert_bitwise(torch.where(amax.isnan().any(0), torch.nan, amax.nan_to_num().amax(0)), inputs[0].amax)


@each_size
def test_any_cut_of_the_optimizer_over_ranks_gives_the_bytes_of_the_whole(num: int) -> None:
    check(num, cut_shards(), claim_cut_shard)
