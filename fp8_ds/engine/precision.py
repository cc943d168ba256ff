"""Precision of layers: a schedule, a user or the guard can send them to bf16 for a while, their size for good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from fp8_ds.config import ScheduleConfig
from fp8_ds.config.schedule import Precision, PrecisionSchedule, matching, saved_overrides
from fp8_ds.engine.compat.model import PARALLEL_SCHEDULE
from fp8_ds.engine.ranks import tell_all
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.nn.linear.recipes import Bf16Recipe, DelayedRecipe
from fp8_ds.nn.plan.convert import fp8_layers, set_leaders

Request = Literal["bf16", "fp8", "schedule"]
REQUESTS = ("bf16", "fp8", "schedule")
_ELSEWHERE = "on another rank"


class LayerPrecision:
    """Precision of the FP8 layers of an engine, now and in the next step.

    Args:
        model: a converted model, whose ZeRO optimizer is built; `set_bf16` is the method of its `fp8`.
        config: the "schedule" block.
        total_steps: number of steps that the learning-rate scheduler knows.
        say: called with a line for rank 0.
        may_miss: whether "layers" may name layers that are not in FP8, as those of a preset may.

    Attributes:
        too_small: layers that gain nothing in FP8 (engine/sizes.py); `update` applies it.
        in_bf16: layers that compute in bf16 now.
        plain: those of them that do so for good, for their size alone: no amax of theirs is recorded.
        unrecorded: layers that were plain when the amax history, which may be a checkpoint's, was last updated.
        parallel: name of a tensor-parallel layer of this rank, which cannot change; empty if there is none.
        ended_in_bf16: layers that did so in the step that has just ended.

    Raises:
        ConfigError: the block names no layer, or a fraction of an unknown number of steps.
        UnsupportedError: the block is not empty, and layers are tensor-parallel.
    """

    def __init__(
        self,
        model: nn.Module,
        set_bf16: Callable[[frozenset[str]], None],
        config: ScheduleConfig,
        total_steps: int | None,
        say: Callable[[str], None],
        may_miss: bool = False,
    ) -> None:
        self._model = model
        converted = fp8_layers(model)
        self.parallel = next((fqn for fqn, m in converted.items() if m.is_parallel), "")
        if config != ScheduleConfig() and any(tell_all(self.parallel)):
            raise PARALLEL_SCHEDULE.error(self.parallel or _ELSEWHERE)
        self._linears = {fqn: m for fqn, m in converted.items() if m.weight.requires_grad}
        self._recipes: dict[str, Recipe] = {fqn: m.fp8_recipe for fqn, m in self._linears.items()}
        self._stand_ins: dict[tuple[str, bool], Bf16Recipe] = {}
        self._set_bf16 = set_bf16
        self._say = say
        self._saved_last: int | None = None
        self._may_miss = may_miss
        self.schedule = PrecisionSchedule.of(self._of_this_rank(config), self._linears, total_steps, may_miss)
        self.overrides: dict[str, Precision] = {}
        self.too_small: frozenset[str] = frozenset()
        self.in_bf16: frozenset[str] = frozenset()
        self.plain: frozenset[str] = frozenset()
        self.unrecorded: frozenset[str] = frozenset()
        self.ended_in_bf16: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers that can change: those in FP8 by the plan, frozen ones excepted."""
        return tuple(self._linears)

    def change(self, config: ScheduleConfig, change_recipes: Callable[[], None]) -> None:
        """Follow another "schedule" block, and take over recipes that `change_recipes` gives the layers. Collective.

        `update` applies it. Layers that are tensor-parallel follow none.
        """
        for fqn in self.in_bf16:
            self._linears[fqn].fp8_recipe = self._recipes[fqn]
        change_recipes()
        self._recipes = {fqn: m.fp8_recipe for fqn, m in self._linears.items()}
        self._stand_ins.clear()
        for fqn in self.in_bf16:
            self._linears[fqn].fp8_recipe = self._stand_in(fqn, fqn in self.plain)
        set_leaders(self._model)
        if not any(tell_all(self.parallel)):
            self.schedule = PrecisionSchedule.of(self._of_this_rank(config), self._linears, None, self._may_miss)

    @property
    def linears(self) -> Mapping[str, Any]:
        """The layers that can change, Fp8Linear or ExpertsWeight, by name."""
        return self._linears

    def update(self, step: int, line: str = "") -> None:
        """Set the precision of layers for step `step`, from 0, the same on all ranks. Collective where one changes.

        `line`: what rank 0 logs, in place of the usual, where a layer changes.
        """
        wanted = self.schedule.in_bf16(self.names, step, self.overrides, self.too_small)
        plain = (self.too_small & wanted) - self.overrides.keys() - self.schedule.fixed.keys()
        changed = (wanted ^ self.in_bf16) | (plain ^ self.plain)
        if wanted != self.in_bf16:
            self._set_bf16(frozenset(fqn + self._linears[fqn].weight_suffix for fqn in wanted))
        for fqn in changed:
            self._linears[fqn].fp8_recipe = self._stand_in(fqn, fqn in plain) if fqn in wanted else self._recipes[fqn]
        if plain != self.plain:
            set_leaders(self._model)
        self.in_bf16, self.plain = wanted, plain
        if self.unrecorded - plain:
            self._restart_history()
        self.unrecorded = plain
        if changed:
            why = f" ({self._reasons(wanted, step)})" if wanted else ""
            usual = f"fp8: from step {step} on {len(wanted)} of {len(self.names)} FP8 linears compute in bf16{why}"
            self._say(line or usual)

    def _stand_in(self, fqn: str, is_plain: bool) -> Bf16Recipe:
        """Return the layer's recipe for bf16, the same object each time."""
        return self._stand_ins.setdefault((fqn, is_plain), Bf16Recipe(self._recipes[fqn], is_plain))

    def _restart_history(self) -> None:
        """Let all layers with delayed scales use the tensor at hand until the next update.

        A layer has come back that recorded no amaxes: with a scale of 1 its gradients would all underflow once.
        """
        for recipe in self._recipes.values():
            if isinstance(recipe, DelayedRecipe) and recipe.history.ready:
                recipe.history.forget()

    def _reasons(self, in_bf16: frozenset[str], step: int) -> str:
        """Say why layers are in bf16 in step `step`: by the whole schedule where it asks for bf16, else by layer."""
        if whole := self.schedule.reason(step):
            return whole
        reasons = {
            "too small to gain": self.plain,
            "schedule.layers": self.schedule.fixed.keys() - self.overrides.keys(),
            "set_layer_precision, or the guard": self.overrides.keys(),
        }
        return ", ".join(reason for reason, layers in reasons.items() if in_bf16 & layers)

    def request(self, names: Sequence[str], precision: Request, between: str = "") -> list[str]:
        """Override the schedule for some layers, or leave them to it again; `update` applies it. Collective.

        See `Fp8Engine.set_layer_precision`.

        Args:
            between: position of this rank between a forward and the step that follows; empty if it is not there.

        Returns:
            The names of these layers, on all ranks the same: those of other pipeline stages too.
        """
        self._same_call(names, precision, between)
        if precision not in REQUESTS:
            raise ConfigError(f'precision: expected "bf16", "fp8" or "schedule", got {precision!r}. Use one of these.')
        found = self._everywhere(names)
        if missing := [name for name, layers in zip(names, found, strict=True) if not layers]:
            raise ConfigError(
                f"set_layer_precision: expected names of trainable layers in FP8, got {missing[:3]}. "
                "engine.fp8.precision.names lists them."
            )
        layers = sorted({layer for each in found for layer in each})
        for layer in layers:
            if precision == "schedule":
                self.overrides.pop(layer, None)
            else:
                self.overrides[layer] = precision
        return layers

    def _same_call(self, names: Sequence[str], precision: str, between: str) -> None:
        """Check that all ranks make the same call; all raise or none. Collective."""
        told = tell_all((list(names), precision, between, self.parallel))
        if any(parallel for *_, parallel in told):
            raise PARALLEL_SCHEDULE.error(self.parallel or _ELSEWHERE)
        if any(place for *_, place, _ in told):
            raise UnsupportedError(
                f"set_layer_precision: expected a call between optimizer steps, got one {between or _ELSEWHERE}. Call "
                "it after engine.step() at the boundary; a forward that no backward follows belongs under "
                "torch.no_grad()."
            )
        if any(call[:2] != told[0][:2] for call in told):
            raise ConfigError(
                f"set_layer_precision: expected the same call on all ranks, got ({list(names)[:3]}, {precision!r}) on "
                f"rank {dist.get_rank()} and another elsewhere. Decide on one rank and broadcast."
            )

    def _everywhere(self, patterns: Sequence[str]) -> list[list[str]]:
        """Return the layers of all ranks that each pattern means: pipeline stages have different ones. Collective.

        If a layer of any stage has exactly that name, the pattern means that one alone, on all stages.
        """
        if not patterns:
            return []
        here = [[name for name in self._linears if pattern in name] for pattern in patterns]
        told = tell_all(here)
        return [matching(pattern, {name for each in told for name in each[i]}) for i, pattern in enumerate(patterns)]

    def _of_this_rank(self, config: ScheduleConfig) -> ScheduleConfig:
        """Return `config` without "layers" that only other ranks have."""
        anywhere = zip(config.layers.items(), self._everywhere(list(config.layers)), strict=True)
        layers = dict(item for item, found in anywhere if not found or not self._linears.keys().isdisjoint(found))
        return config.model_copy(update={"layers": layers})

    def state_dict(self) -> dict[str, Any]:
        """Return builtin types: overrides, the same on all ranks; the step from which on the run ends in bf16; this
        rank's layers in bf16, for a reader; and those of them whose amaxes are not recorded."""
        return {
            "overrides": dict(self.overrides),
            "last": self.schedule.last,
            "in_bf16": sorted(self.in_bf16),
            "plain": sorted(self.plain),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over overrides of a checkpoint, also those of other stages' layers; `update` applies them."""
        self.overrides = saved_overrides(state)
        self._saved_last = None if state is None else state.get("last")  # an older version's has none
        self.unrecorded = frozenset() if state is None else frozenset(state.get("plain", ())) & self._linears.keys()

    def tell_of_resume(self, step: int) -> None:
        """Say so if the checkpoint, of step `step`, was in the bf16 steps that ended its run, and this run is not."""
        if self._saved_last is not None and self._saved_last <= step and self.schedule.reason(step) is None:
            until = "to the end" if self.schedule.last is None else f"until step {self.schedule.last}"
            self._say(
                f"fp8: the checkpoint is of the bf16 steps that ended its run, from step {self._saved_last} on; this "
                f"run goes back to FP8, {until}"
            )
