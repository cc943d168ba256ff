"""DeepSpeed's AutoTP in FP8: its layers by themselves, and Hugging Face's Llama in its engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import training
from deepspeed.module_inject import layers
from support.collectives import count_collectives
from support.inputs import many_scales
from support.ranks import on_ranks
from test_tp_llama import LAYERS
from torch import Tensor, nn

from fp8_ds.config import LinearConfig, TensorParallelConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.payload import TENSOR
from fp8_ds.nn.plan.convert import apply_plan, revert
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise, sqnr_db

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN = 64, 192
"""Of test_tp_llama.py's Llama."""
IN, OUT, TOKENS = 64, 96, (2, 16)


def lacks(name: str) -> bool:
    return not hasattr(layers, name)


def reset() -> None:
    """DeepSpeed keeps its groups and modes for whatever engine comes next in this process."""
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    groups.mpu = None
    init_utils._TP_MODEL_INIT_ARGS = None
    layers.set_autotp_mode(training=False)


# --- layers ---


OPTIONS: dict[str, dict[str, Any]] = {
    "LinearLayer": {},
    "LinearAllreduce": {},
    "LinearAllreduceWithReplicatedInput": {},
    "VocabParallelLinear": {},
    "SubParamLinearLayer": {"shape": ((48, 24, 24), -1), "partition_dim": 0},
    "SubParamLinearAllreduce": {"shape": (-1, (32, 32)), "partition_dim": 1},
    "GateUpPack_LinearLayer": {},
    "fused_LinearLayer": {"fused_module": type("BloomBlock", (nn.Module,), {})()},
}
"""Of DeepSpeed's classes of layers."""


def make_layer(kind: str, out: int = OUT, **options: Any) -> Any:
    """A layer of DeepSpeed's over all ranks, bf16, with a bias."""
    layers.set_autotp_mode(training=True)
    whole = nn.Linear(IN, out)
    with torch.no_grad():
        whole.weight.copy_(many_scales("per_tile", out, IN, 0) * IN**-0.5)
        whole.bias.copy_(many_scales("per_row", 1, out, 1)[0])
    if kind == "fused_LinearLayer" and not lacks("AutoTPMeta"):
        options["tp_meta"] = layers.AutoTPMeta(num_kv_heads=8)
    return getattr(layers, kind)(whole.bfloat16(), dist.group.WORLD, name="x", **OPTIONS[kind], **options)


def in_fp8(model: nn.Module) -> Any:
    """Convert the layers; the plan."""
    from fp8_ds.tp.autotp import autotp_linears, set_gathers

    kinds = autotp_linears(model)
    plan = make_plan(model, LinearConfig(), foreign=kinds)
    apply_plan(model, plan, LinearConfig(), "cpu", kinds)
    set_gathers(model, TensorParallelConfig())
    return plan


@pytest.mark.parametrize(
    ("kind", "gathered"), [*((kind, 0) for kind in OPTIONS), ("LinearLayer", 96), ("LinearLayer", 95)]
)
@on_ranks(2)
def test_a_layer_says_to_the_others_what_stock_says_and_computes_it_in_fp8(kind: str, gathered: int) -> None:
    """But for a gathered output of so many features: one byte an element and a scale a token."""
    if lacks("GatherFromTensorParallelRegion" if gathered else kind):
        pytest.skip("this DeepSpeed has no such layer, or gathers no outputs")
    options = {"gather_output": True, "out": gathered} if gathered else {}
    stock, model = make_layer(kind, **options), nn.Sequential(make_layer(kind, **options))
    (layer,), weight, names = model, model[0].weight, list(model.state_dict())
    plan = in_fp8(model)
    assert layer.weight is weight and list(model.state_dict()) == names
    assert isinstance(layer, Fp8Linear) and type(layer).__name__ == f"Fp8{kind}" and isinstance(layer, type(stock))
    width = stock.weight.shape[1] if "Allreduce" in kind and "Replicated" not in kind else IN
    generator = torch.Generator().manual_seed(5 + (dist.get_rank() if width < IN else 0))
    x = torch.randn(*TOKENS, width, generator=generator).bfloat16()
    results, talk = [], []
    for one in (stock, layer):
        inputs = x.clone().requires_grad_()
        with count_collectives() as forward:
            output = one(inputs)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
        with count_collectives() as backward:
            output.backward(grad)
        results.append([output, inputs.grad, one.weight.grad, one.bias.grad])
        talk.append([(count.calls, count.num_bytes) for count in (forward, backward)])
    output, grad_input, grad_weight, grad_bias = (sqnr_db(one, other) for one, other in zip(*results, strict=True))
    assert output > 24 and grad_input > 20 and grad_weight > 20 and grad_bias > 40
    if gathered:
        tokens, width = TOKENS[0] * TOKENS[1], 48
        assert talk[0] == [({"all_gather": 1}, {"all_gather": 2 * tokens * width * 2}), talk[0][1]]
        assert talk[1] == [({"all_gather": 1}, {"all_gather": 2 * tokens * (width + 4)}), talk[0][1]]
    else:
        assert talk[0] == talk[1] and sum(talk[0][0][0].values()) <= 1
    revert(model, plan, ["0"], "x")
    assert type(layer) is type(stock) and torch.equal(layer(x), stock(x))
    reset()


