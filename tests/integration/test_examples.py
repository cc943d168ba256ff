import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import HANG

from fp8_ds.host import free_port
from fp8_ds.monitor.sinks import JsonLines, Report
from fp8_ds.monitor.statistics import TensorStatistics
from fp8_ds.tools.compare import read_curve

Launch = Callable[..., str]
TINY = ("--size", "tiny", "--seq-len", "64", "--held-out-batches", "1")


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_train_stays_short_enough_to_read(root: Path) -> None:
    assert len((root / "examples/deepspeed/train.py").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("zero", "stage"), [({"stage": 3}, 3), ({}, 0), (None, 0)])
def test_a_configuration_without_a_stage_comes_to_initialize(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: dict[str, Any] | None, stage: int
) -> None:
    """It says what is wrong with a misspelt "zero_optimisation", and a KeyError of the example's does not."""
    monkeypatch.syspath_prepend(root / "examples/deepspeed")
    train = importlib.import_module("train")
    (tmp_path / "ds.json").write_text(json.dumps({} if zero is None else {"zero_optimization": zero}))
    seen: dict[str, Any] = {}
    monkeypatch.setattr(train.deepspeed, "init_distributed", lambda: None)
    monkeypatch.setattr(train.deepspeed.zero, "Init", lambda **options: seen.update(options) or nullcontext())
    monkeypatch.setattr(train.deepspeed, "initialize", lambda **options: ("engine", None, None, None))
    args = train.parse_args(["--deepspeed_config", str(tmp_path / "ds.json")])
    assert train.build_engine(args) == "engine" and seen["enabled"] == (stage == 3)


def test_splits_share_no_file_and_batches_depend_on_seed_and_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    import data

    train, held_out = data.read_stdlib("train"), data.read_stdlib("held_out")
    assert len(held_out) > 100_000
    assert len(train) > 3 * len(held_out)
    assert bytes(held_out[:200].numpy()) not in bytes(train.numpy())
    first = data.sample_batch(train, 2, 16, seed=0, index=0)
    assert first.shape == (2, 17)
    assert first.equal(data.sample_batch(train, 2, 16, seed=0, index=0))
    assert not first.equal(data.sample_batch(train, 2, 16, seed=0, index=1))
    assert not first.equal(data.sample_batch(train, 2, 16, seed=1, index=0))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_resumes_bit_exactly(root: Path, start_ranks: Launch, tmp_path: Path, ranks: int) -> None:
    script, config = root / "examples/deepspeed/train.py", root / "configs/ds_zero3_fp8.json"
    common = ("--deepspeed_config", config, *TINY, "--steps", 4, "--save", tmp_path / "ckpt", "--save-every", 2)
    output = start_ranks(script, *common, "--log", tmp_path / "new" / "whole.jsonl", ranks=ranks)
    assert "held-out loss" in output
    whole = read_log(tmp_path / "new" / "whole.jsonl")
    assert [record["step"] for record in whole] == [0, 1, 2, 3, 4]
    assert {"step", "loss", "lr", "tokens_per_s"} == set(whole[0])

    (tmp_path / "ckpt/latest").write_text("global_step2")
    start_ranks(script, *common, "--resume", "--log", tmp_path / "resumed.jsonl", ranks=ranks)
    resumed = read_log(tmp_path / "resumed.jsonl")
    assert [record["step"] for record in resumed] == [2, 3, 4]
    assert [record["loss"] for record in resumed[:2]] == [record["loss"] for record in whole[2:4]]
    assert resumed[-1]["held_out_loss"] == whole[-1]["held_out_loss"]


