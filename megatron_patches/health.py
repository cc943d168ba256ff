"""FP8 health in Megatron's log, TensorBoard and W&B, at --log-interval.

- coverage: share of the FLOPs of all matrix products of an iteration that run in FP8: linears, experts by the tokens
  they get on average, the head, and attention's products (causal: half). Only FP8 attention's forward is in FP8.
- gathered: bytes that FP8 all-gathers of fp8_ds delivered to a rank in one training iteration.
- weights gathered: bytes that the distributed optimizer's all-gathers deliver to a rank after an update.
- amax, saturation, underflow: see fp8_ds/monitor/statistics.py; every --fp8-health-interval iterations, of linears of
  fp8_ds or Transformer Engine's (engine_observers.py).

Evaluation, which comes between two iterations, counts nowhere.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from fp8_ds.attention import describe_backend
from fp8_ds.monitor.statistics import KINDS, LayerStatistics, Observers, StatisticsTable
from megatron_patches.arguments import SPEC
from megatron_patches.attention import _BF16_OF, MegatronFp8Attention
from megatron_patches.engine_observers import EngineObservers, is_engine_linear
from megatron_patches.linear import MegatronFp8Linear


class Part(NamedTuple):
    """A linear or the attention of a transformer layer on this rank.

    Args:
        name: that of `module` in its layer.
        kind: "linears" or "attention".
        computed_by: for the log; empty: Megatron, in high precision.
        in_fp8, total: multiply-adds per token and pass.
    """

    name: str
    module: Any
    kind: str
    computed_by: str
    in_fp8: float
    total: float


def parts_of(layer: Any, sequence_length: int) -> Iterator[Part]:
    """Yield the parts of one of Megatron's transformer layers, of any spec, with attention over this many tokens."""
    config = layer.config
    engine_is_fp8 = bool(config.fp8) and not is_first_last_bf16_layer(config, layer.layer_number - 1)
    for name, module in layer.named_modules():
        *parents, tail = name.split(".")
        text, share = "", 0.0
        if isinstance(module, MegatronFp8Linear):
            recipe = module.fp8_recipe
            text = f"bf16 ({module.bf16_reason})" if recipe is None else f"fp8_ds {recipe.name}"
            share = 0.0 if recipe is None else 1.0 if recipe.needs_grad_columns else 2 / 3
        elif isinstance(module, MegatronFp8Attention):
            settings = module.fp8_attention
            text = f"stock ({module.host_reason})" if settings is None else describe_backend(settings.backend)
            share = 1 / 3 if settings is not None and settings.backend in _BF16_OF else 0.0
        elif is_engine_linear(name, module):
            text, share = f"Transformer Engine {config.fp8_recipe if engine_is_fp8 else 'bf16'}", float(engine_is_fp8)
        elif tail != "core_attention" and not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            continue
        if tail == "core_attention":
            total = _channels(config) * config.num_attention_heads * sequence_length / config.tensor_model_parallel_size
            yield Part(name, module, "attention", text, total * share, total)
            continue
        total = float(sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2))
        if "experts" in parents:
            total *= config.moe_router_topk * config.expert_model_parallel_size / config.num_moe_experts
            # Experts that are TP-sharded over fewer ranks than the other layers see a part of a group's tokens each.
            total *= config.expert_tensor_parallel_size / config.tensor_model_parallel_size
        yield Part(name, module, "linears", text, total * share, total)


