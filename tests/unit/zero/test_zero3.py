"""FP8 of a ZeRO-3 optimizer as a whole, on stub hosts whose ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from support.threads import on_threads
from support.zero3_host import sharded_parameter
from support.zero_hosts import RAGGED, WEIGHTS, values_of, zero_optimizer
from support.zero_training import assert_follow, assert_same, different, fp8_states, gradients, other_values, trained

from fp8_ds.errors import UnsupportedError


def with_other_masters() -> None:
    zero = zero_optimizer(3, RAGGED)
    zero.fp32_partitioned_groups_flat = list(zero.fp32_partitioned_groups_flat)
    with pytest.raises(UnsupportedError, match="AdamW"):
        zero._post_step(None)


def test_masters_of_other_weights_in_the_middle_of_training_are_refused() -> None:
    """As BAdam makes them, which trains blocks in turns."""
    on_threads(1, with_other_masters)


def loaded(states: bool) -> None:
    zero = trained(3, RAGGED, fp8_states("e4m11") if states else {}, 1 if states else 0)
    zero.persistent_parameters.append(zero.params["gain"])
    zero.params["gain"].all_gather(zero.persistent_parameters)
    values = {name: other_values(name).float() for name in RAGGED}

    def load(*args: Any, **keys: Any) -> None:
        """DeepSpeed reads masters, and writes them to its flat bf16 buffer."""
        zero.give({name: value.bfloat16() for name, value in values.items()})
        whole = torch.cat(zero.averaged_gradients[0]).float()
        zero.fp32_partitioned_groups_flat[0].data.copy_(whole)
        assert zero.lp_param_buffer.numel() == zero.fp16_partitioned_groups_flat[0].numel() == len(whole)
        zero.fp16_partitioned_groups_flat[0].copy_(whole)

    zero.fp8.load_state_dict(load, [])
    assert zero.lp_param_buffer.numel() == 0 and zero.fp16_partitioned_groups_flat[0].is_meta
    masters = zero.masters()
    if states:
        for name in RAGGED:
            torch.testing.assert_close(masters[name], values[name], rtol=2.0**-11, atol=1e-5)
        with torch._C.DisableTorchFunctionSubclass():  # gathered anew
            assert torch.equal(zero.params["gain"].data, masters["gain"].bfloat16())
    else:
        assert_same(masters, values)
        assert_follow(zero, "tensorwise", values)
    assert torch.equal(zero.read("embedding"), masters["embedding"].bfloat16())


@pytest.mark.parametrize("states", [False, True])
def test_weights_follow_the_masters_that_a_load_has_set_and_the_flat_buffer_goes(states: bool) -> None:
    on_threads(2, loaded, states)


def switched() -> None:
    zero = zero_optimizer(3, RAGGED)
    p = zero.params["up"]
    p.all_gather_coalesced([p]).wait()
    zero.fp8.set_bf16({"up"})
    assert p.ds_status == ZeroParamStatus.NOT_AVAILABLE  # what is gathered in FP8 is of no use any more
    assert type(p) is torch.nn.Parameter  # DeepSpeed's own, and no look at it goes through our class
    counter = zero.context.counter
    fp8, hp = counter.fp8, counter.hp
    p.all_gather_coalesced([p]).wait()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(p.data, values_of(RAGGED)["up"].bfloat16())
    assert counter.fp8 == fp8 and counter.hp == hp + 2 * p.ds_numel_aligned
    zero.fp8.set_bf16(())
    assert p.ds_status == ZeroParamStatus.NOT_AVAILABLE
    p.all_gather_coalesced([p]).wait()
    assert counter.fp8 == fp8 + p.ds_numel_aligned


def test_a_weight_is_gathered_in_the_precision_of_its_layer_from_the_next_fetch_on() -> None:
    on_threads(2, switched)


def resident(persists: bool) -> Any:
    zero = zero_optimizer(3, RAGGED)
    if persists:
        for name in ("up", "gain"):
            zero.params[name].ds_persist = True
            zero.persistent_parameters.append(zero.params[name])
        zero.params["up"].all_gather(zero.persistent_parameters)
    shares = {name: p.ds_tensor.ds_numel for name, p in zero.params.items()}
    found, in_fp8 = zero.fp8.resident_bytes(), sum(shares[name] for name in WEIGHTS)
    assert in_fp8 <= found["fp8"] < in_fp8 + 64
    placeholders = {zero.params[name].ds_tensor.untyped_storage().data_ptr() for name in WEIGHTS}
    assert found["hp"] == 2 * (shares["embedding"] + shares["gain"]) + 2 * len(placeholders)
    assert found["num_fp8_weights"] == 7000
    return found["persistent"]


def test_shards_take_a_byte_each_and_persistent_weights_theirs() -> None:
    assert on_threads(2, resident, False) == [0, 0]
    assert on_threads(2, resident, True) == [3500 + 2 * 51] * 2


def frozen_later(states: bool) -> None:
    """What a user has frozen is in DeepSpeed's checkpoints as a bf16 shard, and not as a master."""
    zero = trained(3, RAGGED, fp8_states("e4m11") if states else {}, 0)
    p, masters = zero.params["up"], zero.masters()
    p.requires_grad = False
    own = p.ds_tensor.ds_numel * dist.get_rank()
    with zero.fp8.export(wanted=True):
        saved = p.ds_tensor.data.clone()
        size = min(p.ds_numel - own, len(saved))
        assert torch.equal(saved[:size], masters["up"].flatten()[own : own + size].bfloat16())
    assert bool(p.ds_tensor.isnan().all())
    with zero.fp8.export(wanted=True, with_frozen=False):
        assert bool(p.ds_tensor.isnan().all())
    changed = other_values("up").flatten()
    with zero.fp8.load():
        p.ds_tensor.data[:size] = changed[own : own + size]
    p.requires_grad = True
    assert torch.equal(zero.read("up").flatten(), changed) or states


