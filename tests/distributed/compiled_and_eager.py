"""Compiled against eager from the same states, for cells of recipe, states, stage, model, mode and feature.

An eager engine trains eight steps at a learning rate that makes its loss jump and saves its state before each. Every
other engine of the cell loads each of these states, takes the same batch forward and backward, and its loss, gradients
and amaxes are compared before the step. Runs inside the ranks of a pool, on a CPU or a GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import test_checkpoint
import torch
import training
from torch import Tensor

NUM_STEPS, VOCABULARY, LENGTH = 8, 512, 256
LEARNING_RATE = 3e-3
JUMP = 1.01
"""The eager loss of some step is at least this many times that of the step before."""

CAPS = {"loss": 0.01, "cosine": 0.01, "norm": 0.05, "amax": 0.10}
"""Largest difference that is ever accepted. Relative, but "cosine", which is 1 - cosine; of gradients, one by one."""
FLOORS = {"loss": 1e-3, "cosine": 4e-3, "norm": 0.025, "amax": 0.05}
"""Smallest bound. Inductor leaves out roundings to bf16, which moves some codes of FP8 by one: on a CPU losses by up to
5e-4, cosines by 3e-3, norms by 0.02 and amaxes by 0.06, unfused as fused, and which moves more is chance."""

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", SHAPE | {"num_key_value_heads": 2}),
    "mistral": ("Mistral", GROUPED),
    "gemma": ("Gemma", GROUPED),
    "gpt2": ("GPT2", {"n_embd": 256, "n_layer": 2, "n_head": 4, **NO_DROPOUT}),
    # Every token goes to every expert: at a near tie a rounding would choose another, and gradients differ for good.
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 4}),
}
"""Name in transformers, and configuration. Sizes are multiples of 128, of which the recipe "blockwise" makes blocks."""
FUSIBLE = ("llama", "qwen2", "mistral")
"""Those whose graphs `"activations": {"fused": true}` changes. Of a Mixtral it fuses norms, which a graph does not."""


class Cell(NamedTuple):
    recipe: str
    states: str
    stage: str
    model: str
    mode: str
    feature: str

    def __str__(self) -> str:
        return "-".join(self)


AXES = Cell(  # type: ignore[arg-type]
    recipe=("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"),
    states=("fp32", "e4m19", "e4m11"),
    stage=("1", "2", "3", "3 leaf"),
    model=tuple(MODELS),
    mode=("compile", "reduce-overhead"),
    feature=("plain", "accumulation", "checkpointing", "evaluation", "resume"),
)
FIRST = Cell("delayed", "fp32", "2", "llama", "compile", "plain")
"""Inductor once took two amaxes, which one op writes, for overlapping memory in it when it was fused."""


# --- cells: each pair of values of two axes is in one of them ---


def is_valid(cell: Cell) -> bool:
    """Whether there is such a cell: docs/compile.md on CUDA graphs, docs/huggingface.md on Conv1D and experts."""
    one_scale = cell.recipe in ("tensorwise", "delayed")
    return (cell.mode == "compile" or cell.stage in ("1", "2")) and (cell.model not in ("gpt2", "mixtral") or one_scale)


def pairs(cell: Cell) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(cell), 2))


@functools.cache
def covering_cells() -> list[Cell]:
    """Few valid cells that hold every pair that a valid cell holds, the most telling first. Greedy, deterministic."""
    left = {cell: pairs(cell) for cell in map(Cell._make, itertools.product(*AXES)) if is_valid(cell)}
    missing = set().union(*left.values()) - left[FIRST]
    found = [FIRST]
    while missing:
        best = max(left, key=lambda cell: len(left[cell] & missing))
        missing -= left[best]
        found.append(best)
    return found


# --- engines ---


def build(cell: Cell, fused: bool, shape: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    name, usual = MODELS[cell.model]
    config = getattr(transformers, f"{name}Config")(
        **{**usual, **shape}, vocab_size=VOCABULARY, use_cache=False, attn_implementation="sdpa"
    )
    net = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    layers = net.transformer.h if name == "GPT2" else net.model.layers
    if cell.feature == "checkpointing":
        net.gradient_checkpointing_enable({"use_reentrant": False})
    zero: dict[str, Any] = {}
    if cell.stage == "3 leaf":
        zero["leaf_module"] = {"classes": [f"{type(layers[0]).__module__}.{type(layers[0]).__qualname__}"]}
    fp8: dict[str, Any] = {"linear": {"recipe": cell.recipe, "grad_dtype": "e4m3"}, "activations": {"fused": fused}}
    if cell.states != "fp32":
        fp8["optimizer"] = {"states": "fp8", "master": cell.states}
    config = training.ds_config(
        int(cell.stage[0]),
        fp8,
        gradient_accumulation_steps=2 if cell.feature == "accumulation" else 1,
        optimizer={"params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "torch_adam": True}},
        zero_optimization=zero,
    )
    return training.start(net, config)


def tokens_of(engine: Any, number: int) -> Tensor:
    """int64 [MICRO_BATCH, LENGTH]: learnable, affine modulo the vocabulary."""
    generator = torch.Generator().manual_seed(1000 + number)
    start = torch.randint(0, VOCABULARY, (training.MICRO_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (training.MICRO_BATCH, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH)) % VOCABULARY).to(engine.device)


def step_of(engine: Any, cell: Cell, step: int) -> dict[str, Any]:
    """Train one step: losses, and gradients and amaxes as they are before the optimizer's step."""
    from deepspeed.utils import safe_get_full_grad

    seen: dict[str, Any] = {"losses": []}

    def forward(number: int) -> Tensor:
        tokens = tokens_of(engine, number)
        loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
        seen["losses"].append(float(loss))
        return loss

    if cell.feature == "evaluation":
        engine.eval()
        with torch.no_grad():
            forward(500 + step)
        engine.train()
    num = engine.gradient_accumulation_steps()
    for number in range(step * num, (step + 1) * num):
        engine.backward(forward(number))
        if engine.is_gradient_accumulation_boundary():
            parameters = engine.module.named_parameters()
            seen["grads"] = {name: safe_get_full_grad(p).float().clone() for name, p in parameters}
            history = engine.fp8.history
            seen["amaxes"] = None if history is None else history.amax_local.clone()
        engine.step()
    return seen


