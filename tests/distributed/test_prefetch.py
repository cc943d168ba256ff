"""Leaves of ZeRO-3 are prefetched, each before it is needed, under the bound on live weights that engines have by
themselves; under a low one they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed

LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
"""Weights of a decoder layer; nothing persists."""
NUM_LAYERS, NUM_STEPS = 8, 4
REUSE = 7 * LAYER // 2


@contextmanager
def defaults(live: int) -> Iterator[None]:
    """DeepSpeed's own bound is this many weights."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    field = DeepSpeedZeroConfig.model_fields["max_live_parameters"]
    before, field.default = field.default, live
    DeepSpeedZeroConfig.model_rebuild(force=True)
    try:
        yield
    finally:
        field.default = before
        DeepSpeedZeroConfig.model_rebuild(force=True)


def model_of(vocabulary: int, tied: bool, external: bool) -> Any:
    """A Llama; `external`: whose loss reads the head's weight and does not call the head, as with Liger's loss."""
    from torch.nn.functional import cross_entropy, linear
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class External(LlamaForCausalLM):
        def forward(self, input_ids: Any, labels: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = linear(hidden, self.lm_head.weight).float()
            return CausalLMOutputWithPast(loss=cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": NUM_LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=tied)
    return (External if external else LlamaForCausalLM)(config)


def on_demand(vocabulary: int, tied: bool, external: bool, bound: int | None) -> tuple[int, int]:
    """Leaves of the last step that were gathered only when they were needed, and those of all.

    Args:
        bound: named in the configuration; None: it is not, and DeepSpeed's own is one weight.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    from fp8_ds.engine import leaf_modules

    config = training.ds_config(3, {})
    config["zero_optimization"] |= {
        "leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]},
        "stage3_prefetch_bucket_size": LAYER,
        "stage3_max_reuse_distance": REUSE,
    } | ({} if bound is None else {"stage3_max_live_parameters": bound})
    model = model_of(vocabulary, tied, external)
    if external:
        deepspeed.zero.register_external_parameter(model, model.lm_head.weight)
    with pytest.MonkeyPatch.context() as patch, defaults(1):
        patch.setattr(leaf_modules, "_holds_head", lambda engine: external)
        engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    coordinator, counts = engine.optimizer.parameter_offload.get_param_coordinator(), [0, 0]
    stock = coordinator.fetch_sub_module

    def fetch(module: Any, forward: bool) -> None:
        if z3_leaf_module(module):
            counts[0] += any(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in module.parameters())
            counts[1] += 1
        stock(module, forward)

    coordinator.fetch_sub_module = fetch
    for step in range(NUM_STEPS):
        counts[:] = [0, 0]
        tokens = training.micro_batches(step, 1)[0].to(engine.device) % vocabulary
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.destroy()
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("vocabulary", "tied", "external"),
    [
        (256, False, False),  # the embedding is kept
        pytest.param(2048, False, False, marks=pytest.mark.slow),  # and is not, for the head is large
        pytest.param(2048, True, False, marks=pytest.mark.slow),
        (2048, False, True),  # both are held
        pytest.param(4096, False, True, marks=pytest.mark.slow),  # the head is
    ],
)
def test_every_leaf_is_prefetched_where_nobody_has_set_a_bound(
    ranks: Any, vocabulary: int, tied: bool, external: bool
) -> None:
    pytest.importorskip("transformers")
    assert ranks(1).run(on_demand, vocabulary, tied, external, None)[0] == (0, 2 * NUM_LAYERS)
    late, num = ranks(1).run(on_demand, vocabulary, tied, external, LAYER)[0]
    assert num == 2 * NUM_LAYERS and late >= NUM_LAYERS
