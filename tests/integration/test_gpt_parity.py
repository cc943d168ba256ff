"""The parity studies on CPU at a tiny size: work list, runs in pieces, statistics; verdicts can be bad."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_ds.config import LinearConfig
from fp8_ds.nn import make_plan
from fp8_ds.parity.text import Windows
from fp8_ds.testing import HANG


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Tokens of a text that can be learnt, as `prepare` leaves them."""
    folder = tmp_path / "cache"
    folder.mkdir()
    generator = np.random.default_rng(3)
    for name, size in (("train", 40_000), ("held_out", 4_000)):
        np.save(folder / f"{name}.npy", (generator.integers(0, 8, size) + 8 * (np.arange(size) % 8)).astype(np.uint16))
    about = {"vocabulary": "bytes", "vocab_size": 256, "num_bytes": 44_000, "num_files": 9, "num_packages": 3}
    about |= {"num_train": 40_000, "num_held_out": 4_000, "held_out": ["a"], "digest": "0123", "seconds": 0.1}
    (folder / "text.json").write_text(json.dumps(about))
    return folder


def copied(cache: Path, folder: Path) -> Path:
    """A cache with the same text, and nothing that runs leave."""
    folder.mkdir()
    for path in cache.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def worker_args(**changes: Any) -> argparse.Namespace:
    values = {"regime": 1, "seed": 0, "steps": 20, "lr": 1e-3, "checkpoint_at": 0.5}
    return argparse.Namespace(**{**values, **changes})


def test_order_of_the_text_depends_on_the_seed_only_and_regime_2_reads_on(bench: Any, cache: Path) -> None:
    worker = bench("parity.worker")
    windows = Windows(cache / "train.npy", 64, torch.device("cpu"))
    assert windows.num_windows == 624
    order = windows.order(1300, seed=5)
    assert order[:624].sort().values.equal(torch.arange(624))
    assert order[624:1248].sort().values.equal(torch.arange(624))
    assert not order[:624].equal(order[624:1248])
    batch = windows.batch(order[:2])
    assert batch.shape == (2, 65) and batch[0, 0] == windows.tokens[order[0] * 64]

    first = worker.training_windows(windows, worker_args(), 4)
    assert first.equal(worker.training_windows(windows, worker_args(lr=9.0), 4))
    assert not first.equal(worker.training_windows(windows, worker_args(seed=1), 4))
    stopped = set(first[:10].flatten().tolist())
    seconds = [worker.training_windows(windows, worker_args(regime=2, seed=seed), 4).flatten() for seed in (0, 1)]
    assert stopped.isdisjoint(seconds[0].tolist())
    assert not seconds[0].equal(seconds[1]) and seconds[0].sort().values.equal(seconds[1].sort().values)


def test_model_has_124_million_parameters_and_starts_from_bf16_numbers(bench: Any) -> None:
    models_of = bench("parity.models")
    worker_size = models_of.SIZES["124m"]
    with torch.device("meta"):
        blocks = [models_of.Block(worker_size.dim) for _ in range(2)]
    block = sum(p.numel() for p in blocks[0].parameters())
    outer = (2 * worker_size.vocab_size + worker_size.seq_len + 1) * worker_size.dim
    assert abs(12 * block + outer - 124.4e6) < 0.2e6
    tiny = models_of.SIZES["tiny"]
    models = [models_of.GPT(tiny, 512, seed) for seed in (0, 0, 1)]
    assert all(p.dtype == torch.bfloat16 for p in models[0].parameters())
    pairs = list(zip(*(m.parameters() for m in models), strict=True))
    assert all(a.equal(b) for a, b, _ in pairs)
    assert any(not a.equal(c) for a, _, c in pairs)
    assert models[0].blocks[0].out.weight.std() < 0.7 * models[0].blocks[0].qkv.weight.std()


def test_blocks_of_arms_know_the_length_and_the_ends_of_the_model(bench: Any) -> None:
    worker, models = bench("parity.worker"), bench("parity.models")
    arms = bench("parity.arms")

    def of(arm: str) -> Any:
        return worker.fp8_block(worker_args(arm=arm, size="124m", steps=500, seed=7))

    assert of("stock") is None and of("only-weights") is None
    assert of("e4m11")["optimizer"]["seed"] == 7 and of("fp8") == {"enabled": True}
    assert of("fp8-bf16-last")["schedule"] == {"bf16_last_fraction": 0.1, "total_steps": 500}
    with torch.device("meta"):
        model = models.GPT(models.SIZES["124m"], 512, seed=0)
    for arm in [name for name in arms.ARMS if "-ends" in name]:
        config = LinearConfig.model_validate(of(arm).get("linear", {}))
        in_bf16 = {layer.fqn for layer in make_plan(model, config).layers if not layer.converted}
        names = [f"blocks.{k}.{name}" for k in (0, 11) for name in ("qkv", "out", "up", "down")]
        assert in_bf16 == {"lm_head", *names}
        assert (config.grad_dtype == "e4m3") == ("e4m3" in arm)
        assert ("schedule" in of(arm)) == (arm in arms.SCHEDULED)


def test_learning_rate_ends_at_zero_in_regimes_1_and_3_and_is_constant_in_regime_2(bench: Any) -> None:
    rate = bench("parity.worker").learning_rate
    first = [rate(worker_args(steps=100), step) for step in range(100)]
    assert [rate(worker_args(steps=100, regime=3), step) for step in range(100)] == first
    assert first[0] == pytest.approx(2e-4) and max(first) == pytest.approx(1e-3) and 0 < first[99] < 2e-5
    assert [rate(worker_args(steps=100, regime=2), step) for step in (5, 50, 99)] == [1e-3] * 3


# --- work list and statistics ---


def parity_args(cache: Path, *more: str) -> argparse.Namespace:
    parity = import_module("gpt_parity")
    before, sys.argv = sys.argv, ["gpt_parity.py", "--size=tiny", "--gpus=1", f"--cache={cache}", *more]
    try:
        return parity.parse_args()
    finally:
        sys.argv = before


def jobs_of(args: argparse.Namespace) -> list[Any]:
    listed = args.regimes, args.arms, args.seeds, args.seeds2, args.by_regime, args.as_named
    return import_module("parity.studies").work_list(*listed)


