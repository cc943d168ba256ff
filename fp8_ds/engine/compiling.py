"""Changes of `engine.compile()`: the limit of graphs, guards on our own fixed objects, rotary tables made once, logits
without a gradient; in ZeRO-3 biases added out of place, layers checkpointed without hooks, and a graph of the loss."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip
from torch.utils.hooks import RemovableHandle

from fp8_ds.engine.patches import RECORD
from fp8_ds.errors import UnsupportedError
from fp8_ds.ops._register import register

RECOMPILE_LIMIT = 32
_OURS = "G['__import_fp8_ds_dot_"
"""Beginning of the names of guards on our modules: their functions, classes and constants."""
_OTHERS = re.compile(r"G\['\w+'\]\.(torch|nn|F)\b")
"""Foreign modules that are reached through ours: users may replace what is in them."""
_SHARED = re.compile(r"\.fp8_recipe\.(shared|history|grad_format)$")
"""Objects that recipes of several layers have in common, from the conversion on."""


def allow_more_graphs() -> None:
    """Raise torch.compile's limit of graphs of one function from 8, its default, to 32, until `fp8_ds.uninstall()`.

    With torch 2.13 the limit is that of this thread. An engine that outlives `uninstall()` leaves it as it is.

    Under ZeRO-3 all decoder layers are one function: delayed scales, layers in bf16, evaluation, samples of the monitor
    and phases of the schedule make seven graphs of it as a rule, and a ninth would send it to eager.
    """
    import torch._dynamo

    if torch._dynamo.config.recompile_limit == 8 and RECORD.patches:
        RECORD.set(torch._dynamo.config, "recompile_limit", RECOMPILE_LIMIT)


def add_biases_out_of_place() -> None:
    """Let a graph of ZeRO-3 add the bias of a bf16 linear to a new tensor, until `fp8_ds.uninstall()`.

    DeepSpeed's linear (deepspeed/runtime/zero/linear.py, 0.19.8) is a Function whose forward says `output += bias`. For
    Dynamo of torch 2.11 an output that was written in place has no gradient: its input, weight and bias get zeros, and
    nothing is said. In eager it stays in place.
    """
    from deepspeed.runtime.zero import linear as ds_linear

    if not RECORD.patches or hasattr(ds_linear.LinearFunctionForZeroStage3, "fp8_ds_original"):
        return

    class OutOfPlace(ds_linear.LinearFunctionForZeroStage3):
        fp8_ds_original = ds_linear.LinearFunctionForZeroStage3

        @staticmethod
        def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if bias is not None and input.dim() == 2:
                return torch.addmm(bias, input, weight.t())
            output = input.matmul(weight.t())
            if bias is None:
                return output
            return output + bias if torch.compiler.is_compiling() else output.add_(bias)

    RECORD.set(ds_linear, "LinearFunctionForZeroStage3", OutOfPlace)


def compute_functions_again() -> None:
    """Let graphs of checkpointed layers compute outputs of autograd Functions again, until `fp8_ds.uninstall()`.

    torch 2.11 marks what a checkpointed region computes (torch/_higher_order_ops/wrap.py, `tag_nodes`), but not the
    graph within a node that a `torch.autograd.Function` is: outputs of FP8 linears, and of all linears in ZeRO-3, are
    kept. 2.13 has no such function and computes them again.
    """
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    tag_nodes = getattr(TagActivationCheckpoint, "tag_nodes", None)
    if not RECORD.patches or tag_nodes is None or hasattr(tag_nodes, "fp8_ds_original"):
        return

    def tag_all(graph: Any, is_sac: bool) -> Any:
        tagged = tag_nodes(graph, is_sac)
        _tag_functions(graph)
        return tagged

    tag_all.fp8_ds_original = tag_nodes  # type: ignore[attr-defined]
    RECORD.set(TagActivationCheckpoint, "tag_nodes", staticmethod(tag_all))


def _tag_functions(graph: Any) -> None:
    """Give the forwards of autograd Functions in `graph` the marks of their nodes: another number is another region,
    whose inputs are kept."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.autograd_function_apply:
            forward = graph.get_submodule(node.args[0].target)
            for inner in forward.graph.nodes:
                if inner.op in ("call_function", "call_method", "call_module"):
                    inner.meta.update({name: node.meta[name] for name in ("ac_graph_id", "recompute")})
            _tag_functions(forward)


