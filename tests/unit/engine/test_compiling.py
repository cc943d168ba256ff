"""Compiled engines: fewer guards, rotary tables made once, more graphs, no gradient of logits that nobody reads; all
with the bits of eager."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.models import Llama
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from fp8_ds.config import Fp8Config, LinearConfig
from fp8_ds.engine import compiling
from fp8_ds.engine.compiling import keep_tables
from fp8_ds.engine.patches import PatchRecord
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise

OURS = "G['__import_fp8_ds_dot_nn_dot_recipe']"


def test_options_are_the_users_own_with_the_filter_behind_theirs() -> None:
    given = {"dynamic": False, "options": {"guard_filter_fn": lambda entries: [one.name != "drop" for one in entries]}}
    kept = compiling.without_fixed(given)
    entries = [SimpleNamespace(name=name, guard_type="TENSOR_MATCH") for name in ("drop", "x", OURS)]
    assert kept["options"]["guard_filter_fn"](entries) == [False, True, False]
    assert not kept["dynamic"] and given["options"]["guard_filter_fn"] is not kept["options"]["guard_filter_fn"]
    with_mode = {"mode": "reduce-overhead"}
    assert compiling.without_fixed(with_mode) is with_mode


class Stock:
    """What an engine compiles by."""

    module, optimizer = nn.Linear(2, 2), None
    _fp8_hooks: ClassVar[list[Any]] = []

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def compile(self, backend: str = "inductor", compile_kwargs: Any = {}, schedule: Any = None) -> None:  # noqa: B006
        self.given = (backend, compile_kwargs, schedule)


@pytest.mark.parametrize("is_in_fp8", [False, True])
def test_an_engine_in_fp8_compiles_with_the_filter_and_more_graphs_and_another_does_not(
    is_in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fp8_ds.uninstall()` sets the limit back; a limit that a user has set stays, and torch's own after that."""
    from fp8_ds.engine.engine import Fp8Engine

    record = PatchRecord()
    monkeypatch.setattr(compiling, "RECORD", record)
    context = SimpleNamespace(config=Fp8Config.from_block({"enabled": True})) if is_in_fp8 else None
    engine: Any = object.__new__(type("Engine", (Fp8Engine, Stock), {"fp8": context}))
    for is_installed, before, after in ((False, 8, 8), (True, 9, 9), (True, 8, 32 if is_in_fp8 else 8)):
        if is_installed:
            record.set({"initialize": 0}, "initialize", 1)
        with torch._dynamo.config.patch(recompile_limit=before):
            engine.compile("eager", {"dynamic": False}, schedule=1)
            assert torch._dynamo.config.recompile_limit == after
            record.undo()
            assert torch._dynamo.config.recompile_limit == before
    backend, given, schedule = engine.given
    assert (backend, given.pop("dynamic"), schedule) == ("eager", False, 1)
    assert ("guard_filter_fn" in given["options"]) if is_in_fp8 else given == {}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def converted(recipe: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    config = LinearConfig(recipe=recipe, filter_fqns=(), **more)
    apply_plan(model, make_plan(model, config), config, torch.device("cpu"))
    return model


def test_a_graph_with_fewer_guards_has_its_bits_and_is_made_anew_for_another_recipe() -> None:
    torch._dynamo.reset()
    model, counts = converted("tensorwise"), []
    filtered = compiling.without_fixed({})["options"]["guard_filter_fn"]

    def counted(entries: Any) -> list[bool]:
        kept = filtered(entries)
        counts.append(sum(kept) / len(kept))
        return kept

    compiled = torch.compile(model, backend="aot_eager", options={"guard_filter_fn": counted})
    x = torch.randn(16, 32)
    for num_graphs in (1, 1, 2):
        if num_graphs == 2:
            for name, other in converted("rowwise").named_children():
                getattr(model, name).fp8_recipe = other.fp8_recipe
        assert_bitwise(compiled(x), model(x))
        assert len(counts) == num_graphs and counts[0] < 0.7


def test_a_graph_with_gradients_in_one_format_does_not_serve_a_model_with_another() -> None:
    """torch has no guard on what is a model's and a constant of a module as well."""
    torch._dynamo.reset()
    x, found = torch.randn(16, 32), {}
    for grad_dtype in ("e4m3", "e5m2", "e4m3"):
        expected = gradients(converted("delayed", grad_dtype=grad_dtype), x, compiles=False)
        found[grad_dtype] = gradients(converted("delayed", grad_dtype=grad_dtype), x, compiles=True)
        assert_bitwise(found[grad_dtype], expected)
    assert not torch.equal(found["e4m3"], found["e5m2"])


def gradients(model: nn.Module, x: torch.Tensor, *, compiles: bool) -> torch.Tensor:
    """Of the first weight."""
    run = torch.compile(model, backend="aot_eager", **compiling.without_fixed({})) if compiles else model
    run(x).square().sum().backward()
    gradient = model.get_parameter("up.weight").grad
    assert gradient is not None
    return gradient


LENGTH, HEAD_DIM = 32, 16


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return Llama(**sizes, use_cache=False).model.to(torch.bfloat16)


def graphs_and_gradients(model: nn.Module) -> tuple[list[torch.fx.GraphModule], dict[str, Tensor]]:
    """What inductor would be given, recomputation decided; and what one step computes."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 64
    torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids, labels=ids).loss.backward()
    return graphs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def num_sines(graph: torch.fx.GraphModule) -> int:
    return sum(node.target == torch.ops.aten.sin.default for node in graph.graph.nodes)


def test_backward_reads_tables_instead_of_making_them_again() -> None:
    stock, ours = llama(), llama()
    assert len(keep_tables(ours)) == 1 and ours.get_submodule("model.rotary_emb")._forward_hooks
    (_, stock_backward), stock_gradients = graphs_and_gradients(stock)
    (forward, backward), gradients = graphs_and_gradients(ours)
    assert num_sines(stock_backward) > 0, "the partitioner keeps tables by itself now: keep_tables has no purpose"
    assert (num_sines(forward), num_sines(backward)) == (1, 0)
    kept = [node for node in forward.graph.nodes if node.target == torch.ops.fp8_ds.table.default]
    assert [tuple(node.meta["val"].shape) for node in kept] == [(1, LENGTH, HEAD_DIM)] * 2, "cosines and sines"
    for name, gradient in stock_gradients.items():
        assert torch.equal(gradients[name], gradient), name


def test_eager_is_untouched_and_a_second_call_changes_nothing() -> None:
    model = llama()
    (handle,) = keep_tables(model)
    assert keep_tables(model) == [] == keep_tables(pickle.loads(pickle.dumps(copy.deepcopy(model))))
    with torch.profiler.profile() as profiler:
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    assert not [event.name for event in profiler.events() if "fp8_ds" in event.name]
    handle.remove()
    assert not model.get_submodule("model.rotary_emb")._forward_hooks


class Tables(NamedTuple):
    cos: Tensor
    sin: Tensor


class Frequencies(nn.Module):
    """A module with the buffer, whose output is what a test wants it to be."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x * self.inv_freq)


@pytest.mark.parametrize(
    "output",
    [lambda x: x.cos(), lambda x: (x.cos(), 2.0), lambda x: Tables(x.cos(), x.sin())],
    ids=["one", "with a number", "with names"],
)
def test_other_outputs_are_handed_on(output: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3, 4)
    module = Frequencies(output)
    expected = module(x)
    keep_tables(module)
    torch._dynamo.reset()
    got = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_tables_with_a_gradient_keep_it() -> None:
    module = Frequencies(lambda x: (x.cos(), x.sin()))
    keep_tables(module)
    x = torch.ones(3, 4, requires_grad=True)
    torch._dynamo.reset()
    cos, _ = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    cos.sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


class LogitsRun(NamedTuple):
    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]
    tangents: list[list[torch.Size]]


