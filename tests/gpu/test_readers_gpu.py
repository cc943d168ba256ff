"""Writes into weights past the engine, other default dtypes and second derivatives on a GPU, eager and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import test_modes
import torch
import training

from fp8_ds.config import LinearConfig
from fp8_ds.nn.linear.fp8_linear import Fp8Linear
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.scale import scale_from_amax
from fp8_ds.ops.quantize import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

DEVICE = "cuda"
BOUND = 0.01
STEPS = 3


def clamped_through_data(stage: int, is_compiled: bool) -> None:
    """As a WGAN trains: after each step its weights are cut by `p.data.clamp_`; the next forward computes with that."""
    engine = training.build(training.ds_config(stage, {}))
    if is_compiled:
        torch._dynamo.reset()
        engine.compile()
    batch = training.micro_batches(9, 1)[0].to(engine.device)
    for step in range(STEPS):
        training.train(engine, 1, first_step=step)
        before = {name: p.detach().clone() for name, p in engine.fp8.weights.items()}
        with torch.no_grad():
            free = float(engine(batch))
            for weight in engine.fp8.weights.values():
                weight.data.clamp_(-BOUND, BOUND)
            assert float(engine(batch)) != free
        for name, weight in engine.fp8.weights.items():
            expected = before[name].clamp(-BOUND, BOUND)
            assert not torch.equal(expected, before[name]), name
            scale, _ = scale_from_amax(expected.float().abs().max(), E4M3.max)
            codes = quantize(expected, scale, E4M3)
            assert torch.equal(weight._fp8.data.view(torch.uint8), codes.view(torch.uint8)), name
    training.destroy(engine)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_clamped_through_data_is_what_the_next_forward_has(
    gpu_ranks: Any, stage: int, is_compiled: bool
) -> None:
    gpu_ranks(1).run(clamped_through_data, stage, is_compiled)


@pytest.mark.parametrize(("stage", "fp8"), [(2, {"linear": {"recipe": "delayed"}}), (3, {}), (2, test_modes.STATES)])
def test_torchs_default_dtype_changes_no_bit(gpu_ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    test_modes.test_torchs_default_dtype_changes_no_bit(gpu_ranks, stage, fp8)


@pytest.mark.parametrize(
    ("is_compiled", "message"), [(False, "expected its graph to be differentiated once"), (True, "double backward")]
)
def test_a_penalty_on_a_gradient_leaves_no_weight_out_in_silence(is_compiled: bool, message: str) -> None:
    """The gradient starts at the FP8 linear, as in a discriminator; a graph of torch.compile has its own refusal."""
    torch._dynamo.reset()
    head = Fp8Linear.from_linear(torch.nn.Linear(64, 64), TensorwiseRecipe(LinearConfig()))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), head).to(DEVICE, torch.bfloat16)
    model = torch.compile(net) if is_compiled else net
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
