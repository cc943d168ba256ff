"""transformers' models have no attention mask where none is needed, and their outputs and gradients in any case."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fp8_ds.attention.huggingface import use_backend
from fp8_ds.engine import attention_masks, compiling, patches

BATCH, LENGTH, WINDOW = 2, 12, 6
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA3 = SIZES | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES),
    "Mistral": ("MistralConfig", "MistralForCausalLM", SIZES | {"sliding_window": WINDOW}),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
}
"""Names in transformers, and fields of the configuration."""
WINDOWS = {"Mistral": 2, "Gemma3": 1}
"""Layers with a window, which hides something from `LENGTH` tokens."""


def build(family: str = "Llama", **fields: Any) -> Any:
    """A causal LM with the same weights each time, without dropout. Without a cache its sequences may be packed."""
    config, model, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{"use_cache": False, **sizes, **fields})
    built = getattr(transformers, model)(made).eval()
    built.loss_type = "ForCausalLM"  # GPT-2's is not named so, of which a graph cannot warn
    return built


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A patch record of its own, undone."""
    own = patches.PatchRecord()
    monkeypatch.setattr(attention_masks, "RECORD", own)
    yield own
    own.undo()


IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % 64


def mask(*, left: int = 0, right: int = 0) -> Tensor:
    """Ones, but for padding of the first row."""
    ones = torch.ones(BATCH, LENGTH, dtype=torch.long)
    ones[0, :left] = 0
    ones[0, LENGTH - right :] = 0
    return ones


def packed() -> Tensor:
    """Positions of two sequences a row."""
    return torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, -1)


def prefix() -> Tensor:
    """A mask [batch, 1, length, length] in which all tokens see the first four."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[:, :4] = True
    return visible.expand(BATCH, 1, -1, -1)


def embeddings() -> Tensor:
    return torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(1))


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "ones": lambda: {"attention_mask": mask()},
    "right padding": lambda: {"attention_mask": mask(right=3)},
    "left padding": lambda: {"attention_mask": mask(left=3)},
    "packed": lambda: {"position_ids": packed()},
    "packed, with ones": lambda: {"position_ids": packed(), "attention_mask": mask()},
    "positions in order": lambda: {"position_ids": torch.arange(LENGTH).expand(BATCH, -1)},
    "prefix": lambda: {"attention_mask": prefix()},
    "embeddings": lambda: {"inputs_embeds": embeddings()},
}
NEED_NONE = ("no mask", "ones", "embeddings")
FOUND_BY_A_LOOK = ("positions in order", "packed, with ones")
"""In eager transformers looks at values, and makes no mask either; positions beside a mask are not packed for it."""


def step(model: nn.Module, run: Callable[..., Any], batch: dict[str, Any]) -> dict[str, Tensor]:
    """Logits, and every gradient of the loss."""
    model.zero_grad()
    tokens = {} if "inputs_embeds" in batch else {"input_ids": IDS}
    out = run(**tokens, **batch, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """In the rows and columns that are not padding, which a kernel may fill with anything, too."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def num_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how many layers SDPA had a mask in since it was last asked."""
    seen: list[bool] = []

    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, **kwargs: Any) -> Any:
        seen.append(given is not None)
        return sdpa_attention_forward(module, q, k, v, given, **kwargs)

    def count() -> int:
        found = sum(seen)
        seen.clear()
        return found

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", forward)
    return count


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_eager_bits_and_masks_are_transformers_own(family: str, kind: str, num_masks: Callable[[], int]) -> None:
    model, batch = build(family), BATCHES[kind]()
    expected = step(model, model, batch)
    needed = WINDOWS.get(family, 0) if kind in (*NEED_NONE, *FOUND_BY_A_LOOK) else 2
    assert num_masks() == needed
    assert len(attention_masks.make_fewer_masks(model)) == 2
    assert_same(step(model, model, batch), expected)
    assert num_masks() == needed


