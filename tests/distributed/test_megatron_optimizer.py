"""FP8 states under Megatron's own optimizer classes train, skip, and load as stock Adam does; FP8 weights are the high
parts of their masters."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import megatron_states as ms
import megatron_training as mt
import pytest
import torch
import torch.distributed as dist
from megatron_states import FP8, SPLIT, assert_same, bf16, masters, run, steps
from support.memory import PeakMemory
from support.ranks import on_ranks
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from fp8_ds.numerics.predicted import pow2_scale_inv

pytestmark = pytest.mark.distributed

NUM_STEPS = 8


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right) > 0
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


# --- loss ---


def trained(layout: mt.Layout, master: str | None) -> dict[str, Any]:
    """Losses, the norm of one more update by given gradients, and the bytes of FP8 weights."""
    with run(layout, master) as training:
        data, losses = mt.batches(NUM_STEPS), []
        for _ in range(NUM_STEPS):
            if ms.fp8_weights(training) and layout.tp == layout.pp == 1:
                ms.assert_bytes_follow_masters(training, str(master))
            losses += steps(training, 1, data)
        norm = ms.push(training, 0.5)
        return {"losses": losses, "norm": norm, "bytes": {n: p._data for n, p in ms.fp8_weights(training).items()}}


def allowance(layout: mt.Layout) -> float:
    """The bound of test_states, measured on stock Adam: three times what summing gradients in bf16 instead of fp32
    changes in the losses, and what FP8 linears change at all.
    """
    exact = trained(layout, None)["losses"]
    low = trained(replace(layout, ddp={"grad_reduce_in_fp32": False}), None)["losses"]
    fp8 = trained(replace(layout, recipe="tensorwise"), None)["losses"]
    return 3 * max(largest_difference(low, exact), 5e-4) + largest_difference(fp8, exact)


allowances: dict[int, float] = {}


def allowed(ranks: Any, world_size: int) -> float:
    if world_size not in allowances:
        allowances[world_size] = ranks(world_size).run(allowance, bf16(True))[0]
    return allowances[world_size]


@pytest.mark.parametrize(
    ("layout", "master"),
    [
        pytest.param(replace(bf16(True), recipe="tensorwise"), SPLIT, id="fp8-linears"),
        pytest.param(bf16(True), "e4m19", id="fp8-weights", marks=pytest.mark.slow),
        pytest.param(bf16(True, tp=2, sp=True), "e4m19", id="tp2-sp-fp8-weights"),
        pytest.param(bf16(True, pp=2), "e4m19", id="pp2-fp8-weights", marks=pytest.mark.slow),
        pytest.param(bf16(False, pp=2, tied=True), SPLIT, id="pp2-tied", marks=pytest.mark.slow),
        pytest.param(bf16(True, overlap=True), SPLIT, id="overlap", marks=pytest.mark.slow),
        pytest.param(bf16(True, config={"num_moe_experts": 2}, ep=2), SPLIT, id="experts", marks=pytest.mark.slow),
    ],
)
def test_loss_and_norm_follow_stock_adam(ranks: Any, layout: mt.Layout, master: str) -> None:
    """The norm counts what tensor parallel ranks share once, and what stages have all."""
    ours, stock = (ranks(2).run(trained, layout, kind) for kind in (master, None))
    assert 0 < largest_difference(ours[-1]["losses"], stock[-1]["losses"]) <= allowed(ranks, 2), (ours, stock)
    assert [one["norm"] for one in ours] == pytest.approx(2 * [stock[-1]["norm"]], rel=1e-5)
    assert stock[-1]["losses"][-1] < 0.95 * stock[-1]["losses"][0]  # it learns
    if master in FP8 and layout == bf16(True):
        assert_same(ours[0]["bytes"], ours[1]["bytes"])


def initial_values(master: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters before any step, and the bf16 weights that were drawn."""
    layout = bf16(True)
    with run(layout, master) as training:
        drawn = {f"module.{name} param": p.detach().flatten() for name, p in ms.stock_build(layout).named_parameters()}
        weights = {f"{name} param" for name in ms.fp8_weights(training)}
        found = {name: value for name, value in masters(training).items() if name in weights}
        return found, {name: drawn[name].bfloat16() for name in found}


