"""A linear cut over tensor-parallel ranks whose weight is a sum with an adapter: PEFT's `target_parameters`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import tensor_parallel as tpar
import torch
from support.inputs import many_scales
from support.memory import freeing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8_ds.nn.linear.fp8_linear import check_input
from fp8_ds.testing import assert_bitwise

pytestmark = pytest.mark.distributed

T, IN, OUT = 128, 256, 512
MAKE = {"column": tpar.column_fp8, "row": tpar.row_fp8}
CASES = [
    pytest.param(kind, name, sequence_parallel, id=f"{kind} {name} sp={sequence_parallel}")
    for kind, sequence_parallel, name in (
        ("column", True, "tensorwise"),
        ("row", True, "rowwise"),
        ("row", False, "blockwise"),
    )
]


class Model(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def run(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, adapter: list[Tensor]) -> list[Tensor]:
    """output, grad_input and the gradients of an adapter."""
    for p in adapter:
        p.grad = None
    given = x.clone().requires_grad_()
    output = function(given)
    output.backward(grad.view(output.shape))
    grads = [given.grad, *(p.grad for p in adapter)]
    return [output.detach(), *(one for one in grads if one is not None)]


def sums(kind: str, name: str, sequence_parallel: bool) -> None:
    """Of one kind of layer: what it computes, what of the sum is left after its forward, and what checkpoints give."""
    import peft

    tp = tpar.context(sequence_parallel)
    given = {"backend": "reference", "grad_dtype": "e4m3"} if name == "blockwise" else {}
    x = many_scales("per_row", T, IN, 0).to(tpar.device(), torch.bfloat16)
    grad = (many_scales("per_row", T, OUT, 2) * 1e-3).to(tpar.device(), torch.bfloat16)
    is_column = kind == "column"
    x = tpar.own_rows(tp, x) if is_column else tpar.own_cols(tp, x)
    grad = tpar.own_cols(tp, grad) if is_column else tpar.own_rows(tp, grad) if sequence_parallel else grad

    layer = MAKE[kind](tpar.linear(OUT, IN, torch.bfloat16), tp, name, **given)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["linear.weight"])
    model = peft.get_peft_model(Model(layer), lora)
    lora_a, lora_b = adapter = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in adapter:
        nn.init.normal_(p, std=0.3)
    (wrapper,) = (module for module in model.modules() if hasattr(module, "get_delta_weight"))
    plain = MAKE[kind](tpar.linear(OUT, IN, torch.bfloat16), tp, name, **given)
    with torch.no_grad():
        plain.weight.copy_(layer.weight + wrapper.get_delta_weight("default"))

    seen: list[weakref.ref[Tensor]] = []

    def checked(given: Tensor, weight: Tensor) -> None:
        seen.append(weakref.ref(weight))
        check_input(given, weight)

    want = run(plain, x, grad, [])
    with patch("fp8_ds.tp.linears.check_input", checked):
        found = run(freeing(model, seen), x, grad, adapter)
        again = [
            run(freeing(partial(checkpoint, model, use_reentrant=one), seen), x, grad, adapter) for one in (False, True)
        ]
    assert len(seen) == 1 + 2 + 2
    for other in again:
        for one, expected in zip(other, found, strict=True):
            assert_bitwise(one, expected)
    for one, expected in zip(found[:2], want, strict=True):
        assert_bitwise(one, expected)
    grad_weight = plain.weight.grad.float()
    for one, expected in ((found[2], 2 * lora_b.T @ grad_weight), (found[3], 2 * grad_weight @ lora_a.T)):
        bound = 2e-2 * expected.detach().abs().max().item()
        torch.testing.assert_close(one.float(), expected, rtol=2e-2, atol=bound)
    assert layer.weight.grad is None


@pytest.mark.parametrize(("kind", "name", "sequence_parallel"), CASES)
def test_a_sum_computes_as_a_weight_of_its_values_and_is_not_kept_until_the_backward(
    ranks: Any, kind: str, name: str, sequence_parallel: bool
) -> None:
    """A checkpoint frees what the graph has saved, and nothing else."""
    pytest.importorskip("peft")
    ranks(2).run(sums, kind, name, sequence_parallel)