class CheckpointedForward:
    """A layer's `forward` that checkpoints it without its hooks, where its class does so with them.

    Layers of transformers with a modeling_layers.py, until 5.17 at least, checkpoint their own `__call__`. Dynamo can
    trace no checkpoint with a hook of ZeRO-3 in it, and runs the whole layer in eager, in silence. 5.24 checkpoints
    `forward`, as is done here.

    Args:
        layer: a module whose class has a `__call__` that calls `_gradient_checkpointing_func(function, *inputs)` if
            `gradient_checkpointing` is true, in training.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.checkpoint: Callable[..., Any] | None = None
        layer.forward = partial(_forward, layer)

    def take_over(self) -> None:
        """Take the layer's function for checkpoints, which transformers sets anew when they are switched off or on."""
        function = self.layer.__dict__.get("_gradient_checkpointing_func")
        if function is not None and function is not self:
            self.checkpoint = function
            self.layer._gradient_checkpointing_func = self

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call the layer with its hooks, and without a checkpoint."""
        return function(*inputs)

    def remove(self) -> None:
        if self.layer.__dict__.get("_gradient_checkpointing_func") is self:
            self.layer._gradient_checkpointing_func = self.checkpoint
        if getattr(self.layer.__dict__.get("forward"), "func", None) is _forward:
            del self.layer.forward


def checkpoint_without_hooks(layers: Iterable[nn.Module]) -> list[CheckpointedForward]:
    """Give those of `layers` that are checkpointed with their hooks another `forward`, and return it."""
    return [
        CheckpointedForward(layer)
        for layer in layers
        if type(layer).__call__ is not nn.Module.__call__
        and hasattr(layer, "gradient_checkpointing")
        and "forward" not in layer.__dict__
    ]


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the class's own `forward`, checkpointed if `layer` is."""
    if layer.gradient_checkpointing and layer.training:
        hook = layer._gradient_checkpointing_func
        if isinstance(hook, CheckpointedForward) and hook.checkpoint is not None:
            return hook.checkpoint(partial(type(layer).forward, layer, **kwargs), *args)
    return type(layer).forward(layer, *args, **kwargs)


