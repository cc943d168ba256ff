"""FP8 health in Megatron's log, TensorBoard and W&B, at --log-interval.

- coverage: share of the FLOPs of all matrix products of an iteration that run in FP8: linears, experts by the tokens
  they get on average, the head, and attention's products (causal: half of them). Of FP8 attention only the forward is.
- gathered: bytes that FP8 all-gathers of fp8_ds delivered to a rank in one training iteration.
- weights gathered: bytes that the distributed optimizer's all-gathers deliver to a rank after an update.
- amax, saturation, underflow: see fp8_ds/monitor/statistics.py; every --fp8-health-interval iterations, of linears of
  fp8_ds or Transformer Engine's (engine_observers.py).

Evaluation, which comes between two iterations, counts nowhere.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fp8_ds.monitor.observe import Observers
from fp8_ds.monitor.statistics import KINDS, LayerStatistics, StatisticsTable
from megatron_patches.engine_observers import EngineObservers, is_engine_linear
from megatron_patches.registry import LayerRegistry

_EXPERTS = "experts"
_FORWARD_SHARE = 1 / 3
"""Of a product and its two gradients, the forward."""


class Products(NamedTuple):
    """Multiply-adds per token and pass, of what is in FP8 and of all."""

    in_fp8: float
    total: float

    @property
    def percent(self) -> float:
        return 100.0 * self.in_fp8 / self.total if self.total else 0.0

    def plus(self, other: Products) -> Products:
        return Products(self.in_fp8 + other.in_fp8, self.total + other.total)


def engine_is_fp8(layer: Any) -> bool:
    """Whether Transformer Engine's linears of a transformer layer are in FP8."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    return bool(layer.config.fp8) and not is_first_last_bf16_layer(layer.config, layer.layer_number - 1)


