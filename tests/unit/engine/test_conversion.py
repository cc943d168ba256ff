"""The line that names the model's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from fp8_ds.attention.huggingface import use_backend
from fp8_ds.attention.packages import older_cudnn, prefers_cudnn
from fp8_ds.engine.conversion import describe_attention

CPU = torch.device("cpu")
AS_IT_IS = "fp8: attention: as the model has it"


def llama(attention: str = "sdpa") -> Any:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation=attention))


def test_the_implementation_is_named_as_transformers_does() -> None:
    model = llama()
    assert describe_attention(model, CPU) == describe_attention(nn.Sequential(model), CPU) == "fp8: attention: sdpa"
    model.config._attn_implementation = "flash_attention_3"
    assert describe_attention(model, CPU) == "fp8: attention: flash_attention_3"


def test_eager_is_named_with_the_remedy() -> None:
    line = describe_attention(llama("eager"), CPU)
    assert line.startswith("fp8: attention: eager, ") and 'attn_implementation="sdpa"' in line


def test_implementations_that_differ_are_all_named() -> None:
    bert = BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=32)
    both = nn.ModuleList((llama(), BertModel._from_config(bert, attn_implementation="eager")))
    assert describe_attention(both, CPU).startswith("fp8: attention: sdpa; eager, ")


class Cudnn:
    """Stands for torch's binding: it was built with 9.19."""

    def __init__(self, *loaded: int) -> None:
        self.loaded = loaded

    def getRuntimeVersion(self) -> tuple[int, ...]:
        return self.loaded

    def getCompileVersion(self) -> tuple[int, ...]:
        return 9, 19, 0


def test_an_older_cudnn_than_torchs_is_told_where_sdpa_would_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cudnn", Cudnn(9, 14, 0), raising=False)
    assert "cuDNN" not in describe_attention(llama(), CPU), "it would not have taken cuDNN here"
    monkeypatch.setattr("fp8_ds.engine.conversion.prefers_cudnn", lambda device: True)
    for model in (llama(), nn.Linear(4, 4)):
        line = describe_attention(model, CPU)
        assert "cuDNN 9.14.0 is loaded, torch was built with 9.19.0" in line and "CUDNN_HOME" in line
    ours = llama()
    use_backend(ours, "fa3_fp8_emulated", hadamard=False)
    assert describe_attention(ours, CPU) == "fp8: attention: fa3_fp8_emulated"
    for newer in ((9, 20, 1), (9, 19, 0), (10, 0, 0)):
        monkeypatch.setattr(torch._C, "_cudnn", Cudnn(*newer))
        assert older_cudnn() is None and describe_attention(llama(), CPU) == "fp8: attention: sdpa"
    monkeypatch.delattr(torch._C, "_cudnn")
    assert older_cudnn() is None, "a torch without cuDNN"


@pytest.mark.parametrize(("capability", "prefers"), [((9, 0), True), ((10, 0), True), ((8, 0), False), ((8, 9), False)])
def test_cudnn_is_preferred_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], prefers: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert prefers_cudnn(torch.device("cuda", 0)) is prefers
    assert not prefers_cudnn(CPU)


class Odd(nn.Module):
    """A module whose configuration cannot be read."""

    @property
    def config(self) -> Any:
        raise ValueError("it is not loaded yet")


@pytest.mark.parametrize("model", [nn.Linear(4, 4), Odd(), nn.MultiheadAttention(8, 2)], ids=lambda m: type(m).__name__)
def test_other_models_have_their_own(model: nn.Module) -> None:
    assert describe_attention(model, CPU) == AS_IT_IS
