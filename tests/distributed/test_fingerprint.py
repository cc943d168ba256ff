"""Ranks that do not start alike: one error on all ranks, which names what differs and where, and nobody waits."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import training
from support.ranks import IMPORTED_ONCE, RankPool
from torch import nn

from fp8_ds.host import free_port

pytestmark = pytest.mark.distributed

SECONDS = 300.0


def message(change: str, odd: int, folder: str = "") -> tuple[str, str]:
    """(class, text) of what rank `odd`, which differs by `change`, and its peers raise; ("", "") for nothing.

    Args:
        folder: where a monitor may write.
    """
    import torch.distributed as dist

    from fp8_ds.engine import rank_agreement
    from fp8_ds.errors import Fp8DsError

    differs = dist.get_rank() == odd
    config, model, hidden = training.ds_config(2, {}), {}, 192
    restore = None
    if differs and change == "block":
        config["fp8"]["linear"] = {"recipe": "rowwise"}
    elif differs and change == "configuration":
        config["zero_optimization"] = {"stage": 1}
        config["optimizer"]["params"]["lr"] = 1e-3
    elif differs and change == "shape":
        hidden = 208
    elif differs and change == "frozen":
        model = {"frozen": "blocks.0.up"}
    elif differs and change == "refused":
        config["fp8"]["linear"] = {"recipe": "auto"}
    elif differs and change == "unsupported":
        config["zero_optimization"] = {"stage": 0}
    elif differs and change == "version":
        restore, rank_agreement.__version__ = rank_agreement.__version__, "0.0.9"
    elif differs and change == "seams":
        return with_another_seam(config)
    elif differs and change in CONFIGURATIONS:
        config.update(CONFIGURATIONS[change][0])
    elif change == "places":  # allowed
        config["tensorboard"] = {"enabled": False, "output_path": f"/rank{dist.get_rank()}"}
        config["steps_per_print"] = 1_000_000 + dist.get_rank()
    elif change == "monitor":  # allowed: rank 0 writes
        config["fp8"]["monitor"] = {"every": 1}
        config["csv_monitor"] = {"enabled": not differs, "output_path": folder, "job_name": "test"}
    try:
        training.destroy(training.build(config, {"hidden": hidden, **model}))
    except Fp8DsError as error:
        return type(error).__name__, str(error)
    finally:
        if restore is not None:
            rank_agreement.__version__ = restore
    return "", ""


def with_another_seam(config: dict[str, Any]) -> tuple[str, str]:
    """As if a body in this rank's DeepSpeed had been edited."""
    from fp8_ds.engine import rank_agreement
    from fp8_ds.errors import Fp8DsError

    stock = rank_agreement._seams
    changed = {**stock(), "code of deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step": "edited"}
    rank_agreement._seams = lambda: changed
    try:
        training.build(config)
    except Fp8DsError as error:
        return type(error).__name__, str(error)
    finally:
        rank_agreement._seams = stock
    return "", ""


CONFIGURATIONS = {
    name: ({block: {name: value}}, f"{block}.{name} missing on rank 0, {shown} on rank 1")
    for block, name, value, shown in (
        ("checkpoint", "load_universal", True, "true"),
        ("activation_checkpointing", "partition_activations", True, "true"),
    )
}
DIFFERENCES = {
    "block": 'fp8.linear.recipe "tensorwise" on rank 0, "rowwise" on rank 1',
    "configuration": "optimizer.params.lr 0.003 on rank 0, 0.001 on rank 1",
    "shape": "blocks.0.up.weight [192, 64] float32 of a Linear on rank 0, [208, 64]",
    "frozen": "blocks.0.up fp8 on rank 0, bf16 (frozen) on rank 1",
    "version": "version of fp8_ds 0.1.0 on rank 0, 0.0.9 on rank 1",
    "seams": "code of deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step",
    **{name: detail for name, (_, detail) in CONFIGURATIONS.items()},
}


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    """Killed, and an error, where a test takes longer than SECONDS."""
    pool = RankPool(2, timeout=SECONDS)
    yield pool
    pool.close()


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_difference_is_named_alike_on_all_ranks(two_ranks: RankPool, change: str) -> None:
    answers = two_ranks.run(message, change, 1)
    assert answers[0] == answers[1]
    kind, text = answers[0]
    assert kind == "ConfigError"
    assert "ranks [1] unlike rank 0 (" in text and DIFFERENCES[change] in text, text


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("change", "kind", "key"), [
    ("refused", "ConfigError", "fp8.linear.recipe"), ("unsupported", "UnsupportedError", "zero_optimization.stage: 0")
])  # fmt: skip
def test_a_rank_that_is_refused_alone_says_so_to_the_others(
    two_ranks: RankPool, change: str, kind: str, key: str, odd: int
) -> None:
    answers = two_ranks.run(message, change, odd)
    assert answers[odd][0] == kind and key in answers[odd][1]
    other, text = answers[1 - odd]
    assert other == "ConfigError" and key in text and f"ranks [{odd}]" in text


def test_ranks_may_differ_in_places_and_logs_and_train_after_a_refusal(two_ranks: RankPool) -> None:
    two_ranks.run(message, "refused", 1)
    assert two_ranks.run(message, "places", 1) == [("", "")] * 2
    assert two_ranks.run(message, "none", 1) == [("", "")] * 2


