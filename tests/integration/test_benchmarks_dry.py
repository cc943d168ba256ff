"""The benchmark scripts of the FP8 optimizer states, on CPU at a tiny size: they run, and their verdicts can be bad."""

from __future__ import annotations

import argparse
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

# --- optimizer_peers.py ---


def test_optimizer_bench_has_the_two_billion_parameters_of_the_table(bench: Any) -> None:
    shapes = list(bench("optimizer_peers").llama_parameters(8, 4096, 32000))
    total = sum(math.prod(shape) for _, shape in shapes)
    linear = sum(math.prod(shape) for kind, shape in shapes if kind == "linear")
    assert total == 8 * (218_103_808 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert linear == 8 * 218_103_808


def test_optimizer_bench_measures_an_arm_in_its_own_process(run_main: Callable[..., str], tmp_path: Path) -> None:
    tiny = ("--layers", 1, "--hidden", 128, "--vocab", 64, "--steps", 2, "--copy-mib", 4, "--out", tmp_path)
    output = run_main("optimizer_peers", *tiny, "--arms", "torch fused AdamW fp32")
    (lines,) = tmp_path.glob("*.jsonl")
    result = json.loads(lines.read_text())
    assert result["parameters"] == 4 * 128 * 128 + 3 * 448 * 128 + 2 * 64 * 128 + 3 * 128
    assert result["moved_weights"] and result["finite"] and result["ms"] > 0
    assert "| torch fused AdamW fp32 |" in output and "16.3" in output
    assert "MISSED: ours e4m11 was not measured" in output
    assert str(tmp_path) not in "".join(path.read_text() for path in tmp_path.iterdir())


def test_optimizer_bench_names_a_rival_that_is_not_installed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = bench("optimizer_peers")
    absent = peers.Arm("no_such_package", peers.torch_fused, 1, 1, peers.Earlier(17.1, 7.12, 7.12))
    monkeypatch.setitem(peers.ARMS, "FlashAdamW", absent)
    result = peers.measure("FlashAdamW", argparse.Namespace())
    assert "no_such_package" in result["error"]
    assert "NOT MEASURED: MISSING: package no_such_package" in peers.table([result])


def peers_result(arm: str, ms: float, resident: float) -> dict[str, Any]:
    memory = {"resident_bytes_per_param": resident, "peak_bytes_per_param": resident}
    rates = {"gb_per_s": 20.8e3 / ms, "copy_gb_per_s": 4000.0, "moved_weights": True, "finite": True}
    return {"arm": arm, "ms": ms, "must_move_bytes_per_param": 10.4, **memory, **rates}


def test_optimizer_verdicts_are_missed_when_slow_large_or_a_rival_is_absent(bench: Any) -> None:
    peers = bench("optimizer_peers")
    rivals = [peers_result(name, 17.0, 7.12 if "Flash" in name else 6.1) for name in peers.ARMS if "ours" not in name]
    good = peers.verdicts([*rivals, peers_result("ours e4m11", 6.0, 6.2)])
    assert good and all(line.startswith("met") for line in good)
    slow = peers.verdicts([*rivals, peers_result("ours e4m11", 18.0, 6.2)])
    assert sum(line.startswith("MISSED") for line in slow) == 3  # 6.3 ms, the copy rate, the fastest
    large = peers.verdicts([*rivals, peers_result("ours e4m11", 6.0, 7.2)])
    assert sum(line.startswith("MISSED") for line in large) == 4  # resident and peak, 0.3 and FlashAdamW's
    alone = peers.verdicts([*rivals[1:], peers_result("ours e4m11", 6.0, 6.2)])
    assert any(line.startswith("MISSED: ours is the fastest") for line in alone)
    assert any("torch fused AdamW fp32" in line for line in alone if line.startswith("NOT MEASURED"))


# --- kernels ---


@pytest.mark.parametrize("part", ["quantize", "blockwise", "producers"])
def test_kernel_benchmarks_run_dry(part: str, run_main: Callable[..., str]) -> None:
    assert len(run_main(f"kernels_{part}", "--dry-run").splitlines()) >= 5


# --- moments on real gradients ---


def test_smooth_gradients_compares_both_roundings_by_kind_of_row(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("smooth_gradients", "--steps", 2, "--out", tmp_path)
    rows = json.loads(next(tmp_path.glob("*smooth-gradients.json")).read_text())["rows"]
    assert {(row["rounding"], row["step"]) for row in rows} == {("nearest", 2), ("ours", 2)}
    assert sum(row["rows"] for row in rows) == 2 * 256
    assert all(0 < row["error"] < 0.3 and 0.9 < row["gain"] < 1.1 for row in rows)


def test_update_error_of_a_gpt_is_written_by_kind_of_parameter(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("update_error_gpt", "--dry-run", "--out", tmp_path)
    last = json.loads(next(tmp_path.glob("*update-error-gpt.json")).read_text())["rows"][-1]
    assert set(last["kinds"]) >= {"qkv", "up", "wte", "norm", "lm_head"}
    assert all(0 < kind["error"] < 0.3 for kind in last["kinds"].values())


def test_tiny_parity_writes_paired_differences(run_main: Callable[..., str], tmp_path: Path) -> None:
    run_main("tiny_parity", "--steps", 2, "--seeds", 3, "--out", tmp_path)
    rows = json.loads(next(tmp_path.glob("*tiny-parity.json")).read_text())["rows"]
    assert [(row["beta2"], row["arm"]) for row in rows] == [(b, a) for b in (0.95, 0.999) for a in ("ours", "nearest")]
    for row in rows:
        low, high = row["interval_95_percent"]
        assert low < row["difference_percent"] < high and abs(row["difference_percent"]) < 0.1


# --- gpt_parity.py: text ---


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for number in range(60):
        package = root / "site-packages" / f"pack{number}"
        package.mkdir(parents=True)
        body = "".join(f"value_{number}_{line} = {line}\n" for line in range(40 + number))
        (package / "code.py").write_text(body)
        (package / "again.py").write_text(body)  # a vendored copy
    (root / "short.py").write_text("x = 1\n")
    (root / "table.txt").write_text("1" * 5000)
    (root / "not_text.py").write_bytes(b"\xff\xfe\n" * 200)
    return root


def test_held_out_packages_share_no_document_with_training(bench: Any, text_folder: Path) -> None:
    data = bench("gpt_parity_data")
    documents = data.find_documents([text_folder])
    assert len(documents) == 60  # no copy, nothing short, no table, nothing that is not UTF-8
    assert [name for _, name, _ in documents] == sorted(name for _, name, _ in documents)
    held_out = data.choose_held_out(documents)
    share = sum(len(c) for p, _, c in documents if p in held_out) / sum(len(c) for _, _, c in documents)
    assert 0.03 <= share < 0.05
    assert held_out == data.choose_held_out(reversed(documents))
    assert {p for p, _, _ in documents} > set(held_out)


def test_tokens_are_the_same_again_and_too_little_text_stops(
    bench: Any, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bench("gpt_parity_data")
    monkeypatch.setattr(data, "text_roots", lambda: [text_folder])
    first, cache = data.prepare(tmp_path / "a", "bytes", 512, 1000)
    again, _ = data.prepare(tmp_path / "b", "bytes", 512, 1000)
    cached, _ = data.prepare(tmp_path / "a", "bytes", 512, 1000)
    assert first.digest == again.digest == cached.digest
    assert cached == first
    train, held_out = (np.load(cache / f"{name}.npy") for name in ("train", "held_out"))
    assert first.num_bytes == train.size + held_out.size - first.num_files + 2  # joined by line feeds
    assert train.max() < 256
    with pytest.raises(SystemExit, match="expected at least 1,000,000 training tokens"):
        data.prepare(tmp_path / "a", "bytes", 512, 1_000_000)


def test_bpe_gives_back_the_text(bench: Any, text_folder: Path) -> None:
    pytest.importorskip("tokenizers")
    data = bench("gpt_parity_data")
    contents = [content for _, _, content in data.find_documents([text_folder])]
    train, held_out = data._bpe(contents[:50], contents[50:], 512)
    assert (train == 0).sum() == 50 and (held_out == 0).sum() == 10  # documents end with token 0
    assert train.max() < 512
    assert train.size < 0.5 * sum(map(len, contents[:50]))


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


def worker_args(**changes: Any) -> argparse.Namespace:
    values = {"regime": 1, "seed": 0, "steps": 20, "lr": 1e-3, "checkpoint_at": 0.5}
    return argparse.Namespace(**{**values, **changes})


def test_order_of_the_text_depends_on_the_seed_only_and_regime_2_reads_on(bench: Any, cache: Path) -> None:
    data, worker = bench("gpt_parity_data"), bench("gpt_parity_worker")
    windows = data.Windows(cache / "train.npy", 64, torch.device("cpu"))
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
    worker = bench("gpt_parity_worker")
    with torch.device("meta"):
        worker_size = worker.SIZES["124m"]
        blocks = [worker.Block(worker_size.dim) for _ in range(2)]
    block = sum(p.numel() for p in blocks[0].parameters())
    outer = (2 * worker_size.vocab_size + worker_size.seq_len + 1) * worker_size.dim
    assert abs(12 * block + outer - 124.4e6) < 0.2e6
    tiny = worker.SIZES["tiny"]
    models = [worker.GPT(tiny, 512, seed) for seed in (0, 0, 1)]
    assert all(p.dtype == torch.bfloat16 for p in models[0].parameters())
    pairs = list(zip(*(m.parameters() for m in models), strict=True))
    assert all(a.equal(b) for a, b, _ in pairs)
    assert any(not a.equal(c) for a, _, c in pairs)
    assert models[0].blocks[0].out.weight.std() < 0.7 * models[0].blocks[0].qkv.weight.std()


def test_learning_rate_ends_at_zero_in_regimes_1_and_3_and_is_constant_in_regime_2(bench: Any) -> None:
    rate = bench("gpt_parity_worker").learning_rate
    first = [rate(worker_args(steps=100), step) for step in range(100)]
    assert [rate(worker_args(steps=100, regime=3), step) for step in range(100)] == first
    assert first[0] == pytest.approx(2e-4) and max(first) == pytest.approx(1e-3) and 0 < first[99] < 2e-5
    assert [rate(worker_args(steps=100, regime=2), step) for step in (5, 50, 99)] == [1e-3] * 3


# --- gpt_parity.py: work list and statistics ---


def parity_args(cache: Path, *more: str) -> argparse.Namespace:
    parity = import_module("gpt_parity")
    before, sys.argv = sys.argv, ["gpt_parity.py", "--size=tiny", "--gpus=1", f"--cache={cache}", *more]
    try:
        return parity.parse_args()
    finally:
        sys.argv = before


def test_work_list_is_that_of_the_issue(bench: Any, cache: Path) -> None:
    parity = bench("gpt_parity")
    names = [job.name for job in parity.work_list(parity_args(cache, "--regimes", "1"))]
    assert len(names) == 13 and names[0] == "r1-stock-s0"
    for arm in ("stock", "fp8", "e4m19", "e4m11"):
        assert {f"r1-{arm}-s{seed}" for seed in range(3)} < set(names)
    assert [name for name in names if "torchao" in name] == ["r1-torchao-s0"]
    second = {job.arm for job in parity.work_list(parity_args(cache, "--regimes", "2"))}
    assert second > {"stock", "e4m11", "e4m11-nearest", "bf16-nearest"}
    third = [job.name for job in parity.work_list(parity_args(cache, "--regimes", "3", "--seeds", "4"))]
    assert third == ["r3-stock-s4", "r3-e4m11-s4", "r3-e4m19-s4", "r3-fp8-s4"]


def test_regime_2_waits_for_its_first_weights_and_a_fresh_machine_makes_them_again(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    parity = bench("gpt_parity")
    args = parity_args(cache, "--seeds", "0", "--arms", "stock", "e4m11", "--regimes", "1", "2")
    results = parity.Results(tmp_path / "result", {}, None)
    scheduler = parity.Scheduler(args, results)
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r1-stock-s0", "r1-e4m11-s0"]
    results.runs |= {"r1-stock-s0": {}, "r1-e4m11-s0": {}}
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r1-stock-s0-checkpoint"]
    scheduler.checkpoint.write_bytes(b"weights")
    assert [job.name for job in scheduler.ready(scheduler.pending())] == ["r2-stock-s0", "r2-e4m11-s0"]


def test_runs_from_another_checkpoint_are_dropped_unless_their_seed_is_complete(
    bench: Any, cache: Path, tmp_path: Path
) -> None:
    parity = bench("gpt_parity")
    args = parity_args(cache, "--seeds", "0", "1", "--regimes", "2", "--arms", "stock", "e4m11")
    results = parity.Results(tmp_path / "result", {}, None)
    done = {f"r2-{arm}-s{seed}": {"checkpoint": "theirs"} for arm, seed in (("stock", 0), ("e4m11", 0), ("stock", 1))}
    results.runs |= done
    results.rows = [{"regime": "2", "arm": "stock", "seed": str(seed), "step": "1"} for seed in (0, 1)]
    scheduler = parity.Scheduler(args, results)
    scheduler.checkpoint.write_bytes(b"other weights")
    scheduler._reconcile()
    assert set(results.runs) == {"r2-stock-s0", "r2-e4m11-s0"}
    assert [row["seed"] for row in results.rows] == ["0"]
    assert {job.name for job in scheduler.pending()} == {"r2-stock-s1", "r2-e4m11-s1"}


def test_more_than_two_epochs_are_refused(bench: Any, cache: Path) -> None:
    parity = bench("gpt_parity")
    assert "2.00 times" in parity.check_epochs(parity_args(cache, "--steps", "50"), 100)
    with pytest.raises(SystemExit, match=r"at most 2 epochs, got 2\.04"):
        parity.check_epochs(parity_args(cache, "--steps", "51"), 100)


def test_results_of_other_settings_are_refused(bench: Any, tmp_path: Path) -> None:
    parity = bench("gpt_parity")
    stem = tmp_path / "result"
    parity.Results(stem, {"steps": 10, "digest": "a"}, None).write()
    assert parity.Results(stem, {"steps": 10, "digest": "a"}, None).runs == {}
    with pytest.raises(SystemExit, match="digest"):
        parity.Results(stem, {"steps": 10, "digest": "b"}, None)


def test_a_failed_run_is_reported_and_the_list_goes_on(bench: Any, cache: Path, tmp_path: Path) -> None:
    parity = bench("gpt_parity")
    scheduler = parity.Scheduler(parity_args(cache, "--regimes", "1"), parity.Results(tmp_path / "result", {}, None))
    job = parity.Job(1, "stock", 0)
    (scheduler.logs / f"{job.name}.log").write_text("ValueError: the reason\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait(30)
    scheduler.running.append(parity.Running(job, process, 0, time.monotonic()))
    scheduler._collect()
    assert "the reason" in scheduler.results.failures[job.name]
    assert job.name not in {pending.name for pending in scheduler.pending()}
    assert not scheduler.running


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
    plot = bench("gpt_parity_plot")
    losses = {"stock": [2.0, 4.0, 1.0], "e4m11": [2.002, 4.008, 1.003], "e4m19": [2.0, 4.0]}
    found = {d.arm: d for d in plot.differences(rows(1, losses), 1, 10) if d.base == "stock"}
    d = found["e4m11"]
    assert list(d.by_seed.values()) == pytest.approx([0.1, 0.2, 0.3])
    assert d.mean == pytest.approx(0.2)
    assert d.half_width == pytest.approx(4.303 * 0.1 / 3**0.5)
    # Pooled with e4m19, whose differences (0, 0) add one degree of freedom: (2 * 0.01 + 1 * 0) / 3.
    assert d.pooled == pytest.approx(3.182 * (0.02 / 3) ** 0.5 / 3**0.5)
    assert found["e4m19"].by_seed.keys() == {0, 1}


def test_parity_verdicts_can_be_missed(bench: Any) -> None:
    verdicts = bench("gpt_parity_plot").verdicts
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


def test_parity_runs_an_arm_and_a_second_call_does_not_run_it_again(
    run_main: Callable[..., str], cache: Path, tmp_path: Path
) -> None:
    common = ("--size", "tiny", "--steps", 20, "--seeds", 0, "--cache", cache, "--out", tmp_path / "out")
    common = (*common, "--arms", "stock", "--regimes", 1, "--estimate", 1)
    output = run_main("gpt_parity", *common)
    assert "finished r1-stock-s0" in output
    assert torch.load(cache / "checkpoint.pt", weights_only=True)["wte.weight"].dtype == torch.bfloat16
    (csv_file,) = (tmp_path / "out").glob("*.csv")
    lines = [line.split(",") for line in csv_file.read_text().splitlines()]
    assert lines[0] == ["regime", "arm", "seed", "step", "tokens", "seconds", "train_loss", "held_out_loss"]
    losses = [float(line[7]) for line in lines[1:] if line[7]]
    assert len(losses) == 11 and losses[-1] < losses[0] - 0.1
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv", ".json", ".md", ".png"}
    again = run_main("gpt_parity", *common)
    assert "started" not in again and f"{losses[-1]:.4f}" in again


@pytest.mark.parametrize("arm", ["e4m11", "bf16-nearest"])
def test_worker_continues_from_a_checkpoint(
    bench: Any, root: Path, cache: Path, tmp_path: Path, cpu_environment: dict[str, str], arm: str
) -> None:
    worker = bench("gpt_parity_worker")
    weights = worker.GPT(worker.SIZES["tiny"], 256, seed=9).state_dict()
    weights["lm_head.weight"].zero_()  # all tokens alike: a loss that no random weights give
    torch.save(weights, tmp_path / "weights.pt")
    env = {**cpu_environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    settings = ("--regime", 2, "--seed", 0, "--steps", 4, "--lr", 1e-5, "--size", "tiny", "--cache", cache)
    settings = (*settings, "--checkpoint", tmp_path / "weights.pt", "--checkpoint-at", 0.7)
    command = [sys.executable, root / "benchmarks/gpt_parity_worker.py", *settings, "--arm", arm]
    command += ["--log", tmp_path / "run.csv"]
    done = subprocess.run([*map(str, command)], stdout=-1, stderr=-2, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    log = [line.split(",") for line in (tmp_path / "run.csv").read_text().splitlines()]
    assert [int(line[0]) for line in log[1:]] == [0, 1, 2, 3, 4]  # four steps: an evaluation after each
    assert float(log[1][4]) == pytest.approx(math.log(256), abs=1e-4)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["checkpoint"] == worker.file_digest(tmp_path / "weights.pt")
    assert bool(about["plan"]) == (arm == "e4m11")


def test_control_without_its_switch_is_refused(bench: Any) -> None:
    worker = bench("gpt_parity_worker")
    with pytest.raises(RuntimeError, match="fp8_round_to_nearest"):
        worker.round_to_nearest(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


# --- largest_model.py ---


def test_largest_model_search_stops_at_the_first_that_trains_and_at_other_errors(bench: Any) -> None:
    search = bench("largest_model").search
    outcomes = {"32": {"error": "out of memory"}, "28": {"trained": True}, "24": {"trained": True}}
    assert len(search(["32", "28", "24"], outcomes.__getitem__)) == 2
    outcomes["32"] = {"error": "exit status 1"}
    assert len(search(["32", "28", "24"], outcomes.__getitem__)) == 1


def test_largest_model_says_in_which_phase_memory_ran_out(bench: Any) -> None:
    largest = bench("largest_model")
    args = argparse.Namespace(vocab=32000, steps=2)
    phase = {"phase": "construction", "gib": 40.0, "peak_gib": 41.0, "bytes_per_param": 2.0}
    phase |= {"peak_bytes_per_param": 2.0}
    records = [{"phase": "construction", "began": True}, phase, {"phase": "initialize", "began": True}]
    output = "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84 GiB\n"
    out = largest.summary(args, "stock bf16", "22", records, 1, output)
    assert (out["error"], out["failed_in"], out["trained"]) == ("out of memory", "initialize", False)
    assert "84 GiB" in out["output"]
    fitted = {"arm": "fp8 states", "size": "22", "parameters": out["parameters"], "trained": True}
    lines = largest.verdicts([{"arm": "stock bf16", "size": "22", **out}, fitted])
    assert [line[:3] for line in lines] == ["met", "met"]
    crashed = {"arm": "stock bf16", "size": "22", **out, "error": "exit status 1"}
    assert largest.verdicts([crashed, fitted])[1].startswith("MISSED")
    assert "**out of memory** in initialize" in largest.table([{"arm": "stock bf16", "size": "22", **out}])
    rising = largest.summary(args, "fp8 states", "22", [{**phase, "loss": 1.0}, {**phase, "loss": 1.1}], 0, "")
    assert not rising["trained"] and "did not fall" in rising["error"]


def test_largest_model_sizes_are_what_they_are_called_and_predictions_those_of_the_issue(bench: Any) -> None:
    largest = bench("largest_model")
    for name, shape in largest.SIZES.items():
        if name != "tiny":
            num = shape.num_linear() + 2 * 32000 * shape.hidden + (2 * shape.layers + 1) * shape.hidden
            assert num / 1e9 == pytest.approx(float(name), rel=0.035)
    shape = largest.SIZES["22"]
    num = shape.num_linear() + 2 * 32000 * shape.hidden + (2 * shape.layers + 1) * shape.hidden
    per_param = [largest.predicted_bytes(arm, shape, 32000) / num for arm in largest.ARMS]
    assert per_param == pytest.approx([4.08, 6.08, 18.0], abs=0.01)


def test_largest_model_trains_a_tiny_one_and_logs_each_phase(run_main: Callable[..., str], tmp_path: Path) -> None:
    tiny = ("--size", "tiny", "--seq", 32, "--vocab", 256, "--steps", 3, "--out", tmp_path, "--arms", "fp8 states")
    output = run_main("largest_model", *tiny)
    (path,) = tmp_path.glob("*.json")
    (result,) = json.loads(path.read_text())
    assert result["trained"], result
    assert [p["phase"] for p in result["phases"]] == ["construction", "initialize", "step 1", "step 2", "step 3"]
    assert "NOT MEASURED: stock DeepSpeed" in output  # the control was not among the arms


# --- slow_link.py (its launchers: tests/multinode) ---


def test_slow_link_predicts_from_bytes_and_says_which_losses_changed(bench: Any) -> None:
    slow_link = bench("slow_link")
    rows = [
        {"mbit_per_s": rate, "stage": 3, "arm": arm, "s_per_step": seconds, "mb_per_step": mb, "losses": losses}
        for rate, arm, seconds, mb, losses in (
            (None, "bf16", 0.1, 12.5, [2.0]),
            (None, "FP8 gathers", 0.2, 10.0, [2.1]),
            (100.0, "bf16", 1.2, 12.5, [2.0]),
            (100.0, "FP8 gathers", 1.0, 10.0, [2.2]),
        )
    ]
    found = slow_link.with_prediction(rows)
    assert [row["predicted_s"] for row in found] == pytest.approx([0.1, 0.2, 1.1, 1.0])
    assert [row["speedup"] for row in found] == pytest.approx([1.0, 0.5, 1.0, 1.2])
    assert slow_link.changed(rows) == ["ZeRO-3 FP8 gathers at 100.0 Mbit/s"]
    assert "| 100 | 3 | FP8 gathers | 10.00 | 1.000 | 1.000 | 1.20 |" in slow_link.table(found)
