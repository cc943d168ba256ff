"""Who reads and writes FP8 states past the engine: safe_* functions, users, offload; and what memory they take."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import test_states as base
import torch
import torch.distributed as dist
import training
from rank_memory import RankMemory
from support.memory import PeakMemory
from torch import Tensor

pytestmark = pytest.mark.distributed

NAMES = ("blocks.1.up.weight", "embedding.weight", "blocks.0.norm.bias")
"""An FP8 weight, a bf16 matrix, a vector that starts at zero."""


def decoded_precision(master: str, name: str) -> float:
    """Relative precision (half a unit in the last place) of the master of `name`."""
    return {"e4m19": 2.0**-20, "e4m11": 2.0**-12}[master] if ".up." in name else 2.0**-16


# --- safe_* functions ---


def safe_functions(stage: int, master: str | None) -> dict[str, Any]:
    from deepspeed import utils

    rate = {"params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}
    fp8 = base.states(master) if master else None
    engine = training.build(training.ds_config(stage, fp8, optimizer=rate, gradient_clipping=0.0), base.SMALL)
    params = dict(engine.module.named_parameters())
    result: dict[str, Any] = {"first": training.full_masters(engine)}

    def backward(step: int) -> None:
        engine.backward(engine(training.micro_batches(step, 2)[dist.get_rank()]))

    backward(0)
    result["grad"] = {name: utils.safe_get_full_grad(params[name]).float().clone() for name in NAMES}
    engine.step()
    for key in ("exp_avg", "exp_avg_sq"):
        result[key] = {name: utils.safe_get_full_optimizer_state(params[name], key).clone() for name in NAMES}
    values = {name: ramp(result["first"][name].shape, index) for index, name in enumerate(NAMES)}
    for name, value in values.items():
        utils.safe_set_full_fp32_param(params[name], value)
        utils.safe_set_full_optimizer_state(params[name], value / 16, "exp_avg")
        utils.safe_set_full_optimizer_state(params[name], value.square(), "exp_avg_sq")
    result["set"] = {name: read_all(params[name]) for name in NAMES}
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    backward(1)
    engine.step()  # nothing moves, though every byte is written anew
    result["kept"] = {name: utils.safe_get_full_fp32_param(params[name]).clone() for name in NAMES}
    result["values"] = values
    if master:
        result["bytes"] = training.fp8_state(engine)
        result["masters"] = training.full_masters(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3
    result["losses"] = training.train(engine, 2, first_step=2)
    training.destroy(engine)
    return result


def ramp(shape: Any, index: int) -> Tensor:
    """Values of both signs with a range of their own per parameter, from tiny to larger than any weight."""
    numel = int(torch.tensor(shape).prod())
    exponents = torch.linspace(-9, 2 + index, numel)
    return (torch.exp2(exponents) * torch.where(torch.arange(numel) % 2 == 0, 1.0, -1.0)).view(shape)


def read_all(p: Any) -> tuple[Tensor, Tensor, Tensor]:
    from deepspeed import utils

    moments = (utils.safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq"))
    return (utils.safe_get_full_fp32_param(p).clone(), *moments)  # type: ignore[return-value]


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).abs() / expected.abs().clamp(min=1e-12)).max())


SAFE = [(1, "e4m11"), (2, "e4m19"), (3, "e4m11")]


@pytest.mark.parametrize(("stage", "master"), SAFE)
def test_safe_functions_read_and_write_true_values(ranks: Any, stage: int, master: str) -> None:
    from fp8_ds.testing import sqnr_db

    stock = ranks(2).run(safe_functions, stage, None)
    for ours, theirs in zip(ranks(2).run(safe_functions, stage, master), stock, strict=True):
        for name in NAMES:
            assert torch.equal(ours["first"][name].bfloat16(), theirs["first"][name].bfloat16()), name
            assert sqnr_db(theirs["grad"][name], ours["grad"][name]) > 15, name
            # E4M3 to nearest is 31 dB off its input, E4M4 of the root twice as near and then squared; rounded
            # stochastically both have twice the energy of error.
            assert sqnr_db(0.1 * ours["grad"][name], ours["exp_avg"][name]) > 26, name
            assert sqnr_db(1e-3 * ours["grad"][name].square(), ours["exp_avg_sq"][name]) > 26, name
            value, (got, m, v) = ours["values"][name], ours["set"][name]
            precision = decoded_precision(master, name)
            assert relative(got, value) <= precision, name
            assert not torch.equal(got, value), name
            assert relative(m, value / 16) <= 2.0**-4, name
            assert relative(v, value.square()) <= 2.0**-4, name
            assert torch.equal(ours["kept"][name], got), name
        base.assert_bytes_are_high_parts(ours["bytes"], ours["masters"], master)
        assert all(0 < loss < 60 for loss in ours["losses"]), ours["losses"]


def safe_locals(master: str) -> dict[str, Any]:
    """ZeRO-3's functions for this rank's part."""
    from deepspeed import utils

    from fp8_ds.errors import UnsupportedError

    engine = training.build(training.ds_config(3, base.states(master), gradient_clipping=0.0), base.SMALL)
    training.train(engine, 1)
    params = dict(engine.module.named_parameters())
    result: dict[str, Any] = {}
    for name in NAMES:
        p = params[name]
        size, own = p.ds_tensor.ds_numel, slice(dist.get_rank() * p.ds_tensor.ds_numel, None)
        whole = [part.flatten()[own][:size] for part in read_all(p)]
        got = [utils.safe_get_local_fp32_param(p)]
        got += [utils.safe_get_local_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")]
        result[name] = [torch.equal(a.flatten()[: w.numel()], w) for a, w in zip(got, whole, strict=True)]
        value = ramp((size,), 0) / 128 + dist.get_rank() / 64
        utils.safe_set_local_fp32_param(p, value)
        utils.safe_set_local_optimizer_state(p, value, "exp_avg")
        after = read_all(p)
        result[name] += [relative(after[0].flatten()[own][:size], value[: whole[0].numel()])]
        result[name] += [relative(after[1].flatten()[own][:size], value[: whole[0].numel()])]
    too_large = torch.full((params[NAMES[0]].ds_tensor.ds_numel,), 1e4)
    try:
        utils.safe_set_local_fp32_param(params[NAMES[0]], too_large)
        result["large"] = "taken"
    except UnsupportedError as error:
        result["large"] = str(error)
    training.destroy(engine)
    return result


def test_local_functions_of_stage_3_read_and_write_the_part_of_this_rank(ranks: Any) -> None:
    for result in ranks(2).run(safe_locals, "e4m11"):
        for name in NAMES:
            *same, of_master, of_moment = result[name]
            assert same == [True, True, True], name
            assert of_master <= decoded_precision("e4m11", name), name
            assert of_moment <= 2.0**-4, name
        assert "Use safe_set_full_fp32_param on all ranks" in result["large"]


def set_gradient(stage: int, master: str) -> tuple[Tensor, Tensor, Tensor]:
    from deepspeed import utils

    rate = {"params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}}
    config = training.ds_config(stage, base.states(master), optimizer=rate, gradient_clipping=0.0)
    engine = training.build(config, base.SMALL)
    params = dict(engine.module.named_parameters())
    before = training.full_masters(engine)
    engine.backward(engine(training.micro_batches(0, 2)[dist.get_rank()]))
    gradient = torch.where(torch.arange(before[NAMES[0]].numel()) % 2 == 0, 1.0, -0.5).view(before[NAMES[0]].shape)
    utils.safe_set_full_grad(params[NAMES[0]], gradient.bfloat16())
    engine.step()
    after = training.full_masters(engine)
    training.destroy(engine)
    return before[NAMES[0]], after[NAMES[0]], gradient


@pytest.mark.parametrize(("stage", "master"), [(1, "e4m19"), (2, "e4m11"), (3, "e4m11")])
def test_a_gradient_that_a_user_sets_is_the_one_of_the_step(ranks: Any, stage: int, master: str) -> None:
    for before, after, gradient in ranks(2).run(set_gradient, stage, master):
        assert torch.allclose(before - after, 1e-2 * gradient.sign(), rtol=1e-2, atol=3e-4)


# --- writes by users ---


def user_writes(stage: int, master: str, how: str) -> dict[str, Any]:
    """Write an FP8 weight, and zeros into bf16 parameters, as users do; then train."""
    import deepspeed

    engine = training.build(training.ds_config(stage, base.states(master)), base.SMALL)
    training.train(engine, 3)
    before = training.full_masters(engine)
    params = dict(engine.module.named_parameters())
    weight, embedding, bias = (params[name] for name in NAMES)
    value = (ramp(before[NAMES[0]].shape, 0) / 8).bfloat16()
    if how == "load_state_dict":
        state = {name: master.bfloat16() for name, master in before.items()}
        state |= {NAMES[0]: value, NAMES[1]: 0 * state[NAMES[1]], NAMES[2]: 0 * state[NAMES[2]]}
        engine.module.load_state_dict(state)
    else:
        chosen = [weight, embedding, bias]
        with deepspeed.zero.GatheredParameters(chosen, modifier_rank=0, enabled=stage == 3), torch.no_grad():
            if stage < 3 or dist.get_rank() == 0:
                weight.copy_(value)
                embedding.zero_() if how == "copy" else embedding.data.zero_()
                bias.mul_(-0.0)
    written = training.full_masters(engine)
    batch = training.micro_batches(50, 1)[0]
    with torch.no_grad():
        loss = float(engine(batch))
    rate = [group["lr"] for group in engine.optimizer.param_groups]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    training.train(engine, 1, first_step=3)
    kept = training.full_masters(engine)
    for group, lr in zip(engine.optimizer.param_groups, rate, strict=True):
        group["lr"] = lr
    losses = training.train(engine, 3, first_step=4)
    result = {"before": before, "written": written, "kept": kept, "value": value, "loss": loss, "losses": losses}
    result["bytes"], result["masters"] = training.fp8_state(engine), training.full_masters(engine)
    training.destroy(engine)
    return result


WRITES = [
    (2, "e4m19", "data"),
    (2, "e4m11", "load_state_dict"),
    (3, "e4m11", "copy"),
]


@pytest.mark.parametrize(("stage", "master", "how"), WRITES)
def test_what_a_user_writes_is_the_master_of_a_split_weight_from_then_on(
    ranks: Any, stage: int, master: str, how: str
) -> None:
    for result in ranks(2).run(user_writes, stage, master, how):
        for state in ("written", "kept"):
            masters = result[state]
            # bf16 fits into either master. In stage 3 an element that rounds to what was written keeps its master.
            got = masters[NAMES[0]].bfloat16().float() if stage == 3 else masters[NAMES[0]]
            assert torch.equal(got, result["value"].float()), state
            for name in NAMES[1:]:
                assert float(masters[name].abs().max()) < 1e-30, (state, name)  # not NaN, not the old value
            for name, value in result["before"].items():
                if name not in NAMES and how != "load_state_dict":
                    assert torch.equal(masters[name], value), (state, name)
                elif name not in NAMES:
                    assert relative(masters[name], value) <= 2.0**-7, (state, name)
        base.assert_bytes_are_high_parts(result["bytes"], result["masters"], master)
        assert 0 < result["loss"] < 20
        assert all(0 < loss < 20 for loss in result["losses"]) and result["losses"][-1] < result["losses"][0]


# --- offload ---

KINDS = {"optim_states": ("m", "v", "m_scale_inv", "v_scale_inv"), "hp_params": ("lo",), "lp_params": ("hi",)}


def offload(engine: Any, chosen: tuple[str, ...], device: str) -> None:
    from types import SimpleNamespace

    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    include = [OffloadStateTypeEnum(name) for name in chosen]
    engine.optimizer.offload_states(include=include, device=SimpleNamespace(value=device), pin_memory=False)
    assert {state.value for state in engine.optimizer.offloaded_states} == set(chosen)


def with_offload(stage: int, master: str, chosen: tuple[str, ...]) -> dict[str, Any]:
    engine = training.build(training.ds_config(stage, base.states(master)), base.SMALL)
    losses = training.train(engine, 2)
    if chosen:
        before = base.everything(engine)
        offload(engine, chosen, "cpu")
        engine.reload_states()
        assert not engine.optimizer.offloaded_states
        base.assert_same_everything(base.everything(engine), before)
    losses += training.train(engine, 2, first_step=2)
    result = {"losses": losses, "end": base.everything(engine)}
    training.destroy(engine)
    return result


@pytest.mark.parametrize(
    ("stage", "master"),
    [(2, "e4m11"), (3, "e4m19")],
)
def test_offload_and_reload_change_no_byte(ranks: Any, stage: int, master: str) -> None:
    plain = ranks(2).run(with_offload, stage, master, ())
    for ours, expected in zip(ranks(2).run(with_offload, stage, master, tuple(KINDS)), plain, strict=True):
        assert ours["losses"] == expected["losses"]
        base.assert_same_everything(ours["end"], expected["end"])


def freed_by_offload(stage: int, master: str, kind: str) -> tuple[int, int]:
    """(bytes that leave with `kind`, bytes of it). To the meta device, which is elsewhere on a CPU too."""
    engine = training.build(training.ds_config(stage, base.states(master)), base.SMALL)
    training.train(engine, 1)
    core = engine.optimizer.optimizer.core
    tensors = [getattr(shard, name) for shard in core.shards for name in KINDS[kind]]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None}
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    del storages, tensors
    gc.collect()
    with PeakMemory(t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)) as memory:
        before = memory.live
        offload(engine, (kind,), "meta")
        gc.collect()
        freed = before - memory.live
    training.destroy(engine)
    return freed, num_bytes


@pytest.mark.parametrize(
    ("stage", "master", "kind"),
    [
        (1, "e4m11", "hp_params"),
        (2, "e4m19", "optim_states"),
        (3, "e4m19", "hp_params"),
        (3, "e4m11", "optim_states"),
    ],
)
def test_offload_leaves_nothing_behind(ranks: Any, stage: int, master: str, kind: str) -> None:
    for freed, num_bytes in ranks(2).run(freed_by_offload, stage, master, kind):
        assert 0 < num_bytes <= freed + 64


# --- memory ---

MODEL = {"width": 64, "hidden": 128, "num_blocks": 32, "bias": False}
BUCKETS = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, "stage3_prefetch_bucket_size": 20_000}


def memory_of(stage: int, master: str | None) -> dict[str, float]:
    """Bytes per parameter: at the peak of initialize, at rest, of the states alone, and what the step adds."""
    from support.adam_shards import state_bytes

    gc.collect()
    fp8 = base.states(master) if master else None
    with RankMemory() as memory:
        engine = training.build(training.ds_config(stage, fp8, zero_optimization=BUCKETS), MODEL)
        result = {"initialize": float(memory.peak)}
        training.train(engine, 1)
        gc.collect()
        result["resting"] = float(memory.live)
        engine.backward(engine(training.micro_batches(2, 2)[dist.get_rank()]))
        gc.collect()
        memory.peak = before = memory.live
        engine.step()
        result["step"] = float(memory.peak - before)
    num_params = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    if master:
        result |= {k: float(v) for k, v in state_bytes(engine.optimizer.optimizer.core.shards).items()}
        result["fp8 share"] = engine.fp8_report()["num_fp8_weights"]
    training.destroy(engine)
    return {key: value / num_params for key, value in result.items()}


def memory_of_all(stage: int, masters: tuple[str, ...]) -> dict[tuple[int, str | None], dict[str, float]]:
    return {(stage, master): memory_of(stage, master) for master in (None, *masters)}


@pytest.mark.parametrize(("world_size", "stage", "masters"), [(2, 2, ("e4m11",))])
def test_states_take_their_bytes_and_no_full_fp32_copy_ever_exists(
    ranks: Any, world_size: int, stage: int, masters: tuple[str, ...]
) -> None:
    """In bytes per parameter. Of the parameters 97 % are FP8 weights, the largest is 1/66 of all."""
    for found in ranks(world_size).run(memory_of_all, stage, masters):
        for master in masters:
            stock, taken = found[stage, None], found[stage, master]
            fp8 = taken["fp8 share"]
            share = 1.03 / world_size  # of what is sharded; ragged shards and groups are padded
            lo = {"e4m19": 2 * fp8 + (1 - fp8), "e4m11": 1}[master] * share
            assert 0.95 * lo <= taken["master"] <= lo
            assert 1.95 / world_size <= taken["moments"] <= 2 * share
            assert taken["moment_scales"] <= 8 / 128 * share
            hi = fp8 + 2 * (1 - fp8)
            sharded = (share if stage == 3 else 1) * hi
            gradients = 2 * share if stage == 3 else 0  # ZeRO-3's buffer of reduced gradients, as stock
            assert taken["resting"] <= sharded + gradients + lo + (2 + 8 / 128) * share + 0.05, (stage, master)
            assert taken["initialize"] <= stock["initialize"]
            # The model as the user built it, or bf16 beside what is encoded from it.
            assert taken["initialize"] <= max(4.0, 2 + hi + lo + gradients + 0.5) + 0.1, (stage, master)
            largest = 64 * 128 / 541_000
            assert taken["step"] <= 90 * largest < 0.7 * 4 / world_size, (stage, master)  # one shard's temporaries
            assert stock["step"] > 4 / world_size  # the tracker sees such a copy
