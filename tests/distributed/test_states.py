"""FP8 optimizer states train as fp32 states do: all stages, ranks, masters and optimizer options."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import test_pipeline
import test_zero
import torch
import torch.distributed as dist
import training
from torch import Tensor, nn

pytestmark = pytest.mark.distributed

NUM_STEPS = 20
SMALL = {"width": 32, "hidden": 72, "num_blocks": 2}
GROUP_SCALES = ("m_scale_inv", "v_scale_inv")


def states(master: str | None, **more: Any) -> dict[str, Any]:
    """An "fp8" block with FP8 states and this master; None: with fp32 states."""
    return more if master is None else {"optimizer": {"states": "fp8", "master": master}, **more}


def local_states(engine: Any) -> dict[str, dict[str, Any]]:
    """name -> what this rank stores of that parameter: codes by element, scales by group, and its first element."""
    core, found = engine.optimizer.optimizer.core, {}
    core.scales.wait()
    for shard in core.shards:
        codes = {"hi": shard.hi, "lo": shard.lo, "m": shard.m, "v": shard.v}
        found[shard.name] = {
            "start": shard.start,
            **{
                key: value[:0] if value.numel() == 0 else value[-shard.numel :] if key == "hi" else value[head(shard)]
                for key, value in codes.items()
                if value is not None
            },
            **{key: getattr(shard, key) for key in GROUP_SCALES},
        }
        found[shard.name] = {k: v.clone().cpu() if torch.is_tensor(v) else v for k, v in found[shard.name].items()}
    return found


def head(shard: Any) -> slice:
    return slice(shard.head, shard.head + shard.numel)


def shared_states(engine: Any) -> dict[str, Tensor]:
    """What is the same on all ranks: step counts, scales of masters and their amaxes."""
    core = engine.optimizer.optimizer.core
    core.scales.wait()
    return {
        "step": core.step_count.clone().cpu(),
        "scale_inv": core.scales.scale_inv.clone().cpu(),
        "amax": core.scales.amax.clone().cpu(),
        "bound_sums": torch.tensor(sorted(core.sums.by_group().items()), dtype=torch.float64),
    }


def assert_same_states(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> None:
    assert left.keys() == right.keys() and left
    for name, tensors in left.items():
        assert tensors.keys() == right[name].keys(), name
        for key, value in tensors.items():
            other = right[name][key]
            same = torch.equal(value, other) if torch.is_tensor(value) else value == other
            assert same, (name, key)


def everything(engine: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """All bytes that a step may change, on this rank and gathered. Collective."""
    history = engine.fp8.history
    return {
        "local": local_states(engine),
        "shared": {"": shared_states(engine)},
        "masters": {"": training.full_masters(engine)},
        "bytes": {n: {"data": d, "scale_inv": s} for n, (d, s) in training.fp8_state(engine).items()},
        "history": {"": {} if history is None else dict(history.state_dict())},
    }


def assert_same_everything(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for kind, tensors in left.items():
        assert_same_states(tensors, right[kind])


def assert_bytes_are_high_parts(
    weights: dict[str, tuple[Tensor, Tensor]], masters: dict[str, Tensor], master: str
) -> None:
    """Every FP8 weight, on whatever rank, is its master rounded to nearest; no scale saturates."""
    from fp8_ds.numerics.masters import BY_NAME, encode

    for name in weights.keys() & masters.keys():
        data, scale_inv = weights[name]
        assert torch.equal(encode(masters[name], BY_NAME[master], scale_inv)[0], data), name
        assert float(masters[name].abs().max()) <= 448 * float(scale_inv) * (1 + 2**-10), name
        assert float(torch.frexp(scale_inv)[0]) == 0.5, name  # a power of two


# --- the seed of the rounding ---


def rounded_by(seed: int, stage: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    block = states("e4m11")
    engine = training.build(training.ds_config(stage, {"optimizer": {**block["optimizer"], "seed": seed}}), SMALL)
    training.train(engine, 3)
    found = local_states(engine), training.full_masters(engine)
    training.destroy(engine)
    return found


def test_the_seed_decides_what_is_rounded_how_and_nothing_else(ranks: Any) -> None:
    first, again, other = (ranks(2).run(rounded_by, seed, 2) for seed in (5, 5, 6))
    for rank in range(2):
        assert_same_states(first[rank][0], again[rank][0])
        changed = [(one["lo"] != other[rank][0][name]["lo"]).float().mean() for name, one in first[rank][0].items()]
        assert max(changed) > 0.2
    for name, master in first[0][1].items():
        bound = 2**-5 if master.dim() == 2 else 0.2  # a bias is the sum of three updates, 7 % off at random each
        assert (other[0][1][name] - master).norm() < bound * master.norm(), name


# --- loss ---


def run(stage: int, fp8: dict[str, Any], model: dict[str, Any], num_steps: int, **overrides: Any) -> dict[str, Any]:
    engine = training.build(training.ds_config(stage, fp8, **overrides), model)
    losses = training.train(engine, num_steps)
    result = {"losses": losses, "last": training.fp8_state(engine), "masters": training.full_masters(engine)}
    training.destroy(engine)
    return result


def all_masters(
    stage: int, accumulation: int, model: dict[str, Any], masters: tuple[str, ...]
) -> dict[str | None, dict[str, Any]]:
    steps = NUM_STEPS
    found: dict[str | None, dict[str, Any]] = {
        master: run(stage, states(master), model, steps, gradient_accumulation_steps=accumulation)
        for master in (None, *masters)
    }
    stock = training.build(training.ds_config(stage, None, gradient_accumulation_steps=accumulation), model)
    found["bf16"] = {"losses": training.train(stock, steps)}
    training.destroy(stock)
    return found


def largest_difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("stage", "world_size", "model", "masters"),
    [
        (3, 2, test_zero.RAGGED, ("e4m11",)),
    ],
)
def test_loss_follows_fp32_states_with_every_master(
    ranks: Any, drift: Any, stage: int, world_size: int, model: dict[str, Any], masters: tuple[str, ...]
) -> None:
    """The bound is that of test_zero: three times what summing gradients in fp32 instead of bf16 changes.

    Weights differ from the first step on (a split master's scale is a power of two), and each is rounded to FP8
    elsewhere: added is what rounding weights and activations to FP8 changes at all.
    """
    results = ranks(world_size).run(all_masters, stage, 4 // world_size, model, masters)
    stock = results[0][None]["losses"]
    allowed = 3 * max(drift(4, model), 5e-4)  # DeepSpeed before 0.19.8 sums in bf16 whatever it is told: no drift
    rounding = largest_difference(results[0]["bf16"]["losses"], stock)
    for master in masters:
        for result in results:
            found = result[master]
            training.assert_fp8_equals(found["last"], results[0][master]["last"])
            assert_bytes_are_high_parts(found["last"], found["masters"], master)
            assert found["losses"] == results[0][master]["losses"]
        difference = largest_difference(results[0][master]["losses"], stock)
        assert 0 < difference <= allowed + rounding, (master, difference, allowed, rounding)
    assert stock[-1] < 0.9 * stock[0]


# --- options of the optimizer ---


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; vectors do not, and have betas, eps and lr of their own."""
    decays = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.dim() == 1]
    own = {"weight_decay": 0.0, "lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, **own}]


def option_engine(option: str, stage: int, fp8: dict[str, Any]) -> tuple[Any, Any]:
    """(engine, a client's scheduler or None)"""
    import deepspeed

    frozen = "blocks.1" if option.startswith("frozen") else ""
    config = training.ds_config(stage, fp8, zero_optimization=ZERO.get(option, {}), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = training.TinyLM(**SMALL, frozen=frozen)
    params: Any = [p for p in net.parameters() if p.requires_grad]
    kwargs: dict[str, Any] = {"model_parameters": params}
    scheduler = None
    if option == "groups":
        kwargs["model_parameters"] = two_groups(net)
    elif option == "l2":
        options = {"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}
        config["optimizer"] = {"type": "Adam", "params": options}
    elif option == "warmup":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 4}}
    elif option == "one cycle":
        config["scheduler"] = training.ONE_CYCLE
    elif option == "tensor lr":
        kwargs = {"optimizer": torch.optim.AdamW(params, lr=torch.tensor(3e-3), betas=(0.9, 0.95))}
    elif option == "callable":
        kwargs = {"optimizer": functools.partial(torch.optim.AdamW, lr=3e-3), "model_parameters": params}
    elif option == "client":
        client = torch.optim.AdamW(two_groups(net), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1.0 / (1 + step))
        kwargs = {"optimizer": client}
    if "optimizer" in kwargs:
        del config["optimizer"]
    if option == "fp32 gradients":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    before = kwargs["optimizer"].param_groups if option in ("client", "tensor lr") else None
    engine, optimizer, _, _ = deepspeed.initialize(model=net, config=config, **kwargs)
    assert before is None or optimizer.param_groups is before
    return engine, scheduler


def train_option(option: str, stage: int, fp8: dict[str, Any]) -> dict[str, Any]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, scheduler = option_engine(option, stage, fp8)
        start, losses, rates = training.full_masters(engine), [], []
        for step in range(4):
            if option == "tensor lr":
                for group in engine.optimizer.param_groups:
                    group["lr"].fill_(3e-3 / (1 + step))
            losses += training.train(engine, 1, first_step=step)
            if scheduler is not None:
                scheduler.step()
            rates.append([float(group["lr"]) for group in engine.optimizer.param_groups])
    result = {
        "losses": losses,
        "rates": rates,
        "masters": training.full_masters(engine),
        "start": start,
        "bytes": training.fp8_state(engine),
        "warned": [str(w.message) for w in caught if "lr_scheduler" in str(w.message)],
        "num_fp8": len(engine.fp8.weights) if engine.fp8 else 0,
        "kinds": type(engine.optimizer.optimizer).__name__,
    }
    training.destroy(engine)
    return result


OPTIONS = {
    "groups": {},
    "l2": {},
    "warmup": {},
    "one cycle": {},
    "tensor lr": {},
    "callable": {},
    "client": {},
    "persistent": {},
    "frozen bf16": {},
    "frozen fp8": {"linear": {"frozen": "fp8"}},
    "delayed": {"linear": {"recipe": "delayed"}},
    "fp32 gradients": {},
    "round robin": {},
    "sub groups": {},
}
ZERO = {
    "persistent": {"stage3_param_persistence_threshold": 100_000},
    "sub groups": {"sub_group_size": 5000},
    "round robin": {"round_robin_gradients": True},
}


def travel(result: dict[str, Any]) -> dict[str, Tensor]:
    return {name: master - result["start"][name] for name, master in result["masters"].items()}


def compare_options(stage: int, options: list[str], masters: list[str]) -> dict[str, Any]:
    return {
        option: [train_option(option, stage, states(m, **OPTIONS[option])) for m in (None, *masters)]
        for option in options
    }


COVERING = {
    1: ["l2", "warmup", "tensor lr", "client", "callable"],
    2: ["frozen bf16", "frozen fp8", "fp32 gradients", "one cycle", "round robin"],
    3: ["groups", "persistent", "delayed", "sub groups", "one cycle"],
}
"""Each option that has code of its own with FP8 states, where most of it is."""
SAME_LOSS = ("callable", "persistent", "round robin", "sub groups")
"""Options that say how a step is made, and not which."""


@pytest.mark.parametrize(("stage", "options"), COVERING.items())
def test_every_option_of_the_optimizer_means_what_it_means_with_fp32_states(
    ranks: Any, stage: int, options: list[str]
) -> None:
    masters = {1: ["e4m19"], 2: ["e4m19"], 3: ["e4m11"]}[stage]
    for rank, found in enumerate(ranks(2).run(compare_options, stage, options, masters)):
        for option, (stock, *ours) in found.items():
            for master, result in zip(masters, ours, strict=True):
                assert result["kinds"] == "Fp8AdamW", option
                assert result["rates"] == stock["rates"], option
                assert result["warned"] == stock["warned"] == [], option
                assert result["num_fp8"] == stock["num_fp8"] == (2 if option == "frozen bf16" else 4), option
                difference = largest_difference(result["losses"], stock["losses"])
                assert difference < 5e-3, (option, master, rank, difference)
                assert_bytes_are_high_parts(result["bytes"], result["masters"], master)
                if option == "round robin":
                    continue  # stock reads wrong masters there: its fragments are linked in the old order
                for name, travelled in travel(result).items():
                    expected = float(travel(stock)[name].norm())
                    few = 0.1 if "norm" in name else 0.05  # what noise in first masters moves, few elements show most
                    assert float(travelled.norm()) == pytest.approx(expected, rel=few), (option, master, name)
        doing = [str(result[-1]["losses"]) for option, result in found.items() if option not in SAME_LOSS]
        assert len(set(doing)) == len(doing)  # options that do something


def pipeline(master: str | None, bounds: str) -> dict[str, Any]:
    from unittest import mock

    from deepspeed.utils import groups

    follow = training.assert_fp8_follows_masters
    check = follow if master is None else functools.partial(assert_bytes_are_high_parts, master=master)
    try:
        with mock.patch.object(training, "assert_fp8_follows_masters", check):
            return test_pipeline.pipeline(states(master), bounds)
    finally:  # later engines on these ranks would take the pipeline's mpu for theirs
        groups.mpu = None


def test_a_pipeline_trains_with_fp8_states(ranks: Any) -> None:
    stock = ranks(2).run(pipeline, None, "balanced")
    for ours, theirs in zip(ranks(2).run(pipeline, "e4m11", "balanced"), stock, strict=True):
        assert ours["losses"] != theirs["losses"]
        assert largest_difference(ours["losses"], theirs["losses"]) < 5e-3


# --- the same bytes on any number of ranks ---


class Aligned(nn.Module):
    """Parameters that 1, 2 and 4 ranks cut at multiples of 128 in all stages. It is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 128)
        self.up = nn.Linear(128, 64, bias=False)
        self.down = nn.Linear(64, 128, bias=False)
        self.gain = nn.Parameter(torch.ones(512))


def inject(optimizer: Any, gradient: Any) -> tuple[list[Tensor], list[Any]]:
    """What `_fp8_gradients` gives: this rank's parts of whole gradients, and the parameters they are of."""
    shards = optimizer.optimizer.core.shards
    params = dict(optimizer.module.named_parameters()) if hasattr(optimizer, "module") else {}
    whole = {shard.name: gradient(shard.name, 1 << 16) for shard in shards}
    dummy = nn.Parameter(torch.zeros(1))
    return [whole[s.name][s.start : s.start + s.numel] for s in shards], [params.get(s.name, dummy) for s in shards]


def many_scales(step: int) -> Any:
    """Gradients with a range of their own per group of 128 and parameter, some groups all zero, bf16."""

    def gradient(name: str, numel: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + len(name))
        ranges = torch.exp2(torch.randint(-24, 4, (numel // 128, 1), generator=generator).float())
        ranges[5::7] = 0
        return (torch.randn(numel // 128, 128, generator=generator) * ranges).flatten().bfloat16()

    return gradient


def injected(stage: int, master: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Local states after each of 4 steps of the same gradients on all ranks, and what ranks share at the end."""
    import deepspeed

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    net = Aligned()
    config = training.ds_config(stage, states(master), gradient_clipping=0.0)
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    optimizer, found = engine.optimizer, {}
    for step in range(4):
        optimizer._fp8_gradients = functools.partial(inject, optimizer, many_scales(step))
        optimizer.step()
        found.update({f"{name} {step}": value for name, value in local_states(engine).items()})
    shared = shared_states(engine)
    by_name = {name: scale_inv for name, (_, scale_inv) in training.fp8_state(engine).items()}
    training.destroy(engine)
    return found, {"step": sorted(set(shared["step"].tolist())), **by_name}


def assembled(per_rank: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Tensor]]:
    """Whole parameters from the parts of all ranks."""
    whole = {}
    for name in {name for part in per_rank for name in part}:
        parts = sorted((part[name] for part in per_rank if name in part), key=lambda p: p["start"])
        assert all(part["start"] % 128 == 0 for part in parts), name
        keys = [key for key in parts[0] if key != "start"]
        whole[name] = {key: torch.cat([part[key] for part in parts]) for key in keys}
    return whole


@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_gradients_give_the_same_bytes_on_1_2_and_4_ranks_in_all_stages(ranks: Any, master: str) -> None:
    cases = [(1, 1), (2, 2), (1, 4), (3, 1), (3, 2), (3, 4)]
    results = {case: ranks(case[1]).run(injected, case[0], master) for case in cases}
    expected = assembled([states_ for states_, _ in results[1, 1]])
    assert len(expected) == 4 * 4
    if master == "e4m11":  # its rounding is random: another step or another parameter rounds otherwise
        assert len({tuple(expected[f"up.weight {step}"]["lo"].tolist()) for step in range(4)}) == 4
    for case, per_rank in results.items():
        assert_same_states(assembled([states_ for states_, _ in per_rank]), expected)
        for _, shared in per_rank:
            assert shared.keys() == results[1, 1][0][1].keys() == {"step", "up.weight", "down.weight"}
            assert shared == results[1, 1][0][1], case


# --- gradients that are not finite ---


def broken_gradient(stage: int, master: str, value: float, check: bool, recipe: str) -> dict[str, Any]:
    """Two good steps, one with a gradient that is not finite on the last rank, one good step."""
    fp8 = states(master, linear={"recipe": recipe})
    config = training.ds_config(stage, fp8, bf16={"enabled": True, "check_grad_overflow": check})
    engine = training.build(config, SMALL)
    training.train(engine, 2)

    before = everything(engine)
    is_on = dist.get_rank() == dist.get_world_size() - 1
    handle = engine.module.blocks[1].norm.bias.register_hook(lambda grad: grad * value if is_on else grad)
    training.train(engine, 1, first_step=2)
    handle.remove()
    after, skipped, overflow = everything(engine), engine.skipped_steps, bool(engine.optimizer.overflow)
    losses = training.train(engine, 1, first_step=3)
    steps = shared_states(engine)["step"]
    result = {"skipped": skipped, "overflow": overflow, "loss": losses[0], "then": engine.skipped_steps, "steps": steps}
    training.destroy(engine)
    return {"before": before, "after": after, **result}


BROKEN = [
    (1, "e4m11", float("inf"), False, "tensorwise"),
    (2, "e4m19", float("nan"), False, "delayed"),
    (2, "e4m11", float("inf"), True, "tensorwise"),
    (3, "e4m11", float("-inf"), True, "delayed"),
    (3, "e4m19", float("nan"), False, "delayed"),
]


@pytest.mark.parametrize(
    ("stage", "master", "value", "check", "recipe"),
    BROKEN,
)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_byte_on_any(
    ranks: Any, stage: int, master: str, value: float, check: bool, recipe: str
) -> None:
    for result in ranks(2).run(broken_gradient, stage, master, value, check, recipe):
        assert result["skipped"] == result["then"] == 1 and result["overflow"]
        assert_same_everything(result["before"], result["after"])
        assert set(result["steps"].tolist()) == {3}
        assert result["loss"] == pytest.approx(4.5, abs=0.5)  # training goes on
