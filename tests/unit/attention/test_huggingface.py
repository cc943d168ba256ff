"""Our attention in Hugging Face models: the numbers of transformers' own, packing, padding, windows, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import (
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.masking_utils import create_causal_mask

from fp8_ds.attention.huggingface import RegisteredAttention, refuse_attention_of, refuse_backend, use_backend
from fp8_ds.config import AttentionConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.testing import sqnr_db

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def configured(backend: Any, *, hadamard: bool = False) -> AttentionConfig:
    """The "attention" block, also with a backend that the block does not take."""
    return AttentionConfig.model_construct(backend=backend, hadamard=hadamard)


def llama(backend: Any = None, *, hadamard: bool = False, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, attn_implementation="sdpa"))
    if backend is not None:
        refuse_attention_of(model, configured(backend))
        use_backend(nn.Sequential(model), backend, hadamard=hadamard)
    return model


def logits_and_gradient(model: Any, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=tokens, use_cache=False, **options).logits
    logits.float().log_softmax(-1)[..., 0].mean().backward()
    return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.parametrize(
    ("backend", "hadamard"), [("reference", False), ("fa3_fp8_emulated", False), ("fa3_fp8_emulated", True)]
)
def test_attention_through_the_registry_is_sdpa_and_in_fp8_near_it(backend: str, hadamard: bool) -> None:
    found = logits_and_gradient(llama(backend, hadamard=hadamard), TOKENS)
    for x, y in zip(found, logits_and_gradient(llama(), TOKENS), strict=True):
        if backend == "reference":
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
        else:
            assert 22 < sqnr_db(y, x) < 80


def test_positions_that_begin_again_and_lengths_of_a_collator_are_packed_sequences() -> None:
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    lengths: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    apart = [llama()(input_ids=part, use_cache=False).logits for part in TOKENS[:1].split((10, 14), 1)]
    for more in ({}, lengths):
        packed = llama("reference")(input_ids=TOKENS[:1], position_ids=positions, use_cache=False, **more).logits
        torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_attended_to(side: str) -> None:
    mask = torch.ones_like(TOKENS)
    mask[1, slice(0, 7) if side == "left" else slice(-7, None)] = 0
    real = mask.bool()
    ours = llama("reference")(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits[real]
    torch.testing.assert_close(ours, llama()(input_ids=TOKENS, attention_mask=mask).logits[real], rtol=1e-4, atol=1e-6)
    changed = torch.where(real, TOKENS, 63 - TOKENS)
    torch.testing.assert_close(llama("reference")(input_ids=changed, attention_mask=mask).logits[real], ours)


def test_sliding_windows_are_transformers_own() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5, attn_implementation="eager")))
    use_backend(models[0], "reference", hadamard=False)
    ours, theirs = (model(input_ids=TOKENS, use_cache=False).logits for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_generation_with_a_cache_is_that_of_the_whole_sequence() -> None:
    model = llama("reference").eval()
    first = model(input_ids=TOKENS[:, :20], use_cache=True)
    rest = model(input_ids=TOKENS[:, 20:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, model(input_ids=TOKENS, use_cache=False).logits[:, 20:], rtol=1e-4, atol=1e-6)


def test_a_cache_with_places_for_tokens_to_come_is_refused() -> None:
    """Without padding there is no mask, and its empty places would be keys like any other."""
    model = llama("reference").eval()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(2, 8)}
    stock, ours = (one.generate(TOKENS[:, :8], **options) for one in (llama().eval(), model))
    assert torch.equal(ours, stock)
    with pytest.raises(UnsupportedError, match="cache: expected one that grows"):
        model.generate(TOKENS[:, :8], cache_implementation="static", **options)


@pytest.mark.parametrize("length", [24, 9])
def test_a_decoder_as_long_as_its_padded_encoder_keeps_all_its_queries(length: int) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64, "dropout": 0.0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    torch.manual_seed(0)
    model = BartModel(BartConfig(**sizes, **heads, attn_implementation="eager"))
    mask = torch.ones_like(TOKENS)
    mask[0, 15:] = mask[1, :4] = 0

    def outputs() -> list[Tensor]:
        model.zero_grad()
        found = model(input_ids=TOKENS, attention_mask=mask, decoder_input_ids=TOKENS.flip(0)[:, :length])
        found.last_hidden_state[..., 0].sum().backward()
        return [found.last_hidden_state.detach(), model.decoder.layers[0].encoder_attn.q_proj.weight.grad.clone()]

    stock = outputs()
    use_backend(model, "reference", hadamard=False)
    for ours, theirs in zip(outputs(), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    use_backend(model, "fa3_fp8_emulated", hadamard=False)
    assert sqnr_db(stock[0], outputs()[0]) > 30


def test_a_window_that_only_the_mask_has_is_refused_where_it_hides_keys() -> None:
    model = PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=20))
    use_backend(model, "reference", hadamard=False)
    model(input_ids=TOKENS[:, :20], use_cache=False)
    with pytest.raises(UnsupportedError, match=r"sliding_window: expected it as an argument .* one of 20 keys"):
        model(input_ids=TOKENS, use_cache=False)


def test_a_buffer_of_positions_is_read_again_once_it_is_filled_anew() -> None:
    model, positions = llama("reference"), torch.arange(24)[None]
    whole = model(input_ids=TOKENS[:1], position_ids=positions, use_cache=False).logits
    positions[0, 10:] -= 10
    packed = model(input_ids=TOKENS[:1], position_ids=positions, use_cache=False).logits
    again = model(input_ids=TOKENS[:1], position_ids=positions.clone(), use_cache=False).logits
    torch.testing.assert_close(packed, again, rtol=0, atol=0)
    assert not torch.allclose(packed, whole)
    both = model(input_ids=TOKENS, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(both[:1], packed, rtol=1e-5, atol=1e-6)


def test_a_graph_that_meets_packed_positions_stops() -> None:
    """It cannot look at them on the host, and must not attend across sequences."""
    function = RegisteredAttention("reference", False)
    module = nn.Module()
    x = torch.randn(1, 2, 24, 16)
    compiled = torch.compile(
        lambda positions: function(module, x, x, x, None, position_ids=positions)[0], backend="aot_eager"
    )
    compiled(torch.arange(24)[None])
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(torch.cat([torch.arange(10), torch.arange(14)])[None])


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 24, "layer_types": ["full_attention"] * 3}], ids=["plain", "kinds"]
)
def test_layers_that_are_compiled_one_by_one_share_a_graph(changes: dict[str, Any]) -> None:
    """As under ZeRO-3. A graph for each number of a layer would be more than torch's limit, and the rest in eager."""
    model = llama("fa3_fp8_emulated", num_hidden_layers=3, **changes)
    torch._dynamo.reset()  # other models have compiled the same code
    graphs = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        logits_and_gradient(model, TOKENS)
    assert graphs.frame_count == 1