@pytest.mark.parametrize("kind", NEED_NONE)
def test_in_eager_positions_of_the_models_own_are_not_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits for the device, as a mask that is moved there does."""
    model = build()
    looked: list[Tensor] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: looked.append(position_ids))
    given: list[Any] = []
    model.model.register_forward_hook(lambda m, args, kwargs, out: given.append(kwargs), with_kwargs=True)
    attention_masks.make_fewer_masks(model)
    step(model, model, BATCHES[kind]())
    assert not looked and given[0].get("attention_mask") is None
    step(model, model, BATCHES["packed"]())
    assert len(looked) == 1


def compiled(model: nn.Module, **options: Any) -> list[list[dict[str, Any]]]:
    """Compile a model as engines do, with the filter of guards, to graphs that run in eager; return what will be the
    arguments of their calls of SDPA, graph by graph."""
    graphs: list[list[dict[str, Any]]] = []
    sdpa = torch._C._nn.scaled_dot_product_attention

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([dict(node.kwargs) for node in graph.graph.nodes if node.target is sdpa])
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=backend, **options, **compiling.without_fixed({}))
    return graphs


@pytest.mark.parametrize(
    ("family", "fields", "kinds"),
    [
        ("Llama", {}, ["no mask", "left padding", "ones", "packed", "prefix"]),
        pytest.param("Llama", {}, ["packed", "no mask"], marks=pytest.mark.slow),
        ("Mistral", {}, ["left padding", "no mask"]),
        pytest.param("Mistral", {"sliding_window": LENGTH}, ["no mask"], marks=pytest.mark.slow),
        ("Gemma3", {}, ["no mask", "right padding"]),
        pytest.param("Qwen2", {}, ["ones"], marks=pytest.mark.slow),
        ("GPT2", {}, ["ones", "left padding"]),
    ],
    ids=str,
)
def test_graphs_have_masks_only_where_needed(family: str, fields: dict[str, Any], kinds: list[str]) -> None:
    model = build(family, **fields)
    expected = {kind: step(model, model, BATCHES[kind]()) for kind in kinds}
    attention_masks.make_fewer_masks(model)
    graphs = compiled(model, fullgraph=True)
    windows = 0 if fields else WINDOWS.get(family, 0)

    def run(**batch: Any) -> Any:
        return model(**attention_masks.without_full_mask((), batch))

    for kind in (*kinds, *kinds):
        before = len(graphs)
        assert_same(step(model, run, BATCHES[kind]()), expected[kind], 2e-5)
        for calls in graphs[before:]:
            given = [call["attn_mask"] is not None for call in calls]
            assert given.count(True) == (windows if kind in NEED_NONE else 2) and len(calls) == 2
            assert [call["is_causal"] for call in calls] == [not one for one in given]
            if family != "GPT2":  # whose heads are not grouped
                assert [call.get("enable_gqa", False) for call in calls] == [not one for one in given]
    assert len(graphs) == len({kind in NEED_NONE or kind for kind in kinds}), "one for all that need no mask"


@pytest.mark.parametrize(("family", "fields"), [("Llama", {}), ("Mistral", {"sliding_window": LENGTH})])
def test_a_model_with_attention_of_ours_is_one_graph(family: str, fields: dict[str, Any]) -> None:
    model = build(family, **fields)
    use_backend(model, "fa3_fp8_emulated", hadamard=False)
    expected = step(model, model, {})
    attention_masks.make_fewer_masks(model)
    graphs = compiled(model, fullgraph=True)
    assert_same(step(model, model, {}), expected, 2e-5)
    assert len(graphs) == 1


def test_graphs_that_end_before_the_mask_serve_batches_of_one_kind() -> None:
    model = build()
    kinds = ["no mask", "left padding", "no mask"]
    expected = [step(model, model, BATCHES[kind]()) for kind in kinds]
    attention_masks.make_fewer_masks(model)
    model.model.embed_tokens.register_forward_hook(torch.compiler.disable(lambda module, args, output: None))
    graphs = compiled(model)
    for kind, wanted in zip(kinds, expected, strict=True):
        assert_same(step(model, model, BATCHES[kind]()), wanted, 2e-5)
    calls = [[call["attn_mask"] is None for call in graph] for graph in graphs if graph]
    assert calls == [[True] * 2, [False] * 2]


def test_other_masks_that_a_model_makes_are_transformers_own() -> None:
    model = build()

    def first_four(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < 4

    def make() -> list[Any]:
        given = (model.config, embeddings())
        return [
            masking_utils.create_causal_mask(*given, mask(left=3), None),
            masking_utils.create_causal_mask(*given, None, None, or_mask_function=first_four),
            masking_utils.create_causal_mask(*given, None, None, and_mask_function=first_four),
            masking_utils.create_bidirectional_mask(*given, mask(left=3)),
        ]

    expected, found = make(), []
    attention_masks.make_fewer_masks(model)
    model.model.layers[0].register_forward_pre_hook(lambda *args: found.extend(make()))
    model(input_ids=IDS)
    assert len(found) == len(expected)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("window", [LENGTH - 1, LENGTH, LENGTH + 1])
def test_a_window_that_hides_nothing_needs_no_mask(window: int, num_masks: Callable[[], int]) -> None:
    model = build("Mistral", sliding_window=window)
    expected = step(model, model, {})
    num_masks()
    attention_masks.make_fewer_masks(model)
    assert_same(step(model, model, {}), expected, 2e-6)
    assert num_masks() == (2 if window < LENGTH else 0)


def test_scores_that_are_capped_stay_in_eager_attention() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=WINDOW, use_cache=False, attn_implementation="eager"
    )
    model: Any = transformers.Gemma2ForCausalLM(config).eval()
    assert config.attn_logit_softcapping is not None
    kinds = ("no mask", "ones", "left padding", "packed")
    expected = {kind: step(model, model, BATCHES[kind]()) for kind in kinds}
    attention_masks.make_fewer_masks(model)
    for kind in kinds:
        assert_same(step(model, model, BATCHES[kind]()), expected[kind])
    graphs = compiled(model, fullgraph=True)
    assert_same(step(model, model, {}), expected["no mask"], 2e-5)
    assert graphs == [[]]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "GPT2"])
def test_caches_and_generation_are_transformers_own(family: str, padding: int) -> None:
    def run(model: Any) -> list[Tensor]:
        given = {"attention_mask": mask(left=padding)} if padding else {}
        first = {"attention_mask": given["attention_mask"][:, :7]} if padding else {}
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            start = model(input_ids=IDS[:, :7], use_cache=True, past_key_values=cache, **first)
            rest = model(input_ids=IDS[:, 7:], use_cache=True, past_key_values=cache, **given)
            made = [
                model.generate(IDS, attention_mask=mask(left=padding), max_new_tokens=4, do_sample=False, **more)
                for more in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"})
            ]
        return [start.logits, rest.logits, *made]

    model = build(family)
    model.generation_config.pad_token_id = 0
    expected = run(model)
    attention_masks.make_fewer_masks(model)
    for found, wanted in zip(run(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Packing(nn.Module):
    """A model around a Llama's that begins a sequence at each token 0 by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = build()

    def forward(self, input_ids: Tensor, **batch: Any) -> Any:
        return self.lm(input_ids=input_ids, position_ids=packed(), **batch)


