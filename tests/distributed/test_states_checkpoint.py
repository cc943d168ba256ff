"""Checkpoints of FP8 states: dense and stock's own on disk, bit for bit on resume, exchanged with every other kind."""

from __future__ import annotations

import functools
import glob
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as dense
import test_checkpoint_universal as universal
import test_states as base
import torch
import training
from support.ranks import on_ranks
from torch import Tensor

from fp8_ds.numerics.predicted import pow2_scale_inv

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}}


def build(stage: int, fp8: dict[str, Any] | None, seed: int = 0, **overrides: Any) -> Any:
    overrides.setdefault("zero_optimization", {"stage3_gather_16bit_weights_on_model_save": True})
    return dense.build(stage, fp8, seed, **overrides)


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


def resume(folder: str, stage: int, fp8: dict[str, Any], **overrides: Any) -> None:
    first = build(stage, fp8, **overrides)
    training.train(first, 2)
    widen_the_scale(first, "blocks.0.up.weight")
    training.train(first, 1, first_step=2)
    scales = first.optimizer.optimizer.core.scales
    scales.wait()
    assert not torch.equal(scales.scale_inv, pow2_scale_inv(scales.amax))
    before = base.everything(first)
    first.save_checkpoint(folder)
    base.assert_same_everything(base.everything(first), before)
    losses = training.train(first, 3, first_step=3)
    end = base.everything(first)
    path, _ = first.load_checkpoint(folder)  # back, in the same engine
    assert path is not None
    base.assert_same_everything(base.everything(first), before)
    training.destroy(first)

    second = build(stage, fp8, seed=1, **overrides)
    second.load_checkpoint(folder)
    base.assert_same_everything(base.everything(second), before)
    assert second.load_checkpoint(f"{folder}/nowhere") == (None, None)  # as stock
    base.assert_same_everything(base.everything(second), before)
    assert training.train(second, 3, first_step=3) == losses
    base.assert_same_everything(base.everything(second), end)
    training.destroy(second)


RESUMED = [(1, "e4m19", {}), (2, "e4m19", DELAYED), (3, "e4m11", {})]


@pytest.mark.parametrize(("stage", "master", "more"), RESUMED)
def test_a_resumed_run_repeats_every_byte_rounding_included(
    ranks: Any, tmp_path: Path, stage: int, master: str, more: dict[str, Any]
) -> None:
    ranks(2).run(resume, str(tmp_path), stage, base.states(master, **more))


def test_a_run_resumed_amid_a_cycle_of_its_betas_repeats_every_byte(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(resume, str(tmp_path), 2, base.states("e4m19"), scheduler=training.ONE_CYCLE)


@on_ranks(2)
def test_what_stays_gathered_is_of_the_checkpoint_from_the_first_forward_on(folder: str) -> None:
    master = "e4m11"
    persistent = {"zero_optimization": {"stage3_param_persistence_threshold": 100_000}}  # DeepSpeed's default
    first = build(3, base.states(master), **persistent)
    training.train(first, 2)
    first.save_checkpoint(folder)
    losses = training.train(first, 2, first_step=2)
    first.load_checkpoint(folder)  # back, in the same engine
    assert training.train(first, 2, first_step=2) == losses
    training.destroy(first)
    second = build(3, base.states(master), seed=1, **persistent)
    second.load_checkpoint(folder)
    assert training.train(second, 2, first_step=2) == losses
    training.destroy(second)


@pytest.mark.parametrize(("stage", "master"), [(2, "e4m11"), (3, "e4m19")])
@on_ranks(2)
def test_a_run_saved_before_its_first_step_resumes(folder: str, stage: int, master: str) -> None:
    first = build(stage, base.states(master))
    first.save_checkpoint(folder)
    losses = training.train(first, 2)
    end = base.everything(first)
    first.load_checkpoint(folder)  # back, in the same engine: its moments and counts are of no step
    assert training.train(first, 2) == losses
    base.assert_same_everything(base.everything(first), end)
    training.destroy(first)
    second = build(stage, base.states(master), seed=1)
    second.load_checkpoint(folder)
    assert training.train(second, 2) == losses
    base.assert_same_everything(base.everything(second), end)
    training.destroy(second)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_skipped_step_that_the_host_has_not_heard_of_is_in_the_checkpoint(folder: str, stage: int) -> None:
    """Step 2 overflows, which the host would learn in step 3: a save lies between."""

    def built(seed: int) -> Any:
        config = training.ds_config(stage, base.states("e4m19"), bf16={"check_grad_overflow": False})
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}}
        one = training.build(config, seed=seed)
        one.optimizer.fp8_flag = training.late_flag()
        return one

    def rates(one: Any) -> list[Any]:
        found = []
        for step in range(2, 5):
            losses = training.train(one, 1, step)
            found.append((losses, one.get_lr(), one.skipped_steps))
        return found

    first = built(0)
    training.train(first, 1)
    handle = first.module.register_forward_hook(lambda module, inputs, loss: loss * float("inf"))
    training.train(first, 1, first_step=1)
    handle.remove()
    first.save_checkpoint(folder)
    found = rates(first)
    assert [skipped for *_, skipped in found] == [1, 1, 1]
    handle = first.module.register_forward_hook(lambda module, inputs, loss: loss * float("inf"))
    training.train(first, 1, first_step=5)
    handle.remove()
    first.load_checkpoint(folder)
    assert rates(first) == found
    training.destroy(first)
    second = built(1)
    second.load_checkpoint(folder)
    assert rates(second) == found
    training.destroy(second)


