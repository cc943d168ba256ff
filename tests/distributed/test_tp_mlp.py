"""A tensor-parallel SwiGLU MLP as one function: the bits and collectives of its linears."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import tensor_parallel as tpar
import test_tp_llama as base
import torch
import torch.distributed as dist
import training
from support.collectives import count_collectives
from support.ranks import on_ranks
from torch import Tensor, nn

from fp8_ds.config import ActivationsConfig, TensorParallelConfig
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp import LLAMA, configure, mlp, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")

NAMES = ("gate_proj", "up_proj", "down_proj")


def fused_llama(
    recipe: str = "tensorwise", nonlinear: Any = "bf16", hooked: bool = False, bias: bool = True, **settings: Any
) -> tuple[nn.Module, Any]:
    """Over all ranks; `hooked`: its MLPs' linears are called by themselves."""
    model = base.llama(torch.bfloat16, bias=bias)
    tp = parallelize(model, LLAMA, tpar.groups(dist.get_world_size()).tp_group)
    configure(model, TensorParallelConfig(**settings), recipe)
    base.to_fp8(model, recipe)
    fuse_producers(model, ActivationsConfig(fused=True, nonlinear=nonlinear))
    if hooked:
        for layer in model.model.model.layers:
            layer.mlp.gate_proj.register_forward_hook(lambda *_: None)
    return model, tp


def spied(run: Any) -> tuple[Any, int]:
    """(what it gives, how many MLPs were one function)."""
    calls = []
    stock = mlp._apply
    with patch.object(mlp, "_apply", lambda *args: calls.append(1) or stock(*args)):
        return run(), len(calls)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss = model(training.micro_batches(0, 1)[0])
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def frozen_like(model: nn.Module, frozen: tuple[str, ...]) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(frozen))
    return model


def as_linears(settings: dict[str, Any], frozen: tuple[str, ...]) -> None:
    one, tp = fused_llama(**settings)
    found, num_calls = spied(lambda: gradients(frozen_like(one, frozen)))
    assert num_calls == base.LAYERS and len(tp.inputs) == 0
    linears, _ = fused_llama(hooked=True, **settings)
    expected, num_calls = spied(lambda: gradients(frozen_like(linears, frozen)))
    assert num_calls == 0
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None and name.endswith(frozen)
        else:
            assert_bitwise(found[name], grad)


@pytest.mark.parametrize(
    ("world_size", "settings", "frozen"),
    [
        (2, {}, ()),
        (4, {"bias": False}, ()),
        (2, {}, ("gate_proj.weight",)),
        (2, {}, ("up_proj.weight", "down_proj.weight", "up_proj.bias")),
        (2, {}, tuple(f"{name}.weight" for name in NAMES)),
    ],
    ids=str,
)
def test_one_function_has_the_bits_of_its_linears(
    ranks: Any, world_size: int, settings: dict[str, Any], frozen: tuple[str, ...]
) -> None:
    ranks(world_size).run(as_linears, settings, frozen)


def kept_in_fp8() -> dict[str, float]:
    (one, _), (linears, _) = fused_llama(nonlinear="fp8"), fused_llama(nonlinear="fp8", hooked=True)
    found, expected = gradients(one), gradients(linears)
    assert_bitwise(found["loss"], expected["loss"])
    assert any(not torch.equal(found[name], expected[name]) for name in found)  # the product is made again
    return {name: sqnr_db(expected[name], found[name]) for name in found}


def test_with_inputs_kept_in_fp8_gradients_are_as_close_as_their_rounding(ranks: Any) -> None:
    for found in ranks(2).run(kept_in_fp8):
        assert min(found.values()) > 20, found


@on_ranks(2)
def test_activation_checkpointing_changes_no_bit() -> None:
    found = []
    for use_reentrant in (None, False, True):
        model, _ = fused_llama()
        if use_reentrant is not None:
            model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        found.append(gradients(model.train()))
    for other in found[1:]:
        for name, grad in found[0].items():
            assert_bitwise(other[name], grad)


def traffic(hooked: bool) -> list[tuple[Any, Any]]:
    model, tp = fused_llama(hooked=hooked, bias=False)
    block = model.model.model.layers[0].mlp
    x = torch.randn(1, 64, 64, dtype=torch.bfloat16).requires_grad_()
    block(x).sum().backward()
    with count_collectives() as forward:
        output = block(x)
    with count_collectives() as backward:
        output.sum().backward()
    return [(count.calls, count.num_bytes) for count in (forward, backward)] + [(tp.num_bytes_gathered, 0)]


def test_its_collectives_and_bytes_are_those_of_its_linears(ranks: Any) -> None:
    for found, expected in itertools.zip_longest(*(ranks(2).run(traffic, hooked) for hooked in (False, True))):
        assert found == expected
        assert found[0][0] == found[1][0] == {"all_gather": 1, "reduce_scatter": 1}