class PackingLlama(transformers.LlamaModel):
    """The model that makes the masks, with positions that no argument shows."""

    def forward(self, input_ids: Tensor, **batch: Any) -> Any:
        return super().forward(input_ids, position_ids=packed(), **{**batch, "position_ids": None})


@pytest.mark.parametrize("compiles", [False, True])
def test_positions_that_a_model_makes_itself_are_seen(compiles: bool) -> None:
    model: Any = Packing()
    expected = step(model, model, {})
    attention_masks.make_fewer_masks(model)
    if compiles:
        compiled(model)
    assert_same(step(model, model, {}), expected, 2e-5)


def test_models_with_a_forward_of_their_own_or_with_other_attention_are_left_alone() -> None:
    own = build()
    own.model.__class__ = PackingLlama
    encoder = transformers.BertModel(transformers.BertConfig(**SIZES))
    decoder = transformers.BartForCausalLM(
        transformers.BartConfig(vocab_size=64, d_model=32, decoder_layers=1, encoder_layers=1, decoder_ffn_dim=32)
    )
    for model in (own, encoder, decoder, nn.Linear(2, 2)):
        assert not attention_masks.make_fewer_masks(model)
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_another_model_in_another_thread_or_after_an_error_is_left_alone(num_masks: Callable[[], int]) -> None:
    model, other = build(), build()
    expected = step(other, other, BATCHES["packed"]())
    attention_masks.make_fewer_masks(model)
    found: list[Any] = []

    def in_a_thread(*args: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(step(other, other, BATCHES["packed"]())))
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_pre_hook(in_a_thread)
    step(model, model, {})
    handle.remove()

    def fail(*args: Any) -> None:
        raise KeyError("a layer's")

    handle = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a layer's"):
        step(model, model, {})
    found.append(step(other, other, BATCHES["packed"]()))
    for one in found:
        assert_same(one, expected)
    assert len(found) == 2


