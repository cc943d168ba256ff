"""torch's norm where Megatron has neither Transformer Engine nor Apex, with sequence parallelism."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class SequenceParallelNorm:
    """`megatron.core.transformer.torch_norm.WrappedTorchNorm`, which refuses sequence parallelism, without the refusal.

    The parameters are marked as Megatron's fused norms mark theirs: every rank sees its tokens only, and
    finalize_model_grads adds up their gradients.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> nn.Module:  # type: ignore[misc]
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm: nn.Module = WrappedTorchNorm(alone, hidden_size, eps, **kwargs)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def without_refusal(original: Any) -> Any:
    """Replace torch's norm, for patches.apply; another norm that Megatron has chosen is kept."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return SequenceParallelNorm if original is WrappedTorchNorm else original
