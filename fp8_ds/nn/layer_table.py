"""Measured times of linears, in FP8 and in bf16, and the files they live in.

A row holds what one linear, forward and backward, takes the device and what it takes the host to launch, in FP8 and in
bf16. Rows hold where they were measured: with the same device, torch, CUDA, layers and kernels; of a table that ships,
with whatever layers and kernels.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.sources import code_hash

CACHE_VARIABLE = "FP8_DS_CACHE"
_MAX_STEP = 2
"""Times are interpolated between token counts that differ by this factor at most."""

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
        rows = [
            _Row(case=case, times=self.times[case]).model_dump_json() for case in sorted(self.times, key=case_order)
        ]
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


def case_order(case: Case) -> tuple[str | int, ...]:
    fast = case.fast_accumulation or ""
    return (case.recipe, case.grad_dtype, case.backend, fast, case.bias, case.frozen, case.k, case.n, case.m)


def cache_file(machine: Machine) -> Path:
    """Where what is measured on `machine` is kept: in $FP8_DS_CACHE, or ~/.cache/fp8_ds.

    Raises:
        ConfigError: there is no home directory.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        try:
            folder = str(Path.home() / ".cache" / "fp8_ds")
        except RuntimeError as error:
            raise ConfigError(f"{CACHE_VARIABLE}: expected a folder, got nothing, and no home. Set it.") from error
    device = re.sub(r"[^a-z0-9.]+", "-", machine.device.lower()).strip("-")
    versions = f"torch{machine.torch_version}-cuda{machine.cuda_version}-code{machine.code}"
    return Path(folder) / f"layer-table-v3-{device}-{versions}.json"