def test_first_masters_are_the_numbers_that_were_drawn(ranks: Any) -> None:
    """Not what FP8 has left of them: all of bf16's bits."""
    found, drawn = ranks(2).run(initial_values, "e4m11")[0]
    assert len(found) == 4 * mt.NUM_LAYERS
    assert_same({name: value.bfloat16() for name, value in found.items()}, drawn)


def gathers(master: str | None) -> tuple[Any, int, int]:
    """What health says that an update gathers, what one has gathered, and elements of FP8 weights."""
    from support.collectives import count_collectives

    from megatron_patches.health import weight_gathers

    with run(bf16(True), master) as training:
        data = mt.batches(1)
        with count_collectives() as moved:
            training.step(data)
        numel = sum(p.numel() for p in ms.fp8_weights(training).values())
        return weight_gathers([training.model]), moved.num_bytes["all_gather"], numel


def test_a_byte_per_fp8_weight_is_gathered_as_health_says(ranks: Any) -> None:
    for ((said, said_fp8), seen, numel), (stock_said, stock_seen, _) in zip(
        ranks(2).run(gathers, "e4m19"), ranks(2).run(gathers, None), strict=True
    ):
        assert said == seen and stock_said == (stock_seen, 0)
        assert numel <= said_fp8 <= 1.1 * numel < said < 0.7 * stock_said[0]
    assert ranks(1).run(gathers, "e4m19")[0][0] == (0, 0), "nobody has another's shard"


