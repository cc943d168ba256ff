"""FP8 of a ZeRO-1/2 optimizer as a whole, on stub hosts whose ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from support.threads import on_threads
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from support.zero_training import (
    assert_follow,
    assert_same,
    different,
    fp8_states,
    other_values,
    refresh,
    trained,
)

from fp8_ds.errors import UnsupportedError
from fp8_ds.zero.zero12 import patched_all_gather


def exported_and_loaded() -> None:
    zero, values = zero_optimizer(2, RAGGED), values_of(RAGGED)
    with zero.fp8.export(wanted=True):
        assert_same({n: zero.read(n).cpu() for n in RAGGED}, {n: v.bfloat16() for n, v in values.items()})
    with zero.fp8.export(wanted=False):
        assert zero.params["up"].detach().is_meta
    zero.params["gain"].data = torch.zeros(RAGGED["gain"], dtype=torch.bfloat16)  # as user code may
    with zero.fp8.load():
        for name in RAGGED:
            zero.write(name, lambda _, name=name: other_values(name))
    loaded = {name: other_values(name).float() for name in RAGGED}
    assert_same(zero.masters(), loaded)
    refresh(zero, 2)
    assert_follow(zero, "tensorwise", loaded)


def test_exports_give_bf16_of_the_masters_and_a_load_sets_them_bit_for_bit() -> None:
    on_threads(2, exported_and_loaded)


def test_a_gather_of_other_groups_is_deepspeeds_own() -> None:
    """As of an engine without FP8 in the same process."""
    seen: list[Any] = []
    patched = patched_all_gather(lambda groups, *args, **keys: seen.append((groups, args, keys)))
    groups = [torch.zeros(3)]
    patched(groups, 1, start_alignment_factor=2)
    assert seen == [(groups, (1,), {"start_alignment_factor": 2})]

    def own() -> None:
        zero = zero_optimizer(2, RAGGED)
        zero.single_partition_of_fp32_groups[0].data.mul_(2)
        patched(zero.bit16_groups_flat)
        assert_follow(zero, "tensorwise", {name: 2 * value for name, value in values_of(RAGGED).items()})

    on_threads(2, own)
    assert len(seen) == 1


def flat_groups() -> None:
    zero = zero_optimizer(2, RAGGED)
    total = sum(p.numel() for p in zero.params.values())
    [flat] = zero.bit16_groups_flat
    assert flat.is_meta and flat.numel() >= total and flat.dtype == torch.bfloat16
    assert [part.numel() for part in zero.parallel_partitioned_bit16_groups[0]] == [zero.size] * 2
    in_fp8 = sum(zero.params[name].numel() for name in WEIGHTS)
    found = zero.fp8.resident_bytes()
    assert found["num_fp8_weights"] == in_fp8 <= found["fp8"] < in_fp8 + 64
    assert 2 * (total - in_fp8) <= found["hp"] < 2 * (total - in_fp8) + 128


def test_weights_take_a_byte_each_and_deepspeeds_flat_group_no_memory() -> None:
    on_threads(2, flat_groups)


def loaded(states: bool, universal: bool) -> None:
    """DeepSpeed's load writes masters (a universal one then gathers); what follows is quantised from these."""
    zero = trained(2, RAGGED, fp8_states("e4m11") if states else {}, 1 if states else 0)
    values = {name: other_values(name).float() for name in RAGGED}

    def load(*args: Any, **keys: Any) -> None:
        whole = torch.cat([*(value.flatten() for value in values.values()), zero.padding])
        own = zero.single_partition_of_fp32_groups[0]
        assert own.untyped_storage().nbytes() == 4 * zero.size  # dense
        own.data.copy_(whole.split(zero.size)[torch.distributed.get_rank()])

    keys = {"checkpoint_folder": "somewhere"} if universal else {}
    zero.fp8.load_state_dict(load, [], **keys)
    masters = zero.masters()
    if states:
        assert zero.single_partition_of_fp32_groups[0].untyped_storage().nbytes() == 4
        for name in RAGGED:
            torch.testing.assert_close(masters[name], values[name], rtol=2.0**-11, atol=1e-5)
    else:
        assert_same(masters, values)
        assert_follow(zero, "tensorwise", values)
    assert torch.equal(zero.read("gain"), masters["gain"].bfloat16())


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_weights_follow_the_masters_that_a_load_has_set(
    monkeypatch: pytest.MonkeyPatch, states: bool, universal: bool
) -> None:
    if universal:
        patched = patched_all_gather(stage_1_and_2.all_gather_dp_groups)
        monkeypatch.setattr(stage_1_and_2, "all_gather_dp_groups", patched)
    on_threads(2, loaded, states, universal)


