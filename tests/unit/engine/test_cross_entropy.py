"""Liger's loss: where it is refused, and what it changes. liger-kernel is a stub here, except in the last test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
)

from fp8_ds.config import LinearConfig
from fp8_ds.engine.activation import RECORD
from fp8_ds.engine.cross_entropy import (
    CUT_HEAD,
    FP8_HEAD,
    LOSS_REFUSALS,
    NO_KERNELS,
    NOT_INSTALLED,
    OTHER_FORWARD,
    OTHER_HEAD,
    PIPELINE,
    UNKNOWN_MODEL,
    LossRefusal,
    fuse_loss,
    refuse_loss,
)
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.convert import apply_plan, make_plan

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def liger_forward(self: Any, *args: Any, **kwargs: Any) -> str:
    return "Liger's"


liger_forward.__module__ = "liger_kernel.transformers.model.llama"


class Liger:
    """A stand-in for liger_kernel.transformers: what it was asked for is in `asked`."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.MODEL_TYPE_TO_APPLY_LIGER_FN = {
            "llama": self.apply_to_llama,
            "bert": self.apply_to_llama,
            "mistral": self.apply_without_the_loss,
        }

    def apply_to_llama(
        self,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        model: Any = None,
    ) -> None:
        self.asked = {"rope": rope, "cross_entropy": cross_entropy, "rms_norm": rms_norm}
        if fused_linear_cross_entropy:
            model.forward = MethodType(liger_forward, model)

    def apply_without_the_loss(self, rope: bool = True, model: Any = None) -> None:
        raise AssertionError("not to be called")

    def apply_to_parts(self, fused_linear_cross_entropy: bool = True, model: Any = None, **kwargs: Any) -> None:
        raise AssertionError("not to be called")

    def apply_nothing(self, fused_linear_cross_entropy: bool = True, model: Any = None) -> None:
        """As a version that replaces the forward of another class."""


@pytest.fixture(autouse=True)
def liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    stub = Liger()
    functional = SimpleNamespace(liger_fused_linear_cross_entropy=lambda input, weight, target: 0)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", stub)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", functional)
    stub.functional = functional
    yield stub
    RECORD.patches[:] = [patch for patch in RECORD.patches if patch[0] is not functional]


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**TINY))


class Tuned(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def patched_before() -> Any:
    model = llama()
    model.forward = MethodType(liger_forward, model)
    return model


def with_head(head: nn.Module) -> Any:
    model = llama()
    model.lm_head = head
    return model


class Adapted(nn.Linear):
    """As an adapter's: its weight is not all it multiplies by."""


def pipeline() -> Any:
    from deepspeed.runtime.pipe.module import PipelineModule

    return PipelineModule.__new__(PipelineModule)


def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)


# Row -> models that it refuses, and what the message must name.
TRIGGERS: list[tuple[LossRefusal, Callable[[], Any], str]] = [
    (NOT_INSTALLED, llama, "ModuleNotFoundError"),
    (NO_KERNELS, llama, "device cpu"),
    (PIPELINE, pipeline, "PipelineModule"),
    (UNKNOWN_MODEL, lambda: nn.Linear(4, 4), "Linear of type None"),
    (UNKNOWN_MODEL, lambda: MistralForCausalLM(MistralConfig(**TINY)), "whose loss alone cannot be patched"),
    (UNKNOWN_MODEL, lambda: LlamaForSequenceClassification(LlamaConfig(**TINY)), "ForSequenceClassification"),
    (UNKNOWN_MODEL, lambda: BertForMaskedLM(BertConfig(**TINY)), "BertForMaskedLM"),
    (OTHER_FORWARD, lambda: Tuned(LlamaConfig(**TINY)), "Tuned.forward of"),
    (OTHER_FORWARD, patched_before, "LlamaForCausalLM.forward of liger_kernel"),
    (OTHER_HEAD, lambda: with_head(nn.Linear(64, 96)), "bias=True"),
    (OTHER_HEAD, lambda: with_head(Adapted(64, 96, bias=False)), "Adapted("),
]


