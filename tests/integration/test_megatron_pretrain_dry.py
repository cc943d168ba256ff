"""megatron_pretrain.py without a GPU: arms, their arguments, logs, verdicts; with a clone, a run of its own.

$MEGATRON_LM_PATH names the clone; tests that need it are slow, and say so where they are skipped.
"""

from __future__ import annotations

import argparse
import importlib.machinery
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


def names(arms: Any) -> list[str]:
    """Every arm of the table, and every one of a piece."""
    found = [name for piece in arms.PIECES.values() for name in (piece.reference, *piece.arms) if name]
    return list(dict.fromkeys([*arms.WORDS, *found]))


def test_arms_differ_from_stock_in_their_own_words_only(arms: Any) -> None:
    m, s = arms.MODELS["llama-2b"], arms.Settings(40, 5)
    common = arms.words_of(arms.parse_arm("stock-bf16"), m, s, Path("cache"))
    for name in names(arms):
        arm = arms.parse_arm(name)
        parallel = ["--tensor-model-parallel-size", str(arm.tp), "--sequence-parallel"] if arm.tp > 1 else []
        words = arms.words_of(arm, m, s, Path("cache"))
        base = [str(arm.seed) if word == "1234" else word for word in common]
        assert sorted(words) == sorted([*base, *arm.words, *parallel]), name


def test_shapes_are_those_of_the_issue(arms: Any) -> None:
    words = arms.words_of(arms.parse_arm("ours-a"), arms.MODELS["llama-2b"], arms.Settings(40, 5), Path("cache"))
    value = dict(itertools.pairwise(words))
    shape = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--seq-length", "--micro-batch-size")
    assert [value[key] for key in shape] == ["8", "4096", "14336", "4096", "2"]
    assert int(value["--vocab-size"]) + 1 == 32000 and value["--global-batch-size"] == "2"


def test_options_change_what_they_name(arms: Any) -> None:
    arm = arms.parse_arm("ours-b11+bf16grads+fa3+tp=2+seed=7")
    assert (arm.tp, arm.seed, arm.form) == (2, 7, "b")
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


def test_fp8_weights_are_not_drawn_on_the_cpu(arms: Any) -> None:
    """Their masters would be made of memory that nothing was written to."""
    m, s = arms.MODELS["llama-2b"], arms.Settings(40, 5, cpu_init=True)
    with pytest.raises(ValueError, match="arm: expected bf16 weights"):
        arms.words_of(arms.parse_arm("ours-b+tp=2"), m, s, Path("cache"))
    for name in arms.PIECES["tp2"].arms:
        assert "--use-cpu-initialization" in arms.words_of(arms.parse_arm(name), m, s, Path("cache"))


def test_only_what_runs_without_transformer_engine_is_tried_without(arms: Any) -> None:
    without = {name for name in arms.WORDS if not arms.parse_arm(name).needs_te}
    assert without == {"stock-bf16", "ours-fa3", "ours-fa3_fp8", "ours-a"}


def test_every_piece_is_predicted_to_fit_into_its_command(arms: Any) -> None:
    for name, piece in arms.PIECES.items():
        run = [piece.reference, *piece.arms, piece.reference] if piece.reference else piece.arms
        s = arms.Settings(
            arms.ITERATIONS[piece.mode], 5, arms.EVAL_ITERS[piece.mode], cpu_init=piece.mode == "parallel"
        )
        m = arms.MODELS[piece.model]
        total = sum(arms.predicted_seconds(arms.parse_arm(arm), m, piece.mode, s, {}) for arm in run)
        assert total <= 570, (name, total)


def test_every_piece_with_gradients_in_bf16_has_stock_with_them_too(arms: Any) -> None:
    for name, piece in arms.PIECES.items():
        if any("+bf16grads" in arm for arm in piece.arms):
            assert "stock-tensorwise+bf16grads" in piece.arms, name
    assert "stock-tensorwise+bf16grads" in arms.PIECES["speed"].arms


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

    def test_megatrons_parser_takes_every_arm(self, arms: Any, cpu_environment: dict[str, str]) -> None:
        """As on a GPU, with Transformer Engine; only its layers are not built."""
        assert CLONE is not None
        m, s = arms.MODELS["llama-2b"], arms.Settings(40, 5)
        cases = {}
        for name in (*names(arms), "ours-b11+bf16grads+tp=2"):
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

    def test_a_piece_runs_on_cpu(self, run_main: Callable[..., str], tmp_path: Path) -> None:
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
        (table,) = tmp_path.glob("*-losses.csv")
        assert table.read_text().splitlines()[0] == "iteration,stock-bf16,ours-a+bf16grads"
        assert len(table.read_text().splitlines()) == 9
        assert len(list(tmp_path.glob("*-losses.png"))) == 1
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


