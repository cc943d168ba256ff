"""Column- and row-parallel linears in FP8 against the whole linear; ranks are threads."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
from support.inputs import many_scales
from support.threads import on_threads
from tensor_parallel import IN, OUT, SHARDED_RECIPES, T
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear import recipe
from fp8_ds.ops.gemm import scaled_mm
from fp8_ds.testing import assert_bitwise, sqnr_db

GEMMS = ("output", "grad_input", "grad_weight")
FLOOR = {"output": 26.0, "grad_input": 23.0, "grad_weight": 22.0, "grad_bias": 45.0}
"""SQNR in dB where single elements are most of a tensor. One device has these without error: its scale takes the
largest to the format's largest number; powers of two round them like all others."""


def beside_whole(data: Any) -> dict[tuple[str, str], list[dict[str, tuple[float, float]]]]:
    """By kind and recipe: with sequence parallelism, and without."""
    return {
        (kind, name): [tpar.against_whole(kind, name, on, data) for on in (True, False)]
        for kind, name in itertools.product(tpar.RUN, SHARDED_RECIPES)
    }


def test_local_scales_are_as_close_to_the_exact_product_as_one_device() -> None:
    for case, both in on_threads(2, beside_whole, tpar.normal)[0].items():
        for found, key in itertools.product(both, GEMMS):
            parts, whole = found[key]
            assert parts > whole - tpar.ALLOWED_LOSS.get(case, 0.3), (case, key, parts, whole)


def test_local_scales_hold_their_floor_where_ranges_differ_by_token_and_channel() -> None:
    for case, both in on_threads(4, beside_whole, tpar.operands)[0].items():
        for found, key in itertools.product(both, FLOOR):
            assert found[key][0] > FLOOR[key], (case, key, found[key])


def with_a_large_shard(name: str) -> None:
    """Rank 0's weight, then its tokens, times 1024: what the other rank computes has the same bits."""
    tp, options = tpar.context(), tpar.grads_of(name)
    x, grad = tpar.operands()
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    given = {
        "column": (tpar.own_rows(tp, x), tpar.own_cols(tp, grad), ("output", "grad_weight")),
        "row": (tpar.own_cols(tp, x), tpar.own_rows(tp, grad), ("grad_input", "grad_weight")),
    }
    for kind, (own_x, own_grad, own_results) in given.items():
        make = tpar.RUN[kind][0]
        before = tpar.run_linear(make(layer, tp, name, **options), own_x, own_grad)
        large = make(layer, tp, name, **options)
        if tp.rank == 0:
            with torch.no_grad():
                large.weight.mul_(1024)
        after = tpar.run_linear(large, own_x, own_grad)
        for key in own_results if tp.rank > 0 else ():
            assert_bitwise(before[key], after[key])
        if kind == "column":
            one = make(layer, tp, name, **options)
            after = tpar.run_linear(one, own_x * 1024 if tp.rank == 0 else own_x, own_grad)
            first = len(own_x)
            assert_bitwise(before["output"][first:], after["output"][first:])
            assert not torch.equal(before["output"][:first], after["output"][:first])


def with_a_shard_of_zeros(name: str) -> None:
    tp = tpar.context()
    x, grad = tpar.operands()
    x.chunk(tp.size)[1].zero_()
    column = tpar.column_fp8(tpar.linear(OUT, IN, torch.bfloat16, bias=False), tp, name, **tpar.grads_of(name))
    result = tpar.run_linear(column, tpar.own_rows(tp, x), tpar.own_cols(tp, grad))
    exact = tpar.own_cols(tp, grad).double().t() @ x.double()
    assert result["output"].isfinite().all() and sqnr_db(exact, result["grad_weight"]) > 22


def with_numbers_that_are_not_finite(name: str, **way: Any) -> None:
    """All that hangs on such a number shows it."""
    tp = tpar.context(**way)
    layer = tpar.linear(OUT, IN, torch.bfloat16, bias=False)
    for kind, where, value in itertools.product(tpar.RUN, ("x", "grad"), (math.nan, math.inf, -math.inf)):
        make, run = tpar.RUN[kind]
        x, grad = tpar.operands()
        (x if where == "x" else grad)[-3, 5] = value
        results = run(make(layer, tp, name, **tpar.grads_of(name)), x, grad)
        for one in (results["output" if where == "x" else "grad_input"][-3], results["grad_weight"]):
            assert not one.isfinite().all(), (kind, where, value)


@pytest.mark.parametrize("name", SHARDED_RECIPES)
@pytest.mark.parametrize("check", [with_a_large_shard, with_a_shard_of_zeros, with_numbers_that_are_not_finite])
def test_no_shard_hides_or_hurts_another(check: Any, name: str) -> None:
    on_threads(2, check, name)


def test_numbers_that_are_not_finite_are_seen_behind_gathers_in_bf16() -> None:
    on_threads(2, partial(with_numbers_that_are_not_finite, gather="bf16"), "tensorwise")


