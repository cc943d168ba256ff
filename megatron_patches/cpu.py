"""Megatron on a machine without a GPU, over gloo: for trials and tests, never chosen by itself.

Megatron asks torch.cuda for devices, random states, streams and memory wherever it runs. Inside `on_cpu()` these
questions have answers for a CPU, and tensors that are sent to "cuda" stay where they are. This is the one place where
attributes of torch are replaced, and only inside the block. There are no clocks in it: times that Megatron prints are
the host's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_patches import patches
from megatron_patches.dataset_helpers import copy_helper

_CPU = torch.device("cpu")
_NAMELESS: dict[str, Any] = {
    "is_available": False,  # it asks device_count once DeepSpeed is imported; data loaders would pin memory
    "current_device": _CPU,
    "device_count": 1,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "get_device_capability": (9, 0),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "memory_stats": {},
    "get_device_properties": type("Properties", (), {"total_memory": 1 << 34, "major": 9, "minor": 0, "name": "cpu"})(),
}
_TENSOR_TYPES = tuple(
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool")
)


class _Anything:
    """A stream or an event: everything it is asked to do is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else True

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Event(_Anything): ...


class _Stream(_Anything):
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _here(device: Any) -> Any:
    is_cuda = (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
    return _CPU if is_cuda else device


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")  # Megatron's optimizers compare it with these names
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(_here(arg) for arg in args[1:]))
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _torch_attributes() -> list[tuple[Any, str, Any]]:
    cuda = torch.cuda
    stream = _Stream()
    found: list[tuple[Any, str, Any]] = [(cuda, name, _constant(value)) for name, value in _NAMELESS.items()]
    found += [(cuda, name, getattr(torch, name)) for name in _TENSOR_TYPES]
    found += [
        (cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
        (cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", _constant(stream)),
        (cuda, "default_stream", _constant(stream)),
        (cuda, "stream", _constant(contextlib.nullcontext())),
        (torch.nn.Module, "cuda", lambda self, device=None: self),
    ]
    return found


def _provide_dataset_helper() -> None:
    """What _compile_dependencies does, without its kernels for GPUs; without a compiler where megatron-core is
    installed. On all ranks."""
    if torch.distributed.get_rank() == 0:
        from megatron.core.datasets import utils

        if not copy_helper(Path(utils.__file__).parent):
            utils.compile_helpers()
    torch.distributed.barrier()


def _replacements(training: bool) -> dict[str, Callable[[Any], Any]]:
    found: dict[str, Callable[[Any], Any]] = {
        "megatron.core.tensor_parallel.random._get_cuda_rng_state": lambda stock: (
            lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
        ),
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": lambda stock: (
            lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
        ),
    }
    if training:
        found["megatron.training.training.initialize_megatron"] = lambda stock: (
            lambda *args, **kwargs: stock(*args, **{**kwargs, "allow_no_cuda": True})
        )
        found["megatron.training.initialize._compile_dependencies"] = lambda stock: _provide_dataset_helper
    return found


@contextlib.contextmanager
def on_cpu(*, training: bool = False) -> Iterator[None]:
    """Inside, Megatron runs on the CPU.

    Args:
        training: whether megatron.training is used, too; its process groups end with the block.
    """
    cuda_to_cpu = _torch_attributes()
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in cuda_to_cpu]
    for owner, name, value in cuda_to_cpu:
        setattr(owner, name, value)
    try:
        with _CudaIsCpu():
            applied = patches.apply(_replacements(training))
            try:
                yield
                if training and torch.distributed.is_initialized():
                    # Megatron's scripts leave that to the interpreter's end, which gloo's threads then abort at times.
                    torch.distributed.destroy_process_group()
            finally:
                applied.remove()
    finally:
        for owner, name, value in stock:
            setattr(owner, name, value)
