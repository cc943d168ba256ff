"""FP8 health: the share of products in FP8 against counting by hand, and what is written where."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import nn

from megatron_patches import health
from megatron_patches.attention import AttentionSettings, MegatronFp8Attention
from megatron_patches.health import parts_of
from megatron_patches.linear import Fp8RowParallelLinear

SEQUENCE, HEADS, CHANNELS = 32, 4, 16


def linear(cls: type, rows: int, cols: int, recipe: Any = None) -> Any:
    """A linear of that class with its weight and nothing else."""
    found = cls.__new__(cls)
    nn.Module.__init__(found)
    found.weight = nn.Parameter(torch.empty(rows, cols))
    found.fp8_recipe = recipe
    return found


def recipe(name: str = "tensorwise", needs_grad_columns: bool = True) -> Any:
    return SimpleNamespace(name=name, needs_grad_columns=needs_grad_columns)


class Attention(MegatronFp8Attention, nn.Module):
    def __init__(self, backend: Any) -> None:
        nn.Module.__init__(self)
        self.fp8_attention = AttentionSettings(backend)


class Layer(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        values = {"fp8": None, "fp8_recipe": "tensorwise", "num_layers": 2, "first_last_layers_bf16": False}
        values |= {"kv_channels": CHANNELS, "num_attention_heads": HEADS, "tensor_model_parallel_size": 1}
        self.config, self.layer_number = SimpleNamespace(**values | config), 1


def total(layer: nn.Module) -> tuple[float, float]:
    """Multiply-adds in FP8, and of all."""
    parts = list(parts_of(layer, SEQUENCE))
    return sum(part.in_fp8 for part in parts), sum(part.total for part in parts)


TE_LINEAR = type("TELinear", (nn.Module,), {"__module__": "megatron.core.extensions.transformer_engine"})
ATTENTION = 2 * HEADS * CHANNELS * SEQUENCE / 2
LATENTS = {"multi_latent_attention": True, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
ENDS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}


def experts(tp: int, expert_tp: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """4 of 8 experts, each with 2 of 8 parts of the tokens of `tp` ranks; uncut, of half of these tokens."""
    config = {"moe_router_topk": 2, "num_moe_experts": 8, "expert_model_parallel_size": 2}
    config |= {"tensor_model_parallel_size": tp, "expert_tensor_parallel_size": expert_tp}
    return config, {"experts": nn.ModuleList(linear(Fp8RowParallelLinear, 8, 4, recipe()) for _ in range(4))}


@pytest.mark.parametrize(
    ("config", "modules", "expected"),
    [
        ({}, {"linear_proj": linear(Fp8RowParallelLinear, 8, 4, recipe())}, (32, 32)),
        ({}, {"linear_fc2": linear(Fp8RowParallelLinear, 6, 4, recipe(needs_grad_columns=False))}, (16, 24)),
        ({}, {"linear_kept": linear(Fp8RowParallelLinear, 5, 4)}, (0, 20)),
        ({}, {"linear_stock": linear(ColumnParallelLinear, 7, 4)}, (0, 28)),
        ({}, {"core_attention": Attention("fa3_fp8_emulated")}, (ATTENTION / 3, ATTENTION)),  # its forward
        ({}, {"core_attention": Attention("reference")}, (0, ATTENTION)),
        (LATENTS, {"core_attention": nn.Identity()}, (0, HEADS * (16 + 8 + 12) * SEQUENCE / 2)),
        (*experts(1, 1), (64, 64)),
        (*experts(2, 2), (64, 64)),
        (*experts(2, 1), (32, 32)),
        ({"fp8": "hybrid"}, {"linear_fc1": linear(TE_LINEAR, 8, 4)}, (32, 32)),
        ({}, {"linear_fc1": linear(TE_LINEAR, 8, 4)}, (0, 32)),
        ({"fp8": "hybrid", **ENDS}, {"linear_fc1": linear(TE_LINEAR, 8, 4)}, (0, 32)),
    ],
)
def test_parts_count_by_what_computes_them(
    config: dict[str, Any], modules: dict[str, nn.Module], expected: tuple[float, float]
) -> None:
    layer = Layer(**config)
    for name, module in modules.items():
        layer.add_module(name, module)
    assert total(layer) == pytest.approx(expected)


@pytest.fixture
def megatron_training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """megatron.training as far as health asks it: its arguments, and what is printed."""
    printed: list[str] = []
    args = SimpleNamespace(spec=None, fp8=None, fp8_health_interval=0, log_interval=2, seq_length=32)
    variables, utils = ModuleType("megatron.training.global_vars"), ModuleType("megatron.training.utils")
    variables.get_args = lambda: args  # type: ignore[attr-defined]
    variables.get_tensorboard_writer = variables.get_wandb_writer = lambda: None  # type: ignore[attr-defined]
    utils.print_rank_last = printed.append  # type: ignore[attr-defined]
    package = ModuleType("megatron.training")
    package.global_vars = variables  # type: ignore[attr-defined]
    for module in (package, variables, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(args=args, printed=printed)


def training_log(loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int) -> str:
    return f"stock {iteration}"


def test_nothing_is_added_without_fp8(megatron_training: SimpleNamespace) -> None:
    log = health.HealthLog()
    model = [nn.Linear(1, 1)]
    assert log.wrap_setup_model(lambda: (model, "optimizer", "scheduler"))()[0] is model
    assert log.wrap_training_log(training_log)({}, {}, 0.1, 2) == "stock 2"
    assert megatron_training.printed == []


@pytest.mark.parametrize(
    ("fp8", "spec"), [("hybrid", None), (None, ["megatron_patches.layer_specs", "gpt"])], ids=["megatron", "ours"]
)
def test_health_is_of_the_model_that_is_trained(
    megatron_training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fp8: Any, spec: Any
) -> None:
    """Of Megatron's own spec with Transformer Engine's FP8, and of ours."""
    made: list[Any] = []
    monkeypatch.setattr(health, "Health", lambda args, chunks: made.append(chunks) or Fake())
    megatron_training.args.fp8, megatron_training.args.spec = fp8, spec
    log, models = health.HealthLog(), [[nn.Linear(1, 1)], [nn.Linear(1, 1)]]
    log.wrap_setup_model(lambda: (models[0], "optimizer", "scheduler"))()
    logged = log.wrap_training_log(training_log)
    for iteration in (1, 2):
        logged({}, {}, 0.1, iteration)
    assert [text.split()[-1] for text in megatron_training.printed] == ["somehow", "well"]
    log.wrap_setup_model(lambda: (models[1], "optimizer", "scheduler"))()  # again, as by --inprocess-restart
    logged({}, {}, 0.1, 3)
    assert made == models


class Fake:
    """A Health."""

    def after_iteration(self, iteration: int) -> None: ...

    def describe(self) -> str:
        return "computed somehow"

    def report(self) -> tuple[str, dict[str, float]]:
        return "all is well", {}
