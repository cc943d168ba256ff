"""FP8 training for DeepSpeed: `import fp8_ds`, and `"fp8": {"enabled": true}` in the JSON configuration.

Importing has one effect: `install()`. It wraps `deepspeed.initialize`, now or when deepspeed is imported; without the
"fp8" block nothing else is touched. `uninstall()` undoes it. torch and deepspeed are not imported from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fp8_ds.engine.install import install, is_installed, uninstall

__version__ = "0.1.0"

_LAZY = {
    "CheckpointError": "fp8_ds.errors",
    "ConfigError": "fp8_ds.errors",
    "Fp8AdamW": "fp8_ds.optim.adamw",
    "Fp8Config": "fp8_ds.config",
    "Fp8DsError": "fp8_ds.errors",
    "Fp8Linear": "fp8_ds.nn.linear.fp8_linear",
    "Fp8Parameter": "fp8_ds.nn.linear.parameter",
    "SeamError": "fp8_ds.errors",
    "UnsupportedError": "fp8_ds.errors",
}
_MODULES = ("attention", "checkpoint", "errors", "monitor", "tools", "tp")
"""Of docs/api, imported when they are first named: `import fp8_ds` is enough for `fp8_ds.tp.parallelize`."""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Fp8AdamW",
    "Fp8Config",
    "Fp8DsError",
    "Fp8Linear",
    "Fp8Parameter",
    "SeamError",
    "UnsupportedError",
    "install",
    "is_installed",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
