"""FP8 states under Megatron's own optimizer classes train, skip, and load as stock Adam does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_training as mt
import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.distributed

NUM_STEPS = 12
SPLIT = "bf16_8"
CODES = ("lo", "m", "v", "m_scale_inv", "v_scale_inv")


@contextmanager
def run(
    layout: mt.Layout, master: str | None, states_options: dict[str, Any] | None = None, **kwargs: Any
) -> Iterator[mt.Training]:
    """A training with these masters; None: stock."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_patches import optimizer, patches

    with mt.megatron(layout):
        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None  # 0.16.1's router asks for it where there is no Transformer Engine
        states = optimizer.OptimizerStates(master, **(states_options or {})) if master else None
        applied = patches.apply(optimizer.replacements(states)) if states else None
        try:
            yield mt.Training(layout, **kwargs)
        finally:
            if applied:
                applied.remove()


def bf16(distributed: bool, **kwargs: Any) -> mt.Layout:
    return mt.Layout(bf16=True, recipe=None, distributed_optimizer=distributed, **kwargs)


def steps(training: mt.Training, num_steps: int, data: Iterator[Tensor] | None = None) -> list[float]:
    """Losses, averaged over data parallelism."""
    from megatron.core import parallel_state

    data = mt.batches(num_steps) if data is None else data
    size = parallel_state.get_data_parallel_world_size()
    losses = []
    for _ in range(num_steps):
        # NUM_MICRO is per rank: with two ranks a step takes half as many steps' worth of the same data.
        loss = training.step(data)
        if loss is not None:
            total = torch.tensor(loss)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses.append(float(total) / size)
    return losses


def shards(training: mt.Training) -> list[Any]:
    return [s for one in training.optimizer.chained_optimizers for s in one.optimizer.core.shards]


def local_bytes(training: mt.Training) -> dict[str, Tensor]:
    """All that an update may change on this rank, cloned."""
    found = {f"weight {name}": p.detach().clone() for name, p in training.model.named_parameters()}
    for i, shard in enumerate(shards(training)):
        found[f"{i} hi"] = shard.hi.clone()
        found.update({f"{i} {key}": getattr(shard, key).clone() for key in CODES if getattr(shard, key) is not None})
    for one in training.optimizer.chained_optimizers:
        found["step"] = one.optimizer.core.step_count.clone()
        sums = one.optimizer.core.sums.by_group()
        found["bound sums"] = torch.tensor(sorted(sums.items()), dtype=torch.float64)
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right) > 0
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


# --- loss ---


def losses_of(layout: mt.Layout, masters: tuple[str | None, ...]) -> dict[str | None, Any]:
    found = {}
    for master in masters:
        with run(layout, master) as training:
            found[master] = steps(training, NUM_STEPS), training.grad_norm
    return found


def allowance(layout: mt.Layout) -> float:
    """The bound of test_states, measured on stock Adam: three times what summing gradients in bf16 instead of fp32
    changes in the losses, and what FP8 linears change at all.
    """
    exact = losses_of(layout, (None,))[None][0]
    low = losses_of(replace(layout, ddp={"grad_reduce_in_fp32": False}), (None,))[None][0]
    fp8 = losses_of(replace(layout, recipe="tensorwise"), (None,))[None][0]
    return 3 * max(largest_difference(low, exact), 5e-4) + largest_difference(fp8, exact)


allowances: dict[int, float] = {}


def allowed(ranks: Any, world_size: int) -> float:
    if world_size not in allowances:
        allowances[world_size] = ranks(world_size).run(allowance, bf16(True))[0]
    return allowances[world_size]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, mt.Layout(bf16=True, recipe="tensorwise", distributed_optimizer=True), id="fp8-linears"),
        pytest.param(2, bf16(False, pp=2, tied=True), id="pp2-tied", marks=pytest.mark.slow),
        pytest.param(2, bf16(True, overlap=True), id="overlap", marks=pytest.mark.slow),
        pytest.param(2, bf16(True, config={"num_moe_experts": 2}, ep=2), id="experts", marks=pytest.mark.slow),
    ],
)
def test_loss_follows_stock_adam(ranks: Any, world_size: int, layout: mt.Layout) -> None:
    results = ranks(world_size).run(losses_of, layout, (None, SPLIT))
    bound = allowed(ranks, world_size)
    last = results[-1]
    stock = last[None][0]
    assert 0 < largest_difference(last[SPLIT][0], stock) <= bound, (last[SPLIT], stock)
    assert abs(last[SPLIT][1] - last[None][1]) < 0.05 * last[None][1]
    assert all(result[SPLIT][1] == last[SPLIT][1] for result in results), "ranks differ in the norm"
    assert stock[-1] < 0.9 * stock[0]


