"""What users and libraries do to linears around deepspeed.initialize is called, and trains, as in stock.

Which linears stay bf16 for it, and what the plan says: tests/unit/nn/plan/test_plan.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize, prune

pytestmark = pytest.mark.distributed

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
Calls = list[str]
UP = "blocks.0.up"


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def counting(calls: Calls, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # it shows the name and the module of what it stands for
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("patch")
        return function(*args, **kwargs) + 0.1

    return counted


def count(calls: Calls, kind: str) -> Callable[..., None]:
    """A hook of any kind that counts linears."""

    def hook(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.Linear):
            calls.append(kind)

    return hook


def change(what: str, calls: Calls, net: Any, stack: ExitStack) -> None:
    up = net.blocks[0].up
    if what == "a patch of nn.Linear.forward":
        stack.enter_context(patch.object(nn.Linear, "forward", counting(calls, nn.Linear.forward)))
    elif what == "a patch of F.linear":
        stack.enter_context(patch.object(F, "linear", counting(calls, F.linear)))
    elif what == "a patch of one forward":
        up.forward = counting(calls, up.forward)
    elif what == "hooks of all modules":
        for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
            register = getattr(hooks, f"register_module_{kind}")
            stack.callback(register(count(calls, kind)).remove)
    elif what == "hooks of one":
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            getattr(up, f"register_{kind}_hook")(count(calls, kind))
    elif what == "a parametrization":
        parametrize.register_parametrization(up, "weight", Twice())
    elif what.startswith("a pruned "):
        prune.l1_unstructured(up, what.removeprefix("a pruned "), 0.5)
    elif what == "float32 inputs":
        up.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    elif what == "compiled in place":
        up.compile(backend="eager")
    elif what == "compiled":
        net.blocks[0].up = torch.compile(up, backend="eager")
    else:
        assert what == "nothing"


@contextmanager
def engine_of(stage: int, fp8: dict[str, Any] | None, what: str) -> Iterator[tuple[Any, Calls]]:
    calls: Calls = []
    torch._dynamo.reset()
    with ExitStack() as stack:
        torch.manual_seed(0)
        net = training.TinyLM()
        change(what, calls, net, stack)
        engine = training.start(net, training.ds_config(stage, fp8))
        yield engine, calls
        training.destroy(engine)


def trained(stage: int, fp8: dict[str, Any] | None, what: str, autocast: bool = False) -> dict[str, Any]:
    try:
        with engine_of(stage, fp8, what) as (engine, calls), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = training.train(engine, 2)
            num_fp8 = 0 if fp8 is None else len(engine.fp8.weights)
            return {"calls": sorted(calls), "losses": losses, "num_fp8": num_fp8}
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize(
    ("stage", "fp8", "what", "num_fp8"),
    [
        (3, {}, "a patch of one forward", 5),
        pytest.param(3, {}, "hooks of all modules", 6, marks=pytest.mark.slow),
        (2, {}, "hooks of one", 6),
        (2, {}, "a parametrization", 5),
        (2, {}, "a pruned weight", 5),
        (2, {}, "a pruned bias", 6),
        (3, STATES, "a patch of nn.Linear.forward", 0),
        (2, STATES, "a patch of F.linear", 0),
    ],
)
def test_what_is_done_to_a_linear_is_called_as_in_stock(
    ranks: Any, stage: int, fp8: dict[str, Any], what: str, num_fp8: int
) -> None:
    stock, found = (ranks(2).run(trained, stage, block, what)[0] for block in (None, fp8))
    assert found["calls"] == stock["calls"]
    assert found["losses"] == pytest.approx(stock["losses"], abs=2e-2)
    assert found["num_fp8"] == num_fp8


def patched_after_an_engine() -> tuple[list[int], Calls]:
    """FP8 weights of three engines of stage 3, before the last of which F.linear is patched, and what the patch saw."""
    found = [trained(3, STATES, what) for what in ("nothing", "nothing", "a patch of F.linear")]
    return [one["num_fp8"] for one in found], found[-1]["calls"]


def test_of_functions_in_place_of_torchs_zero_3s_own_is_none_and_a_later_patch_is_one(ranks: Any) -> None:
    """From the second engine on F.linear is ZeRO-3's, which leaves a later patch where it is."""
    num_fp8, calls = ranks(2).run(patched_after_an_engine)[0]
    assert num_fp8 == [6, 6, 0] and len(calls) > 0


def test_a_float32_input_is_refused_as_in_stock_and_cast_by_autocast(ranks: Any) -> None:
    stock, found = (ranks(2).run(trained, 3, fp8, "float32 inputs")[0]["error"] for fp8 in (None, {}))
    assert stock.startswith("RuntimeError") and found.startswith(f"RuntimeError: input of {UP}.weight: ")
    stock, found = (ranks(2).run(trained, 3, fp8, "float32 inputs", True)[0]["losses"] for fp8 in (None, {}))
    assert found == pytest.approx(stock, abs=2e-2)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_modules_compiled_before_train_as_eager_ones(ranks: Any, stage: int) -> None:
    eager, in_place, compiled = (
        ranks(2).run(trained, stage, {}, what) for what in ("nothing", "compiled in place", "compiled")
    )
    assert in_place[0]["losses"] == pytest.approx(eager[0]["losses"], abs=5e-3)
    if stage < 3:
        assert compiled[0]["losses"] == pytest.approx(eager[0]["losses"], abs=5e-3) and compiled[0]["num_fp8"] == 6
    else:  # in stock the first forward fails: the wrapper sets its own, empty parameters inside
        assert all(one["error"].startswith("UnsupportedError") and f"got {UP}:" in one["error"] for one in compiled)
