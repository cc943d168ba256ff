"""Checkpoints in DeepSpeed's own format, with fp32 states and FP8 states: resume, exchange with stock, partial
loads, and everything that is written or handed out."""

from __future__ import annotations

import copy
import glob
from pathlib import Path
from typing import Any

import pytest
import test_states
import torch
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed

MODEL = {"width": 32, "hidden": 72, "num_blocks": 2}
DELAYED = {"linear": {"recipe": "delayed"}}
E4M19, E4M11 = (test_states.states(master) for master in ("e4m19", "e4m11"))
Fp8 = dict[str, Any] | None
"""An "fp8" block; None: stock."""


def build(stage: int, fp8: Fp8, seed: int = 0, **overrides: Any) -> Any:
    overrides.setdefault("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}})
    overrides.setdefault("zero_optimization", {"stage3_gather_16bit_weights_on_model_save": True})
    return training.build(training.ds_config(stage, fp8, **overrides), MODEL, seed)


def master_of(fp8: Fp8) -> str:
    """Format of the masters of FP8 weights."""
    return "fp32" if fp8 is None else fp8.get("optimizer", {}).get("master", "fp32")


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


def everything(engine: Any) -> dict[str, Tensor]:
    """`snapshot` and, of FP8 states, the codes of this rank and what ranks share. Collective."""
    found = snapshot(engine)
    if engine.fp8.config.optimizer.states == "fp8":
        found.update(test_states.shared_states(engine))
        for name, parts in test_states.local_states(engine).items():
            found.update({f"{name}.{key}": torch.as_tensor(value) for key, value in parts.items()})
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
    training.assert_fp8_follows_masters(training.fp8_state(engine), training.full_masters(engine))


# --- resume ---


def widen_the_scale(engine: Any, name: str) -> None:
    """The next step predicts an amax that the smallest scale does not fit, and then moves away from it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

    p = dict(engine.module.named_parameters())[name]
    value, m = safe_get_full_fp32_param(p).clone(), safe_get_full_optimizer_state(p, "exp_avg")
    largest = int(m.abs().argmax())
    value.view(-1)[largest] = m.view(-1)[largest].sign() * (448 * 2.0**-11 - 1e-4)
    assert float(value.abs().max()) < 448 * 2.0**-11
    safe_set_full_fp32_param(p, value)


def trained(stage: int, fp8: dict[str, Any], num_steps: int, **overrides: Any) -> Any:
    """An engine after these steps, before the last of which a scale becomes larger than it has to be."""
    from fp8_ds.numerics.predicted import pow2_scale_inv

    engine = build(stage, fp8, **overrides)
    if num_steps > 0:
        training.train(engine, num_steps - 1)
        if master_of(fp8) != "fp32":
            widen_the_scale(engine, "blocks.0.up.weight")
        training.train(engine, 1, first_step=num_steps - 1)
    if num_steps > 0 and master_of(fp8) != "fp32":
        scales = engine.optimizer.optimizer.core.scales
        scales.wait()
        assert not torch.equal(scales.scale_inv, pow2_scale_inv(scales.amax))
    return engine


def resume(folder: str, stage: int, fp8: dict[str, Any], num_steps: int = 3, looks: bool = True, **more: Any) -> None:
    """A run that is saved goes on as one that is not; so does its engine when it has loaded that, and a new one.

    Args:
        looks: compare all that is held, too. To look at the weights ends what stage 3 keeps gathered.
    """

    def assert_held(engine: Any, expected: dict[str, Tensor] | None) -> None:
        if expected is not None:
            assert_same(everything(engine), expected)

    whole = trained(stage, fp8, num_steps, **more)
    losses = training.train(whole, 3, first_step=num_steps)
    end = everything(whole)
    training.destroy(whole)

    first = trained(stage, fp8, num_steps, **more)
    before = everything(first) if looks else None
    client_state = {"mine": {"epoch": 7}}
    first.save_checkpoint(folder, client_state=client_state)
    assert client_state == {"mine": {"epoch": 7}}
    assert_held(first, before)
    assert training.train(first, 3, first_step=num_steps) == losses
    first.load_checkpoint(folder)
    if stage == 3 or master_of(fp8) != "fp32":  # else DeepSpeed finds the moments again in the next step
        assert_held(first, before)
    assert training.train(first, 3, first_step=num_steps) == losses
    training.destroy(first)

    second = build(stage, fp8, seed=1, **more)
    path, loaded = second.load_checkpoint(folder)
    assert path is not None
    assert loaded["mine"] == {"epoch": 7} and "fp8_ds" not in loaded
    assert_held(second, before)
    assert training.train(second, 3, first_step=num_steps) == losses
    assert_same(everything(second), end)
    training.destroy(second)


KEPT_GATHERED = {"zero_optimization": {"stage3_param_persistence_threshold": 100_000}}
"""DeepSpeed's default: norms, biases and small weights."""


@pytest.mark.parametrize(
    ("stage", "fp8", "more"),
    [
        pytest.param(1, DELAYED, {}, id="1-delayed", marks=pytest.mark.slow),
        pytest.param(2, {}, {}, id="2-default", marks=pytest.mark.slow),
        pytest.param(3, DELAYED, {}, id="3-delayed"),
        pytest.param(1, E4M19, {}, id="1-e4m19"),
        pytest.param(2, {**E4M19, **DELAYED}, {"scheduler": training.ONE_CYCLE}, id="2-e4m19-amid-a-cycle-of-betas"),
        pytest.param(3, E4M11, {}, id="3-e4m11", marks=pytest.mark.slow),
        pytest.param(3, E4M11, {"looks": False, **KEPT_GATHERED}, id="3-e4m11-kept-gathered"),
        pytest.param(
            2, E4M11, {"num_steps": 0, "looks": False}, id="2-e4m11-before-the-first-step", marks=pytest.mark.slow
        ),
        pytest.param(3, E4M19, {"num_steps": 0, "looks": False}, id="3-e4m19-before-the-first-step"),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], more: dict[str, Any]
) -> None:
    ranks(2).run(resume, str(tmp_path), stage, fp8, **more)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_a_skipped_step_that_the_host_has_not_heard_of_is_in_the_checkpoint(folder: str, stage: int) -> None:
    """Step 2 overflows, which the host would learn in step 3: a save lies between."""

    def built(seed: int) -> Any:
        scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}}
        one = build(stage, E4M19, seed, bf16={"check_grad_overflow": False}, scheduler=scheduler)
        training.flag_late(one.optimizer)
        return one

    def overflow(one: Any, step: int) -> None:
        handle = one.module.register_forward_hook(lambda module, inputs, loss: loss * float("inf"))
        training.train(one, 1, step)
        handle.remove()

    def rates(one: Any) -> list[Any]:
        return [(training.train(one, 1, step), one.get_lr(), one.skipped_steps) for step in range(2, 5)]

    first = built(0)
    training.train(first, 1)
    overflow(first, 1)
    first.save_checkpoint(folder)
    found = rates(first)
    assert [skipped for *_, skipped in found] == [1, 1, 1]
    overflow(first, 5)
    first.load_checkpoint(folder)
    assert rates(first) == found
    training.destroy(first)
    second = built(1)
    second.load_checkpoint(folder)
    assert rates(second) == found
    training.destroy(second)