@on_ranks(2)
def test_a_layer_with_a_forward_of_its_own_stays_bf16_and_one_muted_by_deepcompile_is_refused() -> None:
    head = type("OwnForward", (layers.LinearLayer,), {"forward": lambda self, x: x})
    plain = make_layer("LinearLayer")
    plain.__class__ = head
    model = nn.Sequential(plain, make_layer("LinearAllreduce"))
    plan = in_fp8(model)
    model[1].defer_collectives_to_compiler = True
    with pytest.raises(UnsupportedError, match=r"compile\.passes"):
        model[1](torch.zeros(1, 1, 32))
    reset()
    assert "0 (a OwnForward" in plan.describe() and type(model[0]) is head


# --- in DeepSpeed's engine ---


def autotp_engine(stage: int, fp8: dict[str, Any] | None, tp_size: int = 2, *, seed: int = 0, **options: Any) -> Any:
    """An engine that cuts a model over `tp_size` ranks; 1: does not.

    Args:
        options: `by_call`: by deepspeed.tp_model_init. `load_universal`: is going to. Others: of "tensor_parallel".
    """
    import deepspeed

    net = tpar.llama(seed=seed).model
    config = training.ds_config(
        stage, fp8, gradient_accumulation_steps=tpar.NUM_BATCHES * tp_size // dist.get_world_size()
    )
    if options.pop("load_universal", False):
        config["checkpoint"] = {"load_universal": True}
    if options.pop("by_call", False):
        net = deepspeed.tp_model_init(net, tp_size=tp_size, dtype=torch.bfloat16)
    elif tp_size > 1:
        config["tensor_parallel"] = {"autotp_size": tp_size, **options}
    return training.start(net, config)


def destroy(engine: Any) -> None:
    training.destroy(engine)
    reset()


train = partial(tpar.train, is_huggingface=True)


def trained(stage: int, fp8: dict[str, Any] | None, tp_size: int, num_steps: int, **options: Any) -> dict[str, Any]:
    engine = autotp_engine(stage, fp8, tp_size, **options)
    losses, norms = train(engine, tp_size, num_steps)
    kinds = sorted({type(module).__name__ for module in engine.module.modules() if "Linear" in type(module).__name__})
    report = engine.fp8_report() if fp8 is not None else {}
    if fp8 is not None and engine.fp8.granularity is TENSOR and "optimizer" not in fp8:  # whose scales are predicted
        training.assert_fp8_follows_masters(training.fp8_state(engine), training.full_masters(engine))
    destroy(engine)
    return {"losses": losses, "norms": norms, "kinds": kinds, "report": report}


@pytest.mark.parametrize(
    ("world_size", "stage", "block", "by_call"),
    [
        (4, 1, {}, False),
        pytest.param(2, 2, {}, True, marks=pytest.mark.slow),
        (2, 2, {"preset": "auto"}, True),
        (2, 2, {"linear": {"recipe": "rowwise", "filter_fqns": []}, "activations": {"fused": True}}, False),
        (
            2,
            1,
            {"linear": {"recipe": "delayed", "filter_fqns": ["v_proj"]}, "tensor_parallel": {"gather": "bf16"}},
            False,
        ),
        pytest.param(2, 2, {"linear": {"recipe": "blockwise", "backend": "reference"}}, False, marks=pytest.mark.slow),
        (2, 2, {"optimizer": {"states": "fp8", "master": "e4m11"}}, False),
    ],
    ids=["two by two", "tp_model_init", "preset", "rowwise-fused-head", "delayed", "blockwise", "fp8 states"],
)
def test_ranks_train_with_stocks_gradient_norm_and_gather_bytes_of_their_shards(
    ranks: Any, world_size: int, stage: int, block: dict[str, Any], by_call: bool
) -> None:
    fp8, bf16 = (ranks(world_size).run(trained, stage, one, 2, 4, by_call=by_call)[0] for one in (block, None))
    assert {"Fp8LinearAllreduce", "Fp8LinearLayer"} <= set(fp8["kinds"])
    assert fp8["losses"] == pytest.approx(bf16["losses"], abs=0.02)
    for own, other in zip(fp8["norms"], bf16["norms"], strict=True):
        assert own == pytest.approx(other, rel=0.08 if block else 0.06)
    if world_size == 4:
        weights = LAYERS * (3 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) // 2
        assert weights <= fp8["report"]["gathered_fp8_bytes"] <= 1.01 * weights