# --- the driver ---


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_piece(bench: Any, seconds: dict[str, float], budget: float, mode: str = "speed") -> tuple[list[str], list[str]]:
    """(arms that ran, lines of those that did not) where each arm was predicted to take 10 s."""
    pieces, driver = bench("megatron_pretrain_arms"), bench("megatron_pretrain")
    clock, ran = Clock(), []

    def run(name: str, left: float) -> dict[str, Any]:
        clock.now += seconds[name]
        ran.append(name)
        speed = {"step_ms": 1.0, "tokens_per_second_per_gpu": 1.0, "peak_allocated_gib": 1.0}
        return {"wall_s": seconds[name], **({"error": "broke"} if name.startswith("torch-") else speed)}

    piece = pieces.Piece("llama-2b", "stock-eager", tuple(name for name in seconds if name != "stock-eager"), mode)
    results, skipped = driver.run_piece(
        piece, budget, run, lambda name, known: 1.1 * known.get((name, mode), 10 / 1.1), {}, clock
    )
    assert [result["arm"] for result in results] == ran
    return ran, skipped


def test_reference_runs_first_and_last_and_a_failure_does_not_stop_the_rest(bench: Any) -> None:
    seconds = {"stock-eager": 10.0, "torch-eager": 10.0, "ours-fp32-eager": 10.0}
    ran, skipped = run_piece(bench, seconds, 1000)
    assert ran == ["stock-eager", "torch-eager", "ours-fp32-eager", "stock-eager"] and not skipped
    ran, _ = run_piece(bench, seconds, 1000, mode="profile")
    assert ran == ["stock-eager", "torch-eager", "ours-fp32-eager"]


def test_arm_that_does_not_fit_is_left_out_and_the_reference_still_closes(bench: Any) -> None:
    seconds = {"stock-eager": 20.0, "ours-fp32-eager": 30.0, "ours-e4m11-eager": 10.0, "ours-e4m19-eager": 10.0}
    # 20 spent, then 30 for an arm predicted at 10: the next needs 10 + 22 with the reference of 60 left, then 50.
    ran, skipped = run_piece(bench, seconds, 90)
    assert ran == ["stock-eager", "ours-fp32-eager", "ours-e4m11-eager", "stock-eager"]
    assert len(skipped) == 1 and skipped[0].startswith("ours-e4m19-eager: left out, it takes 32 s with the reference")


def test_first_arm_goes_before_the_reference_again_which_shows_nothing_by_itself(bench: Any) -> None:
    """As on 2026-11-27, when torchao ran twice and neither of ours did, for which there was time."""
    seconds = {"stock-eager": 20.0, "ours-fp32-eager": 30.0, "ours-e4m11-eager": 10.0}
    ran, skipped = run_piece(bench, seconds, 45)
    assert ran == ["stock-eager", "ours-fp32-eager"]
    assert [line.split(":")[0] for line in skipped] == ["ours-e4m11-eager", "stock-eager"]
    ran, skipped = run_piece(bench, {"stock-eager": 95.0, "ours-fp32-eager": 30.0}, 100)
    assert ran == ["stock-eager"] and len(skipped) == 1


# --- the report ---


def result(arm: str, tokens: float, gib: float, **more: Any) -> dict[str, Any]:
    found = {"arm": arm, "step_ms": 8192 / tokens * 1000, "interval_ms": [1.0], "tokens_per_second_per_gpu": tokens}
    memory = {"peak_allocated_gib": gib, "peak_reserved_gib": gib + 1, "tflops_per_gpu": 600.0}
    return {**found, **memory, "loss": 2.0, "finite": True, "num_skipped": 0, "wall_s": 50.0, "words": "", **more}


