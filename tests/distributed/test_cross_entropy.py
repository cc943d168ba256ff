"""A Hugging Face Llama with Liger's loss trains as with its own, in every stage. CPU: a stand-in for Liger's kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from support.models import Llama
from torch import Tensor

from fp8_ds.engine.liger_loss import calls_with_chunk_mem_const

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytestmark = pytest.mark.distributed

NUM_STEPS = 4
TOLD: list[int] = []
"""The sizes of chunks that the stand-in was called with."""


class FusedLossInTorch(torch.autograd.Function):
    """As Liger's: one number from hidden states and weight, gradients made in the forward, no weight kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        with torch.enable_grad():
            x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(x, w).float(), target, reduction=reduction)
            ctx.save_for_backward(*torch.autograd.grad(loss, (x, w)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None


@contextmanager
def kernel_in_torch() -> Iterator[None]:
    """While inside, Liger's loss runs on a CPU."""
    import liger_kernel.transformers.functional as functional

    from fp8_ds.engine.patches import RECORD

    stock = functional.liger_fused_linear_cross_entropy
    signature = inspect.signature(stock)

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        TOLD.append(given.arguments.get("chunk_mem_const", 1))
        names = ("input", "weight", "target", "reduction")
        return FusedLossInTorch.apply(*(given.arguments[name] for name in names))

    functools.update_wrapper(stand_in, stock)
    functional.liger_fused_linear_cross_entropy = stand_in
    TOLD.clear()
    try:
        yield
    finally:
        RECORD.patches[:] = [patch for patch in RECORD.patches if patch[0] is not functional]
        functional.liger_fused_linear_cross_entropy = stock


def run(
    config: dict[str, Any],
    has_liger: bool = False,
    tied: bool = False,
    compiled: bool = False,
    num_steps: int = NUM_STEPS,
    num_layers: int = 2,
) -> dict[str, Any]:
    """Losses of training, then that of an evaluation, and logits; what was called, gathered and patched for it."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Llama(num_hidden_layers=num_layers, tie_word_embeddings=tied).model
    if has_liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            model=model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, swiglu=False
        )
    found: dict[str, Any] = {"losses": [], "logits_are_none": []}
    with kernel_in_torch():
        engine = training.start(model, config)
        if compiled:
            engine.compile(backend="eager")
        for step in range(num_steps):
            tokens = training.micro_batches(step, dist.get_world_size())[dist.get_rank()]
            tokens[0, 5] = training.VOCABULARY - 1
            output = engine(input_ids=tokens, labels=tokens.masked_fill(tokens == training.VOCABULARY - 1, -100))
            engine.backward(output.loss)
            engine.step()
            found["losses"].append(float(output.loss))
            found["logits_are_none"].append(output.logits is None)
        found["told"] = list(TOLD)
        found["gathered"] = engine.fp8_report()["gathered_bytes"]
        engine.eval()
        with torch.no_grad():
            evaluated = engine(input_ids=tokens, labels=tokens)
            engine.train()
            found["unlabelled"] = engine(input_ids=tokens).logits.float().clone()
        engine.train()
    found["patched"] = [name for name, module in model.named_modules() if "forward" in vars(module)]
    found |= {"loss": float(evaluated.loss), "logits": evaluated.logits.float().clone()}
    found["head"] = training.full_masters(engine)["model.embed_tokens.weight" if tied else "lm_head.weight"]
    training.destroy(engine)
    return found


def compare(stock: dict[str, Any], liger: dict[str, Any]) -> None:
    """Bit for bit the same but for the logits in training; the stand-in rounds where stock code does."""
    assert stock["told"] == [] and not any(stock["logits_are_none"]) and stock["patched"] == []
    assert len(liger["told"]) == len(liger["losses"]) and all(liger["logits_are_none"]) and liger["patched"] == [""]
    for name in ("gathered", "losses", "loss"):
        assert stock[name] == liger[name]
    for name in ("logits", "unlabelled", "head"):
        assert torch.equal(stock[name], liger[name]), name


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_is_told_the_size_of_its_chunks_for_this_engines_model_alone(ranks: Any, compiled: bool) -> None:
    """Also where ZeRO-3 has changed the head's weight, and a graph hands it over, on each rank by itself."""
    if not calls_with_chunk_mem_const():
        pytest.skip("this liger-kernel takes no chunk_mem_const")
    chunks = {"activations": {"cross_entropy_chunk_mem_const": 8}}
    for fp8, size in ((chunks, 8), ({}, 1)):
        config = training.ds_config(3, fp8)
        for one in ranks(2).run(run, config, has_liger=True, compiled=compiled, num_steps=3, num_layers=1):
            assert one["told"] == [size] * 3


STATES = {"optimizer": {"states": "fp8", "master": "e4m11", "release": True}}


@pytest.mark.parametrize(
    ("num_ranks", "stage", "fp8", "tied"),
    [
        pytest.param(2, 2, {}, False, marks=pytest.mark.slow),
        (2, 3, {}, True),
        (1, 1, STATES, False),
        pytest.param(
            2, 3, {"linear": {"recipe": "rowwise"}, "activations": {"fused": True}}, False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_losses_weights_and_evaluation_are_those_of_stock(
    ranks: Any, num_ranks: int, stage: int, fp8: dict[str, Any], tied: bool
) -> None:
    config = training.ds_config(stage, fp8, gradient_clipping=0.0 if fp8 is STATES else 1.0)
    stock, liger = (ranks(num_ranks).run(run, config, has_liger=one, tied=tied) for one in (False, True))
    for one, other in zip(stock, liger, strict=True):
        compare(one, other)
    assert stock[0]["losses"][-1] < stock[0]["losses"][0]
