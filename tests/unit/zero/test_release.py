"""ReleaseUpdater in one process: clipping by references, skipping, state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.threads import on_threads
from torch import Tensor

from fp8_ds.comm.layout import OUTSTANDING_UPDATE_BYTES, ShardRange
from fp8_ds.config import OptimizerConfig
from fp8_ds.errors import ConfigError
from fp8_ds.numerics.masters import E4M11, FP32, MasterFormat
from fp8_ds.numerics.predicted import PredictedScales
from fp8_ds.numerics.scale import AmaxHistory
from fp8_ds.ops.adamw import AdamShard
from fp8_ds.ops.adamw.dense import allocate_lo, write_dense
from fp8_ds.optim.core import AdamCore, FlatBuffer
from fp8_ds.zero.release import ReleaseUpdater, bucket_size, make_release, refuse_model_parallel

SIZES = {"wide": 300, "late": 128, "small": 5, "far": 200}
"""Parameters; ranges differ by tensor, "late" has gradients of zero at first, "far" is on another rank."""
RANGES = {"wide": 8.0, "late": 4.0, "small": 2.0, "far": 1.0}
HELD = [name for name in SIZES if name != "far"]
GROUPS = [{"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def updater(max_norm: float = 0.0, fmt: MasterFormat = FP32, held: Any = None) -> Any:
    """An updater over the shards that this rank holds (`held`: their sizes), all masters ones."""
    device, held = torch.device("cpu"), held or {name: SIZES[name] for name in HELD}
    scales = PredictedScales(len(held), device)
    scales.set(torch.ones(len(held)))
    pieces = []
    for index, (name, size) in enumerate(held.items()):
        dtype = torch.float32 if fmt is FP32 else torch.uint8
        shard = AdamShard(name, size, 0, index, 0, index, fmt, torch.empty(size, dtype=dtype))
        allocate_lo(shard, device)
        write_dense(shard, None, torch.ones(size), scales.scale_inv)
        pieces.append((ShardRange(0, size), shard))
    core = AdamCore([FlatBuffer(0, 1000, pieces)], [0], scales, device, True, 0)
    indices = {name: index for index, name in enumerate(held)} if fmt is not FP32 else {}
    return ReleaseUpdater(core, len(SIZES), indices, None, max_norm)


def watch(release: Any) -> dict[str, Tensor]:
    """name -> gradient as the update gets it, of the last update, in float64."""
    seen: dict[str, Tensor] = {}
    run = release.core.run

    def watched(grads: Any, inputs: Any, chosen: Any) -> None:
        for grad, index in zip(grads, chosen, strict=True):
            seen[release.core.shards[index].name] = grad.double() * inputs.grad_scale.double()
        run(grads, inputs, chosen)

    release.core.run = watched
    return seen


def gradients(step: int, late_from: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(SIZES[name], generator=generator) * RANGES[name] for name in HELD}
    grads["wide"] *= 10.0 if step % 7 == 6 else 1.0
    if step < late_from:
        grads["late"].zero_()
    return grads


def step(release: Any, grads: dict[str, Tensor], loss_scale: float = 1.0) -> Tensor:
    """Two buckets and the end of a step."""
    release.update(["wide", "far"], {"wide": grads["wide"]}, GROUPS, loss_scale)
    release.update(["late", "small"], {n: grads[n] for n in ("late", "small")}, GROUPS, loss_scale)
    return release.finish(None)


def test_delayed_norm_takes_the_factor_of_the_step_before_and_none_in_the_first() -> None:
    release = updater(max_norm=50.0)
    seen, last = watch(release), 0.0
    for t in range(6):
        grads = gradients(t)
        scaled = {name: grad * 2.0 for name, grad in grads.items()}
        norm = step(release, scaled, loss_scale=2.0)
        factor = min(1.0, 50.0 / last) if last else 1.0
        for name, grad in grads.items():
            assert torch.allclose(seen[name], grad.double() * factor, rtol=1e-5), (t, name)
        last = float(torch.cat(list(grads.values())).norm())
        assert float(norm) == pytest.approx(2 * last, rel=1e-5)
        assert t == 0 or factor < 0.9


def test_a_bad_bucket_keeps_bytes_and_scales_and_the_norm_of_the_step_before() -> None:
    release = updater(max_norm=10.0, fmt=E4M11)
    step(release, gradients(0))
    good_norm = float(release.last_norm)
    scales = release.core.scales
    grads = gradients(1)
    grads["small"][2] = float("nan")
    GROUPS[0]["lr"] = 5.0  # the prediction asks for larger scales
    try:
        before = {
            s.name: (s.hi.clone(), s.m.clone(), float(scales.scale_inv[s.scale_index])) for s in release.core.shards
        }
        norm = step(release, grads)
    finally:
        GROUPS[0]["lr"] = 1e-2
    assert not torch.isfinite(norm)
    for shard in release.core.shards:
        hi, m, scale_inv = before[shard.name]
        skipped = shard.name in ("late", "small")
        assert torch.equal(hi, shard.hi) == torch.equal(m, shard.m) == skipped, shard.name
        assert (float(scales.scale_inv[shard.scale_index]) == scale_inv) == skipped, shard.name
        assert float(scales.scale[shard.scale_index]) == 1 / float(scales.scale_inv[shard.scale_index])
    assert float(release.last_norm) == good_norm
    step(release, gradients(2))
    assert all(not torch.equal(before[s.name][1], s.m) for s in release.core.shards)


def test_a_bucket_of_which_this_rank_holds_nothing_is_counted_and_does_no_harm() -> None:
    for max_norm in (0.0, 1.0):
        release = updater(max_norm)
        release.update(["far"], {}, GROUPS, 1.0)
        assert float(release.finish(None)) == 0.0
        assert int(release.core.step_count[0]) == 1


@pytest.mark.parametrize("why", ["skipped", "no gradient"])
def test_the_bound_holds_for_what_a_step_passes_over_while_betas_move(why: str) -> None:
    """The step makes the sum smaller, which is true of moments that it has updated, and not of the others."""
    release, low, high = updater(), 0.1, 0.95
    sums = []
    for t, beta1 in enumerate([low, low, high, high, high]):
        groups = [{**GROUPS[0], "betas": (beta1, 0.95)}]
        late = {name: gradients(t)[name] for name in ("late", "small")}
        release.expect(["wide", "far"])
        release.update(["wide", "far"], {"wide": gradients(t)["wide"]}, groups, 1.0)
        if t == 3 and why == "skipped":
            late["late"][7] = float("inf")
        if t != 3 or why == "skipped":
            release.expect(["late", "small"])
            release.update(["late", "small"], late, groups, 1.0)
        release.finish(None)
        sums.append(release.core.sums.by_group().get(0))
    assert sums[0] is sums[1] is None
    assert sums[3] == sums[2] > sums[4]


def test_tensors_that_updates_and_ends_of_steps_share_stay_where_they_are() -> None:
    """A CUDA graph of an update goes on with the addresses that it was captured with."""
    release, found = updater(max_norm=1.0, fmt=E4M11), []
    core, scales = release.core, release.core.scales
    for t in range(2):
        step(release, gradients(t))
        shared = [release.last_norm, release._square_sum, core.step_count, scales.amax, scales.measured, scales.scale]
        shared += [scales.scale_inv, scales.previous_scale_inv, scales.next_scale_inv]
        found.append([tensor.data_ptr() for tensor in shared])
    assert found[0] == found[1] and float(release._square_sum) == 0 < float(release.last_norm)


def test_what_was_prepared_for_buckets_that_vary_is_forgotten() -> None:
    """As under layer drop: each of twelve steps has a bucket of its own."""
    release = updater(fmt=E4M11)
    for t, bucket in enumerate([*permutations(HELD), *permutations(HELD, 2)]):
        release.update(bucket, gradients(t), GROUPS, 1.0)
        release.finish(None)
    assert max(len(release.core._prepared), len(release._indices)) <= 5


def test_a_second_gradient_before_the_step_ends_is_refused_by_name() -> None:
    release = updater()
    grads = gradients(0)
    release.expect(["wide"])
    release.update(["wide"], {"wide": grads["wide"]}, GROUPS, 1.0)
    with pytest.raises(RuntimeError, match=r"expected one backward per step, got a second gradient of wide\. Call"):
        release.expect(["small", "wide"])
    release.finish(None)
    release.expect(["small", "wide"])


def test_amaxes_of_activations_travel_with_those_of_the_masters() -> None:
    release = updater(fmt=E4M11)
    release.core.scales = scales = PredictedScales(len(HELD), torch.device("cpu"), None, 2)
    scales.set(torch.ones(len(HELD)))
    history = AmaxHistory(2, [448.0, 448.0])
    history.amax_local.copy_(torch.tensor([3.0, 5.0]))
    grads = gradients(0)
    release.update(["wide"], {"wide": grads["wide"]}, GROUPS, 1.0)
    release.finish(history)
    assert scales.extra.tolist() == [3.0, 5.0]
    assert float(scales.measured[0]) > 0 and scales.measured[1:].tolist() == [0.0, 0.0]


def test_the_state_survives_a_round_trip_and_that_of_an_older_version_too() -> None:
    release, other = updater(max_norm=10.0), updater(max_norm=10.0)
    step(release, gradients(0))
    for state in (release.state_dict(), {**release.state_dict(), "num_steps": 1, "tensor_norms": {"wide": 2.0}}):
        other.last_norm.zero_()
        other.load_state_dict(state)
        assert float(other.last_norm) == float(release.last_norm) > 0


@pytest.mark.parametrize(
    ("release_clipping", "gradient_clipping", "releases"),
    [("exact", 0.0, True), ("exact", 1.0, False), ("delayed_norm", 0.0, True), ("delayed_norm", 1.0, True)],
)
def test_exact_clipping_holds_gradients_and_no_clipping_needs_no_mode(
    release_clipping: Any, gradient_clipping: float, releases: bool
) -> None:
    settings = OptimizerConfig(states="fp8", release=True, release_clipping=release_clipping)
    assert settings.releases(gradient_clipping) is releases
    assert not OptimizerConfig(states="fp8", release_clipping=release_clipping).releases(gradient_clipping)


def test_ranks_of_model_parallelism_are_refused_and_one_alone_is_not() -> None:
    refuse_model_parallel(None)
    refuse_model_parallel(dist.group.WORLD)
    dist.destroy_process_group()

    def refused() -> None:
        with pytest.raises(ConfigError, match=r"fp8\.optimizer\.release: expected false"):
            refuse_model_parallel(dist.group.WORLD)

    on_threads(2, refused)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the fixture destroys


@pytest.mark.parametrize(("clipping", "is_made"), [(0.0, True), (1.0, False)])
def test_the_updater_is_there_if_the_configuration_releases_and_states_compare_by_its_check(
    clipping: float, is_made: bool
) -> None:
    settings = OptimizerConfig(states="fp8", release=True)
    host: Any = SimpleNamespace(clip_grad=clipping, model_parallel_group=None, dp_process_group=None)
    context: Any = SimpleNamespace(config=SimpleNamespace(optimizer=settings), release=None)
    core = updater().core
    states: Any = SimpleNamespace(core=core, names=["wide", "late"], alike=None)
    made = make_release(host, context, states, 3)
    assert (made is not None) is is_made and context.release is made
    if made is not None:
        assert states.alike is made.alike is not None and made.max_norm == clipping


def test_buckets_share_the_bytes_that_updates_may_hold() -> None:
    for copies in (2, 3):
        for dtype in (torch.bfloat16, torch.float32):
            size = bucket_size(copies, dtype)
            assert 0 <= OUTSTANDING_UPDATE_BYTES - size * copies * dtype.itemsize < copies * dtype.itemsize
