"""Liger's loss: whose forward it is, what is refused, what changes. liger-kernel is a stub, but for the last test."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_ds.config import LinearConfig
from fp8_ds.engine.liger_loss import check_chunks, prepare_liger_loss, with_liger_loss
from fp8_ds.engine.patches import RECORD
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan

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


class Loss:
    """Stands in for Liger's autograd function; `Loss0_7` for one that is not told the size of chunks."""

    @staticmethod
    def forward(ctx: Any, chunk_mem_const: int = 1) -> None: ...


class Loss0_7:
    @staticmethod
    def forward(ctx: Any) -> None: ...


def loss(input: Any, weight: Any, target: Any, bias: Any = None, chunk_mem_const: int = 1) -> int:
    """As liger-kernel 0.8.5's, of which it gives the constant."""
    return chunk_mem_const


@pytest.fixture(autouse=True)
def functional(monkeypatch: pytest.MonkeyPatch) -> Any:
    """liger_kernel.transformers.functional."""
    stub = SimpleNamespace(liger_fused_linear_cross_entropy=loss, LigerFusedLinearCrossEntropyFunction=Loss)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", stub)
    yield stub
    RECORD.patches[:] = [patch for patch in RECORD.patches if patch[0] is not stub]


def llama(has_liger: bool = True) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    if has_liger:  # as apply_liger_kernel_to_llama(model=model, ...) does
        model.forward = MethodType(liger_forward, model)
    return model


class Peft(nn.Module):
    """As PEFT's: the causal LM is inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> Any:
        return self.inner


def test_ligers_forward_is_found_on_an_instance_a_class_and_inside_peft() -> None:
    model = llama()
    assert with_liger_loss(model) is model and with_liger_loss(Peft(model)) is model

    class Patched(LlamaForCausalLM):  # type: ignore[misc]
        forward = liger_forward  # as apply_liger_kernel_to_llama() leaves transformers' class

    patched = Patched(LlamaConfig(**TINY))
    assert with_liger_loss(patched) is patched
    for other in (llama(False), Peft(llama(False)), nn.Linear(4, 4)):
        assert with_liger_loss(other) is None
        assert prepare_liger_loss(other, 2, None) is None


@pytest.mark.parametrize(
    ("has_liger", "old"),
    [
        (False, {}),
        (True, {"liger_fused_linear_cross_entropy": lambda input, weight, target, bias=None: 0}),
        (True, {"LigerFusedLinearCrossEntropyFunction": Loss0_7}),
    ],
)
def test_chunks_of_a_loss_that_is_not_there_or_not_told_are_refused(
    functional: Any, has_liger: bool, old: dict[str, Any]
) -> None:
    check_chunks(Peft(llama()), 8)
    vars(functional).update(old)
    check_chunks(llama(has_liger), None)
    with pytest.raises(UnsupportedError, match=r"fp8\.activations\.cross_entropy_chunk_mem_const: .* got 8"):
        check_chunks(llama(has_liger), 8)


@pytest.mark.parametrize("by", ["fp8", "autotp"])
def test_a_head_in_fp8_or_one_that_autotp_has_cut_is_refused(by: str) -> None:
    layers = pytest.importorskip("deepspeed.module_inject.layers")
    model, linear = llama().bfloat16(), LinearConfig(filter_fqns=())
    if by == "fp8":
        apply_plan(model, make_plan(model, linear, False), linear, model.device)
    else:
        model.lm_head = layers.LinearLayer(model.lm_head, None, name="lm_head", skip_partition=True)
    with pytest.raises(UnsupportedError, match="lm_head"):
        prepare_liger_loss(model, 2, None)


def test_stage_3_gathers_the_heads_weight_for_the_whole_model() -> None:
    for stage, expected in ((2, False), (3, True)):
        model = llama()
        prepare_liger_loss(model, stage, None)
        registered = [p for _, p in getattr(model, "_external_params", {}).items()]
        assert [p is model.lm_head.weight for p in registered] == [True] * expected


def test_each_engines_loss_has_its_own_chunks_and_others_are_called_as_they_call(functional: Any) -> None:
    stock, model, other, third = functional.liger_fused_linear_cross_entropy, llama(), llama(), llama()
    prepare_liger_loss(model, 2, 8)
    prepare_liger_loss(other, 2, 4)
    prepare_liger_loss(third, 2, None)
    call = functional.liger_fused_linear_cross_entropy
    assert inspect.signature(call) == inspect.signature(stock)
    x, target = torch.zeros(2, 64), torch.zeros(2)
    for weight, expected in ((model.lm_head.weight, 8), (other.lm_head.weight, 4)):
        assert call(x, weight, target) == call(target=target, weight=weight, input=x) == expected
        assert call(x, weight, target, None, 2) == expected  # as Liger's forward of gpt-oss says one
    assert call(x, third.lm_head.weight, target) == call(x, model.lm_head.weight.clone(), target) == 1
    assert call(x, third.lm_head.weight, target, chunk_mem_const=2) == 2
    del model, weight
    gc.collect()
    assert [*call.fp8_ds_chunk_mem_consts.values()] == [4]


REAL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from liger_kernel.transformers import apply_liger_kernel_to_llama
from fp8_ds.engine.liger_loss import prepare_liger_loss
from support.interpreted import pytest_configure

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
LOSS_ALONE = {"fused_linear_cross_entropy": True, "rope": False, "rms_norm": False, "swiglu": False}
apply_liger_kernel_to_llama(model=model, **LOSS_ALONE)
assert prepare_liger_loss(model, 2, None)
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


def test_the_real_kernel_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """liger-kernel itself, through Triton's interpreter, beside transformers' own loss."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    run = subprocess.run([sys.executable, "-c", f"TINY = {TINY!r}\n{REAL}"], capture_output=True, text=True)
    assert run.stdout.endswith("as stock\n"), run.stdout + run.stderr
