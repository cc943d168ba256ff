"""engine.compile() on a Hugging Face Llama: the bits of eager FP8; no graph break, new graph or kept weight of ours."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import training

pytestmark = pytest.mark.distributed

DELAYED = {"linear": {"recipe": "delayed"}}
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
    attention: str = "causal",
    prepare: Callable[[Any], None] = lambda model: None,
) -> Any:
    """An engine over a seeded Llama whose learning rate changes with every step.

    attention: "causal" is SDPA that is never given a mask (docs/compile.md); "sdpa" is as the library has it.
    prepare: is called with the model.
    """
    import deepspeed
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    import fp8_ds  # noqa: F401

    AttentionInterface.register("causal", sdpa_attention_forward)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=training.VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    model = LlamaForCausalLM(shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    prepare(model)
    schedule = {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": NUM_STEPS}
    config = training.ds_config(stage, fp8, scheduler={"type": "WarmupLR", "params": schedule})
    if fp8 is not None and fp8.get("optimizer", {}).get("release"):
        config["zero_optimization"]["reduce_bucket_size"] = 16_000  # several buckets
    config["zero_optimization"].update(zero or {})
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]


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
    """What dynamo reports: graph breaks and recompilations, each with the place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks: list[str] = []
        self.recompiled: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Graph break in user code"):
            self.breaks.append(text)
        elif text.startswith("Recompiling function"):
            self.recompiled.append(text)

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
    torch._logging.set_logs(graph_breaks=True, recompiles=True)
    names = [n for n in logging.root.manager.loggerDict if n.endswith(("__graph_breaks", "__recompiles"))]
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


def keeping_tables(model: Any) -> list[str]:
    from fp8_ds.engine.compiling import _keep_outputs

    return [name for name, module in model.named_modules() if _keep_outputs in module._forward_hooks.values()]


