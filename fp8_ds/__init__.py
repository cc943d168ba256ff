"""FP8 training for DeepSpeed: `import fp8_ds`, and `"fp8": {"enabled": true}` in the JSON configuration.

Importing has one effect: `install()`. It wraps `deepspeed.initialize`, now or when deepspeed is imported; without the
"fp8" block nothing else is touched. `uninstall()` undoes it. torch and deepspeed are not imported from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fp8_ds.engine.activation import install, is_installed, uninstall

__version__ = "0.1.0"

_LAZY = {
    "ConfigError": "fp8_ds.errors",
    "Fp8AdamW": "fp8_ds.optim.adamw",
    "Fp8Config": "fp8_ds.config",
    "Fp8Linear": "fp8_ds.nn.linear",
    "Fp8Parameter": "fp8_ds.zero.parameter",
    "SeamError": "fp8_ds.errors",
    "UnsupportedError": "fp8_ds.errors",
}

__all__ = [
    "ConfigError",
    "Fp8AdamW",
    "Fp8Config",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
