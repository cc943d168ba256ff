"""Megatron-core's layers in FP8 without Transformer Engine: trained over gloo, against Megatron's own. A weight goes
into FP8 once in each step, and never lags behind the optimizer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

import megatron_training as mt
import torch
from megatron_training import Layout
from support.collectives import count_collectives
from support.ranks import RankError, RankPool, on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from fp8_ds.testing import sqnr_db

pytestmark = pytest.mark.distributed

NUM_LINEARS = 4 * mt.NUM_LAYERS
PARTS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
Ranks = Callable[[int], RankPool]
LAYOUTS = {
    "dp2": Layout(),
    "dp2_distributed_optimizer": Layout(distributed_optimizer=True),
    "tp2": Layout(tp=2),
    "tp2_sp": Layout(tp=2, sp=True),
    "tp2_sp_bf16_distributed_optimizer": Layout(tp=2, sp=True, bf16=True, distributed_optimizer=True),
    "pp2": Layout(pp=2),
}


class _CountProducts(TorchDispatchMode):
    """FP8 GEMMs, by torch's op."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("fp8_ds.scaled_mm")
        return func(*args, **(kwargs or {}))


def gradients(layout: Layout) -> dict[str, Any]:
    """After one iteration: main_grad by name, FP8 products, bytes gathered; the optimizer does not step."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # 0.16.1 reads this name in the router, and defines it only where Transformer Engine is.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    with mt.megatron(layout):
        training = mt.Training(layout)
        training.optimizer.step = lambda: (True, 0.0, 0)
        data = mt.batches(1)
        training.step(data)  # the first batch of tensor-parallel layers is checked
        with _CountProducts() as products, count_collectives() as moved:
            training.step(mt.batches(1))
        found = {name: p.main_grad.clone() for name, p in training.module.named_parameters()}
        recipes = {one.fp8_recipe.name for one in training.module.modules() if getattr(one, "fp8_recipe", None)}
        return {
            "gradients": found,
            "products": products.count,
            "gathered": moved.num_bytes["all_gather"],
            "recipes": recipes,
        }


def of_stock(layout: Layout) -> Layout:
    return dataclasses.replace(layout, recipe=None, attention=None, settings={}, fp8_format="hybrid")


@pytest.fixture(scope="module")
def gradients_of(ranks: Ranks) -> Callable[[Layout], list[dict[str, Any]]]:
    """`gradients`, computed once for each layout."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(layout: Layout) -> list[dict[str, Any]]:
        if repr(layout) not in known:
            known[repr(layout)] = ranks(2).run(gradients, layout)
        return known[repr(layout)]

    return of


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2_distributed_optimizer", marks=pytest.mark.slow),
        pytest.param("tp2", marks=pytest.mark.slow),
        "tp2_sp_bf16_distributed_optimizer",
        "pp2",
    ],
)
def test_losses_follow_megatrons_own_layers(ranks: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    other = dataclasses.replace(of_stock(layout), sp=False, distributed_optimizer=False)
    fp8, stock = (ranks(2).run(mt.train, one, lr=1e-3)[-1]["losses"] for one in (layout, other))
    assert fp8 != stock
    assert max(abs(one - other) for one, other in zip(fp8, stock, strict=True)) < 0.01
    assert fp8[-1] < fp8[0] - 0.15


TP2_SP = LAYOUTS["tp2_sp"]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Another dispatcher reads its splits from tensors that it expects on a GPU.
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_token_dispatcher_type": "allgather"}
SHARED = {  # these take their sums from their linears, once these are built
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 128,
    "moe_shared_expert_overlap": True,
}
FIRST_LAST = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
OWN_FIELDS = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
"""What the stock script passes on, where there is no wrapper."""


@pytest.mark.parametrize(
    ("layout", "other", "least_db", "num_products"),
    [
        pytest.param(Layout(), None, 15, 3 * NUM_LINEARS, id="dp2"),
        pytest.param(Layout(tp=2), None, 15, 3 * NUM_LINEARS, id="tp2", marks=pytest.mark.slow),
        pytest.param(TP2_SP, None, 15, 3 * NUM_LINEARS, id="tp2-sp"),
        pytest.param(
            Layout(tp=2, sp=True, recipe="rowwise"), None, 15, 3 * NUM_LINEARS, id="rowwise", marks=pytest.mark.slow
        ),
        pytest.param(
            Layout(tp=2, sp=True, recipe="blockwise", fp8_format="e4m3"), None, 15, 3 * NUM_LINEARS, id="blockwise"
        ),
        pytest.param(
            Layout(tp=2, sp=True, recipe="rowwise_with_gw_hp", settings={"gather": "bf16"}),
            None,
            15,
            2 * NUM_LINEARS,
            id="rowwise_with_gw_hp",
        ),
        pytest.param(Layout(config=FIRST_LAST), None, 15, 3 * NUM_LINEARS // 2, id="first-and-last-layers-bf16"),
        pytest.param(
            Layout(config=MOE), None, 8, 3 * (2 + 2 * 4) * mt.NUM_LAYERS, id="experts", marks=pytest.mark.slow
        ),
        pytest.param(
            Layout(config=MOE, tp=2, sp=True, ep=2), None, 8, 3 * (2 + 2 * 2) * mt.NUM_LAYERS, id="experts-ep2"
        ),
        pytest.param(
            Layout(config=SHARED, tp=2, sp=True), None, 8, 3 * (4 + 2 * 2) * mt.NUM_LAYERS, id="shared-experts"
        ),
        pytest.param(Layout(recipe=None, attention="reference"), None, 80, 0, id="attention"),
        pytest.param(Layout(tp=2, sp=True, recipe=None, attention="fa3_fp8_emulated"), None, 15, 0, id="fp8-attention"),
        pytest.param(of_stock(TP2_SP), Layout(tp=2, recipe=None), 60, 0, id="norms-of-shards-count-all-tokens"),
        pytest.param(Layout(tp=2, sp=True, config=RECOMPUTE), TP2_SP, None, 4 * NUM_LINEARS, id="recomputed"),
        pytest.param(Layout(tp=2, sp=True, config=OWN_FIELDS), TP2_SP, None, 3 * NUM_LINEARS, id="megatrons-fields"),
    ],
)
def test_every_gradient_is_that_of_megatrons_own_layers_or_of_another_layout(
    gradients_of: Any, layout: Layout, other: Layout | None, least_db: float | None, num_products: int
) -> None:
    """Of models with experts, those of the experts. Without a bound: bit for bit."""
    for ours, theirs in zip(gradients_of(layout), gradients_of(other or of_stock(layout)), strict=True):
        assert ours["products"] == num_products * mt.NUM_MICRO and (other or theirs["products"] == 0)
        assert ours["gradients"].keys() == theirs["gradients"].keys() and ours["recipes"] <= {layout.recipe}
        for parameter, grad in theirs["gradients"].items():
            if "num_moe_experts" in layout.config and "experts" not in parameter:
                continue
            if least_db is None:
                assert torch.equal(grad, ours["gradients"][parameter]), parameter
            else:
                assert sqnr_db(grad, ours["gradients"][parameter]) > least_db, parameter
        is_fp8 = num_products > 0 or layout.attention == "fa3_fp8_emulated"
        differ = [name for name, grad in theirs["gradients"].items() if not torch.equal(grad, ours["gradients"][name])]
        assert (not differ) == (least_db is None) or not is_fp8


def test_sequence_parallel_gathers_a_third_of_the_bytes(gradients_of: Any) -> None:
    """Stock gathers a column's input twice and a row's grad_output once, in bf16; ours each once, in FP8."""
    layout = Layout(tp=2, sp=True, bf16=True)
    fp8, stock = (gradients_of(one)[0]["gathered"] for one in (layout, of_stock(layout)))
    tokens, num = mt.LENGTH * mt.MICRO_BATCH * mt.NUM_MICRO, 2 * mt.NUM_LAYERS
    payload = tokens * mt.WIDTH * num
    rest = stock - 2 * payload * 3  # the head's, which both have
    scales = 2 * 4 * 2 * num * mt.NUM_MICRO
    assert fp8 == rest + payload * 2 + scales


def state_dicts(layout: Layout) -> None:
    """Stock and ours have the same keys, and load each other's, sharded and plain."""
    with mt.megatron(layout):
        stock, ours = (mt.build(one) for one in (of_stock(layout), layout))
        metadata = {"dp_cp_group": _dp_cp_group()}
        one, other = (model.sharded_state_dict(prefix="", metadata=metadata) for model in (stock, ours))
        assert list(one) == list(other)
        for key, sharded in one.items():
            same = ("key", "local_shape", "global_shape", "global_offset", "replica_id", "axis_fragmentations")
            assert all(getattr(sharded, name, None) == getattr(other[key], name, None) for name in same), key
        for source, target in ((stock, ours), (ours, stock)):
            with torch.no_grad():
                for p in source.parameters():
                    p.normal_()
            target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True)
            assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def _dp_cp_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@pytest.mark.parametrize(("name", "attention"), [("dp2", "reference"), ("tp2_sp", None), ("pp2", "reference")])
def test_checkpoints_are_those_of_the_stock_spec(ranks: Ranks, name: str, attention: str | None) -> None:
    ranks(2).run(state_dicts, dataclasses.replace(LAYOUTS[name], attention=attention))


def test_a_recipe_that_cannot_travel_in_fp8_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"Add --fp8-tp-gather bf16"):
        ranks(2).run(mt.train, Layout(tp=2, sp=True, recipe="rowwise_with_gw_hp"))