# --- copies of a weight stay copies ---


def copies(layout: mt.Layout) -> dict[str, Tensor]:
    """name -> weight, of those that other ranks have, too; the embedding and the head under one name."""
    with run(layout, SPLIT) as training:
        steps(training, 6)
        found = {}
        for name, p in training.module.named_parameters():
            if getattr(p, "shared_embedding", False):
                found["shared"] = p.detach().clone()
            elif not getattr(p, "tensor_model_parallel", False) and layout.tp > 1:
                found[name] = p.detach().clone()
        for one in training.optimizer.chained_optimizers:
            for shard in one.optimizer.core.shards:
                if "embedding" in shard.name and layout.tied:
                    found[f"low part at {shard.start}"] = shard.lo.clone()
        return found


@pytest.mark.parametrize(
    ("world_size", "layout", "num"),
    [
        pytest.param(2, bf16(False, pp=2, tied=True), 1, id="tied"),
        pytest.param(2, bf16(True, tp=2), 2 * mt.NUM_LAYERS + 1, id="norms"),
    ],
)
def test_copies_of_a_weight_are_rounded_alike(ranks: Any, world_size: int, layout: mt.Layout, num: int) -> None:
    """The tied embedding of two stages, norms of two tensor parallel ranks: stochastic rounding may not part them."""
    results = ranks(world_size).run(copies, layout)
    assert len(results[0]) >= num
    partner = world_size // 2 if layout.pp == 2 else 1
    assert_same({k: v for k, v in results[0].items() if k == "shared" or layout.tp > 1}, results[partner])


# --- memory ---


def memory_of(master: str | None) -> dict[str, float]:
    """Bytes per parameter: resident beside gradients, and what building and stepping add to that at their peak."""
    from support.memory import PeakMemory

    gc.collect()
    layout = bf16(True, ddp={"grad_reduce_in_fp32": False}, config={"num_layers": 8})
    with PeakMemory() as memory, run(layout, master) as training:
        numel = sum(p.numel() for p in training.module.parameters())
        built = memory.peak
        data = mt.batches(3)
        training.step(data)
        gc.collect()
        resident = memory.live
        main_grads = sum(p.main_grad.nbytes for p in training.module.parameters())
        for p in training.module.parameters():
            p.main_grad.fill_(1e-3)
        memory.peak = memory.live
        before = memory.live
        training.optimizer.step()
        return {
            "resident": (resident - main_grads) / numel,
            "build": (built - main_grads) / numel,
            "step": (memory.peak - before) / numel,
        }


def test_split_masters_take_five_bytes_and_no_copy_of_everything(ranks: Any) -> None:
    ours, stock = (ranks(1).run(memory_of, master)[0] for master in (SPLIT, None))
    assert 5.06 <= ours["resident"] < 5.4, ours  # 2 + 1 + 2.0625, groups that are not full, masks and tables
    assert stock["resident"] > 13.9, stock
    assert ours["step"] < 4, ours  # temporaries of the largest weight: an eighth of this model
    assert ours["build"] < 4.2 + 1, ours


# --- skipped steps ---


@on_ranks(2)
def test_bad_gradient_changes_no_byte_on_any_rank() -> None:
    with run(bf16(True), SPLIT) as training:
        data = mt.batches(8)
        steps(training, 2, data)
        before = local_bytes(training)
        if dist.get_rank() == 1:  # where this rank's own shard is: the other rank has to learn of it
            _own_gradient(training).view(-1)[0] = float("nan")
        assert not training.optimizer.step()[0]
        assert_same(before, local_bytes(training))
        assert all(loss < 10 for loss in steps(training, 1, data))


def _own_gradient(training: mt.Training) -> Tensor:
    one = training.optimizer.chained_optimizers[0]
    model_param, _ = next(one._fp8_pairs())
    start = one._get_model_param_range_map(model_param)["param"].start
    grad: Tensor = model_param.main_grad.view(-1)[start:]
    return grad


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

FORMATS: dict[str, dict[str, Any]] = {
    "dp_reshardable": {"distrib_optim_sharding_type": "dp_reshardable"},
    "fully_reshardable": {"distrib_optim_sharding_type": "fully_reshardable"},
    "fully_reshardable_gloo": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "dp_zero_gather_scatter": {"distrib_optim_sharding_type": "dp_zero_gather_scatter"},
    "legacy": {},
}