# --- what is in the files ---


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


def write(folder: str, stage: int, fp8: dict[str, Any] | None, exports: bool = False) -> dict[str, Any]:
    engine = build(stage, fp8)
    losses = training.train(engine, 3)
    engine.save_checkpoint(folder)
    if exports:
        engine.save_16bit_model(folder)
    result = {"losses": losses, "masters": training.full_masters(engine), "moments": dense.moments(engine)}
    result["fp8"] = sorted(engine.fp8.weights) if fp8 is not None else []
    result["next"] = training.train(engine, 3, first_step=3)
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "master"),
    [(2, "e4m19"), (3, "e4m11")],
)
def test_files_hold_dense_fp32_under_the_names_of_stock(ranks: Any, tmp_path: Path, stage: int, master: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from fp8_ds.numerics.masters import BF16_8, encode

    ours = ranks(2).run(write, str(tmp_path / "ours"), stage, base.states(master), exports=True)[0]
    ranks(2).run(write, str(tmp_path / "stock"), stage, None)
    for rank in range(2):
        found, stock = (skeleton(optimizer_file(tmp_path / kind, rank)) for kind in ("ours", "stock"))
        assert found == stock
    merged = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ours"))
    dense.assert_same({name: torch.as_tensor(value) for name, value in merged.items()}, ours["masters"])
    exported = torch.load(tmp_path / "ours/pytorch_model.bin", weights_only=True)
    expected = {name: value.bfloat16() for name, value in ours["masters"].items()}
    # What is not FP8 leaves as its compute weight, which rounds ties away from zero.
    expected |= {n: encode(ours["masters"][n], BF16_8)[0] for n in expected if n not in ours["fp8"]}
    dense.assert_same(exported, expected)


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
        if not is_quantized:
            assert torch.equal(got[name], value), name
            continue
        error = (got[name] - value).norm() / value.norm()
        assert error < 0.045, (name, float(error))
        assert error > 0, name


def exchange(folder: str, stage: int, source: dict[str, Any] | None, target: dict[str, Any] | None) -> None:
    written = write(folder, stage, source)
    reader = build(stage, target, seed=1)
    path, _ = reader.load_checkpoint(folder)
    assert path is not None
    to_fp8 = target is not None and "optimizer" in target
    master = target["optimizer"]["master"] if to_fp8 and target is not None else "fp32"
    fp8 = set(reader.fp8.weights) if getattr(reader, "fp8", None) else set()
    assert_masters_close(training.full_masters(reader), written["masters"], master, fp8)
    assert_moments_close(dense.moments(reader), written["moments"], to_fp8)
    if to_fp8:
        assert set(base.shared_states(reader)["step"].tolist()) == {3}
    losses = training.train(reader, 3, first_step=3)
    assert base.largest_difference(losses, written["next"]) < 5e-3, (losses, written["next"])
    training.destroy(reader)


@pytest.mark.parametrize(
    ("stage", "master", "other"),
    [(2, "e4m19", "fp32"), (3, "e4m11", "stock")],
)
def test_runs_switch_to_fp8_states_and_back_in_the_middle(
    ranks: Any, tmp_path: Path, stage: int, master: str, other: str
) -> None:
    kind: dict[str, Any] | None = None if other == "stock" else {}
    ranks(2).run(exchange, str(tmp_path / "to"), stage, kind, base.states(master))
    ranks(2).run(exchange, str(tmp_path / "from"), stage, base.states(master), kind)


MODULE_ONLY, NO_STATES = {"load_module_only": True}, {"load_optimizer_states": False}


@pytest.mark.parametrize(("stage", "master", "options"), [(2, "e4m11", MODULE_ONLY), (3, "e4m19", NO_STATES)], ids=str)
def test_partial_loads_leave_the_masters_that_fp32_states_leave(
    ranks: Any, tmp_path: Path, stage: int, master: str, options: dict[str, Any]
) -> None:
    ranks(2).run(write, str(tmp_path), stage, base.states(master))
    results = [ranks(2).run(partial, str(tmp_path), stage, fp8, options) for fp8 in ({}, base.states(master))]
    for expected, ours in zip(*results, strict=True):
        for name, value in expected["after"].items():
            got = ours["after"][name]
            rounded = got.bfloat16().float() if stage == 3 else got  # there an unchanged element keeps its master
            floor = 2.0**-20 * value.abs().max()
            assert bool(((rounded - value.bfloat16().float()).abs() <= floor).all()), name
        assert ours["loss"] == pytest.approx(expected["loss"], abs=0.01)


def partial(folder: str, stage: int, fp8: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    engine = build(stage, fp8, seed=1)
    training.train(engine, 1)
    path, _ = engine.load_checkpoint(folder, **options)
    assert path is not None
    result: dict[str, Any] = {"after": training.full_masters(engine)}
    if "optimizer" in fp8:
        base.assert_bytes_are_high_parts(training.fp8_state(engine), result["after"], fp8["optimizer"]["master"])
    result["loss"] = training.train(engine, 1)[0]
    training.destroy(engine)
    return result


# --- universal ---


def aligned_engine(stage: int, master: str, seed: int, **overrides: Any) -> Any:
    """An engine over `Aligned`, whose shards are cut at multiples of 128 on 1, 2 and 4 ranks."""
    import deepspeed

    import fp8_ds  # noqa: F401

    torch.manual_seed(seed)
    net = base.Aligned()
    config = training.ds_config(stage, base.states(master), gradient_clipping=0.0, **overrides)
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


def inject_steps(engine: Any, steps: range) -> None:
    for step in steps:
        engine.optimizer._fp8_gradients = functools.partial(base.inject, engine.optimizer, base.many_scales(step))
        engine.optimizer.step()


def write_aligned(folder: str, stage: int, master: str) -> Any:
    engine = aligned_engine(stage, master, seed=0)
    inject_steps(engine, range(2))
    engine.global_steps = 2
    saved = base.local_states(engine)
    engine.save_checkpoint(folder)
    inject_steps(engine, range(2, 4))
    end = base.local_states(engine)
    training.destroy(engine)
    return saved, end


def read_aligned(folder: str, stage: int, master: str) -> Any:
    engine = aligned_engine(stage, master, seed=1, checkpoint={"load_universal": True})
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    loaded = base.local_states(engine)
    inject_steps(engine, range(2, 4))
    end = base.local_states(engine)
    training.destroy(engine)
    return loaded, end


def test_a_universal_checkpoint_gives_the_same_bytes_on_any_ranks_and_stage(ranks: Any, tmp_path: Path) -> None:
    from fp8_ds.tools import convert as conversion

    master = "e4m11"

    def whole(results: list[Any]) -> list[dict[str, dict[str, Tensor]]]:
        return [base.assembled([result[part] for result in results]) for part in (0, 1)]

    sources = {2: (2, 2), 3: (1, 3), 1: (4, 1)}  # folder -> world size, stage
    written = {}
    for name, (world, stage) in sources.items():
        written[name] = whole(ranks(world).run(write_aligned, str(tmp_path / str(name)), stage, master))
        universal.convert(tmp_path / str(name))
    plan = {2: [(1, 1, False), (2, 3, True)], 3: [(2, 3, False)], 1: [(2, 1, False)]}
    for name, targets in plan.items():
        for world, stage, other_stage in targets:
            if other_stage:
                folder = tmp_path / str(name) / "universal"
                conversion.convert(folder, folder, "universal", stage=stage)
            read = whole(ranks(world).run(read_aligned, str(tmp_path / str(name)), stage, master))
            for got, expected in zip(read, written[name], strict=True):
                base.assert_same_states(got, expected)