def wrong_inputs() -> None:
    tp = tpar.context()
    layer = tpar.linear(OUT, IN, torch.bfloat16)
    for kind, (make, _) in tpar.RUN.items():
        module = make(layer, tp, "tensorwise")
        with pytest.raises(ValueError, match="input: "):
            module(torch.ones(T, IN + 16).bfloat16())
        x = torch.ones(T, IN if kind == "column" else IN // 2)
        with pytest.raises(RuntimeError, match=r"expected torch\.bfloat16"):
            module(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16


def test_an_input_of_another_width_or_dtype_is_an_error_and_autocast_casts() -> None:
    on_threads(2, wrong_inputs)


def gathers_in_bf16() -> None:
    """Recipes that cannot gather in FP8, and layers in high precision."""
    x, grad = tpar.operands()
    layer = tpar.linear(OUT, IN, torch.bfloat16)
    for kind, (make, run) in tpar.RUN.items():
        for name, gather, bound in (("rowwise_with_gw_hp", "bf16", 24), ("tensorwise", "bf16", 24), (None, "fp8", 44)):
            expected = tpar.run_linear(
                tpar.linear(OUT, IN, torch.bfloat16) if name is None else tpar.whole_fp8(layer, name), x, grad
            )
            parts = run(make(layer, tpar.context(gather=gather), name), x, grad)
            for key, value in expected.items():
                assert sqnr_db(value, parts[key]) > bound, (kind, name, key)


def test_gathers_in_bf16_serve_every_recipe_and_layers_in_high_precision() -> None:
    on_threads(2, gathers_in_bf16)


def each_way(name: str, value: str) -> None:
    x, grad = tpar.operands()
    for make, run in tpar.RUN.values():
        run(make(tpar.linear(OUT, IN, torch.bfloat16), tpar.context(), name, fast_accumulation=value), x, grad)


@pytest.mark.parametrize(("name", "value"), [("tensorwise", "output"), ("rowwise", "output_and_grad_input")])
def test_parallel_layers_accumulate_fast_where_the_configuration_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    fast: list[bool] = []

    def spy(*args: Any, use_fast_accum: bool) -> Tensor:
        fast.append(use_fast_accum)
        return scaled_mm(*args, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(recipe, "scaled_mm", spy)
    on_threads(1, each_way, name, value)
    assert fast == [gemm in LinearConfig(fast_accumulation=value).fast_gemms for gemm in GEMMS] * 2


# --- a weight that is a sum with an adapter: PEFT's `target_parameters` ---


class Model(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def run(function: Any, x: Tensor, grad: Tensor, adapter: list[Tensor]) -> list[Tensor]:
    """output, grad_input and the gradients of an adapter."""
    for p in adapter:
        p.grad = None
    given = x.clone().requires_grad_()
    output = function(given)
    output.backward(grad.view(output.shape))
    grads = [given.grad, *(p.grad for p in adapter)]
    return [output.detach(), *(one for one in grads if one is not None)]


def sums(kind: str, name: str, sequence_parallel: bool) -> None:
    """On a group of one rank: of the modules that compute sums, PEFT keeps what all threads share."""
    import peft

    tp, options = tpar.context(sequence_parallel), tpar.grads_of(name)
    x, grad = many_scales("per_row", T, IN, 0).bfloat16(), (many_scales("per_row", T, OUT, 2) * 1e-3).bfloat16()
    layer, plain = (tpar.RUN[kind][0](tpar.linear(OUT, IN, torch.bfloat16), tp, name, **options) for _ in range(2))
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["linear.weight"])
    model = peft.get_peft_model(Model(layer), lora)
    lora_a, lora_b = adapter = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in adapter:
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(0))
    (wrapper,) = (module for module in model.modules() if hasattr(module, "get_delta_weight"))
    with torch.no_grad():
        plain.weight.copy_(layer.weight + wrapper.get_delta_weight("default"))
    expected, found = run(plain, x, grad, []), run(model, x, grad, adapter)
    again = run(partial(checkpoint, model, use_reentrant=False), x, grad, adapter)
    for one, same in (*zip(found[:2], expected, strict=True), *zip(again, found, strict=True)):
        assert_bitwise(one, same)
    grad_weight = plain.weight.grad.float()
    for one, product in ((found[2], 2 * lora_b.T @ grad_weight), (found[3], 2 * grad_weight @ lora_a.T)):
        bound = 2e-2 * product.detach().abs().max().item()
        torch.testing.assert_close(one.float(), product, rtol=2e-2, atol=bound)
    assert layer.weight.grad is None


@pytest.mark.parametrize(
    ("kind", "name", "sequence_parallel"),
    [("column", "tensorwise", True), ("row", "rowwise", True), ("row", "blockwise", False)],
)
def test_a_sum_computes_as_a_weight_of_its_values(kind: str, name: str, sequence_parallel: bool) -> None:
    pytest.importorskip("peft")
    on_threads(1, sums, kind, name, sequence_parallel)
