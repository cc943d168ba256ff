"""The layer choice under the engine: rank 0's table decides for all, and what is not chosen trains as stock does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_pipeline
import torch
import training
from torch import nn

from fp8_ds.errors import ConfigError
from fp8_ds.nn.choice import Book
from fp8_ds.nn.layer_table import Case, LayerTable, Machine, Times, cache_file

pytestmark = pytest.mark.distributed

MODEL = {"width": 32, "hidden": 72, "num_blocks": 2}
TOKENS = training.MICRO_BATCH * training.LENGTH
UP, DOWN = (72, 32), (32, 72)
FASTER, SLOWER = (655, 410), (41, 57)
"""bf16 and FP8 microseconds."""
HOST_US = 1.0


def measured(**more: Any) -> dict[str, Any]:
    return {"linear": {"layer_choice": "measured", "tokens": TOKENS, **more}}


@contextmanager
def table(folder: Path | str, rows: dict[tuple[int, int], tuple[float, ...]], **more: Any) -> Iterator[None]:
    """While inside, this rank's cache in `folder` has `rows`, (out, in): (bf16 us, FP8 us), biased or not. A third
    number is what it takes the host in FP8."""
    before = os.environ.get("FP8_DS_CACHE")
    os.environ["FP8_DS_CACHE"] = str(folder)
    times = {}
    for (n, k), (bf16_us, fp8_us, *host) in rows.items():
        for bias in (False, True):
            key = {"recipe": "tensorwise", "grad_dtype": "e5m2", "backend": "torch", "m": TOKENS, **more}
            known = {
                "fp8_us": fp8_us,
                "bf16_us": bf16_us,
                "fp8_host_us": (host or [HOST_US])[0],
                "bf16_host_us": HOST_US,
            }
            times[Case(k=k, n=n, bias=bias, **key)] = Times(**known)
    machine = Machine.of(torch.device("cpu"))
    LayerTable(machine, times).write(cache_file(machine))
    try:
        yield
    finally:
        if before is None:
            del os.environ["FP8_DS_CACHE"]
        else:
            os.environ["FP8_DS_CACHE"] = before


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged on this rank with "fp8: " before it."""
    import logging

    from deepspeed.utils import logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        lines[:] = [line for line in lines if line.startswith("fp8: ")]


def build(stage: int, fp8: dict[str, Any] | None, seed: int = 0, **overrides: Any) -> Any:
    return training.build(training.ds_config(stage, fp8, **overrides), MODEL, seed)


def losses_of(stage: int, fp8: dict[str, Any] | None, num_steps: int = 3) -> list[float]:
    engine = build(stage, fp8)
    losses = training.train(engine, num_steps)
    training.destroy(engine)
    return losses


# --- who decides ---


@contextmanager
def looked_up(function: Any) -> Iterator[list[int]]:
    """While inside, `function(book, cases)` answers in place of `Book.times_of`; the numbers of cases asked for."""
    before, asked = Book.times_of, []

    def times_of(self: Book, cases: Any) -> Any:
        asked.append(len(cases))
        return function(self, cases)

    Book.times_of = times_of  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Book.times_of = before  # type: ignore[method-assign]


def rank_0_decides(folder: str, stage: int) -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    rows = {UP: FASTER, DOWN: SLOWER} if rank == 0 else {UP: SLOWER, DOWN: FASTER}
    with table(f"{folder}/{rank}", rows), heard() as lines, looked_up(Book.times_of) as asked:
        engine = build(stage, measured())
    found: dict[str, Any] = {
        "said": lines,
        "asked": asked,
        "plan": [(r.fqn, r.converted, r.reason) for r in engine.fp8.plan.layers],
    }
    found["classes"] = [type(block.up).__name__ for block in engine.module.blocks]
    found["weights"] = list(engine.fp8.weights)
    found["losses"] = training.train(engine, 3)
    training.destroy(engine)
    found["filtered"] = losses_of(stage, {"linear": {"filter_fqns": ["down", "lm_head"]}})
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_table_of_rank_0_decides_for_all_ranks_and_the_rest_is_bf16_to_the_bit(
    ranks: Any, tmp_path: Path, stage: int
) -> None:
    first, second = ranks(2).run(rank_0_decides, str(tmp_path), stage)
    for found in (first, second):
        assert found["plan"] == [
            (f"blocks.{i}.{name}", name == "up", f"{reason} at M 128")
            for i in range(2)
            for name, reason in (("up", "fp8: 410 us against 655 us"), ("down", "bf16 is faster: 41 us against 57 us"))
        ] + [("lm_head", False, "filter_fqns")]
        assert found["classes"] == ["Fp8Linear"] * 2
        assert found["weights"] == ["blocks.0.up.weight", "blocks.1.up.weight"]
        assert found["losses"] == found["filtered"]
    assert second["said"] == []
    assert (first["asked"], second["asked"]) == ([2], [])
    table_line, plan_line, attention_line = first["said"]
    assert attention_line == "fp8: attention: as the model has it"
    assert table_line.splitlines()[0].endswith("at 128 tokens:")
    assert "[72, 32], bias: fp8: 410 us against 655 us" in table_line
    assert "blocks.0.down (bf16 is faster: 41 us against 57 us at M 128)" in plan_line