def test_only_the_rank_that_writes_needs_a_monitor(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(message, "monitor", 1, str(tmp_path)) == [("", "")] * 2


def test_a_writing_rank_without_a_monitor_says_so_to_the_others(two_ranks: RankPool, tmp_path: Path) -> None:
    answers = two_ranks.run(message, "monitor", 0, str(tmp_path))
    assert [kind for kind, _ in answers] == ["ConfigError"] * 2
    assert all("fp8.monitor.sink: expected a path" in text for _, text in answers)
    assert "ranks [0]" in answers[1][1]


def test_what_most_ranks_have_is_the_measure(ranks: Any) -> None:
    answers = ranks(3).run(message, "block", 0)
    assert len(set(answers)) == 1
    assert "ranks [0] unlike rank 1 (" in answers[0][1]


def num_collectives() -> dict[str, int]:
    """Of an exchange between ranks that agree."""
    from support.collectives import count_collectives

    from fp8_ds.config import Fp8Config
    from fp8_ds.engine.rank_agreement import start_alike, start_of_rank

    config = training.ds_config(3, {})
    model = nn.Sequential(nn.Linear(16, 16))
    mine = start_of_rank(Fp8Config.from_block(config["fp8"]), config, model, None, trains=True)
    with count_collectives() as count:
        start_alike(mine, {})
    return dict(count.num_bytes)


def test_where_all_agree_little_is_gathered(two_ranks: RankPool) -> None:
    for num_bytes in two_ranks.run(num_collectives):
        assert num_bytes.keys() == {"all_gather"} and num_bytes["all_gather"] < 2 * 128


def leave_or_say() -> None:
    """Rank 1 leaves before the exchange; rank 0 raises what it is told then."""
    import os

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(1)
    raise AssertionError(": ".join(message("none", 1)))


def test_a_rank_that_is_gone_is_an_error_at_once(two_ranks: RankPool) -> None:
    from support.ranks import RankError

    with pytest.raises(RankError, match=r"Fp8DsError: rank 0: expected 2 ranks at the start .* Look for a rank that"):
        two_ranks.run(leave_or_say)


# --- ranks without FP8 ---

SIDES = "expected fp8 to be enabled on all ranks or on none, got it on rank 0 and not on rank 1"


def one_without(block: dict[str, Any] | None, first: int) -> None:
    """FP8 on rank 0, `block` on rank 1; rank `first` has begun before the other does."""
    import torch.distributed as dist

    if dist.get_rank() != first:
        dist.distributed_c10d._get_default_store().wait([f"fp8_ds/1/{('on', 'off')[first]}"])
    config = training.ds_config(2, {})
    if dist.get_rank() == 1:
        config["fp8"] = block
        if block is None:
            del config["fp8"]
    training.build(config)


@pytest.mark.parametrize(("block", "first"), [({"enabled": False}, 0), (None, 1)], ids=["off-second", "none-first"])
def test_a_rank_without_fp8_ends_the_start_wherever_the_other_side_comes_second(
    block: dict[str, Any] | None, first: int
) -> None:
    from support.ranks import RankError

    pool = RankPool(2, timeout=SECONDS, grace=1.0)
    try:
        with pytest.raises(RankError) as caught:
            pool.run(one_without, block, first)
    finally:
        pool.close()
    assert f"ConfigError: {SIDES}" in str(caught.value).split(f"rank {1 - first}:\n")[1]


def without_fp8_alone() -> None:
    """Rank 0 is through before rank 1 begins."""
    import torch.distributed as dist

    from fp8_ds.engine.rank_agreement import take_side

    for rank in range(2):
        if dist.get_rank() == rank:
            assert take_side(False, {}) is None
        dist.barrier()


def test_a_rank_without_fp8_waits_for_nobody(two_ranks: RankPool) -> None:
    two_ranks.run(without_fp8_alone)


def engines_of_several_kinds() -> list[str]:
    """A stock engine, then some ranks' own with an `mpu`, then one in FP8, twice; rank 1 is late to each."""
    import torch.distributed as dist

    from fp8_ds.engine.initialize import initialize

    def stock(model: Any = None, config: Any = None, mpu: Any = None) -> str:
        return "stock"

    found = []
    for _ in range(2):
        for fp8 in ({"enabled": False}, None):
            time.sleep(0.2 * dist.get_rank())
            config = {**training.ds_config(2), **({} if fp8 is None else {"fp8": fp8})}
            found.append(initialize(stock, (nn.Linear(16, 16), config), {}))
        if dist.get_rank() == 1:
            initialize(stock, (nn.Linear(16, 16), {}, object()), {})
        found.append(message("none", 1)[0])
    return found


def test_engines_with_and_without_fp8_follow_each_other_in_one_process(two_ranks: RankPool) -> None:
    assert two_ranks.run(engines_of_several_kinds) == [["stock", "stock", ""] * 2] * 2


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


def test_where_initialize_makes_the_process_group_nobody_waits_either(tmp_path: Path) -> None:
    outputs = outputs_without_a_group(tmp_path, 0, {"linear": {"recipe": "auto"}})
    assert "refused: fp8.linear.recipe" in outputs[0], outputs[0]
    assert "refused: expected a configuration that no rank refuses, got one that ranks [0]" in outputs[1]


def test_there_a_rank_without_fp8_ends_all_too(tmp_path: Path) -> None:
    assert any(f"refused: {SIDES}" in output for output in outputs_without_a_group(tmp_path, 1, None))
