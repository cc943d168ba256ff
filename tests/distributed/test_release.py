"""Gradient release: the same training bit for bit, gradients freed in the backward, and clipping that needs no sum."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_pipeline
import torch
import torch.distributed as dist
import training
from rank_memory import RankMemory
from support.ranks import on_ranks
from test_states import assert_same_everything, everything, shared_states
from torch import nn

from fp8_ds import ConfigError, UnsupportedError

pytestmark = pytest.mark.distributed

BUCKET = 16_000
"""Elements of a bucket: three blocks of 12288-element weights make several."""
MODEL = {"width": 64, "hidden": 192, "num_blocks": 3}
LARGE = {"width": 128, "hidden": 320, "num_blocks": 2, "bias": False}
"""Each linear weight is larger than a bucket."""
WIDE = {"width": 256, "hidden": 512, "num_blocks": 4, "bias": False}
"""Gradients of linear weights take 256 KiB, of all parameters 2.1 MiB."""
TINY = {"width": 32, "hidden": 72, "num_blocks": 2, "tiny": True}
"""A weight of 5 elements, of which some rank of 4 owns none in ZeRO-3, and a single bucket."""


def block(master: str, release: bool, **more: Any) -> dict[str, Any]:
    """An "fp8" block; other keys of "optimizer" by keyword, other blocks as "linear", "zero", "schedule"."""
    rest = {name: more.pop(name) for name in ("linear", "zero", "schedule") if name in more}
    optimizer = {"states": "fp8", "master": master, "release": release}
    return {"optimizer": {**optimizer, **more}, **rest}


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in net.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]


def build(
    stage: int, fp8: dict[str, Any], model: dict[str, Any], groups: bool = False, num_elements: int = 0, **more: Any
) -> Any:
    """An engine without clipping; `num_elements` is DeepSpeed's bucket size, `more` overrides of the configuration."""
    zero = {"reduce_bucket_size": num_elements or BUCKET, **more.pop("zero_optimization", {})}
    config = training.ds_config(stage, fp8, **{"gradient_clipping": 0.0, "zero_optimization": zero, **more})
    return training.build(config, model, groups=two_groups if groups else None)


def count_buckets(engine: Any, names: bool = False) -> list[list[Any]]:
    """Numbers of elements, or names, of the parameters of each bucket from now on."""
    release, found = engine.fp8.release, []
    update = release.update
    numels = {name: getattr(p, "ds_numel", p.numel()) for name, p in engine.module.named_parameters()}

    def counted(bucket: Any, *args: Any) -> None:
        found.append(list(bucket) if names else [numels[name] for name in bucket])
        update(bucket, *args)

    release.update = counted
    return found


