"""Which linears are worth FP8: a table of measured times, the files it lives in, and the choice that follows.

A row holds what one linear, forward and backward, takes the device and what it takes the host to launch, in FP8 and in
bf16. Rows hold where they were measured: with the same device, torch, CUDA, layers and kernels; of a table that ships,
with whatever layers and kernels. docs/layer-choice.md says how to read and make a table.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import date
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.convert import Plan
from fp8_ds.nn.sources import code_hash

SHIPPED = Path(__file__).with_name("tables")
"""One file per machine, written by benchmarks/layer_table.py."""

_CACHE_VARIABLE = "FP8_DS_CACHE"
_MAX_STEP = 2
"""Times are interpolated between token counts that differ by this factor at most."""
_MAX_KINDS = 10
"""All sets of so many kinds of linear are tried."""

_Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Machine(_Record):
    """Where times hold.

    Args:
        code: of fp8_ds's layers and kernels, see `code_hash`.
    """

    device: str
    torch_version: str
    cuda_version: str
    code: str

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """This process, computing on `device`."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        version = torch.__version__.partition("+")[0]
        cuda = torch.version.cuda or "none"
        return cls(device=name, torch_version=version, cuda_version=cuda, code=code_hash())

    def describe(self) -> str:
        return f"{self.device}, torch {self.torch_version}, CUDA {self.cuda_version}"


class Case(_Record):
    """A linear [m, k] x [n, k]: m tokens of one rank and micro-batch, k input and n output features of this rank.

    Args:
        fast_accumulation: of the configuration; None: the recipe's default.
    """

    recipe: str
    grad_dtype: str
    backend: str
    m: _Size
    k: _Size
    n: _Size
    bias: bool = False
    frozen: bool = False
    fast_accumulation: str | None = None

    def describe(self) -> str:
        more = ", bias" * self.bias + ", frozen" * self.frozen
        return f"[{self.n}, {self.k}]{more}"

    def linear_config(self) -> LinearConfig:
        """The "linear" block that asks for such GEMMs."""
        block: dict[str, Any] = {"recipe": self.recipe, "grad_dtype": self.grad_dtype, "backend": self.backend}
        if self.fast_accumulation is not None:
            block["fast_accumulation"] = self.fast_accumulation
        return LinearConfig.model_validate(block)


class Times(_Record):
    """Microseconds of one forward and backward: of the device, and of the host that launches them in eager mode."""

    fp8_us: _Microseconds
    bf16_us: _Microseconds
    fp8_host_us: _Microseconds
    bf16_host_us: _Microseconds

    @property
    def fp8_is_faster(self) -> bool:
        """On the device."""
        return self.fp8_us < self.bf16_us

    def verdict(self, in_fp8: bool) -> str:
        """Why the layer is what it is: "fp8: 410 us against 655 us".

        Args:
            in_fp8: what it is.
        """
        if in_fp8:
            return f"fp8: {self.fp8_us:.0f} us against {self.bf16_us:.0f} us"
        if not self.fp8_is_faster:
            return f"bf16 is faster: {self.bf16_us:.0f} us against {self.fp8_us:.0f} us"
        return (
            f"bf16: the GPU would wait for the host, which launches it in {self.fp8_host_us:.0f} us, in bf16 in "
            f"{self.bf16_host_us:.0f} us; the GPU takes {self.fp8_us:.0f} us against {self.bf16_us:.0f} us"
        )


class _Row(_Record):
    case: Case
    times: Times


class _File(_Record):
    version: Literal[3]
    machine: Machine
    measured: date
    rows: tuple[_Row, ...]


class LayerTable:
    """Times by case, of one machine.

    Args:
        machine: where they were measured.
        times: what is known.
        measured: the day of the last of them; None: today.
    """

    def __init__(
        self, machine: Machine, times: Mapping[Case, Times] | None = None, measured: date | None = None
    ) -> None:
        self.machine = machine
        self.times = dict(times or {})
        self.measured = measured or date.today()

    def add(self, times: Mapping[Case, Times]) -> None:
        """Rows that were measured just now."""
        self.times.update(times)
        self.measured = date.today()

    def lookup(self, case: Case) -> Times | None:
        """The row of `case`, or one on the line between its neighbours in m, if these are at most a factor of 2 apart.

        A linear in m, since a GEMM takes a fixed time and one for each token; None where nothing can be said.
        """
        if case in self.times:
            return self.times[case]
        others = {known.m: times for known, times in self.times.items() if _at(known, case.m) == case}
        below = max((m for m in others if m < case.m), default=0)
        above = min((m for m in others if m > case.m), default=0)
        if not below or not above or above > _MAX_STEP * below:
            return None
        share = (case.m - below) / (above - below)
        low, high = others[below], others[above]
        lows, highs = low.model_dump(), high.model_dump()
        return Times(**{name: us + share * (highs[name] - us) for name, us in lows.items()})

    @classmethod
    def read(cls, path: Path) -> LayerTable:
        """The table in `path`.

        Raises:
            ConfigError: the file is no table.
            OSError: it cannot be read.
        """
        try:
            file = _File.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path}: expected a layer table, got {where}: {first['msg']}. Remove the file."
            ) from error
        return cls(file.machine, {row.case: row.times for row in file.rows}, file.measured)

    def write(self, path: Path) -> None:
        """`path` holds this table: the old file or the new one at any moment, whoever reads or writes besides.

        Raises:
            OSError: it cannot be written.
        """
        rows = [_Row(case=case, times=self.times[case]).model_dump_json() for case in sorted(self.times, key=_order)]
        machine = self.machine.model_dump_json()
        head = f'{{"version": 3, "machine": {machine}, "measured": "{self.measured}", "rows": [\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(head + ",\n".join(rows) + "\n]}\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _at(case: Case, m: int) -> Case:
    return case.model_copy(update={"m": m})


def _order(case: Case) -> tuple[str | int, ...]:
    fast = case.fast_accumulation or ""
    return (case.recipe, case.grad_dtype, case.backend, fast, case.bias, case.frozen, case.k, case.n, case.m)


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


def cache_file(machine: Machine) -> Path:
    """Where what is measured on `machine` is kept: in $FP8_DS_CACHE, or ~/.cache/fp8_ds.

    Raises:
        ConfigError: there is no home directory.
    """
    folder = os.environ.get(_CACHE_VARIABLE)
    if not folder:
        try:
            folder = str(Path.home() / ".cache" / "fp8_ds")
        except RuntimeError as error:
            raise ConfigError(f"{_CACHE_VARIABLE}: expected a folder, got nothing, and no home. Set it.") from error
    device = re.sub(r"[^a-z0-9.]+", "-", machine.device.lower()).strip("-")
    versions = f"torch{machine.torch_version}-cuda{machine.cuda_version}-code{machine.code}"
    return Path(folder) / f"layer-table-v3-{device}-{versions}.json"


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
    faster.sort(key=lambda case: (-gain(case), _order(case)))
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
            self._say(f"fp8: the layer table is not kept, and will be measured again: {error}. Set {_CACHE_VARIABLE}.")


def _lookup(table: LayerTable, cases: Collection[Case]) -> dict[Case, Times]:
    return {case: times for case in cases if (times := table.lookup(case)) is not None}