def run_with_logits(*, detaches: bool, has_labels: bool = True, is_training: bool = True) -> LogitsRun:
    """Two steps of a compiled Llama; of the last one, by the model's loss, or by one of the logits without labels.

    tangents: shapes of the gradients that each backward graph takes.
    """
    torch._dynamo.reset()
    model, tangents = llama().train(is_training), []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found = [node.meta["val"].shape for node in graph.graph.nodes if node.name.startswith("tangents")]
        tangents.append(found)
        return make_boxed_func(graph.forward)

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    model.compile(backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    if detaches:
        compiling.DetachedLogits(model)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 64
    for _ in range(2):
        model.zero_grad()
        output = model(input_ids=tokens, **({"labels": tokens} if has_labels else {}))
        loss = output.loss if has_labels else torch.nn.functional.cross_entropy(output.logits[0].float(), tokens[0])
        loss.backward()
    assert list(output) == (["loss", "logits"] if has_labels else ["logits"])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return LogitsRun(float(loss), output.logits.detach(), gradients, tangents)


LOGITS = torch.Size([2, LENGTH, 64])


@pytest.mark.parametrize(
    ("has_labels", "is_training", "tangents"),
    [
        pytest.param(True, True, [torch.Size([])], id="training"),
        pytest.param(False, True, [LOGITS], id="no labels", marks=pytest.mark.slow),
        pytest.param(True, False, [torch.Size([]), LOGITS], id="evaluation"),
    ],
)
def test_logits_beside_a_loss_in_training_have_no_gradient_in_the_graph_and_all_else_is_as_without(
    has_labels: bool, is_training: bool, tangents: list[torch.Size]
) -> None:
    run, stock = (
        run_with_logits(detaches=detaches, has_labels=has_labels, is_training=is_training) for detaches in (True, False)
    )
    assert run.tangents == [tangents] and stock.tangents == [[torch.Size([]), LOGITS] if has_labels else [LOGITS]]
    assert run.loss == stock.loss
    assert_bitwise(run.logits, stock.logits)
    for name, gradient in run.gradients.items():
        assert_bitwise(gradient, stock.gradients[name])


def test_no_frame_is_examined_again_in_a_compiled_step() -> None:
    torch._dynamo.reset()
    model = llama().train()
    model.compile(backend="aot_eager")
    compiling.DetachedLogits(model)
    tokens, examined = torch.arange(LENGTH).view(1, LENGTH), []
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        examined.append(counters["frames"]["total"])
    assert 0 < examined[1] == examined[2]


def test_a_loss_of_logits_beside_the_models_own_raises_what_to_do_and_no_hook_sees_other_logits() -> None:
    model, seen = llama().train(), []
    original = model.forward
    model.compile(backend="aot_eager")
    detached = compiling.DetachedLogits(model)
    model.register_forward_hook(lambda module, args, output: seen.append(output["logits"].requires_grad))
    tokens = torch.arange(LENGTH).view(1, LENGTH)
    for output in (model(input_ids=tokens, labels=tokens), copy.deepcopy(model)(input_ids=tokens, labels=tokens)):
        assert output[1] is output.logits and output["logits"] is output.logits
        with pytest.raises(UnsupportedError, match="Leave labels out of the batch"):
            (output.loss + output.logits.float().log_softmax(-1).mean()).backward()
    assert seen == [True, True]
    assert inspect.signature(model.forward) == inspect.signature(original)
    detached.remove()
    assert model.forward == original


def test_outputs_that_are_not_of_transformers_stay() -> None:
    class Pair(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.linear, self.kind = nn.Linear(4, 4), kind

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return self.kind((("loss", y.mean()), ("logits", y))) if self.kind is dict else (y.mean(), y)

    for kind in (dict, tuple):
        model = Pair(kind)
        model.compile(backend="aot_eager")
        compiling.DetachedLogits(model)
        output = model(torch.ones(2, 4))
        logits = output["logits"] if kind is dict else output[1]
        logits.sum().backward()
        assert model.linear.weight.grad is not None


@pytest.mark.parametrize("factor", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_trainer_with_label_smoothing_and_metrics_trains_and_evaluates_as_without(
    factor: float, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    found: list[Tensor] = []

    def keep(given: Any) -> dict[str, float]:
        found.append(torch.tensor(given.predictions))
        return {}

    tokens = [(torch.arange(LENGTH) + k) % 64 for k in range(4)]
    rows: Any = [{"input_ids": one, "labels": one} for one in tokens]
    for detaches in (False, True):
        torch._dynamo.reset()
        model = llama()
        found.append(next(model.parameters()).detach().clone())
        model.compile(backend="eager")
        if detaches:
            compiling.DetachedLogits(model)
        options = {"use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, learning_rate=0.1, label_smoothing_factor=factor, **options
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=keep)
        trainer.train()
        trainer.evaluate()
        found.append(next(model.parameters()).detach().clone())
    start, stock_logits, stock, _, logits, weight = found
    assert not torch.equal(start, stock)
    assert_bitwise(logits, stock_logits)
    assert_bitwise(weight, stock)


def test_a_functions_forward_has_the_marks_of_its_region() -> None:
    """By the marks of torch 2.11: another number would be another region, whose inputs are kept."""
    inner, outer = torch.fx.Graph(), torch.fx.Graph()
    x = inner.placeholder("x")
    inner.output(inner.call_function(torch.relu, (inner.call_function(torch.neg, (x,)),)))
    forward = torch.fx.GraphModule({}, inner)
    y, body = outer.placeholder("y"), outer.get_attr("forward_body_0")
    node = outer.call_function(torch.ops.higher_order.autograd_function_apply, (body, body, y))
    other = outer.call_function(torch.relu, (node,))
    outer.output(other)
    node.meta.update(ac_graph_id=7, recompute="again")
    other.meta.update(ac_graph_id=7, recompute="again")
    root = torch.nn.Module()
    root.forward_body_0 = forward
    compiling._tag_functions(torch.fx.GraphModule(root, outer))
    marks = [(n.op, n.meta.get("ac_graph_id"), n.meta.get("recompute")) for n in forward.graph.nodes]
    assert marks == [
        ("placeholder", None, None),
        *[("call_function", 7, "again")] * 2,
        ("output", None, None),
    ]
