"""Whatever is drawn, over several ranks: linears that are cut are right to the rounding of FP8, and a run that a
configuration starts resumes from its checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tensor_parallel as tpar
import test_checkpoint as base
import torch
import training
from hypothesis import assume
from hypothesis import strategies as st
from support.properties import check
from torch import Tensor

pytestmark = pytest.mark.distributed

# --- linears that are cut over two ranks ---

OPERANDS = ("input", "weight", "gradient")


@st.composite
def parallel_linears(draw: st.DrawFn) -> dict[str, Any]:
    recipe = draw(st.sampled_from(["tensorwise", "rowwise", "blockwise"]))
    sequence_parallel = draw(st.booleans())
    return {
        "kind": draw(st.sampled_from(sorted(tpar.RUN))),
        "recipe": recipe,
        "grad_dtype": draw(st.sampled_from(["e5m2", "e4m3"])),
        "backend": draw(st.sampled_from(["torch", "reference"])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float32])),
        "sequence_parallel": sequence_parallel,
        "sizes": [2 * draw(st.integers(1, most)) for most in (20, 100, 100)],  # tokens, input and output features
        "bias": draw(st.booleans()),
        "exponents": [draw(st.integers(-8, 6)) for _ in OPERANDS],
        "spread": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "zeros": draw(st.sampled_from(["", "", "", *OPERANDS])),
        "broken": draw(st.sampled_from(["", "", "", *OPERANDS])),
        "value": draw(st.sampled_from([float("nan"), float("inf"), -float("inf")])),
        "seed": draw(st.integers(0, 2**20)),
    }


def assert_parallel_linear(case: dict[str, Any]) -> None:
    """Results of all ranks together against the exact products of the whole layer."""
    from support.properties import break_one

    from fp8_ds.numerics.formats import BY_NAME, E4M3

    generator = torch.Generator().manual_seed(case["seed"])
    tokens, features, outputs = case["sizes"]

    def operand(index: int, *shape: int) -> Any:
        values = torch.randn(shape, generator=generator) * 10.0 ** case["exponents"][index]
        values *= torch.exp2(case["spread"] * torch.randn(shape, generator=generator))
        values *= case["zeros"] != OPERANDS[index]
        if case["broken"] == OPERANDS[index]:
            values = break_one(values, case["value"], case["seed"])
        return values.to(case["dtype"])

    x, grad = operand(0, tokens, features), operand(2, tokens, outputs)
    layer = torch.nn.Linear(features, outputs, bias=case["bias"]).to(case["dtype"])
    with torch.no_grad():
        layer.weight.copy_(operand(1, outputs, features))
        if layer.bias is not None:  # the same on all ranks
            layer.bias.copy_(torch.randn(outputs, generator=generator))
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().double() if case["bias"] else 0.0
    tp = tpar.context(case["sequence_parallel"])
    make, run = tpar.RUN[case["kind"]]
    has_no_product = (case["recipe"], case["grad_dtype"]) == ("blockwise", "e5m2")
    options = {"grad_dtype": case["grad_dtype"], "backend": "reference" if has_no_product else case["backend"]}
    found = run(make(layer, tp, case["recipe"], **options), x, grad)
    gradient = BY_NAME[case["grad_dtype"]]
    products = {
        "output": (x, weight, (E4M3, E4M3), bias),
        "grad_input": (grad, weight.T, (gradient, E4M3), 0.0),
        "grad_weight": (grad.T, x.T, (gradient, E4M3), 0.0),
    }
    for name, (a, b, formats, offset) in products.items():
        assert_product((case["kind"], name), found[name], (a, b), formats, offset)


def assert_product(
    what: tuple[str, str], got: torch.Tensor, operands: tuple[Any, Any], formats: tuple[Any, Any], offset: Any
) -> None:
    """`got` is the product of `operands` to what they, their alignment and the sum over ranks may be rounded."""
    from support.properties import UNITS, assert_right_or_seen, finite_part, product_and_bound, rounding_error

    a, b = map(finite_part, operands)
    errors = [rounding_error(one, fmt) for one, fmt in zip((a, b), formats, strict=True)]
    if what == (
        "row",
        "grad_input",
    ):  # rowwise scales of a weight cannot leave a sum over its rows: bf16, and FP8 again
        errors[1] = 2 * errors[1] + (2.0**-8 + UNITS["e4m3"].relative ** 2) * (b.abs() + errors[1])
    exact, bound = product_and_bound(a, b, (errors[0], errors[1]))
    if what[1] == "grad_weight":  # codes of other ranks and tokens are shifted to one scale, and may become subnormal
        floors = sum(UNITS[fmt.name].floor for fmt in formats)
        bound = bound + 2 * floors * a.shape[1] * 2 * a.abs().amax() * 2 * b.abs().amax()
    # Addends of two ranks are rounded before they are added, whatever is left of them then.
    rounding = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}[got.dtype]
    exact = exact + offset
    allowed = bound * 1.001 + 2 * rounding * (a.abs() @ b.abs().T + bound + exact.abs()) + 1e-37
    if all(bool(one.isfinite().all()) for one in operands):
        assert bool(((got.double() - exact).abs() <= allowed).all()), (what, (got.double() - exact).abs().max())
    else:
        assert_right_or_seen(got, operands[0].double() @ operands[1].double().T + offset, allowed, what)


@pytest.mark.parametrize("num", [40, pytest.param(2500, marks=pytest.mark.slow)])
def test_any_linear_cut_over_two_ranks_is_right_to_the_rounding_of_fp8(ranks: Any, num: int) -> None:
    check(num, parallel_linears(), lambda case: ranks(2).run(assert_parallel_linear, case))


# --- runs that are saved and loaded ---

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}}
ADAM = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.01}}
NO_LAYER = ["lm_head", "blocks", "tiny"]


@st.composite
def accepted_runs(draw: st.DrawFn) -> dict[str, Any]:
    """An "fp8" block that is accepted, the rest of the configuration, and a model."""
    from fp8_ds.config import Fp8Config
    from fp8_ds.errors import ConfigError

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def block(**keys: tuple[Any, ...]) -> dict[str, Any]:
        """The first value of a key is its default, which is left out as often as all others are drawn."""
        drawn = {key: one_of(*[values[0]] * max(1, len(values) - 1), *values[1:]) for key, values in keys.items()}
        return {key: value for key, value in drawn.items() if value != keys[key][0]}

    stage, has_fp8_states = one_of(1, 2, 3), one_of(False, True)
    optimizer = block(master=(None, "e4m19", "e4m11"), release=(False, True), seed=(0, 7))
    optimizer |= block(release_clipping=("exact", "delayed_norm"))
    fp8 = {
        "linear": {
            "recipe": one_of("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"),
            **block(
                grad_dtype=("e5m2", "e4m3"),
                fast_accumulation=("output", "none"),
                backend=("torch", "reference"),
                filter_fqns=(
                    ["lm_head"],
                    [],
                    ["lm_head", "up"],
                    ["lm_head", "blocks.0."],
                    *([NO_LAYER] if has_fp8_states else []),
                ),
                frozen=("bf16", "fp8"),
            ),
        },
        "zero": block(reduce_scatter=("bf16", "fp8")),
        "optimizer": {**optimizer, "states": "fp8"} if has_fp8_states else {},
        "schedule": block(bf16_until_step=(0, 1, 3), bf16_last_fraction=(0.0, 0.5), layers=({}, {"blocks.1": "bf16"})),
        "guard": one_of({}, {"action": "report"}, {"action": "bf16"}),
        "monitor": block(every=(0, 1, 2)),
    }
    if "bf16_last_fraction" in fp8["schedule"]:
        fp8["schedule"]["total_steps"] = 4
    try:
        Fp8Config.from_block({"enabled": True, **fp8}).validate_with({"zero_optimization": {"stage": stage}})
    except ConfigError:
        assume(False)
    zero = block(overlap_comm=(False, True), round_robin_gradients=(False, True))
    zero |= block(stage3_param_persistence_threshold=(0, 100, 10**6))
    overrides: dict[str, Any] = {
        "gradient_accumulation_steps": one_of(1, 1, 2),
        "gradient_clipping": one_of(0.0, 1.0, 1.0),
        "optimizer": one_of(ADAMW, ADAMW, ADAM),
        "zero_optimization": zero,
        "bf16": {"enabled": True, "check_grad_overflow": one_of(True, True, False)},
    }
    if one_of(False, True):
        overrides["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}}
    model = block(bias=(True, False), hidden=(72, 80, 33), tiny=(False, True), frozen=("", "embedding", "blocks.0"))
    return {
        "stage": stage,
        "fp8": {key: value for key, value in fp8.items() if value},
        "overrides": overrides,
        "model": {"width": 32, "num_blocks": 2, "hidden": 72, **model, **block(checkpointing=("", "reentrant"))},
        "world_size": one_of(2, 2, 1, 3),
        "num_steps": one_of(2, 2, 2, 1, 3, 0),
    }


@patch.multiple("fp8_ds.monitor.guard", UNDERFLOW=0.001)  # guards act
def resumes(case: dict[str, Any], folder: str) -> str:
    """Why the configuration is refused where it meets the model; empty if it trains. Then a run that is saved and
    loaded into another engine ends as one that goes on: every loss and every bit of its states."""
    from fp8_ds.errors import ConfigError, UnsupportedError

    def build(seed: int) -> Any:
        config = training.ds_config(case["stage"], case["fp8"], **case["overrides"])
        config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": str(seed)}
        return training.build(config, case["model"], seed)

    def end(engine: Any) -> tuple[list[float], dict[str, Tensor]]:
        losses = training.train(engine, 2, first_step=case["num_steps"])
        if engine.fp8 is not None and engine.fp8.precision.in_bf16:
            engine.set_layer_precision("", "fp8")  # FP8 bytes stay old on other ranks while nobody reads them
        found = losses, base.snapshot(engine)
        training.destroy(engine)
        return found

    try:
        first = build(0)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    training.train(first, case["num_steps"])
    first.save_checkpoint(folder)
    losses, states = end(first)
    second = build(1)
    second.load_checkpoint(folder)
    found = end(second)
    assert found[0] == losses
    base.assert_same(found[1], states)
    return ""


@pytest.mark.parametrize(("stage", "master"), [(1, "e4m11"), (2, "e4m19"), (3, "e4m19")])
def test_a_run_without_any_layer_in_fp8_resumes_bit_for_bit(
    ranks: Any, tmp_path: Path, stage: int, master: str
) -> None:
    """With split masters its load crashed in stage 3: a list of no weights became a tensor of floats."""
    fp8 = {"linear": {"filter_fqns": NO_LAYER}, "optimizer": {"states": "fp8", "master": master}}
    model = {"width": 32, "num_blocks": 2, "hidden": 72}
    case = {"stage": stage, "fp8": fp8, "overrides": {}, "model": model, "num_steps": 2}
    assert ranks(2).run(resumes, case, str(tmp_path)) == ["", ""]


@pytest.mark.parametrize("num", [6, pytest.param(250, marks=pytest.mark.slow)])
def test_any_configuration_that_is_accepted_resumes_bit_for_bit(ranks: Any, num: int) -> None:
    num_resumed = 0

    def claim(case: dict[str, Any]) -> None:
        nonlocal num_resumed
        with tempfile.TemporaryDirectory() as folder:
            num_resumed += not any(ranks(case["world_size"]).run(resumes, case, folder))

    check(num, accepted_runs(), claim)
    assert num_resumed > num // 2
