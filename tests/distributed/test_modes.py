"""Ways of running a model that change how its weights are made, fetched or kept, and no bit of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from support.ranks import on_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.distributed


def with_zero_init(how: str, fp8: dict[str, Any] | None) -> dict[str, Any]:
    """A ZeRO-3 engine over the seeded TinyLM: made whole, converted by zero.Init, or made under it and then filled."""
    import deepspeed

    config = training.ds_config(3, fp8)
    torch.manual_seed(0)
    net = training.TinyLM()
    if how.startswith("converted"):
        net = net.bfloat16() if how == "converted" else net
        deepspeed.zero.Init(module=net, config_dict_or_path=config, dtype=torch.bfloat16)
    elif how == "filled":
        whole = {name: p.detach() for name, p in net.named_parameters()}
        with deepspeed.zero.Init(config_dict_or_path=config):
            net = training.TinyLM()
        for name, p in net.named_parameters():
            assert p.ds_numel == whole[name].numel() and p.numel() == 0
            with deepspeed.zero.GatheredParameters(p, modifier_rank=0), torch.no_grad():
                p.copy_(whole[name] if torch.distributed.get_rank() == 0 else torch.zeros(()))
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    start, first = training.full_masters(engine), training.fp8_state(engine) if fp8 is not None else {}
    losses = training.train(engine, 4)
    training.destroy(engine)
    return {"losses": losses, "start": start, "first": first}


@on_ranks(2)
def test_zero_init_gives_the_weights_of_a_whole_model() -> None:
    whole, *others = (with_zero_init(how, {}) for how in ("whole", "converted", "filled"))
    for other in others:
        training.assert_fp8_equals(other["first"], whole["first"])
        assert other["losses"] == whole["losses"]


@on_ranks(2)
def test_zero_init_of_an_fp32_model_keeps_the_masters_of_stock() -> None:
    stock, ours = (with_zero_init("converted in fp32", fp8) for fp8 in (None, {}))
    assert all(torch.equal(ours["start"][name], master) for name, master in stock["start"].items())
    training.assert_fp8_follows_masters(ours["first"], ours["start"])
    assert max(abs(a - b) for a, b in zip(ours["losses"], stock["losses"], strict=True)) < 0.02


class Adapter(nn.Module):
    """Of two weights in float32 on a base in bf16, as PEFT makes one; it computes in its weights' dtype."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype))).to(x.dtype)


def with_adapters(fp8: dict[str, Any] | None) -> dict[str, Any]:
    """A frozen base that zero.Init has cut, and adapters that it has not: trained, and read as an export reads them."""
    import deepspeed

    config = training.ds_config(3, fp8)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = training.TinyLM().requires_grad_(False)
    for block in net.blocks:
        block.norm = Adapter(block.norm, 64)
    trained = [p for p in net.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=net, model_parameters=trained, config=config)[0]
    losses = training.train(engine, 4)
    state, masters = training.fp8_state(engine) if fp8 is not None else {}, training.full_masters(engine)
    read = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
            read[name] = p.detach().clone()
    after = training.fp8_state(engine) if fp8 is not None else {}
    losses += training.train(engine, 2, first_step=4)
    training.destroy(engine)
    return {"losses": losses, "state": state, "after": after, "masters": masters, "read": read}


@pytest.mark.parametrize(
    ("fp8", "dtype"),
    [
        pytest.param({}, torch.float32, marks=pytest.mark.slow),
        ({"linear": {"frozen": "fp8", "filter_fqns": ["lora_"]}, "optimizer": {"states": "fp8"}}, torch.bfloat16),
    ],
)
def test_adapters_in_float32_on_a_base_that_zero_init_has_cut(
    ranks: Any, fp8: dict[str, Any], dtype: torch.dtype
) -> None:
    """In stage 3 stock leaves them in float32. With split masters they are bf16, as in stages 1 and 2."""
    stock = ranks(2).run(with_adapters, None)
    for ours, theirs in zip(ranks(2).run(with_adapters, fp8), stock, strict=True):
        assert max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) < 0.02
        assert ours["losses"][-1] < ours["losses"][0] - 0.1
        training.assert_fp8_equals(ours["after"], ours["state"])
        for name, master in ours["masters"].items():
            assert ours["read"][name].dtype == dtype
            rtol = 0 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(ours["read"][name].float(), master, rtol=rtol, atol=0)