def test_what_it_does_not_do_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"dropout: expected 0\.0, got 0\.5"):
        model = llama(attention_dropout=0.5)
        use_backend(model, "reference", hadamard=False)
        model.train()(input_ids=TOKENS)
    with pytest.raises(UnsupportedError, match=r"attention mask: expected \[batch, sequence\] = \(2, 24\)"):
        llama("reference")(input_ids=TOKENS, attention_mask=torch.ones(2, 1, 24, 24))
    with pytest.raises(UnsupportedError, match="softcap: expected none"):
        x = torch.randn(1, 2, 4, 16)
        RegisteredAttention("reference", False)(nn.Module(), x, x, x, None, softcap=30.0)
    with pytest.raises(UnsupportedError, match="sinks: expected none"):
        RegisteredAttention("reference", False)(nn.Module(), x, x, x, None, sinks=x)
    model = llama("reference")
    with pytest.raises(UnsupportedError, match="attention mask: expected causal"):
        create_causal_mask(
            config=model.config, inputs_embeds=torch.zeros(2, 24, 64), attention_mask=None, past_key_values=None,
            or_mask_function=lambda batch, head, i, j: j < 3,
        )  # fmt: skip


def gpt2(dropout: float) -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, attn_pdrop=dropout))


@pytest.mark.parametrize(
    ("make", "backend", "hadamard", "said"),
    [
        (lambda: nn.Linear(4, 4), "reference", False, r"fp8\.attention\.backend: expected null"),
        (lambda: nn.MultiheadAttention(8, 2), "reference", False, r"fp8\.attention\.backend: expected null"),
        (lambda: gpt2(0.2), "reference", False, r"expected null with dropout in attention, got \"reference\" and 0\.2"),
        (lambda: llama(head_dim=24), "fa3_fp8", False, "heads of 24 and values of 24, got .* a multiple of 16"),
        (lambda: llama(head_dim=24), "fa3_fp8_emulated", True, r"fp8\.attention\.hadamard: head dim: .* got 24"),
        (lambda: gpt2(0.0), "reference", False, None),
        (lambda: llama(head_dim=24), "fa3", False, None),
        (lambda: llama(head_dim=24), "fa3_fp8_emulated", False, None),
    ],
)
def test_models_whose_attention_does_not_fit_are_refused_at_start(
    make: Any, backend: str, hadamard: bool, said: Any
) -> None:
    with nullcontext() if said is None else pytest.raises(UnsupportedError, match=said):
        refuse_attention_of(make(), configured(backend, hadamard=hadamard))
    with pytest.raises(UnsupportedError, match="FlashAttention-3: expected a Hopper GPU"):
        refuse_backend("fa3", CPU)