def observe(
    cell: Cell,
    fused: bool,
    is_compiled: bool,
    folder: str,
    states: list[Any],
    first: int = 0,
    only_mlps: bool = False,
    **shape: Any,
) -> list[dict[str, Any]]:
    """What `step_of` sees in each step of an engine; the first one of a cell writes `folder` and `states`.

    Args:
        first: step to begin with.
        only_mlps: compile the layers' MLPs, one by one, and not what is around them.
        shape: fields of the model's configuration that differ from those of `MODELS`.
    """

    engine, saves, seen = build(cell, fused, shape), not states, []
    for step in range(first, NUM_STEPS):
        if cell.feature == "resume" and step == NUM_STEPS // 2 and not saves:
            training.destroy(engine)
            engine = build(cell, fused, shape)
        if saves:
            engine.save_checkpoint(folder, tag=str(step))
        else:
            engine.load_checkpoint(folder, tag=str(step))
            # DeepSpeed (0.19.8) unlinks moments from parameters in a load, and links them once in an engine's life.
            fp8 = getattr(engine.optimizer, "fp8", None)
            if fp8 is None or fp8.masters.states is None:  # FP8 states are linked for good
                engine.optimizer._hp_optimizer_states_linked = False
        # Moments are there from the first step on.
        state = test_checkpoint.snapshot(engine) if step else None
        if saves:
            states.append(state)
        elif state is not None:
            different = [name for name, value in states[step].items() if not torch.equal(state[name], value)]
            assert not different, f"step {step}: expected the saved state, but {different} differ"
        # A resumed run has loaded before it compiles; the others had no scales yet.
        parts = [layer.mlp for layer in engine.module.model.layers] if only_mlps else [engine.module]
        if is_compiled and not parts[0]._compiled_call_impl:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            how = {} if cell.mode == "compile" else {"mode": cell.mode}
            if only_mlps:
                for mlp in parts:
                    mlp.compile(**how)
            else:
                engine.compile(compile_kwargs=how)
        seen.append(step_of(engine, cell, step))
    assert not is_compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    training.destroy(engine)
    return seen