@on_ranks(2)
def test_running_megatron_on_cpu_is_undone() -> None:
    from megatron_patches import patches

    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    module_cuda = torch.nn.Module.cuda
    mt.train(Layout(tp=2, sp=True), num_steps=1)
    changed = [name for name, value in before.items() if getattr(torch.cuda, name) is not value]
    assert changed == [] and torch.nn.Module.cuda is module_cuda and patches.applied() == ()


def health(layout: Layout, evaluates: bool = False) -> dict[str, Any]:
    """Two iterations, of which the second is sampled; evaluation of other text comes before it and after it."""
    from types import SimpleNamespace

    from megatron_patches.health import Health

    with mt.megatron(layout):
        training = mt.Training(layout, lr=0.0)
        args = SimpleNamespace(
            seq_length=mt.LENGTH,
            padded_vocab_size=mt.VOCABULARY,
            hidden_size=mt.WIDTH,
            tensor_model_parallel_size=layout.tp,
            fp8_health_interval=2,
        )
        watched = Health(args, [training.model])
        data = mt.batches(2)
        for iteration in (1, 2):
            training.step(data)
            watched.after_iteration(iteration)
            if evaluates:
                training.evaluate(iter(torch.zeros(mt.NUM_MICRO, mt.MICRO_BATCH, mt.LENGTH + 1, dtype=torch.long)))
        line, scalars = watched.report()
        module = training.module
        weights = {name: float(p.detach().abs().max()) for name, p in module.named_parameters() if "linear_" in name}
        recipes = {type(one.fp8_recipe).__name__ for one in module.modules() if hasattr(one, "fp8_recipe")}
        return {"line": line, "scalars": scalars, "weights": weights, "recipes": recipes}


