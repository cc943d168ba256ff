"""Partial loads, as stock does them; our state in a checkpoint; frozen weights; pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_checkpoint as base
import torch
import training
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.distributed

OPTIONS = ({"load_module_only": True}, {"load_optimizer_states": False})


def masters_after(folder: str, stage: int, fp8: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """(masters before, masters after the load, loss then) of an engine that has trained on other weights."""
    engine = base.build(stage, fp8, seed=1)
    training.train(engine, 1)
    own = training.full_masters(engine)
    path, _ = engine.load_checkpoint(folder, **options)
    assert path is not None
    masters = training.full_masters(engine)
    if fp8 is not None and not (stage == 3 and "load_module_only" in options):
        base.assert_bytes_follow_masters(engine)
    loss = training.train(engine, 1)[0]
    training.destroy(engine)
    return own, masters, loss


def partial_loads(folder: str, stage: int, writer_fp8: dict[str, Any] | None) -> list[Any]:
    writer = base.build(stage, writer_fp8)
    training.train(writer, 2)
    saved = training.full_masters(writer)
    writer.save_checkpoint(folder)
    training.destroy(writer)
    return [saved, *[[masters_after(folder, stage, kind, o) for kind in (None, {})] for o in OPTIONS]]


def rounded(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16().float() for name, value in masters.items()}


@pytest.mark.parametrize(("stage", "writer"), [(2, None), (3, {})], ids=["2-stock-file", "3"])
def test_partial_loads_leave_the_masters_that_stock_leaves(
    ranks: Any, tmp_path: Path, stage: int, writer: dict[str, Any] | None
) -> None:
    saved, *loads = ranks(2).run(partial_loads, str(tmp_path), stage, writer)[0]
    for options, ((stock_own, stock, stock_loss), (our_own, ours, our_loss)) in zip(OPTIONS, loads, strict=True):
        nothing_loaded = stage == 3 and "load_module_only" in options  # stock's file has no weights there
        base.assert_same(stock, rounded(stock_own if nothing_loaded else saved))
        # In stage 3 an element that already rounds to the loaded value keeps its fp32 master.
        base.assert_same(rounded(ours) if stage == 3 else ours, rounded(our_own) if nothing_loaded else stock)
        assert our_loss == pytest.approx(stock_loss, rel=0.02)


@pytest.mark.parametrize("states", ["fp32", "fp8"])
@on_ranks(2)
def test_a_module_loaded_through_the_engine_is_loaded_as_a_whole(states: str) -> None:
    engine = training.build(training.ds_config(2, {"optimizer": {"states": states}}))
    training.train(engine, 1)
    own = training.full_masters(engine)
    torch.manual_seed(7)
    loaded = {name: value.bfloat16() for name, value in training.TinyLM().state_dict().items()}
    left_out = {"blocks.1.up.weight", "embedding.weight", "norm.bias"}
    engine.load_module_state_dict({"module": {n: v for n, v in loaded.items() if n not in left_out}}, strict=False)
    masters = training.full_masters(engine)
    base.assert_same({name: masters[name] for name in left_out}, {name: own[name] for name in left_out})
    now = {name: value.float() for name, value in loaded.items() if name not in left_out}
    # Of what is not in FP8 an element that already rounds to the loaded value keeps its master.
    base.assert_same({name: masters[name].bfloat16().float() for name in now}, now)
    training.destroy(engine)


# --- our state ---


@on_ranks(2)
def test_histories_that_a_checkpoint_does_not_have_start_anew(folder: str) -> None:
    """In an engine that is new, and in one that has some of its own."""
    writer = base.build(2, None)
    training.train(writer, 2)
    writer.save_checkpoint(folder)
    training.destroy(writer)
    losses = []
    for steps in (0, 2):
        reader = base.build(2, base.DELAYED, seed=1)
        training.train(reader, steps)
        reader.load_checkpoint(folder)
        losses.append(training.train(reader, 2, first_step=2))
        training.destroy(reader)
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_module_only_load_takes_over_nothing_of_the_run_that_saved(folder: str) -> None:
    """Before a run's first step, and after it."""
    optimizer = {"states": "fp8", "master": "e4m11", "release": True, "release_clipping": "delayed_norm"}
    fp8 = {**base.DELAYED, "optimizer": optimizer, "guard": {"action": "bf16"}}
    writer = base.build(2, fp8)
    training.train(writer, 3)
    writer.set_layer_precision(["blocks.0.up"], "bf16")
    writer._fp8_step_callbacks._send_to_bf16(["blocks.1.up"])
    writer.save_checkpoint(folder)
    training.destroy(writer)
    for steps in (0, 1):
        reader = base.build(2, fp8, seed=1)
        reader.set_layer_precision(["blocks.1.down"], "bf16")
        training.train(reader, steps)
        reader.load_checkpoint(folder, load_module_only=True)
        updates = reader.fp8.history.num_updates
        training.train(reader, 2, first_step=steps)
        assert updates == 0 and reader.fp8.precision.in_bf16 == {"blocks.1.down"}
        assert reader.fp8.precision.state_dict()["overrides"] == {"blocks.1.down": "bf16"}
        training.destroy(reader)


