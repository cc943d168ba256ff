"""Which linears are worth FP8: what follows from measured times, and which tables of these hold here.

docs/layer-choice.md says how to read and make a table (layer_table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.convert import Plan
from fp8_ds.nn.layer_table import CACHE_VARIABLE, Case, LayerTable, Machine, Times, cache_file, case_order

SHIPPED = Path(__file__).with_name("tables")
"""One file per machine, written by benchmarks/layer_table.py."""

_MAX_KINDS = 10
"""All sets of so many kinds of linear are tried."""


def not_measured(machine: Machine, more: str = "") -> ConfigError:
    """What is raised where times are wanted that nobody can take.

    Args:
        machine: there.
        more: end of the sentence that says so.
    """
    return ConfigError(
        f'fp8.linear.layer_choice: expected "all" on {machine.device}, got "measured". Only CUDA devices are measured'
        f'{more}. Write "all", or remove the key.'
    )


def cases_of(model: nn.Module, plan: Plan, config: LinearConfig) -> dict[str, Case]:
    """The case of each linear that `plan` converts, by name. Experts have none: they are in FP8 unmeasured.

    Args:
        model: of the plan, not converted yet.
        plan: from `make_plan`.
        config: the "linear" block, with `tokens`.
    """
    assert config.tokens is not None
    by_default = LinearConfig.model_validate({"recipe": config.recipe}).fast_accumulation
    found = {}
    for row in plan.layers:
        if not row.converted or row.num_experts:  # how many tokens an expert gets, nobody knows
            continue
        module: Any = model.get_submodule(row.fqn)
        found[row.fqn] = Case(
            recipe=config.recipe,
            grad_dtype=config.grad_dtype,
            backend=config.backend,
            m=config.tokens,
            k=row.in_features,
            n=row.out_features,
            bias=module.bias is not None,
            frozen=not module.weight.requires_grad,
            fast_accumulation=None if config.fast_accumulation == by_default else config.fast_accumulation,
        )
    return found


def worth_fp8(counts: Mapping[Case, int], times: Mapping[Case, Times]) -> frozenset[Case]:
    """The kinds of linear that are to be in FP8: those with which all linears together take the least.

    In eager mode host and device work side by side, and a step takes as long as the slower of them: where the host is
    the slower one, FP8 has nothing to gain and more to launch. Of the work between linears nothing is assumed. Of more
    than ten kinds that are faster on the device not every set is tried: they come in by what each saves there for a
    microsecond that it costs the host.

    Args:
        counts: how many linears of each kind there are.
        times: of every kind.
    """

    def gain(case: Case) -> float:
        found = times[case]
        return (found.bf16_us - found.fp8_us) / max(found.fp8_host_us - found.bf16_host_us, 1e-3)

    def microseconds(in_fp8: Collection[Case]) -> float:
        device = host = 0.0
        for case, count in counts.items():
            found = times[case]
            device += count * (found.fp8_us if case in in_fp8 else found.bf16_us)
            host += count * (found.fp8_host_us if case in in_fp8 else found.bf16_host_us)
        return max(device, host)

    faster = [case for case in counts if times[case].fp8_is_faster]
    faster.sort(key=lambda case: (-gain(case), case_order(case)))
    sizes = range(len(faster) + 1)
    sets: Iterable[Collection[Case]] = (faster[:num] for num in sizes)
    if len(faster) <= _MAX_KINDS:
        sets = chain.from_iterable(combinations(faster, num) for num in sizes)
    best = min(sets, key=microseconds)  # of equals the smallest
    return frozenset(best)


def choose(plan: Plan, cases: Mapping[str, Case], times: Mapping[Case, Times], in_fp8: Collection[Case]) -> Plan:
    """`plan`, where layers that are not worth FP8 stay bf16; reasons name the times.

    Args:
        plan: from `make_plan`.
        cases: of `cases_of`.
        times: of every one of these.
        in_fp8: of `worth_fp8`.
    """
    rows = []
    for row in plan.layers:
        case = cases.get(row.fqn)
        if case is None:
            rows.append(row)
            continue
        converted = case in in_fp8
        rows.append(replace(row, converted=converted, reason=f"{times[case].verdict(converted)} at M {case.m}"))
    return replace(plan, layers=tuple(rows))


class Book:
    """All tables that hold on this machine: what was kept, what ships, and what is measured now.

    Args:
        device: that the layers will run on.
        say: called with a line when something is measured, kept or unreadable.
        measure: the times of a case on `device`; None: nothing can be measured there.
    """

    def __init__(
        self, device: torch.device, say: Callable[[str], None], measure: Callable[[Case], Times] | None
    ) -> None:
        self.machine = Machine.of(device)
        self.path = cache_file(self.machine)
        self._say = say
        self._measure = measure

    def times_of(self, cases: Collection[Case]) -> dict[Case, Times]:
        """The times of all `cases`; those that no table has are measured, and kept for the next start.

        Raises:
            ConfigError: some are in no table and cannot be measured.
        """
        own = self._read(self.path)
        found = {} if own is None or own.machine != self.machine else _lookup(own, cases)
        for path in sorted(SHIPPED.glob("*.json")):
            found |= self._look_up_shipped(path, [case for case in cases if case not in found])
        missing = [case for case in cases if case not in found]
        if not missing:
            return found
        if self._measure is None:
            raise not_measured(
                self.machine, f", and {self.path} has no row for {missing[0]!r} ({len(missing)} missing)"
            )
        self._say(
            f"fp8: measuring {len(missing)} kinds of linear at {missing[0].m} tokens on {self.machine.describe()}; "
            f"they are kept in {self.path}"
        )
        measured = {case: self._measure(case) for case in missing}
        self._keep(measured)
        return found | measured

    def _look_up_shipped(self, path: Path, cases: Collection[Case]) -> dict[Case, Times]:
        """What the table in `path` has of `cases`, of whatever code it is; says of which."""
        table = self._read(path)
        here = self.machine.code
        if table is None or table.machine.model_copy(update={"code": here}) != self.machine:
            return {}
        found = _lookup(table, cases)
        if found:
            code = table.machine.code
            by = "this code" if code == here else f"other layers and kernels (code {code}, this is {here})"
            self._say(
                f"fp8: {len(found)} kinds of linear have times from {path.name}, which ships with fp8_ds: measured on "
                f"{table.measured} with {by}; `python benchmarks/layer_table.py` measures anew"
            )
        return found

    def _read(self, path: Path) -> LayerTable | None:
        """The table in `path` if there is one; says so if it cannot be read."""
        try:
            return LayerTable.read(path)
        except FileNotFoundError:
            return None
        except (ConfigError, OSError) as error:
            self._say(f"fp8: a layer table is not used: {error}")
            return None

    def _keep(self, measured: Mapping[Case, Times]) -> None:
        """Add rows to the file as it is by now: another process may have written since it was read."""
        try:
            table = LayerTable.read(self.path)
        except (ConfigError, OSError):
            table = LayerTable(self.machine)
        if table.machine != self.machine:  # copied by hand
            table = LayerTable(self.machine)
        table.add(measured)
        try:
            table.write(self.path)
        except OSError as error:
            self._say(f"fp8: the layer table is not kept, and will be measured again: {error}. Set {CACHE_VARIABLE}.")


def _lookup(table: LayerTable, cases: Collection[Case]) -> dict[Case, Times]:
    return {case: times for case in cases if (times := table.lookup(case)) is not None}