def run_of(bench: Any, mode: str, results: list[dict[str, Any]], number: int = 1, device: str = "H200") -> Any:
    box = {"device": device, "num_gpus": 1, "cuda": "13.0", "python": "3.12", "versions": {"torch": "2.11"}}
    reference = "stock-tensorwise" if mode == "speed" else None
    model = {"name": "llama-2b", **vars(bench("end_to_end_arms").MODELS["llama-2b"])}
    run = {"id": f"2026-11-22T0{number}:00:00Z", "piece": "states", "mode": mode, "model": model}
    run |= {"reference": reference, "timing": "40 iterations", "text": None, "words": "--bf16", "command": "x"}
    return {**run, "machine": box, "results": results, "skipped": ["ours-b11: left out, it takes 60 s"]}


SPEED = (
    ("stock-tensorwise", 50_000.0, 46.0),
    ("ours-a", 54_000.0, 29.0),
    ("ours-b+bf16grads", 56_000.0, 24.0),
    ("stock-blockwise", 47_000.0, 40.0),
    ("stock-tensorwise", 52_000.0, 46.0),
)


def test_verdicts_are_taken_to_the_best_stock_arm_of_the_run(bench: Any) -> None:
    report = bench("megatron_pretrain_report")
    run = run_of(bench, "speed", [result(*row) for row in SPEED])
    found = "\n".join(report.verdicts([run]))
    assert "MISSED: tokens/s >= 1.1 x the best stock arm (ours-b+bf16grads / stock-tensorwise = 1.098" in found
    assert "met: peak with form (a) <= 0.65 x the best stock arm's (ours-a / stock-tensorwise = 0.630" in found
    assert (
        "MISSED: peak with form (b) <= 0.5 x the best stock arm's (ours-b+bf16grads / stock-tensorwise = 0.522" in found
    )
    assert "NOT MEASURED: TP=2" in found and "NOT MEASURED: held-out loss" in found
    assert "met:" not in "\n".join(report.verdicts([run_of(bench, "speed", run["results"], device="cpu")]))


def test_gradients_in_bf16_are_said_to_be_unequal_where_stock_has_none(bench: Any) -> None:
    report = bench("megatron_pretrain_report")
    rows = [result(*row) for row in SPEED]
    note = "but gradients in bf16 were not measured with stock"
    for more, noted in (([], True), ([result("stock-tensorwise+bf16grads", 53_000.0, 42.0)], False)):
        found = report.verdicts([run_of(bench, "speed", [*rows, *more])])
        assert [note in line for line in found[:3]] == [noted, False, noted], found  # ours-a has them in float32
    assert "ours-b+bf16grads / stock-tensorwise+bf16grads = 1.057" in found[0]


def test_same_loss_is_judged_by_pairs_that_differ_in_ranks(bench: Any) -> None:
    report = bench("megatron_pretrain_report")

    def losses(last: float) -> dict[str, Any]:
        return {"losses": [[1, 9.0], [2, 8.0], [3, last], [4, last]], "held_out_loss": last}

    pairs = [result("ours-a", 1.0, 1.0, **losses(4.0)), result("ours-a+tp=2", 1.0, 1.0, **losses(4.01))]
    lone = result("stock-tensorwise+tp=2", 1.0, 1.0, **losses(9.0))
    (claim,) = [line for line in report.verdicts([run_of(bench, "parallel", [*pairs, lone])]) if "TP=2" in line]
    assert claim.startswith("met: TP=2 with sequence parallelism, ours") and "ours-a+tp=2: +0.250 %" in claim
    pairs[1] |= losses(4.05)
    (claim,) = [line for line in report.verdicts([run_of(bench, "parallel", pairs)]) if "TP=2" in line]
    assert claim.startswith("MISSED")


