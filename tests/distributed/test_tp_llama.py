"""A Hugging Face Llama over a tensor-parallel group in DeepSpeed's engine; and what of DeepSpeed and of seeds reaches
sharded models without one."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from support.models import MIXER_PLAN, MIXTRAL_PLAN, WIDTH, Llama, MixerModel
from support.ranks import RankError, on_ranks
from torch import Tensor, nn

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.testing import assert_bitwise, sqnr_db
from fp8_ds.tp import LLAMA, TensorParallelPlan, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers.integrations.moe")

LAYERS = 2
NUM_BATCHES = tpar.NUM_BATCHES
STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}
train = tpar.train


def tp_engine(
    config: dict[str, Any],
    tp_size: int,
    seed: int = 0,
    num_layers: int = LAYERS,
    model: nn.Module | None = None,
    plan: TensorParallelPlan = LLAMA,
) -> Any:
    """An engine over a model that is sharded over groups of `tp_size`; 1: whole."""
    model = tpar.llama(seed=seed, num_layers=num_layers) if model is None else model
    mpu = None
    if tp_size > 1:
        mpu = tpar.groups(tp_size)
        parallelize(model, plan, mpu.tp_group)
    return training.start(model, config, mpu=mpu)


def destroy(engine: Any) -> None:
    from deepspeed.utils import groups

    training.destroy(engine)
    groups.mpu = None  # DeepSpeed keeps it for whatever engine comes next


def engine_config(stage: int, fp8: dict[str, Any] | None, tp_size: int, **overrides: Any) -> dict[str, Any]:
    accumulation = NUM_BATCHES * tp_size // dist.get_world_size()
    return training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation, **overrides)


def differing(tensors: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of whole parameters whose tensors differ from rank to rank. Collective."""
    found = []
    for name, p in model.named_parameters():
        if not getattr(p, "tensor_model_parallel", False):
            own = tensors[name].detach().float().contiguous()
            rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, own)
            found += [] if all(torch.equal(row, own) for row in rows) else [name]
    return found


def trained(stage: int, fp8: dict[str, Any] | None, tp_size: int, num_steps: int) -> dict[str, Any]:
    engine = tp_engine(engine_config(stage, fp8, tp_size), tp_size)
    losses, norms = train(engine, tp_size, num_steps)
    kinds = sorted({type(module).__name__ for module in engine.module.modules() if isinstance(module, nn.Linear)})
    report = engine.fp8_report() if fp8 is not None else {}
    apart = differing(training.full_masters(engine), engine.module)
    destroy(engine)
    return {"losses": losses, "norms": norms, "kinds": kinds, "report": report, "apart": apart}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_by_two_ranks_train_with_the_gradient_norm_of_the_whole_model(ranks: Any, stage: int) -> None:
    fp8, bf16 = (ranks(4).run(trained, stage, block, 2, 4)[0] for block in ({}, None))
    whole = ranks(2).run(trained, stage, None, 1, 4)[0]
    assert bf16["norms"] == pytest.approx(whole["norms"], rel=0.01)
    assert fp8["kinds"] == ["ColumnParallelFp8Linear", "Linear", "RowParallelFp8Linear"]
    assert fp8["apart"] == bf16["apart"] == []
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
    ("stage", "block"),
    [
        (1, {"linear": {"recipe": "rowwise"}, "activations": {"fused": True}}),
        (3, {"linear": {"filter_fqns": ["lm_head", "v_proj"]}}),
        (1, {"linear": {"recipe": "blockwise", "backend": "reference"}}),
        (2, {"linear": {"recipe": "delayed"}, "tensor_parallel": {"gather": "bf16"}}),
    ],
    ids=["rowwise-fused", "a bf16 layer among them", "blockwise", "delayed"],
)
def test_every_way_to_quantise_and_to_talk_trains(
    ranks: Any, default_run: Any, stage: int, block: dict[str, Any]
) -> None:
    other = ranks(2).run(trained, stage, block, 2, 4)[0]
    assert other["losses"] == pytest.approx(default_run["losses"], abs=0.01)
    assert other["norms"] == pytest.approx(default_run["norms"], rel=0.06)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_fp8_states_and_clipping_work_on_a_shard_as_on_a_whole(ranks: Any, stage: int) -> None:
    parts, whole = (ranks(2).run(trained, stage, STATES, tp_size, 4)[0] for tp_size in (2, 1))
    assert parts["apart"] == []
    assert parts["norms"] == pytest.approx(whole["norms"], rel=0.06)
    assert parts["losses"] == pytest.approx(whole["losses"], abs=0.03)


