"""Mixtures of experts under ZeRO: their weights are FP8 bytes in shards and on the wire, and train as the linears."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from support.collectives import count_collectives
from support.models import Llama
from support.ranks import on_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers.integrations.moe")

DELAYED = {"linear": {"recipe": "delayed"}}
RELEASED = {"optimizer": {"states": "fp8", "master": "e4m11", "release": True, "release_clipping": "delayed_norm"}}
SIZES = {"hidden_size": 48, "num_experts_per_tok": 2}
NUM_EXPERTS, INTER = 5, 40
NUM_EXPERT_WEIGHTS = 2 * NUM_EXPERTS * 3 * 48 * INTER


class MoeLM(nn.Module):
    """A language model of transformers, that returns its loss."""

    def __init__(self, family: str = "Mixtral") -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_local_experts": NUM_EXPERTS, "intermediate_size": INTER}
        if family == "Qwen3Moe":
            sizes = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": INTER, "head_dim": 12}
        self.lm = Llama(family, **SIZES, **sizes).model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def build(
    stage: int,
    fp8: dict[str, Any] | None,
    family: str = "Mixtral",
    seed: int = 0,
    checkpointing: bool = False,
    **overrides: Any,
) -> Any:
    torch.manual_seed(seed)
    net = MoeLM(family)
    if checkpointing:
        net.lm.gradient_checkpointing_enable({"use_reentrant": False})
    return training.start(net, training.ds_config(stage, fp8, **overrides))


def trained(
    stage: int, fp8: dict[str, Any] | None, family: str = "Mixtral", folder: str = "", steps: int = 4, **more: Any
) -> dict[str, Any]:
    return training.run_and_destroy(lambda seed: build(stage, fp8, family, seed, **more), folder, steps)


def check_weights(found: dict[str, Any], rest: list[dict[str, Any]]) -> None:
    """Experts are among the FP8 weights, have moved, are the quantised masters, and the same on all ranks."""
    own = [name for name in found["last"] if "experts" in name]
    assert len(own) == 4 and all(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in own)
    assert sum(found["last"][name][0].numel() for name in own) == NUM_EXPERT_WEIGHTS
    assert all((found["last"][name][0] != found["first"][name][0]).float().mean() > 0.5 for name in own)
    for other in rest:
        training.assert_fp8_equals(other["last"], found["last"])
    assert found["losses"][-1] < found["losses"][0] - 0.1


@pytest.mark.parametrize(
    ("stage", "fp8", "family"),
    [
        pytest.param(2, DELAYED, "Mixtral", marks=pytest.mark.slow),
        (3, {}, "Qwen3Moe"),
    ],
)
def test_two_ranks_train_as_one(ranks: Any, stage: int, fp8: dict[str, Any], family: str) -> None:
    """The same micro-batches, whose gradients are summed in another order."""
    two = ranks(2).run(trained, stage, fp8, family)
    one = ranks(1).run(trained, stage, fp8, family, gradient_accumulation_steps=2)[0]
    check_weights(two[0], two[1:])
    training.assert_fp8_follows_masters(two[0]["last"], two[0]["masters"])
    training.assert_fp8_equals(two[0]["first"], one["first"])
    assert two[0]["losses"][0] == pytest.approx(one["losses"][0], abs=1e-6)  # a sum of two numbers by gloo
    assert two[0]["losses"] == pytest.approx(one["losses"], abs=0.01)


def test_stages_and_activation_checkpointing_are_the_same_training_to_the_bit(ranks: Any) -> None:
    first, *others = [
        ranks(2).run(trained, stage, {}, steps=2, checkpointing=on)[0]
        for stage, on in ((1, False), (2, False), (3, False), (3, True))
    ]
    for other in others:
        assert other["losses"] == first["losses"]
        training.assert_fp8_equals(other["last"], first["last"])


def sharded_start() -> dict[str, Any]:
    """Stage 3 with a model that is made in shards, as `from_pretrained` does, whose MoE blocks are leaves."""
    import deepspeed
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  # zero.Init spoils decorated classes made inside

    import fp8_ds  # noqa: F401

    config = training.ds_config(3, {}, zero_optimization={"leaf_module": {"classes": ["MixtralSparseMoeBlock"]}})
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = MoeLM()
    torch.manual_seed(0)
    whole = MoeLM().bfloat16()
    for p, full in zip(net.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.copy_(full)
    engine = training.start(net, config)
    found = {"first": training.fp8_state(engine), "masters": training.full_masters(engine)}
    found["losses"] = training.train(engine, 3)
    training.destroy(engine)
    return found


def test_a_model_made_in_shards_and_gathered_by_layers_trains_alike(ranks: Any) -> None:
    made = ranks(2).run(sharded_start)[0]
    whole = ranks(2).run(trained, 3, {}, steps=3)[0]
    assert made["first"].keys() == whole["first"].keys()
    training.assert_fp8_follows_masters(made["first"], made["masters"])
    assert made["losses"] == pytest.approx(whole["losses"], abs=0.01)  # from bf16 weights


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_experts_are_gathered_in_one_byte_a_weight(stage: int) -> None:
    engine = build(stage, {})
    training.train(engine, 2)
    with count_collectives() as count:
        training.train(engine, 1, 2)
    moved = Counter[torch.dtype]()
    for name, numel, dtype in count.records:
        moved[dtype] += numel if "gather" in name else 0
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in engine.fp8.weights.items()}
    total, in_fp8 = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()), sum(sizes.values())
    training.destroy(engine)
    assert sum(numel for name, numel in sizes.items() if "experts" in name) == NUM_EXPERT_WEIGHTS > 0.7 * total
    assert in_fp8 <= moved[torch.uint8] < 1.02 * in_fp8
    assert moved[torch.bfloat16] < 1.02 * (total - in_fp8)


@pytest.mark.parametrize(("stage", "fp8"), [pytest.param(3, DELAYED, marks=pytest.mark.slow), (2, RELEASED)])
def test_a_run_goes_on_bit_for_bit(ranks: Any, stage: int, fp8: dict[str, Any], tmp_path: Path) -> None:
    whole = ranks(2).run(trained, stage, fp8)
    check_weights(whole[0], whole[1:])
    cut = ranks(2).run(trained, stage, fp8, folder=str(tmp_path))[0]
    assert cut["losses"] == whole[0]["losses"]
    training.assert_fp8_equals(cut["last"], whole[0]["last"])


def test_in_bf16_it_is_stock_but_for_the_order_of_sums_and_comes_back(ranks: Any) -> None:
    stage = 2
    ours = ranks(2).run(trained, stage, {"schedule": {"bf16_until_step": 1000}})[0]
    stock = ranks(2).run(trained, stage, None)[0]["losses"]
    assert ours["report"]["num_layers_in_bf16"] == 12
    assert ours["losses"] == pytest.approx(stock, abs=2e-3)
    back = ranks(2).run(trained, stage, {"schedule": {"bf16_until_step": 2}})[0]
    assert back["report"]["num_layers_in_bf16"] == 0
    assert back["losses"][:2] == ours["losses"][:2] and back["losses"][2:] != ours["losses"][2:]
    assert back["losses"] == pytest.approx(stock, abs=0.02)
    one = {"schedule": {"layers": {"layers.0.mlp.experts.down_proj": "bf16"}}}
    assert ranks(2).run(trained, stage, one)[0]["report"]["num_layers_in_bf16"] == 1


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_experts_that_are_too_small_have_the_bits_of_stock(ranks: Any, stage: int) -> None:
    block = {"linear": {"min_size": 1 << 40}, "without_deepspeed_fixes": ["adam_step"]}
    ours = ranks(2).run(trained, stage, block)[0]
    assert ours["report"]["num_layers_in_bf16"] == 12
    assert ours["losses"] == ranks(2).run(trained, stage, None)[0]["losses"]
    tokens = training.MICRO_BATCH * (training.LENGTH + 1)  # each of which visits two experts
    for added, num in ((0, 8), (1, 10)):
        block = {"linear": {"min_size": 2 * tokens * INTER * SIZES["hidden_size"] + added}}
        report = ranks(2).run(trained, stage, block, steps=1)[0]["report"]
        assert report["num_layers_in_bf16"] == num  # the linears of attention, then the experts' `down_proj`, too


@on_ranks(2)
def test_the_monitor_has_rows_of_experts_and_counts_them_as_covered() -> None:
    engine = build(2, {"monitor": {"every": 2, "sink": "/dev/null"}})
    reports = training.reports_of(engine)
    training.train(engine, 4)
    training.destroy(engine)
    report = reports[-1]
    assert len(report["layers"]) == 12 and report["coverage"] > 0.9
    kinds = report["layers"]["lm.model.layers.1.mlp.experts.gate_up_proj"]
    assert kinds["weight"]["num"] == 2 * NUM_EXPERTS * 2 * INTER * 48  # on two ranks
    assert all(kinds[kind]["amax"] > 0 for kind in ("input", "weight", "grad_output"))


def to_ours_and_back(stage: int, folder: str) -> list[dict[str, Tensor]]:
    """Masters of a run without FP8, of one in FP8 that has loaded its checkpoint, and again without FP8."""
    found = []
    for seed, fp8 in enumerate((None, DELAYED, None)):
        engine = build(stage, fp8, seed=seed)
        if seed > 0:
            engine.load_checkpoint(f"{folder}/{seed - 1}")
            found.append(training.full_masters(engine))
        if fp8 is not None:
            training.assert_fp8_follows_masters(training.fp8_state(engine), found[-1])
        training.train(engine, 1, seed)
        if seed < 2:
            engine.save_checkpoint(f"{folder}/{seed}")
            found.append(training.full_masters(engine))
        training.destroy(engine)
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_checkpoints_go_to_stock_and_back(ranks: Any, tmp_path: Path, stage: int) -> None:
    stock, ours, ours_later, back = ranks(2).run(to_ours_and_back, stage, str(tmp_path))[0]
    for name, master in stock.items():
        assert torch.equal(ours[name], master) and torch.equal(back[name], ours_later[name]), name
        assert not torch.equal(ours_later[name], master), name
    if stage == 2:  # in stage 3 they are in no model file
        weights = torch.load(tmp_path / "1/global_step2/mp_rank_00_model_states.pt", weights_only=False)["module"]
        assert all(torch.equal(weights[name], master.bfloat16()) for name, master in ours_later.items())


@on_ranks(2)
def test_the_flops_profiler_counts_experts_by_the_tokens_they_see() -> None:
    engine = build(3, {}, flops_profiler={"enabled": True, "profile_step": 1})
    num_pairs = training.MICRO_BATCH * (training.LENGTH + 1) * 2
    macs = training.macs_of_second_step(engine)  # on rank 0
    assert not macs or macs["lm.model.layers.0.mlp.experts"] == num_pairs * 3 * SIZES["hidden_size"] * INTER


def trained_by_graphs(is_compiled: bool, freezes_gates: bool) -> dict[str, Any]:
    """Losses and masters of a checkpointed model in ZeRO-3 with experts too small for FP8, and its graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = MoeLM()
    net.lm.gradient_checkpointing_enable({"use_reentrant": False})
    for name, p in net.named_parameters():
        p.requires_grad_(not (freezes_gates and name.endswith("mlp.gate.weight")))
    fp8 = {"linear": {"min_size": 1 << 50}}
    small_buckets = {"reduce_bucket_size": 1000}  # with one bucket for all a late gradient finds its place in it
    config = training.ds_config(3, fp8, gradient_accumulation_steps=2, zero_optimization=small_buckets)
    engine = training.start(net, config)
    if is_compiled:
        engine.compile(backend="aot_eager")
    found = {"losses": training.train(engine, 3), "masters": training.full_masters(engine)}
    training.destroy(engine)
    return found | {"breaks": " ".join(counters["graph_break"])}


@pytest.mark.parametrize("freezes_gates", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_in_bf16_are_part_of_the_graph_of_a_checkpointed_layer(ranks: Any, freezes_gates: bool) -> None:
    """DeepSpeed reduces their gradients in a hook of their block, which would break it; the numbers stay."""
    for eager, compiled in zip(
        *(ranks(2).run(trained_by_graphs, on, freezes_gates) for on in (False, True)), strict=True
    ):
        assert compiled["losses"] == eager["losses"]
        assert all(torch.equal(compiled["masters"][name], master) for name, master in eager["masters"].items())
        assert "_pre_forward_module_hook" in compiled["breaks"] and "ackward" not in compiled["breaks"]
