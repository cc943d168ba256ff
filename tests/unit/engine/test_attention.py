"""The line that says which attention kernel runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fp8_ds.attention.packages import older_cudnn, prefers_cudnn
from fp8_ds.engine.attention import describe_attention

CPU = torch.device("cpu")
AS_IT_IS = "fp8: attention: as the model has it"


def llama(attention: str = "sdpa", **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 256,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}, attn_implementation=attention))


def test_sdpa_is_named_with_what_torch_picks_here() -> None:
    line = "fp8: attention: SDPA, which picks FlashAttention here (bfloat16, head dim 64, 4/2 heads, causal)"
    assert describe_attention(llama(), CPU) == line
    with sdpa_kernel(SDPBackend.MATH):
        assert describe_attention(llama(), CPU) == line.replace("FlashAttention", "plain matmuls and a softmax")


def test_a_module_around_the_model_does_not_hide_it() -> None:
    assert describe_attention(nn.Sequential(llama()), CPU) == describe_attention(llama(), CPU)


def test_sdpa_is_recognised_under_another_name() -> None:
    AttentionInterface.register("maskless", sdpa_attention_forward)
    assert describe_attention(llama("maskless"), CPU) == (
        'fp8: attention: SDPA as "maskless", which picks FlashAttention here (bfloat16, head dim 64, 4/2 heads, causal)'
    )


def test_eager_is_named_with_the_remedy() -> None:
    line = describe_attention(llama("eager"), CPU)
    assert line.startswith("fp8: attention: eager, ") and 'attn_implementation="sdpa"' in line


def test_another_function_is_named_as_transformers_does() -> None:
    model = llama()
    model.config._attn_implementation = "flash_attention_3"
    assert describe_attention(model, CPU) == "fp8: attention: flash_attention_3"


def test_what_the_choice_depends_on_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, enable_gqa: bool) -> int:
        asked.append((q.shape, k.shape, v.shape, q.dtype, mask, dropout, causal, enable_gqa))
        assert q.requires_grad and q.stride(-1) == 1
        assert sum(t.numel() * t.element_size() for t in (q, k, v)) <= 1 << 20
        return int(SDPBackend.CUDNN_ATTENTION)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    line = describe_attention(llama(attention_dropout=0.5), CPU)
    assert line == (
        "fp8: attention: SDPA, which picks cuDNN here (bfloat16, head dim 64, 4/2 heads, causal, dropout 0.5)"
    )
    assert asked == [((1, 4, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64), torch.bfloat16, None, 0.5, True, True)]
    describe_attention(llama(hidden_size=64, num_attention_heads=2, head_dim=512, num_key_value_heads=1), CPU)
    assert asked[1][1][1] == 2 and asked[1][-1] is False  # transformers repeats such heads itself
    many = llama(num_hidden_layers=1, hidden_size=512, num_attention_heads=256, num_key_value_heads=256, head_dim=128)
    describe_attention(many, CPU)
    assert asked[2][0][2] == 5


class Cudnn:
    """Stands for torch's binding: it was built with 9.19."""

    def __init__(self, *loaded: int) -> None:
        self.loaded = loaded

    def getRuntimeVersion(self) -> tuple[int, ...]:
        return self.loaded

    def getCompileVersion(self) -> tuple[int, ...]:
        return 9, 19, 0


def test_an_older_cudnn_than_torchs_is_told_where_another_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cudnn", Cudnn(9, 14, 0), raising=False)
    assert "cuDNN" not in describe_attention(llama(), CPU), "it would not have taken cuDNN here"
    monkeypatch.setattr("fp8_ds.engine.attention.prefers_cudnn", lambda device: True)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, chosen=backend, **kwargs: int(chosen))
        line = describe_attention(llama(), CPU)
        told = "not cuDNN: cuDNN 9.14.0 is loaded, torch was built with 9.19.0" in line and "CUDNN_HOME" in line
        assert told == (backend == SDPBackend.FLASH_ATTENTION)
    assert older_cudnn() == "cuDNN 9.14.0 is loaded, torch was built with 9.19.0"
    for newer in ((9, 20, 1), (9, 19, 0), (10, 0, 0)):
        monkeypatch.setattr(torch._C, "_cudnn", Cudnn(*newer))
        assert older_cudnn() is None
    monkeypatch.delattr(torch._C, "_cudnn")
    assert older_cudnn() is None, "a torch without cuDNN"


@pytest.mark.parametrize(("capability", "prefers"), [((9, 0), True), ((10, 0), True), ((8, 0), False), ((8, 9), False)])
def test_cudnn_is_preferred_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], prefers: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert prefers_cudnn(torch.device("cuda", 0)) is prefers
    assert not prefers_cudnn(CPU)


def test_kinds_that_differ_are_all_named() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=32))
    bert = BertModel(BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=32))
    line = describe_attention(nn.ModuleList((gpt2, bert)), CPU)
    first, second = line.split("; ")
    assert first.endswith("here (bfloat16, head dim 16, 4 heads, causal, dropout 0.1)")
    assert second.endswith("here (bfloat16, head dim 16, 4 heads, not causal, dropout 0.1)")
    five = nn.ModuleList(llama(num_hidden_layers=1, head_dim=dim) for dim in (16, 32, 48, 64, 80))
    assert describe_attention(five, CPU).endswith("; and 2 other kinds")