def clipped(master: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of two updates, the second far above --clip-grad, and by how much that one moves the masters."""
    with run(bf16(True), master) as training:
        norms = [ms.push(training, 0.9, seed=1)]
        before = masters(training)
        norms.append(ms.push(training, 100.0, seed=2))
        after = masters(training)
        return norms, {name: after[name] - before[name] for name in after if name.endswith("weight param")}


def test_gradients_are_clipped_as_in_stock(ranks: Any) -> None:
    """Without clipping the second gradient would be all of its update, with it half; FP8 moments are a tenth off."""
    norms, moved = ranks(2).run(clipped, "e4m19")[0]
    stock_norms, stock = ranks(2).run(clipped, None)[0]
    assert norms == pytest.approx(stock_norms, rel=1e-5) and norms[0] < 1 < 50 < norms[1]
    assert moved.keys() == stock.keys()
    for name, value in moved.items():
        assert (value - stock[name]).abs().mean() < 0.1 * stock[name].abs().mean(), name


# --- copies of a weight stay copies, and shards add up to it ---


def copies(layout: mt.Layout) -> dict[str, Tensor]:
    """Weights that the other rank has, too; the embedding and the head under one name."""
    with run(layout, SPLIT) as training:
        steps(training, 6)
        found = {}
        for name, p in training.module.named_parameters():
            if getattr(p, "shared_embedding", False):
                found["shared"] = p.detach().clone()
            elif not getattr(p, "tensor_model_parallel", False) and layout.tp > 1:
                found[name] = p.detach().clone()
        return found


@pytest.mark.parametrize(
    ("layout", "num"),
    [
        pytest.param(bf16(False, pp=2, tied=True), 1, id="tied"),
        pytest.param(bf16(True, tp=2), 2 * mt.NUM_LAYERS + 1, id="norms"),
    ],
)
def test_copies_of_a_weight_are_rounded_alike(ranks: Any, layout: mt.Layout, num: int) -> None:
    """The tied embedding of two stages, norms of two tensor parallel ranks: stochastic rounding may not part them."""
    one, other = ranks(2).run(copies, layout)
    assert len(one) >= num
    assert_same(one, other)


def pushed() -> dict[str, Tensor]:
    """Masters after three updates by gradients that every rank makes for itself."""
    with run(bf16(True), SPLIT) as training:
        for seed in range(3):
            ms.push(training, 0.5, seed)
        return masters(training)


def test_an_update_does_not_depend_on_how_weights_are_sharded(ranks: Any) -> None:
    """Rounding noise and groups follow a weight's elements. Other are a few: a group that two ranks share has two
    scales.
    """
    one, two = ranks(1).run(pushed)[0], ranks(2).run(pushed)[0]
    assert one.keys() == two.keys()
    num_other = sum(int((value != two[name]).sum()) for name, value in one.items())
    assert num_other <= 3 * 128, num_other


@pytest.mark.parametrize("drops", [False, True])
@on_ranks(2)
def test_transposes_are_of_the_bytes_in_force_or_dropped(drops: bool) -> None:
    with run(bf16(True), "e4m19", drop_transposes=drops) as training:
        steps(training, 2)
        for name, p in ms.fp8_weights(training).items():
            assert p._transpose is None if drops else torch.equal(p._transpose, p._data), name


# --- memory ---


class RealMemory(PeakMemory):
    def counts(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, ms.StandIn) and super().counts(tensor)  # its own storage is nominal


def memory_of(master: str | None) -> dict[str, float]:
    """Bytes per parameter: resident beside gradients, and what building and stepping add to that at their peak."""
    gc.collect()
    layout = bf16(True, ddp={"grad_reduce_in_fp32": False}, config={"num_layers": 8})
    with RealMemory() as memory, run(layout, master) as training:
        params = list(training.module.parameters())
        numel = sum(p.numel() for p in params)
        built = memory.peak
        training.step(mt.batches(3))
        gc.collect()
        resident = memory.live
        main_grads = sum(p.main_grad.nbytes for p in params)
        for p in params:
            p.main_grad.fill_(1e-3)
        before = memory.peak = memory.live
        training.optimizer.step()
        return {
            "resident": (resident - main_grads) / numel,
            "build": (built - main_grads) / numel,
            "step": (memory.peak - before) / numel,
        }


@pytest.mark.parametrize(
    ("master", "least", "most"),
    [pytest.param(SPLIT, 5.06, 5.4, marks=pytest.mark.slow), ("e4m11", 4.07, 4.52), (None, 13.9, 19.0)],
)
def test_bytes_per_parameter(ranks: Any, master: str | None, least: float, most: float) -> None:
    """bf16_8: 2 + 1 + 2.0625, groups that are not full, masks and tables. No bf16 weight is beside e4m11."""
    found = ranks(1).run(memory_of, master)[0]
    assert least <= found["resident"] < most, found
    if master is not None:
        assert found["step"] < 4, found  # temporaries of the largest weight: an eighth of this model
    if master == SPLIT:  # of FP8 weights the stand-in's build casts a bf16 model
        assert found["build"] < 4.2 + 1, found


# --- skipped steps ---


@on_ranks(2)
def test_bad_gradient_changes_no_byte_on_any_rank() -> None:
    with run(bf16(True), SPLIT) as training:
        data = mt.batches(8)
        steps(training, 2, data)
        before = ms.local_bytes(training)
        if dist.get_rank() == 1:  # where this rank's own shard is: the other rank has to learn of it
            one = training.optimizer.chained_optimizers[0]
            model_param, _ = next(one._fp8_pairs())
            model_param.main_grad.view(-1)[one._get_model_param_range_map(model_param)["param"].start] = float("nan")
        assert not training.optimizer.step()[0]
        assert_same(before, ms.local_bytes(training))
        assert all(loss < 10 for loss in steps(training, 1, data))


# --- param groups, schedule, precision-aware ---


def scheduled(master: str | None, precision_aware: bool) -> dict[str, Any]:
    """Warm-up and decay of lr and weight decay by Megatron's scheduler; embeddings at an lr of their own."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options: dict[str, Any] = {"decoupled_lr": 1e-3, "decoupled_min_lr": 1e-4, "clip_grad": 0.3}
    layout = bf16(True)
    if precision_aware:
        options |= {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16}
        options |= {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
        layout.ddp = {"grad_reduce_in_fp32": False}
    with run(layout, master, **options) as training:
        scheduler = OptimizerParamScheduler(training.optimizer, 0.0, 3e-3, 3e-4, 2, 8, "cosine", 0.0, 0.2, 8, "linear")
        data, losses, rates, norms = mt.batches(8), [], [], []
        for _ in range(8):
            losses += steps(training, 1, data)
            scheduler.step(1)
            rates.append([(g["lr"], g["weight_decay"]) for g in training.optimizer.param_groups])
            norms.append(training.grad_norm)
        return {"losses": losses, "rates": rates, "norms": norms}


def test_schedule_and_groups_reach_the_update(ranks: Any) -> None:
    stock = ranks(2).run(scheduled, None, False)[0]
    ours = ranks(2).run(scheduled, SPLIT, True)[0]
    assert ours["rates"] == stock["rates"]
    assert len({tuple(rates) for rates in map(tuple, stock["rates"])}) > 4
    assert len({lr for lr, _ in stock["rates"][-1]}) > 1 and {wd for _, wd in stock["rates"][-1]} >= {0.0}
    assert min(stock["norms"]) > 0.3, "clipping is on all the time"
    assert largest_difference(ours["losses"], stock["losses"]) <= allowed(ranks, 2)


# --- checkpoints ---


def widen(training: mt.Training) -> None:
    """Every FP8 weight is stored with twice the smallest scale that fits, as after an update far below its bound."""
    one = training.optimizer.chained_optimizers[0]
    weights = one._fp8_weights
    weights.scales.wait()
    weights.saved_scales = dict(zip(weights.names, (2 * pow2_scale_inv(weights.scales.amax)).tolist(), strict=True))
    for model_param, p in one._fp8_pairs():
        if isinstance(model_param, ms.StandIn):
            weights.keep(one.optimizer.shard_of(p), one.optimizer.read(p, None))
    one._fp8_finish_loading()
    assert not torch.equal(weights.scales.scale_inv, pow2_scale_inv(weights.scales.amax))


def steps_of_a_cycle(training: mt.Training, first: int, data: Any) -> list[float]:
    """Three, each with a beta1 of its own."""
    losses = []
    for number in range(first, first + 3):
        for group in training.optimizer.param_groups:
            group["betas"] = (0.8 if number == 0 else 0.9 - 0.01 * number, 0.99)
        losses += steps(training, 1, data)
    return losses


def go_on(training: mt.Training, master: str | None, data: Any) -> dict[str, Any]:
    if master in FP8:
        ms.assert_bytes_follow_masters(training, str(master))
    found = {"dense": masters(training), "bytes": ms.local_bytes(training)}
    found |= {"losses": steps_of_a_cycle(training, 3, data), "end": ms.local_bytes(training)}
    if master in FP8:
        ms.assert_bytes_follow_masters(training, str(master))
    return found


def save_and_go_on(distributed: bool, form: str, folder: str, master: str | None) -> dict[str, Any]:
    with run(bf16(distributed), master) as training:
        data = mt.batches(6)
        steps_of_a_cycle(training, 0, data)
        if master in FP8:
            widen(training)
        before = ms.local_bytes(training)
        ms.save(training, folder, form)
        assert_same(ms.local_bytes(training), before)
        return go_on(training, master, data)


def load_and_go_on(distributed: bool, form: str, folder: str, master: str | None) -> dict[str, Any]:
    with run(bf16(distributed), master) as training:
        data = mt.batches(6)
        if master is None:
            # Without FusedAdam stock code cannot load into states that do not exist, and keeps its own count of steps.
            steps(training, 3)
        for _ in range(3 * mt.NUM_MICRO):
            next(data)
        ms.load(training, folder, form)
        return go_on(training, master, data)


@pytest.mark.parametrize(
    ("distributed", "form", "master"),
    [
        (True, "dp_reshardable", SPLIT),
        pytest.param(True, "fully_reshardable_gloo", SPLIT, marks=pytest.mark.slow),
        (False, "dp_reshardable", SPLIT),
        (True, "fully_reshardable", "e4m19"),
        pytest.param(True, "dp_zero_gather_scatter", "e4m11", marks=pytest.mark.slow),
        pytest.param(True, "legacy", "e4m11", marks=pytest.mark.slow),
    ],
)
def test_resume_is_bit_exact(ranks: Any, tmp_path: Any, distributed: bool, form: str, master: str) -> None:
    """States, the weights, scales that are not the smallest, and with the next steps the counter of the rounding."""
    world_size = 2 if distributed else 1
    saved = ranks(world_size).run(save_and_go_on, distributed, form, str(tmp_path), master)
    loaded = ranks(world_size).run(load_and_go_on, distributed, form, str(tmp_path), master)
    for one, other in zip(saved, loaded, strict=True):
        assert one["losses"] == other["losses"]
        assert_same(one["bytes"], other["bytes"])
        assert_same(one["end"], other["end"])


@pytest.mark.parametrize(
    ("form", "master", "worlds"),
    [pytest.param("dp_reshardable", SPLIT, (2, 1), marks=pytest.mark.slow), ("fully_reshardable", "e4m19", (1, 2))],
)
def test_another_number_of_ranks_loads_the_same_states(
    ranks: Any, tmp_path: Any, form: str, master: str, worlds: tuple[int, int]
) -> None:
    """Masters bitwise. Moments too, but where a shard's edge cuts a group of 128: two scales become one."""
    saved, loaded = (
        ranks(world_size).run(act, True, form, str(tmp_path), master)[0]["dense"]
        for world_size, act in zip(worlds, (save_and_go_on, load_and_go_on), strict=True)
    )
    assert_same(*({name: v for name, v in one.items() if name.endswith(" param")} for one in (saved, loaded)))
    num_other = 0
    for name, value in saved.items():
        num_other += int((value != loaded[name]).sum())
        assert torch.allclose(value, loaded[name], rtol=0.15, atol=float(value.abs().max()) * 2**-8), name
    assert num_other <= 128 * 2 * 2, num_other


@pytest.mark.parametrize(
    ("form", "distributed", "source", "target"),
    [
        pytest.param("fully_reshardable", True, None, SPLIT, marks=pytest.mark.slow),
        ("fully_reshardable", True, "e4m19", SPLIT),
        ("dp_reshardable", False, SPLIT, None),
        ("legacy", False, None, SPLIT),
    ],
)
def test_a_run_with_other_states_loads_ours_and_back(
    ranks: Any, tmp_path: Any, form: str, distributed: bool, source: str | None, target: str | None
) -> None:
    """Into ours masters are rounded to 24 bits and moments to FP8; out of ours everything is exact.

    Not here: what a stock run without FusedAdam cannot load of its own, "legacy" and "fully_reshardable" of the
    distributed optimizer.
    """
    world_size = 2 if distributed else 1
    saved = ranks(world_size).run(save_and_go_on, distributed, form, str(tmp_path), source)[0]
    loaded = ranks(world_size).run(load_and_go_on, distributed, form, str(tmp_path), target)[0]
    assert saved["dense"].keys() == loaded["dense"].keys()
    for name, value in saved["dense"].items():
        other = loaded["dense"][name]
        if target is None:
            assert torch.equal(value, other), name
        elif name.endswith(" param"):
            assert torch.allclose(value, other, rtol=2**-16, atol=0), name
        else:
            assert torch.allclose(value, other, rtol=0.13, atol=float(value.abs().max()) * 2**-8), name
    assert largest_difference(saved["losses"], loaded["losses"]) <= allowed(ranks, world_size)


@pytest.mark.parametrize("master", [SPLIT, "e4m19"])
@on_ranks(2)
def test_loaded_weights_are_their_own_masters_or_rounded_once(master: str) -> None:
    """bf16 weights go into FP8 ones as they are loaded; then masters are made of these, or of the checkpoint."""
    with run(bf16(True), master) as training:
        steps(training, 2)
        values = {}
        for i, (name, p) in enumerate(training.module.named_parameters()):
            values[name] = (0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))).bfloat16()
            with torch.no_grad():
                p.copy_(values[name])
        training.optimizer.reload_model_params()
        weights = masters(training)
        training.optimizer.reload_model_params({name.removeprefix("module."): v for name, v in values.items()})
        dense = masters(training)
        for name, value in values.items():
            assert torch.equal(dense[f"{name} param"].bfloat16(), value.flatten()), name
            is_exact = torch.equal(weights[f"{name} param"].bfloat16(), value.flatten())
            assert is_exact == (name not in ms.fp8_weights(training)), name
            assert torch.allclose(weights[f"{name} param"], value.float().flatten(), rtol=2**-3, atol=2e-4), name
        if master in FP8:
            ms.assert_bytes_follow_masters(training, master)