def without_fixed(compile_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `compile_kwargs` with a filter that leaves fixed guards out, after the user's own filter if there is one.

    With delayed scales these are nearly half of a layer's guards and most of those that run Python, one for each pair
    of layers that share an object, at a microsecond or two. With a "mode" other than torch's own "default" all guards
    stay, because torch takes no options beside one.
    """
    if compile_kwargs.get("mode") not in (None, "default"):
        return compile_kwargs
    options = dict(compile_kwargs.get("options") or {})
    options["guard_filter_fn"] = _Filter(options.get("guard_filter_fn"))
    others = {name: value for name, value in compile_kwargs.items() if name != "mode"}
    return {**others, "options": options}


class _Filter:
    def __init__(self, first: Callable[[Sequence[Any]], Sequence[bool]] | None) -> None:
        self.first = first

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        """Return for each guard whether it is kept."""
        kept = self.first(guards) if self.first is not None else [True] * len(guards)
        return [
            bool(one) and not (is_fixed(guard.name, guard.guard_type) or is_on_a_method(guard))
            for one, guard in zip(kept, guards, strict=True)
        ]


def is_fixed(name: str, kind: str) -> bool:
    """Whether a guard checks something that no run changes.

    Args:
        name: the guarded object, as torch spells it.
        kind: torch's name of the guard: DUPLICATE_INPUT says that two names are of one object.
    """
    if name.startswith(_OURS):
        return kind in ("DUPLICATE_INPUT", "MODULE_MATCH") or _OTHERS.match(name) is None
    if kind == "DUPLICATE_INPUT":
        return _SHARED.search(name) is not None
    return ".fp8_recipe" in name and name.startswith(("type(", "dict(type("))


def is_on_a_method(guard: Any) -> bool:
    """Whether a guard checks that no attribute of an object of ours hides a method or property of its class.

    None does. Modules, whose `forward` others replace, and a user's classes are left to torch.

    Args:
        guard: torch's GuardFilterEntry.
    """
    if guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT" or not getattr(guard, "has_value", False):
        return False
    owner = type(guard.value)
    if not owner.__module__.startswith("fp8_ds.") or issubclass(owner, nn.Module):
        return False
    name = getattr(guard.orig_guard.create_fn, "keywords", {}).get("attr", "")
    return isinstance(inspect.getattr_static(owner, name, None), FunctionType | property)


def keep_tables(model: nn.Module) -> list[RemovableHandle]:
    """Make the rotary tables of `model` results of an op that inductor neither fuses nor computes again.

    Inductor takes cosines and sines for cheap pointwise work: it computes them anew, in float32, for each element of
    each layer's queries and keys, forward and backward, instead of reading a table of [length, head dim]. On an H200
    rotary embeddings took 3.4 ms of a step of Llama 2.0 B, 123 ms, where their bytes need 0.8.

    Eager mode and torch.export do not change. A second call changes nothing.

    Returns:
        Handles of the new hooks: of modules with a buffer `inv_freq`, or one for each kind of layer
        (`sliding_attention_inv_freq`), as the rotary embeddings of transformers have.
    """
    found = [module for module in model.modules() if any(map(_is_frequencies, module._buffers))]
    new = [module for module in found if _keep_outputs not in module._forward_hooks.values()]
    return [module.register_forward_hook(_keep_outputs) for module in new]


def _is_frequencies(name: str) -> bool:
    return name == "inv_freq" or (name.endswith("_inv_freq") and "original" not in name)


def _keep_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Keep the tables that a module returns (forward hook).

    It reads the flag of torch.export, because `torch.compiler.is_exporting()` is True in every graph of torch 2.11.
    """
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
        return output
    if type(output) is tuple:
        return tuple(map(_kept, output))
    return _kept(output)


def _kept(value: Any) -> Any:
    """Return `value` through the op if it is a tensor without gradient; anything else as it is."""
    return _op(value) if isinstance(value, Tensor) and not value.requires_grad else value


_op = register("table(Tensor x) -> Tensor", torch.clone, torch.empty_like)


class DetachedLogits:
    """Logits that a compiled model returns beside the loss, without a gradient in its graph; `remove()` undoes it.

    AOTAutograd makes a gradient of zeros for each output that has one, if nobody computes it: as large as the logits,
    filled and added. So they leave the graph detached, and come out of `forward` with a backward that raises, before
    any hook. Only in training, and only in an output of transformers with a loss, which it has when it is given labels.

    Args:
        module: the model that is compiled. torch calls its hooks and `forward` one by one, and makes graphs of each.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self._before = module.__dict__.get("forward")
        functools.update_wrapper(self, module.forward)  # Trainer reads its signature, liger_loss.py its module
        module.forward = self

    @skip  # `torch.compiler.disable(recursive=False)` is the same, but Dynamo examines the frame in each step
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._in_graph(*args, **kwargs)
        if self._module.training and _has_logits(output) and not output["logits"].requires_grad:
            output["logits"] = _Detached.apply(output["logits"], output["loss"])
        return output

    def _in_graph(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if self._module.training and _has_logits(output):
            output["logits"] = output["logits"].detach()
        return output

    def remove(self) -> None:
        """Put the model's own `forward` back, unless another has taken its place."""
        if self._module.__dict__.get("forward") is not self:
            return
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


class SeparateLoss:
    """A graph for the loss function of a transformers model in ZeRO-3, where a graph ends behind the head; `remove()`
    undoes it.

    A model that caps or scales what its head returns, as Gemma 2, would do so in the loss's graph, and return logits
    from it: AOTAutograd makes the gradient of zeros that `DetachedLogits` describes.

    Args:
        module: a module with transformers' `loss_function`.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._function = module, module.loss_function
        self._before = module.__dict__.get("_loss_function")
        module.loss_function = self

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def remove(self) -> None:
        """Put the function of before back, unless another has taken its place."""
        if self._module.__dict__.get("_loss_function") is not self:
            return
        del self._module._loss_function
        if self._before is not None:
            self._module.loss_function = self._before


def separate_losses(model: nn.Module) -> list[SeparateLoss]:
    """Give the loss of each transformers model with a head in `model` its own graph, unless it is a module itself."""
    return [SeparateLoss(module) for module in model.modules() if _has_plain_loss(module)]


def _has_plain_loss(module: Any) -> bool:
    if not isinstance(getattr(type(module), "loss_function", None), property) or "_loss_function" in module._modules:
        return False
    return module.get_output_embeddings() is not None and not isinstance(module.loss_function, SeparateLoss)


def _has_logits(output: Any) -> bool:
    """Whether a model's output is one of transformers with a loss to train by, and logits."""
    if not (isinstance(output, dict) and hasattr(output, "loss") and torch.is_grad_enabled()):
        return False
    loss, logits = output.get("loss"), output.get("logits")
    return isinstance(loss, Tensor) and loss.requires_grad and isinstance(logits, Tensor)


class _Detached(torch.autograd.Function):
    """Logits with their values, whose backward raises."""

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UnsupportedError(
            "logits: expected no gradient of the logits that a compiled model returns beside its loss, got one. Leave "
            "labels out of the batch, and compute the whole loss from the logits, which have a gradient then; or set "
            '"without_deepspeed_fixes": ["logits_gradient"] in the "fp8" block.'
        )
