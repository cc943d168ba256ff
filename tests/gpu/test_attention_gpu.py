"""The attention kernel that rank 0 names is the one that runs."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from fp8_ds.engine.attention import describe_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LENGTH = 512
# What is said -> names of its kernels; cuDNN's have "flash" in them too. Where a choice is not possible it is MATH.
KERNELS = {
    "cuDNN": r"cudnn.*sdpa|sdpa_sm\d+",
    "FlashAttention": r"\bflash_(fwd|bwd)|pytorch_flash",
    "memory-efficient attention": r"fmha_cutlass",
    "plain matmuls and a softmax": r"(?i)softmax",
}
CHOICES = [
    None,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def llama(num_kv_heads: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def kernels_of(model: Any) -> list[str]:
    """Names of the kernels of one forward and backward without the loss, whose softmax is not attention's."""
    tokens = torch.randint(0, 256, (1, LENGTH), device="cuda")
    model.model(input_ids=tokens).last_hidden_state.sum().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        model.model(input_ids=tokens).last_hidden_state.sum().backward()
        torch.cuda.synchronize()
    return [event.key for event in profiled.key_averages()]


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: "default" if one is None else one.name)
def test_the_kernel_said_is_the_kernel_that_runs(choice: SDPBackend | None, num_kv_heads: int) -> None:
    model = llama(num_kv_heads)
    with nullcontext() if choice is None else sdpa_kernel([choice, SDPBackend.MATH]):
        line, names = describe_attention(model, torch.device("cuda")), kernels_of(model)
    heads = "4 heads" if num_kv_heads == 4 else "4/1 heads"
    start, end = "fp8: attention: SDPA, which picks ", f" here (bfloat16, head dim 128, {heads}, causal)"
    assert line.startswith(start) and line.endswith(end), line
    running = [said for said, pattern in KERNELS.items() if any(re.search(pattern, name) for name in names)]
    assert running == [line.removeprefix(start).removesuffix(end)], (line, names)


class Own(torch.nn.Module):
    """Attention of one's own, whose call is read off its source."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = 128, num_kv_heads
        self.qkv = torch.nn.Linear(512, (4 + 2 * num_kv_heads) * 128, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([4, self.num_kv_heads, self.num_kv_heads], dim=1)
        grouped = self.num_kv_heads != 4
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_the_kernel_said_of_a_model_of_ones_own_is_the_kernel_that_runs(num_kv_heads: int) -> None:
    model = Own(num_kv_heads)
    line = describe_attention(model, torch.device("cuda"))
    x = torch.randn(1, LENGTH, 512, dtype=torch.bfloat16, device="cuda")
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="cuda")
    start = "fp8: attention: SDPA, which picks "
    assert line.startswith(start), line
    heads = "" if num_kv_heads == 4 else "grouped heads, "
    for with_mask in (False, True):
        model(x, mask if with_mask else None).sum().backward()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            model(x, mask if with_mask else None).sum().backward()
            torch.cuda.synchronize()
        names = [event.key for event in profiled.key_averages()]
        running = [said for said, pattern in KERNELS.items() if any(re.search(pattern, name) for name in names)]
        masks = "with a mask" if with_mask else "without a mask"
        said = [part for part in line.removeprefix(start).split("), ") if masks in part]
        assert [part.partition(" (")[0].removesuffix(" here") for part in said] == running, (line, names)
        assert all(f"(bfloat16, head dim 128, {heads}causal or not, " in part for part in said), line


def test_asking_takes_less_than_a_mebibyte_and_no_random_number() -> None:
    model = llama(1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    describe_attention(model, torch.device("cuda"))
    assert torch.cuda.max_memory_allocated() - before <= 1 << 20
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