def test_a_universal_load_after_the_patch_is_undone_is_refused_before_anything_changes() -> None:
    def refused() -> None:
        zero = zero_optimizer(2, RAGGED)
        with pytest.raises(UnsupportedError, match=r"engine\.destroy\(\)"):
            zero.fp8.load_state_dict(zero.single_partition_of_fp32_groups[0].data.zero_, checkpoint_folder="somewhere")
        assert_same(zero.masters(), values_of(RAGGED))

    on_threads(2, refused)


def linked() -> None:
    """A load has DeepSpeed link fragments anew, which would keep bf16 of every weight."""
    zero, seen = zero_optimizer(2, RAGGED), {}

    def link() -> None:
        for name, p in zero.params.items():
            seen[name] = p.data.view(-1) if name not in WEIGHTS else p._fp8.export
            p._hp_mapping = SimpleNamespace(lp_fragment=seen[name])

    zero.fp8.link(link)
    for name, p in zero.params.items():
        assert p._hp_mapping.lp_fragment is None and seen[name].numel() == p.numel()
        if name in WEIGHTS:
            assert seen[name].untyped_storage().nbytes() == 2 and p._fp8.export is None


def test_fragments_keep_no_bf16_copy_of_a_weight() -> None:
    on_threads(2, linked)


def exported_frozen() -> None:
    """Rank 0 alone reads; what others get takes no memory."""
    fixed: Any = torch.nn.Parameter(values_of(RAGGED)["up"].bfloat16(), requires_grad=False)
    zero = zero_optimizer(2, RAGGED, {"fixed": fixed}, linear={"frozen": "fp8"})
    found, in_fp8 = zero.fp8.resident_bytes(), sum(zero.params[name].numel() for name in WEIGHTS) + fixed.numel()
    assert found["num_fp8_weights"] == in_fp8 <= found["fp8"] < in_fp8 + 64
    reads, whole = torch.distributed.get_rank() == 0, fixed.detach().clone()
    zero.params["down"].requires_grad = False  # a user has frozen it since
    with zero.fp8.export(wanted=reads, with_frozen=True):
        assert zero.fp8.is_exporting
        down = zero.params["down"].detach()
        assert down.device.type == "cpu"  # DeepSpeed copies it there on every rank
        if reads:
            assert torch.equal(down, values_of(RAGGED)["down"].bfloat16()) and torch.equal(fixed.detach(), whole)
        else:
            assert down.untyped_storage().nbytes() == fixed.detach().untyped_storage().nbytes() == 2
    assert not zero.fp8.is_exporting and torch.equal(fixed.detach(), whole)


def test_frozen_weights_are_exported_where_they_are_wanted_and_take_no_memory_elsewhere() -> None:
    on_threads(2, exported_frozen)


def switched_inside() -> None:
    zero = trained(2, RAGGED, fp8_states("e4m11"), 1)
    before = zero.masters()
    with zero.fp8.dense() as scales:
        assert scales == {}
        for name, (_, scale_inv) in zero.weights().items():
            scales[name] = scale_inv
        with zero.fp8.dense() as inner:
            assert inner == {}
        assert zero.single_partition_of_fp32_groups[0].untyped_storage().nbytes() == 4 * zero.size
    assert different(zero.masters(), before) == []


def test_masters_that_are_made_dense_and_stored_by_the_same_scales_are_as_before() -> None:
    on_threads(2, switched_inside)


def written_while_dense() -> None:
    zero = zero_optimizer(2, RAGGED, **fp8_states("e4m11"))
    value = (4 * values_of(RAGGED)["up"]).bfloat16()
    counter = zero.context.counter
    with zero.fp8.dense():
        zero.write("up", lambda _: value)
        sent = counter.total
        zero.fp8.refresh(is_step=False)
        assert counter.total == sent
        zero.fp8.restore_masters()
    torch.testing.assert_close(zero.masters()["up"], value.float(), rtol=2.0**-8, atol=2.0**-12)


def test_a_refresh_waits_for_dense_masters_and_what_was_written_meanwhile_becomes_one() -> None:
    on_threads(2, written_while_dense)
