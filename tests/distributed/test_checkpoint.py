"""Checkpoints in DeepSpeed's own format: resume, exchange with stock, and everything that is written or handed out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed

MODEL = {"width": 32, "hidden": 72, "num_blocks": 2}
DELAYED = {"linear": {"recipe": "delayed"}}


def case_name(value: Any) -> str:
    return str(value) if isinstance(value, int) else "-".join(value) or "default"


def build(stage: int, fp8: dict[str, Any] | None, seed: int = 0, **overrides: Any) -> Any:
    overrides.setdefault("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}})
    return training.build(training.ds_config(stage, fp8, **overrides), MODEL, seed)


def moments(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2 link them in the first step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        f"{name}.{key}": safe_get_full_optimizer_state(p, key).clone().cpu()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
        for key in ("exp_avg", "exp_avg_sq")
    }


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Everything that a resumed run must have: masters, moments, FP8 bytes, scales, histories. Collective."""
    found = {f"master.{name}": master for name, master in training.full_masters(engine).items()}
    found.update(moments(engine))
    if getattr(engine, "fp8", None) is None:
        return found
    for name, (data, scale_inv) in training.fp8_state(engine).items():
        found[f"fp8.{name}"], found[f"scale_inv.{name}"] = data, scale_inv
    if engine.fp8.history is not None:
        state = copy.deepcopy(engine.fp8.history.state_dict())
        found.update({f"history.{key}": torch.as_tensor(value) for key, value in state.items()})
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], prefix: str = "") -> None:
    """Bitwise equality of the entries under `prefix`."""
    names = {name for name in expected if name.startswith(prefix)}
    assert names == {name for name in got if name.startswith(prefix)}
    assert names
    different = [name for name in sorted(names) if not torch.equal(got[name], expected[name])]
    assert different == []


def assert_bytes_follow_masters(engine: Any) -> None:
    """Every FP8 weight is its quantised master: the state is consistent, whatever has been loaded."""
    from fp8_ds.numerics.formats import E4M3
    from fp8_ds.numerics.scale import scale_from_amax
    from fp8_ds.ops.quantize import quantize

    masters = training.full_masters(engine)
    for name, (data, scale_inv) in training.fp8_state(engine).items():
        scale, expected_inv = scale_from_amax(masters[name].abs().max(), E4M3.max)
        assert torch.equal(scale_inv, expected_inv), name
        assert torch.equal(data, quantize(masters[name], scale, E4M3).view(torch.uint8)), name


# --- resume ---


def resume(folder: str, stage: int, fp8: dict[str, Any]) -> None:
    whole = build(stage, fp8)
    losses = training.train(whole, 4)
    end = snapshot(whole)
    training.destroy(whole)

    first = build(stage, fp8)
    training.train(first, 2)
    before = snapshot(first)
    client_state = {"mine": {"epoch": 7}}
    first.save_checkpoint(folder, client_state=client_state)
    assert client_state == {"mine": {"epoch": 7}}
    assert_same(snapshot(first), before)
    assert training.train(first, 2, first_step=2) == losses[2:]
    training.destroy(first)

    second = build(stage, fp8, seed=1)
    path, loaded = second.load_checkpoint(folder)
    assert path is not None
    assert loaded["mine"] == {"epoch": 7}
    assert "fp8_ds" not in loaded
    assert_same(snapshot(second), before)
    assert training.train(second, 2, first_step=2) == losses[2:]
    assert_same(snapshot(second), end)
    training.destroy(second)


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [
        (1, DELAYED),
        (2, {}),
        (3, DELAYED),
    ],
    ids=case_name,
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any]
) -> None:
    ranks(2).run(resume, str(tmp_path), stage, fp8)


# --- exchange with stock DeepSpeed ---


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_checkpoints_go_from_stock_to_fp8_and_back(folder: str, stage: int) -> None:
    for source, target in ((None, {}), ({}, None)):
        here = f"{folder}/{'stock' if source is None else 'fp8'}"
        writer = build(stage, source)
        losses = training.train(writer, 3)
        before = snapshot(writer)
        writer.save_checkpoint(here)
        training.destroy(writer)

        reader = build(stage, target, seed=1)
        path, _ = reader.load_checkpoint(here)
        assert path is not None
        loaded = snapshot(reader)
        assert_same(loaded, before, "master.")
        assert_same(
            {k: v for k, v in loaded.items() if "exp_avg" in k}, {k: v for k, v in before.items() if "exp_avg" in k}
        )
        if target is not None:
            assert_bytes_follow_masters(reader)
        assert training.train(reader, 3, first_step=3)[-1] < losses[-1]
        training.destroy(reader)


# --- what is written and handed out ---


def export(folder: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(stage, {}, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})
    training.train(engine, 3)
    before = snapshot(engine)
    plain = {name: value.clone() for name, value in engine.module.state_dict().items()} if stage < 3 else {}
    engine.save_16bit_model(folder)
    assert_same(snapshot(engine), before)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    return before, plain


@pytest.mark.parametrize("stage", [1, 3])
def test_every_collective_export_is_bf16_of_the_masters(ranks: Any, tmp_path: Path, stage: int) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state, plain = ranks(2).run(export, str(tmp_path), stage)[0]
    masters = {name.removeprefix("master."): value for name, value in state.items() if name.startswith("master.")}
    bf16 = {name: master.bfloat16() for name, master in masters.items()}

    assert_same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), bf16)
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert_same({name: torch.as_tensor(value) for name, value in merged.items()}, masters)
    if stage == 3:
        return
    module = torch.load(tmp_path / "global_step3/mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert_same(module, bf16)

    dequantized = {
        name.removeprefix("fp8."): (value.view(torch.float8_e4m3fn).float() * state[f"scale_inv.{name[4:]}"]).bfloat16()
        for name, value in state.items()
        if name.startswith("fp8.")
    }
    assert len(dequantized) == 4
    assert_same(plain, {**bf16, **dequantized})
    assert any(not torch.equal(plain[name], bf16[name]) for name in dequantized)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_safetensors_take_a_state_dict_without_shared_storages_or_placeholders(folder: str, stage: int) -> None:
    from safetensors.torch import load_file, save_file

    engine = build(stage, {})
    training.train(engine, 1)
    state = engine.module.state_dict()
    pointers = [value.untyped_storage().data_ptr() for value in state.values()]
    if stage < 3:
        fp8 = [state[name].untyped_storage().data_ptr() for name in engine.fp8.weights]
        assert len(set(fp8)) == len(fp8)
        assert all(pointers.count(pointer) == 1 for pointer in fp8)
        assert engine._get_shared_params() == {}
    else:
        state = engine._zero3_consolidated_16bit_state_dict() or {}
    import torch.distributed as dist

    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in state.items()}, f"{folder}/model.safetensors")
        loaded = load_file(f"{folder}/model.safetensors")
        assert_same(loaded, dict(state))
        assert all(bool(torch.isfinite(value).all()) for value in loaded.values())
    training.destroy(engine)