@pytest.mark.parametrize("name", ["tp2_sp", "pp2"])
def test_health_is_of_all_ranks_and_stages_and_not_of_evaluation(ranks: Ranks, name: str) -> None:
    first, second = ranks(2).run(health, LAYOUTS[name])
    assert ranks(2).run(health, LAYOUTS[name], evaluates=True) == [first, second]
    assert first["line"] == second["line"] and first["scalars"] == second["scalars"]
    scalars = first["scalars"]
    places = [f"layers.{n}.{part}" for n in range(1, mt.NUM_LAYERS + 1) for part in PARTS]
    for kind in ("input", "weight", "grad_output"):
        assert {f"fp8-amax/{kind}/{place}" for place in places} <= set(scalars), kind
        assert 0 < scalars[f"fp8/amax-max/{kind}"] < 100
        for field in ("saturation", "underflow"):
            assert {f"fp8-{field}/{kind}/{place}" for place in places} <= set(scalars), (field, kind)
            assert 0 <= scalars[f"fp8/{field}-max/{kind}"] < 0.5
    offset = {"pp2": 1}.get(name, 0)  # the second stage counts its layers from 0 again
    for rank, one in enumerate((first, second)):
        for parameter, amax in one["weights"].items():
            *_, number, module, linear, _ = parameter.split(".")
            number = str(int(number) + 1 + offset * rank)
            assert scalars[f"fp8-amax/weight/layers.{number}.{module}.{linear}"] >= amax * 0.999, parameter
    assert first["recipes"] == {"TensorwiseRecipe"}  # nothing is left behind
    tokens = mt.LENGTH * mt.MICRO_BATCH * mt.NUM_MICRO
    payload = {"tp2_sp": 4 * mt.NUM_LAYERS * tokens * mt.WIDTH}.get(name, 0)
    assert payload <= scalars["fp8/gathered-bytes"] <= 1.01 * payload
    per_layer = mt.WIDTH * (128 + 64 + 256) + 128 * mt.WIDTH
    attention, head = mt.WIDTH * mt.LENGTH, mt.WIDTH * mt.VOCABULARY
    share = mt.NUM_LAYERS * per_layer / (mt.NUM_LAYERS * (per_layer + attention) + head)
    assert scalars["fp8/coverage"] == pytest.approx(100 * share)


