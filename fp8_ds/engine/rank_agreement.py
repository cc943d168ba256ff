"""Agreement of ranks on how they start, so that none waits for a collective that never comes.

One small all-gather at the start of `deepspeed.initialize` finds different configurations, packages and models. If
ranks differ, they send more and all name the difference. A refused rank takes part, so that others hear of it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from fp8_ds import __version__
from fp8_ds.engine.ranks import tell_all
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.tp.group import check_same, digest

if TYPE_CHECKING:
    from fp8_ds.config import Fp8Config

_LOGS = ("comet", "comms_logger", "csv_monitor", "log_level", "steps_per_print", "tensorboard", "wandb")
_TIMERS = ("dump_state", "flops_profiler", "memory_breakdown", "timers", "wall_clock_breakdown")
OWN_KEYS = frozenset((*_LOGS, *_TIMERS))
"""Keys that ranks may set differently: logs, monitors and timers. All others may change numbers or collectives."""
_NUM_SHOWN = 4


class Start(NamedTuple):
    """Settings that a rank starts with: text by name, both for a message.

    `own` is compared only among ranks with the same `part` of the model, because pipeline stages differ.
    """

    shared: dict[str, str]
    own: dict[str, str]
    part: str


def start_of_rank(fp8: Fp8Config, config: Mapping[str, Any], model: Any, mpu: Any, *, trains: bool) -> Start:
    """Return the settings that this rank starts with.

    Args:
        fp8: the block, defaults filled in.
        config: DeepSpeed's whole configuration.
        model, mpu: arguments of `deepspeed.initialize`, which itself refuses a model that is none.
        trains: whether there is an optimizer, without which no layer becomes FP8.

    Raises:
        ConfigError: no plan can be made for the model.
    """
    import deepspeed

    rest = {key: value for key, value in config.items() if key not in OWN_KEYS}
    versions = {"fp8_ds": __version__, "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    shared = {f"version of {name}": version for name, version in versions.items()}
    shared |= _seams() | _flat({**rest, "fp8": fp8.model_dump()})
    own = _parameters(model) if isinstance(model, nn.Module) else {}
    if own and trains:
        own |= _plan(model, fp8, config)
    return Start(shared, own, _part(model, mpu))


@cache
def _seams() -> dict[str, str]:
    """Return a digest of each body in DeepSpeed that FP8 relies on."""
    from fp8_ds.engine.seam_check import installed_hashes

    return {f"code of {path}": found for path, found in installed_hashes().items()}


def _flat(block: Any, prefix: str = "") -> dict[str, str]:
    """Return values as JSON by dotted key. Paths in the file system are left out, because hosts have their own."""
    if not isinstance(block, Mapping):
        return {prefix.rstrip("."): json.dumps(block, default=lambda value: type(value).__name__)}
    found: dict[str, str] = {}
    for key, value in block.items():
        if not str(key).endswith(("path", "dir", "folder", "file")):
            found |= _flat(value, f"{prefix}{key}.")
    return found


def _parameters(model: nn.Module) -> dict[str, str]:
    """Describe each parameter: full shape, dtype, class of its module, whether it trains, and what it is tied to."""
    first: dict[int, str] = {}
    found = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if p is not None:
                full = f"{fqn}.{name}" if fqn else name
                notes = "" if p.requires_grad else ", frozen"
                if (tied := first.setdefault(id(p), full)) != full:
                    notes += f", tied to {tied}"
                dtype, shape = str(p.dtype).removeprefix("torch."), list(getattr(p, "ds_shape", p.shape))
                found[full] = f"{shape} {dtype} of a {type(module).__name__}{notes}"
    return found


def _plan(model: nn.Module, fp8: Fp8Config, config: Mapping[str, Any]) -> dict[str, str]:
    """Say of each layer whether it becomes FP8. Hooks, patches and GPUs of a rank decide, too, not the model alone."""
    from fp8_ds.config.ds_config import linear_in_training
    from fp8_ds.nn.plan.plan import make_plan
    from fp8_ds.tp.autotp import autotp_linears

    foreign, linear = autotp_linears(model), linear_in_training(config)
    plan = make_plan(model, fp8.linear, may_be_empty=True, foreign=foreign, device=_own_device(), linear=linear)
    return {layer.fqn: "fp8" if layer.converted else f"bf16 ({layer.reason})" for layer in plan.layers}


def _own_device() -> torch.device:
    """Return the device that DeepSpeed will choose for this rank, by LOCAL_RANK."""
    from deepspeed.accelerator import get_accelerator

    kind, local_rank = get_accelerator().device_name(), int(os.environ.get("LOCAL_RANK", "-1"))
    has_own = kind == "cuda" and 0 <= local_rank < torch.cuda.device_count()
    return torch.device(kind, local_rank) if has_own else torch.device(kind)


def _part(model: Any, mpu: Any) -> str:
    """Name the pipeline stage and the tensor-parallel rank, 0 where there are none."""
    from deepspeed.runtime.pipe.module import PipelineModule

    stage = model.stage_id if isinstance(model, PipelineModule) else 0
    shard = mpu.get_model_parallel_rank() if hasattr(mpu, "get_model_parallel_rank") else 0
    return f"pipeline stage {stage}, tensor-parallel rank {shard}"


def start_alike(mine: Start | Fp8DsError, arguments: Mapping[str, Any]) -> None:
    """Check that all ranks start alike. Collective over all ranks of the job, where there are several.

    Args:
        mine: settings of this rank, or the error that refuses its configuration.
        arguments: arguments of `deepspeed.initialize`, by name.

    Raises:
        Fp8DsError: `mine`, if it is one.
        ConfigError: on all ranks, if another is refused or ranks differ; or a rank with FP8 off came first.
    """
    if is_one_of_many(arguments):
        mixed = take_side(True, arguments)
        if mixed is None:
            own = _own_device()  # NCCL needs one for each rank
            with torch.cuda.device(own) if dist.get_backend() == "nccl" and own.index is not None else nullcontext():
                _exchange(mine)
        elif not isinstance(mine, Fp8DsError):
            raise mixed
    if isinstance(mine, Fp8DsError):
        raise mine


def _exchange(mine: Start | Fp8DsError) -> None:
    refusal = f"{type(mine).__name__}: {mine}" if isinstance(mine, Fp8DsError) else ""
    digests = [] if isinstance(mine, Fp8DsError) else [digest(json.dumps(part, sort_keys=True)) for part in mine]
    try:
        told = tell_all((refusal, *digests))
    except RuntimeError as error:  # of the backend: a peer is gone, or did not come within the group's time-out
        raise Fp8DsError(
            f"rank {dist.get_rank()}: expected {dist.get_world_size()} ranks at the start of deepspeed.initialize with "
            f'"fp8" enabled, got {error}. Look for a rank that died, or whose configuration has no "fp8" block.'
        ) from error
    if refused := [rank for rank, (text, *_) in enumerate(told) if text]:
        if refusal:
            return
        raise ConfigError(
            f"expected a configuration that no rank refuses, got one that ranks {refused} refuse. Rank {refused[0]}: "
            f"{told[refused[0]][0]}"
        )
    pairs = {(own, part) for _, _, own, part in told}
    if len({shared for _, shared, *_ in told}) == 1 and len(pairs) == len({part for _, part in pairs}):
        return
    starts: list[Start] = tell_all(mine)
    lines = _differences({rank: start.shared for rank, start in enumerate(starts)})
    for part in sorted({start.part for start in starts}):
        lines += _differences({rank: start.own for rank, start in enumerate(starts) if start.part == part})
    raise ConfigError(
        f"expected {len(told)} ranks that start alike, got {'; '.join(lines)}. Give all hosts the same packages, "
        "configuration and model."
    )


def _differences(entries: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Describe in one line how ranks differ from most, or in a tie from the lowest rank; no line if none does."""
    texts = {rank: json.dumps(entries[rank], sort_keys=True) for rank in entries}
    usual = Counter(texts.values()).most_common(1)[0][0]
    base = next(rank for rank in texts if texts[rank] == usual)
    others = [rank for rank in texts if texts[rank] != usual]
    if not others:
        return []
    here, there = entries[base], entries[others[0]]
    shown = [
        f"{key} {here.get(key, 'missing')} on rank {base}, {there.get(key, 'missing')} on rank {others[0]}"
        for key in {**here, **there}
        if here.get(key) != there.get(key)
    ]
    more = f" and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    return [f"ranks {others} unlike rank {base} ({', '.join(shown[:_NUM_SHOWN])}{more})"]