@pytest.mark.parametrize("states", [False, True])
def test_a_weight_that_a_user_has_frozen_is_saved_and_loaded_in_bf16(states: bool) -> None:
    on_threads(2, frozen_later, states)


def dense_again() -> None:
    zero = trained(3, RAGGED, fp8_states("e4m11"), 1)
    before = zero.masters()
    with zero.fp8.dense() as scales:
        for name, p in zero.params.items():
            if name in WEIGHTS:
                scales[name] = p._fp8.scale_inv.clone()
        with zero.fp8.dense() as inner:
            assert inner == {}
    assert different(zero.masters(), before) == []


def test_masters_that_are_made_dense_and_stored_by_the_same_scales_are_as_before() -> None:
    on_threads(2, dense_again)


def frozen_from_the_start(states: bool) -> None:
    """It has no master, and its bytes hold through a step and through dense masters."""
    value = 3 * values_of(RAGGED)["up"]
    fixed = sharded_parameter(9, value)
    fixed.requires_grad = False
    zero = zero_optimizer(3, RAGGED, {"fixed": fixed}, **(fp8_states("e4m11") if states else {}))
    shards = zero.fp8.shards

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        shards.gather(shards.of([fixed])).wait()
        found = fixed._fp8.data.view(torch.uint8).clone(), fixed._fp8.scale_inv.clone()
        for weight in shards.of([fixed]):
            weight.leave()
        return found

    codes, scale_inv = read()
    decoded = codes.view(torch.float8_e4m3fn).float() * scale_inv
    torch.testing.assert_close(decoded, value, rtol=2.0**-4 + 2.0**-8, atol=float(scale_inv) * 2.0**-9)
    zero.give(gradients(RAGGED, 0))
    zero.step()
    with zero.fp8.dense():
        pass
    assert all(torch.equal(x, y) for x, y in zip(read(), (codes, scale_inv), strict=True))


@pytest.mark.parametrize("states", [False, True])
def test_a_weight_that_never_trains_is_quantised_once_and_stays(states: bool) -> None:
    on_threads(2, frozen_from_the_start, states)
