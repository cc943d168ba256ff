"""Ranks that do not start alike, by `deepspeed.initialize`: one error on all ranks, and nobody waits. Each difference:
tests/unit/engine/test_rank_agreement.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import training
from support.ranks import IMPORTED_ONCE, RankError, RankPool

from fp8_ds.host import free_port

pytestmark = pytest.mark.distributed

SECONDS = 300.0


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Killed, and an error, where a test takes longer than SECONDS."""
    pool = RankPool(2, timeout=SECONDS, grace=1.0)
    yield pool
    pool.close()


def message(odd: int = -1, fp8: dict[str, Any] | None = None, **keys: Any) -> tuple[str, str]:
    """(class, text) of what this rank raises where rank `odd` has another block and configuration; else empty."""
    from fp8_ds.errors import Fp8DsError

    config = training.ds_config(2, fp8 or {} if dist.get_rank() == odd else {})
    config["steps_per_print"] = 1_000_000 + dist.get_rank()
    config.update(keys if dist.get_rank() == odd else {})
    try:
        training.destroy(training.build(config))
    except Fp8DsError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_difference_is_named_alike_on_all_ranks_which_then_start_alike(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(message, 1, {"linear": {"recipe": "rowwise"}})
    assert first == second and first[0] == "ConfigError" and "fp8.linear.recipe" in first[1]
    assert two_ranks.run(message) == [("", "")] * 2


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("changes", "kind", "key"),
    [
        ({"fp8": {"linear": {"recipe": "auto"}}}, "ConfigError", "fp8.linear.recipe"),
        ({"zero_optimization": {"stage": 0}}, "UnsupportedError", "zero_optimization.stage: 0"),
    ],
)
def test_a_rank_that_is_refused_alone_says_so_to_the_others(
    two_ranks: RankPool, changes: dict[str, Any], kind: str, key: str, odd: int
) -> None:
    answers = two_ranks.run(message, odd, **changes)
    assert answers[odd][0] == kind and key in answers[odd][1]
    other, text = answers[1 - odd]
    assert other == "ConfigError" and key in text and f"ranks [{odd}]" in text


def with_monitor(without: int, folder: str) -> tuple[str, str]:
    """As `message`: DeepSpeed's monitor, to which ours writes, is off on rank `without`."""
    from fp8_ds.errors import Fp8DsError

    csv = {"enabled": dist.get_rank() != without, "output_path": folder, "job_name": "test"}
    try:
        training.destroy(training.build(training.ds_config(2, {"monitor": {"every": 1}}, csv_monitor=csv)))
    except Fp8DsError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_only_the_rank_that_writes_needs_a_monitor(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(with_monitor, 1, str(tmp_path)) == [("", "")] * 2
    for kind, text in two_ranks.run(with_monitor, 0, str(tmp_path)):
        assert kind == "ConfigError" and "fp8.monitor.sink" in text


def leave_or_say() -> None:
    """Rank 1 leaves before the exchange; rank 0 raises what it is told then."""
    import os

    if dist.get_rank() == 1:
        os._exit(1)
    raise AssertionError(": ".join(message()))


def test_a_rank_that_is_gone_is_an_error_at_once(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Fp8DsError: rank 0: expected 2 ranks"):
        two_ranks.run(leave_or_say)


# --- ranks without FP8 ---

SIDES = "expected fp8 to be enabled on all ranks or on none, got it on rank 0 and not on rank 1"


def one_without() -> None:
    """FP8 on rank 0, and off on rank 1, which begins when the other has."""
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["fp8_ds/1/on"])
    training.build({**training.ds_config(2), "fp8": {"enabled": dist.get_rank() == 0}})


def test_a_rank_without_fp8_ends_the_start_where_it_comes_second(two_ranks: RankPool) -> None:
    two_ranks.close()
    with pytest.raises(RankError) as caught:
        two_ranks.run(one_without)
    two_ranks.close()
    assert f"ConfigError: {SIDES}" in str(caught.value).split("rank 1:\n")[1]


# --- without a process group ---

WITHOUT_A_GROUP = """
import os, sys
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
os.environ.update(environment)
sys.path.insert(0, folder)
import deepspeed, torch, training
import fp8_ds
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
assert not torch.distributed.is_initialized()
try:
    deepspeed.initialize(model=training.TinyLM(), config=training.ds_config(2, fp8))
except fp8_ds.ConfigError as error:
    print("refused:", error)
"""


def outputs_without_a_group(folder: Path, odd: int, odd_fp8: dict[str, Any] | None) -> list[str]:
    """Of two ranks that leave the process group to `deepspeed.initialize`; rank `odd` has another block.

    They are forked as the pool's are: two new interpreters take 10 s to import DeepSpeed.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    port = str(free_port())
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    running = []
    for rank, log in enumerate(logs):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        names = {"log": str(log), "environment": environment, "folder": str(Path(training.__file__).parent)}
        names["fp8"] = odd_fp8 if rank == odd else {}
        running.append(context.Process(target=exec, args=(WITHOUT_A_GROUP, names), daemon=True))
    try:
        for process in running:
            process.start()
        for process in running:
            process.join(SECONDS)
            assert process.exitcode is not None, "it waits"
    finally:
        for process in running:
            process.kill()
    return [log.read_text() for log in logs]


@pytest.mark.parametrize(
    ("odd", "fp8", "said"),
    [(0, {"linear": {"recipe": "auto"}}, "fp8.linear.recipe"), (1, None, SIDES)],
    ids=["refused", "without fp8"],
)
def test_where_initialize_makes_the_process_group_nobody_waits_either(
    tmp_path: Path, odd: int, fp8: dict[str, Any] | None, said: str
) -> None:
    outputs = outputs_without_a_group(tmp_path, odd, fp8)
    refused = [output for output in outputs if "refused: " in output and said in output]
    assert len(refused) >= (1 if fp8 is None else 2), outputs