# --- a weight's bytes ---

NUM_STEPS = 4


@contextmanager
def a_cast_at_every_read(always: bool) -> Iterator[None]:
    """As without bytes that are kept for a step; does nothing unless `always`."""
    from megatron_patches.linear import StepWeight

    current = StepWeight._current

    def fresh(self: Any) -> Any:
        self.expire()
        return current(self)

    with pytest.MonkeyPatch.context() as patch:
        if always:
            patch.setattr(StepWeight, "_current", fresh)
        yield


def trained(layout: Layout, always: bool) -> dict[str, Any]:
    with a_cast_at_every_read(always):
        return mt.train(layout, NUM_STEPS, lr=1e-2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(distributed_optimizer=True, overlap=True, bf16=True),
        pytest.param(Layout(tp=2, sp=True, bf16=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_kept_for_a_step_give_the_bits_of_a_cast_at_every_read(ranks: Ranks, layout: Layout) -> None:
    kept, always = (ranks(2).run(trained, layout, flag) for flag in (False, True))
    assert kept == always
    assert kept[-1]["losses"][-1] < kept[-1]["losses"][0] - 0.15  # weights move


@on_ranks(1)
def test_loops_that_do_not_say_which_micro_batch_comes_read_the_weights_as_they_are() -> None:
    """Outputs follow a write that autograd cannot see: in a loop of one's own, and in evaluation after training by
    Megatron's schedule."""
    for schedule in (False, True):
        with mt.megatron(Layout()):
            training = mt.Training(Layout())
            data = mt.batches(4)
            if schedule:
                training.step(data)
                training.module.eval()
            tokens = next(data)
            mask = torch.triu(torch.ones(1, 1, mt.LENGTH, mt.LENGTH, dtype=torch.bool), 1)
            positions = torch.arange(mt.LENGTH)[None].expand(mt.MICRO_BATCH, -1)
            outputs = []
            for _ in range(2):
                outputs.append(training.module(tokens[:, :-1], positions, mask).detach().clone())
                for name, p in training.module.named_parameters():
                    if "linear_fc1" in name:
                        p.data.mul_(-1.5)
            assert not torch.equal(*outputs)


def fully_sharded(always: bool) -> list[float]:
    """Losses of steps of two micro-batches over a model that torch's FSDP2 shards, which Megatron's schedule steers."""
    from torch.distributed.fsdp import fully_shard

    with mt.megatron(Layout()), a_cast_at_every_read(always):
        model = mt.build(Layout())
        for layer in model.decoder.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        losses = []
        data = mt.batches(NUM_STEPS)
        for _ in range(NUM_STEPS):
            for micro_batch in range(mt.NUM_MICRO):
                for layer in model.decoder.layers:
                    layer.current_microbatch = micro_batch
                output, loss_of = mt.forward_step(data, model)
                loss, _ = loss_of(output)
                loss.backward()
                losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses


def test_weights_that_fsdp2_shards_do_not_lag_behind_the_optimizer(ranks: Ranks) -> None:
    """Between steps a layer has the shard in place of the weight, and the gathered one comes back as it left."""
    kept, always = (ranks(2).run(fully_sharded, flag) for flag in (False, True))
    assert kept == always


def test_a_write_that_autograd_sees_and_another_storage_are_noticed_and_copies_have_no_cache() -> None:
    from fp8_ds.config import LinearConfig
    from megatron_patches.linear import StepWeight

    weight = torch.nn.Parameter(torch.randn(32, 16))
    step = weight._fp8 = StepWeight(weight, TensorwiseRecipe(LinearConfig()))  # type: ignore[attr-defined]
    first = step.data.float() * step.scale_inv
    assert step.data is step.data
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(step.data.float() * step.scale_inv, 2 * first)
    weight.data = -weight.data
    torch.testing.assert_close(step.data.float() * step.scale_inv, -2 * first)
    assert getattr(copy.deepcopy(weight), "_fp8", None) is None
    assert getattr(pickle.loads(pickle.dumps(weight)), "_fp8", None) is None
