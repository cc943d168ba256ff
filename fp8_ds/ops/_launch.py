"""Launch Triton kernels without the work that Triton repeats at every launch.

`kernel[grid](...)` looks at every argument, builds the text of a cache key and compares the globals that the kernel has
read. Here the compiled kernel is kept by a key at least as fine, and launched by Triton's own
`CompiledKernel[grid](...)`: a cast to both layouts, two launches, takes the host 32 us instead of 58 (docs/speed.md),
and a linear has five launches forward and backward. Kernels that a step launches once or
once a weight (adamw, squares, block_amax) are left to Triton.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)
"""Numbers that Triton passes as int32 and as int64; larger ones are uint64."""

_BY_TRITON = torch.version.hip is not None
"""Whether Triton launches everything itself: on AMD's GPUs it looks at sizes of tensors, too."""

_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels by key, each with the values of the parameters behind the positional ones."""


def ceil_div(a: int, b: int) -> int:
    """Divide numbers >= 0, rounding up. `triton.cdiv`, made for kernels too, takes the host 5 us."""
    return -(-a // b)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 2 for the interpreter, whose programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launch(kernel: Any, num_programs: int, *args: Tensor | TensorDescriptor | float | None, **constants: Any) -> None:
    """Launch `kernel[(num_programs,)](*args, **constants)` on the current device, where the tensors are.

    After a kernel's first launch, changes of globals that it reads and of Triton's debugging knobs are not seen.

    Args:
        kernel: decorated with `triton.jit`. In Triton's interpreter, on AMD's GPUs and where the first tensor is on
            another than the current device, Triton launches it.
        num_programs: > 0.
        args: parameters that are not `tl.constexpr`, the first one a tensor.
        constants: `tl.constexpr` parameters and options of the launch, by name.

    Raises:
        TypeError: a `tl.constexpr` parameter is in `args`, or another parameter in `constants`.
    """
    first: Any = args[0]
    device = first.get_device()
    if (
        not isinstance(kernel, JITFunction)
        or kernel.pre_run_hooks
        or _BY_TRITON
        or (device >= 0 and device != torch.cuda.current_device())
    ):
        kernel[(num_programs,)](*args, **constants)
        return
    key = (id(kernel), device, *constants.items(), *map(_specialized, args))
    known = _known.get(key)
    if known is None:
        trailing = _trailing(kernel, len(args), constants)
        compiled = kernel[(num_programs,)](*args, **constants)
        if isinstance(compiled, CompiledKernel):  # not one that is still being compiled
            _known[key] = compiled, trailing
        return
    compiled, trailing = known
    compiled[num_programs, 1, 1](*args, *trailing)


def _specialized(arg: Any) -> Any:
    """Return what Triton specializes on for an argument: dtype and alignment, or what is special about a number."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, arg in _INT32, arg in _INT64
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, tuple(arg.block_shape), arg.padding
    return type(arg)


def _trailing(kernel: Any, num_positional: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of the parameters that are not given by position, in their order."""
    runtime = [p.name for p in kernel.params if p.name in constants and not p.is_constexpr]
    if runtime:
        raise TypeError(f"constants: expected tl.constexpr parameters and options, got {runtime}. Pass them in args.")
    by_position = [p.name for p in kernel.params[:num_positional] if p.is_constexpr]
    if by_position:
        raise TypeError(f"args: expected no tl.constexpr parameters, got {by_position}. Pass them by name.")
    values = [constants.get(p.name, p.default) for p in kernel.params[num_positional:]]
    assert inspect.Parameter.empty not in values
    return tuple(values)
