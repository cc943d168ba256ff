"""What Liger's fused loss allocates, without its kernels: `"cross_entropy": "liger"` for an estimate.

By its published rule: as many tokens at once as keep the logits about as large as the loss's input, or
`chunk_mem_const` times as large. liger-kernel need not be installed.
Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py `fused_linear_cross_entropy_forward`
(0.8.5, on a GPU of compute capability 8 or more, reduction "mean", accum_dtype None). Other versions may take more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear import Fp8Linear

_KEY = "fp8.activations.cross_entropy"
_OWN_CONSTANTS = {"gpt_oss": 8}
"""By type of model: what Liger takes where it is told 1, or nothing (0.8.5, transformers/model/gpt_oss.py)."""


def most_chunks(width: int, vocabulary: int, chunk_mem_const: int = 1) -> int:
    """As many as so many tokens or more are cut into."""
    return -(-vocabulary // (chunk_mem_const * width))


def chunk_size(num_tokens: int, width: int, vocabulary: int, chunk_mem_const: int = 1) -> int:
    """Tokens whose logits exist at once."""
    tokens = -(-num_tokens // most_chunks(width, vocabulary, chunk_mem_const))
    return min(1 << (tokens - 1).bit_length(), num_tokens)


def chunk_mem_const_of(lm: Any, told: int) -> int:
    """What Liger takes for this model if it is told so much: 1 leaves it to its forward of that type of model."""
    own = _OWN_CONSTANTS.get(getattr(getattr(lm, "config", None), "model_type", ""), 1)
    return told if told != 1 else own


class _ChunkedLoss(torch.autograd.Function):
    """Both gradients are made in the forward, and handed out by the backward."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_VK: Tensor, chunk_mem_const: int) -> Tensor:
        (num_tokens, width), vocabulary = x_TK.shape, weight_VK.shape[0]
        grad_x = torch.zeros_like(x_TK)
        grad_weight = torch.zeros_like(weight_VK) if weight_VK.requires_grad else None
        losses = x_TK.new_zeros(num_tokens, dtype=torch.float32)
        logits = x_TK.new_empty(chunk_size(num_tokens, width, vocabulary, chunk_mem_const), vocabulary)
        del logits
        ctx.save_for_backward(grad_x, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        del grad
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loss(x_TK: Tensor, weight_VK: Tensor, chunk_mem_const: int) -> Tensor:
    """The graph ends before the loss, as fp8_ds/engine/liger_patches.py has it."""
    loss: Tensor = _ChunkedLoss.apply(x_TK, weight_VK, chunk_mem_const)
    return loss


class LossOfLiger(nn.Module):
    """`lm(tokens)` is the loss that `lm` has once its own is Liger's.

    Args:
        lm: a causal LM of transformers, its linears converted, on the meta device.
        chunk_mem_const: how many times as large as the loss's input logits may be.

    Raises:
        UnsupportedError: it is none, or its head is not what Liger's loss takes.
    """

    def __init__(self, lm: Any, chunk_mem_const: int = 1) -> None:
        super().__init__()
        prefix = getattr(lm, "base_model_prefix", "")
        head = getattr(lm, "lm_head", None)
        if not isinstance(getattr(lm, prefix, None) if prefix else None, nn.Module):
            raise UnsupportedError(
                f'{_KEY}: expected "stock" with a model that is no causal LM of transformers, got "liger" and '
                f'{type(lm).__name__}. Set "cross_entropy": "stock".'
            )
        if type(head) is not nn.Linear or head.bias is not None or isinstance(head, Fp8Linear):
            raise UnsupportedError(
                f'{_KEY}: expected "stock" where `lm_head` is no nn.Linear in bf16 without bias, got "liger" and '
                f'{type(head).__name__}. Put "lm_head" into fp8.linear.filter_fqns, where it is by default, or set '
                '"cross_entropy": "stock".'
            )
        self.lm: Any = lm
        self._prefix: str = prefix
        self._chunk_mem_const: int = chunk_mem_const_of(lm, chunk_mem_const)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens [batch, length]."""
        hidden = getattr(self.lm, self._prefix)(input_ids=tokens)[0]
        return _loss(hidden.flatten(0, -2), self.lm.lm_head.weight, self._chunk_mem_const)
