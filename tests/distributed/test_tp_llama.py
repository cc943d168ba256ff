"""A Hugging Face Llama over a tensor-parallel group, by itself and in DeepSpeed's engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from support.ranks import RankError, on_ranks
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.plan.convert import apply_plan
from fp8_ds.nn.plan.plan import make_plan
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp import LLAMA, QWEN3, parallelize

pytestmark = pytest.mark.distributed

LAYERS = 2
NUM_BATCHES = tpar.NUM_BATCHES
train = tpar.train


class Llama(nn.Module):
    """transformers' Llama under the interface of the training loop; heads and features divide by 4."""

    def __init__(self, bias: bool = False, num_layers: int = LAYERS) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=training.VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
            attention_bias=bias,
            mlp_bias=bias,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def llama(dtype: torch.dtype = torch.float32, bias: bool = False, seed: int = 0, num_layers: int = LAYERS) -> Llama:
    torch.manual_seed(seed)
    model = Llama(bias, num_layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases that do something
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.to(dtype)


def to_fp8(model: nn.Module, recipe: str = "tensorwise") -> None:
    config = LinearConfig(recipe=recipe, **({"backend": "reference"} if recipe == "blockwise" else {}))
    apply_plan(model, make_plan(model, config), config, "cpu")


def whole(model: nn.Module, name: str, tensor: Tensor, tp: Any) -> Tensor:
    """A parameter's tensor of all ranks."""
    p = model.get_parameter(name)
    if not getattr(p, "tensor_model_parallel", False):
        return tensor
    dim = p.partition_dim
    return tpar.all_rows(tp, tensor.transpose(0, dim).contiguous()).transpose(0, dim)


# --- without an engine ---


def in_high_precision(sequence_parallel: bool, bias: bool, checkpointing: bool) -> dict[str, float]:
    """Return the SQNR of the loss and all gradients, float32, against the whole model."""
    tp_group = tpar.groups(dist.get_world_size()).tp_group
    reference, model = llama(bias=bias), llama(bias=bias)
    if tp_group.rank() > 0:  # what is replicated comes from the first rank
        with torch.no_grad():
            model.model.model.norm.weight.zero_()
            model.model.lm_head.weight.zero_()
    tp = parallelize(model, LLAMA, tp_group, sequence_parallel=sequence_parallel)
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tokens = training.micro_batches(0, 1)[0]
    losses = []
    for one in (reference, model):
        losses.append(one(tokens))
        losses[-1].backward()
    found = {"loss": sqnr_db(losses[0], losses[1])}
    for name, p in reference.named_parameters():
        found[name] = sqnr_db(p.grad, whole(model, name, model.get_parameter(name).grad, tp))
    return found


@pytest.mark.parametrize(
    ("world_size", "sequence_parallel", "bias", "checkpointing"),
    [(2, True, True, False), (2, False, True, False), (4, True, False, False), (2, True, False, True)],
)
def test_cut_in_high_precision_every_gradient_is_that_of_the_whole_model(
    ranks: Any, world_size: int, sequence_parallel: bool, bias: bool, checkpointing: bool
) -> None:
    for found in ranks(world_size).run(in_high_precision, sequence_parallel, bias, checkpointing):
        for name, value in found.items():
            assert value > 85, (name, value)  # sums in another order; biases of q and k cancel


FROZEN = ("o_proj.bias", "down_proj.bias", "layernorm.weight")


@on_ranks(2)
def test_what_is_frozen_when_the_model_is_sharded_has_its_whole_gradient_once_it_trains() -> None:
    reference, model = llama(bias=True), llama(bias=True)
    late = [p for name, p in model.named_parameters() if name.endswith(FROZEN)]
    for p in late:
        p.requires_grad_(False)
    tp = parallelize(model, LLAMA, tpar.groups(2).tp_group)
    tokens = training.micro_batches(0, 1)[0]
    model(tokens).backward()
    assert all(p.grad is None and not p.requires_grad for p in late)
    model.zero_grad()
    for p in late:
        p.requires_grad_(True)
    for one in (reference, model):
        one(tokens).backward()
    for name, p in reference.named_parameters():
        if name.endswith(FROZEN):
            assert sqnr_db(p.grad, whole(model, name, model.get_parameter(name).grad, tp)) > 85, name


# --- in DeepSpeed's engine ---


def tp_engine(config: dict[str, Any], tp_size: int, seed: int = 0, num_layers: int = LAYERS, **options: Any) -> Any:
    """An engine over a Llama that is cut over groups of `tp_size`; 1: not cut."""
    import deepspeed

    import fp8_ds  # noqa: F401

    model = llama(seed=seed, num_layers=num_layers)
    mpu = None
    if tp_size > 1:
        mpu = tpar.groups(tp_size)
        parallelize(model, LLAMA, mpu.tp_group, **options)
    params = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, config=copy.deepcopy(config), model_parameters=params, mpu=mpu)[0]


