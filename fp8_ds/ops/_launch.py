"""Triton kernels launched without what Triton works out anew at every launch.

`kernel[grid](...)` looks at every argument, builds the text of a cache key and compares the globals that the kernel has
read: 36 us of the host for a cast to both planes (Triton 3.6), where an FP8 linear launches five kernels forward and
backward. What Triton compiled is kept here by a key at least as fine, and launched by Triton's own
`CompiledKernel[grid](...)`: 4 us, and as many for the key.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

_WORD_BITS = 31
"""Of the magnitude of an int32; beyond it Triton passes int64."""

_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By key: what was compiled, and the values of the parameters behind the positional ones."""


def ceil_div(a: int, b: int) -> int:
    """Of numbers >= 0. `triton.cdiv`, made for kernels too, takes the host 5 us."""
    return -(-a // b)


def launch(kernel: Any, num_programs: int, *args: Tensor | float | None, **constants: Any) -> None:
    """`kernel[(num_programs,)](*args, **constants)`, on the current device, where the tensors are.

    Not seen after a kernel's first launch: changes of globals that it reads, and of Triton's debugging knobs.

    Args:
        kernel: decorated with `triton.jit`; in Triton's interpreter it is called as ever.
        num_programs: > 0.
        args: the first one a tensor.
        constants: `tl.constexpr` parameters and options of the launch, by name.

    Raises:
        TypeError: `constants` names a parameter that is not `tl.constexpr`: its value would be kept.
    """
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        kernel[(num_programs,)](*args, **constants)
        return
    first: Any = args[0]
    key = (id(kernel), first.get_device(), *constants.items(), *map(_specialized, args))
    known = _known.get(key)
    if known is None:
        trailing = _trailing(kernel, len(args), constants)
        _known[key] = kernel[(num_programs,)](*args, **constants), trailing
        return
    compiled, trailing = known
    compiled[num_programs, 1, 1](*args, *trailing)


def _specialized(arg: Any) -> Any:
    """Of an argument what Triton compiles for: dtype and alignment, or what is special about a number."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, arg.bit_length() > _WORD_BITS, arg.bit_length() > 2 * _WORD_BITS + 1
    return type(arg)


def _trailing(kernel: Any, num_positional: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Values of the parameters that are not given by position, in their order."""
    runtime = [p.name for p in kernel.params if p.name in constants and not p.is_constexpr]
    if runtime:
        raise TypeError(f"constants: expected tl.constexpr parameters and options, got {runtime}. Pass them in args.")
    values = [constants.get(p.name, p.default) for p in kernel.params[num_positional:]]
    assert inspect.Parameter.empty not in values
    return tuple(values)
