"""Do all ranks start alike? One small all-gather at the start of `deepspeed.initialize` says so, or who differs how.

A job whose hosts read different configurations, have different packages or build different models trains something else
than anybody asked for, or hangs in its first collective. Each rank sends one row of digests; only where they differ is
more sent, and then every rank raises the same error. A rank whose own configuration is refused takes part too, so that
the others hear of it instead of waiting.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from fp8_ds.config import Fp8Config
from fp8_ds.engine.host_config import linear_in_training
from fp8_ds.engine.roll_call import is_one_of_many, take_side
from fp8_ds.engine.seam_check import installed_hashes
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.nn.convert import make_plan
from fp8_ds.tp.autotp import autotp_linears
from fp8_ds.tp.group import digest, gather_row

PACKAGES = ("fp8_ds", "torch", "deepspeed")
ITEMS = ("versions", "DeepSpeed's code", '"fp8" block', "configuration", "model", "layer plan")
OF_A_PART = ("model", "layer plan")
"""Compared only among ranks that hold the same part of the model: pipeline stages have modules of their own."""
OWN_KEYS = frozenset(
    {
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)
"""Of the configuration, each rank's own: logs, monitors and timers. All else may change numbers or collectives."""

_ROW = 16
"""Numbers in a row, more than there are items: versions of fp8_ds with other items still exchange rows."""
_NUM_SHOWN = 4

Item = dict[str, str]


@dataclass(frozen=True)
class Fingerprint:
    """What a rank starts with: name of an item -> entries of it, readable. `part`: which part of the model it holds."""

    items: dict[str, Item]
    part: str

    def row(self) -> list[int]:
        """int64s: not refused, the part, a digest for each of ITEMS, zeros up to _ROW."""
        texts = [json.dumps(self.items[name], sort_keys=True) for name in ITEMS]
        row = [0, digest(self.part), *map(digest, texts)]
        return row + [0] * (_ROW - len(row))


def fingerprint(
    fp8: Fp8Config, config: Mapping[str, Any], model: Any, mpu: Any, *, has_plan: bool = True
) -> Fingerprint:
    """Of this rank.

    Args:
        fp8: the block, defaults filled in.
        config: all of DeepSpeed's configuration.
        model: as `deepspeed.initialize` was given it; not an nn.Module: left to stock to refuse.
        mpu: likewise; names the tensor-parallel rank.
        has_plan: some layers may become FP8.

    Raises:
        ConfigError: no plan can be made for the model.
    """
    shared = {key: value for key, value in config.items() if key != "fp8" and key not in OWN_KEYS}
    items: dict[str, Item] = dict(
        zip(ITEMS, (_versions(), _seams(), _flat(fp8.model_dump()), _flat(shared)), strict=False)
    )
    is_module = isinstance(model, nn.Module)
    items["model"] = _parameters(model) if is_module else {}
    items["layer plan"] = _plan(model, fp8, config) if is_module and has_plan else {}
    return Fingerprint(items, _part(model, mpu))


def _versions() -> Item:
    import fp8_ds

    found = {"fp8_ds": fp8_ds.__version__, "torch": torch.__version__}
    try:
        found["deepspeed"] = version("deepspeed")
    except PackageNotFoundError:  # run from a checkout that is not installed
        import deepspeed

        found["deepspeed"] = deepspeed.__version__
    return {name: str(found[name]) for name in PACKAGES}


@cache
def _seams() -> Item:
    return installed_hashes()


def _flat(block: Any, prefix: str = "") -> Item:
    """Dotted key -> value as JSON. Places in the file system are left out: hosts have their own."""
    if isinstance(block, Mapping):
        found: Item = {}
        for key, value in block.items():
            if not str(key).endswith(("path", "dir", "folder", "file")):
                found.update(_flat(value, f"{prefix}{key}."))
        return found
    return {prefix.rstrip("."): json.dumps(block, default=lambda value: type(value).__name__)}


def _parameters(model: nn.Module) -> Item:
    """Name -> full shape, dtype, class of its module, whether it trains, and the first name of what it is tied to."""
    first: dict[int, str] = {}
    found = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if p is None:
                continue
            full = f"{fqn}.{name}" if fqn else name
            shape = list(getattr(p, "ds_shape", p.shape))
            notes = "" if p.requires_grad else ", frozen"
            if (tied := first.setdefault(id(p), full)) != full:
                notes += f", tied to {tied}"
            found[full] = f"{shape} {str(p.dtype).removeprefix('torch.')} of a {type(module).__name__}{notes}"
    return found


def _plan(model: nn.Module, fp8: Fp8Config, config: Mapping[str, Any]) -> Item:
    plan = make_plan(
        model,
        fp8.linear,
        may_be_empty=True,
        foreign=autotp_linears(model),
        device=_own_device(),
        linear=linear_in_training(config),
    )
    return {layer.fqn: "fp8" if layer.converted else f"bf16 ({layer.reason})" for layer in plan.layers}


def _own_device() -> torch.device:
    """That stock chooses for this rank, by LOCAL_RANK, later."""
    kind, local_rank = get_accelerator().device_name(), int(os.environ.get("LOCAL_RANK", "-1"))
    has_own = kind == "cuda" and 0 <= local_rank < torch.cuda.device_count()
    return torch.device(kind, local_rank) if has_own else torch.device(kind)