# --- exchange ---

PRECISION = {"fp32": 0.0, "e4m19": 2.0**-20, "e4m11": 2.0**-12, "bf16_8": 2.0**-16}
"""Half a unit in the last place, relative, of each master rounded to nearest."""


def assert_masters_close(got: dict[str, Tensor], expected: dict[str, Tensor], master: str, fp8: set[str]) -> None:
    for name, value in expected.items():
        relative = PRECISION[master if name in fp8 or master == "fp32" else "bf16_8"]
        floor = 2.0**-9 * relative * value.abs().max()  # FP8's subnormals
        worst = ((got[name] - value).abs() - relative * value.abs() - floor).max()
        assert float(worst) <= 0, (name, float(worst))


def assert_moments_close(got: dict[str, Tensor], expected: dict[str, Tensor], is_quantized: bool) -> None:
    for name, value in expected.items():
        error = float((got[name] - value).norm() / value.norm())
        assert 0 < error < 0.045 if is_quantized else error == 0, (name, error)


@pytest.mark.parametrize(
    ("stage", "source", "target"),
    [(2, None, {}), (3, {}, None), (2, {}, E4M19), (2, E4M19, {}), (3, None, E4M11), (3, E4M11, None)],
    ids=str,
)
@on_ranks(2)
def test_runs_switch_between_stock_and_fp8_in_the_middle(folder: str, stage: int, source: Fp8, target: Fp8) -> None:
    writer = build(stage, source)
    training.train(writer, 3)
    masters, saved_moments = training.full_masters(writer), moments(writer)
    writer.save_checkpoint(folder)
    losses = training.train(writer, 3, first_step=3)
    training.destroy(writer)

    reader = build(stage, target, seed=1)
    assert reader.load_checkpoint(folder)[0] is not None
    master = master_of(target)
    loaded = training.full_masters(reader)
    assert_masters_close(loaded, masters, master, set() if target is None else set(reader.fp8.weights))
    assert_moments_close(moments(reader), saved_moments, master != "fp32")
    if master != "fp32":
        test_states.assert_bytes_are_high_parts(training.fp8_state(reader), loaded, master)
        assert set(test_states.shared_states(reader)["step"].tolist()) == {3}
    elif target is not None:
        assert_bytes_follow_masters(reader)
    assert training.train(reader, 3, first_step=3) == pytest.approx(losses, abs=5e-3)
    training.destroy(reader)