def destroy(engine: Any) -> None:
    from deepspeed.utils import groups

    training.destroy(engine)
    groups.mpu = None  # DeepSpeed keeps it for whatever engine comes next


def engine_config(stage: int, fp8: dict[str, Any] | None, tp_size: int, **overrides: Any) -> dict[str, Any]:
    accumulation = NUM_BATCHES * tp_size // dist.get_world_size()
    return training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)


def trained(stage: int, fp8: dict[str, Any] | None, tp_size: int, num_steps: int, **overrides: Any) -> dict[str, Any]:
    engine = tp_engine(engine_config(stage, fp8, tp_size, **overrides), tp_size)
    losses, norms = train(engine, tp_size, num_steps)
    kinds = sorted({type(module).__name__ for module in engine.module.modules() if isinstance(module, nn.Linear)})
    report = engine.fp8_report() if fp8 is not None else {}
    norm_weights = [m.weight for m in engine.module.modules() if type(m).__name__ == "LlamaRMSNorm"]
    same = True
    if stage < 3:
        for weight in norm_weights:  # what is replicated stays the same
            rows = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, weight.detach().contiguous())
            same = same and all(torch.equal(row, rows[0]) for row in rows)
    destroy(engine)
    return {"losses": losses, "norms": norms, "kinds": kinds, "report": report, "same": same}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_trains_two_by_two_ranks_with_the_gradient_norm_of_the_whole_model(ranks: Any, stage: int) -> None:
    fp8, bf16 = (ranks(4).run(trained, stage, block, 2, 4)[0] for block in ({}, None))
    whole = ranks(2).run(trained, stage, None, 1, 4)[0]
    assert bf16["norms"] == pytest.approx(whole["norms"], rel=0.01)
    assert fp8["kinds"] == ["ColumnParallelFp8Linear", "Linear", "RowParallelFp8Linear"]
    assert fp8["same"] and bf16["same"]
    for own, other in zip(fp8["norms"], bf16["norms"], strict=True):
        assert own == pytest.approx(other, rel=0.06)
    assert fp8["losses"] == pytest.approx(bf16["losses"], abs=0.02)
    weights = LAYERS * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) // 2  # a rank's half of every linear of a block
    assert weights <= fp8["report"]["gathered_fp8_bytes"] <= 1.01 * weights


@pytest.fixture(scope="module")
def default_run(ranks: Any) -> dict[str, Any]:
    """Four steps of two ranks that share a model, with the default block."""
    return ranks(2).run(trained, 2, {}, 2, 4)[0]


@pytest.mark.parametrize(
    "block",
    [
        {"linear": {"recipe": "rowwise"}, "activations": {"fused": True}},
        {"linear": {"filter_fqns": ["lm_head", "v_proj"]}},
        {"linear": {"recipe": "blockwise", "backend": "reference"}},
        {"linear": {"recipe": "delayed"}, "tensor_parallel": {"gather": "bf16"}},
    ],
    ids=["rowwise-fused", "a bf16 layer among them", "blockwise", "delayed"],
)
def test_every_way_to_quantise_and_to_talk_trains(ranks: Any, default_run: Any, block: dict[str, Any]) -> None:
    other = ranks(2).run(trained, 2, block, 2, 4)[0]
    assert other["losses"] == pytest.approx(default_run["losses"], abs=0.01)
    assert other["norms"] == pytest.approx(default_run["norms"], rel=0.06)


def test_fp8_states_and_clipping_work_on_a_shard_as_on_a_whole(ranks: Any) -> None:
    block = {"optimizer": {"states": "fp8", "master": "e4m11"}}
    parts, whole = (ranks(2).run(trained, 2, block, tp_size, 6)[0] for tp_size in (2, 1))
    assert parts["norms"] == pytest.approx(whole["norms"], rel=0.06)
    assert parts["losses"] == pytest.approx(whole["losses"], abs=0.03)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_with_fp8_states_what_is_not_sharded_stays_the_same_on_all_ranks(stage: int) -> None:
    block = {"optimizer": {"states": "fp8", "master": "e4m11"}}
    engine = tp_engine(engine_config(stage, block, 2), 2)
    train(engine, 2, 4)
    masters = training.full_masters(engine)
    whole = [name for name, p in engine.module.named_parameters() if not getattr(p, "tensor_model_parallel", False)]
    assert len(whole) == 2 * LAYERS + 3
    for name in whole:
        own = masters[name].float().contiguous()
        rows = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(rows, own)
        assert torch.equal(*rows), name
    destroy(engine)


