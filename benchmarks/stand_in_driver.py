"""A driver of Triton's for a Hopper GPU that is not there: kernels are compiled, their launches are written down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

_HOPPER = GPUTarget("cuda", 90, 32)

Launched = tuple[int, tuple[Any, ...]]
"""The launcher of a compiled kernel, and what it was called with: tensors by their addresses, what is made anew for
hooks at each launch by its type."""


class StandInDriver:
    """For `triton.runtime.driver`'s `_active`, one in a process: compiled kernels keep the launcher they were given.

    Attributes:
        launched: since it was last cleared, by what `writes` says.
        writes: whether launches are written down.
    """

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.writes = True
        self.utils = self
        driver = self

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None:
                pass

            def __call__(self, *args: Any) -> None:
                if driver.writes:
                    driver.launched.append((id(self), tuple(map(_shown, args))))

        self.launcher_cls = Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return _HOPPER

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, most threads)."""
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


def _shown(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return "at", arg.data_ptr()
    if isinstance(arg, TensorDescriptor):
        return "at", arg.base.data_ptr(), tuple(arg.shape), tuple(arg.block_shape)
    return type(arg) if type(arg).__name__ == "LazyDict" else arg
