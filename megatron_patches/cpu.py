"""Megatron on a machine without a GPU, over gloo: for trials and tests, never chosen by itself.

Megatron asks torch.cuda for devices, random states, streams and memory wherever it runs. Inside `on_cpu()` these
questions have answers for a CPU, and tensors that are sent to "cuda" stay where they are. This is the one place where
attributes of torch are replaced, and only inside the block. Times that Megatron prints are the host's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megatron_patches import patches

_CPU = torch.device("cpu")
_TYPES = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool")


class _Done:
    """A stream or an event: everything it is asked to do is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: 0.0 if name == "elapsed_time" else self

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *error: object) -> None: ...


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _attributes_of_cuda() -> dict[str, Any]:
    """Return the attributes that torch.cuda has inside the block."""
    answers: dict[str, Any] = {
        "is_available": False,  # it asks device_count once DeepSpeed is imported; data loaders would pin memory
        "current_device": _CPU,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=1 << 34, major=9, minor=0, name="cpu"),
        "current_stream": _Done(),
        "default_stream": _Done(),
        "stream": contextlib.nullcontext(),
        "memory_stats": {},
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    }
    return {
        **{name: _constant(value) for name, value in answers.items()},
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TYPES},
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "Stream": _Done,
        "Event": _Done,
    }


def _here(device: Any) -> Any:
    return _CPU if isinstance(device, (str, torch.device)) and str(device).startswith("cuda") else device


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


def copy_helper(datasets: Path) -> bool:
    """Copy Megatron's compiled dataset helper, which a fresh clone lacks, from an installed megatron-core.

    Args:
        datasets: megatron/core/datasets of a clone, whose own helper is kept.

    Returns:
        Whether there is one afterwards.
    """
    name = f"helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    folders = [datasets, *(Path(entry) / "megatron/core/datasets" for entry in sys.path if entry)]
    found = next((folder / name for folder in folders if (folder / name).exists()), None)
    if found is not None and found.parent != datasets:
        shutil.copy(found, datasets)
        importlib.invalidate_caches()
    return found is not None


def _provide_helper() -> None:
    """Provide the dataset helper as _compile_dependencies does, without its kernels for GPUs, and without a compiler
    where megatron-core is installed. On all ranks."""
    if torch.distributed.get_rank() == 0:
        from megatron.core.datasets import utils

        if not copy_helper(Path(utils.__file__).parent):
            utils.compile_helpers()
    torch.distributed.barrier()


def _replacements(training: bool) -> dict[str, Callable[[Any], Any]]:
    def get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random = "megatron.core.tensor_parallel.random"
    found = {f"{random}._get_cuda_rng_state": _constant(get_rng_state)}
    found[f"{random}._set_cuda_rng_state"] = _constant(set_rng_state)
    if training:
        found["megatron.training.initialize._compile_dependencies"] = _constant(_provide_helper)
        found["megatron.training.training.initialize_megatron"] = lambda original: (
            lambda *args, **kwargs: original(*args, **{**kwargs, "allow_no_cuda": True})
        )
    return found


@contextlib.contextmanager
def on_cpu(*, training: bool = False) -> Iterator[None]:
    """Run Megatron on the CPU inside the block.

    Args:
        training: whether megatron.training is used, too; its process groups end with the block.
    """
    module_cuda = mock.patch.object(torch.nn.Module, "cuda", lambda self, device=None: self)
    with mock.patch.multiple(torch.cuda, **_attributes_of_cuda()), module_cuda, _CudaIsCpu():
        applied = patches.apply(_replacements(training))
        try:
            yield
            if training and torch.distributed.is_initialized():
                # Megatron's scripts leave that to the interpreter's end, which gloo's threads then abort at times.
                torch.distributed.destroy_process_group()
        finally:
            applied.remove()