# --- checkpoints ---


@pytest.mark.parametrize(("stage", "states"), [pytest.param(1, "fp32", marks=pytest.mark.slow), (2, "fp8")])
@on_ranks(4)
def test_a_checkpoint_resumes_to_the_bit(folder: str, stage: int, states: str) -> None:
    block = {"optimizer": {"states": states}}
    tpar.resume(lambda seed: autotp_engine(stage, block, seed=seed), train, destroy, folder)
    for mp_rank in range(2):
        assert list(Path(folder, "third").glob(f"*zero_pp_rank_1_mp_rank_0{mp_rank}_optim_states.pt"))


def universal(folder: str, loads: bool) -> tuple[dict[str, Tensor], list[float]]:
    """(this rank's masters, losses of two more steps) of an engine that saves, or that loads a universal one."""
    engine = autotp_engine(2, {}, seed=5 if loads else 0, load_universal=loads)
    if loads:
        assert engine.load_checkpoint(folder)[0] is not None
    else:
        train(engine, 2, 2)
        engine.save_checkpoint(folder)
    masters = {name: master.clone() for name, master in training.full_masters(engine).items()}
    training.assert_fp8_follows_masters(training.fp8_state(engine), masters)
    losses, _ = train(engine, 2, 2, first_step=2)
    destroy(engine)
    return masters, losses


def test_a_universal_checkpoint_of_two_by_two_ranks_loads_on_two(ranks: Any, tmp_path: Path) -> None:
    if lacks("collect_autotp_universal_checkpoint_info"):
        pytest.skip("this DeepSpeed converts no checkpoint of AutoTP's")
    from test_checkpoint_universal import convert

    before = ranks(4).run(universal, str(tmp_path), False)
    convert(tmp_path)
    for rank, (masters, losses) in enumerate(ranks(2).run(universal, str(tmp_path), True)):
        for name, master in masters.items():
            assert_bitwise(master, before[rank][0][name])
        assert losses == pytest.approx(before[rank][1], abs=0.01)


def consolidated() -> tuple[dict[str, Tensor] | None, dict[str, Tensor], bool]:
    """(DeepSpeed's whole weights on rank 0, bf16 of this rank's masters, whether training goes on as without)."""
    curves = []
    for exports in (False, True):
        engine = autotp_engine(2, {})
        train(engine, 2, 2)
        if exports:
            with pytest.raises(UnsupportedError, match="autotp_size 2; it would hold one rank's part"):
                engine.save_16bit_model("never written")
            whole = engine._consolidated_16bit_state_dict()
            whole = whole and {name: p.clone() for name, p in whole.items()}  # on CPU, stock's are the Parameters' own
            masters = {name: master.bfloat16() for name, master in training.full_masters(engine).items()}
        curves.append(train(engine, 2, 2, first_step=2))
        destroy(engine)
    return whole, masters, curves[0] == curves[1]


def test_whole_weights_are_bf16_of_the_masters_and_training_goes_on(ranks: Any) -> None:
    (whole, first, same), (nothing, second, _) = ranks(2).run(consolidated)
    assert whole is not None and nothing is None and same
    for name, full in whole.items():
        dims = [dim for dim in range(full.dim()) if full.shape[dim] != first[name].shape[dim]]
        expected = torch.cat([first[name], second[name]], dims[0]) if dims else first[name]
        assert_bitwise(full, expected)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("stage", "block", "by_call", "tp_size", "expected"),
    [
        (3, {}, False, 2, r"tensor_parallel\.autotp_size with zero_optimization\.stage: 3"),
        (3, {}, True, 2, "tp_model_init|Currently, the compatibility"),
        (2, {"linear": {"filter_fqns": ["proj", "lm_head"]}}, False, 2, "at least one linear"),
        # Stock: an IndexError on the ranks that are left over, for which the others wait; here both are in one group.
        (2, {}, False, 3, r"tensor_parallel\.autotp_size: expected a divisor of the number of ranks, 2, got 3"),
        (2, {}, True, 3, r"deepspeed\.tp_model_init: tp_size: expected a divisor of the number of ranks, 2, got 3"),
    ],
    ids=["stage 3", "stage 3 by call", "no linear", "three", "three by call"],
)
@on_ranks(2)
def test_what_cannot_take_effect_is_an_error_on_every_rank(
    stage: int, block: dict[str, Any], by_call: bool, tp_size: int, expected: str
) -> None:
    try:
        with pytest.raises((ValueError, RuntimeError, NotImplementedError, AssertionError), match=expected):
            autotp_engine(stage, block, tp_size, by_call=by_call)
    finally:
        reset()
