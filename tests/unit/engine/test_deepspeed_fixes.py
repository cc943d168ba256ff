"""Repairs of DeepSpeed: each has a name that leaves it out, and it alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from fp8_ds.config import DEEPSPEED_FIXES, Fp8Config
from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.checkpoints import Fp8Checkpoints
from fp8_ds.errors import ConfigError

CALLED_ONCE = {
    "make_fewer_masks": "attention_masks",
    "detach_logits": "logits_gradient",
    "disable_timer_sync": "timer_sync",
    "use_default_timeout": "group_timeout",
    "leave_out_bucket": "gradient_bucket",
    "raise_max_live_parameters": "max_live_parameters",
    "fetch_further_ahead": "fetches_ahead",
    "store_signatures": "hook_signatures",
    "leave_out_of_graphs": "hook_tracing",
}
MIXED_IN = {
    deepspeed_fixes.OwnUniversalSteps: "universal_step",
    deepspeed_fixes.FewerLaunches: "reduce_scatter",
    deepspeed_fixes.WaitingGradients: "gradient_bucket",
    deepspeed_fixes.FreshGradients: "stale_gradients",
    deepspeed_fixes.EpilogueOnDevice: "epilogue_sync",
    deepspeed_fixes.OverflowFromNorms: "overflow_check",
    deepspeed_fixes.GradientsOutOfGraphs: "graph_gradients",
}


GIVEN: list[tuple[dict[str, Any], bool, bool, bool]] = [
    ({}, False, False, False),
    ({}, True, False, True),
    ({"contiguous_gradients": True}, False, True, True),
    ({"contiguous_gradients": True, "reduce_scatter": False}, False, False, True),
    ({"contiguous_gradients": False}, False, False, False),
    ({"stage": 2}, False, False, True),
]
"""Of "zero_optimization", whether gradients are released, whether there is a hint, and what the key is afterwards."""


class Stage3(DeepSpeedZeroOptimizer_Stage3):
    def __init__(self) -> None:
        self.dp_process_group = self.module = None
        self.parameter_offload: Any = object()


class Saved:
    def _common_checkpoint_state(self) -> dict[str, Any]:
        return {"checkpoint_parallel_dimensions": {"tp_degree": 2}}


class Engine(Fp8Checkpoints, Saved):
    sequence_parallel_size, mp_world_size, _config, optimizer = 2, 1, None, Stage3()


def applied(monkeypatch: pytest.MonkeyPatch, without: list[str]) -> set[str]:
    """Names of the repairs that engines of all stages and states get."""
    found = set()
    for function, name in CALLED_ONCE.items():
        monkeypatch.setattr(deepspeed_fixes, function, lambda _, name=name: found.add(name))
    for states in ("fp32", "fp8"):
        block = {"enabled": True, "optimizer": {"states": states}, "without_deepspeed_fixes": without}
        config = Fp8Config.from_block(block)
        engine: Any = Engine()
        engine.fp8 = SimpleNamespace(config=config)
        deepspeed_fixes.prepare(engine)
        for host in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
            found |= {MIXED_IN[mixin] for mixin in deepspeed_fixes.mixins(host, config, 0.0)}
        deepspeed_fixes.finish(engine, engine.optimizer)
        deepspeed_fixes.before_compiling(engine)
        deepspeed_fixes.after_compiling(engine)
        if engine._common_checkpoint_state()["checkpoint_parallel_dimensions"] == {"tp_degree": 1}:
            found.add("tp_degree")
    return found


@pytest.mark.parametrize("without", [[], *([name] for name in DEEPSPEED_FIXES)], ids=str)
def test_a_name_leaves_out_one_and_no_other(monkeypatch: pytest.MonkeyPatch, without: list[str]) -> None:
    """`adam_step` is no mix-in: Zero12 and Zero3 ask for it (tests/distributed/test_one_pass.py)."""
    assert applied(monkeypatch, without) == set(DEEPSPEED_FIXES) - {"adam_step", *without}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3}, True),
        ({"stage": 3, "contiguous_gradients": "auto"}, True),
        ({"stage": 3, "contiguous_gradients": True}, False),
        ({"stage": 3, "reduce_scatter": False}, False),
        ({"stage": 2}, False),
    ],
)
def test_stage_3_needs_no_bucket_unless_it_was_asked_for(zero: dict[str, Any], expected: bool) -> None:
    assert deepspeed_fixes.needs_no_bucket({"zero_optimization": zero}, DeepSpeedZeroConfig(**zero)) is expected


def test_the_stream_of_the_reduction_keeps_gradients_that_deepspeed_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: a CPU has no streams."""

    class Host:
        def partition_grads(self, params: list[Any], partitions: list[Any]) -> list[Any]:
            for p in params:
                p.grad = None
            return partitions

    zero = type("Zero", (deepspeed_fixes.WaitingGradients, Host), {})()
    device = SimpleNamespace(is_synchronized_device=lambda: False, current_stream=lambda: "reduction")
    monkeypatch.setattr(deepspeed_fixes, "get_accelerator", lambda: device)
    streams: list[str] = []
    p = SimpleNamespace(grad=SimpleNamespace(record_stream=streams.append))
    zero.partition_grads([p], [])
    assert streams == ["reduction"] and p.grad is None


@pytest.mark.parametrize(("given", "releases", "is_hint", "after"), GIVEN)
def test_a_bucket_that_was_asked_for_stays_with_a_hint(
    given: dict[str, Any], releases: bool, is_hint: bool, after: bool
) -> None:
    states = {"states": "fp8", "master": "e4m11", "release": True} if releases else {}
    zero = {"stage": 3, **given}
    engine: Any = SimpleNamespace(
        fp8=SimpleNamespace(config=Fp8Config.from_block({"enabled": True, "optimizer": states})),
        _config=SimpleNamespace(_param_dict={"zero_optimization": zero}, zero_config=DeepSpeedZeroConfig(**zero)),
        gradient_clipping=lambda: 0.0,
    )
    line = deepspeed_fixes.leave_out_bucket(engine)
    assert (line is not None) == is_hint and engine._config.zero_config.contiguous_gradients is after


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'fp8\.without_deepspeed_fixes: .*"timer"'):
        Fp8Config.from_block({"enabled": True, "without_deepspeed_fixes": ["timer_sync", "timer"]})
