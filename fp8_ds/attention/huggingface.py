"""Attention backends for Hugging Face models, through transformers' own registry of attention functions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.attention import Backend, attention, describe_backend, require_backend
from fp8_ds.attention.heads.reference import check_rotation
from fp8_ds.attention.shapes import Packing
from fp8_ds.config import AttentionConfig
from fp8_ds.errors import UnsupportedError

PREFIX = "fp8_ds_"
"""Prefix of our backends' names in transformers; it avoids "flash", which transformers reads a meaning into."""

_KEY = "fp8.attention.backend"
_OTHER_MASKS = ("or_mask", "chunked")
"""Parts of mask functions' names in transformers that mean more than causal, window and packing."""
_REFUSED = ("softcap", "s_aux", "sinks", "cache", "indices", "block_indices")
"""Arguments that transformers' models pass to some attention functions, and ours would ignore."""
_UNSAID: Any = object()
_Tokens = tuple[Tensor | None, Tensor | None]
"""Indices of queries and of keys in a flattened batch; None: all of them."""
_ALL: _Tokens = (None, None)


def use_backend(model: nn.Module, backend: Backend, *, hadamard: bool) -> None:
    """Make all attention modules of a model that `refuse_attention_of` lets pass call `attention` with this backend."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"{PREFIX}{backend}{'_hadamard' if hadamard else ''}"
    AttentionInterface.register(name, RegisteredAttention(backend, hadamard))
    AttentionMaskInterface.register(name, padding_mask)
    for config in _configs(model):
        config._attn_implementation = name


def refuse_attention_of(model: nn.Module, config: AttentionConfig) -> None:
    """Refuse a model, on any device, that does not take the configured backend. Reads names only.

    Raises:
        UnsupportedError: the model does not go through transformers' registry; or its attention has dropout, or heads
            that the backend or the Hadamard rotation does not take.
    """
    if config.backend is None:
        return
    fixed = [
        type(m).__name__ for m in model.modules() if not getattr(m, "_can_set_attn_implementation", lambda: True)()
    ]
    if fixed or next(_configs(model), None) is None:
        raise UnsupportedError(
            f"{_KEY}: expected null with a model whose attention is not in transformers' AttentionInterface, got "
            f'"{config.backend}" and {(fixed or [type(model).__name__])[0]}. Remove the key, and call '
            "fp8_ds.attention.attention in the model yourself."
        )
    _refuse_kinds(model, config.backend, config.hadamard)


def refuse_backend(backend: Backend, device: torch.device) -> None:
    """Call `require_backend`, and name the configuration's key in its error."""
    try:
        require_backend(backend, device)
    except UnsupportedError as error:
        raise UnsupportedError(f"{_KEY}: {error}") from error


def _refuse_kinds(model: nn.Module, backend: Backend, hadamard: bool) -> None:
    try:
        kinds = dict.fromkeys((_dropout(module), *_dims(module, config)) for module, config in attention_modules(model))
    # Attributes of a model may be absent or of another kind; the first forward refuses what is missed here.
    except (AttributeError, TypeError, ValueError):
        return
    for dropout, head_dim, value_dim in kinds:
        if dropout:
            raise UnsupportedError(
                f'{_KEY}: expected null with dropout in attention, got "{backend}" and {dropout:g}. Set the '
                "model's attention dropout to 0, or remove the key."
            )
        alignment = {"fa3": 8, "fa3_fp8": 16}.get(backend, 1)
        if value_dim != head_dim or head_dim % alignment:
            raise UnsupportedError(
                f'{_KEY}: expected null with heads of {head_dim} and values of {value_dim}, got "{backend}". '
                f"It takes one dim for both, a multiple of {alignment}: remove the key."
            )
        if hadamard:
            try:
                check_rotation(head_dim)
            except UnsupportedError as error:
                raise UnsupportedError(f"fp8.attention.hadamard: {error}") from error