def with_experts(tp_size: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of a Mixtral, and its experts' bytes."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 48, "intermediate_size": 40}
    engine = tp_engine(engine_config(2, {}, tp_size), tp_size, model=Llama("Mixtral", **sizes), plan=MIXTRAL_PLAN)
    losses, _ = train(engine, tp_size, 4)
    state = {name: pair for name, pair in training.fp8_state(engine).items() if "experts" in name}
    destroy(engine)
    return losses, state


def test_experts_stay_the_same_on_all_ranks_and_train_as_in_the_whole_model(ranks: Any) -> None:
    (one, _), *_ = ranks(2).run(with_experts, 1)
    (two, first), (_, second) = ranks(2).run(with_experts, 2)
    assert len(first) == 4
    training.assert_fp8_equals(first, second)
    assert two == pytest.approx(one, abs=0.02) and two[-1] < two[0] - 0.1


# --- checkpoints ---


def resume(stage: int, block: dict[str, Any], folder: str) -> None:
    def build(seed: int) -> Any:
        engine = tp_engine(engine_config(stage, block, 2), 2, seed)
        with pytest.raises(UnsupportedError, match="save_16bit_model"):
            engine.save_16bit_model(folder)
        return engine

    tpar.resume(build, train, destroy, folder)


@pytest.mark.parametrize(("stage", "states"), [pytest.param(2, "fp8", marks=pytest.mark.slow), (3, "fp32")])
def test_a_checkpoint_resumes_to_the_bit(ranks: Any, tmp_path: Any, stage: int, states: str) -> None:
    ranks(4).run(resume, stage, {"optimizer": {"states": states}}, str(tmp_path))
    for mp_rank in range(2):
        assert list((tmp_path / "third").glob(f"*zero_pp_rank_1_mp_rank_0{mp_rank}_optim_states.pt"))


def universal(stage: int, folder: str, tp_size: int, loads: bool) -> tuple[dict[str, Tensor], list[float]]:
    """(whole masters, losses of two more steps) of an engine that saves, or that loads what was made universal."""
    overrides = {"checkpoint": {"load_universal": True}} if loads else {}
    engine = tp_engine(engine_config(stage, {}, tp_size, **overrides), tp_size, seed=5 if loads else 0)
    if loads:
        path, _ = engine.load_checkpoint(folder, tag="universal")
        assert path is not None
    else:
        train(engine, tp_size, 2)
        engine.save_checkpoint(folder, tag="saved")
    masters = {name: master.clone() for name, master in training.full_masters(engine).items()}
    if tp_size > 1:
        masters = {
            name: tpar.whole(engine.module, name, master, tpar.context()).clone() for name, master in masters.items()
        }
    losses, _ = train(engine, tp_size, 2, first_step=2)
    destroy(engine)
    return masters, losses


@pytest.mark.parametrize(("stage", "sizes"), [(2, (1, 4)), pytest.param(3, (1,), marks=pytest.mark.slow)])
def test_a_universal_checkpoint_of_a_cut_model_loads_whole_and_cut_otherwise(
    ranks: Any, tmp_path: Path, stage: int, sizes: tuple[int, ...]
) -> None:
    from fp8_ds.tools.convert import convert

    masters, losses = ranks(2).run(universal, stage, str(tmp_path), 2, False)[0]
    convert(tmp_path, tmp_path / "universal", "universal", tag="saved")
    for tp_size in sizes:
        for found, again in ranks(tp_size).run(universal, stage, str(tmp_path), tp_size, True):
            assert found.keys() == masters.keys()
            for name, master in found.items():
                assert_bitwise(master, masters[name])
            assert again == pytest.approx(losses, abs=0.02)
    if stage == 3:
        with pytest.raises(RankError, match=r"expected ZeRO stage 1 or 2 with fp8_ds\.tp\.parallelize, got 3"):
            ranks(2).run(universal, stage, str(tmp_path), 2, True)


def test_a_universal_checkpoint_of_a_whole_model_is_not_loaded_into_a_cut_one(ranks: Any, tmp_path: Path) -> None:
    """Stock code would take rows of `down` for its columns: they are as many numbers."""
    from safetensors.torch import save_file

    from fp8_ds.tools.convert import convert

    (tmp_path / "weights").mkdir()
    weights = {name: p.detach().clone() for name, p in tpar.llama(torch.bfloat16).named_parameters()}
    save_file(weights, tmp_path / "weights/model.safetensors")
    convert(tmp_path / "weights", tmp_path / "universal", "universal", stage=2)
    with pytest.raises(RankError, match=r"of a whole model, which does not say how fp8_ds\.tp\.parallelize shards"):
        ranks(2).run(universal, 2, str(tmp_path), 2, True)


# --- what is refused at deepspeed.initialize, on every rank ---


class Adapter(nn.Module):
    """As PEFT's LoRA around a linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.down = base_layer, nn.Linear(base_layer.in_features, 2, bias=False)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("no mpu", "mpu: "),
        ("an mpu of two, sharded over four", "mpu: "),
        ("Ulysses' mpu", "Ulysses"),
        ("AutoTP with Ulysses' mpu", "Ulysses"),
        ("adapters in a sharded block", r"down_proj\.down\.weight"),
        ("AutoTP by its key", r"tensor_parallel\.autotp_size"),
        ("AutoTP by a call", "tp_model_init: tp_size"),
    ],
)
@on_ranks(4)
def test_groups_and_models_that_do_not_fit_are_refused(case: str, expected: str) -> None:
    import deepspeed
    from deepspeed.runtime.tensor_parallel import init_utils

    model = tpar.llama()
    config, mpu = engine_config(3 if case == "no mpu" else 2, {}, 2), tpar.groups(2)
    if "with Ulysses" not in case:
        parallelize(model, LLAMA, tpar.groups(4 if "over four" in case else 2).tp_group)
    if "Ulysses" in case:
        mpu = tpar.sequence_parallel_mpu()
    if case == "no mpu":
        mpu = None
    elif "adapters" in case:
        block = model.model.model.layers[0].mlp
        block.down_proj = Adapter(block.down_proj)
    elif "call" in case:
        deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16)
    elif "AutoTP" in case:
        config["tensor_parallel"] = {"autotp_size": 2}
    try:
        with pytest.raises(ConfigError, match=expected):
            training.start(model, config, mpu=mpu)
    finally:
        init_utils._TP_MODEL_INIT_ARGS = None
        deepspeed.set_autotp_mode(training=False)


# --- without an engine ---


def batch(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_deepspeeds_checkpointing_divides_what_all_ranks_have_and_nothing_else(sequence_parallel: bool) -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    gradients = []
    for is_deepspeeds in (False, True):
        model = MixerModel(recomputes=not is_deepspeeds)
        parallelize(model, MIXER_PLAN, tpar.groups(2).tp_group, sequence_parallel=sequence_parallel)
        if is_deepspeeds:
            checkpointing.configure(tpar.groups(2), partition_activations=True)
            for layer in model.layers:
                layer.forward = partial(checkpointing.checkpoint, layer.forward)
        try:
            if is_deepspeeds and sequence_parallel:
                with pytest.raises(ConfigError, match=r"activation_checkpointing\.partition_activations"):
                    model(batch(2).requires_grad_())
                return
            model(batch(2).requires_grad_()).backward()
        finally:
            checkpointing.PARTITION_ACTIVATIONS, checkpointing.mpu = False, None
        gradients.append([p.grad for p in model.parameters()])
    assert min(sqnr_db(*pair) for pair in zip(*gradients, strict=True)) > 85


def dropped(where: str, sequence_parallel: bool, seeds_differ: bool) -> tuple[bool, list[str]]:
    """(whether two steps are an error, whole parameters that train apart) with dropout on what `where` gives."""
    model = MixerModel()
    model.before = nn.Linear(WIDTH, WIDTH)
    model.register_forward_pre_hook(lambda model, args: (model.before(*args),))
    mixer = model.layers[0].mixer
    places = {"before": model.before, "features": mixer.up, "block": mixer, "last": model.last}
    parallelize(model, MIXER_PLAN, tpar.groups(2).tp_group, sequence_parallel=sequence_parallel)
    places[where].register_forward_hook(lambda module, args, output: F.dropout(output, 0.3))
    tpar.to_fp8(model.layers)
    torch.manual_seed(dist.get_rank() if seeds_differ else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_error = True
    with suppress(ConfigError, ValueError):
        for step in range(2):
            model(batch(2, step)).backward()
            optimizer.step()
        is_error = False
    return is_error, differing(dict(model.named_parameters()), model)


@pytest.mark.parametrize(
    ("where", "sequence_parallel", "is_error", "apart"),
    [
        ("before", True, True, []),
        ("before", False, True, []),
        ("features", True, False, []),
        ("block", True, False, []),
        ("block", False, True, None),
        ("last", True, False, ["head.bias", "head.weight"]),
    ],
)
def test_dropout_that_all_ranks_compute_needs_one_seed(
    ranks: Any, where: str, sequence_parallel: bool, is_error: bool, apart: list[str] | None
) -> None:
    """As the table of docs/tensor-parallel.md says; `apart`: what trains apart where seeds differ, if that matters."""
    assert ranks(2).run(dropped, where, sequence_parallel, False) == [(False, [])] * 2
    for found_error, found in ranks(2).run(dropped, where, sequence_parallel, True):
        assert found_error == is_error
        assert apart is None or sorted(found) == apart, found
