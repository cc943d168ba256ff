"""Frozen experts of FP8 folders keep bytes and scales under adapters, one byte a weight, and compute by them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_folder_model as base
import torch
import torch.nn.functional as F
import training
from support import fp8_folders
from support.fp8_folders import EXPERTS, batch, load, stored_in_model, values
from torch import Tensor, nn

from fp8_ds.nn.moe import products

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.finegrained_fp8")
pytestmark = pytest.mark.distributed

EXPERT_LAYER = "model.layers.0.mlp.experts"
STACKS = (f"{EXPERT_LAYER}.gate_up_proj", f"{EXPERT_LAYER}.down_proj")
SIZES = {
    "Mixtral": {"hidden_size": 256, "intermediate_size": 256},
    "Qwen3Moe": {"hidden_size": 256, "moe_intermediate_size": 256},
    "DeepseekV3": {"hidden_size": 256, "moe_intermediate_size": 256},
}
"""Sizes of which no activation of a batch has that of an expert's matrix: experts have 112 rows at most."""


def write(folder: Path, family: str, **sizes: int) -> str:
    fp8_folders.write(str(folder), "blocks", EXPERTS[family] | SIZES[family] | sizes, family)
    return str(folder)


def experts_of(engine: Any) -> Any:
    return next(one for name, one in engine.module.named_modules() if name.endswith("mlp.experts"))