def without_times(folder: str) -> list[str]:
    import torch.distributed as dist

    rank, found = dist.get_rank(), []
    with table(f"{folder}/{rank}", {UP: FASTER} if rank == 0 else {UP: FASTER, DOWN: FASTER}):
        with pytest.raises(ConfigError) as caught:
            build(2, measured())
        found.append(str(caught.value))
        with looked_up(broken), pytest.raises(ConfigError) as caught:
            build(2, measured())
        found.append(str(caught.value))
    dist.barrier()  # no rank is inside a collective of its own
    return found


def broken(self: Book, cases: Any) -> Any:
    raise RuntimeError("the device is lost")


def test_what_rank_0_cannot_say_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(without_times, str(tmp_path))
    assert first == second
    missing, lost = first
    assert missing.startswith('fp8.linear.layer_choice: expected "all" on cpu, got "measured"')
    assert "n=32" in missing and 'Write "all"' in missing
    assert "RuntimeError: the device is lost" in lost and 'Write "all"' in lost


def one_for_the_host(folder: str) -> list[list[str]]:
    """Two linears of UP, two of DOWN and the head: which are in FP8, by what the host takes for UP."""
    found = []
    for up_host in (40.0, 50.0):
        rows: dict[tuple[int, int], tuple[float, ...]] = {UP: (20, 10, up_host), DOWN: (1, 2)}
        with table(folder, {**rows, (training.VOCABULARY, MODEL["width"]): (50, 60)}):
            engine = build(2, measured(filter_fqns=[]))
        found.append([] if engine.fp8 is None else list(engine.fp8.weights))
        training.destroy(engine)
    return found


def test_every_linear_counts_for_the_host(ranks: Any, tmp_path: Path) -> None:
    # bf16 takes the device 92 us; UP in FP8 the host 2 x 40 + 3, or 2 x 50 + 3.
    for found in ranks(2).run(one_for_the_host, str(tmp_path)):
        assert found == [["blocks.0.up.weight", "blocks.1.up.weight"], []]


# --- nothing chosen ---

STATES = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def nothing_chosen(folder: str, stage: int) -> dict[str, Any]:
    with table(folder, {UP: SLOWER, DOWN: SLOWER}), heard() as lines:
        engine = build(stage, measured())
        found: dict[str, Any] = {"fp8": engine.fp8, "report": engine.fp8_report()}
        found["optimizer"] = type(engine.optimizer).__name__
        found["timer_waits"] = engine.tput_timer.config.synchronized
        found["classes"] = {type(module).__name__ for module in engine.module.modules()}
        found["losses"] = training.train(engine, 3)
        training.destroy(engine)
        found["said"] = lines
        for more in ({"zero": {"reduce_scatter": "fp8"}}, STATES) if stage > 1 else ():
            engine = build(stage, {**measured(), **more})
            losses = training.train(engine, 3)
            assert engine.fp8_report()["num_fp8_weights"] == 0 and losses[-1] < losses[0]
            found["reduced_bytes" if "zero" in more else "with_states"] = engine.fp8_report()["reduced_bytes"]
            training.destroy(engine)
    found["stock"] = losses_of(stage, None)
    return found


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_where_every_layer_is_slower_in_fp8_the_engine_trains_as_stock_to_the_bit(
    ranks: Any, tmp_path: Path, stage: int
) -> None:
    first, second = ranks(2).run(nothing_chosen, str(tmp_path), stage)
    for found in (first, second):
        assert found["fp8"] is None and found["report"] == {"enabled": False}
        assert found["timer_waits"] and not found["optimizer"].startswith("Fp8") and "Fp8Linear" not in found["classes"]
        assert found["losses"] == found["stock"]
        # FP8 gradients and states need no FP8 weight: where they are asked for they stay.
        assert stage == 1 or (found["reduced_bytes"] > 0 and found["with_states"] == 0)
    assert any(line.startswith("fp8: no linear is worth FP8") for line in first["said"])
    assert sum(line.endswith("it trains as stock bf16") for line in first["said"]) == 1
    assert any("fp8: 0 of 5 linears" in line and "bf16 is faster: 41 us" in line for line in first["said"])