@contextmanager
def graphs_made_anew() -> Iterator[None]:
    """None comes from a cache on disk, whose key does not hold which tensors share a storage; and past torch's limit on
    graphs of a function, where that runs in eager from there on, is an error."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
    ):
        yield
    torch._dynamo.reset()


# --- comparison ---


Worst = tuple[float, str]
"""A difference, and the step and parameter or slot that it is of."""


def relative(expected: float, got: float) -> float:
    """Infinity or NaN where only one of them is zero, or not finite."""
    return 0.0 if expected == got else math.inf if expected == 0.0 else abs(got / expected - 1.0)


def differences(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> dict[str, Worst]:
    """The largest difference of each kind of `CAPS` over all steps, parameters and slots."""
    found: dict[str, list[Worst]] = {kind: [(0.0, "nowhere")] for kind in CAPS}
    for step, (left, right) in enumerate(zip(expected, got, strict=True)):
        for a, b in zip(left["losses"], right["losses"], strict=True):
            found["loss"].append((relative(a, b), f"step {step}"))
        assert left["grads"].keys() == right["grads"].keys()
        for name, grad in left["grads"].items():
            a, b = grad.double().flatten(), right["grads"][name].double().flatten()
            norms, where = (float(a.norm()), float(b.norm())), f"step {step}, {name}"
            product = norms[0] * norms[1]
            found["norm"].append((relative(*norms), where))
            cosine = float(a @ b) / product if product else float(norms[0] == norms[1])
            found["cosine"].append((1.0 - cosine, where))
        if left["amaxes"] is not None:
            for slot, (a, b) in enumerate(zip(left["amaxes"].tolist(), right["amaxes"].tolist(), strict=True)):
                kind = "grad_output" if slot % 2 else "input"
                found["amax"].append((relative(a, b), f"step {step}, {kind} of FP8 layer {slot // 2}"))
    # A NaN is the worst of all.
    return {kind: max(all_, key=lambda one: math.inf if math.isnan(one[0]) else one[0]) for kind, all_ in found.items()}


def exceeded(result: dict[str, dict[str, Worst]]) -> list[str]:
    """What is past its bound: twice what compiled code shows unfused, from `FLOORS` up to `CAPS`; else `CAPS`."""
    found = []
    for name, worst in result.items():
        for kind, (value, where) in worst.items():
            bound = CAPS[kind]
            if name == "compiled, fused" and "compiled" in result:
                bound = min(bound, max(2 * result["compiled"][kind][0], FLOORS[kind]))
            if not value <= bound:
                found.append(f"{name}: {kind} differs by {value:.3g}, {where}; expected at most {bound:.3g}")
    return found


def jump(losses: list[float]) -> float:
    """The largest factor between two steps."""
    return max(after / before for before, after in itertools.pairwise(losses))


def compare(cell: Cell, only_mlp: bool = False) -> tuple[list[float], dict[str, dict[str, Worst]]]:
    """Losses of eager, and how far engines of the cell are from eager ones, or a fused eager one from the other.

    Args:
        only_mlp: compare fused ones of a single layer alone, of which its MLP is compiled, from the second step on:
            the first, which has no scales yet, has graphs of its own.
    """
    states: list[Any] = []
    result: dict[str, dict[str, Worst]] = {}
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with graphs_made_anew(), tempfile.TemporaryDirectory(dir=in_memory) as folder:
        shape = {"num_hidden_layers": 1} if only_mlp else {}
        eager = observe(cell, only_mlp, False, folder, states, **shape)
        fused = eager
        if not only_mlp:
            result["compiled"] = differences(eager, observe(cell, False, True, folder, states))
        if not only_mlp and cell.model in FUSIBLE:
            fused = observe(cell, True, False, folder, states)
            result["eager, fused"] = differences(eager, fused)
        if cell.model in FUSIBLE:
            first = int(only_mlp)
            seen = observe(cell, True, True, folder, states, first, only_mlp, **shape)
            result["compiled, fused"] = differences(fused[first:], seen)
    return [seen["losses"][-1] for seen in eager], result