def both(stage: int, master: str, model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Three steps with and without release."""
    fp8 = {name: options.pop(name) for name in ("linear", "zero", "schedule") if name in options}
    results = []
    for release in (True, False):
        engine = build(stage, block(master, release, **fp8), model, **options)
        assert (engine.fp8.release is not None) == release
        buckets = count_buckets(engine) if release else []
        scales = shared_states(engine)["scale_inv"]
        losses = training.train(engine, 3)
        moved = not torch.equal(scales, shared_states(engine)["scale_inv"])
        assert moved or "optimizer" not in options
        results.append((losses, everything(engine), buckets, int(engine.optimizer.reduce_bucket_size)))
        options["num_elements"] = results[0][3]  # gloo's sums over 4 ranks depend on where in a bucket a number lies
        training.destroy(engine)
    return {"release": results[0], "plain": results[1]}


OVERLAP = {"zero_optimization": {"overlap_comm": True}}
NO_OVERLAP = {"zero_optimization": {"overlap_comm": False}}
PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": 13000}}
GROWING = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}
"""Weights grow, so that scales move."""
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[tuple[int, int], list[Case]] = {
    (1, 1): [("e4m11", MODEL, GROWING)],
    (2, 2): [
        ("e4m11", LARGE, {**OVERLAP, "scheduler": training.ONE_CYCLE}),
        ("e4m11", {**MODEL, "checkpointing": "plain", "frozen": "blocks.1"}, {"linear": {"frozen": "fp8"}}),
        ("e4m19", MODEL, {"zero": {"reduce_scatter": "fp8"}, "groups": True, "linear": {"recipe": "delayed"}}),
    ],
    (3, 2): [
        ("e4m19", {**MODEL, "checkpointing": "reentrant"}, {**NO_OVERLAP, "schedule": {"bf16_until_step": 2}}),
        ("e4m11", MODEL, {"zero": {"reduce_scatter": "fp8"}, "groups": True, "linear": {"recipe": "delayed"}}),
    ],
    (3, 4): [("e4m19", TINY, PERSISTENT)],
}


def all_cases(stage: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [both(stage, master, model, **options) for master, model, options in cases]


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (2, 2), (3, 4), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_release_changes_no_bit_of_training(ranks: Any, stage: int, world_size: int) -> None:
    cases = CASES[stage, world_size]
    for per_rank in ranks(world_size).run(all_cases, stage, cases):
        for case, result in zip(cases, per_rank, strict=True):
            losses, states, buckets, num_elements = result["release"]
            assert losses == result["plain"][0] and losses[1] < losses[0], case
            assert_same_everything(states, result["plain"][1])
            assert num_elements == BUCKET
            assert all(sum(bucket) <= num_elements or len(bucket) == 1 for bucket in buckets), case
            assert len(buckets) >= (3 if case[1] is TINY else 6), case


# --- memory ---


def backward_peak(stage: int, release: bool, overlap: bool, num_bytes: int) -> tuple[float, float]:
    """Bytes that a backward over 8 tokens adds to what was there, at its peak and at its end; updates left out.

    Activations are small beside gradients; the plain update on a CPU makes float32 copies, a GPU none.
    """
    zero = {"overlap_comm": overlap, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    zero |= {"stage3_prefetch_bucket_size": 0}
    copies = 3 if overlap and stage < 3 else 2  # one or two buckets, and what the reduction makes of one
    engine = build(stage, block("e4m11", release), WIDE, zero_optimization=zero, num_elements=num_bytes // copies // 2)
    engine.optimizer.optimizer.core.run = lambda *args, **kwargs: None
    training.train(engine, 1)
    tokens = training.micro_batches(1, 1)[0][:1, :9]
    gc.collect()
    with RankMemory() as memory:
        loss = engine(tokens)
        gc.collect()
        before, memory.peak = memory.live, memory.live
        engine.backward(loss)
        peak = memory.peak - before
        gc.collect()
        end = memory.live - before
    engine.step()
    training.destroy(engine)
    return peak, end


def backward_peaks(stage: int, overlap: bool, num_bytes: int) -> list[tuple[float, float]]:
    return [backward_peak(stage, release, overlap, num_bytes) for release in (True, False)]


@pytest.mark.parametrize(
    ("stage", "world_size", "overlap", "num_bytes"),
    [
        (1, 1, False, 1 << 20),
        (2, 2, True, 1 << 19),
        pytest.param(3, 2, True, 1 << 19, marks=pytest.mark.slow),
        (3, 2, False, 1 << 20),
    ],
)
def test_gradients_in_the_backward_stay_within_their_buckets_and_one_gradient(
    ranks: Any, stage: int, world_size: int, overlap: bool, num_bytes: int
) -> None:
    largest = 2 * 256 * 512
    for (peak, end), (plain_peak, plain_end) in ranks(world_size).run(backward_peaks, stage, overlap, num_bytes):
        assert peak <= num_bytes + largest < plain_peak
        buffer = num_bytes // 2 if stage == 3 else 0  # DeepSpeed keeps it between steps there
        assert end <= buffer and plain_end > 3.5 * largest


# --- clipping ---


def with_exact_clipping(release: bool) -> tuple[list[float], float, dict[str, Any]]:
    """Two micro-batches a step, norms far above the limit."""
    engine = build(3, block("e4m11", release), TINY, gradient_clipping=0.05, gradient_accumulation_steps=2)
    assert engine.fp8.release is None
    found = training.train(engine, 3), float(engine.get_global_grad_norm()), everything(engine)
    training.destroy(engine)
    return found


@on_ranks(2)
def test_exact_clipping_holds_the_gradients_and_accumulates_as_without_release() -> None:
    (losses, norm, states), (plain_losses, plain_norm, plain) = map(with_exact_clipping, (True, False))
    assert losses == plain_losses and norm == plain_norm > 0.25
    assert_same_everything(states, plain)


# --- refusals ---


WRONG: list[tuple[int, dict[str, Any]]] = [
    (2, {"gradient_accumulation_steps": 2}),
    (1, {"zero_optimization": {"contiguous_gradients": False}}),
    (3, {"data_types": {"grad_accum_dtype": "fp32"}}),
]


@on_ranks(2)
def test_what_contradicts_release_is_refused_on_all_ranks() -> None:
    """Also a pipeline, tensor parallelism, and gradients that the caller accumulates."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups
    from test_tp_llama import tp_engine

    fp8 = block("e4m19", True, release_clipping="delayed_norm")
    attempts: list[Callable[[], Any]] = [partial(build, stage, fp8, TINY, **more) for stage, more in WRONG]
    if hasattr(DeepSpeedEngine, "managed_gradient_accumulation"):  # DeepSpeed has it since 0.19.8
        attempts.append(partial(build, 2, fp8, TINY, managed_gradient_accumulation=False))
    attempts.append(partial(test_pipeline.pipeline, fp8, "balanced", 1, num_micro_batches=1))
    attempts += [partial(tp_engine, training.ds_config(stage, fp8), 2) for stage in (2, 3)]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=r"fp8\.optimizer\.release: expected false with"):
            attempt()
        groups.mpu = None  # which DeepSpeed keeps for whatever engine comes next
    dist.barrier()  # no rank is inside a collective of its own


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_readers_of_freed_gradients_raise_on_all_ranks_by_name(stage: int) -> None:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = build(stage, block("e4m11", True), TINY)
    with engine.optimizer.fp8.dense():  # as in a load, in which DeepSpeed links its own readers
        pass
    engine.backward(engine(training.micro_batches(0, 2)[dist.get_rank()]))
    for name, p in engine.module.named_parameters():
        for access in (safe_get_full_grad, lambda p: safe_set_full_grad(p, torch.zeros(1))):
            with pytest.raises(UnsupportedError, match=f"gradient of {name}"):
                access(p)
    with pytest.raises(RuntimeError, match="one backward per step"):
        engine.backward(engine(training.micro_batches(0, 2)[dist.get_rank()]))
    dist.barrier()  # no rank waits for another one's part
    training.destroy(engine)