# --- checkpoints ---


def resume(stage: int, block: dict[str, Any], directory: str) -> None:
    def build(seed: int) -> Any:
        engine = tp_engine(engine_config(stage, block, 2), 2, seed)
        with pytest.raises(UnsupportedError, match="parallelize has sharded"):
            engine.save_16bit_model(directory)
        return engine

    tpar.resume(build, train, destroy, directory)


@pytest.mark.parametrize(("world_size", "stage", "states"), [(4, 2, "fp8"), (4, 3, "fp32")])
def test_a_checkpoint_resumes_to_the_bit(ranks: Any, tmp_path: Any, world_size: int, stage: int, states: str) -> None:
    ranks(world_size).run(resume, stage, {"optimizer": {"states": states}}, str(tmp_path))
    for mp_rank in range(2):
        assert list(
            (tmp_path / "third").glob(f"*zero_pp_rank_{world_size // 2 - 1}_mp_rank_0{mp_rank}_optim_states.pt")
        )


# --- what is wrong is an error on all ranks, in time ---


def write_universal(stage: int, block: dict[str, Any], directory: str) -> tuple[dict[str, Tensor], list[float]]:
    """Of a cut model: (whole masters when it was saved, losses of two more steps)."""
    engine = tp_engine(engine_config(stage, block, 2), 2)
    train(engine, 2, 2)
    engine.save_checkpoint(directory, tag="saved")
    masters = {
        name: whole(engine.module, name, master, tpar.context()).clone()
        for name, master in training.full_masters(engine).items()
    }
    losses, _ = train(engine, 2, 2, first_step=2)
    destroy(engine)
    return masters, losses


def read_universal(
    stage: int, block: dict[str, Any], directory: str, tp_size: int
) -> tuple[dict[str, Tensor], list[float]]:
    """As `write_universal`, of an engine of another size that has loaded it."""
    config = engine_config(stage, block, tp_size, checkpoint={"load_universal": True})
    engine = tp_engine(config, tp_size, seed=5)
    path, _ = engine.load_checkpoint(directory, tag="universal")
    assert path is not None
    masters = {name: master.clone() for name, master in training.full_masters(engine).items()}
    if tp_size > 1:
        masters = {name: whole(engine.module, name, master, tpar.context()).clone() for name, master in masters.items()}
    losses, _ = train(engine, tp_size, 2, first_step=2)
    destroy(engine)
    return masters, losses


@pytest.mark.parametrize(("stage", "sizes"), [(2, (1, 4)), (3, (1,))])
def test_a_universal_checkpoint_of_a_cut_model_loads_whole_and_cut_otherwise(
    ranks: Any, tmp_path: Path, stage: int, sizes: tuple[int, ...]
) -> None:
    from fp8_ds.tools.convert import convert

    masters, losses = ranks(2).run(write_universal, stage, {}, str(tmp_path))[0]
    convert(tmp_path, tmp_path / "universal", "universal", tag="saved")
    for tp_size in sizes:
        for found, again in ranks(tp_size).run(read_universal, stage, {}, str(tmp_path), tp_size):
            assert found.keys() == masters.keys()
            for name, master in found.items():
                assert_bitwise(master, masters[name])
            assert again == pytest.approx(losses, abs=0.02)
    if stage == 3:
        with pytest.raises(RankError, match=r"expected ZeRO stage 1 or 2 with fp8_ds\.tp\.parallelize, got 3"):
            ranks(2).run(read_universal, stage, {}, str(tmp_path), 2)


def test_a_universal_checkpoint_of_a_whole_model_is_not_loaded_into_a_cut_one(ranks: Any, tmp_path: Path) -> None:
    """Stock code would take rows of `down` for its columns: they are as many numbers."""
    from safetensors.torch import save_file

    from fp8_ds.tools.convert import convert

    (tmp_path / "weights").mkdir()
    weights = {name: p.detach().clone() for name, p in llama(torch.bfloat16).named_parameters()}
    save_file(weights, tmp_path / "weights/model.safetensors")
    convert(tmp_path / "weights", tmp_path / "universal", "universal", stage=2)
    with pytest.raises(RankError, match=r"of a whole model, which does not say how fp8_ds\.tp\.parallelize shards"):
        ranks(2).run(read_universal, 2, {}, str(tmp_path), 2)


