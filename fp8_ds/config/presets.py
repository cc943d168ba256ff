"""Presets of the "fp8" block: values for the keys that it does not write, by what is known of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Preset = Literal["auto", "fast", "precise", "serve"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
LAST_FRACTION = 0.03
"""Share of the steps that end a run in bf16, where their number is known."""
MIN_STEPS = 20
"""Steps of the shortest run that has such an end."""

Block = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """Facts of a run that a preset chooses by.

    Args:
        num_steps: optimizer steps of the whole run; "auto": a number that is filled in later; None: not known.
        ends: names of the first and last layer of each list of layers, each with a dot behind it; empty where the
            model has no list of layers.
        is_parallel: whether layers are tensor-parallel, so that their precision stays as it is.
        has_fa3: whether FlashAttention-3, with its backward, is installed and computes this model's attention.
        head: whole name of the model's head, with a dot behind it, if it is not called lm_head.
    """

    num_steps: int | Literal["auto"] | None = None
    ends: Sequence[str] = ()
    is_parallel: bool = False
    has_fa3: bool = False
    head: str = ""

    @property
    def has_last_steps(self) -> bool:
        """Whether the last steps can be told from the others, and are worth it."""
        is_long = self.num_steps == "auto" or (self.num_steps is not None and self.num_steps >= MIN_STEPS)
        return is_long and not self.is_parallel


def filled_in(block: Block, facts: Facts) -> dict[str, Any]:
    """Return `block` with its preset's values at the keys that it does not write.

    Args:
        block: value of the "fp8" key. One that is off, that asks for no preset (null), or whose preset is unknown, is
            returned as it is.
    """
    preset = block.get("preset", "auto")
    if block.get("enabled") is not True or preset not in PRESETS:
        return dict(block)
    filled: dict[str, Any] = {"preset": preset, **block}
    schedule = block.get("schedule")
    if isinstance(schedule, Mapping) and isinstance(total := schedule.get("total_steps"), int):
        facts = replace(facts, num_steps=total)
    for section, values in _values(preset, block, facts).items():
        if isinstance(written := block.get(section, {}), Mapping):
            filled[section] = {**values, **written}
    return filled


def is_written(block: Block, section: str, key: str) -> bool:
    """Whether the user wrote `section.key`, so that no preset decides it."""
    written = block.get(section)
    return isinstance(written, Mapping) and key in written


def _values(preset: Preset, block: Block, facts: Facts) -> dict[str, dict[str, Any]]:
    """Return a preset's values by section, without those that contradict what the block writes."""

    def written(section: str) -> Block:
        found = block.get(section)
        return found if isinstance(found, Mapping) else {}

    linear: dict[str, Any] = {"recipe": "delayed", "grad_dtype": "e4m3", "fast_accumulation": "output_and_grad_input"}
    if written("linear").get("recipe") == "blockwise":
        linear = {}  # its own defaults
    elif written("linear").get("backend") == "reference":
        linear["fast_accumulation"] = "output"
    ends = facts.ends if facts.is_parallel and preset != "serve" else ()
    if left := [name for name in (facts.head, *ends) if name]:
        linear["filter_fqns"] = ["lm_head", *left]
    if preset == "serve":
        linear["weight_scales"] = "power_of_two"
    values: dict[str, dict[str, Any]] = {
        "linear": linear,
        "activations": {"fused": True},
        "guard": {"action": "report" if facts.is_parallel else "bf16"},
    }
    values["schedule"] = _schedule(preset, written("schedule"), facts)
    if preset == "fast":
        values["optimizer"] = {"states": "fp8", "master": "e4m11"}
        if written("optimizer").get("states") == "fp32":
            values["optimizer"] = {}
        if facts.has_fa3:
            values["attention"] = {"backend": "fa3"}
    return values


def _schedule(preset: Preset, written: Block, facts: Facts) -> dict[str, Any]:
    """Return what stays in bf16: the last steps if their number is known, else the first and last layer.

    A fraction that the user writes is one of the steps that are known, with any preset.
    """
    if facts.is_parallel:
        return {}
    values: dict[str, Any] = {}
    if preset in ("auto", "fast") and facts.has_last_steps:
        values["bf16_last_fraction"] = LAST_FRACTION
    elif preset == "precise" or (preset != "serve" and not written.get("bf16_last_fraction")):
        values["layers"] = dict.fromkeys(facts.ends, "bf16")
    if isinstance(facts.num_steps, int) and written.get("bf16_last_fraction", values.get("bf16_last_fraction")):
        values["total_steps"] = facts.num_steps
    return values