# --- gradients that are not finite ---


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(value, right[key]) for key, value in left.items() if torch.is_tensor(value))


@pytest.mark.parametrize(
    ("stage", "master", "value", "recipe"),
    [(2, "e4m19", float("nan"), "delayed"), (3, "e4m11", float("-inf"), "tensorwise")],
)
@on_ranks(2)
def test_a_bucket_with_a_gradient_that_is_not_finite_is_skipped_alone_on_all_ranks(
    stage: int, master: str, value: float, recipe: str
) -> None:
    """Two good steps, one with a bad gradient of one bias on the last rank, one good step."""
    engine = build(stage, block(master, True, linear={"recipe": recipe}), MODEL)
    training.train(engine, 2)
    before, buckets = everything(engine), count_buckets(engine, names=True)
    factor = value if dist.get_rank() == 1 else 1.0
    handle = engine.module.blocks[1].norm.bias.register_hook(lambda grad: grad * factor)
    training.train(engine, 1, first_step=2)
    handle.remove()
    after = everything(engine)
    assert engine.skipped_steps == 1 and engine.optimizer.overflow
    assert not math.isfinite(float(engine.get_global_grad_norm()))
    (bad,) = [bucket for bucket in buckets if "blocks.1.norm.bias" in bucket]
    assert 2 <= len(bad) < 15 and len(buckets) >= 3
    assert any(name.endswith((".up.weight", ".down.weight")) for name in bad)
    [loss] = training.train(engine, 1, first_step=3)
    last = everything(engine)
    assert engine.skipped_steps == 1 and not engine.optimizer.overflow and loss == pytest.approx(4.3, abs=0.5)
    training.destroy(engine)
    for name, state in before["local"].items():
        assert same(state, after["local"][name]) == (name in bad), name
        assert not same(after["local"][name], last["local"][name]), name
    for name, state in before["bytes"].items():
        assert same(state, after["bytes"][name]) == (name in bad), name
    for name, master_before in before["masters"][""].items():
        assert torch.equal(master_before, after["masters"][""][name]) == (name in bad), name


# --- checkpoints ---


@pytest.mark.parametrize(
    ("stage", "clipping", "recipe"),
    [(1, 1.0, "delayed"), pytest.param(2, 0.25, "tensorwise", marks=pytest.mark.slow), (3, 0.0, "delayed")],
)
@on_ranks(2)
def test_a_load_between_a_backward_and_its_step_and_a_resume_change_no_bit(
    stage: int, clipping: float, recipe: str, folder: str
) -> None:
    """The load takes back what the backward has updated."""
    fp8 = block("e4m11", True, release_clipping="delayed_norm", linear={"recipe": recipe})
    more: dict[str, Any] = {"scheduler": training.ONE_CYCLE} if stage == 2 else {}

    def end(engine: Any) -> tuple[list[float], Any, dict[str, Any]]:
        losses = training.train(engine, 2, first_step=2)
        return losses, engine.fp8.release.state_dict(), everything(engine)

    engine = build(stage, fp8, TINY, gradient_clipping=clipping, **more)
    training.train(engine, 2)
    engine.save_checkpoint(folder)
    losses, release, states = end(engine)
    assert release["last_norm"] > 0
    for is_anew in (False, True):
        if is_anew:
            training.destroy(engine)
            engine = build(stage, fp8, TINY, gradient_clipping=clipping, **more)
        else:
            engine.backward(engine(training.micro_batches(9, 1)[0]))
        engine.load_checkpoint(folder)
        again = end(engine)
        assert again[:2] == (losses, release)
        assert_same_everything(again[2], states)
    training.destroy(engine)
