"""A Hugging Face Llama with fused producers trains as one without, under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.distributed

NUM_STEPS = 10
LEAF = {"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}}


class Llama(nn.Module):
    """transformers' Llama under the interface of the training loop."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=training.VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run(
    stage: int,
    recipe: str,
    activations: dict[str, Any],
    zero: dict[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
    **overrides: Any,
) -> dict[str, Any]:
    """Losses, which modules are fused, and of one more forward how often an operator of ours ran and how many MLPs were
    one function."""
    import deepspeed

    import fp8_ds  # noqa: F401
    from fp8_ds.nn.fused import mlp

    torch.manual_seed(0)
    config = training.ds_config(stage, {"linear": {"recipe": recipe}, "activations": activations}, **overrides)
    config["zero_optimization"].update(zero or {})
    model = Llama()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses = training.train(engine, num_steps)
    spy = patch.object(mlp, "swiglu_mlp", wraps=mlp.swiglu_mlp)
    with spy as one_function, profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine(training.micro_batches(0, 1)[0])
    calls = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("fp8_ds::")}
    fused = [name for name, module in engine.module.named_modules() if type(module).__name__.startswith("Fp8Llama")]
    training.destroy(engine)
    return {"losses": losses, "calls": calls, "fused": fused, "one_function": one_function.call_count}


# How x is cast: in each of two layers once for q, k and v, once for gate and up, once for o and once for down.
CASTS = {
    "tensorwise": "fp8_ds::quantize_and_transpose_tensorwise",
    "delayed": "fp8_ds::quantize_and_transpose_delayed",
    "rowwise": "fp8_ds::quantize_rowwise",
    "rowwise_with_gw_hp": "fp8_ds::quantize_rowwise",
    "blockwise": "fp8_ds::quantize_blockwise",
}
NUM_CASTS = 2 * 4


@pytest.fixture(scope="module")
def noise(ranks: Any) -> float:
    """Largest loss difference that summing gradients of micro-batches in fp32 instead of bf16 makes."""
    plain, fp32 = (
        ranks(2).run(run, 2, "tensorwise", {}, gradient_accumulation_steps=2, data_types=data_types)[0]["losses"]
        for data_types in ({}, {"grad_accum_dtype": "fp32"})
    )
    return difference(plain, fp32)


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def check(results: list[dict[str, Any]], recipe: str, fused: bool, one_function: bool = False) -> list[float]:
    """The losses, equal on all ranks; casts and modules are as expected."""
    losses: list[float] = results[0]["losses"]
    for result in results:
        assert result["losses"] == losses
        assert len(result["fused"]) == 6 * fused
        assert result["one_function"] == 2 * one_function
        is_cast_by_producers = fused and recipe != "blockwise"
        assert result["calls"][CASTS[recipe]] == (2 if is_cast_by_producers else NUM_CASTS)
    return losses


COVERING = [(2, "delayed")]
OTHERS = [(stage, recipe) for stage in (2, 3) for recipe in CASTS if (stage, recipe) not in COVERING]


@pytest.mark.parametrize(
    ("stage", "recipe"), [*COVERING, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_fused_losses_are_the_unfused_ones_within_bf16s_noise(
    ranks: Any, stage: int, recipe: str, noise: float
) -> None:
    """Also under ZeRO-3, whose hooks hand each module an alias of its own, no layer casts what another has cast. There
    the linears of an MLP are called, for their hooks; else it is one function."""
    plain = check(ranks(2).run(run, stage, recipe, {}), recipe, fused=False)
    fused = check(ranks(2).run(run, stage, recipe, {"fused": True}), recipe, fused=True, one_function=stage == 2)
    assert noise > 0
    assert difference(plain, fused) <= 3 * noise, (difference(plain, fused), noise)
    assert plain[-1] < 0.9 * plain[0]


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("delayed", marks=pytest.mark.slow)])
def test_an_mlp_inside_a_leaf_of_zero_3_is_one_function_with_the_bits_of_its_linears(ranks: Any, recipe: str) -> None:
    by_linears = check(ranks(2).run(run, 3, recipe, {"fused": True}, num_steps=4), recipe, fused=True)
    results = ranks(2).run(run, 3, recipe, {"fused": True}, LEAF, num_steps=4)
    assert check(results, recipe, fused=True, one_function=True) == by_linears


def test_inputs_kept_in_fp8_train_as_well(ranks: Any) -> None:
    plain = ranks(2).run(run, 3, "tensorwise", {})[0]
    kept = ranks(2).run(run, 3, "tensorwise", {"fused": True, "nonlinear": "fp8"})[0]
    assert kept["calls"]["fp8_ds::quantize_blockwise"] == 2 * 4  # x of two norms, gate and up, in two layers
    assert difference(plain["losses"], kept["losses"]) <= 0.02
    assert kept["losses"][-1] < 0.9 * kept["losses"][0]