def message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong(case: str) -> str:
    world, rank = dist.get_world_size(), dist.get_rank()
    tp_group: Any = tpar.groups(world).tp_group
    model = llama()
    if case == "one rank left out":
        tp_group = dist.new_group(list(range(world - 1)))
    elif case == "no group on one rank":
        tp_group = None if rank == 0 else tp_group
    elif case == "overlapping groups":
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 3])]
        tp_group = pairs[{0: 0, 1: 1, 2: 1, 3: 2}[rank]]
    elif case == "another width on one rank":
        if rank == 1:
            model.model.model.layers[1].mlp.up_proj = nn.Linear(64, 256, bias=False)
    elif case == "another model in one group":
        tp_group = tpar.groups(2).tp_group
        if rank == 3:
            model.model.model.layers[0].mlp.down_proj.bias = nn.Parameter(torch.zeros(64))
    before = [p.shape for p in model.parameters()]
    found = message(parallelize, model, LLAMA, tp_group)
    assert before == [p.shape for p in model.parameters()]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one rank left out", r"on ranks [3]"),
        ("no group on one rank", r"on ranks [0]"),
        ("overlapping groups", "Groups must not overlap"),
        ("another width on one rank", "model: expected the same on all ranks"),
        ("another model in one group", "model: expected the same on all ranks"),
    ],
)
def test_a_model_or_group_that_does_not_fit_is_an_error_on_every_rank(ranks: Any, case: str, expected: str) -> None:
    for found in ranks(4).run(wrong, case):
        assert found.startswith("ConfigError: ") and expected in found, found


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(2)
def test_norms_of_queries_and_keys_have_the_gradients_of_all_heads(sequence_parallel: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
    )
    reference = Qwen3ForCausalLM(config)
    model = copy.deepcopy(reference)
    parallelize(model, QWEN3, tpar.groups(2).tp_group, sequence_parallel=sequence_parallel)
    tokens = training.micro_batches(0, 1)[0][:, :32]
    for one in (reference, model):
        logits = one(input_ids=tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    norms = [(name, p) for name, p in reference.named_parameters() if p.dim() == 1]
    assert len(norms) == 5
    for name, p in norms:
        assert sqnr_db(p.grad, model.get_parameter(name).grad) > 100, name


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "expected"), [("lengths", "first batch"), ("values", "'values "), ("does not divide", "divisible by")]
)
@on_ranks(4)
def test_a_first_batch_that_does_not_fit_is_an_error_on_every_rank(case: str, expected: str) -> None:
    model = llama()
    parallelize(model, LLAMA, tpar.groups(4).tp_group)
    length = {"lengths": 33 if dist.get_rank() else 17, "does not divide": 6, "values": None}[case]
    tokens = training.micro_batches(dist.get_rank() if case == "values" else 0, 1)[0]
    with pytest.raises((ValueError, RuntimeError), match=expected):
        model(tokens if length is None else tokens[:3, :length])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "sequence_parallel"), [("lengths", True), ("values", False)])
@on_ranks(2)
def test_a_later_batch_that_differs_is_an_error_on_every_rank(case: str, sequence_parallel: bool) -> None:
    model = llama()
    parallelize(model, LLAMA, tpar.groups(2).tp_group, sequence_parallel=sequence_parallel)
    rank = dist.get_rank()
    for length in (33, 17, 33):  # batches may change, as long as they do it together
        model(training.micro_batches(0, 1)[0][:, :length]).backward()
    tokens = training.micro_batches(rank if case == "values" else 0, 1)[0]
    with pytest.raises(ConfigError, match="batch: "):
        model(tokens if case == "values" else tokens[:, : 17 if rank else 33])


@on_ranks(4)
def test_ranks_of_a_group_that_is_not_gloos_get_one_to_compare_in_by_themselves() -> None:
    from fp8_ds.tp.group import new_host_group

    made = new_host_group(tpar.groups(2).tp_group)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=made)
    expected = [0, 1] if dist.get_rank() < 2 else [2, 3]
    assert dist.get_process_group_ranks(made) == expected and int(total) == sum(expected)
    dist.destroy_process_group(made)
