"""megatron_pretrain.py without a GPU: arms, their arguments, logs, the table; with a clone, a run of its own.

$MEGATRON_LM_PATH names the clone; tests that need it are slow, and say so where they are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CLONE = os.environ.get("MEGATRON_LM_PATH")
NEEDS_CLONE = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLONE, reason="MEGATRON_LM_PATH names no clone of Megatron-LM"),
]

# --- arms ---


@pytest.fixture
def arms(bench: Any) -> Any:
    return bench("megatron_pretrain_arms")


@pytest.fixture
def model(bench: Any) -> Any:
    return bench("end_to_end_arms").MODELS["llama-2b"]


NAMES = ("stock-tensorwise+bf16grads", "ours-b11+bf16grads+drop", "ours-a+tp=2", "ours-a+seed=7")


def test_arms_differ_from_stock_in_their_own_words_only(arms: Any, model: Any) -> None:
    m, s = model, arms.Settings(40, 5)
    common = arms.words_of(arms.parse_arm("stock-bf16"), m, s, Path("cache"))
    for name in (*arms.WORDS, *NAMES):
        arm = arms.parse_arm(name)
        parallel = ["--tensor-model-parallel-size", str(arm.tp), "--sequence-parallel"] if arm.tp > 1 else []
        words = arms.words_of(arm, m, s, Path("cache"))
        base = [str(arm.seed) if word == "1234" else word for word in common]
        assert sorted(words) == sorted([*base, *arm.words, *parallel]), name


def test_shapes_are_those_of_the_issue(arms: Any, model: Any) -> None:
    words = arms.words_of(arms.parse_arm("ours-a"), model, arms.Settings(40, 5), Path("cache"))
    value = dict(itertools.pairwise(words))
    shape = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--seq-length", "--micro-batch-size")
    assert [value[key] for key in shape] == ["8", "4096", "14336", "4096", "2"]
    assert int(value["--vocab-size"]) + 1 == 32000 and value["--global-batch-size"] == "2"


def test_options_change_what_they_name(arms: Any) -> None:
    arm = arms.parse_arm("ours-b11+bf16grads+fa3+tp=2+seed=7")
    assert (arm.tp, arm.seed) == (2, 7)
    assert arm.words[arm.words.index("--fp8-attention-backend") + 1] == "fa3"
    assert arm.words[-3:] == ("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16")
    states = ("--fp8-optimizer-states", "--fp8-master", "bf16_8")
    assert arms.parse_arm("ours-a+stock").words == (*arms.TENSORWISE, *states)
    assert arms.parse_arm("stock-tensorwise+bf16grads").words == (*arms.TENSORWISE, *arm.words[-3:])
    twice = arms.parse_arm("stock-fp8-states+bf16grads").words
    assert twice.count("--use-precision-aware-optimizer") == 1 and "--main-grads-dtype" in twice


@pytest.mark.parametrize("name", ["", "ours", "stock-bf16+fa3", "ours-a+tp=0", "ours-a+tp", "ours-a+quick"])
def test_arm_that_is_not_one_is_refused(arms: Any, name: str) -> None:
    with pytest.raises(ValueError, match="arm: expected"):
        arms.parse_arm(name)


def test_fp8_weights_are_not_drawn_on_the_cpu(arms: Any, model: Any) -> None:
    """Their masters would be made of memory that nothing was written to."""
    m, s = model, arms.Settings(40, 5, cpu_init=True)
    with pytest.raises(ValueError, match="arm: expected bf16 weights"):
        arms.words_of(arms.parse_arm("ours-b+tp=2"), m, s, Path("cache"))
    for name in ("ours-a", "ours-a+tp=2", "stock-tensorwise+tp=2"):
        assert "--use-cpu-initialization" in arms.words_of(arms.parse_arm(name), m, s, Path("cache"))


def test_only_what_runs_without_transformer_engine_is_tried_without(arms: Any) -> None:
    without = {name for name in arms.WORDS if not arms.parse_arm(name).needs_te}
    assert without == {"stock-bf16", "ours-fa3", "ours-fa3_fp8", "ours-a"}


PARSE = """
import json, os, sys
clone, cases = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, clone)
from megatron_patches import compat
from megatron_patches.cpu import on_cpu
with on_cpu(training=True):
    import megatron.training.arguments as theirs
    from megatron_patches import arguments as ours
    # What is asked of Transformer Engine while arguments are read: whether it is there, and new.
    compat.transformer_engine = lambda: compat.TransformerEngine(True, "2.11.0")
    theirs.is_te_min_version = lambda *args, **kwargs: True
    stock = theirs.add_megatron_arguments
    for name, case in cases.items():
        os.environ.update(WORLD_SIZE=str(case["tp"]), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
        sys.argv = ["pretrain_gpt.py", *case["words"]]
        theirs.add_megatron_arguments = ours.wrap_add_arguments(stock) if case["ours"] else stock
        args = theirs.parse_args()
        theirs.validate_args(ours.digest_arguments(args) if case["ours"] else args)
        print("ACCEPTED", name, args.fp8_recipe if args.fp8 else "bf16", args.main_grads_dtype, args.spec is not None)
"""


class TestWithAClone:
    pytestmark = NEEDS_CLONE

    def test_megatrons_parser_takes_every_arm(self, arms: Any, model: Any, cpu_environment: dict[str, str]) -> None:
        """As on a GPU, with Transformer Engine; only its layers are not built."""
        assert CLONE is not None
        m, s = model, arms.Settings(40, 5)
        cases = {}
        for name in (*arms.WORDS, *NAMES, "ours-b11+bf16grads"):
            arm = arms.parse_arm(name)
            words = arms.words_of(arm, m, s, Path("cache"))
            cases[name] = {"tp": arm.tp, "ours": arm.is_ours, "words": words}
        run = subprocess.run(
            [sys.executable, "-c", PARSE, CLONE, json.dumps(cases)],
            env=cpu_environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        accepted = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("ACCEPTED")]
        assert [line[0] for line in accepted] == list(cases), run.stderr[-3000:]
        by_name = {name: rest for name, *rest in accepted}
        assert by_name["stock-bf16"] == ["bf16", "torch.float32", "False"]
        assert by_name["stock-blockwise"] == ["blockwise", "torch.float32", "False"]
        assert by_name["stock-tensorwise+bf16grads"] == ["tensorwise", "torch.bfloat16", "False"]
        assert by_name["ours-b11+bf16grads"] == ["tensorwise", "torch.bfloat16", "True"]

    def test_arms_run_on_cpu(self, run_main: Callable[..., str], tmp_path: Path) -> None:
        small = ("--model", "tiny-llama", "--iterations", 8, "--warm-up", 2, "--on-cpu", "--out", tmp_path)
        text = run_main(
            "megatron_pretrain",
            *small,
            *("--mode", "losses", "--megatron-path", str(CLONE), "--cache", tmp_path / "cache"),
            *("--arms", "stock-bf16", "ours-a+bf16grads", "ours-b"),
        )
        (file,) = tmp_path.glob("*-megatron-pretrain.json")
        (run,) = json.loads(file.read_text())["runs"]
        stock, ours, missing = run["results"]
        for result in (stock, ours):
            assert [iteration for iteration, _ in result["losses"]] == list(range(1, 9)), result
            assert result["finite"] and result["tokens_per_second_per_gpu"] > 0 and len(result["interval_ms"]) == 6
        assert stock["losses"] != ours["losses"]
        assert ours["held_out_loss"] == pytest.approx(stock["held_out_loss"], rel=0.01)
        assert missing["error"].startswith("NOT INSTALLED: transformer_engine") and "ours-b | **NOT INST" in text
        tables = {path.name[29:]: path.read_text().splitlines() for path in tmp_path.glob("*.csv")}
        assert {name: len(lines) for name, lines in tables.items()} == {"stock-bf16.csv": 9, "ours-a+bf16grads.csv": 9}
        assert str(tmp_path) not in text + file.read_text() and str(CLONE) not in text + file.read_text()


# --- logs ---

# Lines as core_v0.16.1 wrote them in a dry run, with other numbers.
LOG = """\
(min, max) time across ranks (ms):
 [2026-11-22 04:51:07.101] iteration        1/      20 | consumed samples:            2 | elapsed time per iteration \
(ms): 2075.4 | throughput per GPU (TFLOP/s/GPU): 48.1 | learning rate: 1.500000E-05 | global batch size:     2 | lm \
loss: 1.037500E+01 | loss scale: 1.0 | grad norm: 11.934 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 30720.00 | max allocated: 40960.00 | reserved: 43008.00 | max \
reserved: 43008.00
 [2026-11-22 04:51:08.101] iteration        2/      20 | consumed samples:            4 | elapsed time per iteration \
(ms): 1200.0 | throughput per GPU (TFLOP/s/GPU): 90.0 | learning rate: 3.000000E-05 | global batch size:     2 | lm \
loss: 1.027500E+01 | loss scale: 1.0 | grad norm: 9.1 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
[Rank 0] (after 2 iterations) memory (MB) | allocated: 30720.00 | max allocated: 45056.00 | reserved: 47104.00 | max \
reserved: 48128.00
[Rank 1] (after 2 iterations) memory (MB) | allocated: 30720.00 | max allocated: 46080.00 | reserved: 47104.00 | max \
reserved: 47104.00
 [2026-11-22 04:51:09.101] iteration        3/      20 | consumed samples:            6 | elapsed time per iteration \
(ms): 160.0 | throughput per GPU (TFLOP/s/GPU): 600.0 | learning rate: 4.500000E-05 | global batch size:     2 | lm \
loss: 1.000000E+01 | loss scale: 1.0 | grad norm: 8.0 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
 [2026-11-22 04:51:10.101] iteration        4/      20 | consumed samples:            8 | elapsed time per iteration \
(ms): 164.0 | throughput per GPU (TFLOP/s/GPU): 590.0 | learning rate: 4.500000E-05 | global batch size:     2 | lm \
loss: 9.500000E+00 | loss scale: 1.0 | grad norm: 8.0 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
 [2026-11-22 04:51:11.101] iteration        5/      20 | consumed samples:           10 | elapsed time per iteration \
(ms): 900.0 | throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: 4.500000E-05 | global batch size:     2 | lm \
loss: 9.400000E+00 | loss scale: 1.0 | grad norm: 8.0 | number of skipped iterations:   1 | number of nan \
iterations:   0 |
----------------------------------------------------------------------------------------------------------
 validation loss at iteration 5 on validation set | lm loss value: 9.312500E+00 | lm loss PPL: 1.107560E+04 |
----------------------------------------------------------------------------------------------------------
"""


@pytest.fixture
def log(bench: Any) -> Any:
    return bench("megatron_pretrain_log")


def test_log_gives_median_time_and_largest_peak(log: Any) -> None:
    found = log.measured(LOG, 2, 8192, 1)
    assert found["interval_ms"] == [160.0, 164.0, 900.0] and found["step_ms"] == 164.0
    assert found["tokens_per_second_per_gpu"] == pytest.approx(8192 / 0.164, abs=0.1)
    assert log.measured(LOG, 2, 8192, 2)["tokens_per_second_per_gpu"] == pytest.approx(8192 / 0.328, abs=0.1)
    assert (found["peak_allocated_gib"], found["peak_reserved_gib"]) == (45.0, 47.0)
    assert (found["tflops_per_gpu"], found["loss"], found["finite"], found["num_skipped"]) == (590.0, 9.4, True, 1)
    assert log.held_out_loss(LOG) == 9.3125


def test_line_that_began_in_the_warm_up_does_not_count(log: Any) -> None:
    lines = [line for line in LOG.splitlines() if "iteration        3/" not in line]
    assert log.measured("\n".join(lines), 3, 8192, 1)["interval_ms"] == [900.0]  # 4 began with 3
    with pytest.raises(ValueError, match="log: expected lines about iterations after 9"):
        log.measured(LOG, 9, 8192, 1)


def test_second_line_is_a_mean_of_two_and_is_undone(log: Any) -> None:
    losses = log.losses_of(log.lines_of(LOG))
    assert losses == {1: 10.375, 2: pytest.approx(10.175), 3: 10.0, 4: 9.5, 5: 9.4}


def test_run_whose_loss_is_nan_is_not_finite(log: Any) -> None:
    nan = LOG.replace("| lm loss: 9.400000E+00 ", "").replace(
        "nan iterations:   0 |\n---", "nan iterations:   1 |\n---"
    )
    found = log.measured(nan, 2, 8192, 1)
    assert found["loss"] is None and not found["finite"]
    assert 5 not in log.losses_of(log.lines_of(nan))
    recovered = LOG.replace("nan iterations:   0 |", "nan iterations:   1 |", 1)
    assert recovered != LOG and not log.measured(recovered, 2, 8192, 1)["finite"]


# --- the report ---


def result(arm: str, tokens: float, gib: float, **more: Any) -> dict[str, Any]:
    found = {"arm": arm, "step_ms": 8192 / tokens * 1000, "interval_ms": [1.0], "tokens_per_second_per_gpu": tokens}
    memory = {"peak_allocated_gib": gib, "peak_reserved_gib": gib + 1, "tflops_per_gpu": 600.0}
    return {**found, **memory, "loss": 2.0, "finite": True, "num_skipped": 0, "wall_s": 50.0, "words": "", **more}


def run_of(mode: str, *results: dict[str, Any]) -> dict[str, Any]:
    return {"mode": mode, "results": list(results)}


def test_ratios_are_to_the_first_arm_and_a_failure_says_why(bench: Any) -> None:
    failed = {"arm": "stock-fp8-states", "error": "exit status 1: OutOfMemoryError: 3 GiB\nmore"}
    rows = [result("stock-tensorwise", 5e4, 40.0), failed, result("ours-a", 5.5e4, 30.0, finite=False, loss=None)]
    table = bench("megatron_pretrain").table(run_of("speed", *rows)).splitlines()
    assert len({line.count(" |") for line in table if not line.startswith("|---")}) == 1
    assert "| stock-fp8-states | **exit status 1: OutOfMemoryError: 3 GiB** |" in table[3]
    assert table[4] == "| ours-a, **not finite** | 148.9 | 55,000 | 1.100 | 30.00 | 0.750 | 600 | none |"


def test_losses_are_compared_within_a_seed(bench: Any, tmp_path: Path) -> None:
    def losing(arm: str, last: float) -> dict[str, Any]:
        return result(arm, 5e4, 40.0, losses=[[1, 9.0], [2, last]], held_out_loss=last)

    pairs = [
        losing("stock-tensorwise+seed=1", 4.0),
        losing("stock-tensorwise+seed=2", 5.0),
        losing("ours-b+seed=2", 5.1),
    ]
    driver = bench("megatron_pretrain")
    last = driver.table(run_of("losses", *pairs)).splitlines()[-1]
    assert last.endswith("| 9.0000 | 5.1000 | 5.1000 | +2.00 % |")
    driver.write_losses(tmp_path / "dated", pairs)
    found = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert len(found) == 3 and found["dated-ours-b+seed=2.csv"] == ["iteration,loss", "1,9.0", "2,5.1"]


# --- the driver ---


def test_reason_of_a_failure_is_the_ranks_own_not_torchruns(bench: Any) -> None:
    log = (
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory: 3 GiB\n"
        "  raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "E1122 /usr/lib/torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) Error: local_rank: 0\n"
    )
    reason = bench("processes").error_of(1, log, 300.0).splitlines()[0]
    assert reason == "exit status 1: [rank0]: torch.OutOfMemoryError: CUDA out of memory: 3 GiB"
    assert bench("processes").error_of(124, "", 300.0).startswith("no end after 300 s: no error in its output")


def test_arms_have_one_environment(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    env = bench("megatron_pretrain").environment(tmp_path, False)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "NVTE_FUSED_ATTN" not in env and "MAKEFLAGS" not in env
    helper = tmp_path / "megatron" / "core" / "datasets" / "helpers_cpp.so"
    helper.parent.mkdir(parents=True)
    helper.touch()
    assert bench("megatron_pretrain").environment(tmp_path, False)["MAKEFLAGS"] == "n"


def test_arm_that_hangs_is_ended_and_says_so(
    bench: Any, arms: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = bench("megatron_pretrain")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(driver, "command_of", lambda *_: ["sleep", "600"])
    args = argparse.Namespace(megatron_path=tmp_path, cache=tmp_path, log=None, arm_timeout=1.0)
    found = driver.run_arm(arms.parse_arm("stock-bf16"), model, arms.Settings(40, 5), args)
    assert found["error"].startswith("no end after 1 s")
