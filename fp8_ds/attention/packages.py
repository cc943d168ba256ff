"""Discovery of FlashAttention: where it is installed, what the build can do, and how to install it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8_ds.errors import UnsupportedError

FA3_NAMES = (
    "flash_attn_interface",
    "flash_attn_3.flash_attn_interface",
    "flashattn_hopper.flash_attn_interface",
    "fa3_fwd_interface",
)
"""Modules that FlashAttention-3 has been installed as, best first. A name alone proves nothing: the registry's package
of the first name is empty."""

_CONFIG_NAMES = ("flash_attn_config", "flash_attn_3.flash_attn_config", "fa3_fwd_config")
_DISABLED = "DISABLE_"

INSTALL_FA3 = (
    "Install it: `pip install fa3-fwd` (forward only: bf16 and FP8, no windows; the backward is cuDNN's or torch's "
    "flash backward then), or from source with its backward: `git clone "
    "https://github.com/Dao-AILab/flash-attention && pip install ./flash-attention/hopper`"
)


@dataclass(frozen=True)
class FlashAttention3:
    """An installed FlashAttention-3.

    Args:
        module: name that it was imported by.
        forward: its raw forward, (out, lse, ...).
        backward: its raw backward, or None if the build has none.
        flags: build flags, such as {"FLASHATTENTION_DISABLE_LOCAL": True}; empty where the build does not list them.
    """

    module: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    flags: Mapping[str, bool] = field(default_factory=dict)

    def lacks(self, feature: str) -> bool:
        """Whether the build was made without `feature`: "LOCAL", "FP8", "FP16", "VARLEN", "HDIM64", ..."""
        return any(off and name.endswith(_DISABLED + feature) for name, off in self.flags.items())

    def describe(self) -> str:
        other = "forward only: backward in bf16 by cuDNN, or torch's flash attention"
        lacking = [name.lower() for name in ("FP8", "FP16", "LOCAL", "VARLEN") if self.lacks(name)]
        without = f", built without {', '.join(lacking)}" if lacking else ""
        return f"{self.module}, {'its own backward' if self.backward else other}{without}"


@functools.cache
def find_fa3() -> FlashAttention3:
    """Find the installed FlashAttention-3.

    Raises:
        UnsupportedError: none can be imported. The message has what each name gave, and the install commands.
    """
    found = []
    for name in FA3_NAMES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library of the package's does not load
            is_absent = isinstance(error, ModuleNotFoundError) and str(error.name) in name
            found.append(f"{name}: {'not installed' if is_absent else f'{type(error).__name__} ({error})'}")
            continue
        forward = getattr(module, "_flash_attn_forward", None)
        if not callable(forward):
            found.append(f"{name}: imported, but has no _flash_attn_forward; it is another package or an empty one")
            continue
        flags = _build_flags(name)
        disabled = any(off and key.endswith(_DISABLED + "BACKWARD") for key, off in flags.items())
        backward = None if disabled or name == "fa3_fwd_interface" else getattr(module, "_flash_attn_backward", None)
        return FlashAttention3(name, forward, backward, flags)
    raise UnsupportedError(f"FlashAttention-3: expected an installed package, got {'; '.join(found)}. {INSTALL_FA3}.")


def _build_flags(interface: str) -> Mapping[str, bool]:
    """Return the build flags of the config module that came with this interface."""
    for name in _CONFIG_NAMES:
        if (name == "fa3_fwd_config") != (interface == "fa3_fwd_interface"):
            continue
        try:
            return dict(importlib.import_module(name).CONFIG["build_flags"])
        except (ImportError, AttributeError, KeyError):
            continue
    return {}


def require_hopper(device: torch.device) -> None:
    """Raise UnsupportedError unless FlashAttention-3 runs on that GPU."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability[0] != 9:
        found = device.type if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(
            f"FlashAttention-3: expected a Hopper GPU (compute capability 9.0), got {found}. Use the model's "
            "own attention, or the backend fa3_fp8_emulated to try the numerics elsewhere."
        )


def call_by_name(function: Callable[..., Any], **known: Any) -> Any:
    """Call `function` with the arguments that it has; the others take their default, or None where they have none.

    The order and the names of the raw functions have moved between releases: `window_size` became two numbers,
    `causal` became `is_causal`.
    """
    if "window_size_left" in known:
        known["window_size"] = (known["window_size_left"], known["window_size_right"])
    known["is_causal"] = known["causal"]
    given = {name: known.get(name) for name, has_default in _parameters(function) if name in known or not has_default}
    return function(**given)


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it has a default) of each; of a torch custom op, those of the function behind it."""
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return tuple((name, one.default is not one.empty) for name, one in signature.parameters.items())


CUDNN_REMEDY = (
    "something loaded it before torch could load its own (Transformer Engine loads that of CUDA_HOME): let CUDNN_HOME "
    "name the folder of torch's, nvidia/cudnn beside it, and LD_LIBRARY_PATH no folder with a cuDNN"
)
_CUDNN_FIRST = ((9, 0), (10, 0))
"""Compute capabilities on which SDPA prefers cuDNN, if it is new enough. Source: torch 2.13's sdp_utils.cpp."""


def prefers_cudnn(device: torch.device) -> bool:
    """Whether SDPA on this device would take cuDNN before all else, were it as new as torch's."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _CUDNN_FIRST


def older_cudnn() -> str | None:
    """Describe a loaded cuDNN that is older than torch's own build; None if it is not, or torch has no cuDNN.

    SDPA then silently takes FlashAttention 2 (seen with 9.14 for 9.19), which needs 1.8 times as long on an H200.
    """
    cudnn = getattr(torch._C, "_cudnn", None)
    if cudnn is None:
        return None
    loaded, built = cudnn.getRuntimeVersion(), cudnn.getCompileVersion()
    if loaded[:2] >= built[:2]:
        return None
    return f"cuDNN {'.'.join(map(str, loaded))} is loaded, torch was built with {'.'.join(map(str, built))}"