def attention_modules(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield transformers' attention modules, each with its configuration: those that know whether they are causal."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        has_name = isinstance(getattr(config, "_attn_implementation", None), str)
        if has_name and isinstance(getattr(module, "is_causal", None), bool):
            yield module, config


def _dims(attention: Any, config: Any) -> tuple[int, int]:
    """Return (dim of a head's queries and keys, dim of its values)."""
    of_module = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    num_heads = getattr(attention, "num_heads", None) or config.num_attention_heads
    head_dim = of_module or getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return head_dim, getattr(attention, "v_head_dim", None) or head_dim


def _dropout(attention: Any) -> float:
    """Return the dropout probability in training: a number of the module's, or an nn.Dropout's."""
    names = ("attention_dropout", "attn_dropout", "dropout")
    found = next((value for name in names if (value := getattr(attention, name, None)) is not None), 0.0)
    return float(getattr(found, "p", found))


def describe_implementation(name: str) -> str | None:
    """Describe what runs under a name of transformers'; None if the name is not ours."""
    if not name.startswith(PREFIX):
        return None
    backend: Any = name.removeprefix(PREFIX).removesuffix("_hadamard")
    return describe_backend(backend) + (", q and k rotated" if name.endswith("_hadamard") else "")


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield configurations that choose an attention: of attention modules, and of models that make their masks."""
    has_attention = False
    configs: dict[int, Any] = {}
    for module in model.modules():
        is_attention = isinstance(getattr(module, "is_causal", None), bool)
        has_attention = has_attention or is_attention
        config = getattr(module, "config", None)
        has_name = isinstance(getattr(config, "_attn_implementation", None), str)
        if has_name and (is_attention or hasattr(module, "get_input_embeddings")):
            configs[id(config)] = config
    if has_attention:
        yield from configs.values()


def padding_mask(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """Replace transformers' mask: None without padding, else bool [batch, sequence], true where a token is.

    Raises:
        UnsupportedError: the model's mask is not causal, a window or packing; or keys come after its last query.
    """
    if not (args or use_vmap) and is_causal_alone(attention_mask=attention_mask, **kwargs):
        return None  # before a name is read, which Dynamo does not trace
    names = list(_names_of(mask_function))
    other = [name for name in names if any(part in name for part in _OTHER_MASKS)]
    if use_vmap or other:
        raise UnsupportedError(
            f"attention mask: expected causal, a window or packed sequences with {_KEY}, got "
            f"{other[0] if other else 'a mask function of the model'}. Remove the key."
        )
    if any("causal" in name for name in names):
        _refuse_keys_behind(**kwargs)
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.bool()


def is_causal_alone(
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    **kwargs: Any,
) -> bool:
    """Whether a mask is causal and nothing else, for as many keys as queries.

    Args: those of transformers' mask functions. `allow_is_causal_skip` is false for packed sequences, bidirectional
    masks, and masks with functions of the model; `local_size` is a window or chunk, which hides nothing from a sequence
    that is no longer.
    """
    return (
        allow_is_causal_skip
        and attention_mask is None
        and q_length == kv_length
        and kv_offset == 0
        and isinstance(q_offset, int)
        and q_offset == 0
        and (local_size is None or kv_length <= local_size)
    )


def _refuse_keys_behind(
    *,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Refuse a cache in which the last query is not aligned with the last key, as `attention` assumes.

    Args: those of transformers' mask functions; older versions have `cache_position` in place of `q_length` and
    `q_offset`. Without a cache nothing is read on the device.
    """
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    if q_length is None:
        return
    if kv_length > q_length and kv_offset + kv_length > int(q_offset or 0) + q_length:
        raise UnsupportedError(
            f"cache: expected one that grows with {_KEY}, got {kv_length} places for fewer tokens, as in a static "
            "cache. Take transformers' default cache, or remove the key."
        )


def _names_of(function: Any) -> Iterator[str]:
    """Yield the names of a mask function and of those that it is composed of."""
    if not callable(function):
        return
    yield getattr(function, "__qualname__", "")
    for cell in getattr(function, "__closure__", None) or ():
        inside = cell.cell_contents
        for one in inside if isinstance(inside, tuple) else (inside,):
            yield from _names_of(one)


class RegisteredAttention:
    """Attention function as transformers calls it: tensors [batch, heads, sequence, dim].

    Packed sequences are those of `cu_seq_lens_q` and its like, or of positions that begin again. The latter are read
    on the host once for each batch; in a graph they stop the run on the device instead.
    """

    def __init__(self, backend: Backend, hadamard: bool) -> None:
        self.backend: Backend = backend
        self.hadamard = hadamard
        self._last: tuple[Callable[[], Tensor | None], tuple[int, int], Packing | None] = (lambda: None, (0, 0), None)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = _UNSAID,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise UnsupportedError(f"{name}: expected none with {_KEY}, got one. Remove the key for this model.")
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if sliding_window is _UNSAID:
            _refuse_window_of_mask(module, k.shape[1])
            sliding_window = None
        window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        sees_all = not causal and window is None
        (indices, indices_k), packing = self._pack(q, k, attention_mask, kwargs, masks_keys=sees_all)
        shape = q.shape
        if packing is not None:
            q, k, v = (_packed(x, at) for x, at in ((q, indices), (k, indices_k), (v, indices_k)))
        out = attention(
            q,
            k,
            v,
            backend=self.backend,
            causal=causal,
            window=window,
            softmax_scale=scaling,
            packing=packing,
            hadamard=self.hadamard,
            dropout=dropout,
            bias=kwargs.get("position_bias"),
        )
        if indices is not None:
            out = out.new_zeros(shape.numel() // shape[-1] // shape[-2], *out.shape[1:]).index_copy(0, indices, out)
        return (out if packing is None else out.unflatten(0, shape[:2])), None

    def _pack(
        self, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any], *, masks_keys: bool
    ) -> tuple[_Tokens, Packing | None]:
        """Return (tokens that are not padding, packing); the packing is None if they are not packed.

        Args:
            masks_keys: whether every query sees every key that `mask` leaves. The queries may then be other tokens, as
                in cross-attention, so none of them is taken for padding.
        """
        if mask is not None:
            return _keys_unpadded(q, k, mask) if masks_keys else _unpadded(q, k, mask)
        ends, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        if ends is not None and longest is not None:
            ends_k, longest_k = kwargs.get("cu_seq_lens_k", ends), kwargs.get("max_length_k", longest)
            return _ALL, Packing(ends.int(), ends_k.int(), int(longest), int(longest_k))
        positions = kwargs.get("position_ids")
        if positions is None or positions.dim() != 2 or q.shape[1] != k.shape[1] or positions.shape[1] != q.shape[1]:
            return _ALL, None
        if torch.compiler.is_compiling():
            one_sequence = (positions.diff(dim=1) == 1).all()
            torch._assert_async(one_sequence, "packed sequences in a graph: give the model cu_seq_lens_q and its like")
            return _ALL, None
        # A buffer may be filled anew for each batch, and serve batches of other sizes.
        state = (0 if positions.is_inference() else positions._version), len(q)
        if self._last[0]() is not positions or self._last[1] != state:
            self._last = weakref.ref(positions), state, _packing_of(positions.expand(len(q), -1))
        return _ALL, self._last[2]


def _packed(x: Tensor, indices: Tensor | None) -> Tensor:
    """Flatten [batch, sequence, heads, dim] to [tokens, heads, dim], and select tokens by `indices` if given."""
    return x.flatten(0, 1) if indices is None else x.flatten(0, 1)[indices]


def _refuse_window_of_mask(module: nn.Module, num_keys: int) -> None:
    """Refuse a configured window shorter than the keys if the module has it in the mask alone, and does not pass it to
    its attention function."""
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window >= num_keys:
        return  # before the layer's number is read, which a graph would be bound to: one graph for each layer then
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is None or index is None or kinds[index] != "full_attention":
        raise UnsupportedError(
            f"sliding_window: expected it as an argument with {_KEY}, got none from {type(module).__name__}, whose "
            f"configuration has one of {window} keys. Remove the key, or the window."
        )


def _ends_of(mask: Tensor) -> tuple[Tensor, int]:
    """Return where each row of `mask` ends once it is packed, and the length of the longest row."""
    lengths = mask.sum(1, dtype=torch.int32)
    return nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


def _unpadded(q: Tensor, k: Tensor, mask: Tensor) -> tuple[_Tokens, Packing]:
    if mask.dim() != 2 or mask.shape != q.shape[:2] or q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            f"attention mask: expected [batch, sequence] = {tuple(q.shape[:2])} with {_KEY}, got {tuple(mask.shape)} "
            f"and {k.shape[1]} keys. Masks of another shape, and padded batches in generation, are for the model's own "
            "attention: remove the key."
        )
    indices = mask.flatten().nonzero()[:, 0]
    return (indices, indices), Packing.of(*_ends_of(mask))


def _keys_unpadded(q: Tensor, k: Tensor, mask: Tensor) -> tuple[_Tokens, Packing]:
    if mask.shape != k.shape[:2]:
        raise UnsupportedError(
            f"attention mask: expected [batch, keys] = {tuple(k.shape[:2])} with {_KEY}, got {tuple(mask.shape)}. "
            "Masks of another shape are for the model's own attention: remove the key."
        )
    batch, length = q.shape[:2]
    ends_q = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    ends_k, longest = _ends_of(mask)
    return (None, mask.flatten().nonzero()[:, 0]), Packing(ends_q, ends_k, length, longest)


def _packing_of(positions: Tensor) -> Packing | None:
    """Find sequences in positions [batch, sequence]: one begins where they do not rise by one. None if only rows do."""
    begins = nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
    if int(begins.sum()) == len(positions):
        return None
    starts = begins.flatten().nonzero()[:, 0]
    ends = nn.functional.pad(starts, (0, 1), value=positions.numel()).int()
    return Packing.of(ends, int(ends.diff().max()))