def no_copies(expected: dict[str, tuple[Tensor, Tensor]]) -> base.NoCopies:
    """Guard stacks, each expert's matrices, and gate and up by themselves."""
    stacks = [expected[name][0] for name in STACKS]
    matrices = {one[0].numel() for one in stacks} | {stacks[0][0].numel() // 2}
    return base.NoCopies({one.numel() for one in stacks} | matrices)


def state_of(engine: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return {base.plain(name): state for name, state in training.fp8_state(engine).items()}


def start(folder: str, stage: int, fp8: dict[str, Any]) -> Any:
    engine = base.start(folder, stage, base.FROZEN | fp8, lora=True, lora_on=("q_proj", "o_proj"))
    engine.train()
    engine.module.gradient_checkpointing_enable()
    return engine


def train(folder: str, stage: int, fp8: dict[str, Any]) -> None:
    expected = stored_in_model(folder)
    assert set(STACKS) < expected.keys()
    with no_copies(expected):
        engine = start(folder, stage, fp8)
        reports = training.reports_of(engine)
        losses = base.steps(engine, 2)
        engine.eval()
        assert float(engine(**batch()).loss) != losses[0]
        engine.train()
    training.assert_fp8_equals(state_of(engine), expected)
    reports_bytes(engine, sum(codes.numel() for codes, _ in expected.values()))
    engine.save_checkpoint(f"{folder}/whole")
    with no_copies(expected):
        engine.save_checkpoint(f"{folder}/adapters", exclude_frozen_parameters=True)  # as Trainer does
    losses += base.steps(engine, 1, 2)
    observed(reports, expected)
    training.destroy(engine)
    for kind in ("adapters", "whole"):
        engine = start(folder, stage, fp8)
        engine.load_checkpoint(f"{folder}/{kind}", load_module_strict=kind == "whole")
        training.assert_fp8_equals(state_of(engine), expected)
        assert base.steps(engine, 1, 2) == losses[2:]
        if kind == "whole":
            read_and_written(engine, expected, values(folder))
        training.destroy(engine)


def reports_bytes(engine: Any, numel: int) -> None:
    report, num_ranks = engine.fp8_report(), torch.distributed.get_world_size()
    is_sharded = engine.zero_optimization_stage() == 3
    assert report["num_fp8_weights"] == numel
    assert 0 <= report["resident_fp8_bytes"] - numel // (num_ranks if is_sharded else 1) < 16 * 8
    assert report["resident_hp_bytes"] < numel // 8 and "experts" not in report["plan"].partition("; bf16: ")[2]
    if is_sharded and num_ranks > 1:
        assert report["gathered_fp8_bytes"] >= numel > 8 * (report["gathered_bytes"] - report["gathered_fp8_bytes"])


def observed(reports: list[dict[str, Any]], expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The monitor sees each code of the weights as often as the layer is called, on each rank."""
    layers = {base.plain(name): layer for name, layer in reports[0]["layers"].items()} if reports else {}
    for name in STACKS if reports else ():
        assert layers[name]["weight"]["num"] % expected[name][0].numel() == 0 < layers[name]["weight"]["num"]
        assert layers[name]["input"]["num"] > 0 and layers[name]["grad_output"]["num"] > 0


def read_and_written(engine: Any, expected: dict[str, tuple[Tensor, Tensor]], exact: dict[str, Tensor]) -> None:
    """Readers get codes times scales in bf16; a write of these changes no byte, another is read in FP8."""
    import deepspeed

    if engine.zero_optimization_stage() < 3:
        state = {base.plain(name): value for name, value in engine.module.state_dict().items()}
        assert all(torch.equal(state[name], exact[name].bfloat16()) for name in STACKS)
        copied, engine_loss = copy.deepcopy(engine.module), engine(**batch(3)).loss
        assert torch.equal(copied(**batch(3)).loss, engine_loss)
    for name in STACKS:
        p = next(p for full, p in engine.module.named_parameters() if base.plain(full) == name)
        # Of the last expert's last block alone: the other blocks keep their scales.
        factor = torch.ones_like(exact[name])
        for last in (1.0, 3.0):
            factor[-1, -128:, -128:] = last
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                before = p.data.clone()
                assert torch.equal(before, exact[name].bfloat16())
                if torch.distributed.get_rank() == 0 or not hasattr(p, "ds_id"):
                    p.copy_(before * factor)
            codes, scale = state_of(engine)[name]
            is_same = torch.equal(codes, expected[name][0]) and torch.equal(scale, expected[name][1])
            assert is_same == (last == 1.0)
            with deepspeed.zero.GatheredParameters([p]):
                assert ((p.data - before * factor).abs() <= (before * factor).abs() / 16 + 1e-4).all()


@pytest.mark.parametrize(
    ("stage", "num_ranks", "family", "fp8"),
    [
        (2, 2, "Mixtral", {"monitor": {"every": 1, "sink": "/dev/null"}}),
        (3, 2, "Qwen3Moe", base.SPLIT),
        pytest.param(1, 1, "Qwen3Moe", {}, marks=pytest.mark.slow),
        pytest.param(3, 1, "Mixtral", {"monitor": {"every": 1, "sink": "/dev/null"}}, marks=pytest.mark.slow),
        pytest.param(3, 2, "DeepseekV3", {}, marks=pytest.mark.slow),
        pytest.param(2, 1, "DeepseekV3", base.SPLIT, marks=pytest.mark.slow),
        pytest.param(3, 4, "Qwen3Moe", {}, marks=pytest.mark.slow),
    ],
)
def test_frozen_experts_under_adapters_keep_bytes_and_scales(
    ranks: Any, tmp_path: Path, stage: int, num_ranks: int, family: str, fp8: dict[str, Any]
) -> None:
    """No bf16 of one expert's matrix is made from `deepspeed.initialize` to the last step, layers checkpointed, nor
    by a save of adapters; a resume and a write of the same values leave the bytes as they are."""
    pytest.importorskip("peft")
    ranks(num_ranks).run(train, write(tmp_path, family), stage, fp8)


def copies_are_found(folder: str) -> None:
    with pytest.raises(AssertionError, match=r"made torch\.(bfloat16|float32) \["), no_copies(stored_in_model(folder)):
        base.start(folder, 2, {"linear": {"filter_fqns": ["lm_head", "lora_"]}, **base.SPLIT}, lora=True)


def test_frozen_experts_in_bf16_are_found_by_the_guard_of_these_tests(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    ranks(1).run(copies_are_found, write(tmp_path, "Mixtral"))


def compute(folder: str, is_whole: bool) -> None:
    exact = values(folder)
    gate_up, down = (exact[name] for name in STACKS)
    engine = base.start(
        folder, 2, {"linear": {**base.FROZEN["linear"], "recipe": "tensorwise"}}, True, lora_on=("q_proj",)
    )
    layer = experts_of(engine)
    assert set(layer.fp8_recipes) == ({"gate_up_proj", "down_proj"} if is_whole else {"gate_up_proj"})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, gate_up.shape[2], generator=generator) * torch.logspace(-2, 1, 24)[:, None]
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in x])  # the last expert has no tokens
    share = torch.rand(chosen.shape, generator=generator).bfloat16()
    given = x.bfloat16().requires_grad_()
    y = layer(given, chosen, share)
    grad = torch.randn(y.shape, generator=generator).bfloat16()
    y.backward(grad)
    own = given.detach().float().requires_grad_()
    rows = []
    for token, numbers in enumerate(chosen.tolist()):
        gate, up = zip(*((gate_up[e] @ own[token]).chunk(2) for e in numbers), strict=True)
        each = [down[e] @ (F.silu(one) * two) for e, one, two in zip(numbers, gate, up, strict=True)]
        rows.append(sum(share[token, k] * one for k, one in enumerate(each)))
    expected = torch.stack(rows)
    expected.backward(grad.float())
    assert given.grad is not None and own.grad is not None
    for found, other in ((y, expected), (given.grad, own.grad)):
        error = (found.detach().float() - other).norm(dim=1) / other.norm(dim=1)
        assert error.max() <= 0.1  # activations are rounded to 3 bits twice, and weights not once
    training.destroy(engine)


@pytest.mark.parametrize("hidden", [256, 320])
def test_frozen_experts_multiply_by_the_folders_own_scales(ranks: Any, tmp_path: Path, hidden: int) -> None:
    """Against float32; with 320 blocks of down end within experts, which is bf16, and those of the other are cut."""
    pytest.importorskip("peft")
    ranks(1).run(compute, write(tmp_path, "Qwen3Moe", hidden_size=hidden), hidden % 128 == 0)


def train_beside(folder: str, stage: int, recipe: str, is_trained: str, is_one_launch: bool) -> list[float]:
    """One stack of the two trains, and whatever else is no expert."""
    with mock.patch.object(products.grouped, "can_run", lambda device: is_one_launch):
        return _train_beside(folder, stage, recipe, is_trained)


def _train_beside(folder: str, stage: int, recipe: str, is_trained: str) -> list[float]:
    expected, model = stored_in_model(folder), load(folder)
    for name, p in model.named_parameters():
        p.requires_grad_(("experts" not in name or is_trained in name) and "scale" not in name)
    engine = training.start(model, training.ds_config(stage, {"linear": {"frozen": "fp8", "recipe": recipe}}))
    losses = [base.steps(engine, 1)[0] for _ in range(4)]
    assert losses[-1] < losses[0]
    found = state_of(engine)
    trained, frozen = sorted(STACKS, key=lambda name: is_trained not in name)
    assert (trained in found) == (recipe != "blockwise")
    assert torch.equal(found[frozen][0], expected[frozen][0]) and torch.equal(found[frozen][1], expected[frozen][1])
    assert not torch.equal(training.full_masters(engine)[trained], values(folder)[trained])
    p = engine.module.get_parameter(frozen)
    p.requires_grad_()
    with pytest.raises(base.UnsupportedError, match=rf"{frozen}, which wants a gradient.*before deepspeed\.initialize"):
        engine(**batch())
    training.destroy(engine)
    return losses


@pytest.mark.parametrize(
    ("stage", "recipe", "is_trained"),
    [
        (2, "tensorwise", "gate_up_proj"),
        (3, "blockwise", "down_proj"),
        pytest.param(3, "delayed", "down_proj", marks=pytest.mark.slow),
        pytest.param(2, "blockwise", "gate_up_proj", marks=pytest.mark.slow),
    ],
)
def test_a_stack_keeps_its_bytes_beside_one_that_trains(
    ranks: Any, tmp_path: Path, stage: int, recipe: str, is_trained: str
) -> None:
    """Also where all experts of that one are computed at once, on rows without zeros between."""
    folder = write(tmp_path, "Qwen3Moe")
    looped, at_once = (ranks(1).run(train_beside, folder, stage, recipe, is_trained, how)[0] for how in (False, True))
    assert looped == pytest.approx(at_once, rel=0.05)


def train_sums(folder: str, stage: int, targets: list[str]) -> None:
    import peft

    torch.manual_seed(0)
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    model: nn.Module = peft.get_peft_model(load(folder), wanted)
    expected, exact = stored_in_model(folder), values(folder)
    engine = training.start(model, training.ds_config(stage, base.FROZEN))
    engine.train()
    engine.module.gradient_checkpointing_enable()
    adapters = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    first, losses = training.full_masters(engine), base.steps(engine, 2)
    training.assert_fp8_equals(state_of(engine), expected)
    last = training.full_masters(engine)
    assert first.keys() == adapters and sum("experts" in name for name in adapters) == 2 * len(targets)
    assert all(not torch.equal(first[name], last[name]) for name in adapters) and losses[0] != losses[1]
    if stage < 3:
        of_sums(engine, exact, bound=2**-6 if len(targets) == 2 else 0.1)
    training.destroy(engine)


def of_sums(engine: Any, exact: dict[str, Tensor], bound: float) -> None:
    """A token for each expert, against float32."""
    layer, weights = experts_of(engine), {name.rpartition(".")[2]: exact[name] for name in STACKS}
    for module in layer.modules():
        if hasattr(module, "get_delta_weight"):
            own = module.parameter_name
            weights[own] = weights[own] + module.get_delta_weight("default").detach().float()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = layer(x, torch.arange(4)[:, None], torch.ones(4, 1).bfloat16()).detach().float()
    gate, up = (weights["gate_up_proj"] @ x.float()[:, :, None]).chunk(2, dim=1)
    expected = (weights["down_proj"] @ (F.silu(gate) * up))[:, :, 0]
    assert (y - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("stage", "targets"),
    [
        (2, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        (3, ["mlp.experts.down_proj"]),
        pytest.param(3, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], marks=pytest.mark.slow),
        pytest.param(2, ["mlp.experts.gate_up_proj"], marks=pytest.mark.slow),
    ],
)
def test_experts_under_adapters_of_their_own_keep_bytes_and_multiply_by_sums_in_bf16(
    ranks: Any, tmp_path: Path, stage: int, targets: list[str]
) -> None:
    """A sum in FP8 would lose most of a small adapter."""
    pytest.importorskip("peft")
    ranks(2).run(train_sums, write(tmp_path, "Qwen3Moe"), stage, targets)
