"""Fp8Parameter: a Parameter whose nominal data is a NaN placeholder and whose readers see the true weight.

DeepSpeed, autograd and optimizers need a bf16 Parameter: shape, numel, dtype, grad, hooks. Its bytes are in FP8
elsewhere (`p._fp8`). Users and libraries read parameters whenever they like (state_dict, EMA, PEFT, logging): the class
hands them de-quantised values, and sends their writes to the FP8 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fp8_ds.nn.linear.recipe import refuse_released
from fp8_ds.nn.linear.weight_data import (
    BACKWARDS,
    METADATA,
    VALUE_GETTERS,
    WeightData,
    is_writer,
    plain,
    refuse_sharing,
    run_backward,
    targets_of,
    warn_of_loss,
    write,
)

_ACCESSORS = ("__get__", "__set__")
_DATA_GET, _DATA_SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Alias(torch.autograd.Function):
    """The same values in a tensor of its own; its gradient goes to the Parameter unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        storage = weight.untyped_storage()
        return weight.new_empty(0).set_(storage, weight.storage_offset(), weight.size(), weight.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Dequantize(torch.autograd.Function):
    """De-quantise for a reader; its gradient goes to the Parameter unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        payload = weight._fp8  # type: ignore[attr-defined]
        return payload.dequantize() if payload.export is None else payload.export

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def has_payload(tensor: Any) -> bool:
    """Whether `tensor` is an FP8 weight whose bytes are here now (gathered, or ZeRO-1/2)."""
    payload = getattr(tensor, "_fp8", None)
    return payload is not None and (payload.data is not None or payload.export is not None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of(func: Any) -> str:
    """Return a function's name, also in a graph, where it is no string."""
    return getattr(func, "__name__", "")


def _is_tracing() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._guards.TracingContext.try_get() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


class _Unpack:
    """The user's unpack hook of saved tensors, which hands back the values of an FP8 weight in place of the weight.

    autograd makes a new tensor of what the hook returns, without class and attributes (`SavedVariable::unpack` in
    torch/csrc/autograd/saved_variable.cpp, torch 2.13): of the weight itself one of NaN.
    """

    def __init__(self, hook: Callable[[Any], Tensor]) -> None:
        self.hook = hook

    def __call__(self, packed: Any) -> Tensor:
        found = self.hook(packed)
        if not isinstance(found, Fp8Parameter) or getattr(found, "_fp8", None) is None:
            return found
        if not has_payload(found):
            refuse_released(found)
        return found.detach()


def keep_values_in_hooks() -> None:
    """Make the hooks on saved tensors that are active now hand back values of FP8 weights, until their `with` ends.

    It is called where a weight is read, since a Function may save it next, and where an engine's forward begins.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not isinstance(hooks[1], _Unpack):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(hooks[0], _Unpack(hooks[1]))


class Fp8Parameter(nn.Parameter):
    """A Parameter with an FP8 payload (see the module's docstring). Without one it behaves as `nn.Parameter`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if func in (_DATA_GET, _DATA_SET) and not any(map(has_payload, args)):
                return func(*args)  # what ZeRO-3 does to every weight of every layer, several times
            if (name in METADATA and func != _DATA_SET) or _is_bookkeeping(name, args, kwargs):
                return func(*args, **kwargs)
            if name == "__get__" and func not in VALUE_GETTERS:
                return func(*args, **kwargs)
            is_in_graph = torch.compiler.is_dynamo_compiling()
            if not is_in_graph and _is_tracing():  # the compiler's own looks at the nominal tensor
                return func(*args, **kwargs)
            if name in BACKWARDS:
                return func(*args, **kwargs) if is_in_graph else run_backward(cls, func, *args, **kwargs)
            if not is_in_graph:
                keep_values_in_hooks()
            target = args[0] if args else None
            if isinstance(target, Fp8Parameter) and has_payload(target):
                if func == _DATA_SET:
                    return _set_data(target, args[1])
                if func == _DATA_GET:
                    values = _Dequantize.apply(target).detach()
                    is_export = target._fp8.export is not None  # type: ignore[attr-defined]
                    return values if is_in_graph or is_export else WeightData.of(target, values)
            targets = targets_of(name, args, kwargs)
            if any(isinstance(x, WeightData) for x in targets):  # with the weight before it torch asks it no more
                func = partial(_write_data, func)
            written = [x for x in targets if isinstance(x, Fp8Parameter) and has_payload(x)]
            if written:
                return _write_in_place(func, written, args, kwargs)
            reads = is_in_graph or is_writer(name, kwargs) or name in _ACCESSORS
            convert = _as_true_value if reads else _as_kept_value
            args, kwargs = tree_map(convert, (args, kwargs))
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Write values as `data =` does: torch asks no subclass about this function."""
        if not has_payload(self):
            return super().set_(*args, **kwargs)
        source, *rest = args
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _set_data(self, plain(_as_true_value(self)).clone().set_(plain(_as_true_value(source)), *rest, **kwargs))
        return self

    def share_memory_(self) -> Any:
        if has_payload(self):
            refuse_sharing(self)
        return super().share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain Parameter with the true values: a copy has no shards or owner; its layer's has the scales."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(plain(self.data).clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (plain(self.data), self.requires_grad, OrderedDict())


def retype(p: Any, payload: Any) -> None:
    """Make `p` the Fp8Parameter of an `Fp8Payload`: it lets go of its bf16 data; its hooks and lists stay."""
    p._fp8 = payload
    p.data = payload.nominal(p.shape)
    p.__class__ = Fp8Parameter


def point_at_bf16(p: Any, values: Tensor | None) -> None:
    """Make `values`, bf16 of the master [out, in], what the Parameter of a layer in bf16 holds; None: NaN again.

    With ZeRO-1/2. Readers and writers are answered as before (`Fp8Payload.hp`); what reads past the hooks, as a plain
    linear does for autograd, finds the values.
    """
    p._fp8.hp = values
    with torch._C.DisableTorchFunctionSubclass():
        p.data = p._fp8.nominal(p.shape) if values is None else values


def _write_data(func: Any, *args: Any, **kwargs: Any) -> Any:
    return WeightData.__torch_function__(func, (), args, kwargs)


def _is_bookkeeping(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function, which may read values with other arguments, reads none with these.

    `p.expand_as(p)` and `p.view_as(p)` fetch the AccumulateGrad node (DeepSpeed does for every parameter in every
    backward, by torch.autograd.graph); without gradients, as in the forward of a Function that returns `p.view_as(p)`,
    they read. `p.type()` names the dtype.
    """
    if name in ("expand_as", "view_as"):
        return len(args) == 2 and args[0] is args[1] and torch.is_grad_enabled()
    return name == "type" and len(args) == 1 and not kwargs


def _as_true_value(x: Any) -> Any:
    return _Dequantize.apply(x) if isinstance(x, Fp8Parameter) and has_payload(x) else x


def _as_kept_value(x: Any) -> Any:
    """Convert as `_as_true_value`; a weight gathered in bf16 becomes an alias for autograd to keep.

    The weight itself, kept for backward, would be NaN there: by then ZeRO-3 may have fetched it again, in FP8.
    """
    if not isinstance(x, Fp8Parameter) or has_payload(x):
        return _as_true_value(x)
    is_gathered = getattr(x, "_fp8", None) is not None and x.numel() > 0
    return _Alias.apply(x) if is_gathered and x.requires_grad and torch.is_grad_enabled() else x


def _set_data(weight: Any, value: Tensor) -> None:
    """Assign `weight.data = value` for ZeRO-3, which frees the weight, or a user, who writes it."""
    value = plain(_as_true_value(value))  # of another weight in FP8, or this one, the nominal data is NaN
    if value.shape != weight.shape and weight._fp8.write is None:
        weight._fp8.data = None
        _DATA_SET(weight, value)
    elif value.shape != weight.shape or not _is_as_read(weight, value):
        warn_of_loss(weight)
        write(weight, value)


def _is_as_read(weight: Any, value: Tensor) -> bool:
    """Whether `value` is what `weight` gives a reader, as `module.to(...)` assigns it if nothing is to be cast."""
    if weight._fp8.export is not None:
        return False
    read = weight._fp8.dequantize()
    return torch.equal(read, value.detach().to(read.device, read.dtype))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_in_place(func: Any, weights: list[Any], args: Any, kwargs: Any) -> Any:
    """Run a writing function on the true values, then quantise the results. `copy_` needs no true value."""
    for weight in weights:
        if torch.is_grad_enabled() and weight.requires_grad and getattr(func, "__module__", "") != "torch.nn.init":
            raise RuntimeError(f"an in-place operator on the leaf {weight._fp8.name} needs torch.no_grad()")
    if func == torch.Tensor.copy_:
        source = args[1] if len(args) > 1 else kwargs["other"]
        write(weights[0], _as_true_value(source).expand(weights[0].shape))
        return weights[0]
    values = {id(weight): weight._fp8.dequantize() for weight in weights}
    owners = {id(value): weight for weight, value in zip(weights, values.values(), strict=True)}
    args, kwargs = tree_map(lambda x: values[id(x)] if id(x) in values else _as_true_value(x), (args, kwargs))
    with torch.no_grad():
        result = func(*args, **kwargs)
    for weight in weights:
        warn_of_loss(weight)
        write(weight, values[id(weight)])
    return tree_map(lambda x: owners.get(id(x), x), result)