# --- resume with another table ---


def resume(folder: str, stage: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train with up in FP8, save; load where down is chosen instead; load again as the notice says."""
    fp8 = {**measured(), **more}
    checkpoint = f"{folder}/checkpoint"
    with table(f"{folder}/first", {UP: FASTER, DOWN: SLOWER}):
        engine = build(stage, fp8)
    training.train(engine, 2)
    engine.save_checkpoint(checkpoint)
    masters = training.full_masters(engine)
    found: dict[str, Any] = {"whole": training.train(engine, 2, first_step=2)}
    training.destroy(engine)

    with table(f"{folder}/second", {UP: SLOWER, DOWN: FASTER}):
        engine = build(stage, fp8, seed=1)
    with heard() as lines:
        engine.load_checkpoint(checkpoint)
    found["said"] = lines
    found["weights"] = list(engine.fp8.weights)
    found["far"] = {
        name: float((value - masters[name]).abs().max() / masters[name].abs().max().clamp(min=1e-30))
        for name, value in training.full_masters(engine).items()
    }
    found["other"] = training.train(engine, 2, first_step=2)
    training.destroy(engine)

    kept = {**more, "linear": {"layer_choice": "all", "filter_fqns": ["down", "lm_head"]}}
    engine = build(stage, kept, seed=1)
    with heard() as lines:
        engine.load_checkpoint(checkpoint)
    assert not any("differ" in line for line in lines)
    found["kept"] = training.train(engine, 2, first_step=2)
    training.destroy(engine)
    return found


@pytest.mark.parametrize(
    ("stage", "more", "tolerance"), [pytest.param(2, {}, 0, marks=pytest.mark.slow), (3, {}, 0), (2, STATES, 2**-12)]
)
def test_a_checkpoint_of_another_choice_loads_and_the_notice_says_how_to_keep_it(
    ranks: Any, tmp_path: Path, stage: int, more: dict[str, Any], tolerance: float
) -> None:
    first, second = ranks(2).run(resume, str(tmp_path), stage, more)
    (notice,) = first["said"]
    assert "2 new in FP8 ['blocks.0.down', 'blocks.1.down'], 2 back in bf16" in notice
    remedy = '"linear": {"layer_choice": "all", "filter_fqns": ["down", "lm_head"]}'
    assert f"To go on with the checkpoint's layers, start with {remedy}." in notice
    assert second["said"] == []
    for found in (first, second):
        assert found["weights"] == ["blocks.0.down.weight", "blocks.1.down.weight"]
        assert max(found["far"].values()) <= tolerance
        assert found["kept"] == found["whole"]
        assert found["other"] != found["whole"]
        assert max(abs(a - b) for a, b in zip(found["other"], found["whole"], strict=True)) < 0.05


def resume_from_nothing(folder: str) -> dict[str, Any]:
    checkpoint = f"{folder}/checkpoint"
    with table(f"{folder}/none", {UP: SLOWER, DOWN: SLOWER}):
        engine = build(2, measured())
        training.train(engine, 2)
        engine.save_checkpoint(checkpoint)
        whole = training.train(engine, 2, first_step=2)
        training.destroy(engine)
        engine = build(2, measured(), seed=1)
    with heard() as same:
        _, client_state = engine.load_checkpoint(checkpoint)
    assert "fp8_ds" not in client_state
    assert training.train(engine, 2, first_step=2) == whole
    training.destroy(engine)
    with table(f"{folder}/all", {UP: FASTER, DOWN: FASTER}):
        engine = build(2, measured(), seed=1)
    with heard() as other:
        engine.load_checkpoint(checkpoint)
    engine.save_checkpoint(f"{folder}/all")
    training.destroy(engine)
    with table(f"{folder}/none", {UP: SLOWER, DOWN: SLOWER}):
        engine = build(2, measured(), seed=2)
    with heard() as back:
        engine.load_checkpoint(f"{folder}/all")
    training.destroy(engine)
    return {"same": same, "other": other, "back": back}


def test_a_checkpoint_without_fp8_layers_knows_its_choice_too(ranks: Any, tmp_path: Path) -> None:
    said, _ = ranks(2).run(resume_from_nothing, str(tmp_path))
    assert said["same"] == []
    (other,) = said["other"]
    assert "4 new in FP8" in other and 'set "fp8.enabled" to false' in other
    (back,) = said["back"]
    assert "4 back in bf16" in back and '"filter_fqns": ["lm_head"]' in back


# --- pipelines ---


WIDE, NARROW = (test_pipeline.HIDDEN, test_pipeline.WIDTH), (test_pipeline.WIDTH, test_pipeline.HIDDEN)
HEAD = (training.VOCABULARY, test_pipeline.WIDTH)


def pipeline(fp8: dict[str, Any] | None) -> dict[str, Any]:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import groups

    layers = [LayerSpec(nn.Embedding, training.VOCABULARY, test_pipeline.WIDTH)]
    layers += [LayerSpec(training.Block, test_pipeline.WIDTH, test_pipeline.HIDDEN, True) for _ in range(2)]
    layers.append(LayerSpec(test_pipeline.Head))
    torch.manual_seed(0)
    net = PipelineModule(layers, num_stages=2, loss_fn=test_pipeline.loss_fn, partition_method="uniform", base_seed=7)
    config = training.ds_config(1, fp8, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    batches = test_pipeline.data(2)
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    context = getattr(engine, "fp8", None)
    weights = None if context is None else list(context.weights)
    training.destroy(engine)
    groups.mpu = None  # stock leaves the pipeline's grid behind, for the next engine of this process to trip over
    return {"losses": losses, "weights": weights}


def pipelines(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    # Only rank 0, of the first stage, knows of the head, which is in the second.
    rows = {WIDE: FASTER, NARROW: SLOWER, **({HEAD: FASTER} if rank == 0 else {})}
    with table(f"{folder}/{rank}", rows):
        some = pipeline(measured(filter_fqns=[]))
    with table(f"{folder}/{rank}", {WIDE: SLOWER, NARROW: SLOWER, HEAD: FASTER}):
        lopsided = pipeline(measured(filter_fqns=[]))
    with table(f"{folder}/{rank}", {WIDE: SLOWER, NARROW: SLOWER}):
        none = pipeline(measured())
    # By the first stage alone the host would be late, 31 us against 21; by both the device is, 122 against 63.
    with table(f"{folder}/{rank}", {WIDE: (20, 10, 30), NARROW: (1, 2), HEAD: (100, 200)}):
        by_all = pipeline(measured(filter_fqns=[]))
    return {"by_all": by_all, "some": some, "lopsided": lopsided, "none": none, "stock": pipeline(None)}


def test_rank_0_decides_for_all_pipeline_stages(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(pipelines, str(tmp_path))
    assert [len(found["some"]["weights"]) for found in (first, second)] == [1, 2]
    assert [len(found["lopsided"]["weights"]) for found in (first, second)] == [0, 1]
    assert [len(found["by_all"]["weights"]) for found in (first, second)] == [1, 1]
    for found in (first, second):
        assert found["none"]["weights"] is None
        assert found["none"]["losses"] == found["stock"]["losses"]
        for kind in ("some", "lopsided"):
            pairs = zip(found[kind]["losses"], found["stock"]["losses"], strict=True)
            assert found[kind]["losses"] != found["stock"]["losses"]
            assert max(abs(a - b) for a, b in pairs) < 0.03
