"""CountingBackend: a backend of torch.compile whose graphs allocate what inductor's would, and compute nothing.

Dynamo, AOTAutograd, its partitioner and inductor do what they do for a run: what is fused, kept, made again and freed
is theirs. The Python code that inductor writes for a graph is then called without its kernels, on fake tensors, so that
the storages that are live at any moment are those of the run, and neither compiler nor GPU is needed.

Graphs are of the CPU, for a GPU's need one. Thresholds that inductor has for CPUs alone are set to those of GPUs; what
remains is written into docs/cli.md where it was measured. Written for the internals of torch 2.13, and tried with no
other: inductor has no hook between code and kernels but `inner_compile` of `compile_fx`, where this one stands.
Source: torch/_inductor/compile_fx.py `_InProcessFxCompile.codegen_and_compile` (2.13.0).
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo.exc
import torch._functorch.config
from torch import Tensor

Call = Callable[[list[Any]], Any]
"""What a graph is called with: a list of inputs, which it empties, so that they are freed when they are done with."""

_AS_ON_A_GPU = {
    "realize_acc_reads_threshold": "_realize_acc_reads_threshold_default",
    "realize_opcount_threshold": "_realize_opcount_threshold_default",
}
"""Of inductor's configuration: thresholds with another default on CPUs, and where that of GPUs is."""

_MAKES_BUFFERS = "empty_strided"
_SEEN = ("empty_strided", "empty_strided_cpu")
"""Of inductor's functions that make buffers, an operator and what is replaced by one; the others are C++."""


class CountingBackend:
    """`module.compile(backend=CountingBackend())`.

    Graphs are to be called on fake tensors only. Their results are tensors of the mode that is active then.

    Attributes:
        num_graphs: made so far, by dynamo's count: a forward and its backward are one.
        failure: the first error while a graph was made or called, which dynamo may wrap, or pass over; None: none.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self.failure: Exception | None = None

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.num_graphs += 1
        with self._noted(), torch._functorch.config.patch(enable_autograd_cache=False):
            return _inductor().compile_fx(gm, example_inputs, inner_compile=self._without_kernels)

    def _without_kernels(self, gm: Any, example_inputs: Sequence[Any], **options: Any) -> Call:
        with self._noted():
            return _boxed(partial(self._noting, _without_kernels(gm, example_inputs, options)))

    def _noting(self, call: Call, args: list[Any]) -> Any:
        with self._noted():
            return call(args)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except torch._dynamo.exc.RestartAnalysis:  # dynamo's own, which begins once more
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise


def _inductor() -> Any:
    """Imported late, for it takes seconds."""
    return importlib.import_module("torch._inductor.compile_fx")


def _without_kernels(gm: Any, example_inputs: Sequence[Any], options: dict[str, Any]) -> Call:
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch.utils._python_dispatch import _disable_current_modes

    thresholds = {key: getattr(config, of_gpu) for key, of_gpu in _AS_ON_A_GPU.items() if hasattr(config, of_gpu)}
    with _disable_current_modes(), DebugContext(), config.patch(thresholds):
        return _call_of(_written_code(gm, example_inputs, options))


def _written_code(gm: Any, example_inputs: Sequence[Any], options: dict[str, Any]) -> str:
    """The Python code of inductor for a graph of AOTAutograd's."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inductor = _inductor()
    is_inference = bool(options.get("is_inference", False))
    shape_env = getattr(gm, "shape_env", None) or inductor.shape_env_from_inputs(example_inputs)
    inductor.view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
    inductor._recursive_record_original_output_strides(gm)
    with V.set_fake_mode(fake_mode):
        inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
        names = ("graph_id", "is_backward", "get_decomp_fn")
        graph = GraphLowering(
            gm,
            example_inputs=example_inputs,
            shape_env=shape_env,
            is_inference=is_inference,
            **{name: options[name] for name in names if name in options},
        )
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*example_inputs)
            code: Any = graph.codegen()[0]
    text: str = code.value
    return text


def _call_of(text: str) -> Call:
    """The function `call` of inductor's code. Kernels do nothing; buffers are made by operators, which modes see.

    Raises:
        NotImplementedError: some are made otherwise, and would not be counted.
    """
    tree = ast.parse(text)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if unseen := sorted(name for name in called if name.startswith(_MAKES_BUFFERS) and name not in _SEEN):
        raise NotImplementedError(f"buffers are made by {', '.join(unseen)}")
    kernels: list[str] = []
    kept: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("async_compile."):
            kernels += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign, ast.ClassDef, ast.FunctionDef)):
            kept.append(statement)
    tree.body = kept
    names: dict[str, Any] = {"__name__": __name__ + ".graph"}
    exec(compile(tree, "<inductor, without kernels>", "exec"), names)
    names |= dict.fromkeys(kernels, _no_kernel)
    names |= {"assert_size_stride": _no_kernel, "assert_alignment": _no_kernel}
    names |= {"empty_strided_cpu": _empty_strided, "reinterpret_tensor": _reinterpret}
    call: Call = names["call"]
    return call


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(base, size, stride, int(base.storage_offset()) + offset)


def _boxed(call: Call) -> Call:
    """AOTAutograd hands over a list that is emptied, and keeps nothing of it."""

    def boxed(args: list[Any]) -> Any:
        return call(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