@on_ranks(2)
def test_our_state_loads_weights_only_into_fewer_layers_too_and_refuses_other_versions(folder: str) -> None:
    import torch.distributed as dist
    from test_checkpoint_faults import record_again

    from fp8_ds.checkpoint.state import CHECKPOINT_KEY
    from fp8_ds.errors import ConfigError

    engine = base.build(3, base.DELAYED)
    training.train(engine, 2)
    scales = {name: scale_inv for name, (_, scale_inv) in training.fp8_state(engine).items()}
    engine.save_checkpoint(folder)
    training.destroy(engine)

    rank = dist.get_rank()
    file = Path(folder) / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    alone = Path(folder) / f"alone{rank}.pt"
    torch.save(content[CHECKPOINT_KEY], alone)
    state = torch.load(alone, weights_only=True)
    base.assert_same(state["scale_inv"], scales)
    assert state["history"]["num_updates"] == 2

    fewer = {"linear": {"recipe": "delayed", "filter_fqns": ["lm_head", "blocks.1"]}}
    engine = base.build(3, fewer, seed=1)
    engine.load_checkpoint(folder)
    base.assert_bytes_follow_masters(engine)
    training.train(engine, 1)
    training.destroy(engine)

    content[CHECKPOINT_KEY]["version"] = 99
    torch.save(content, file)
    dist.barrier()
    if rank == 0:
        for path in sorted(file.parent.glob("*_model_states.pt")):
            record_again(path)
    dist.barrier()
    engine = base.build(3, base.DELAYED, seed=1)
    with pytest.raises(ConfigError, match="expected version 1, got 99"):
        engine.load_checkpoint(folder)
    training.destroy(engine)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_fp32_masters_of_an_older_version_are_rounded_once(folder: str, stage: int) -> None:
    """A checkpoint with fp32 masters beside FP8 moments, by settings that are gone, goes on with e4m19 masters.

    Such a version wrote the files of fp32 states, whose moments FP8 held exactly, and this "fp8" block.
    """
    import torch.distributed as dist
    from test_checkpoint_faults import record_again

    from fp8_ds.checkpoint.state import BOUND_SUMS_KEY, CHECKPOINT_KEY, LATE_KEY
    from fp8_ds.numerics.masters import BF16_8, E4M19, decode, encode

    writer = base.build(stage, {"linear": {"recipe": "rowwise"}})  # scales of rows, which those masters had
    training.train(writer, 3)
    masters, moments = training.full_masters(writer), base.moments(writer)
    writer.save_checkpoint(folder, tag="old")
    expected = training.train(writer, 3, first_step=3)
    training.destroy(writer)
    rank = dist.get_rank()
    if rank == 0 or stage == 3:
        file = Path(folder) / f"old/{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"
        content = torch.load(file, weights_only=False)
        state = content[CHECKPOINT_KEY]
        state["config"]["optimizer"] |= {"states": "fp8", "master": "fp32", "master_format": "fp32"}
        state["config"]["zero"]["keep_bf16_shard"] = True
        state["config"]["schedule"]["fp32_states_from_step"] = 100
        state["config"]["schedule"]["bf16_below_lr"] = 1e-5
        state["config"]["guard"]["return_after"] = 500
        state["config"]["tensor_parallel"]["scales"] = "shared"
        state |= {BOUND_SUMS_KEY: {}, LATE_KEY: False}
        torch.save(content, file)
    dist.barrier()
    if rank == 0:
        for path in sorted((Path(folder) / "old").glob("*_model_states.pt")):
            record_again(path)
    dist.barrier()

    reader = base.build(stage, {"linear": {"recipe": "rowwise"}, "optimizer": {"states": "fp8"}}, seed=1)
    reader.load_checkpoint(folder, tag="old")
    scales = {name: scale_inv for name, (_, scale_inv) in training.fp8_state(reader).items()}
    for name, master in training.full_masters(reader).items():
        fmt, scale_inv = (E4M19, scales[name]) if name in scales else (BF16_8, None)
        assert torch.equal(master, decode(*encode(masters[name], fmt, scale_inv), fmt, scale_inv)), name
    for name, moment in base.moments(reader).items():
        assert float((moment - moments[name]).norm()) < 0.045 * float(moments[name].norm()), name
    assert training.train(reader, 3, first_step=3) == pytest.approx(expected, abs=5e-3)
    training.destroy(reader)