def _part(model: Any, mpu: Any) -> str:
    """Pipeline stage and tensor-parallel rank, where there are such."""
    stage = model.stage_id if isinstance(model, PipelineModule) else 0
    shard = 0
    if hasattr(mpu, "get_model_parallel_rank"):
        shard = mpu.get_model_parallel_rank()
    elif hasattr(model, "ds_autotp_parsed"):  # cut by deepspeed.tp_model_init before 0.19
        from deepspeed.utils import groups

        shard = groups.get_tensor_model_parallel_rank()
    return f"pipeline stage {stage}, tensor-parallel rank {shard}"


# --- the exchange ---


def agree(mine: Fingerprint | Fp8DsError, arguments: Mapping[str, Any]) -> None:
    """All ranks start alike. Collective over all ranks of the job, where there are several.

    Args:
        mine: of this rank, or why its own configuration is refused.
        arguments: of `deepspeed.initialize`.

    Raises:
        Fp8DsError: `mine`, if it is one.
        ConfigError: another rank's configuration is refused, or ranks differ; on all ranks. Or another rank has FP8
            off, and has come here first.
    """
    if is_one_of_many(arguments):
        mixed = take_side(True, arguments)
        if mixed is None:
            with _on_own_device():
                _exchange(mine)
        elif not isinstance(mine, Fp8DsError):
            raise mixed
    if isinstance(mine, Fp8DsError):
        raise mine


@contextmanager
def _on_own_device() -> Iterator[None]:
    """NCCL needs a device of its own for each rank, which stock chooses (by LOCAL_RANK) only later."""
    own = _own_device()
    if dist.get_backend() != "nccl" or own.index is None:
        yield
        return
    with torch.cuda.device(own):
        yield


def _exchange(mine: Fingerprint | Fp8DsError) -> None:
    row = [1, *[0] * (_ROW - 1)] if isinstance(mine, Fp8DsError) else mine.row()
    try:
        rows = gather_row(row).tolist()
    except RuntimeError as error:  # of the backend: a peer is gone, or did not come within the group's time-out
        raise Fp8DsError(
            f"rank {dist.get_rank()}: expected {dist.get_world_size()} ranks at the start of deepspeed.initialize with "
            f'"fp8" enabled, got {error}. Look for a rank that died, or whose configuration has no "fp8" block.'
        ) from error
    refused = [rank for rank, found in enumerate(rows) if found[0]]
    if len(refused) == len(rows):  # each raises its own
        return
    if refused:
        _share_refusals(mine, refused)
        return
    assert isinstance(mine, Fingerprint)
    lines = [line for name in ITEMS if (line := _difference(mine, name, rows))]
    if lines:
        raise ConfigError(
            f"expected {len(rows)} ranks that start alike, got {'; '.join(lines)}. Give all hosts the same packages, "
            "configuration and model."
        )


def _share_refusals(mine: Fingerprint | Fp8DsError, refused: list[int]) -> None:
    """Every rank knows the first refusal. Those that are refused raise their own afterwards."""
    text = [f"{type(mine).__name__}: {mine}" if isinstance(mine, Fp8DsError) else ""]
    dist.broadcast_object_list(text, src=refused[0])
    if not isinstance(mine, Fp8DsError):
        raise ConfigError(
            f"expected a configuration that no rank refuses, got one that ranks {refused} refuse. Rank {refused[0]}: "
            f"{text[0]}"
        )


def _difference(mine: Fingerprint, name: str, rows: list[list[int]]) -> str:
    """One line about item `name`, the same on all ranks; empty if no rank differs. Collective if one does.

    What most ranks have is the measure; of as many, what the lowest rank has.
    """
    column = 2 + ITEMS.index(name)
    parts: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        parts.setdefault(row[1] if name in OF_A_PART else 0, []).append(rank)
    for ranks in parts.values():
        counts = Counter(rows[rank][column] for rank in ranks)
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], -_first(ranks, rows, column, value)))
        base = _first(ranks, rows, column, usual)
        others = [rank for rank in ranks if rows[rank][column] != usual]
        return f"{name} on ranks {others} unlike rank {base}'s ({_detail(mine.items[name], base, others[0])})"
    return ""


def _first(ranks: list[int], rows: list[list[int]], column: int, value: int) -> int:
    return next(rank for rank in ranks if rows[rank][column] == value)


def _detail(mine: Item, base: int, other: int) -> str:
    """The first entries that differ between two ranks, known to all. Collective."""
    sent: list[Any] = [mine]
    dist.broadcast_object_list(sent, src=base)
    shown: list[Any] = [_compare(sent[0], mine, base, other) if dist.get_rank() == other else ""]
    dist.broadcast_object_list(shown, src=other)
    return str(shown[0])


def _compare(usual: Item, found: Item, base: int, other: int) -> str:
    keys = [key for key in {**usual, **found} if usual.get(key) != found.get(key)]
    shown = [
        f"{key} {usual.get(key, 'missing')} on rank {base}, {found.get(key, 'missing')} on rank {other}"
        for key in keys[:_NUM_SHOWN]
    ]
    more = f" and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else ""
    return ", ".join(shown) + more