def test_report_of_fetched_files_has_tables_curves_and_what_failed(
    bench: Any, run_main: Callable[..., str], tmp_path: Path
) -> None:
    curves = [[step, 5.0 - step / 100] for step in range(1, 51)]
    more = {"losses": curves, "held_out_loss": 4.6}
    losing = [result(arm, 5e4, 40.0, **more) for arm in ("stock-bf16", "stock-tensorwise", "ours-a")]
    failed = {"arm": "stock-fp8-states", "error": "exit status 1: OutOfMemoryError: 3 GiB\nmore", "wall_s": 9.0}
    runs = [run_of(bench, "speed", [*(result(*row) for row in SPEED), failed]), run_of(bench, "losses", losing, 2)]
    fetched = tmp_path / "fetched.json"
    fetched.write_text(json.dumps({"runs": runs}))
    for _ in range(2):  # twice, and it has each run once
        text = run_main("megatron_pretrain", "--report", fetched, "--out", tmp_path)
    assert "| ours-a | 151.7 (1.0) | 54,000 | 1.059 | 600 | 29.00 / 30.00 | 0.630 | 2.000 |" in text
    assert "| stock-fp8-states | **exit status 1: OutOfMemoryError: 3 GiB** |" in text
    assert "drifted by +4.00 %" in text and "ours-b11: left out" in text and text.count("## states") == 2
    assert "met: held-out loss of ours within 0.5 %" in text
    rows = (tmp_path / "2026-11-22-megatron-pretrain-losses.csv").read_text().splitlines()
    assert rows[0] == "iteration,stock-bf16,stock-tensorwise,ours-a" and rows[50] == "50,4.5,4.5,4.5"
    assert (tmp_path / "2026-11-22-megatron-pretrain-losses.png").read_bytes().startswith(b"\x89PNG")


def losing(arm: str, last: float) -> dict[str, Any]:
    """A result with 50 losses that end at `last`."""
    more = {"losses": [[step, last + 1 - step / 50] for step in range(1, 51)], "held_out_loss": last}
    return result(arm, 5e4, 40.0, **more)


def test_arms_that_ran_side_by_side_are_one_table(bench: Any, run_main: Callable[..., str], tmp_path: Path) -> None:
    """Each its own process: they began in the same second, and only the commands tell them apart."""
    arms = {"ours-b": 4.2, "stock-tensorwise": 4.1, "stock-bf16": 4.0}
    files = []
    for k, (arm, last) in enumerate(arms.items()):
        run = {**run_of(bench, "losses", [losing(arm, last)]), "command": f"--out l{k} --arms {arm}"}
        files.append(tmp_path / f"{k}.json")
        files[-1].write_text(json.dumps({"runs": [run]}))
    other = {**run_of(bench, "losses", [losing("ours-a", 9.0)], 0), "timing": "60 iterations"}
    again = {**run_of(bench, "losses", [losing("ours-b", 5.0)], 0), "command": "--out earlier"}
    files.append(tmp_path / "others.json")
    files[-1].write_text(json.dumps({"runs": [other, again]}))
    text = run_main("megatron_pretrain", "--report", *files, "--out", tmp_path)
    stem = tmp_path / "2026-11-22-megatron-pretrain"
    assert len(json.loads(stem.with_suffix(".json").read_text())["runs"]) == 5  # as they were
    assert text.count("## states") == 3 and "2 runs with equal settings" not in text
    table = text.split("3 runs with equal settings, put together.")[1].split("| arm |")[1].split("- ours-b11")[0]
    heads = [line.split(" | ")[0] for line in table.splitlines() if line.startswith(("| stock", "| ours"))]
    assert heads == ["| stock-bf16", "| stock-tensorwise", "| ours-b"]
    assert "| 4.2000 | +5.00 % |" in table and "`--out l0 --arms ours-b`" in text
    assert "MISSED: held-out loss of ours within 0.5 % of stock-bf16's" in text
    rows = (tmp_path / f"{stem.name}-losses.csv").read_text().splitlines()
    assert rows[0] == "iteration,stock-bf16,stock-tensorwise,ours-b" and rows[50] == "50,4.0,4.1,4.2"


