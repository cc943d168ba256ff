"""A Hugging Face Llama with Liger's loss trains as with its own, in every stage. CPU: a stand-in for Liger's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor

from fp8_ds.engine.liger_loss import calls_with_chunk_mem_const

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytestmark = pytest.mark.distributed

NUM_STEPS = 8
TOLD: list[int] = []
"""The sizes of chunks that the stand-in was called with."""


class FusedLossInTorch(torch.autograd.Function):
    """As Liger's: one number from hidden states and weight, gradients made in the forward, no weight kept."""

    num_calls = 0

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        FusedLossInTorch.num_calls += 1
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

    def stand_in(
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Any = None,
        ce_weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        softcap: Any = None,
        accum_dtype: Any = None,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        chunk_mem_const: int = 1,
    ) -> Tensor:
        assert bias is None and ce_weight is None and softcap is None and accum_dtype is None
        assert ignore_index == -100 and not return_token_accuracy and not return_predicted_tokens
        TOLD.append(chunk_mem_const)
        return FusedLossInTorch.apply(input, weight, target, reduction)

    stock = functional.liger_fused_linear_cross_entropy
    functional.liger_fused_linear_cross_entropy = stand_in
    FusedLossInTorch.num_calls = 0
    TOLD.clear()
    try:
        yield
    finally:
        RECORD.patches[:] = [patch for patch in RECORD.patches if patch[0] is not functional]
        functional.liger_fused_linear_cross_entropy = stock


def llama(tied: bool, num_layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=training.VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
    )


def run(
    config: dict[str, Any],
    has_liger: bool = False,
    tied: bool = False,
    compiled: bool = False,
    num_steps: int = NUM_STEPS,
    num_layers: int = 2,
) -> dict[str, Any]:
    """Losses of training, then that of an evaluation, and logits; what was called, gathered and patched for it."""
    import deepspeed
    import torch.distributed as dist

    import fp8_ds  # noqa: F401

    model = llama(tied, num_layers)
    if has_liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            model=model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, swiglu=False
        )
    with kernel_in_torch():
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        if compiled:
            engine.compile(backend="eager")
        losses, logits = [], []
        for step in range(num_steps):
            tokens = training.micro_batches(step, dist.get_world_size())[dist.get_rank()]
            tokens[0, 5] = training.VOCABULARY - 1
            output = engine(input_ids=tokens, labels=tokens.masked_fill(tokens == training.VOCABULARY - 1, -100))
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss))
            logits.append(output.logits is None)
        calls = FusedLossInTorch.num_calls
        gathered = engine.fp8_report()["gathered_bytes"]
        engine.eval()
        with torch.no_grad():
            evaluated = engine(input_ids=tokens, labels=tokens)
            engine.train()
            unlabelled = engine(input_ids=tokens)
        engine.train()
    patched = [name for name, module in model.named_modules() if "forward" in vars(module)]
    result = {
        "losses": losses,
        "logits_are_none": logits,
        "calls": calls,
        "told": list(TOLD),
        "gathered": gathered,
        "patched": patched,
        "loss": float(evaluated.loss),
        "logits": evaluated.logits.float().clone(),
        "unlabelled": unlabelled.logits.float().clone(),
        "head": training.full_masters(engine)["model.embed_tokens.weight" if tied else "lm_head.weight"],
    }
    training.destroy(engine)
    return result


def compare(stock: dict[str, Any], liger: dict[str, Any]) -> None:
    """Bit for bit the same but for the logits in training; the stand-in rounds where stock code does."""
    assert stock["calls"] == 0 and not any(stock["logits_are_none"]) and stock["patched"] == []
    assert liger["calls"] == len(liger["losses"]) > 0 and all(liger["logits_are_none"]) and liger["patched"] == [""]
    assert stock["gathered"] == liger["gathered"]
    assert stock["losses"] == liger["losses"]
    assert stock["loss"] == liger["loss"]
    for name in ("logits", "unlabelled", "head"):
        assert torch.equal(stock[name], liger[name]), name


def test_losses_weights_and_evaluation_are_those_of_stock(ranks: Any) -> None:
    stock = ranks(2).run(run, training.ds_config(2, {}))
    liger = ranks(2).run(run, training.ds_config(2, {}), has_liger=True)
    for one, other in zip(stock, liger, strict=True):
        compare(one, other)
    assert stock[0]["losses"][-1] < 0.9 * stock[0]["losses"][0]


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
CASES: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    (2, 3, {}, {"tied": True}),
    (1, 1, STATES, {}),
    (2, 3, {"linear": {"recipe": "rowwise"}, "activations": {"fused": True}}, {}),
]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "fp8", "how"),
    CASES,
    ids=str,
)
def test_it_is_the_same_with_other_settings(
    ranks: Any, num_ranks: int, stage: int, fp8: dict[str, Any], how: dict[str, Any]
) -> None:
    overrides: dict[str, Any] = {"gradient_clipping": 0.0} if "optimizer" in fp8 else {}
    config = training.ds_config(stage, fp8, **overrides)
    stock, liger = (ranks(num_ranks).run(run, config, has_liger=one, **how, num_steps=4) for one in (False, True))
    for one, other in zip(stock, liger, strict=True):
        compare(one, other)
