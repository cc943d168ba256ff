"""Decision on the linears that are too small for FP8, made once, by the batch of the first training forward."""

from __future__ import annotations

import sys
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8_ds.engine.precision import LayerPrecision
from fp8_ds.engine.ranks import tell_all
from fp8_ds.nn.linear.fp8_linear import full_shape
from fp8_ds.nn.moe.experts import ExpertsWeight
from fp8_ds.nn.plan import flops
from fp8_ds.nn.plan.flops import SizeRule, share_of_experts

_GAINS = {
    "states": "none is left in FP8: the engine gains by its FP8 states alone",
    "step": "none is left in FP8: the engine may gain by its step of Adam alone",
    "nothing": "none is left in FP8, and nothing is gained",
}
"""Ends of the line for rank 0 where no linear is in FP8, by what else may gain."""
_INSTEAD = 'set "optimizer": {"states": "fp8"}, or "enabled": false for DeepSpeed\'s own engine'


class SizeDecision:
    """Decision on the layers that are too small, which waits for the number of tokens of a rank.

    It is off by `"min_size": 0`, on other devices than CUDA's with `null`, in pipelines, and with tensor-parallel
    layers.

    Args:
        engine: built, with its ZeRO optimizer and layers in FP8.
        precision: its layers'.

    Attributes:
        is_open: whether the next forward in training mode, or the step after one in evaluation mode, decides.
    """

    def __init__(self, engine: Any, precision: LayerPrecision) -> None:
        self._engine = engine
        self._precision = precision
        self._min_size: int | None = engine.fp8.config.linear.min_size
        is_on = engine.device.type == "cuda" if self._min_size is None else self._min_size > 0
        self._is_on = self.is_open = is_on and not isinstance(engine, PipelineEngine)
        self._num_tokens = 0

    def reopen(self) -> None:
        """Decide again: the engine has been compiled."""
        self.is_open = self._is_on

    def see(self, batch: Any) -> None:
        """Count the tokens of a forward's arguments. The host waits for nothing."""
        self._num_tokens = max(self._num_tokens, num_tokens_of(batch))

    def decide(self) -> None:
        """Set the layers that are too small, the same on all ranks. Collective over all ranks.

        The rank with the most tokens counts. Where no forward has had a tensor, all layers stay in FP8.
        """
        self.is_open = False
        told = tell_all((self._num_tokens, self._precision.parallel))
        num_tokens = max(num for num, _ in told)
        if num_tokens == 0 or any(parallel for _, parallel in told):
            return
        is_compiled = self._engine.is_compiled or any(map(_is_compiled, self._engine.module.modules()))
        rule = SizeRule.of(self._min_size, is_compiled=is_compiled)
        linears: dict[str, tuple[float, int, int]] = {}
        too_small: set[str] = set()
        has_checkpointed = False
        for name, layer in self._precision.linears.items():
            features = layer.in_features, layer.out_features
            if not isinstance(layer, ExpertsWeight):
                linears[name] = (num_tokens, *features)
                continue
            ends_checkpoint = is_compiled and self._is_checkpointed(name)
            of_experts = SizeRule.of_experts(self._min_size, ends_checkpoint=ends_checkpoint)
            num_experts = full_shape(layer.weight)[0]
            num_rows = num_tokens * num_experts * share_of_experts(layer.module, num_experts)
            if not of_experts.gains(num_rows, *features):
                too_small.add(name)
                has_checkpointed |= ends_checkpoint and self._min_size is None
        self._precision.too_small = frozenset(rule.too_small(linears) | too_small)
        line = self._line(rule, num_tokens, is_compiled, has_checkpointed)
        self._precision.update(self._engine.global_steps, line)

    def _is_checkpointed(self, name: str) -> bool:
        """Whether the layer of transformers that the weight `name` is in, or else its model, is checkpointed."""
        place, found = name, None
        while place and found is None:
            place = place.rpartition(".")[0]
            found = getattr(self._engine.module.get_submodule(place), "gradient_checkpointing", None)
        return bool(found)

    def _line(self, rule: SizeRule, num_tokens: int, is_compiled: bool, has_checkpointed: bool) -> str:
        """Say which rule has left how many layers in bf16."""
        num_small, num = len(self._precision.too_small), len(self._precision.names)
        width = rule.least_square(num_tokens)
        mode = "compiled" if is_compiled else "eager"
        mean = f" and all of them from {rule.mean_macs:.3g} in the mean" if rule.mean_macs else ""
        if has_checkpointed:
            mean += f", experts of checkpointed layers from {flops.MIN_CHECKPOINTED_MACS:.3g}"
        text = (
            f"fp8: {num_small} of {num} linears stay bf16, too small to gain: {num_tokens:,} tokens a rank in {mode} "
            f"mode, where a product gains from {rule.macs:.3g} multiply-adds on ({width:,} x {width:,}){mean}; "
            '"linear": {"min_size": 0} puts all into FP8'
        )
        if num_small < num:
            return text
        if self._engine.fp8.config.optimizer.states == "fp8":
            return f"{text}; {_GAINS['states']}"
        step = self._engine.optimizer.fp8.step.adam
        has_step = step is not None and step.knows_it
        return f"{text}; {_GAINS['step' if has_step else 'nothing']}: {_INSTEAD}"


def num_tokens_of(batch: Any) -> int:
    """Return the number of tokens in a forward's arguments; 0 if there is no tensor that tells it.

    It is the size of the first integer tensor of two dims (token ids [batch, length]), else the number of rows of the
    first tensor of floating point (embeddings [batch, length, width]), else the size of the first tensor.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    ids = next((one for one in tensors if one.dim() == 2 and not one.is_floating_point()), None)
    if ids is not None:
        return ids.numel()
    rows = next((one for one in tensors if one.dim() > 1 and one.is_floating_point() and one.shape[-1]), None)
    if rows is not None:
        return rows.numel() // rows.shape[-1]
    return tensors[0].numel() if tensors else 0


def _is_compiled(module: nn.Module) -> bool:
    """Whether a user has compiled `module`: in place, by a wrapper, or its forward alone."""
    wrapper = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    is_forward_compiled = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return module._compiled_call_impl is not None or isinstance(module, wrapper) or is_forward_compiled