# --- frozen weights ---


def frozen_engine(stage: int, frozen: str, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    net = training.TinyLM(**base.MODEL)
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith("blocks.0"))
    config = training.ds_config(
        stage, {"linear": {"frozen": frozen}}, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True}
    )
    trainable = [p for p in net.parameters() if p.requires_grad]
    return deepspeed.initialize(model=net, config=config, model_parameters=trainable)[0]


def frozen_values(engine: Any) -> dict[str, Tensor]:
    import deepspeed

    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                found[name] = p.detach().clone().cpu()
    return found


@pytest.mark.parametrize(
    ("stage", "kind", "exclude"),
    [
        (2, "fp8", True),
        (3, "fp8", False),
        (1, "bf16", False),
    ],
)
@on_ranks(2)
def test_frozen_weights_resume_bit_for_bit_saved_or_excluded(folder: str, stage: int, kind: str, exclude: bool) -> None:
    engine = frozen_engine(stage, kind, seed=0)
    losses = training.train(engine, 2)
    before, values = training.fp8_state(engine), frozen_values(engine)
    assert len(before) == (4 if kind == "fp8" else 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    losses = training.train(engine, 2, first_step=2)
    training.destroy(engine)

    again = frozen_engine(stage, kind, seed=0 if exclude else 1)
    again.load_checkpoint(folder, load_module_strict=not exclude)
    base.assert_same(frozen_values(again), values)
    loaded = training.fp8_state(again)
    for part in (0, 1):  # bytes, scales
        base.assert_same({k: v[part] for k, v in loaded.items()}, {k: v[part] for k, v in before.items()})
    assert training.train(again, 2, first_step=2) == losses
    training.destroy(again)


# --- pipelines ---


class Step(torch.nn.Module):
    """A linear with an activation, one pipeline layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(x))


def pipeline_engine(seed: int) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(seed)
    layers = [LayerSpec(Step, 16, 72), LayerSpec(Step, 72, 32), LayerSpec(Step, 32, 48), LayerSpec(Step, 48, 16)]
    net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, base_seed=seed)
    config = training.ds_config(1, {}, gradient_accumulation_steps=2)
    return deepspeed.initialize(model=net, config=config, model_parameters=list(net.parameters()))[0]


def pipeline_batches(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return iter([(torch.randn(4, 16, generator=generator).bfloat16(), torch.ones(4, 16).bfloat16()) for _ in range(2)])


@on_ranks(2)
def test_a_pipeline_resumes_bit_for_bit_and_saves_bf16_of_the_masters(folder: str) -> None:
    from deepspeed.utils import groups

    before = dict(vars(groups))
    try:
        resume_pipeline(folder)
    finally:  # later engines on these ranks would take the pipeline's mpu for theirs
        vars(groups).update(before)


def resume_pipeline(folder: str) -> None:
    from fp8_ds.engine.engine import Fp8PipelineEngine

    engine = pipeline_engine(seed=0)
    assert isinstance(engine, Fp8PipelineEngine)
    for step in range(2):
        engine.train_batch(pipeline_batches(step))
    before = base.snapshot(engine)
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch(pipeline_batches(step))) for step in (2, 3)]
    training.destroy(engine)

    again = pipeline_engine(seed=1)
    again.load_checkpoint(folder)
    base.assert_same(base.snapshot(again), before)
    assert [float(again.train_batch(pipeline_batches(step))) for step in (2, 3)] == losses
    first_layer = again.stage_id * 2
    saved = torch.load(f"{folder}/global_step2/layer_{first_layer:02d}-model_states.pt", weights_only=True)
    name = next(name for name in before if name.startswith("master.") and name.endswith("weight"))
    assert torch.equal(saved["linear.weight"], before[name].bfloat16())
    training.destroy(again)
