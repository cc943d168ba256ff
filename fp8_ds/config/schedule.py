"""Schedule of the layers that compute in bf16: arithmetic on names and steps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from fp8_ds.config import ScheduleConfig
from fp8_ds.errors import ConfigError

Precision = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class PrecisionSchedule:
    """The "schedule" block, for the layers of one model.

    Args:
        until: steps [0, until) are in bf16.
        last: steps [last, ...) are in bf16; None: none are for that reason.
        fixed: precision of the layers that the block's "layers" names, whatever the step.
    """

    until: int
    last: int | None
    fixed: Mapping[str, Precision]

    @classmethod
    def of(
        cls, config: ScheduleConfig, names: Collection[str], total_steps: object, may_miss: bool = False
    ) -> PrecisionSchedule:
        """Make the schedule of a model.

        Args:
            config: the "schedule" block.
            names: names of the layers in FP8.
            total_steps: number that DeepSpeed's learning-rate scheduler knows; the block's own comes first. With
                "auto", the start of the last fraction is left open.
            may_miss: whether "layers" may name layers that are not in FP8, as those of a preset may.

        Raises:
            ConfigError: there is a fraction of an unknown number of steps, or an entry of "layers" names no layer.
        """
        check_total(config, total_steps)
        total = config.total_steps or total_steps
        last = None
        if config.bf16_last_fraction and isinstance(total, int):
            # rounded up, but one step at least is in the fraction; 0.7 is 7/10, not the float
            last = min(math.ceil(total * (1 - Fraction(repr(config.bf16_last_fraction)))), total - 1)
        fixed: dict[str, Precision] = {}
        for pattern in sorted(config.layers, key=len):  # what names a layer more closely comes later
            found = matching(pattern, names)
            if not found and may_miss:
                continue
            if not found:
                raise ConfigError(
                    f"fp8.schedule.layers: expected names, or parts of names, of layers in FP8, got {pattern!r}. "
                    "`fp8-ds plan`, and the line that rank 0 logs at the start, say which layers are not."
                )
            fixed.update(dict.fromkeys(found, config.layers[pattern]))
        return cls(config.bf16_until_step, last, fixed)

    @property
    def is_never_fp8(self) -> bool:
        """Whether the steps alone put a whole run into bf16."""
        return self.last is not None and self.last <= self.until

    @property
    def is_constant(self) -> bool:
        """Whether the precision of no layer depends on the step."""
        return self.until == 0 and self.last is None

    def reason(self, step: int) -> str | None:
        """Say why step `step`, counted from 0, is in bf16; None if it is in FP8."""
        if step < self.until:
            return f"bf16_until_step {self.until}"
        if self.last is not None and step >= self.last:
            return f"bf16_last_fraction: from step {self.last}"
        return None

    def in_bf16(
        self,
        names: Sequence[str],
        step: int,
        overrides: Mapping[str, Precision],
        too_small: Collection[str] = frozenset(),
    ) -> frozenset[str]:
        """Return the layers among `names` that compute in bf16.

        Overrides come first, then "layers", then the layers that are too small for FP8, then the step.
        """
        usual: Precision = "fp8" if self.reason(step) is None else "bf16"
        by_size: Mapping[str, Precision] = dict.fromkeys(too_small, "bf16")
        return frozenset(n for n in names if overrides.get(n, self.fixed.get(n, by_size.get(n, usual))) == "bf16")


def check_total(config: ScheduleConfig, total_steps: object) -> None:
    """Raise a ConfigError if it is unknown when `bf16_last_fraction` begins. `total_steps` is the number of DeepSpeed's
    learning-rate scheduler; the program that starts the run fills in "auto"."""
    if config.bf16_last_fraction == 0 or config.total_steps is not None or total_steps == "auto":
        return
    if not isinstance(total_steps, int) or total_steps < 1:
        key = "scheduler.params.total_num_steps"
        other = f"no {key}" if total_steps is None else f"{key} {json.dumps(total_steps)}, which is no number of steps"
        raise ConfigError(
            "fp8.schedule.total_steps: expected the number of optimizer steps with bf16_last_fraction "
            f"{config.bf16_last_fraction}, got null, and {other}. Write it."
        )


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the layer of exactly that name; else those in the module of that name, `layers.1.` with its dot; else all
    whose names contain it."""
    inside = [name for name in names if pattern.endswith(".") and f"{name}.".startswith(pattern)]
    return [pattern] if pattern in names else inside or [name for name in names if pattern in name]


def saved_overrides(state: Mapping[str, Any] | None) -> dict[str, Precision]:
    """Return the overrides in what `LayerPrecision.state_dict` (engine/precision.py) returned.

    Layers that an older version's guard had sent to bf16 for a number of steps (`guard.return_after`) stay there.
    """
    if state is None:
        return {}
    stays = state.get("stays", {})  # (length, until, is_over) by layer
    return {**state["overrides"], **{name: "bf16" for name, (_, _, is_over) in stays.items() if not is_over}}
