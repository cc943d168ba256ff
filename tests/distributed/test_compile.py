"""engine.compile() on a Hugging Face Llama: the bits of eager FP8; no graph break, new graph or kept weight of ours."""

from __future__ import annotations

import inspect
import logging
import math
import operator
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import compiled_and_eager as cells
import pytest
import torch
import training
from support.models import Llama
from support.ranks import on_ranks

from fp8_ds.errors import UnsupportedError

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}, "guard": {"action": "bf16"}}
FUSED = {"activations": {"fused": True}}
STATES = {"optimizer": {"states": "fp8"}}
RELEASE = {"optimizer": {"states": "fp8", "release": True, "release_clipping": "delayed_norm"}}
FREES_AT_ONCE = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
LEAF = {"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}}
NUM_STEPS = 5
LAYER = "model.layers.0"


def build(
    stage: int,
    fp8: dict[str, Any] | None,
    zero: dict[str, Any] | None = None,
    num_layers: int = 1,
    checkpointing: bool = False,
) -> Any:
    """An engine over a seeded Llama whose learning rate changes with every step."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 160, "num_hidden_layers": num_layers, "max_position_embeddings": 2048}
    model = Llama(**sizes, attn_implementation="sdpa", use_cache=False).model
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    schedule = {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": NUM_STEPS}
    config = training.ds_config(stage, fp8, scheduler={"type": "WarmupLR", "params": schedule})
    if fp8 is not None and fp8.get("optimizer", {}).get("release"):
        config["zero_optimization"]["reduce_bucket_size"] = 16_000  # several buckets
    config["zero_optimization"].update(zero or {})
    return training.start(model, config)


def tokens_of(engine: Any, step: int) -> torch.Tensor:
    batches = training.micro_batches(step, torch.distributed.get_world_size())
    return batches[torch.distributed.get_rank()][:, :-1].to(engine.device)


def scale_a_weight(engine: Any, stage: int) -> None:
    """A user's write: other bytes and another scale, until the next optimizer step."""
    import deepspeed

    weight = engine.module.get_submodule(LAYER).mlp.down_proj.weight
    gathered = deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if stage == 3 else nullcontext()
    with gathered, torch.no_grad():
        if stage < 3 or torch.distributed.get_rank() == 0:
            weight.mul_(-1000.0)


def train(engine: Any, stage: int, evaluates: bool = False, after_forward: Any = None) -> list[float]:
    """Losses of this rank. Before step 3 a weight is written, and one evaluation takes place."""
    losses = []
    for step in range(NUM_STEPS):
        if step == 3:
            scale_a_weight(engine, stage)
        if step == 3 and evaluates:
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(input_ids=tokens_of(engine, 99), labels=tokens_of(engine, 99)).loss))
            engine.train()
        tokens = tokens_of(engine, step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        if after_forward is not None:
            after_forward()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


class Events(logging.Handler):
    """Graph breaks that dynamo reports, each with the place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Graph break in user code"):
            self.breaks.append(text)

    def ours(self) -> list[str]:
        """The graph breaks under a frame of this package; what runs the ranks, and the engine, are above them all."""
        import fp8_ds

        package = Path(fp8_ds.__file__).parent
        files = ([Path(name) for name in re.findall(r'File "([^"]+)"', text)] for text in self.breaks)
        above = {package / "testing" / "ranks.py", package / "engine" / "engine.py"}
        inside = [any(f.is_relative_to(package) and f not in above for f in found) for found in files]
        return [text for text, is_inside in zip(self.breaks, inside, strict=True) if is_inside]


@contextmanager
def observed() -> Iterator[Events]:
    """Compile from scratch; see what happens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    events = Events()
    torch._logging.set_logs(graph_breaks=True)
    names = [n for n in logging.root.manager.loggerDict if n.endswith("__graph_breaks")]
    for name in names:
        logging.getLogger(name).addHandler(events)
    try:
        yield events
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(events)
        torch._logging.set_logs()
        torch._dynamo.reset()


@contextmanager
def released() -> Iterator[list[Any]]:
    """References to the memory of every weight that ZeRO-3 releases."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from fp8_ds.zero.sharded import ShardedWeight

    references: list[Any] = []
    stock = ShardedWeight.release

    def release(weight: Any) -> None:
        if weight.payload.data is not None:
            references.append(StorageWeakRef(weight.payload.data.untyped_storage()))
        stock(weight)

    ShardedWeight.release = release  # type: ignore[method-assign]
    try:
        yield references
    finally:
        ShardedWeight.release = stock  # type: ignore[method-assign]


@patch("fp8_ds.engine.step_callbacks.GUARD_EVERY", 2)
def train_both(
    stage: int, fp8: dict[str, Any], is_regional: bool, evaluates: bool, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An eager and a compiled engine that are otherwise the same: losses, FP8 bytes, and what dynamo said.

    Args:
        is_regional: the decoder layers are compiled, one by one.

    Returns:
        Of each engine; "kept": for each forward how many weights it released and how many of these it keeps.
    """
    results = []
    for is_compiled in (False, True):
        engine, kept = build(stage, fp8, **options), []
        with observed() as events, released() as references:

            def look(references: list[Any] = references, kept: list[Any] = kept) -> None:
                kept.append((len(references), sum(not one.expired() for one in references)))
                references.clear()

            for layer in engine.module.model.layers if is_compiled and is_regional else ():
                layer.compile(backend="aot_eager")
            if is_compiled and not is_regional:
                engine.compile(backend="aot_eager")
            losses = train(engine, stage, evaluates, look)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = {"losses": losses, "state": training.fp8_state(engine), "kept": kept}
        results.append(found | {"graphs": graphs, "breaks": len(events.breaks), "ours": events.ours()})
        training.destroy(engine)
    return results[0], results[1]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "fp8", "zero", "checkpointing", "is_regional"),
    [
        (1, 2, DELAYED, {}, False, False),
        (2, 3, {}, LEAF | FREES_AT_ONCE, False, False),
        pytest.param(2, 1, STATES | DELAYED, {}, True, False, marks=pytest.mark.slow),
        pytest.param(2, 2, RELEASE, {}, False, True, marks=pytest.mark.slow),
        pytest.param(2, 3, DELAYED, FREES_AT_ONCE, True, False, marks=pytest.mark.slow),
        pytest.param(2, 3, RELEASE, LEAF | FREES_AT_ONCE, False, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_trains_to_the_bits_of_eager(
    ranks: Any,
    num_ranks: int,
    stage: int,
    fp8: dict[str, Any],
    zero: dict[str, Any],
    checkpointing: bool,
    is_regional: bool,
) -> None:
    """There is no graph break of ours, and a compiled forward keeps no weight that ZeRO-3 has released."""
    pytest.importorskip("transformers")
    options = {"zero": zero, "checkpointing": checkpointing, "num_layers": 2 if checkpointing or is_regional else 1}
    for eager, compiled in ranks(num_ranks).run(train_both, stage, fp8, is_regional, checkpointing, **options):
        assert compiled["losses"] == eager["losses"]
        training.assert_fp8_equals(compiled["state"], eager["state"])
        assert checkpointing or compiled["losses"][3] > compiled["losses"][2] + 0.03  # the write is felt
        assert compiled["ours"] == [] and all(num_kept == 0 for _, num_kept in compiled["kept"])
        if stage == 3:
            assert compiled["breaks"] > 0 and all(num_released > 0 for num_released, _ in compiled["kept"])
        elif not checkpointing:
            # With delayed scales before the first update of the histories and after it; layers share a graph. Learning
            # rate, weights and counters are in no guard of torch's, and fp8.guard, which judges twice, samples nothing.
            assert compiled["graphs"] == (2 if fp8 == DELAYED else 1)


@on_ranks(1)
def test_a_bias_is_added_out_of_place_in_graphs_of_zero_3() -> None:
    """Else torch 2.11 has zeros for all gradients of a bf16 linear with a bias: the Function's output is written."""
    engine = build(3, {})
    linear, written = torch.nn.functional.linear, []
    assert linear.__module__ == "deepspeed.runtime.zero.linear"

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = (node for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes)
        written.extend(node for node in nodes if node.target is operator.iadd)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for shape, has_bias in (((2, 3, 8), True), ((3, 8), True), ((2, 3, 8), False)):
        given = [torch.randn(*one, requires_grad=True) for one in (shape, (4, 8), (4,))[: 2 + has_bias]]
        torch._dynamo.reset()
        expected, found = (
            torch.autograd.grad((run(*given) ** 2).sum(), given)
            for run in (linear, torch.compile(linear, backend=backend, fullgraph=True))
        )
        assert all(map(torch.equal, found, expected)) and all(one.any() for one in found)
    assert written == []
    training.destroy(engine)


def losses_and_masks(stage: int, fp8: dict[str, Any], is_compiled: bool, num_steps: int = 5) -> dict[str, Any]:
    """Of batches with and without padding, in eager or in graphs; and what an engine leaves when it is destroyed."""
    engine = build(stage, fp8)
    masks: list[bool] = []
    sdpa = torch._C._nn.scaled_dot_product_attention

    def backend(graph: Any, inputs: Any) -> Any:
        masks.extend(node.kwargs["attn_mask"] is not None for node in graph.graph.nodes if node.target is sdpa)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    if is_compiled:
        engine.compile(backend=backend)
    losses = []
    for step, padding in enumerate((None, 3, 0, None, 3)[:num_steps]):
        tokens = tokens_of(engine, step)
        given = {} if padding is None else {"attention_mask": torch.ones_like(tokens)}
        if padding:
            given["attention_mask"][0, :padding] = 0
        loss = engine(input_ids=tokens, labels=tokens, **given).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    net = engine.module
    training.destroy(engine)
    torch._dynamo.reset()
    num_hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in net.model.modules())
    return {"losses": losses, "masks": masks, "num_hooks": num_hooks}


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_an_engine_makes_no_mask_where_none_is_needed(ranks: Any, stage: int) -> None:
    """Neither without a mask nor with one of ones, for which padding makes another graph; unless that is switched off,
    and as stock DeepSpeed trains."""
    pytest.importorskip("transformers")
    without = {"without_deepspeed_fixes": ["attention_masks"]}
    runs = [(stage, {}, False), (stage, without, False), (stage, {}, True), (stage, without, True, 1)]
    found = [ranks(1).run(losses_and_masks, *run)[0] for run in runs]
    eager, eager_without, compiled, compiled_without = found
    assert compiled["masks"] == [False, True] and compiled_without["masks"] == [True]
    assert eager["losses"] == eager_without["losses"]
    for one in (compiled, compiled_without):
        assert one["losses"] == pytest.approx(eager["losses"][: len(one["losses"])], rel=1e-3)
    assert all(one["num_hooks"] == 0 for one in found)


def losses_with_and_without_leaves(fp8: dict[str, Any], num_layers: int) -> list[list[float]]:
    """And, with leaves, as docs/compile.md recommends them."""
    found = []
    for zero in ({}, LEAF, LEAF | {"contiguous_gradients": False, "stage3_prefetch_bucket_size": 50_000}):
        engine = build(3, fp8, FREES_AT_ONCE | zero, num_layers)
        found.append(train(engine, 3))
        engine.destroy()
    return found


def test_leaves_of_zero_3_change_no_bit(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for plain, with_leaves, recommended in ranks(2).run(losses_with_and_without_leaves, STATES, 2):
        assert plain == with_leaves == recommended and len(set(plain)) == NUM_STEPS


def run_of_layers(
    zero: dict[str, Any],
    first_compiled: int,
    fp8: dict[str, Any],
    stance: str = "default",
    num_layers: int = 2,
    switches: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a Llama of few layers, whose weights ZeRO-3 releases at once, and compile it twice before a step.

    Args:
        switches: whether checkpointing is switched off and on before a step, as TRL does around generation.
        stance: "force_eager": what is compiled runs in eager, without graphs.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils import get_z3_leaf_modules

    losses, left = [], []
    with observed() as events, torch.compiler.set_stance(stance):
        engine = build(3, fp8, {"stage3_max_reuse_distance": 0} | zero, num_layers, **options)
        for step in range(NUM_STEPS):
            for _ in range(2 * (step == first_compiled)):
                engine.compile(backend="aot_eager")
            if switches and step == 2:
                engine.module.gradient_checkpointing_disable()
                engine.module.gradient_checkpointing_enable({"use_reentrant": False})
            tokens = tokens_of(engine, step)
            loss = engine(input_ids=tokens, labels=tokens).loss
            left.append(sum(p.ds_status != ZeroParamStatus.NOT_AVAILABLE for p in engine.module.parameters()))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    module, prefetched = engine.module, engine.zero_prefetch_bucket_size()
    functions = [getattr(layer, "_gradient_checkpointing_func", None) for layer in module.model.layers]
    found = {"losses": losses, "state": training.fp8_state(engine), "graphs": graphs, "breaks": len(events.breaks)}
    found |= {"leaves": [type(leaf).__name__ for leaf in get_z3_leaf_modules(module)], "prefetched": prefetched}
    training.destroy(engine)
    found["forwards"] = ["forward" in layer.__dict__ for layer in module.modules()]
    found["functions"] = [type(function).__name__ for function in functions]
    return found | {"left": left[-1], "leaves_at_end": len(get_z3_leaf_modules(module))}


@pytest.mark.parametrize(
    ("num_ranks", "first_compiled", "fp8", "checkpointing"),
    [
        (1, 3, DELAYED, False),
        pytest.param(2, 0, {}, False, marks=pytest.mark.slow),
        pytest.param(2, 3, RELEASE, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compile_makes_decoder_layers_leaves_as_leaf_module_in_the_configuration_does(
    ranks: Any, num_ranks: int, first_compiled: int, fp8: dict[str, Any], checkpointing: bool
) -> None:
    """Before the first step, and when DeepSpeed has recorded its trace and released by it.

    Without leaves there are so many graphs that, of the cases that run by default, the one without runs in eager; and
    those have a single layer.
    """
    pytest.importorskip("transformers")

    num_layers = 1 if num_ranks == 1 else 2

    def run(stance: str = "default", **zero: Any) -> list[dict[str, Any]]:
        given = (zero, first_compiled, fp8, stance, num_layers)
        return ranks(num_ranks).run(run_of_layers, *given, checkpointing=checkpointing)

    a_layer, layers = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64, ["LlamaDecoderLayer"] * num_layers
    stance = "force_eager" if num_ranks == 1 else "default"
    for made, named, none in zip(run(), run(**LEAF), run(stance, leaf_module={"classes": []}), strict=True):
        assert made["losses"] == named["losses"] == none["losses"]
        training.assert_fp8_equals(made["state"], named["state"])
        assert (made["graphs"], made["leaves"], made["left"]) == (named["graphs"], layers, named["left"])
        assert made["prefetched"] == named["prefetched"] == a_layer
        if stance == "default":
            assert made["breaks"] <= none["breaks"]
            assert made["graphs"] < none["graphs"] or checkpointing  # which breaks the graph at every layer in any case
        else:
            assert made["graphs"] > 0 == none["graphs"]
        assert (made["leaves_at_end"], none["leaves"], none["prefetched"]) == (0, [], 50_000_000)


@contextmanager
def layers_that_checkpoint_with_their_hooks() -> Iterator[None]:
    """Llama's layers as transformers 5.17 has them."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = partial(torch.nn.Module.__call__, self, **kwargs)
        is_checkpointed = self.gradient_checkpointing and self.training
        return self._gradient_checkpointing_func(function, *args) if is_checkpointed else function(*args)

    forward = inspect.unwrap(LlamaDecoderLayer.forward)
    with patch.multiple(LlamaDecoderLayer, create=True, __call__=call, forward=forward):
        yield


@pytest.mark.parametrize("zero", [{}, pytest.param(LEAF, marks=pytest.mark.slow)], ids=["", "leaf_module"])
@on_ranks(1)
def test_layers_of_zero_3_that_are_checkpointed_with_their_hooks_compile_as_others_do(zero: dict[str, Any]) -> None:
    """Dynamo traces no checkpoint with a hook of ZeRO-3 in it, and would run these layers in eager."""
    pytest.importorskip("transformers")
    usual = run_of_layers(zero, 0, DELAYED, num_layers=1, switches=True, checkpointing=True)
    with layers_that_checkpoint_with_their_hooks():
        older = run_of_layers(zero, 0, DELAYED, num_layers=1, switches=True, checkpointing=True)
    assert older["losses"] == usual["losses"] and older["graphs"] == usual["graphs"]
    training.assert_fp8_equals(older["state"], usual["state"])
    assert older["functions"] == ["CheckpointedForward"] and usual["functions"] == ["partial"]
    assert not any(older["forwards"])


def outputs_of_the_mlp_that_are_kept(stage: int, checkpointing: bool) -> int:
    """Return how many tensors of tokens x ffn a compiled Llama's forward keeps for its backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    engine = build(stage, DELAYED, num_layers=2, checkpointing=checkpointing)
    tokens, kept = tokens_of(engine, 0), []

    def look(graph: Any, inputs: Any) -> Any:
        (returned,) = graph.graph.find_nodes(op="output")
        shapes = [node.meta["val"].shape for node in returned.args[0] if isinstance(node, torch.fx.Node)]
        known = [shape for shape in shapes if all(isinstance(size, int) for size in shape)]  # to compare adds a guard
        kept.extend(shape for shape in known if math.prod(shape) == tokens.numel() * 160)
        return make_boxed_func(graph)

    partition: Any = min_cut_rematerialization_partition
    backend = aot_autograd(
        fw_compiler=look, bw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=partition
    )
    engine.compile(backend=backend)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    training.destroy(engine)
    return len(kept)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1)
def test_a_graph_of_checkpointed_layers_keeps_no_output_of_a_linear(stage: int) -> None:
    """torch 2.11 takes outputs of autograd Functions, as FP8 linears and all linears of ZeRO-3 are, for others, and is
    red here without `compute_functions_again`; 2.13 needs none."""
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    assert outputs_of_the_mlp_that_are_kept(stage, checkpointing=True) == 0
    torch._dynamo.reset()
    assert outputs_of_the_mlp_that_are_kept(stage, checkpointing=False) > 0


@on_ranks(1)
def test_logits_beside_a_compiled_loss_raise_in_a_backward_and_have_their_gradient_without_labels() -> None:
    pytest.importorskip("transformers")
    engine, tokens = build(2, {}), training.micro_batches(0, 1)[0]
    own = engine.module.forward
    for _ in range(2):
        engine.compile(backend="aot_eager")
    output = engine(input_ids=tokens, labels=tokens)
    with pytest.raises(UnsupportedError, match="Leave labels out"):
        engine.backward(output.loss + output.logits.float().square().mean())
    training.destroy(engine)
    assert own == engine.module.forward
    engine = build(2, {"without_deepspeed_fixes": ["logits_gradient"]})
    own = engine.module.forward
    engine.compile(backend="aot_eager")
    assert own == engine.module.forward
    training.destroy(engine)
    engine = build(2, {})
    engine.compile(backend="aot_eager")
    engine.backward(engine(input_ids=tokens).logits.float().square().mean())
    engine.step()
    assert engine.get_global_grad_norm() > 0
    training.destroy(engine)


@on_ranks(1)
def test_capped_logits_of_zero_3_get_no_gradient_of_zeros_in_a_graph_and_have_their_own() -> None:
    """Gemma 2 caps what its head returns: the graph of the loss takes capped logits, and returns none."""
    pytest.importorskip("transformers")
    returned: list[list[torch.Size]] = []

    def look(graph: Any, inputs: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        values = [node.meta["example_value"] for node in output.args[0]]
        returned.append([value.shape for value in values if value.requires_grad])
        return graph.forward

    def train(is_compiled: bool, without: list[str]) -> list[float]:
        torch.manual_seed(0)
        model = Llama("Gemma2", num_hidden_layers=1, final_logit_softcapping=2.0, head_dim=16, use_cache=False).model
        engine = training.start(model, training.ds_config(3, {"without_deepspeed_fixes": without}))
        if is_compiled:
            engine.compile(backend=look)
        found, own = [], engine.module._loss_function if hasattr(engine.module, "_loss_function") else None
        for _ in range(2):
            output = engine(input_ids=tokens_of(engine, 0), labels=tokens_of(engine, 0))
            engine.backward(output.loss + 0.1 * output.logits.float().square().mean())
            engine.step()
            found += [output.loss.item(), float(engine.get_global_grad_norm())]
        assert (own is not None) == (is_compiled and not without)
        module = engine.module
        training.destroy(engine)
        assert not hasattr(module, "_loss_function")
        return found

    def graphs_of_a_loss_with_logits() -> int:
        return sum(torch.Size([]) in shapes and any(len(shape) == 3 for shape in shapes) for shapes in returned)

    expected = train(False, [])
    torch._dynamo.reset()
    assert train(True, []) == expected
    assert any(torch.Size([]) in shapes for shapes in returned)
    assert graphs_of_a_loss_with_logits() == 0
    torch._dynamo.reset()
    assert train(True, ["logits_gradient"]) == expected
    assert graphs_of_a_loss_with_logits() > 0


def losses_with_a_frozen_embedding() -> list[list[float]]:
    found = []
    for is_compiled in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            start = training.start

            def frozen(net: Any, config: dict[str, Any], start: Any = start) -> Any:
                net.get_input_embeddings().requires_grad_(False)
                return start(net, config)

            patch.setattr(training, "start", frozen)
            engine = build(3, {}, {"stage3_max_reuse_distance": 0}, 2)
        if is_compiled:
            engine.compile(backend="aot_eager")
        found.append(train(engine, 3))
        training.destroy(engine)
    return found


def test_a_leaf_that_compile_has_made_trains_though_its_input_needs_no_gradient(ranks: Any) -> None:
    """With `leaf_module` the first backward fails, in stock too."""
    pytest.importorskip("transformers")
    for eager, compiled in ranks(1).run(losses_with_a_frozen_embedding):
        assert compiled == eager


ON_CPU = [
    cells.Cell("tensorwise", "e4m11", "3 leaf", "mixtral", "compile", "evaluation"),
    cells.Cell("delayed", "e4m19", "1", "qwen2", "reduce-overhead", "accumulation"),
    cells.Cell("blockwise", "e4m19", "2", "gemma", "compile", "plain"),
]
"""No GPT-2: torch's LayerNorm (2.13, eager, CPU) adds up its gradients in bf16 and loses up to 0.3 of them."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
@pytest.mark.parametrize(
    ("cell", "only_mlp"),
    [pytest.param(cells.FIRST, True, id=f"{cells.FIRST}, fused MLP")]
    + [pytest.param(cell, False, id=str(cell), marks=pytest.mark.slow) for cell in (cells.FIRST, *ON_CPU)],
)
def test_inductor_trains_as_eager(ranks: Any, cell: cells.Cell, only_mlp: bool) -> None:
    """Cells of tests/gpu/test_compiled_equals_eager.py."""
    pytest.importorskip("transformers")
    ((losses, result),) = ranks(1).run(cells.compare, cell, only_mlp)
    assert cells.exceeded(result) == [], result
    assert cells.jump(losses) >= cells.JUMP, losses
