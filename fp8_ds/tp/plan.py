"""parallelize: shard a model's linears over a tensor-parallel group, and its activations between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from fp8_ds.config import TensorParallelConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.moe.experts import is_experts
from fp8_ds.tp.block_inputs import gather_once, shard_tokens
from fp8_ds.tp.context import TensorParallel
from fp8_ds.tp.group import check_group, check_same, device_of
from fp8_ds.tp.linears import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    contexts_of,
    sum_gradient,
)
from fp8_ds.tp.rules import RULES


@dataclass(frozen=True)
class TensorParallelPlan:
    """Roles of a model's modules, by patterns (`fnmatch`) of their names.

    Args:
        heads: column-parallel, sharded between heads; the module around them has `head_dim`.
        column: column-parallel.
        row: row-parallel.
        row_heads: row-parallel, sharded between heads.
        blocks: modules whose first argument all column-parallel linears inside read, and nothing else does: it is
            gathered (without sequence parallelism: its gradient summed) once for all of them. They read it as it is,
            and row-parallel ones give tokens in the same order.
        first: the module at whose input tokens are sharded.
        last: the module at whose output they are gathered.
        in_shards: modules that compute token by token between the two and have replicated Parameters; their
            gradients are summed over the group. Before and behind the two every rank has the whole gradient.
        in_heads: modules inside blocks that compute head by head and have Parameters which all heads share; a rank has
            its own heads' part of their gradients, which are summed.

    Raises:
        ConfigError: a field has no patterns where it should, such as a string in place of a tuple.
    """

    heads: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    row_heads: tuple[str, ...]
    blocks: tuple[str, ...]
    first: str
    last: str
    in_shards: tuple[str, ...]
    in_heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            value, is_single = getattr(self, one.name), one.name in ("first", "last")
            patterns = (value,) if is_single else value
            if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) and p for p in patterns):
                expected = "a pattern" if is_single else "a tuple of patterns"
                raise ConfigError(
                    f"plan.{one.name}: expected {expected} of modules' names, got {value!r}. Write "
                    + ('"*layers.0".' if is_single else '("*layers.*.mlp",), or () for none.')
                )


LLAMA = TensorParallelPlan(
    heads=("*layers.*.self_attn.q_proj", "*layers.*.self_attn.k_proj", "*layers.*.self_attn.v_proj"),
    column=("*layers.*.mlp.gate_proj", "*layers.*.mlp.up_proj"),
    row=("*layers.*.mlp.down_proj",),
    row_heads=("*layers.*.self_attn.o_proj",),
    blocks=("*layers.*.self_attn", "*layers.*.mlp"),
    first="*layers.0",
    last="*norm",
    in_shards=("*layers.*.input_layernorm", "*layers.*.post_attention_layernorm", "*norm"),
)
"""transformers' LlamaForCausalLM or LlamaModel, and models with its names and dataflow (Mistral, Qwen2). Embedding,
lm_head and loss are computed on every rank."""
QWEN3 = replace(LLAMA, in_heads=("*layers.*.self_attn.q_norm", "*layers.*.self_attn.k_norm"))
"""transformers' Qwen3ForCausalLM or Qwen3Model, whose attention normalises queries and keys."""


