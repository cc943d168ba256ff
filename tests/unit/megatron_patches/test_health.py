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
        values = {
            "fp8": None,
            "fp8_recipe": "tensorwise",
            "num_layers": 2,
            "first_last_layers_bf16": False,
            "kv_channels": CHANNELS,
            "num_attention_heads": HEADS,
            "tensor_model_parallel_size": 1,
            **config,
        }
        self.config, self.layer_number = SimpleNamespace(**values), 1


def total(layer: nn.Module) -> tuple[float, float]:
    """Multiply-adds in FP8, and of all."""
    parts = list(parts_of(layer, SEQUENCE))
    return sum(part.in_fp8 for part in parts), sum(part.total for part in parts)


def test_linears_count_by_what_computes_them() -> None:
    layer = Layer()
    layer.linear_proj = linear(Fp8RowParallelLinear, 8, 4, recipe())
    layer.linear_fc2 = linear(Fp8RowParallelLinear, 6, 4, recipe(needs_grad_columns=False))
    layer.linear_kept = linear(Fp8RowParallelLinear, 5, 4)
    layer.linear_stock = linear(ColumnParallelLinear, 7, 4)
    assert total(layer) == (32 + 24 * 2 / 3, 32 + 24 + 20 + 28)


@pytest.mark.parametrize(("backend", "share"), [("fa3_fp8_emulated", 1 / 3), ("reference", 0.0)])
def test_of_fp8_attention_the_forward_counts(backend: str, share: float) -> None:
    layer = Layer()
    layer.core_attention = Attention(backend)
    products = 2 * HEADS * CHANNELS * SEQUENCE / 2
    assert total(layer) == (products * share, products)


@pytest.mark.parametrize(("tp", "expert_tp", "expected"), [(1, 1, 64.0), (2, 2, 64.0), (2, 1, 32.0)])
def test_experts_count_by_the_tokens_they_get(tp: int, expert_tp: int, expected: float) -> None:
    layer = Layer(
        moe_router_topk=2,
        num_moe_experts=8,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=expert_tp,
    )
    layer.experts = nn.ModuleList(linear(Fp8RowParallelLinear, 8, 4, recipe()) for _ in range(4))
    # 4 of 8 experts here, each with 2 of 8 parts of the tokens of 2 ranks; uncut, of half of these tokens.
    assert total(layer) == (expected, expected)


def test_attention_with_latents_counts_by_its_own_dims() -> None:
    layer = Layer(multi_latent_attention=True, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    layer.core_attention = nn.Identity()
    assert total(layer) == (0.0, HEADS * (16 + 8 + 12) * SEQUENCE / 2)


@pytest.mark.parametrize(
    ("fp8", "first_last", "expected"), [("hybrid", False, 32.0), (None, False, 0.0), ("hybrid", True, 0.0)]
)
def test_transformer_engines_linears_count_by_megatrons_flags(fp8: Any, first_last: bool, expected: float) -> None:
    layer = Layer(
        fp8=fp8, first_last_layers_bf16=first_last, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0
    )
    engine = type("TELinear", (nn.Module,), {"__module__": "megatron.core.extensions.transformer_engine"})
    layer.linear_fc1 = linear(engine, 8, 4)
    assert total(layer) == (expected, 32.0)


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
    assert megatron_training.printed == [" [fp8] computed somehow", " [fp8] iteration        2 | all is well"]
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