def test_copies_work_and_nothing_is_left_after_hooks_and_patches_are_gone(record: Any) -> None:
    model = build()
    before = masking_utils.AttentionMaskInterface._global_mapping["sdpa"], masking_utils.find_packed_sequence_indices
    handles = attention_masks.make_fewer_masks(model)
    num_patches = len(record.patches)
    again = attention_masks.make_fewer_masks(pickle.loads(pickle.dumps(copy.deepcopy(model))))
    assert len(record.patches) == num_patches, "once is enough"
    graphs = compiled(model)
    step(model, model, {})
    record.undo()
    assert before == (
        masking_utils.AttentionMaskInterface._global_mapping["sdpa"],
        masking_utils.find_packed_sequence_indices,
    )
    step(model, model, {})
    assert [[call["attn_mask"] is None for call in graph] for graph in graphs] == [[True] * 2, [False] * 2]
    for handle in (*handles, *again):
        handle.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.slow), False])
def test_exported_programs_are_transformers_own(strict: bool) -> None:
    """Their mask is not a constant of the example's length."""

    def ops(model: nn.Module) -> list[str]:
        torch._dynamo.reset()
        program = torch.export.export(model, (), {"input_ids": IDS}, strict=strict)
        return [str(node.target) for node in program.graph.nodes]

    model = build()
    expected = ops(model)
    attention_masks.make_fewer_masks(model)
    assert ops(model) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": mask(left=1)},
        {"attention_mask": mask() * 2},
        {"attention_mask": torch.ones(BATCH, LENGTH + 1)},
        {"attention_mask": torch.ones(BATCH, LENGTH, device="meta")},
        {"attention_mask": prefix()},
        {"position_ids": packed()},
        {"past_key_values": DynamicCache()},
        {"cache": DynamicCache()},  # its name in transformers 5.24
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_a_mask_of_ones_on_the_cpu_of_a_plain_batch_is_dropped(change: dict[str, Any]) -> None:
    """One on a device ("meta" stands for it) is not read."""
    full = {"input_ids": IDS, "attention_mask": mask()}
    assert attention_masks.without_full_mask((), full).keys() == {"input_ids"}
    assert attention_masks.without_full_mask((IDS,), {"attention_mask": mask().bool()}) == {}
    inside = {"input_ids": None, "inputs_embeds": embeddings(), "attention_mask": mask()}
    assert "attention_mask" not in attention_masks.without_full_mask((), inside)
    given = full | change
    assert attention_masks.without_full_mask((), given) is given
    assert attention_masks.without_full_mask((IDS, mask()), full) is full


@pytest.mark.parametrize("is_encoding", [False, True])
def test_a_mask_of_ones_that_accelerate_has_moved_is_dropped(is_encoding: bool, record: Any) -> None:
    """The device is "meta", whose numbers nobody can read."""
    from accelerate import data_loader

    own = data_loader.send_to_device
    attention_masks.make_fewer_masks(build())
    attention_masks.make_fewer_masks(build())
    rows = [{"input_ids": IDS, "attention_mask": mask()}, {"input_ids": IDS, "attention_mask": mask(right=1)}]
    made = [transformers.BatchEncoding(dict(row)) if is_encoding else row for row in rows]
    loader = data_loader.DataLoaderShard(made, device=torch.device("meta"), batch_size=None, collate_fn=lambda x: x)
    full, padded = (dict(batch) for batch in loader)
    assert full["attention_mask"].device.type == "meta"
    assert attention_masks.without_full_mask((), full).keys() == {"input_ids"}
    assert attention_masks.without_full_mask((), padded) is padded
    full["attention_mask"][0, 0] = 0
    assert attention_masks.without_full_mask((), full) is full
    with torch.inference_mode():
        assert "attention_mask" in dict(next(iter(loader)))
    assert data_loader.send_to_device({"labels": IDS}, "meta").keys() == {"labels"}
    record.undo()
    assert data_loader.send_to_device is own


def test_masks_stay_with_models_that_may_expect_one() -> None:
    class Expects(transformers.LlamaForCausalLM):
        def forward(self, attention_mask: Tensor, **batch: Any) -> Any:
            return super().forward(attention_mask=attention_mask * 1, **batch)

    model = build()
    assert attention_masks.is_causal_model(model)
    model.__class__ = Expects
    assert not attention_masks.is_causal_model(model)
    assert len(attention_masks.make_fewer_masks(model)) == 2, "the model inside, which makes the masks"