def products_of(layer: Any, sequence_length: int) -> Iterator[Products]:
    """Of each linear and the attention of a transformer layer, on this rank.

    Args:
        layer: Megatron's, of any spec.
        sequence_length: tokens that attend to each other.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_patches.attention import _BF16_OF, MegatronFp8Attention
    from megatron_patches.linear import MegatronFp8Linear

    config = layer.config
    for name, module in layer.named_modules():
        tail = name.rsplit(".", 1)[-1]
        if isinstance(module, MegatronFp8Linear):
            share = 0.0 if module.fp8_recipe is None else 1.0 if module.fp8_recipe.needs_grad_columns else 2 / 3
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            share = 0.0
        elif is_engine_linear(name, module):
            share = float(engine_is_fp8(layer))
        elif tail == "core_attention":
            share = 0.0
            if isinstance(module, MegatronFp8Attention) and module.fp8_attention is not None:
                share = _FORWARD_SHARE if module.fp8_attention.backend in _BF16_OF else 0.0
            width = _channels(config) * config.num_attention_heads / config.tensor_model_parallel_size
            total = 2 * width * sequence_length / 2
            yield Products(total * share, total)
            continue
        else:
            continue
        total = float(sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2))
        if _EXPERTS in name.split("."):
            total *= config.moe_router_topk * config.expert_model_parallel_size / config.num_moe_experts
            # Experts that are cut into fewer parts than the other layers see a part of a group's tokens each.
            total *= config.expert_tensor_parallel_size / config.tensor_model_parallel_size
        yield Products(total * share, total)


def _channels(config: Any) -> float:
    """Of a head of attention, the mean of its two products."""
    if getattr(config, "multi_latent_attention", False):
        return float(config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim) / 2
    return float(config.kv_channels)


class Gathers(NamedTuple):
    """Bytes delivered to a rank after an update, its own shard among them: of FP8 weights, and of all."""

    in_fp8: int
    total: int


def weight_gathers(chunks: Iterable[Any]) -> Gathers:
    """By the distributed optimizer; none without it, or where no rank has another's shard.

    Args:
        chunks: of the model, in Megatron's DistributedDataParallel.
    """
    in_fp8 = total = 0
    for chunk in chunks:
        groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
        for group in groups:
            if getattr(group, "intra_distributed_optimizer_instance_size", 1) == 1:
                continue
            for bucket in group.buckets:
                data = bucket.param_data
                if data is not None:
                    total += data.nbytes
                    in_fp8 += data.nbytes if data.dtype == torch.uint8 else 0
    return Gathers(in_fp8, total)


class Computed(NamedTuple):
    """What computes linears and attention: name -> how many of them."""

    linears: Counter[str]
    attentions: Counter[str]


def computed_by(layers: Iterable[Any]) -> Computed:
    """Of transformer layers, on this rank."""
    from fp8_ds.attention import describe_backend
    from megatron_patches.attention import MegatronFp8Attention
    from megatron_patches.linear import MegatronFp8Linear

    linears: Counter[str] = Counter()
    attentions: Counter[str] = Counter()
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, MegatronFp8Linear):
                recipe = module.fp8_recipe
                linears[f"bf16 ({module.bf16_reason})" if recipe is None else f"fp8_ds {recipe.name}"] += 1
            elif is_engine_linear(name, module):
                computes = layer.config.fp8_recipe if engine_is_fp8(layer) else "bf16"
                linears[f"Transformer Engine {computes}"] += 1
            elif isinstance(module, MegatronFp8Attention):
                settings = module.fp8_attention
                attentions[
                    f"stock ({module.stock_reason})" if settings is None else describe_backend(settings.backend)
                ] += 1
    return Computed(linears, attentions)


def describe(stages: Iterable[Computed]) -> str:
    """One line about all stages together."""
    total = Computed(Counter(), Counter())
    for stage in stages:
        for found, more in zip(total, stage, strict=True):
            found.update(more)
    parts = []
    for what, found in (("linears", total.linears), ("attention", total.attentions)):
        text = ", ".join(f"{count} x {name}" for name, count in found.items()) or "Megatron's own"
        parts.append(f"{what}: {text}")
    return " | ".join(parts)


class Health:
    """Of the layers of this rank.

    Args:
        registry: of the spec.
        args: Megatron's.
        weights: what an update gathers.
    """

    def __init__(self, registry: Any, args: Any, weights: Gathers) -> None:
        from megatron.core import parallel_state

        from megatron_patches.linear import MegatronFp8Linear

        self.args, self.registry = args, registry
        self._weights = weights
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._num_bytes = self._bytes_before = 0
        self._waiting: list[Any] = []
        self._statistics: LayerStatistics = {}
        self._observers: Observers | EngineObservers | None = None
        self._is_sampling, self._sampled = False, 0
        self._every = getattr(args, "fp8_health_interval", 0)
        ours, engines = dict[str, Any](), dict[str, Any]()
        for layer in registry.layers():
            for name, module in layer.named_modules():
                place = f"layers.{layer.layer_number}.{name}"
                if isinstance(module, MegatronFp8Linear) and module.fp8_recipe is not None:
                    ours[place] = module
                elif is_engine_linear(name, module) and engine_is_fp8(layer) and hasattr(module, "weight"):
                    engines.setdefault(place, module)  # a further one of that number is of multi-token prediction
        if self._every and (linears := ours or engines):
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            device = next(iter(next(iter(linears.values())).parameters())).device
            self._table = StatisticsTable(tuple(linears), device, group)
            if ours:
                self._observers = Observers(linears, self._table)
            else:
                self._observers = EngineObservers(linears, self._table, args.fp8_recipe, args.fp8)

    def coverage(self) -> Products:
        """Of this rank's stage, the head included."""
        args = self.args
        total = Products(0.0, 0.0)
        for layer in self.registry.layers():
            for one in products_of(layer, args.seq_length):
                total = total.plus(one)
        if self._is_last_stage:
            head = args.padded_vocab_size * args.hidden_size / args.tensor_model_parallel_size
            total = total.plus(Products(0.0, head))
        return total

    def after_iteration(self, iteration: int) -> None:
        """Ends a sample; the next begins with the next forward in training. On all ranks."""
        total = self._total_bytes()
        self._num_bytes, self._bytes_before = total - self._bytes_before, total
        if self._observers is not None:
            if self._is_sampling:
                self._observers.detach()
                self._table.send()
                self._statistics, self._sampled = self._table.receive() or {}, iteration
            self._is_sampling = (iteration + 1) % self._every == 0
        self._wait_for_training()

    def _total_bytes(self) -> int:
        """That FP8 gathers of fp8_ds have delivered so far."""
        return 0 if self.registry.fp8 is None else self.registry.fp8.num_bytes_gathered

    def _wait_for_training(self) -> None:
        self._stop_waiting()
        self._waiting = [layer.register_forward_pre_hook(self._before_layer) for layer in self.registry.layers()]

    def _stop_waiting(self) -> None:
        for handle in self._waiting:
            handle.remove()
        self._waiting = []

    def _before_layer(self, layer: Any, inputs: Any) -> None:
        """The first layer in training begins an iteration, and ends the wait of all."""
        if not layer.training:
            return
        self._stop_waiting()
        self._bytes_before = self._total_bytes()
        if self._is_sampling and self._observers is not None:
            self._observers.attach()

    def _of_all_stages(self, mine: Any) -> list[Any]:
        stages: list[Any] = [None] * torch.distributed.get_world_size(self._pipeline)
        torch.distributed.all_gather_object(stages, mine, group=self._pipeline)
        return stages

    def describe(self) -> str:
        """What computes linears and attention, one line. Collective over the pipeline group: the last stage, which
        logs, may have none of them."""
        return describe(self._of_all_stages(computed_by(self.registry.layers())))

    def report(self) -> tuple[str, dict[str, float]]:
        """(line of the log, scalars by tag) of all stages. Collective over the pipeline group."""
        stages = self._of_all_stages((tuple(self.coverage()), self._num_bytes, self._statistics, self._weights))
        coverage = Products(sum(one[0][0] for one in stages), sum(one[0][1] for one in stages))
        scalars = {"fp8/coverage": coverage.percent}
        texts = [f"coverage: {coverage.percent:.2f} % of GEMM FLOPs"]
        if self.registry.fp8 is not None:  # what Transformer Engine gathers is its own affair
            scalars["fp8/gathered-bytes"] = float(max(one[1] for one in stages))
            texts.append(f"gathered per rank: {scalars['fp8/gathered-bytes'] / 2**20:.3f} MiB")
        weights: Gathers = max((one[3] for one in stages), key=lambda gathers: gathers.total)
        if weights.total:
            scalars["fp8/weights-gathered-bytes"] = float(weights.total)
            scalars["fp8/weights-gathered-fp8-bytes"] = float(weights.in_fp8)
            shown = f"{weights.total / 2**20:.3f} MiB, {weights.in_fp8 / 2**20:.3f} of it FP8"
            texts.append(f"weights gathered per rank: {shown}")
        every = {name: one for _, _, statistics, _ in stages for name, one in statistics.items()}
        for field in ("amax", "saturation", "underflow"):
            values = {(kind, name): getattr(one[kind], field) for name, one in every.items() for kind in one}
            scalars.update({f"fp8-{field}/{kind}/{name}": value for (kind, name), value in values.items()})
            for kind in KINDS:
                of_kind = [value for (found, _), value in values.items() if found == kind]
                if of_kind:
                    scalars[f"fp8/{field}-max/{kind}"] = max(of_kind)
            if values:
                worst = max(values, key=lambda place: values[place])
                shown = f"{values[worst]:.4g}" if field == "amax" else f"{100 * values[worst]:.3f} %"
                texts.append(f"{field}: {shown} ({worst[0]} of {worst[1]})")
        if every:
            texts.append(f"sampled in iteration {self._sampled}")
        return " | ".join(texts), scalars