def bf16_first_stage(layout: mt.Layout, folder: str) -> dict[str, Any]:
    """Of a model whose first stage is as --first-last-layers-bf16 leaves it; saved, and loaded again."""
    from megatron.core import parallel_state

    def make(drawn: Tensor) -> nn.Parameter:
        return nn.Parameter(drawn) if parallel_state.is_pipeline_first_stage() else ms.stand_in(drawn)

    def build(layout: mt.Layout) -> nn.Module:
        module = drawn_build(layout)
        module.config.fp8_param = True  # in the constructor it asks for Transformer Engine
        return module

    drawn_build = ms.stock_build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ms, "stock_build", build)
        with run(layout, "e4m19", make) as training:
            losses, before = steps(training, NUM_STEPS), ms.local_bytes(training)
            ms.save(training, folder, "dp_reshardable")
            num = len(ms.fp8_weights(training))
        with run(layout, "e4m19", make) as training:
            ms.load(training, folder, "dp_reshardable")
            assert_same(ms.local_bytes(training), before)
    return {"losses": losses, "num": num}


def test_a_stage_of_bf16_layers_alone_trains_beside_one_with_fp8_weights(ranks: Any, tmp_path: Any) -> None:
    layout = bf16(True, pp=2)
    first, last = ranks(2).run(bf16_first_stage, layout, str(tmp_path))
    stock = ranks(2).run(trained, layout, None)[-1]["losses"]
    assert (first["num"], last["num"]) == (0, 4)
    assert 0 < largest_difference(last["losses"], stock) <= allowed(ranks, 2)