def _channels(config: Any) -> float:
    """Return the channels of an attention head, the mean of its two products."""
    if getattr(config, "multi_latent_attention", False):
        return float(config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2
    return float(config.kv_channels)


def describe(parts: Iterable[tuple[str, str]]) -> str:
    """Return one line: how many linears and attentions are computed by what; `parts` are (kind, computed_by)."""
    counts = Counter(parts)
    texts = []
    for kind in ("linears", "attention"):
        found = [f"{count} x {text}" for (of, text), count in counts.items() if of == kind and text]
        texts.append(f"{kind}: {', '.join(found)}" if found else f"{kind}: Megatron's own")
    return " | ".join(texts)


def weight_gathers(chunks: Iterable[Any]) -> tuple[int, int]:
    """Return the bytes of all weights, and of FP8 weights, that the distributed optimizer gathers after an update.

    The rank's own shard is among them. Both are 0 without that optimizer, or where no rank has another's shard.
    """
    buckets = [
        bucket.param_data
        for chunk in chunks
        for groups in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(chunk, groups, ())
        if getattr(group, "intra_distributed_optimizer_instance_size", 1) > 1
        for bucket in group.buckets
        if bucket.param_data is not None
    ]
    return sum(b.nbytes for b in buckets), sum(b.nbytes for b in buckets if b.dtype == torch.uint8)


class Health:
    """FP8 health of a model in training; made on all ranks, also on pipeline stages without layers.

    Args:
        args: Megatron's arguments.
        chunks: parts of the model, in Megatron's DistributedDataParallel.
    """

    def __init__(self, args: Any, chunks: Sequence[Any]) -> None:
        modules = [module for chunk in chunks for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        self._settings = {module.fp8_settings for module in modules if isinstance(module, MegatronFp8Linear)}
        self._weights = weight_gathers(chunks)
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        parts = [(layer, part) for layer in layers for part in parts_of(layer, args.seq_length)]
        self._parts = [part for _, part in parts]
        self._head = 0.0
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self._head = args.padded_vocab_size * args.hidden_size / args.tensor_model_parallel_size
        self._num_bytes = self._bytes_before = 0
        self._statistics: LayerStatistics = {}
        self._observers: Observers | EngineObservers | None = None
        self._is_between, self._is_sampling, self._sampled = False, False, 0
        self._every = getattr(args, "fp8_health_interval", 0)
        linears: dict[str, Any] = {}
        for layer, part in parts if self._every else ():
            if part.kind == "linears" and part.in_fp8 and hasattr(part.module, "weight"):
                # A further one of that number is of multi-token prediction.
                linears.setdefault(f"layers.{layer.layer_number}.{part.name}", part.module)
        if linears:
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            self._table = StatisticsTable(tuple(linears), next(iter(linears.values())).weight.device, group)
            if self._settings:
                self._observers = Observers(linears, self._table)
            else:
                self._observers = EngineObservers(linears, self._table, args.fp8_recipe, args.fp8)
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._before_forward)

    def after_iteration(self, iteration: int) -> None:
        """End a sample; the next begins with the next forward in training. On all ranks."""
        self._num_bytes = self._total_bytes() - self._bytes_before
        if self._observers is not None:
            if self._is_sampling:
                self._observers.detach()
                self._table.send()
                self._statistics, self._sampled = self._table.receive() or {}, iteration
            self._is_sampling = (iteration + 1) % self._every == 0
        self._is_between = True

    def _total_bytes(self) -> int:
        """Return the bytes that FP8 gathers of fp8_ds have delivered so far."""
        return sum(fp8.num_bytes_gathered for fp8 in self._settings)

    def _before_forward(self, chunk: Any, inputs: Any) -> None:
        """Begin an iteration with the first forward in training."""
        if chunk.training and self._is_between:
            self._is_between = False
            self._bytes_before = self._total_bytes()
            if self._is_sampling and self._observers is not None:
                self._observers.attach()

    def _of_all_stages(self, mine: Any) -> list[Any]:
        stages: list[Any] = [None] * torch.distributed.get_world_size(self._pipeline)
        torch.distributed.all_gather_object(stages, mine, group=self._pipeline)
        return stages

    def describe(self) -> str:
        """Describe all stages, for the last one logs. Collective over the pipeline group."""
        stages = self._of_all_stages([(part.kind, part.computed_by) for part in self._parts])
        return describe(part for stage in stages for part in stage)

    def report(self) -> tuple[str, dict[str, float]]:
        """Return (line of the log, scalars by tag) of all stages. Collective over the pipeline group."""
        mine = sum(part.in_fp8 for part in self._parts), sum(part.total for part in self._parts) + self._head
        gathered = self._num_bytes if self._settings else -1  # what Transformer Engine gathers is its own affair
        stages = self._of_all_stages((*mine, gathered, self._weights, self._statistics))
        in_fp8, total, num_bytes, weights, statistics = zip(*stages, strict=True)
        scalars = {"fp8/coverage": 100.0 * sum(in_fp8) / sum(total) if sum(total) else 0.0}
        texts = [f"coverage: {scalars['fp8/coverage']:.2f} % of GEMM FLOPs"]
        if max(num_bytes) >= 0:
            scalars["fp8/gathered-bytes"] = float(max(num_bytes))
            texts.append(f"gathered per rank: {max(num_bytes) / 2**20:.3f} MiB")
        of_all, of_fp8 = max(weights)
        if of_all:
            scalars |= {"fp8/weights-gathered-bytes": float(of_all), "fp8/weights-gathered-fp8-bytes": float(of_fp8)}
            texts.append(f"weights gathered per rank: {of_all / 2**20:.3f} MiB, {of_fp8 / 2**20:.3f} of it FP8")
        tensors = [(k, name, one) for found in statistics for name, of in found.items() for k, one in of.items()]
        if not tensors:
            return " | ".join(texts), scalars
        for field in ("amax", "saturation", "underflow"):
            values = {(kind, name): getattr(one, field) for kind, name, one in tensors}
            scalars.update({f"fp8-{field}/{kind}/{name}": value for (kind, name), value in values.items()})
            for kind in KINDS:
                if of_kind := [value for place, value in values.items() if place[0] == kind]:
                    scalars[f"fp8/{field}-max/{kind}"] = max(of_kind)
            worst = max(values, key=lambda place: values[place])
            shown = f"{values[worst]:.4g}" if field == "amax" else f"{100 * values[worst]:.3f} %"
            texts.append(f"{field}: {shown} ({worst[0]} of {worst[1]})")
        return " | ".join([*texts, f"sampled in iteration {self._sampled}"]), scalars


class HealthLog:
    """Health beside Megatron's own log, of the model that a process set up last: two wrappers for patches.apply."""

    _health: Health | None = None

    def wrap_setup_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `setup_model_and_optimizer`, after which the layers are known."""

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            self._health = None  # after --inprocess-restart it is of a model and of groups that are gone
            result = original(*args, **kwargs)
            from megatron.training import global_vars
            from megatron.training.utils import print_rank_last

            settings = global_vars.get_args()
            if settings.fp8 or (settings.spec is not None and settings.spec[0] == SPEC[0]):
                self._health = Health(settings, result[0])
                print_rank_last(f" [fp8] {self._health.describe()}")
            return result

        return setup_model_and_optimizer

    def wrap_training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `training_log`: Megatron's log, then ours."""
        signature = inspect.signature(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._health is not None:
                from megatron.training import global_vars
                from megatron.training.utils import print_rank_last

                iteration = signature.bind(*args, **kwargs).arguments["iteration"]
                self._health.after_iteration(iteration)
                if iteration % global_vars.get_args().log_interval == 0:
                    line, scalars = self._health.report()
                    print_rank_last(f" [fp8] iteration {iteration:8d} | {line}")
                    if writer := global_vars.get_tensorboard_writer():
                        for tag, value in scalars.items():
                            writer.add_scalar(tag, value, iteration)
                    if wandb := global_vars.get_wandb_writer():
                        wandb.log(scalars, iteration)
            return result

        return training_log