def parallelize(
    model: nn.Module,
    plan: TensorParallelPlan,
    tp_group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    config: TensorParallelConfig | None = None,
) -> TensorParallel:
    """Shard `model` in place; the "fp8" block of deepspeed.initialize says later what is in FP8. Collective.

    Replicated Parameters and buffers become those of the group's first rank. Call it on all ranks of the world, with
    the model whole and the same, before `deepspeed.initialize(..., mpu=...)` (`ParallelGroups` is such an mpu).

    Args:
        model: names as in `plan`; in high precision.
        plan: which modules are sharded how.
        tp_group: this rank's; groups of different ranks are the same or do not overlap.
        sequence_parallel: whether activations outside the blocks are sharded by tokens, and gathered and
            reduce-scattered at their borders; else they are on all ranks, and all-reduced.
        config: how layers communicate; under DeepSpeed the "tensor_parallel" block replaces it.

    Returns:
        The context that the layers share.

    Raises:
        ConfigError: on all ranks: a rank is not in its group, models differ, the plan does not fit or does not divide,
            something in `config` cannot take effect. Nothing is changed then.
    """
    check_group(tp_group)
    texts = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
    texts += [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    texts += [f"{plan}", f"sequence_parallel={sequence_parallel} {config}"]
    check_same("model", texts, tp_group, on_all_ranks=True)
    tp = TensorParallel(tp_group, sequence_parallel, config)  # from here on all ranks see the same
    shardings = _shardings(model, plan, tp)
    blocks = _matching(model, plan.blocks)
    summed = _matching(model, plan.in_heads)
    _check_named("inside its blocks", "in_heads", blocks, [*(one.module for one in shardings), *summed.values()])
    if sequence_parallel:
        first, last = _one(model, plan.first), _one(model, plan.last)
        summed |= _matching(model, plan.in_shards)
        around = {name: model.get_submodule(name) for block in blocks if (name := block.rpartition(".")[0])}
        _check_named("beside its blocks", "in_shards", around, [*(one.module for one in shardings), *summed.values()])
    replicated = _replicated(summed, shardings)
    first_block = next((name for name, _ in model.named_modules() if name in blocks), "")
    for one in shardings:
        one.kind.from_full(one.module, tp, one.unit)
    _replicate(model, tp)
    for name, block in blocks.items():
        gather_once(block, tp, is_first=name == first_block)
    if sequence_parallel:
        shard_tokens(first, last, tp)
    for p in replicated:
        sum_gradient(p, tp)
    return tp


def configure(model: nn.Module, config: TensorParallelConfig, recipe: str) -> None:
    """Make the layers that `parallelize` has sharded communicate as `config` says; call it before they are FP8.

    Raises:
        ConfigError: `config` is not the default, and the model has no such layers; or it has some, and they have no
            FP8 gather for `recipe`.
    """
    contexts = contexts_of(model)
    if not contexts and config != TensorParallelConfig():
        raise ConfigError(
            "fp8.tensor_parallel: expected a model that fp8_ds.tp.parallelize has sharded, got one without parallel "
            "layers. Call it before deepspeed.initialize, or remove the key."
        )
    if contexts and config.gather == "fp8" and recipe not in RULES:
        raise ConfigError(
            f"fp8.linear.recipe: expected one of {', '.join(RULES)} with tensor-parallel layers and "
            f'fp8.tensor_parallel.gather "fp8", got {recipe}. Use one of these, or "gather": "bf16".'
        )
    for tp in contexts:
        tp.set_config(config)


@dataclass(frozen=True)
class _Sharding:
    fqn: str
    module: nn.Linear
    kind: type[ParallelLinear]
    unit: int


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return modules by name. Raises ConfigError where a pattern matches none."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = [name for name in modules if _matches(name, pattern)]
        if not matches:
            raise ConfigError(
                f"plan: expected a module named {pattern!r}, got none in {type(model).__name__}. Use the plan of this "
                "kind of model."
            )
        found.update((name, modules[name]) for name in matches)
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether `fnmatch` matches; a star matches no dot but at the beginning: layers.*.mlp is no layers.0.x.mlp."""
    tail = pattern.removeprefix("*")
    parts, wanted = name.split("."), tail.split(".")
    if len(parts) < len(wanted) or (tail == pattern and len(parts) != len(wanted)):
        return False
    return all(fnmatchcase(part, want) for part, want in zip(parts[-len(wanted) :], wanted, strict=True))


def _shardings(model: nn.Module, plan: TensorParallelPlan, tp: TensorParallel) -> list[_Sharding]:
    """Return the linears to shard, and how.

    Raises:
        ConfigError: some cannot be sharded; the message names all of them.
    """
    shardings: list[_Sharding] = []
    problems: list[str] = []
    places: dict[str, str] = {}
    for place, kind in (
        ("heads", ColumnParallelLinear),
        ("column", ColumnParallelLinear),
        ("row", RowParallelLinear),
        ("row_heads", RowParallelLinear),
    ):
        for fqn, module in _matching(model, getattr(plan, place)).items():
            if (other := places.setdefault(fqn, place)) != place:
                problems.append(f"{fqn}: in `{other}` of the plan, and in `{place}` too")
                continue
            unit = 1
            if "heads" in place:
                around = model.get_submodule(fqn.rpartition(".")[0])
                if (unit := int(getattr(around, "head_dim", 0))) < 1:
                    problems.append(f"{fqn}: a {type(around).__name__} around it, whose `head_dim` is not known")
                    continue
            shardings.append(_Sharding(fqn, module, kind, unit))  # type: ignore[arg-type]
    for one in shardings:
        problem = "experts, which stay whole: name the module around them in `in_shards`, and not here"
        if is_experts(one.module) or (problem := one.kind.problem(one.module, tp.size, one.unit)):
            problems.append(f"{one.fqn}: {problem}")
    owners: dict[int, str] = {}
    for one in shardings:
        for p in one.module.parameters():
            if (owner := owners.setdefault(id(p), one.fqn)) != one.fqn:
                problems.append(f"{one.fqn}: a Parameter that {owner} has too")
    if problems:
        lines = "\n".join(f"  {line}" for line in problems)
        raise ConfigError(
            f"model: expected linears that divide over {tp.size} ranks, got\n{lines}\nUse fewer ranks, or another plan."
        )
    return shardings


def _one(model: nn.Module, pattern: str) -> nn.Module:
    found = _matching(model, (pattern,))
    if len(found) != 1:
        raise ConfigError(f"plan: expected one module named {pattern!r}, its `first` or `last`, got {list(found)}.")
    return next(iter(found.values()))


def _check_named(where: str, field: str, modules: dict[str, nn.Module], known: Sequence[nn.Module]) -> None:
    """Check that Parameters inside `modules` are in `known`: sharded, or the plan says what becomes of their gradients.

    Raises:
        ConfigError: some are not; a rank would have its own part of their gradients only.
    """
    ids = {id(p) for module in known for p in module.parameters()}
    left = {
        f"{fqn}.{name}": None
        for fqn, module in modules.items()
        for name, p in module.named_parameters()
        if id(p) not in ids
    }
    if left:
        raise ConfigError(
            f"plan: expected every Parameter {where} to be sharded or named in `{field}`, got {next(iter(left))} and "
            f"{len(left) - 1} more. Each rank would have another gradient of it. Use a plan of this model (QWEN3?)."
        )


def _replicated(summed: dict[str, nn.Module], shardings: Sequence[_Sharding]) -> list[nn.Parameter]:
    """Return the Parameters of `summed`, each once however often it is named.

    Raises:
        ConfigError: one is a sharded linear's: gradients of different parts of a weight would be added up.
    """
    owners = {id(p): one.fqn for one in shardings for p in one.module.parameters()}
    for name, module in summed.items():
        if owner := next((owners[id(p)] for p in module.parameters() if id(p) in owners), None):
            raise ConfigError(
                f"plan: expected modules that are whole on each rank in `in_shards` and `in_heads`, got {name!r}, in "
                f"which {owner} is sharded. Name what is beside it alone."
            )
    return list({id(p): p for module in summed.values() for p in module.parameters()}.values())


@torch.no_grad()
def _replicate(model: nn.Module, tp: TensorParallel) -> None:
    """Copy everything that is not sharded from the group's first rank."""
    first = dist.get_global_rank(tp.group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if not getattr(tensor, "tensor_model_parallel", False) and tensor.numel():
            whole = tensor.data.to(tensor.device if tensor.is_cuda else device_of(tp.group)).contiguous()
            dist.broadcast(whole, src=first, group=tp.group)
            tensor.data.copy_(whole)