def save(training: mt.Training, path: Path, form: str) -> None:
    """As megatron.training does it."""
    from megatron.core import dist_checkpointing

    if form == "legacy":
        path.mkdir(exist_ok=True, parents=True)
        rank, layout_is_sharded = dist.get_rank(), hasattr(training.optimizer.chained_optimizers[0], "gbuf_ranges")
        if layout_is_sharded:
            training.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        if rank == 0:
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save(state, path / "model_optim_rng.pt")
        dist.barrier()
        return
    with mt.writers():
        dist_checkpointing.save(_sharded(training, form, False), str(path))


def _sharded(training: mt.Training, form: str, is_loading: bool) -> dict[str, Any]:
    metadata = dict(FORMATS[form])  # Megatron writes its group into it
    model = getattr(training.module, "module", training.module).sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def load(training: mt.Training, path: Path, form: str) -> None:
    from megatron.core import dist_checkpointing

    if form == "legacy":
        state = torch.load(path / "model_optim_rng.pt", weights_only=False)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        if (path / "distrib_optim.pt").exists():
            training.optimizer.load_parameter_state(str(path / "distrib_optim.pt"))
        return
    state = dist_checkpointing.load(_sharded(training, form, True), str(path))
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def masters(training: mt.Training) -> dict[str, Tensor]:
    """name -> float32 master, and moments, of full shape: gathered over data parallelism."""
    one = training.optimizer.chained_optimizers[0]
    found = {}
    for name, p in training.module.named_parameters():
        for key in ("param", "exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = _gathered(one, p, key)
    return found


def _gathered(one: Any, p: Any, key: str) -> Tensor:
    full = torch.zeros(p.numel())
    if hasattr(one, "gbuf_ranges"):
        group, dtype, bucket = one.model_param_gbuf_map.get(p, (None, None, None))
        if group is not None:
            param_range = one.gbuf_ranges[group][dtype][bucket]["param_map"][p]["param"]
            value = one._get_main_param_and_optimizer_states(p)[key]
            full[param_range.start : param_range.end] = value.detach().reshape(-1)
        dist.all_reduce(full)
        return full
    main = getattr(p, "main_param", p)
    if hasattr(one.optimizer, "read"):
        return one.optimizer.read(main, None if key == "param" else key).reshape(-1)
    return (main if key == "param" else one.optimizer.state[main][key]).detach().reshape(-1).clone()


def steps_of_a_cycle(training: mt.Training, first: int, data: Iterator[Tensor]) -> list[float]:
    """Three, each with a beta1 of its own."""
    losses = []
    for number in range(first, first + 3):
        for group in training.optimizer.param_groups:
            group["betas"] = (0.8 if number == 0 else 0.9 - 0.01 * number, 0.99)
        losses += steps(training, 1, data)
    return losses


def save_and_go_on(distributed: bool, form: str, path: str, master: str | None) -> dict[str, Any]:
    with run(bf16(distributed), master) as training:
        data = mt.batches(6)
        steps_of_a_cycle(training, 0, data)
        dense = masters(training)
        before = local_bytes(training) if master else {}
        save(training, Path(path), form)
        if master:
            assert_same(local_bytes(training), before)
        losses = steps_of_a_cycle(training, 3, data)
        return {"dense": dense, "losses": losses, "bytes": local_bytes(training) if master else {}, "before": before}


def load_and_go_on(distributed: bool, form: str, path: str, master: str | None) -> dict[str, Any]:
    with run(bf16(distributed), master) as training:
        data = mt.batches(6)
        if master is None:
            # Without FusedAdam stock code cannot load into states that do not exist, and keeps its own count of steps.
            steps(training, 3)
        for _ in range(3 * mt.NUM_MICRO):
            next(data)
        load(training, Path(path), form)
        if master is None and distributed:
            count_apart(training)
        loaded = local_bytes(training) if master else {}
        dense = masters(training)
        losses = steps_of_a_cycle(training, 3, data)
        return {"dense": dense, "loaded": loaded, "losses": losses, "bytes": local_bytes(training) if master else {}}


def count_apart(training: mt.Training) -> None:
    """Each state counts its own steps. DistributedOptimizer.load_state_dict without FusedAdam gives all of them one
    tensor, which every parameter's update advances: a run of stock alone goes on with wrong bias corrections, too."""
    for one in training.optimizer.chained_optimizers:
        states = list(one.optimizer.state.values())
        steps = [state["step"] for state in states]
        assert len({id(step) for step in steps}) == 1 < len(steps)
        for state in states:
            state["step"] = steps[0].clone()


@pytest.mark.parametrize(
    ("distributed", "form", "world_size"),
    [
        (True, "dp_reshardable", 2),
        (True, "fully_reshardable_gloo", 2),
        (True, "legacy", 2),
        (False, "dp_reshardable", 1),
    ],
)
def test_resume_is_bit_exact(ranks: Any, tmp_path: Path, distributed: bool, form: str, world_size: int) -> None:
    """States, the weights, and with the next steps the counter of the rounding."""
    path = str(tmp_path / "ckpt")
    Path(path).mkdir()
    saved = ranks(world_size).run(save_and_go_on, distributed, form, path, SPLIT)
    loaded = ranks(world_size).run(load_and_go_on, distributed, form, path, SPLIT)
    for one, other in zip(saved, loaded, strict=True):
        assert_same(one["before"], other["loaded"])
        assert one["losses"] == other["losses"]
        assert_same(one["bytes"], other["bytes"])


def test_another_number_of_ranks_loads_the_same_states(ranks: Any, tmp_path: Path) -> None:
    """Masters bitwise. Moments too, but where a shard's edge cuts a group of 128: two scales become one."""
    path = str(tmp_path / "ckpt")
    Path(path).mkdir()
    saved = ranks(2).run(save_and_go_on, True, "dp_reshardable", path, SPLIT)[0]["dense"]
    loaded = ranks(1).run(load_and_go_on, True, "dp_reshardable", path, SPLIT)[0]["dense"]
    assert saved.keys() == loaded.keys() and saved
    num_other = 0
    for name, value in saved.items():
        if name.endswith(" param"):
            assert torch.equal(value, loaded[name]), name
            continue
        num_other += int((value != loaded[name]).sum())
        assert torch.allclose(value, loaded[name], rtol=0.15, atol=float(value.abs().max()) * 2**-8), name
    assert num_other <= 128 * 2 * 2, num_other


@pytest.mark.parametrize(
    ("form", "distributed", "source", "target"),
    [
        ("fully_reshardable", True, None, SPLIT),
        ("dp_reshardable", False, SPLIT, None),
        ("legacy", False, None, SPLIT),
    ],
)
def test_a_stock_run_loads_ours_and_back(
    ranks: Any, tmp_path: Path, form: str, distributed: bool, source: str | None, target: str | None
) -> None:
    """Into ours masters are rounded to 24 bits and moments to FP8; out of ours everything is exact.

    Not here: "legacy" of the distributed optimizer into a stock run, which without FusedAdam cannot load its own.
    """
    path, world_size = str(tmp_path / "ckpt"), 2 if distributed else 1
    Path(path).mkdir()
    saved = ranks(world_size).run(save_and_go_on, distributed, form, path, source)[0]
    loaded = ranks(world_size).run(load_and_go_on, distributed, form, path, target)[0]
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


def pushed() -> dict[str, Tensor]:
    """Masters after three updates by gradients that every rank makes for itself."""
    with run(bf16(True), SPLIT) as training:
        for step in range(3):
            for i, p in enumerate(training.module.parameters()):
                generator = torch.Generator().manual_seed(100 * step + i)
                p.main_grad.copy_(1e-4 * torch.randn(p.shape, generator=generator))  # too small to be clipped
            training.optimizer.step()
        return masters(training)


def test_an_update_does_not_depend_on_how_weights_are_sharded(ranks: Any) -> None:
    """Rounding noise and groups follow a weight's elements. Other are a few: a group that two ranks share has two
    scales.
    """
    one, two = ranks(1).run(pushed)[0], ranks(2).run(pushed)[0]
    assert one.keys() == two.keys()
    num_other = sum(int((value != two[name]).sum()) for name, value in one.items())
    assert num_other <= 3 * 128, num_other


@on_ranks(2)
def test_weights_loaded_without_states_are_their_own_masters() -> None:
    with run(bf16(True), SPLIT) as training:
        steps(training, 2)
        with torch.no_grad():
            for p in training.module.parameters():
                p.fill_(0.125)
        training.optimizer.reload_model_params()
        assert all((value == 0.125).all() for key, value in masters(training).items() if key.endswith(" param"))


# --- what Megatron's training code reads ---


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