def train_both(
    stage: int,
    fp8: dict[str, Any] | None,
    backend: str,
    evaluates: bool = False,
    regional: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """An eager and a compiled engine that are otherwise the same: losses, FP8 bytes, and what dynamo said.

    `regional` compiles the decoder layers only. `kept` has for each compiled forward how many weights it released and
    how many of these it keeps nevertheless, `tables` the modules whose rotary tables a graph makes once, `left` those
    of them when the engine is destroyed.
    """
    result: dict[str, Any] = {"kept": []}
    for kind in ("eager", "compiled"):
        engine = build(stage, fp8, **options)
        with observed() as events, released() as references:

            def look(references: list[Any] = references) -> None:
                result["kept"].append((len(references), sum(not one.expired() for one in references)))
                references.clear()

            if kind == "compiled" and regional:
                for layer in engine.module.model.layers:
                    layer.compile(backend=backend)
            elif kind == "compiled":
                engine.compile(backend=backend)
            result["tables"] = keeping_tables(engine.module)
            losses = train(engine, stage, evaluates, look if kind == "compiled" else None)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        result[kind] = {"losses": losses, "state": {} if fp8 is None else training.fp8_state(engine)}
        model = engine.module
        training.destroy(engine)
        result["left"] = keeping_tables(model)
    breaks, recompiled = len(events.breaks), len(events.recompiled)
    return result | {"graphs": graphs, "breaks": breaks, "recompiled": recompiled, "ours": events.ours()}


def assert_same_bits(result: dict[str, Any]) -> None:
    eager, compiled = result["eager"], result["compiled"]
    assert compiled["losses"] == eager["losses"]
    training.assert_fp8_equals(compiled["state"], eager["state"])


def test_model_is_one_graph_and_delayed_scaling_makes_it_two(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for result in ranks(1).run(train_both, 2, DELAYED, "aot_eager"):
        assert_same_bits(result)
        # Before the first update of the histories and after it. Learning rate, weights and counters are in no guard.
        assert result["graphs"] == 2 and result["ours"] == []
        assert (result["tables"], result["left"]) == (["model.rotary_emb"], [])
        losses = result["eager"]["losses"]
        assert losses[3] > losses[2] + 0.03  # the write is felt


def test_stage_3_has_no_break_of_ours_and_a_compiled_forward_keeps_no_weight(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for result in ranks(2).run(train_both, 3, {}, "aot_eager", zero=LEAF | FREES_AT_ONCE):
        assert_same_bits(result)
        assert result["breaks"] > 0 and result["ours"] == []
        assert len(result["kept"]) == NUM_STEPS
        assert all(num_released >= 7 and num_kept == 0 for num_released, num_kept in result["kept"])


def code_of_hooks(fp8: dict[str, Any] | None) -> list[tuple[str, int]]:
    """Of ZeRO-3's hooks on a compiled model with leaves: name, graphs that dynamo keeps; and how many functions for
    autograd carry their signature."""
    torch._dynamo.reset()
    engine = build(3, fp8, LEAF)
    engine.compile(backend="aot_eager")
    train(engine, 3)
    offload, found = engine.optimizer.parameter_offload, []
    handles = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    for handle in handles:
        hook = inspect.unwrap(handle.hooks_dict_ref()[handle.id])
        if hook.__name__ == "wrapped_fn":  # DeepSpeed's mark for Nsight, one code for all
            hook = inspect.getclosurevars(hook).nonlocals["func"]
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(hook.__code__)
        found.append((hook.__name__, len(entries)))
    modules = [m for m in engine.module.modules() if hasattr(m, "pre_bwd_fn")]
    functions = [function.forward for m in modules for function in (m.pre_bwd_fn, m.post_bwd_fn)]
    carried = [hasattr(function, "__signature__") for function in functions]
    assert {str(inspect.signature(function)) for function in functions} == {"(outputs)", "(output)"}
    offload._remove_module_hooks()
    assert not any(handle.id in handle.hooks_dict_ref() for handle in handles)
    engine.destroy()
    return [*found, ("signatures", sum(carried) if all(carried) else 0)]


def test_hooks_of_zero_3_are_called_and_not_traced(ranks: Any) -> None:
    """What torch makes of them in stock are graphs without an operator, whose guards are looked at in every call."""
    pytest.importorskip("transformers")
    stock, ours = (dict(ranks(2).run(code_of_hooks, one)[0]) for one in (None, {}))
    signatures, none = ours.pop("signatures"), stock.pop("signatures")
    assert stock["_post_forward_module_hook"] > 0 and stock["_pre_backward_module_hook"] > 0
    assert ours == dict.fromkeys(stock, 0)
    assert signatures > 3 and none == 0


def losses_with_and_without_leaves(fp8: dict[str, Any], num_layers: int) -> list[list[float]]:
    """And, with leaves, as docs/compile.md recommends them."""
    found = []
    for zero in ({}, LEAF, LEAF | {"contiguous_gradients": False, "stage3_prefetch_bucket_size": 50_000}):
        engine = build(3, fp8, FREES_AT_ONCE | zero, num_layers)
        found.append(train(engine, 3))
        engine.destroy()
    return found


@pytest.mark.parametrize("fp8", [pytest.param({}, marks=pytest.mark.slow), STATES], ids=["fp32 states", "FP8 states"])
def test_leaves_of_zero_3_change_no_bit(ranks: Any, fp8: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    for plain, with_leaves, recommended in ranks(2).run(losses_with_and_without_leaves, fp8, 2):
        assert plain == with_leaves == recommended and len(set(plain)) == NUM_STEPS


def hints(zero: dict[str, Any], frozen: bool = False, remedy: str = "", compiles: bool = True) -> list[str]:
    """Lines about leaves: of initialize, and of `engine.compile()`."""
    from deepspeed.utils import logger

    found: list[str] = []

    class Hints(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend([record.getMessage()] if "leaf_module" in record.getMessage() else [])

    def prepare(model: Any) -> None:
        model.model.embed_tokens.requires_grad_(not frozen)
        if remedy == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif remedy:
            model.enable_input_require_grads()

    seen = Hints()
    logger.addHandler(seen)
    try:
        engine = build(3, {}, zero, prepare=prepare)
        if compiles:
            engine.compile(backend="eager")
        elif remedy:
            assert len(train(engine, 3)) == NUM_STEPS
    finally:
        logger.removeHandler(seen)
    engine.destroy()
    return found


def test_compile_says_what_leaves_of_zero_3_are_worth_and_how_much_to_prefetch(ranks: Any) -> None:
    pytest.importorskip("transformers")
    (line,), other = ranks(2).run(hints, {})
    assert "a graph of its own" in line and other == []  # rank 0 says it
    assert ranks(2).run(hints, LEAF) == [[], []]
    (line,), _ = ranks(2).run(hints, LEAF | {"stage3_prefetch_bucket_size": 40_000})
    assert "expected at least 43,136" in line and "got 40,000" in line


def test_a_bound_on_live_weights_under_which_leaves_are_not_prefetched_is_told(ranks: Any) -> None:
    pytest.importorskip("transformers")
    live = {"stage3_max_live_parameters": 50_000, "stage3_max_reuse_distance": 0}
    (line,), other = ranks(2).run(hints, LEAF | live, compiles=False)
    assert "stage3_max_live_parameters: expected at least " in line and "got 50,000" in line and other == []
    assert ranks(2).run(hints, LEAF | live | {"stage3_max_live_parameters": 90_000}, compiles=False) == [[], []]
    assert ranks(2).run(hints, live, compiles=False) == [[], []]


def test_leaves_behind_a_frozen_embedding_are_told_what_makes_them_train(ranks: Any) -> None:
    pytest.importorskip("transformers")
    (line,), _ = ranks(2).run(hints, LEAF, frozen=True, compiles=False)
    assert "enable_input_require_grads" in line and "checkpointing" in line
    for zero, remedy in (({}, ""), (LEAF, "checkpointing"), (LEAF, "hook")):
        assert ranks(2).run(hints, zero, True, remedy, False) == [[], []]


def compile_layer(fp8: dict[str, Any]) -> dict[str, Any]:
    """One decoder layer of a running engine as one graph: our ops in forward and backward, and its bits."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    engine = build(1, fp8)
    train(engine, 1)
    layer, model = engine.module.get_submodule(LAYER), engine.module.model
    x = torch.randn(2, 16, 64).bfloat16()
    position = model.rotary_emb(x, torch.arange(16)[None])
    weights = {name: p for name, p in layer.named_parameters() if hasattr(p, "_fp8")}
    ops: dict[str, Counter[str]] = {}

    def count(kind: str) -> Any:
        def compiler(graph: Any, example_inputs: Any) -> Any:
            # An op that writes an argument is itself an argument, of auto_functionalized.
            targets = (one for n in graph.graph.nodes for one in (n.target, *n.args[:1]))
            ops[kind] = Counter(one.name() for one in targets if str(one).startswith("fp8_ds."))
            return make_boxed_func(graph.forward)

        return compiler

    def run(function: Any) -> tuple[torch.Tensor, ...]:
        """The layer's autograd graph by itself: DeepSpeed's hooks would reduce these gradients."""
        here = x.clone().requires_grad_()
        output = function(here, position_embeddings=position)
        return output, *torch.autograd.grad(output.float().square().sum(), [here, *weights.values()])

    expected = run(layer)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    got = run(torch.compile(layer, backend=backend, fullgraph=True))
    is_same = [bool(torch.equal(a, b) and a.isfinite().all()) for a, b in zip(got, expected, strict=True)]
    torch._dynamo.reset()
    training.destroy(engine)
    return {"is_same": is_same, "ops": ops, "num_weights": len(weights)}


def test_decoder_layer_is_one_graph_that_quantises_each_input_once(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for result in ranks(1).run(compile_layer, {}):
        assert result["num_weights"] == 7 and len(result["is_same"]) == 9 and all(result["is_same"])
        # Inputs of q, k and v; of o; of gate and up; of down. Seven grad_outputs, seven products and twice seven.
        assert result["ops"] == {
            "forward": {"fp8_ds::quantize_and_transpose_tensorwise": 4, "fp8_ds::scaled_mm": 7},
            "backward": {
                "fp8_ds::quantize_and_transpose_tensorwise": 7,
                "fp8_ds::scaled_mm": 14,
                "fp8_ds::transpose": 7,
            },
        }


def test_fused_mlp_of_a_decoder_layer_is_in_its_graph(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for result in ranks(1).run(compile_layer, FUSED):
        # The product is made in FP8; in backward its columns and the gradients, whose columns are transposed.
        assert result["ops"] == {
            "forward": {"fp8_ds::quantize_and_transpose_tensorwise": 3, "fp8_ds::scaled_mm": 7, "fp8_ds::swiglu": 1},
            "backward": {
                "fp8_ds::quantize_and_transpose_tensorwise": 5,
                "fp8_ds::scaled_mm": 14,
                "fp8_ds::swiglu_backward_and_columns": 1,
                "fp8_ds::transpose": 7 + 2,
            },
        }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_decoder_layer_is_one_graph_with_every_recipe(ranks: Any, recipe: str) -> None:
    pytest.importorskip("transformers")
    for result in ranks(2).run(compile_layer, {"linear": {"recipe": recipe}}):
        assert result["num_weights"] == 7 and all(result["is_same"])
        assert sum(num for op, num in result["ops"]["forward"].items() if "quantize" in op) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fp8", "checkpointing"),
    [({}, False), ({}, True), (DELAYED, True), (STATES, False), (STATES | DELAYED, False), (RELEASE, False)],
    ids=["tensorwise", "tensorwise, checkpointing", "delayed, checkpointing", "states", "states, delayed", "release"],
)
@pytest.mark.parametrize(
    ("stage", "zero"),
    [(1, {}), (2, {}), (3, FREES_AT_ONCE), (3, LEAF | FREES_AT_ONCE)],
    ids=["stage 1", "stage 2", "stage 3", "stage 3, leaves"],
)
def test_compiled_trains_to_the_bits_of_eager(
    ranks: Any, stage: int, zero: dict[str, Any], fp8: dict[str, Any], checkpointing: bool
) -> None:
    pytest.importorskip("transformers")
    options = {"num_layers": 2, "checkpointing": checkpointing, "zero": zero}
    for result in ranks(2).run(train_both, stage, fp8, "aot_eager", True, **options):
        assert_same_bits(result)
        assert result["ours"] == [] and all(num_kept == 0 for _, num_kept in result["kept"])
        if stage < 3 and not checkpointing:
            assert result["graphs"] == (3 if "linear" in fp8 else 2)


def train_without_limit(stage: int, fp8: dict[str, Any] | None) -> dict[str, Any]:
    """Every graph is made and counted: past the limit torch runs a function in eager, stock's linears before ours."""
    with torch._dynamo.config.patch(recompile_limit=100):
        return train_both(stage, fp8, "aot_eager", True, num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "fp8"), [(1, {}), (1, FUSED), (2, {}), (3, {})], ids=str)
def test_fp8_breaks_and_recompiles_no_more_than_stock(ranks: Any, stage: int, fp8: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    stock, ours = (ranks(2).run(train_without_limit, stage, one)[0] for one in (None, fp8))
    assert ours["breaks"] <= stock["breaks"] if stage == 3 else ours["breaks"] == stock["breaks"]
    for counted in ("graphs", "recompiled"):  # one more with torch 2.11: the hook that keeps rotary tables
        assert ours[counted] <= stock[counted] + (stage == 3), counted


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_compiled_one_by_one_share_a_graph_and_release_gradients(ranks: Any, stage: int) -> None:
    pytest.importorskip("transformers")
    options = {"num_layers": 2, "zero": LEAF if stage == 3 else {}}
    for result in ranks(2).run(train_both, stage, RELEASE, "aot_eager", regional=True, **options):
        assert_same_bits(result)
        assert result["ours"] == [] and (stage == 3 or result["graphs"] == 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
@pytest.mark.parametrize(
    ("stage", "zero", "fp8", "attention"),
    [
        (1, {}, {}, "causal"),
        (1, {}, {}, "sdpa"),
        (1, {}, DELAYED, "causal"),
        (2, {}, STATES, "causal"),
        (3, {}, {}, "causal"),
        (3, LEAF, DELAYED, "causal"),
    ],
    ids=["tensorwise", "tensorwise, mask", "delayed", "states", "stage 3", "stage 3, leaves, delayed"],
)
def test_inductor_trains_like_eager(
    ranks: Any, stage: int, zero: dict[str, Any], fp8: dict[str, Any], attention: str
) -> None:
    """It fuses what surrounds the linears, without bf16 roundings in between: other last bits of their inputs."""
    pytest.importorskip("transformers")
    for result in ranks(2).run(train_both, stage, fp8, "inductor", zero=zero, attention=attention):
        eager, compiled = result["eager"]["losses"], result["compiled"]["losses"]
        assert max(abs(a - b) for a, b in zip(eager, compiled, strict=True)) < 0.03
        assert result["ours"] == []
