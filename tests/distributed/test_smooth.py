"""Smooth-SwiGLU in an engine: a channel pair scaled by 30 costs other channels nothing, on ranks with other data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn

from fp8_ds.testing.metrics import sqnr_db

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, OUTLIER = 128, 256, 7


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyLlama(nn.Module):
    """Embedding, norm and one MLP with a residual, head; the loss of the next token.

    Args:
        outlier: factor of one channel of gate and up, whose column of down is 0: outputs show the other channels.
    """

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(training.VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.mlp = Mlp()
        self.lm_head = nn.Linear(WIDTH, training.VOCABULARY, bias=False)
        with torch.no_grad():
            for linear in (self.mlp.gate_proj, self.mlp.up_proj):
                linear.weight.normal_(std=WIDTH**-0.5)
                linear.weight[OUTLIER] *= outlier
            self.mlp.down_proj.weight.normal_(std=HIDDEN**-0.5)
            self.mlp.down_proj.weight[:, OUTLIER] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        logits = self.lm_head(x + self.mlp(self.norm(x))).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run(fp8: dict[str, Any] | None, outlier: float) -> dict[str, Any]:
    """Of the first step, of down: this rank's output, the gradient over all ranks, and which share of the input
    underflowed; the next output, of which the outlier is the most by then; losses of the three steps after it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    net = TinyLlama(outlier)
    config = training.ds_config(2, fp8)
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    found: dict[str, Any] = {}
    if fp8 is not None:
        engine._fp8_health.sinks.append(
            lambda report: found.setdefault("underflow", report.layers["mlp.down_proj"]["input"].underflow)
        )
    down = engine.module.mlp.down_proj
    outputs: list[Tensor] = []
    down.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach().float().cpu()))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine.backward(engine(training.micro_batches(0, world)[rank].to(engine.device)))
    found["gradient"] = safe_get_full_grad(down.weight).float().cpu()
    engine.step()
    found["losses"] = training.train(engine, 3, 1)
    found |= {"output": outputs[0], "next": outputs[1]}
    training.destroy(engine)
    return found


def block(smooth: bool) -> dict[str, Any]:
    """The cast of the product alone is in FP8: of what it does to the others, gate's and up's would hide all."""
    linear = {"filter_fqns": ["lm_head", "gate_proj", "up_proj"]}
    monitor = {"every": 1, "sink": "/dev/null"}
    return {"linear": linear, "activations": {"smooth_swiglu": smooth}, "monitor": monitor}


def errors_db(stock: dict[str, Any], found: dict[str, Any]) -> tuple[float, float, float]:
    """SQNR of down's output, of its gradient's other columns, and of the outlier's."""
    others = torch.arange(HIDDEN) != OUTLIER
    gradients = [(stock["gradient"][:, part], found["gradient"][:, part]) for part in (others, ~others)]
    a, b, c = (float(sqnr_db(*pair)) for pair in ((stock["output"], found["output"]), *gradients))
    return a, b, c


def measured(pool: Any, outlier: float) -> tuple[list[dict[str, Any]], ...]:
    """By rank: stock's, FP8's, and FP8's with the key."""
    return tuple(pool.run(run, fp8, outlier) for fp8 in (None, block(False), block(True)))


def check(pool: Any) -> None:
    """Without outliers the key changes no bit. A pair scaled by 30 costs a third of the other channels' values their
    normal range, one by 300 all of them and 20 dB; smooth, neither costs half a dB, and what is its own is scaled back.
    """
    stock, plain, smooth = measured(pool, 1.0)
    without = errors_db(stock[0], plain[0])
    for one, other in zip(plain, smooth, strict=True):
        assert one["losses"] == other["losses"] and torch.equal(one["gradient"], other["gradient"])
        assert one["underflow"] == other["underflow"] < 0.01
    for outlier, lost, left in ((30.0, 0.3, 0.06), (300.0, 0.99, 0.2)):
        stock, plain, smooth = measured(pool, outlier)
        assert all(one["losses"] == smooth[0]["losses"] for one in smooth)
        assert smooth[0]["losses"] != plain[0]["losses"]
        for rank, one in enumerate(smooth):
            assert plain[rank]["underflow"] > lost and one["underflow"] < left
            output, others, own = errors_db(stock[rank], one)
            assert output > without[0] - 0.5 and others > without[1] - 0.7 and own > 20, (outlier, output, others, own)
            following = float(sqnr_db(stock[rank]["next"], one["next"]))
            # Adam's first step is of the gradients' signs, which noise turns where they are small.
            assert following > 5, (outlier, following)
            if outlier == 300.0:
                output, others, _ = errors_db(stock[rank], plain[rank])
                assert output < without[0] - 15 and others < without[1] - 12, (output, others)


def test_a_channel_pair_scaled_up_costs_nothing_where_the_key_is_on(ranks: Any) -> None:
    check(ranks(2))