# --- partial loads ---

MODULE_ONLY, NO_STATES = {"load_module_only": True}, {"load_optimizer_states": False}


def partial_load(folder: str, stage: int, fp8: Fp8, options: dict[str, Any]) -> dict[str, Any]:
    """Masters before and after the load, and the loss then, of an engine that has trained on other weights."""
    engine = build(stage, fp8, seed=1)
    training.train(engine, 1)
    own = training.full_masters(engine)
    assert engine.load_checkpoint(folder, **options)[0] is not None
    masters = training.full_masters(engine)
    if master_of(fp8) != "fp32":
        test_states.assert_bytes_are_high_parts(training.fp8_state(engine), masters, master_of(fp8))
    elif fp8 is not None and not (stage == 3 and options == MODULE_ONLY):
        assert_bytes_follow_masters(engine)
    loss = training.train(engine, 1)[0]
    training.destroy(engine)
    return {"own": own, "after": masters, "loss": loss}


def rounded(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16().float() for name, value in masters.items()}


@pytest.mark.parametrize(
    ("stage", "writer", "readers", "options"),
    [
        (2, None, (None, {}), (MODULE_ONLY, NO_STATES)),
        (3, {}, (None, {}), (MODULE_ONLY, NO_STATES)),
        (2, E4M11, ({}, E4M11), (MODULE_ONLY,)),
        (3, E4M19, ({}, E4M19), (NO_STATES,)),
    ],
    ids=["2-stock-file", "3", "2-e4m11", "3-e4m19"],
)
def test_partial_loads_leave_the_masters_that_stock_leaves(
    ranks: Any, tmp_path: Path, stage: int, writer: Fp8, readers: tuple[Fp8, Fp8], options: tuple[dict[str, Any], ...]
) -> None:
    saved = ranks(2).run(write, str(tmp_path), stage, writer)[0]["masters"]
    for option in options:
        one, other = (ranks(2).run(partial_load, str(tmp_path), stage, fp8, option)[0] for fp8 in readers)
        nothing_loaded = stage == 3 and option == MODULE_ONLY  # stock's file has no weights there
        if readers[0] is None:
            assert_same(one["after"], rounded(one["own"] if nothing_loaded else saved))
        expected = rounded(other["own"] if nothing_loaded else one["after"])
        # In stage 3 an element that already rounds to the loaded value keeps its master.
        got = rounded(other["after"]) if stage == 3 else other["after"]
        for name, value in expected.items():
            floor = 0.0 if readers[0] is None else 2.0**-20 * float(value.abs().max())
            assert float((got[name] - value).abs().max()) <= floor, name
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)