@pytest.mark.parametrize(("row", "make", "found"), TRIGGERS)
def test_a_refusal_names_key_finding_and_remedy(
    row: LossRefusal, make: Callable[[], Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row is NOT_INSTALLED:
        not_installed(monkeypatch)
    with pytest.raises(UnsupportedError) as caught:
        refuse_loss(make(), "cpu" if row is NO_KERNELS else "cuda")
    message = str(caught.value)
    assert message.startswith(f'fp8.activations.cross_entropy: expected "stock" with {row.what}, got "liger" and ')
    assert found in message
    assert message.endswith(f": {row.reason}. {row.remedy}")


def test_every_row_is_triggered_here() -> None:
    assert {id(row) for row, *_ in TRIGGERS} | {id(FP8_HEAD), id(CUT_HEAD)} == {id(row) for row in LOSS_REFUSALS}


def test_a_function_that_patches_other_parts_too_is_refused(liger: Any) -> None:
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = liger.apply_to_parts
    with pytest.raises(UnsupportedError, match="whose loss alone cannot be patched"):
        refuse_loss(llama(), "cuda")


def test_a_head_in_fp8_is_refused() -> None:
    model = llama().bfloat16()
    linear = LinearConfig(filter_fqns=())
    apply_plan(model, make_plan(model, linear, False), linear, model.device)
    with pytest.raises(UnsupportedError) as caught:
        fuse_loss(model, 2)
    assert FP8_HEAD.remedy in str(caught.value) and "Fp8Linear" in str(caught.value)
    assert "forward" not in vars(model)


def test_a_head_that_autotp_has_cut_is_refused() -> None:
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    model = llama()
    model.lm_head = layers.LinearLayer(model.lm_head, None, name="lm_head", skip_partition=True)
    with pytest.raises(UnsupportedError) as caught:
        fuse_loss(model, 2)
    assert CUT_HEAD.remedy in str(caught.value) and 'got "liger" and LinearLayer' in str(caught.value)
    assert "forward" not in vars(model)


def test_a_version_that_leaves_the_forward_alone_is_an_error(liger: Any) -> None:
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = liger.apply_nothing
    with pytest.raises(UnsupportedError, match="whose forward liger-kernel has left as it was"):
        fuse_loss(llama(), 2)


def test_the_loss_of_this_instance_is_all_that_is_asked_for(liger: Any) -> None:
    model, other = llama(), llama()
    refuse_loss(model, "cuda")
    line = fuse_loss(model, 2)
    assert line == "fp8: cross entropy: Liger's, fused with lm_head; with labels in training, logits are None"
    assert liger.asked == {"rope": False, "cross_entropy": False, "rms_norm": False}
    assert model() == "Liger's"
    assert "forward" not in vars(other) and type(model) is LlamaForCausalLM
    assert not any("forward" in vars(module) for module in model.modules() if module is not model)


def test_inside_peft_it_is_the_base_models_loss() -> None:
    class Peft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def get_base_model(self) -> Any:
            return self.inner

    model = Peft()
    refuse_loss(model, "cuda")
    fuse_loss(model, 1)
    assert "forward" not in vars(model) and "forward" in vars(model.inner)


def test_stage_3_gathers_the_heads_weight_for_the_whole_model() -> None:
    for stage, expected in ((2, False), (3, True)):
        model = llama()
        fuse_loss(model, stage)
        registered = [p for _, p in getattr(model, "_external_params", {}).items()]
        assert [p is model.lm_head.weight for p in registered] == [True] * expected


def test_the_kernel_is_kept_out_of_graphs_once_and_comes_back(liger: Any) -> None:
    stock = liger.functional.liger_fused_linear_cross_entropy
    fuse_loss(llama(), 2)
    called = liger.functional.liger_fused_linear_cross_entropy
    fuse_loss(llama(), 2)
    assert liger.functional.liger_fused_linear_cross_entropy is called is not stock
    ours = [patch for patch in RECORD.patches if patch[0] is liger.functional]
    assert ours == [(liger.functional, "liger_fused_linear_cross_entropy", stock)]


REAL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from fp8_ds.engine.cross_entropy import fuse_loss, refuse_loss
from fp8_ds.testing.interpreted import pytest_configure

pytest_configure()  # the interpreter in half the time
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**TINY)).bfloat16()
tokens = torch.randint(0, 96, (2, 12))
labels = tokens.masked_fill(tokens < 20, -100)

def step():
    model.zero_grad()
    output = model(input_ids=tokens, labels=labels)
    output.loss.backward()
    return output, [p.grad.float().clone() for p in model.parameters()]

stock, expected = step()
refuse_loss(model, "cuda")
fuse_loss(model, 2)
for compiled in (False, True):
    if compiled:
        torch._dynamo.utils.counters.clear()
        model.compile(backend="aot_eager")
    output, grads = step()
    assert output.logits is None and stock.logits is not None
    assert abs(output.loss - stock.loss) < 1e-3, (output.loss, stock.loss)
    for grad, other in zip(grads, expected):
        assert torch.nn.functional.cosine_similarity(grad.flatten(), other.flatten(), dim=0) > 0.999
breaks = torch._dynamo.utils.counters["graph_break"]
assert len(breaks) == 1 and "compiler.disable" in next(iter(breaks)), breaks
model.eval()
assert torch.equal(model(input_ids=tokens, labels=labels).logits, stock.logits)
print("as stock")
"""


def test_the_real_kernel_gives_stocks_loss_and_gradients_and_breaks_graphs_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """liger-kernel itself, on the CPU through Triton's interpreter."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = f"TINY = {TINY!r}\n{REAL}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip().endswith("as stock"), run.stdout + run.stderr