def own_rank() -> int:
    """Return the rank in the default group, or the one that a launcher has set if the group does not exist yet."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_one_of_many(arguments: Mapping[str, Any]) -> bool:
    """Whether there are other ranks. If so, create the default group as DeepSpeed would do next, unless it exists."""
    if not dist.is_initialized():
        is_launched = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
        required = arguments.get("dist_init_required")
        if not is_launched or int(os.environ.get("WORLD_SIZE", "1")) < 2 or required is False:
            return False
        from deepspeed import comm as ds_comm
        from deepspeed.accelerator import get_accelerator

        options = {key: arguments[key] for key in ("distributed_port",) if key in arguments}
        backend = get_accelerator().communication_backend_name()
        ds_comm.init_distributed(dist_backend=backend, dist_init_required=required, **options)
    return dist.get_world_size() > 1


def take_side(is_on: bool, arguments: Mapping[str, Any]) -> ConfigError | None:
    """Mark in the default group's store whether "fp8" is on here; return an error if a rank has marked the other.

    Ranks without FP8 never join the all-gather: whichever side comes second raises, which ends the job. The n-th call
    of one rank is compared with the n-th of others. Calls with `mpu` are left out: only some ranks may make them.
    """
    store = distributed_c10d._get_default_store()
    if arguments.get("mpu") is not None or store is None:  # MPI has none
        return None
    rank, sides = dist.get_rank(), ("off", "on")
    try:
        number = store.add(f"fp8_ds/calls/{rank}", 1)
        store.set(f"fp8_ds/{number}/{sides[is_on]}", str(rank))
        others = f"fp8_ds/{number}/{sides[not is_on]}"
        if not store.check([others]):
            return None
        other = int(store.get(others))
    except RuntimeError:  # a store that cannot do this; or its host is gone, which collectives will say
        return None
    on, off = (rank, other) if is_on else (other, rank)
    return ConfigError(
        f"expected fp8 to be enabled on all ranks or on none, got it on rank {on} and not on rank {off}. Give all "
        "hosts the same configuration."
    )


def refuse_other_order(param_groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], group: Any) -> None:
    """Raise a ConfigError on all ranks if the order of the optimizer's parameters differs between ranks. Collective.

    Groups made from a set have another order in each process: DeepSpeed then adds up gradients of different parameters,
    silently where their sizes are alike.

    Args:
        param_groups: groups of the optimizer that ZeRO is to take over.
        names: names of the model's parameters.
        group: process group of ZeRO's ranks.
    """
    groups = enumerate(group["params"] for group in param_groups)
    order = [f"{names.get(p, 'none of the model')} in group {i}" for i, params in groups for p in params]
    remedy = "Build groups from lists, as named_parameters() gives them: sets have another order in each process."
    check_same("order of model_parameters", order, group, on_all_ranks=True, remedy=remedy)
