"""FP8 weights in Transformer Engine's own Float8Tensor, its Python code over torch, on two ranks.

test_megatron_optimizer.py has a stand-in of that class, in more layouts; here both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron_states as ms
import megatron_training as mt
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
import transformer_engine_python as te

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not te.ROOT.is_dir(),
        reason=f"pip install --no-deps --target {te.ROOT.parent} transformer_engine==2.11.0 is what `make test` does",
    ),
]

NUM_STEPS = 3
WHOLE = ms.bf16(True, config={"hidden_size": 256, "ffn_hidden_size": 512})
"""Each weight lies on one rank."""
SPLIT = ms.bf16(True, config={"hidden_size": 192, "ffn_hidden_size": 320})


@contextmanager
def run(layout: mt.Layout, master: str, **states: Any) -> Iterator[mt.Training]:
    # All that asks for Transformer Engine does so before there is half of one.
    import megatron.core.models.gpt
    import megatron.core.optimizer.clip_grads
    import megatron.core.pipeline_parallel
    import megatron.core.transformer.moe.moe_utils  # noqa: F401

    import megatron_patches.layer_specs
    import megatron_patches.optimizer_sharded  # noqa: F401

    with te.engine() as engine, ms.run(layout, master, engine, states) as training:
        yield training


def train(layout: mt.Layout, master: str, **states: Any) -> dict[str, Any]:
    from fp8_weight_checks import num_checked

    with run(layout, master, **states) as training:
        one, data = training.optimizer.chained_optimizers[0], mt.batches(NUM_STEPS)
        losses, checked = [], []
        for _ in range(NUM_STEPS):
            losses += ms.steps(training, 1, data)
            checked.append(num_checked(one, has_transposes=not states.get("drop_transposes", False)))
        buffers = {buffer.param_data.untyped_storage().data_ptr() for buffer in one.buffers}
        weights = dict(zip(one._fp8_weights.names, one._fp8_weights.weights, strict=True))
        return {
            "losses": losses,
            "checked": checked,
            "bytes": {name.removeprefix("0.module."): p._data.clone() for name, p in weights.items()},
            "in_buffer": all(p._data.untyped_storage().data_ptr() in buffers for p in weights.values()),
        }


def train_stand_in(layout: mt.Layout, master: str) -> dict[str, Any]:
    with ms.run(layout, master) as training:
        losses = ms.steps(training, NUM_STEPS)
        return {
            "losses": losses,
            "bytes": {name: p._data.clone() for name, p in ms.fp8_weights(training).items()},
        }


@pytest.mark.parametrize(
    ("num_ranks", "layout", "master"),
    [(1, WHOLE, "e4m19"), (2, WHOLE, "e4m19"), (2, SPLIT, "e4m11")],
    ids=["one rank", "whole weights", "split weights"],
)
def test_it_is_what_masters_say_and_what_the_stand_in_is(
    ranks: Any, num_ranks: int, layout: mt.Layout, master: str
) -> None:
    ours, others = (ranks(num_ranks).run(function, layout, master) for function in (train, train_stand_in))
    for one, other in zip(ours, others, strict=True):
        assert one["checked"] == [4 * mt.NUM_LAYERS] * NUM_STEPS and one["in_buffer"]
        assert one["losses"] == other["losses"] and one["losses"][-1] < one["losses"][0]
        ms.assert_same(one["bytes"], other["bytes"])


def test_dropped_transposes_stay_dropped(ranks: Any) -> None:
    dropped, kept = (ranks(2).run(train, WHOLE, "e4m19", **words) for words in ({"drop_transposes": True}, {}))
    for one, other in zip(dropped, kept, strict=True):
        assert one["checked"] == other["checked"] and one["losses"] == other["losses"]
        ms.assert_same(one["bytes"], other["bytes"])