# --- what Megatron and Transformer Engine are relied on for ---


@on_ranks(2)
def test_the_norm_of_parameters_is_that_of_the_weights() -> None:
    """As --log-params-norm takes it, of the shards in `main_param`."""
    with run(bf16(True), SPLIT) as training:
        steps(training, 2)
        params = list(training.module.parameters())
        assert all(p.main_param_sharded for p in params)
        squares = [p.main_param.float().square().sum() for p in params if p.main_param is not None]
        total = torch.stack([torch.zeros(()), *squares]).sum()
        dist.all_reduce(total)
        expected = torch.cat([p.detach().float().view(-1) for p in params]).norm()
        assert float(total.sqrt()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", ["_data", "_scale_inv", "_reset_caches"])
def test_a_transformer_engine_that_keeps_fp8_elsewhere_is_refused(name: str) -> None:
    from fp8_ds.errors import SeamError
    from fp8_ds.numerics.masters import E4M19
    from megatron_patches.optimizer_fp8 import Fp8Weights

    names = {"_data", "_scale_inv", "_reset_caches"} - {name}
    weight = SimpleNamespace(**dict.fromkeys(names, torch.zeros(1)))
    with pytest.raises(SeamError, match=rf"SimpleNamespace\.{name}"):
        Fp8Weights({"layer.weight": weight}, E4M19, None, torch.device("cpu"))