class Odd(nn.Module):
    """Attributes with the names of transformers' modules, and nothing behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": "sdpa"})()
        self.is_causal = True


@pytest.mark.parametrize("model", [nn.Linear(4, 4), Odd(), nn.MultiheadAttention(8, 2)], ids=lambda m: type(m).__name__)
def test_other_models_have_their_own(model: nn.Module) -> None:
    assert describe_attention(model, CPU) == AS_IT_IS


class Own(nn.Module):
    """Attention of one's own, as examples/deepspeed has it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.mask, self.dropout = None, 0.0
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=p, is_causal=self.mask is None)


class Masked(Own):
    def forward(self, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = True) -> Any:  # type: ignore[override]
        if self.head_dim > 8:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return q


@pytest.mark.parametrize(
    ("attributes", "dims"),
    [
        ({"head_dim": 96}, "96"),
        ({"head_size": 80, "n_embd": 64, "n_head": 4}, "80"),
        ({"n_embd": 768, "n_head": 12}, "64"),
        ({"d_model": 512, "num_heads": 16}, "32"),
        ({"config": BertConfig(hidden_size=48, num_attention_heads=2)}, "24"),
        ({"head_dim": 192, "v_head_dim": 128}, "192/128"),
        ({"head_dim": True, "dim": 100, "n_heads": 3}, "64 or 128"),
        ({}, "64 or 128"),
    ],
    ids=str,
)
def test_of_a_call_in_the_source_of_a_forward_the_kernel_is_named(attributes: dict[str, Any], dims: str) -> None:
    kernel = "plain matmuls and a softmax" if "/" in dims else "FlashAttention"
    line = f"fp8: attention: SDPA, which picks {kernel} here (bfloat16, head dim {dims}, causal)"
    assert describe_attention(nn.ModuleList(Own(**attributes) for _ in range(3)), CPU) == line


def test_of_a_call_in_a_source_what_the_choice_depends_on_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, enable_gqa: bool) -> int:
        masked = None if mask is None else (mask.shape, mask.dtype)
        asked.append((q.shape[-1], k.shape[1] < q.shape[1], v.shape[-1], q.dtype, masked, dropout, causal, enable_gqa))
        return int(SDPBackend.EFFICIENT_ATTENTION if masked or q.shape[-1] == 128 else SDPBackend.CUDNN_ATTENTION)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    own = describe_attention(Own(dropout=0.5), CPU)
    assert own == (
        "fp8: attention: SDPA, which picks cuDNN here (bfloat16, head dim 64, causal, dropout 0.5), "
        "memory-efficient attention (bfloat16, head dim 128, causal, dropout 0.5)"
    )
    bf16, mask = torch.bfloat16, ((1, 1, 64, 64), torch.bfloat16)
    assert asked == [(dim, False, dim, bf16, None, 0.5, True, False) for dim in (64, 128)]
    del asked[:]
    masked = describe_attention(Masked(head_dim=64), CPU)
    assert masked == (
        "fp8: attention: SDPA where it is called, which picks cuDNN here (bfloat16, head dim 64, grouped heads, causal "
        "or not, without a mask), memory-efficient attention (bfloat16, head dim 64, grouped heads, causal or not, "
        "with a mask)"
    )
    assert asked == [
        (64, True, 64, bf16, None, 0.0, True, True),
        (64, True, 64, bf16, mask, 0.0, False, True),
    ]
    assert describe_attention(Own(mask=torch.zeros(4, 4), head_dim=64), CPU).endswith(
        "SDPA, which picks memory-efficient attention here (bfloat16, head dim 64, not causal, with a mask)"
    )


def test_an_older_cudnn_is_told_of_a_call_in_a_source_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cudnn", Cudnn(9, 14, 0), raising=False)
    monkeypatch.setattr("fp8_ds.engine.attention.prefers_cudnn", lambda device: True)
    line = describe_attention(Own(), CPU)
    assert "not cuDNN: cuDNN 9.14.0 is loaded, torch was built with 9.19.0" in line and "CUDNN_HOME" in line
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: int(SDPBackend.CUDNN_ATTENTION))
    assert "CUDNN_HOME" not in describe_attention(Own(), CPU)


def test_a_model_with_both_names_both() -> None:
    line = describe_attention(nn.ModuleList((llama(), Own(head_dim=32))), CPU)
    assert line == (
        "fp8: attention: SDPA, which picks FlashAttention here (bfloat16, head dim 64, 4/2 heads, causal); "
        "SDPA, which picks FlashAttention here (bfloat16, head dim 32, causal)"
    )


def test_the_example_names_its_kernel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    from model import SIZES, ByteLlama

    line = "fp8: attention: SDPA, which picks FlashAttention here (bfloat16, head dim 32, causal)"
    assert describe_attention(ByteLlama(SIZES["tiny"]), CPU) == line


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    line = describe_attention(llama(), CPU)
    with monkeypatch.context() as patch:
        patch.setattr(Own, "head_dim", property(lambda self: 1 / 0), raising=False)
        assert describe_attention(Own(), CPU) == AS_IT_IS
        assert describe_attention(nn.ModuleList((llama(), Own())), CPU) == line
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert describe_attention(llama(), CPU) == describe_attention(Own(), CPU) == AS_IT_IS


def test_no_random_number_is_drawn_and_nothing_is_kept() -> None:
    model = llama()
    before, state = torch.random.get_rng_state(), {name: id(value) for name, value in vars(model).items()}
    describe_attention(model, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {name: id(value) for name, value in vars(model).items()} == state