def with_default_dtype(stage: int, fp8: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], Any, Any]:
    """Losses, bytes and masters of a model whose engine is built and trained with torch's default dtype changed."""
    import deepspeed

    torch.manual_seed(0)
    net = training.TinyLM(width=32, hidden=64, num_blocks=1)
    config = training.ds_config(stage, {"monitor": {"every": 1, "sink": "/dev/null"}, **fp8})
    batches, losses = training.micro_batches(0, 3), []  # their noise is drawn in the default dtype
    torch.set_default_dtype(dtype)
    try:
        engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
        for batch in batches:
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        found = losses, training.fp8_state(engine), training.full_masters(engine)
    finally:
        torch.set_default_dtype(torch.float32)
    training.destroy(engine)
    return found


STATES = {"optimizer": {"states": "fp8", "release": True, "release_clipping": "delayed_norm"}}


@pytest.mark.parametrize(
    ("stage", "fp8"),
    [
        pytest.param(2, {"linear": {"recipe": "delayed"}}, marks=pytest.mark.slow),
        (2, STATES),
        (3, {"optimizer": {"states": "fp8"}}),
    ],
)
@on_ranks(1)
def test_torchs_default_dtype_changes_no_bit(stage: int, fp8: dict[str, Any]) -> None:
    """As in a script that has made its model under `torch.set_default_dtype(torch.bfloat16)`, and left it at that."""
    left, right = (with_default_dtype(stage, fp8, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert left[0] == right[0]
    training.assert_fp8_equals(left[1], right[1])
    assert all(torch.equal(master, right[2][name]) for name, master in left[2].items())


E4M11 = {"optimizer": {"states": "fp8", "master": "e4m11"}}
PERSISTENT = {"stage3_param_persistence_threshold": 100_000}


def changed(
    stage: int, fp8: dict[str, Any] | None, zero: dict[str, Any], checkpointing: str, offloads: bool
) -> dict[str, Any]:
    """Four steps of two micro-batches, with an offload and reload of all states between them."""
    config = training.ds_config(stage, fp8, zero_optimization=zero, gradient_accumulation_steps=2)
    engine = training.build(config, {"checkpointing": checkpointing})
    first, losses = training.fp8_state(engine), training.train(engine, 2)
    if offloads:  # stock ZeRO-3 offloads masters and states of FusedAdam only
        of_stock = {OffloadStateTypeEnum.lp_params} if stage == 3 and not fp8 else set(OffloadStateTypeEnum)
        engine.offload_states(
            include=of_stock - {OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer}
        )
        assert OffloadStateTypeEnum.lp_params in engine.optimizer.offloaded_states
        engine.reload_states()
        assert not engine.optimizer.offloaded_states
    losses += training.train(engine, 2, first_step=2)
    result = {"losses": losses, "first": first, "last": training.fp8_state(engine)}
    training.destroy(engine)
    return result


CHANGES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "reentrant": ({}, "reentrant", False),
    "non-reentrant": ({}, "non-reentrant", False),
    "overlap": ({"overlap_comm": True}, "", False),
    "round robin": ({"round_robin_gradients": True}, "", False),
    "persistent": (PERSISTENT, "", False),
    "offload": ({}, "", True),
}


@pytest.mark.parametrize(
    ("stage", "fp8", "changes"),
    [
        (2, {}, ("reentrant", "overlap", "round robin", "offload")),
        (3, {}, ("reentrant", "non-reentrant", "overlap", "persistent", "offload")),
        (2, E4M11, ("offload",)),
        pytest.param(3, E4M11, ("offload", "persistent"), marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_how_a_step_is_made_changes_no_bit(stage: int, fp8: dict[str, Any], changes: tuple[str, ...]) -> None:
    plain = changed(stage, fp8, {"overlap_comm": False}, "", False)
    for change in changes:
        ours = changed(stage, fp8, *CHANGES[change])
        assert ours["losses"] == plain["losses"], change
        training.assert_fp8_equals(ours["first"], plain["first"])
        training.assert_fp8_equals(ours["last"], plain["last"])


def with_flops_profiler(stage: int, fp8: dict[str, Any] | None) -> dict[str, int]:
    profiler = {"enabled": True, "profile_step": 1}
    return training.macs_of_second_step(training.build(training.ds_config(stage, fp8, flops_profiler=profiler)))


def test_the_flops_profiler_counts_fp8_layers_as_it_counts_linears(ranks: Any) -> None:
    stock, in_fp8 = (ranks(2).run(with_flops_profiler, 2, fp8)[0] for fp8 in (None, {}))
    assert in_fp8 == stock and stock["blocks.0.up"] > 0
    in_bf16 = {"schedule": {"bf16_until_step": 3}}  # by F.linear, which is not counted again
    assert ranks(2).run(with_flops_profiler, 2, in_bf16)[0] == stock
    sharded = ranks(2).run(with_flops_profiler, 3, {})[0]  # where stock counts a linear twice
    assert all(sharded[name] == stock[name] for name in ("blocks.0.up", "blocks.2.down"))