def test_seeds_are_pairs(bench: Any, arms: Any, run_main: Callable[..., str], tmp_path: Path) -> None:
    files = []
    for k, better in ((1, 0.0), (2, 0.1), (3, 0.2)):
        pairs = [losing(f"stock-tensorwise+seed={k}", 4.0 - better), losing(f"ours-b+seed={k}", 4.04 - better)]
        planned = arms.PIECES[f"seeds-{k}"].arms
        assert planned == tuple(f"{arm}+seed={k}" for arm in ("stock-tensorwise", "ours-a", "ours-b", "stock-gather"))
        assert {r["arm"] for r in pairs} <= set(planned)
        files.append(tmp_path / f"{k}.json")
        files[-1].write_text(json.dumps({"runs": [{**run_of(bench, "losses", pairs), "command": f"seeds-{k}"}]}))
    fewer = tmp_path / "fewer.json"  # an arm with one seed takes no pair from the others
    one = {**run_of(bench, "losses", [losing("stock-gather+seed=3", 3.9)]), "command": "gather"}
    fewer.write_text(json.dumps({"runs": [one]}))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"runs": [run_of(bench, "losses", [losing("stock-bf16", 4.0)])]}))
    text = run_main("megatron_pretrain", "--report", *files, fewer, plain, "--out", tmp_path)
    assert text.count("## states") == 2 and "95 % interval" in text and "of 3 pairs" in text
    assert "stock-gather: +2.571 %, one pair" in text
    assert "| ours-b+seed=3 | 4.8200 | 4.0800 | 3.8400 | +1.05 % |" in text  # to seed 3 of stock, not to seed 1
    rows = (tmp_path / "2026-11-22-megatron-pretrain-seeds.csv").read_text().splitlines()
    names = [f"{arm}+seed={k}" for arm in ("stock-tensorwise", "ours-b") for k in (1, 2, 3)]
    assert rows[0].split(",") == ["iteration", *names]


def test_arguments_of_all_arms_name_no_seed_where_arms_have_their_own(bench: Any, arms: Any) -> None:
    driver, m, s = bench("megatron_pretrain"), arms.MODELS["llama-2b"], arms.Settings(500, 1)
    one, two = (driver.common_words([arms.parse_arm(f"ours-a+seed={k}")], m, s) for k in (1, 2))
    assert one == two and "--seed" not in one  # or their runs would not be put together
    common = driver.common_words([arms.parse_arm("ours-a")], m, s)
    at = common.index("--seed")
    assert [*common[:at], *common[at + 2 :]] == one and common[at + 1] == "1234"


# --- the driver ---


def test_reason_of_a_failure_is_the_ranks_own_not_torchruns(bench: Any) -> None:
    log = (
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory: 3 GiB\n"
        "  raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "E1122 /usr/lib/torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) Error: local_rank: 0\n"
    )
    reason = bench("megatron_pretrain").error_of(1, log, 300.0).splitlines()[0]
    assert reason == "exit status 1: [rank0]: torch.OutOfMemoryError: CUDA out of memory: 3 GiB"
    assert bench("megatron_pretrain").error_of(124, "", 300.0).startswith("no end after 300 s: no error in its log")


def test_arms_have_one_environment(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    env = bench("megatron_pretrain").environment(tmp_path, False)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "NVTE_FUSED_ATTN" not in env and "MAKEFLAGS" not in env
    helper = tmp_path / "megatron" / "core" / "datasets" / "helpers_cpp.so"
    helper.parent.mkdir(parents=True)
    helper.touch()
    assert bench("megatron_pretrain").environment(tmp_path, False)["MAKEFLAGS"] == "n"


def test_a_missing_clone_is_named(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--megatron-path: expected a clone of Megatron-LM"):
        bench("megatron_pretrain").prepare_clone(tmp_path)


def test_a_clone_has_the_dataset_helper_before_an_arm_starts(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, folder = bench("megatron_pretrain"), Path("megatron/core/datasets")
    for name in ("site", "clone"):
        (tmp_path / name / folder).mkdir(parents=True)
    (tmp_path / "clone/pretrain_gpt.py").touch()
    helper = f"helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    (tmp_path / "site" / folder / helper).write_text("installed")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    driver.prepare_clone(tmp_path / "clone")
    assert (tmp_path / "clone" / folder / helper).read_text() == "installed"


def test_arm_that_hangs_is_ended_and_says_so(
    bench: Any, arms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, m, s = bench("megatron_pretrain"), arms.MODELS["llama-2b"], arms.Settings(40, 5)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(driver, "command_of", lambda *_: ["sleep", "600"])
    args = argparse.Namespace(megatron_path=tmp_path, cache=tmp_path, log=None)
    found = driver.run_arm(arms.parse_arm("stock-bf16"), m, s, "speed", args, 1.0)
    assert found["error"].startswith("no end after 1 s")
