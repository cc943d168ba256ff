"""Checkpoints: our state in DeepSpeed's files, folders that are whole or absent, and FP8 tensors for servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fp8_ds.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


def iter_fp8_tensors(engine: Any, form: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the engine's model under the names of its folder, FP8 weights as codes and scales.

    Collective: all ranks iterate, to the end, and not within `GatheredParameters`. One parameter is gathered at a time,
    FP8 weights by a byte an element. The tensors are those of `engine.save_fp8_pretrained`; vLLM's `load_weights` takes
    such pairs. They are on the engine's device, and may be its own memory: copy what is to outlive the next step.

    Args:
        engine: what `deepspeed.initialize` has returned, with linears in FP8.
        form: "fp8-block": float8_e4m3fn [out, in] and `weight_scale_inv`, float32 [ceil(out / 128), ceil(in / 128)];
            "compressed-tensors": the same and `weight_scale`, float32 [out, 1]; both multiply to leave FP8. None: the
            one that keeps the bytes that training computes with.

    Raises:
        UnsupportedError: nothing is in FP8, or the model cannot be exported.
        CheckpointError: an FP8 weight is not finite; on all ranks, when it is its turn.
    """
    if not hasattr(engine, "fp8_tensors"):
        raise UnsupportedError(
            f'iter_fp8_tensors: expected an engine with an "fp8" block, got {type(engine).__name__} without. Import '
            'fp8_ds, and set "fp8": {"enabled": true} in its configuration.'
        )
    tensors: Iterator[tuple[str, Tensor]] = engine.fp8_tensors(form)
    return tensors
