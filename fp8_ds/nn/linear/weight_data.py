"""Writes into FP8 weights: the functions that write, the `.data` that they write into, and where values end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fp8_ds.errors import UnsupportedError
from fp8_ds.log import warn_once

# What describes a tensor or books it in autograd, and must see the Parameter itself. Everything else is a reader.
METADATA = frozenset(
    """size dim ndimension numel nelement element_size stride storage_offset data_ptr untyped_storage get_device
    is_contiguous is_floating_point is_complex is_signed is_inference is_shared is_pinned is_tensor has_names
    __len__ __hash__ __class__ _is_view _make_subclass requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook record_stream
    zeros_like ones_like empty_like full_like rand_like randn_like new_empty new_zeros new_ones new_full
    __set__ __delete__ is_same_size _has_compatible_shallow_copy_type""".split()  # noqa: SIM905
)
# Attributes that carry values; every other attribute is metadata.
VALUE_GETTERS = tuple(getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag"))

# torch.autograd.grad and .backward, and Tensor.backward: they run what users wrote, which may read any weight.
BACKWARDS = ("grad", "backward")

_IN_PLACE_DUNDERS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")
)


class WeightData(Tensor):
    """The `data` of an FP8 weight, de-quantised, or a view of it: writes into it reach the weight.

    So `p.data.copy_(ema)`, `p.data.clamp_(-c, c)`, `p.data[rows] = 0` work. A read, or a write of a part, finds the
    values that the weight has then: those of the last step.

    Attributes:
        weight: the Fp8Parameter.
        root: all its values, a plain tensor of its shape in this one's memory; `fp8_version` is the payload's then.
    """

    weight: Any
    root: Tensor

    @classmethod
    def of(cls, weight: Any, values: Tensor, view: Tensor | None = None) -> WeightData:
        """Wrap `view` of `values`, which are those of `weight` and in nobody else's hands; None: all of them."""
        found: WeightData = (values if view is None else view).as_subclass(cls)
        found.weight, found.root = weight, values
        if view is None:
            values.fp8_version = weight._fp8.version  # type: ignore[attr-defined]
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in METADATA or (name == "__get__" and func not in VALUE_GETTERS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in BACKWARDS:
            return run_backward(WeightData, func, *args, **kwargs)
        owners = {id(x.root): x for x in tree_leaves((args, kwargs)) if isinstance(x, WeightData)}
        written = {id(x.root): x for x in targets_of(name, args, kwargs) if isinstance(x, WeightData)}
        for x in written.values():
            x.root.copy_(x.weight._fp8.dequantize())
        for key in owners.keys() - written.keys():
            owners[key]._follow()
        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))  # another subclass may have its turn
        for x in written.values():
            warn_of_loss(x.weight)
            write(x.weight, x.root)
        return tree_map(lambda y: _alias(y, owners.values()), result)

    def _follow(self) -> None:
        """Follow a step or a write that has changed the weight; autograd does not see it, as for a plain `data`."""
        payload, root = self.weight._fp8, self.root
        if payload.data is not None and root.fp8_version != payload.version:  # type: ignore[attr-defined]
            root.data.copy_(payload.dequantize())
            root.fp8_version = payload.version  # type: ignore[attr-defined]

    def share_memory_(self) -> Any:
        refuse_sharing(self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor; for `nn.Parameter(weight.data)` a plain Parameter."""
        copied: Tensor = self.detach().clone()
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = plain(self.detach())
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (values, self.requires_grad, OrderedDict())
        return values.__reduce_ex__(protocol)


def plain(x: Any) -> Any:
    """Return a plain tensor with a WeightData's memory, whose writes reach nothing else; all else as it is."""
    if not isinstance(x, WeightData):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _alias(x: Any, owners: Iterable[WeightData]) -> Any:
    """Return `x`; if it has the memory of one of `owners`, as another view of the same weight."""
    if type(x) is Tensor:
        for owner in owners:
            if x.device == owner.root.device and x.untyped_storage()._cdata == owner.root.untyped_storage()._cdata:
                return WeightData.of(owner.weight, owner.root, x)
    return x


def run_backward(cls: type[Tensor], func: Any, outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad`, `torch.autograd.backward` or `Tensor.backward` of tensors of `cls`, or for such.

    torch hands these functions to the class of their arguments. They run code of users, such as a checkpoint's
    recomputation, which reads FP8 weights: the class must be asked there. Gradient edges have no class.
    """

    def as_edge(x: Any) -> Any:
        if not isinstance(x, cls):
            return x
        with torch._C.DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(x)

    def as_value(x: Any) -> Any:
        return x.clone() if isinstance(x, cls) else x

    if func is Tensor.backward:
        func, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient", None)
    is_materialized = kwargs.pop("materialize_grads", False)  # which is refused for edges
    if is_materialized:
        kwargs["allow_unused"] = True
    with torch._C._EnableTorchFunction():
        for name in kwargs.keys() & {"grad_outputs", "grad_tensors"}:
            kwargs[name] = tree_map(as_value, kwargs[name])
        grads = func(tree_map(as_edge, outputs), inputs=tree_map(as_edge, inputs), **kwargs)
        if is_materialized:
            zeros = partial(torch.zeros_like, requires_grad=kwargs.get("create_graph", False))
            grads = tuple(zeros(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True))
    return grads


def is_writer(name: str, kwargs: Any) -> bool:
    is_in_place = name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))
    return is_in_place or kwargs.get("out") is not None


def targets_of(name: str, args: Any, kwargs: Any) -> list[Any]:
    """Return what a function of this name writes into: `out=`, or the first argument of `add_`, `_foreach_add_` or, by
    its keyword, `nn.init.constant_`."""
    if not is_writer(name, kwargs):
        return []
    target = kwargs.get("out")
    if target is None:
        target = args[0] if args else next(iter(kwargs.values()), None)
    return tree_leaves(target)


def warn_of_loss(weight: Any) -> None:
    """Warn that a value made of a frozen FP8 one is rounded to FP8 again, as when adapters are merged."""
    if not weight._fp8.has_master:
        warn_once(
            "fp8: a frozen weight was written: it is rounded to FP8 again, and nothing keeps it in more bits. Merging "
            "adapters and taking them out again changes the weights. Use ZeRO stage 3, which has a bf16 shard of them, "
            'or "linear.frozen": "bf16".'
        )


def refuse_sharing(weight: Any) -> None:
    """Raise UnsupportedError: the values of `weight` lie nowhere, a reader gets a tensor of its own."""
    raise UnsupportedError(
        f"{weight._fp8.name}: expected a weight that is not in FP8, got share_memory_() of one that is. Share a copy, "
        "which has bf16 of all weights: copy.deepcopy(engine.module).share_memory()."
    )


def write(weight: Any, value: Tensor) -> None:
    """Make `weight` read as `value` from now on."""
    payload = weight._fp8
    if value.shape != weight.shape:
        raise ValueError(
            f"{payload.name}: expected values of shape {tuple(weight.shape)}, got {tuple(value.shape)}. Write "
            "values of the weight's shape, or give deepspeed.initialize a model that has the other."
        )
    if payload.write is None:
        raise UnsupportedError(
            f"FP8 weight {payload.name} cannot be written while it is gathered for compute. "
            "Write inside deepspeed.zero.GatheredParameters(..., modifier_rank=0), or use safe_set_full_fp32_param."
        )
    payload.write(value.detach().to(payload.scale.device))
    payload.version += 1
