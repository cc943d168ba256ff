"""Comparison of an adapter's methods with the rows of seams.py and of stage.py with DeepSpeed's classes."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from fp8_ds.config import Fp8Config
from fp8_ds.engine import deepspeed_fixes, seams, zero_optimizer
from fp8_ds.zero import stage as hosts


def rows_of(cls: type) -> set[str]:
    """Methods of DeepSpeed's class `cls` that have a row of kind "override"."""
    start = f"{cls.__name__}."
    names = (seam for seam in seams.SEAMS if seam.kind == "override" and seam.module == cls.__module__)
    return {seam.name.removeprefix(start) for seam in names if seam.name.startswith(start)}


def methods_of(mixin: type) -> set[str]:
    """Functions that a class of ours puts before DeepSpeed's."""
    return {name for name, member in vars(mixin).items() if isinstance(member, FunctionType)}


def mixins_of(cls: type) -> list[type]:
    """Every class that may stand before DeepSpeed's `cls` besides the adapter: repairs, and what builds it."""
    found: list[type] = []
    for block in ({}, {"optimizer": {"states": "fp8"}}):
        config = Fp8Config.from_block({"enabled": True, "preset": None, **block})
        found += [mixin for mixin in deepspeed_fixes.mixins(cls, config, 0.0) if mixin not in found]
    with zero_optimizer.building(releases=True):
        places = zero_optimizer.engine_module, zero_optimizer.stage3_module
        built = [vars(place)[cls.__name__] for place in places if cls.__name__ in vars(place)]
    return found + [base for one in built for base in one.__mro__ if base.__module__ == zero_optimizer.__name__][1:]


def declared(protocol: Any) -> set[str]:
    """Attributes and methods of DeepSpeed's optimizer that a protocol of stage.py names."""
    return {
        name
        for kind in (protocol, hosts.ZeroHost)
        for name in (*vars(kind), *vars(kind).get("__annotations__", ()))
        if not name.startswith("__") and name not in ("_abc_impl", "_is_protocol", "_is_runtime_protocol")
    }