def test_work_list_is_that_of_the_issue(bench: Any, cache: Path) -> None:
    bench("gpt_parity")
    names = [job.name for job in jobs_of(parity_args(cache, "--regimes", "1"))]
    assert len(names) == 13 and names[0] == "r1-stock-s0"
    for arm in ("stock", "fp8", "e4m19", "e4m11"):
        assert {f"r1-{arm}-s{seed}" for seed in range(3)} < set(names)
    assert [name for name in names if "torchao" in name] == ["r1-torchao-s0"]
    second = {job.arm for job in jobs_of(parity_args(cache, "--regimes", "2"))}
    assert second > {"stock", "e4m11", "e4m11-nearest", "bf16-nearest"}
    third = [job.name for job in jobs_of(parity_args(cache, "--regimes", "3", "--seeds", "4"))]
    assert third == ["r3-stock-s4", "r3-e4m11-s4", "r3-e4m19-s4", "r3-fp8-s4"]


def test_recipes_study_has_every_recipe_and_state_format_in_three_pairs_of_200_million_tokens(
    bench: Any, cache: Path
) -> None:
    bench("gpt_parity")
    args = parity_args(cache, "--study", "recipes", "--size", "124m")
    assert args.steps * 32 * 1024 >= 200e6
    jobs = [job for job in jobs_of(args) if job.regime == 3]
    arms = ("stock", "fp8", "delayed", "rowwise", "gw_hp", "blockwise", "fp32-master", "e4m19", "e4m11")
    assert {(job.arm, job.seed) for job in jobs} == {(arm, seed) for arm in arms for seed in range(3)}
    assert {job.arm for job in jobs_of(args) if job.regime == 2} == {*arms, "e4m11-nearest", "bf16-nearest"}
    blocks = import_module("parity.arms").ARMS
    recipes = [(blocks[arm].get("linear") or {}).get("recipe") for arm in arms[1:6]]
    assert recipes == [None, "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
    second = jobs_of(parity_args(cache, "--study", "1b"))
    assert [job.name for job in second] == [f"r1-{arm}-s{k}" for k in (0, 1) for arm in ("stock", "fp8", "e4m11")]
    last = jobs_of(parity_args(cache, "--study", "recipes", "--regimes", "3", "--arms", "stock", *SCHEDULED))
    assert {job.arm for job in last} == {"stock", *SCHEDULED}
    assert {blocks[arm]["schedule"]["bf16_last_fraction"] for arm in SCHEDULED} == {0.03, 0.05, 0.1}


def test_predicted_seconds_give_back_the_speed_that_was_measured(bench: Any, root: Path) -> None:
    studies = bench("parity.studies")
    with (root / "benchmarks/results/2026-11-21-gpt-parity-rotary.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["regime"] == "3" and row["seed"] == "1"]
    for arm in ("stock", "e4m11"):
        measured = max(float(row["seconds"]) for row in rows if row["arm"] == arm)
        assert studies.predicted_seconds("124m", arm, 3072) == pytest.approx(measured, rel=0.12)
    both = sum(studies.predicted_seconds("1b", arm, 3072) for arm in ("stock", "fp8"))
    assert both / 2 < 1500  # with start and text, half an hour of a machine with two GPUs
    assert "| all |" in studies.describe_plan(studies.STUDIES["1b"], [studies.Job(1, "stock", 0)])


def test_one_b_is_a_llama_of_about_a_billion_parameters(bench: Any) -> None:
    models, studies = bench("parity.models"), bench("parity.studies")
    size = models.SIZES["1b"]
    with torch.device("meta"):
        block = models.LlamaBlock(size.dim, size.ffn, size.kv_heads)
    matrices = size.layers * sum(p.numel() for p in block.parameters() if p.ndim == 2) + size.dim * size.vocab_size
    assert matrices == studies.matrix_parameters(size)
    assert 0.9e9 < matrices + size.dim * size.vocab_size < 1.05e9
    small = models.SIZES["tiny-llama"]
    model = models.GPT(small, 512, seed=0)
    tokens = torch.randint(0, 512, (2, 65))
    assert float(model(tokens).detach()) == pytest.approx(math.log(512), abs=0.2)
    changed = tokens.clone()
    changed[:, 40] = (tokens[:, 40] + 7) % 512  # what is predicted before position 40 does not see it
    model.loss = lambda logits, targets: logits
    assert model(tokens)[:, :40].equal(model(changed)[:, :40]) and not model(tokens)[:, 40].equal(model(changed)[:, 40])


def test_results_of_2026_11_21_are_gone_on_with(bench: Any, root: Path, cache: Path, tmp_path: Path) -> None:
    parity, runs = bench("gpt_parity"), bench("parity.runs")
    source = root / "benchmarks/results/2026-11-21-gpt-parity-rotary.csv"
    args = parity_args(cache, "--size", "124m", "--compile", "--resume-from", str(source))
    settings = parity.settings_of(args, "2524c25bebc534ec", "")
    older = json.loads(source.with_suffix(".json").read_text())["settings"].keys()
    assert settings.keys() - older == {"micro_batches", "gpus_per_run"} and not older - settings.keys()
    results = runs.Results(tmp_path / "result", settings, [source])
    pending = {job.name for job in runs.Scheduler(args, results).pending()}
    assert len(results.runs) == 6 and not pending & set(results.runs)
    (difference,) = bench("parity.summary").differences(results.rows, 3, 3072)
    assert difference.by_seed == {0: pytest.approx(0.0872, abs=1e-3), 1: pytest.approx(0.0874, abs=1e-3)}
    results.write()
    assert (tmp_path / "result.csv").read_text() == source.read_text()
    more = ("--micro-batches", "4", "--arms", "stock", "e4m11")
    args = parity_args(cache, "--size", "124m", "--compile", "--resume-from", str(source), *more)
    with pytest.raises(SystemExit, match=r"'micro_batches': \(1, 4\)"):
        runs.Results(tmp_path / "other", parity.settings_of(args, "2524c25bebc534ec", ""), [source])


def test_files_that_went_on_from_one_are_put_together_and_two_runs_of_one_name_refused(
    bench: Any, root: Path, tmp_path: Path
) -> None:
    runs = bench("parity.runs")
    source = root / "benchmarks/results/2026-11-21-gpt-parity-rotary.csv"
    old = runs.Results(tmp_path / "old", {}, [source])
    for arm in ("rowwise", "gw_hp"):
        further = runs.Results(tmp_path / arm, old.settings, [source])
        further.rows.append({**old.rows[-1], "regime": "3", "arm": arm, "seed": "41"})
        further.runs[f"r3-{arm}-s41"] = {"checkpoint": "ab"}
        further.write()
    both = [tmp_path / "rowwise.csv", tmp_path / "gw_hp.csv"]
    merged = runs.Results(tmp_path / "merged", old.settings, both)
    assert merged.rows[: len(old.rows)] == old.rows and [row["arm"] for row in merged.rows[len(old.rows) :]] == [
        "rowwise",
        "gw_hp",
    ]
    assert merged.runs == {**old.runs, "r3-rowwise-s41": {"checkpoint": "ab"}, "r3-gw_hp-s41": {"checkpoint": "ab"}}
    merged.runs["r3-gw_hp-s41"] = {"checkpoint": "cd"}
    merged.write()
    with pytest.raises(SystemExit, match=r"another of \['r3-gw_hp-s41'\] in gw_hp.csv"):
        runs.Results(tmp_path / "refused", old.settings, [tmp_path / "merged.csv", *both])


def test_whole_runs_come_in_the_order_in_which_arms_are_named_and_branches_after_them(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    runs = bench("parity.runs")
    arms = ("stock", "fp8-ends-e4m3-bf16-last", "fp8-ends-e4m3", "rowwise", "e4m11")
    more = ("--study", "recipes", "--regimes", "3", "--seeds", "18", "19", "--arms", *arms)
    scheduler = runs.Scheduler(parity_args(cache, *more), runs.Results(tmp_path / "result", {}, None))
    scheduler.checkpoint.write_bytes(b"weights")
    whole = [f"r3-{arm}-s{seed}" for seed in (18, 19) for arm in ("stock", "fp8-ends-e4m3", "rowwise", "e4m11")]
    assert [job.name for job in scheduler.ready(scheduler.pending())] == whole
    scheduler.results.runs["r3-fp8-ends-e4m3-s18"] = {}
    left = [job.name for job in scheduler.ready(scheduler.pending())]
    assert left[:2] == ["r3-stock-s18", "r3-rowwise-s18"] and left[-1] == "r3-fp8-ends-e4m3-bf16-last-s18"
    more = ("--regimes", "1", "2", "--seeds", "0", "--arms", "torchao", "e4m11", "stock", "--by-regime")
    names = [job.name for job in jobs_of(parity_args(cache, *more))]
    assert names == ["r1-e4m11-s0", "r1-stock-s0", "r1-torchao-s0", "r2-e4m11-s0", "r2-stock-s0"]


def test_what_is_finished_in_the_cache_is_not_run_again_whatever_does_not_train(
    bench: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another folder of results or another day is enough for a call to know of no run."""
    runs, worker = bench("parity.runs"), bench("parity.worker")
    monkeypatch.setattr(runs.Scheduler, "_start", lambda self, job, slot: pytest.fail(f"{job.name} is started"))
    common = ("--study", "recipes", "--regimes", "1", "3", "--seeds", "0", "--arms", "stock")

    def left(*more: str) -> list[str]:
        args = parity_args(cache, *common, *more)
        args.budget = 0.0  # nothing is started
        results = runs.Results(tmp_path / f"result{len(list(tmp_path.iterdir()))}", {"digest": "0123"}, None)
        scheduler = runs.Scheduler(args, results)
        scheduler.run()
        assert all("identity" not in about and "code" not in about for about in results.runs.values())
        assert {row["arm"] for row in results.rows} == ({"stock"} if results.runs else set())
        return scheduler.left_out

    (cache / "checkpoint.pt").write_bytes(b"weights")
    given = parity_args(cache, *common)
    (cache / "runs").mkdir()
    for regime, checkpoint in ((1, None), (3, worker.file_digest(cache / "checkpoint.pt"))):
        log = cache / f"runs/r{regime}-stock-s0.csv"
        log.write_text("step,tokens,seconds,train_loss,held_out_loss\n0,0,0,,2.0\n")
        of_run = argparse.Namespace(**{**vars(given), "regime": regime, "arm": "stock", "seed": 0, "lr": 3e-4})
        of_run.only_checkpoint = False
        identity = worker.identity_of(of_run, 1, "0123", checkpoint)
        log.with_suffix(".json").write_text(json.dumps({"identity": identity, "code": worker.code_digest()}))
    for more in ((), ("--whole",), ("--saving", "3"), ("--estimate", "9"), ("--per-gpu", "2")):
        assert left(*more) == []
    assert "r1-stock-s0 is in the cache: it is not run again" in capsys.readouterr().out
    both = ["r1-stock-s0", "r3-stock-s0"]
    for more in (("--steps", "9"), ("--compile",), ("--micro-batches", "2"), ("--stage", "2")):
        assert left(*more) == both
    assert left("--lr", "1e-4", "1e-5") == both
    assert left("--seeds", "1") == ["r1-stock-s1", "r3-stock-s1"]
    with monkeypatch.context() as patched:
        patched.setattr(runs, "code_digest", lambda: "other")
        assert left() == both and "trained by other code" in capsys.readouterr().out
    (cache / "checkpoint.pt").write_bytes(b"others")
    assert left() == ["r3-stock-s0"]


def test_regime_2_waits_for_its_first_weights_and_a_fresh_machine_makes_them_again(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    runs = bench("parity.runs")
    args = parity_args(cache, "--seeds", "0", "--arms", "stock", "e4m11", "--regimes", "1", "2")
    results = runs.Results(tmp_path / "result", {}, None)
    scheduler = runs.Scheduler(args, results)
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r1-stock-s0", "r1-e4m11-s0"]
    results.runs |= {"r1-stock-s0": {}, "r1-e4m11-s0": {}}
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r1-stock-s0-checkpoint"]
    args.only_first_weights = True
    assert [job.name for job in scheduler.pending()] == ["r1-stock-s0-checkpoint"]
    scheduler.checkpoint.write_bytes(b"weights")
    assert scheduler.pending() == []
    args.only_first_weights = False
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r2-stock-s0", "r2-e4m11-s0"]


def test_runs_from_another_checkpoint_are_dropped_unless_their_seed_is_complete(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    runs = bench("parity.runs")
    args = parity_args(cache, "--seeds", "0", "1", "--regimes", "2", "--arms", "stock", "e4m11")
    results = runs.Results(tmp_path / "result", {}, None)
    done = {f"r2-{arm}-s{seed}": {"checkpoint": "theirs"} for arm, seed in (("stock", 0), ("e4m11", 0), ("stock", 1))}
    results.runs |= done
    results.rows = [{"regime": "2", "arm": "stock", "seed": str(seed), "step": "1"} for seed in (0, 1)]
    scheduler = runs.Scheduler(args, results)
    scheduler.checkpoint.write_bytes(b"other weights")
    scheduler._reconcile()
    assert set(results.runs) == {"r2-stock-s0", "r2-e4m11-s0"}
    assert [row["seed"] for row in results.rows] == ["0"]
    assert {job.name for job in scheduler.pending()} == {"r2-stock-s1", "r2-e4m11-s1"}


def test_a_base_is_not_run_again_beside_arms_that_stay(bench: Any, cache: Path, tmp_path: Path) -> None:
    """Else `rowwise`, from the other machine's first weights, would be paired with stock from these."""
    runs = bench("parity.runs")
    args = parity_args(cache, "--seeds", "0", "--regimes", "3", "--arms", "stock", "fp8")
    results = runs.Results(tmp_path / "result", {}, None)
    results.runs |= {f"r3-{arm}-s0": {"checkpoint": "theirs"} for arm in ("stock", "rowwise")}
    scheduler = runs.Scheduler(args, results)
    scheduler.checkpoint.write_bytes(b"other weights")
    with pytest.raises(SystemExit, match="got 0, where r3-rowwise-s0 would be paired"):
        scheduler._reconcile()
    results.runs["r3-rowwise-s1"] = results.runs.pop("r3-rowwise-s0")
    scheduler.reconciled = False
    scheduler._reconcile()
    assert set(results.runs) == {"r3-rowwise-s1"}


def test_more_than_two_epochs_are_refused(bench: Any, cache: Path) -> None:
    parity = bench("gpt_parity")
    assert "2.00 times" in parity.check_epochs(parity_args(cache, "--steps", "50"), 100)
    with pytest.raises(SystemExit, match=r"at most 2 epochs, got 2\.04"):
        parity.check_epochs(parity_args(cache, "--steps", "51"), 100)


def test_results_of_other_settings_are_refused(bench: Any, tmp_path: Path) -> None:
    runs = bench("parity.runs")
    stem = tmp_path / "result"
    runs.Results(stem, {"steps": 10, "digest": "a"}, None).write()
    assert runs.Results(stem, {"steps": 10, "digest": "a"}, None).runs == {}
    with pytest.raises(SystemExit, match="digest"):
        runs.Results(stem, {"steps": 10, "digest": "b"}, None)


def test_results_of_several_calls_are_put_together(bench: Any, tmp_path: Path) -> None:
    runs = bench("parity.runs")
    sources = [tmp_path / "first.csv", tmp_path / "second.csv"]
    for source, arm in zip(sources, ("stock", "e4m11"), strict=True):
        one = runs.Results(source.with_suffix(""), {"steps": 10}, None)
        one.rows, one.runs = rows(3, {arm: [2.0]}), {f"r3-{arm}-s0": {}}
        one.rows = [{key: row.get(key, "") for key in runs.FIELDS} for row in one.rows]
        one.write()
    both = runs.Results(tmp_path / "both", {"steps": 10}, sources)
    assert list(both.runs) == ["r3-stock-s0", "r3-e4m11-s0"] and [row["arm"] for row in both.rows] == ["stock", "e4m11"]
    assert runs.Results(tmp_path / "both", {"steps": 10}, [sources[0], *sources]).rows == both.rows
    with pytest.raises(FileNotFoundError):
        runs.Results(tmp_path / "both", {"steps": 10}, [tmp_path / "third.csv"])


def test_a_study_may_have_first_weights_of_its_own_and_shares_the_text(
    bench: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = bench("gpt_parity")
    started: list[Path] = []
    monkeypatch.setattr(parity.Scheduler, "run", lambda self: started.append(self.checkpoint))
    for more in ((), ("--own-cache",), ("--own-cache",)):
        args = parity_args(cache, "--study", "parts", "--size", "tiny", "--steps", "20", *more)
        parity.run_study(args, tmp_path / "result")
    own = cache.with_name("cache_parts")
    assert started == [cache / "checkpoint.pt", own / "checkpoint.pt", own / "checkpoint.pt"]
    assert all((own / name).samefile(cache / name) for name in ("train.npy", "held_out.npy", "text.json"))


def test_by_regime_all_seeds_of_one_come_first(bench: Any, cache: Path) -> None:
    bench("gpt_parity")
    args = parity_args(cache, "--regimes", "3", "2", "--seeds", "0", "1", "--arms", "stock", "e4m11", "--by-regime")
    names = [job.name for job in jobs_of(args)]
    assert names[:4] == ["r3-stock-s0", "r3-e4m11-s0", "r3-stock-s1", "r3-e4m11-s1"]
    assert [name[:3] for name in names[4:]] == ["r2-"] * 4


def test_a_failed_run_is_reported_and_the_list_goes_on(bench: Any, cache: Path, tmp_path: Path) -> None:
    runs = bench("parity.runs")
    scheduler = runs.Scheduler(parity_args(cache, "--regimes", "1"), runs.Results(tmp_path / "result", {}, None))
    job = runs.Job(1, "stock", 0)
    (scheduler.logs / f"{job.name}.log").write_text("ValueError: the reason\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait(HANG)
    scheduler.running.append(runs.Running(job, process, 0, time.monotonic()))
    scheduler._collect()
    assert "the reason" in scheduler.results.failures[job.name]
    assert job.name not in {pending.name for pending in scheduler.pending()}
    assert not scheduler.running


def test_a_run_that_was_cut_is_left_and_no_failure(bench: Any, cache: Path, tmp_path: Path) -> None:
    runs = bench("parity.runs")
    args = parity_args(cache, "--regimes", "1", "--budget", "100", "--saving", "30")
    scheduler = runs.Scheduler(args, runs.Results(tmp_path / "result", {}, None))
    job = scheduler.pending()[0]
    command = scheduler.command(job)
    (seconds,) = [float(part.partition("=")[2]) for part in command if part.startswith("--seconds=")]
    assert 60 < seconds <= 70
    assert f"--state={cache / 'state' / job.name}" in command
    (scheduler.logs / f"{job.name}.part").write_text("step,tokens\n0,0\n10,90\n")
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait(HANG)
    scheduler.running.append(runs.Running(job, process, 0, time.monotonic()))
    scheduler._collect()
    assert scheduler.paused == [job.name] and not scheduler.results.failures
    assert job.name not in {pending.name for pending in scheduler.pending()}
    assert runs.Scheduler(args, scheduler.results).pending()[0] == job  # the next call


def test_whole_runs_are_not_begun_where_time_is_short(bench: Any, cache: Path, tmp_path: Path) -> None:
    runs = bench("parity.runs")
    for more, needed in (((), runs.SHORTEST_PIECE), (("--whole",), 240)):
        scheduler = runs.Scheduler(parity_args(cache, *more), runs.Results(tmp_path / "result", {}, None))
        assert scheduler.needed(scheduler.jobs()[0]) == needed


def test_a_branch_waits_for_its_trunk_and_then_needs_the_time_of_its_own_steps_only(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    runs = bench("parity.runs")
    names = ("stock", "fp8", "fp8-bf16-last", "fp8-bf16-last5", "e4m11-bf16-last")
    args = parity_args(cache, "--regimes", "1", "--seeds", "0", "--steps", "100", "--whole", "--arms", *names)
    scheduler = runs.Scheduler(args, runs.Results(tmp_path / "result", {}, None))
    stock, trunk, tenth, twentieth, alone = scheduler.jobs()
    assert [job.arm for job in (stock, trunk, tenth, twentieth, alone)] == list(names)
    assert scheduler.ready(scheduler.pending()) == [stock, trunk, alone]
    assert scheduler.command(trunk)[-3:] == ["--branches", tenth.arm, twentieth.arm]
    assert "--branches" not in scheduler.command(stock)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait(HANG)
    scheduler.running.append(runs.Running(trunk, process, 0, time.monotonic()))
    assert scheduler.ready(scheduler.pending()) == [stock, alone]
    scheduler.running.clear()
    scheduler.paused.append(trunk.name)  # it goes on in the next call, and leaves its state then
    assert scheduler.ready(scheduler.pending()) == [stock, alone]
    scheduler.paused.clear()
    scheduler.results.runs |= {trunk.name: {}, tenth.name: {}}
    assert scheduler.ready(scheduler.pending()) == [stock, twentieth, alone]
    assert scheduler.command(trunk)[-2:] == ["--branches", twentieth.arm]

    two = runs.Scheduler(parity_args(cache, "--regimes", "1", "--seeds", "0", "1", "--arms", *names), scheduler.results)
    whole, short = [f"r1-{arm}-s1" for arm in ("stock", "fp8")], [twentieth.name, alone.name, "r1-e4m11-bf16-last-s1"]
    assert [job.name for job in two.ready(two.pending())] == [stock.name, *whole, *short]

    assert scheduler.needed(twentieth) == args.estimate
    folder = cache / "state" / twentieth.name
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"step": 90}))
    assert scheduler.needed(twentieth) == pytest.approx(runs.SHORTEST_PIECE + 0.1 * args.estimate)
    assert scheduler.needed(stock) == args.estimate


def test_where_a_branch_parts_is_the_first_step_of_its_schedule_in_bf16(bench: Any) -> None:
    worker = bench("parity.worker")
    found = [worker.branches_off_after(arm, 6144) for arm in SCHEDULED]
    assert found == [5530, 5837, 5530, 5530, 5960, 5530]  # of 0.9, 0.95 and 0.97 times 6144, rounded up
    assert {bench("parity.arms").ARMS[arm]["schedule"]["bf16_last_fraction"] for arm in SCHEDULED} == {0.1, 0.05, 0.03}


def rows(regime: int, losses: dict[str, list[float]]) -> list[dict[str, str]]:
    return [
        {
            "regime": str(regime),
            "arm": arm,
            "seed": str(seed),
            "step": "10",
            "tokens": "100",
            "held_out_loss": str(loss),
        }
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_interval_of_paired_differences_is_students(bench: Any) -> None:
    plot = bench("parity.summary")
    losses = {"stock": [2.0, 4.0, 1.0], "e4m11": [2.002, 4.008, 1.003], "e4m19": [2.0, 4.0]}
    found = {d.arm: d for d in plot.differences(rows(1, losses), 1, 10) if d.base == "stock"}
    d = found["e4m11"]
    assert list(d.by_seed.values()) == pytest.approx([0.1, 0.2, 0.3])
    assert d.mean == pytest.approx(0.2)
    assert d.half_width == pytest.approx(4.303 * 0.1 / 3**0.5)
    # Pooled with e4m19, whose differences (0, 0) add one degree of freedom: (2 * 0.01 + 1 * 0) / 3.
    assert d.pooled == pytest.approx(3.182 * (0.02 / 3) ** 0.5 / 3**0.5)
    assert found["e4m19"].by_seed.keys() == {0, 1}


def test_training_losses_are_compared_step_by_step_over_the_last_tenth_that_both_runs_have(bench: Any) -> None:
    summary = bench("parity.summary")

    def curve(arm: str, seed: int, factor: float, end: int = 400) -> list[dict[str, str]]:
        told = {"regime": "3", "arm": arm, "seed": str(seed), "held_out_loss": ""}
        of_batch = {step: 2 + step % 7 for step in range(10, end + 1, 10)}  # in both runs of a pair
        return [
            {**told, "step": str(step), "train_loss": str(loss * (factor if step > end - 40 else 9.0))}
            for step, loss in of_batch.items()
        ]

    curves = [*curve("stock", 0, 9.0), *curve("stock", 1, 9.0), *curve("e4m11", 0, 9.018)]
    curves += curve("e4m11-e4m3", 0, 9.027, 300)
    curves += curve("e4m11-fast", 1, 9.0, 10)  # one step is no difference
    curves += curve("e4m11-delayed", 2, 9.0)  # no other run of its seed
    found = {
        pair: {seed: (d.mean, d.last_step) for seed, d in by_seed.items()}
        for pair, by_seed in summary.training_differences(curves, 3, 400).items()
    }
    assert found == {
        ("e4m11", "stock"): {0: (pytest.approx(0.2), 400)},
        ("e4m11-e4m3", "stock"): {0: (pytest.approx(0.3), 300)},
        ("e4m11-e4m3", "e4m11"): {0: (pytest.approx(0.3), 300)},
    }
    text = summary.report_training(curves, 400, [1, 3])
    assert "| e4m11-e4m3 - stock | +0.300 ± 0.000 (up to step 300) | +0.300 |" in text and "Regime 1" not in text


def test_curves_of_training_losses_are_means_over_parts_and_seeds_as_far_as_both_runs_have_come(bench: Any) -> None:
    def run(arm: str, seed: int, factor: float, end: int = 400) -> list[dict[str, str]]:
        told = {"regime": "3", "arm": arm, "seed": str(seed), "held_out_loss": ""}
        steps = range(10, end + 1, 10)
        return [
            {**told, "step": f"{n}", "tokens": f"{n}000000", "train_loss": f"{factor * (2 + n % 7)}"} for n in steps
        ]

    rows = [*run("stock", 0, 1.0), *run("stock", 1, 1.0), *run("e4m11", 0, 1.001), *run("e4m11", 1, 1.003, 200)]
    rows += run("delayed", 2, 1.0)  # no stock of its seed
    found = bench("parity.picture").training_curves(rows, 3, 400)
    assert found.keys() == {"e4m11"} and len(found["e4m11"]) == 10  # twenty parts of a run, of which one seed has half
    assert found["e4m11"][0] == pytest.approx((15.0, 0.2)) and found["e4m11"][-1] == pytest.approx((195.0, 0.2))


def test_the_long_names_of_one_panel_take_the_others_no_width(
    bench: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    with (root / "benchmarks/results/2026-11-28-gpt-parity-recipes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["held_out_loss"] and row["seed"] in ("58", "59")]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    bench("parity.picture").plot(rows, 6144, tmp_path / "picture.png", [3])
    figure = pyplot.gcf()
    figure.canvas.draw()
    monkeypatch.undo()
    curves, training, paired = figure.axes
    labels = [label.get_window_extent() for label in paired.get_yticklabels()]
    pyplot.close(figure)
    assert len(labels) == 5 and max(label.width for label in labels) > 0.4 * figure.bbox.width
    assert min(label.x0 for label in labels) >= 0
    assert min(curves.bbox.width, training.bbox.width) > 0.55 * figure.bbox.width


def test_the_report_has_every_regime_that_was_run(
    run_main: Callable[..., str], bench: Any, root: Path, tmp_path: Path
) -> None:
    source = root / "benchmarks/results/2026-11-28-gpt-parity-recipes.csv"
    said = run_main("gpt_parity", "--study", "1b", "--only-report", "--resume-from", source, "--out", tmp_path)
    assert 3 not in bench("parity.studies").STUDIES["1b"].regimes and "## Regime 3: branched off" in said
    assert next(tmp_path.glob("*.png")).stat().st_size > 20_000
    assert "| fp8-bf16-last - fp8 | -0.080 | -0.080 |" in said and "| fp8-bf16-last5 - fp8 | -0.056 ± 0.007 |" in said


def test_late_evaluations_are_averaged_where_both_runs_have_enough(bench: Any) -> None:
    summary = bench("parity.summary")

    def evaluations(arm: str, losses: list[float]) -> list[dict[str, str]]:
        told = {"regime": "3", "arm": arm, "seed": "0", "train_loss": ""}
        return [{**told, "step": str(100 * k), "held_out_loss": str(loss)} for k, loss in enumerate(losses)]

    few = evaluations("stock", [9.0, 2.0, 2.0, 2.0, 2.0]) + evaluations("fp8", [9.0, 2.1, 2.1, 2.1, 2.1])
    assert summary.late_differences(few, 3) == {} and summary.report_late(few, [1, 3]) == ""
    stock, fp8 = [9.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0], [9.0, 9.0, 2.002, 2.002, 2.002, 2.002, 2.012]
    enough = [*evaluations("stock", stock), *evaluations("fp8", fp8)]
    assert summary.late_differences(enough, 3) == {("fp8", "stock"): {0: pytest.approx(0.2)}}
    assert "| fp8 - stock | +0.200 | +0.200 |" in summary.report_late(enough, [1, 3])


def test_masters_are_compared_in_bf16_where_they_were_evaluated_so(bench: Any) -> None:
    summary = bench("parity.summary")
    losses = rows(3, {"stock": [2.0, 2.0], "fp8": [2.01, 2.02], "e4m11": [2.03, 2.03]})
    runs = {"r3-fp8-s0": {"held_out_loss_bf16": 2.002}, "r3-fp8-s1": {"held_out_loss_bf16": 2.004}, "r3-e4m11-s0": {}}
    text = summary.report_in_bf16(losses, runs, 10, [3])
    assert "| fp8 - stock | +0.100, +0.200 | +0.150 |" in text and "e4m11" not in text
    assert summary.report_in_bf16(losses, {}, 10, [3]) == ""


def test_parity_verdicts_can_be_missed(bench: Any) -> None:
    verdicts = bench("parity.summary").verdicts
    stock = [2.0, 2.1, 1.9]

    def of(regime: int, percent: dict[str, list[float]]) -> list[str]:
        losses = {arm: [s * (1 + p / 100) for s, p in zip(stock, ps, strict=True)] for arm, ps in percent.items()}
        lines = verdicts(rows(regime, {"stock": stock, **losses}), 10)
        return [line for line in lines if f"regime {regime}" in line and "NOT MEASURED" not in line]

    near, far, wide = [0.01, 0.02, 0.0], [0.4, 0.41, 0.42], [-0.5, 0.6, 0.05]
    assert [line[:6] for line in of(1, {"e4m19": near, "e4m11": near})] == ["met: r", "met: r"]
    assert [line[:6] for line in of(1, {"e4m19": far, "e4m11": wide})] == ["MISSED", "MISSED"]
    good = of(2, {"e4m11": near, "e4m11-nearest": far, "bf16-nearest": far})
    assert [line[:3] for line in good] == ["met"] * 3
    same = of(2, {"e4m11": near, "e4m11-nearest": near, "bf16-nearest": wide})
    assert [line[:6] for line in same] == ["met: r", "MISSED", "MISSED"]
    assert "to the last digit" in same[1]


def test_first_weights_travel_in_a_byte_each_and_are_the_same_wherever_they_arrive(bench: Any, tmp_path: Path) -> None:
    first_weights, models = bench("parity.first_weights"), bench("parity.models")
    model = models.GPT(models.SIZES["tiny"], 512, seed=0)
    torch.nn.init.zeros_(model.blocks[0].out.weight)
    names = dict(model.named_parameters())
    paths = [tmp_path / "here" / "checkpoint.pt", tmp_path / "there" / "checkpoint.pt"]
    for path in paths:
        path.parent.mkdir()
        first_weights.save(names.items(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes() and not list(tmp_path.rglob("*.part"))
    matrices = sum(p.numel() for p in names.values() if p.dim() == 2)
    assert paths[0].stat().st_size < 1.1 * matrices + 60_000
    loaded = first_weights.load(paths[0])
    assert loaded.keys() == names.keys()
    for name, weight in loaded.items():
        assert weight.dtype == torch.bfloat16
        if weight.dim() == 1:
            assert weight.equal(names[name].bfloat16())
            continue
        largest = names[name].abs().amax(dim=1, keepdim=True)
        error = (weight.float() - names[name]).abs()  # half a step of 127, and bf16's rounding
        assert (error <= largest / 254 + largest / 256).all() and (error > largest / 1000).any() == (largest > 0).any()
    model.load_state_dict(loaded)


@pytest.mark.slow
def test_parity_runs_an_arm_and_a_second_call_does_not_run_it_again(
    run_main: Callable[..., str], bench: Any, cache: Path, tmp_path: Path
) -> None:
    common = ("--size", "tiny", "--steps", 20, "--seeds", 0, "--cache", cache, "--out", tmp_path / "out")
    common = (*common, "--arms", "stock", "e4m11", "--regimes", 1, "--estimate", 1, "--budget", 3000)
    output = run_main("gpt_parity", *common)
    assert "finished r1-stock-s0" in output and "finished r1-e4m11-s0" in output
    first = bench("parity.first_weights").load(cache / "checkpoint.pt")
    assert {weight.dtype for weight in first.values()} == {torch.bfloat16}
    (csv_file,) = (tmp_path / "out").glob("*.csv")
    lines = [line.split(",") for line in csv_file.read_text().splitlines()]
    assert lines[0] == ["regime", "arm", "seed", "step", "tokens", "seconds", "train_loss", "held_out_loss"]
    losses, in_fp8 = (
        [float(line[7]) for line in lines[1:] if line[7] and line[1] == arm] for arm in ("stock", "e4m11")
    )
    assert len(losses) == len(in_fp8) == 11 and losses[-1] < losses[0] - 0.1
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv", ".json", ".md", ".png"}
    runs = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["runs"]
    in_bf16 = runs["r1-e4m11-s0"]["held_out_loss_bf16"]
    assert in_bf16 != in_fp8[-1] and abs(in_bf16 - in_fp8[-1]) < 0.1 * (in_fp8[0] - in_fp8[-1])
    assert "e4m11 - stock" in output.split("the same models, evaluated in bf16")[1]
    elsewhere = (*common, "--whole", "--out", tmp_path / "elsewhere")
    for again in (run_main("gpt_parity", *common), run_main("gpt_parity", *elsewhere)):
        assert "started" not in again and f"{losses[-1]:.4f}" in again
    assert next((tmp_path / "elsewhere").glob("*.csv")).read_text() == csv_file.read_text()


SCHEDULED = (
    *("fp8-bf16-last", "fp8-bf16-last5", "fp8-ends-e4m3-bf16-last", "e4m11-bf16-last"),
    *(f"e4m11-delayed-e4m3-fast-input-bf16-{last}" for last in ("last3", "last")),
)


@pytest.mark.parametrize(
    "arm", ["bf16-nearest", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("e4m11", "fp8-bf16-last5"))]
)
def test_worker_continues_from_a_checkpoint(
    bench: Any, root: Path, cache: Path, tmp_path: Path, cpu_environment: dict[str, str], arm: str
) -> None:
    worker = bench("parity.worker")
    weights = worker.GPT(worker.SIZES["tiny"], 256, seed=9).state_dict()
    weights["lm_head.weight"].zero_()  # all tokens alike: a loss that no random weights give
    bench("parity.first_weights").save(weights.items(), tmp_path / "weights.pt")
    env = {**cpu_environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = "0"  # the store takes a free one
    env["PYTHONPATH"] = os.pathsep.join([str(root / "benchmarks"), env["PYTHONPATH"]])
    settings = ("--regime", 2, "--seed", 0, "--steps", 4, "--lr", 1e-5, "--size", "tiny", "--cache", cache)
    settings = (*settings, "--checkpoint", tmp_path / "weights.pt", "--checkpoint-at", 0.7)
    command = [sys.executable, "-m", "parity.worker", *settings, "--arm", arm]
    command += ["--log", tmp_path / "run.csv"]
    done = subprocess.run([*map(str, command)], stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    log = [line.split(",") for line in (tmp_path / "run.csv").read_text().splitlines()]
    assert [int(line[0]) for line in log[1:]] == [0, 1, 2, 3, 4]  # four steps: an evaluation after each
    assert float(log[1][4]) == pytest.approx(math.log(256), abs=1e-4)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["checkpoint"] == worker.file_digest(tmp_path / "weights.pt")
    assert bool(about["plan"]) == ("held_out_loss_bf16" in about) == (arm != "bf16-nearest")
    if arm == "fp8-bf16-last5":  # of four steps the last one; then the evaluation in bf16 is the same
        assert about["held_out_loss_bf16"] == pytest.approx(float(log[-1][-1]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["stock", "delayed", "e4m11", "bf16-nearest"])
def test_a_run_in_three_pieces_has_the_losses_of_one(
    root: Path, cache: Path, tmp_path: Path, cpu_environment: dict[str, str], arm: str
) -> None:
    env = {**cpu_environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = "0"  # the store takes a free one
    env["PYTHONPATH"] = os.pathsep.join([str(root / "benchmarks"), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "parity.worker", "--regime=1", "--seed=0", "--steps=12", "--lr=1e-3"]
    command += ["--size=tiny-llama", f"--cache={cache}", f"--arm={arm}"]

    def piece(name: str, *more: str) -> Path:
        log = tmp_path / f"{name}.csv"
        done = subprocess.run(
            [*command, f"--log={log}", *more], stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return log

    state = f"--state={tmp_path / 'state'}"
    assert not any(piece("cut", state, "--seconds=0").exists() for _ in range(2))
    lines = [
        [[cell for k, cell in enumerate(line.split(",")) if k != 2] for line in log.read_text().splitlines()]
        for log in (piece("whole"), piece("cut", state))
    ]
    assert len(lines[0]) > 10 and lines[0] == lines[1]


@pytest.mark.slow
def test_branches_have_the_losses_of_runs_of_their_own(
    run_main: Callable[..., str], cache: Path, tmp_path: Path
) -> None:
    """With 40 steps the last tenth begins after step 36; the state they go on from is of step 30."""

    def losses(name: str, *arms: str) -> dict[str, list[list[str]]]:
        common = ("--size", "tiny", "--steps", 40, "--seeds", 0, "--regimes", 1, "--lr", 1e-3, 1e-5)
        common = (*common, "--cache", copied(cache, tmp_path / f"cache of {name}"))
        said = run_main("gpt_parity", *common, "--out", tmp_path / name, "--arms", *arms, "--estimate", 1)
        assert f"finished r1-{arms[-1]}-s0" in said
        (written,) = (tmp_path / name).glob("*.csv")
        found: dict[str, list[list[str]]] = {}
        with written.open() as file:
            for row in csv.DictReader(file):
                found.setdefault(row["arm"], []).append([row["step"], row["train_loss"], row["held_out_loss"]])
        return found

    together, alone = losses("together", "fp8", "fp8-bf16-last"), losses("alone", "fp8-bf16-last")
    assert together["fp8-bf16-last"] == alone["fp8-bf16-last"] and len(alone["fp8-bf16-last"]) > 10
    trunk, branch = together["fp8"], together["fp8-bf16-last"]
    same = [a == b for a, b in zip(trunk, branch, strict=True)]
    assert same == [int(step) < 36 for step, *_ in trunk]  # after step 36 the held-out loss is of bf16 already
    assert not any(tmp_path.rglob("progress.json"))


def test_batches_that_cannot_be_cut_evenly_are_refused(
    bench: Any, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (("--micro-batches", "3", "--arms", "stock"), "expected a divisor of 4, got 3"),
        (("--micro-batches", "2", "--arms", "stock", "torchao"), "expected 1 with torchao"),
        (("--gpus-per-run", "2", "--arms", "stock"), "expected from 1 to the 1 GPUs"),
        (("--gpus-per-run", "0", "--arms", "stock"), "got 0"),
        (("--gpus-per-run", "2", "--gpus", "2", "--arms", "stock", "torchao"), "expected 1 with torchao"),
        (("--gpus-per-run", "2", "--gpus", "2", "--micro-batches", "4", "--arms", "fp8"), "a divisor of 1, got 2"),
    ):
        with pytest.raises(SystemExit):
            parity_args(cache, *words)
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_in_two_micro_batches_is_one_step_with_its_loss(
    root: Path, cache: Path, tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    env = {**cpu_environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = "0"  # the store takes a free one
    env["PYTHONPATH"] = os.pathsep.join([str(root / "benchmarks"), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "parity.worker", "--regime=1", "--seed=0", "--steps=6", "--lr=1e-2"]
    losses = []
    for number in (1, 2):
        log = tmp_path / f"{number}.csv"
        more = ["--size=tiny", f"--cache={cache}", "--arm=stock", f"--micro-batches={number}", f"--log={log}"]
        done = subprocess.run([*command, *more], stdout=-1, stderr=-2, text=True, env=env, timeout=HANG, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        losses.append([float(line.split(",")[3]) for line in log.read_text().splitlines()[2:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0][-1] < losses[0][0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["stock", "e4m11"])
def test_a_run_on_two_ranks_is_cut_and_gone_on_with_and_has_the_losses_of_one_rank(
    run_main: Callable[..., str], cache: Path, tmp_path: Path, arm: str
) -> None:
    """By up to the order of sums; each rank with another half of the batch, or the loss would be another."""
    common = ("--size", "tiny-llama", "--steps", 20, "--seeds", 0, "--regimes", 1, "--arms", arm, "--estimate", 1)
    common = (*common, "--lr", "1e-2", "1e-5")
    found = {}
    for ranks in (1, 2):
        out = tmp_path / f"of{ranks}"
        own = copied(cache, tmp_path / str(ranks))
        more = ("--cache", own, "--out", out, "--gpus", ranks, "--gpus-per-run", ranks)
        if ranks == 2:
            cut = run_main("gpt_parity", *common, *more, "--budget", 1000, "--saving", 1000)
            assert "paused" in cut and f"finished r1-{arm}-s0" not in cut
        said = run_main("gpt_parity", *common, *more, "--budget", 3000)
        assert f"finished r1-{arm}-s0" in said
        (written,) = out.glob("*.csv")
        with written.open() as file:
            found[ranks] = [
                [float(row[name] or "nan") for name in ("train_loss", "held_out_loss")] for row in csv.DictReader(file)
            ]
        about = json.loads(written.with_suffix(".json").read_text())
        assert about["settings"]["gpus_per_run"] == ranks
        if arm == "e4m11":
            found[ranks].append([about["runs"]["r1-e4m11-s0"]["held_out_loss_bf16"]] * 2)
    losses = found[1]
    assert len(losses) > 10 and losses[-1][1] < losses[0][1] - 0.1
    np.testing.assert_allclose(found[2], losses, rtol=0.01 if arm == "stock" else 0.03)


def test_control_without_its_switch_is_refused(bench: Any) -> None:
    worker = bench("parity.worker")
    with pytest.raises(RuntimeError, match="fp8_round_to_nearest"):
        worker.round_to_nearest(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