def find_registry(args: Any) -> Any:
    """Of the spec that Megatron has built its layers from; None: it is none of ours. A pipeline stage without layers
    has an empty one: it takes part in reports.
    """
    specs = sys.modules.get("megatron_patches.layer_specs")
    if specs is None or args.spec is None or args.spec[0] != specs.__name__:
        return None
    return specs.registry_of(vars(specs)[args.spec[1]]) or LayerRegistry()


def registry_of_model(chunks: Iterable[Any]) -> LayerRegistry:
    """Of all transformer layers of a model that was built by another spec than ours.

    Args:
        chunks: of the model, as Megatron has wrapped them.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    registry = LayerRegistry()
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                registry.add(module)
    return registry


class HealthLog:
    """Health beside Megatron's own log, of the model that a process set up last: two wrappers for patches.apply."""

    def __init__(self) -> None:
        self._registry: Any = None
        self._weights = Gathers(0, 0)
        self._health: Health | None = None

    def wrap_setup_model(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Of `setup_model_and_optimizer`: the layers are known from then on."""

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            self._health = None  # after --inprocess-restart it is of a model and of groups that are gone
            result = stock(*args, **kwargs)
            from megatron.training import global_vars

            settings = global_vars.get_args()
            self._registry, self._weights = find_registry(settings), weight_gathers(result[0])
            if self._registry is None and settings.fp8:
                self._registry = registry_of_model(result[0])
            return result

        return setup_model_and_optimizer

    def wrap_training_log(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's log, then ours."""
        signature = inspect.signature(stock)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            if self._registry is None:
                return result
            from megatron.training import global_vars

            settings = global_vars.get_args()
            iteration = signature.bind(*args, **kwargs).arguments["iteration"]
            if self._health is None:
                self._health = Health(self._registry, settings, self._weights)
                from megatron.training.utils import print_rank_last

                print_rank_last(f" [fp8] {self._health.describe()}")
            self._health.after_iteration(iteration)
            if iteration % settings.log_interval == 0:
                line, scalars = self._health.report()
                _write(iteration, line, scalars, global_vars)
            return result

        return training_log


def _write(iteration: int, line: str, scalars: dict[str, float], global_vars: Any) -> None:
    from megatron.training.utils import print_rank_last

    print_rank_last(f" [fp8] iteration {iteration:8d} | {line}")
    writer = global_vars.get_tensorboard_writer()
    if writer:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    wandb = global_vars.get_wandb_writer()
    if wandb:
        wandb.log(scalars, iteration)