@pytest.mark.parametrize(
    ("emulated", "given", "steps"), [(False, [], 100), (True, [], 20), (True, ["--steps", "7"], 7)]
)
def test_demo_is_short_where_bf16_is_emulated(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, emulated: bool, given: list[str], steps: int
) -> None:
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    demo = importlib.import_module("demo")
    asked = []
    monkeypatch.setattr(demo, "num_gpus", lambda: 0)
    monkeypatch.setattr(demo, "bf16_is_emulated", lambda: emulated)
    monkeypatch.setattr(demo, "run", lambda name, args, ranks: asked.append(args.steps))
    monkeypatch.setattr(demo, "comparison", lambda results: "")
    monkeypatch.setattr(demo, "plot", lambda results, path: None)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path), *given])
    demo.main()
    assert asked == [steps, steps]


def test_the_log_of_a_demo_that_is_killed_has_every_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    demo = importlib.import_module("demo")
    logged = []

    def lines() -> Iterator[str]:
        for number in range(2):
            yield f"line {number}\n"
            logged.append((tmp_path / "FP8.log").read_text())

    launched = SimpleNamespace(stdout=lines(), returncode=1)
    monkeypatch.setattr(demo.subprocess, "Popen", lambda *args, **options: nullcontext(launched))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="exit status 1"):
        demo.run("FP8", demo.parse_args(), ranks=1)
    assert logged == ["line 0\n", "line 0\nline 1\n"]


@pytest.mark.launcher
def test_demo_compares_fp8_with_bf16(root: Path, tmp_path: Path, cpu_environment: dict[str, str]) -> None:
    command = [sys.executable, root / "examples/deepspeed/demo.py", "--size", "tiny", "--steps", "3"]
    command += ["--seq-len", "64", "--ranks", "2", "--out", str(tmp_path)]
    result = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=cpu_environment, timeout=HANG, check=False)
    assert result.returncode == 0, result.stdout[-6000:]
    assert "held-out loss" in result.stdout
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    fp8, bf16 = (json.loads((tmp_path / f"{name}.report.json").read_text()) for name in ("FP8", "bf16"))
    # Half, but for embedding, head and norms, which stay bf16 (a quarter of so small a model).
    assert fp8["gathered_bytes"] < 0.7 * bf16["gathered_bytes"]
    assert fp8["num_params"] == bf16["num_params"]