# --- what is written and handed out ---


def write(folder: str, stage: int, fp8: Fp8, exports: bool = False) -> dict[str, Any]:
    """What is held after three steps, and what the weights compute with; saved."""
    engine = build(stage, fp8)
    training.train(engine, 3)
    state = engine.module.state_dict() if fp8 is not None and stage < 3 else {}
    found = {"masters": training.full_masters(engine), "plain": {name: p.clone() for name, p in state.items()}}
    if fp8 is not None:
        before = found["before"] = everything(engine)
        pointers = [value.untyped_storage().data_ptr() for value in state.values()]
        assert all(
            pointers.count(state[name].untyped_storage().data_ptr()) == 1 for name in engine.fp8.weights if state
        )
        if exports:
            engine.save_16bit_model(folder)
            assert_same(everything(engine), before)
    engine.save_checkpoint(folder)
    training.destroy(engine)
    return found


def skeleton(value: Any) -> Any:
    """Keys, dtypes, shapes and devices of a nested state, without the numbers."""
    if torch.is_tensor(value):
        return (value.dtype, tuple(value.shape), value.device.type)
    if isinstance(value, dict):
        return {str(key): skeleton(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [skeleton(inner) for inner in value]
    return type(value).__name__


def optimizer_file(folder: Path | str, rank: int) -> dict[str, Any]:
    (path,) = glob.glob(f"{folder}/global_step3/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return dict(torch.load(path, weights_only=False)["optimizer_state_dict"])


@pytest.mark.parametrize(
    ("stage", "fp8"), [(1, {}), pytest.param(3, {}, marks=pytest.mark.slow), (2, E4M19), (3, E4M11)], ids=str
)
def test_files_are_in_the_form_of_stock_and_every_export_is_bf16_of_the_masters(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any]
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from fp8_ds.numerics.masters import BF16_8, encode

    ours = ranks(2).run(write, str(tmp_path / "ours"), stage, fp8, exports=True)[0]
    ranks(2).run(write, str(tmp_path / "stock"), stage, None)
    for rank in range(2):
        found, stock = (skeleton(optimizer_file(tmp_path / kind, rank)) for kind in ("ours", "stock"))
        assert found == stock
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ours"))
    assert_same({name: torch.as_tensor(value) for name, value in merged.items()}, ours["masters"])
    before, bf16 = ours["before"], {name: master.bfloat16() for name, master in ours["masters"].items()}
    in_fp8 = {name.removeprefix("fp8.") for name in before if name.startswith("fp8.")}
    if fp8:  # what is not FP8 leaves as its compute weight, which rounds ties away from zero
        bf16 |= {name: encode(ours["masters"][name], BF16_8)[0] for name in bf16 if name not in in_fp8}
    assert_same(torch.load(tmp_path / "ours/pytorch_model.bin", weights_only=True), bf16)
    if stage == 3:
        return
    file = torch.load(tmp_path / "ours/global_step3/mp_rank_00_model_states.pt", weights_only=False)
    assert_same(file["module"], bf16)
    dequantized = {
        name: (before[f"fp8.{name}"].view(torch.float8_e4m3fn).float() * before[f"scale_inv.{name}"]).bfloat16()
        for name in in_fp8
    }
    assert len(dequantized) == 4
    assert_same(ours["plain"], {**bf16, **dequantized})
    assert any(not torch.equal(ours["plain"][name], bf16[name]) for name in dequantized)