def test_parity_trains_pairs_of_runs_once_and_compares_them(
    root: Path, tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.md"
    text.write_text((root / "docs/config.md").read_text())
    command = [sys.executable, root / "examples/deepspeed/parity.py", "--text", text, "--steps", "8", "--out", out]
    command += ["--seq-len", "32", "--evaluations", "2", "--held-out-batches", "2"]

    def start(*options: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *options], stdout=-1, stderr=-2, text=True, env=cpu_environment, timeout=HANG, check=False
        )
        return done.returncode, done.stdout

    code, said = start("--seeds", "1")
    assert code == 0 and said.count("one pair: undecided") == 2, said[-6000:]
    bf16, fp8 = (read_curve(out / f"{name}-s0.csv", "held_out_loss") for name in ("bf16", "ds_zero2_fp8"))
    assert (
        list(bf16.losses) == list(fp8.losses) == [0, 4, 8] and bf16.losses != fp8.losses
    )  # fp8: in FP8, from the same weights
    assert bf16.losses[8] < bf16.losses[0] - 0.1 and abs(fp8.losses[8] / bf16.losses[8] - 1) < 0.01
    assert len(read_curve(out / "bf16-s0.csv").losses) == 8
    written = (out / "bf16-s0.csv").stat().st_mtime_ns
    code, said = start("--seeds", "2")
    assert code == 0 and said.count("% of 2 pairs: ") == 2, said[-6000:]
    assert (out / "bf16-s0.csv").stat().st_mtime_ns == written
    assert abs(read_curve(out / "bf16-s1.csv", "held_out_loss").losses[0] / bf16.losses[0] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.launcher
def test_parity_under_the_launcher_with_a_model_of_transformers(root: Path, launch: Launch, tmp_path: Path) -> None:
    """Several configurations, of stage 3 and with FP8 states; a folder of runs of other settings is refused."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes, vocab_size=256, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    configs = [root / f"configs/{name}.json" for name in ("ds_zero3_fp8", "ds_zero2_fp8_states")]
    options = ["--model", tmp_path / "model", "--config", *configs, "--seq-len", 32, "--held-out-batches", 2]
    script = root / "examples/deepspeed/parity.py"
    said = launch(script, *options, "--steps", 20, "--seeds", 2)
    assert said.count("% of 2 pairs: ") == 4 and said.count("fp8: 14 of 15 linears") == 4
    found = json.loads((tmp_path / "parity/ds_zero2_fp8_states-s1.json").read_text())
    assert found["config"]["fp8"]["optimizer"]["seed"] == 1 and found["ranks"] == 2
    with pytest.raises(
        AssertionError, match=r"--out: expected runs of these settings, got parity/bf16-s0\.csv of others"
    ):
        launch(script, *options, "--steps", 21, "--seeds", 2)


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize(
    "name",
    [
        "ds_zero1_fp8",
        "ds_zero2_fp8",
        "ds_zero2_fp8_blockwise",
        "ds_zero2_fp8_delayed",
        "ds_zero2_fp8_delayed_fast",
        "ds_zero2_fp8_delayed_fast_last",
        "ds_zero2_fp8_fast",
        "ds_zero2_fp8_precise",
        "ds_zero2_fp8_precise_fast",
        "ds_zero3_fp8",
        "ds_zero3_bf16",
    ],
)
def test_every_config_trains(root: Path, launch: Launch, tmp_path: Path, name: str) -> None:
    config, log = root / f"configs/{name}.json", tmp_path / "log.jsonl"
    options = (*TINY, "--size", "small") if "precise" in name else TINY  # "tiny" has nothing but ends
    script = root / "examples/deepspeed/train.py"
    output = launch(script, "--deepspeed_config", config, *options, "--steps", 30, "--log", log)
    assert "delayed scales" not in output
    *steps, last = read_log(log)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert last["held_out_loss"] < steps[0]["loss"] - 0.5


def test_the_configurations_of_hugging_face_examples_differ_in_the_block_only(root: Path) -> None:
    folder = root / "examples/huggingface"
    fp8, bf16 = (json.loads((folder / f"ds_zero3_{kind}.json").read_text()) for kind in ("fp8", "bf16"))
    assert fp8.pop("fp8") == {"enabled": True} and fp8 == bf16


def test_the_seed_of_trainers_example_chooses_its_first_weights(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(root / "examples/huggingface"))
    script = importlib.import_module("train_trainer")
    made: list[Any] = []

    def trainer(model: Any, **rest: Any) -> None:
        made.append(model.lm_head.weight)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "Trainer", trainer)
    for seed in ("1", "1", "2"):
        monkeypatch.setattr(sys, "argv", ["train_trainer.py", "--output_dir", str(tmp_path), "--seed", seed])
        with pytest.raises(KeyboardInterrupt):
            script.main()
    assert made[0].equal(made[1]) and not made[0].equal(made[2])


@pytest.mark.slow
@pytest.mark.launcher
def test_hugging_face_examples_train_and_save_in_bf16_too(root: Path, launch: Launch, tmp_path: Path) -> None:
    """As a comparison with bf16 asks for: without the block Trainer's script, with one that is off Accelerate's."""
    pytest.importorskip("transformers")
    folder = root / "examples/huggingface"
    options = ("--output_dir", tmp_path / "trainer", "--bf16", "true", "--max_steps", 2, "--logging_steps", 1)
    options += ("--use_cpu", "true", "--per_device_train_batch_size", 2, "--report_to", "none")
    config = folder / "ds_zero3_bf16.json"
    output = launch(folder / "train_trainer.py", "--deepspeed", config, *options, ranks=1)
    assert "\nfp8: off" in output and "linears" not in output
    assert len(read_curve(tmp_path / "trainer").losses) == 2
    off = tmp_path / "off.json"
    off.write_text(json.dumps(json.loads(config.read_text()) | {"fp8": {"enabled": False}}))
    output = launch(folder / "train_accelerate.py", off, tmp_path / "accelerate", 1, ranks=1)
    assert "\nfp8: off" in output and "linears" not in output
    assert (tmp_path / "accelerate/model/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.launcher
def test_hugging_face_examples_train_and_save(root: Path, launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = root / "examples/huggingface"
    config = folder / "ds_zero3_fp8.json"
    options = ("--output_dir", tmp_path / "trainer", "--bf16", "true", "--max_steps", 10, "--report_to", "none")
    options += ("--use_cpu", "true", "--per_device_train_batch_size", 2, "--save_strategy", "no")
    output = launch(folder / "train_trainer.py", "--deepspeed", config, *options)
    assert "held-out loss" in output and "28 of 29 linears" in output
    assert (tmp_path / "trainer/model.safetensors").exists()
    output = launch(folder / "train_accelerate.py", config, tmp_path / "accelerate", 11)
    check_accelerate(output, tmp_path / "accelerate")


@pytest.mark.slow
@pytest.mark.launcher
def test_accelerate_launch_starts_its_example(root: Path, tmp_path: Path, cpu_environment: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    folder = root / "examples/huggingface"
    config, port = str(folder / "ds_zero3_fp8.json"), str(free_port())
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--deepspeed_config_file", config]
    command += ["--num_processes", "2", "--main_process_port", port, str(folder / "train_accelerate.py"), config]
    command += [str(tmp_path / "out"), "11"]
    done = subprocess.run(
        command, stdout=-1, stderr=-2, text=True, env=cpu_environment, cwd=tmp_path, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    check_accelerate(done.stdout, tmp_path / "out")


def check_accelerate(output: str, out: Path) -> None:
    assert output.count("\nfp8: 28 of 29 linears") == 1  # one rank prints, and saves
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) >= 2 and losses[-1] < losses[0] - 0.3
    assert (out / "model/model.safetensors").exists()


def reports(path: Path) -> Path:
    """A file of the monitor's: layer a all along, with an infinity in step 10; b in bf16 in step 20, which repeats."""
    good, bad = TensorStatistics(2.0, 224.0, 0.0, 0.25, 8), TensorStatistics(math.inf, math.nan, math.nan, math.nan, 8)
    for step, layers in (
        (10, {"a": {"input": good, "grad_output": bad}, "b": {"input": good}}),
        (20, {"a": {"input": bad}}),
        (20, {"a": {"grad_output": good}}),
    ):
        JsonLines(path)(Report(step, step, layers))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("statistic", ["underflow", "saturation", "amax", "scale"])
def test_a_heat_map_of_each_statistic_shows_what_was_not_finite(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statistic: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    heatmap = importlib.import_module("heatmap")
    path, out = reports(tmp_path / "health.jsonl"), tmp_path / "health.png"
    monkeypatch.setattr(sys, "argv", ["heatmap.py", str(path), str(out), "--statistic", statistic])
    heatmap.main()
    assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 5000
    figure = heatmap.draw(heatmap.read_reports(path), statistic)
    red = {axis.get_title().split(":")[0]: axis.images[1].get_array().filled(0.0).tolist() for axis in figure.axes[:3]}
    assert red == {"input": [[0, 0]] * 2, "weight": [[0, 0]] * 2, "grad_output": [[1, 0], [0, 0]]}
    known = [[not bad for bad in row] for row in figure.axes[0].images[0].get_array().mask.tolist()]
    assert known == [[True, False], [True, False]]


@pytest.mark.parametrize("content", ['{"loss": 3}\n', '{"step": 1, "lay', "", '{"step": 1, "layers": {}}\n'])
def test_a_heat_map_of_a_file_without_reports_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    (tmp_path / "loss.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=r"loss\.jsonl:?\d?: expected"):
        importlib.import_module("heatmap").read_reports(tmp_path / "loss.jsonl")
