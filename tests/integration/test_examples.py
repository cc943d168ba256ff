import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import HANG
from support.scripts import run_script

from fp8_ds.host import free_port
from fp8_ds.tools.compare import read_curve

Launch = Callable[..., str]
TINY = ("--size", "tiny", "--seq-len", "64", "--held-out-batches", "1")


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_training_resumes_bit_exactly(root: Path, start_ranks: Launch, tmp_path: Path) -> None:
    script, config = root / "examples/deepspeed/train.py", root / "configs/ds_zero3_fp8.json"
    common = ("--deepspeed_config", config, *TINY, "--steps", 4, "--save", tmp_path / "ckpt", "--save-every", 2)
    output = start_ranks(script, *common, "--log", tmp_path / "new" / "whole.jsonl")
    assert "held-out loss" in output
    whole = read_log(tmp_path / "new" / "whole.jsonl")
    assert [record["step"] for record in whole] == [0, 1, 2, 3, 4]
    assert {"step", "loss", "lr", "tokens_per_s"} == set(whole[0])

    (tmp_path / "ckpt/latest").write_text("global_step2")
    start_ranks(script, *common, "--resume", "--log", tmp_path / "resumed.jsonl")
    resumed = read_log(tmp_path / "resumed.jsonl")
    assert [record["step"] for record in resumed] == [2, 3, 4]
    assert [record["loss"] for record in resumed[:2]] == [record["loss"] for record in whole[2:4]]
    assert resumed[-1]["held_out_loss"] == whole[-1]["held_out_loss"]


@pytest.mark.launcher
def test_demo_compares_fp8_with_bf16(
    root: Path,
    start_ranks: Launch,
    tmp_path: Path,
    cpu_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run in FP8 is launched; the other's ranks are forked, which takes a tenth of the time."""
    monkeypatch.syspath_prepend(str(root / "examples/deepspeed"))
    demo = import_module("demo")

    @contextmanager
    def popen(command: list[str], **options: Any) -> Iterator[Any]:
        if str(tmp_path / "FP8.json") in command:
            with subprocess.Popen(command, **options) as process:
                yield process
        else:
            ranks = command[command.index(str(demo.HERE / "demo_worker.py")) :]
            output = start_ranks(*ranks, forks=True)
            yield SimpleNamespace(stdout=output.splitlines(keepends=True), returncode=0)

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(Popen=popen, STDOUT=subprocess.STDOUT))
    for key in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(key, cpu_environment[key])
    options = ["--size", "tiny", "--steps", "20", "--seq-len", "16", "--ranks", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["demo.py", *options])
    demo.main()
    assert "held-out loss" in capsys.readouterr().out
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    fp8, bf16 = (json.loads((tmp_path / f"{name}.report.json").read_text()) for name in ("FP8", "bf16"))
    # Half, but for embedding, head and norms, which stay bf16 (a quarter of so small a model).
    assert fp8["gathered_bytes"] < 0.7 * bf16["gathered_bytes"]
    assert fp8["num_params"] == bf16["num_params"]
    assert (fp8["num_fp8_linears"], fp8["num_linears"]) == (14, 15)  # seven in each of two blocks
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="all 15 linears but the head"):
        patch.setattr(demo, "run", lambda name, *_: demo.Result([1.0], 1.0, 1.0, {**bf16, "num_fp8_linears": 13}))
        demo.main()


def test_parity_trains_pairs_of_runs_once_and_compares_them(
    root: Path, tmp_path: Path, cpu_environment: dict[str, str]
) -> None:
    out, text, written = tmp_path / "out", tmp_path / "text.md", []
    text.write_text((root / "docs/config.md").read_text())
    arguments = ["--text", text, "--steps", "8", "--out", out]
    arguments += ["--seq-len", "32", "--evaluations", "2", "--held-out-batches", "2", "--seeds"]
    for seeds in ("1", "2"):
        script = root / "examples/deepspeed/parity.py"
        run_script(script, [*arguments, seeds], cpu_environment, tmp_path / f"{seeds}.log")
        written.append((out / "bf16-s0.csv").stat().st_mtime_ns)
    names = ("bf16-s0", "ds_zero2_fp8-s0", "bf16-s1")
    bf16, fp8, second = (read_curve(out / f"{name}.csv", "held_out_loss").losses for name in names)
    assert list(bf16) == list(fp8) == [0, 4, 8] and bf16 != fp8
    assert bf16[8] < bf16[0] - 0.1 and abs(fp8[8] / bf16[8] - 1) < 0.01 < 100 * abs(second[0] / bf16[0] - 1)
    assert written[0] == written[1] and len(read_curve(out / "bf16-s0.csv").losses) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted((Path(__file__).parents[2] / "configs").glob("*.json"))])
def test_every_config_trains(root: Path, start_ranks: Launch, tmp_path: Path, name: str) -> None:
    config, log = root / f"configs/{name}.json", tmp_path / "log.jsonl"
    options = (*TINY, "--size", "small") if "precise" in name else TINY  # "tiny" has too few layers for ends
    script = root / "examples/deepspeed/train.py"
    start_ranks(script, "--deepspeed_config", config, *options, "--steps", 30, "--log", log)
    *steps, last = read_log(log)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert last["held_out_loss"] < steps[0]["loss"] - 0.5


@pytest.mark.slow
def test_the_example_of_trainer_trains_and_saves(root: Path, start_ranks: Launch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = root / "examples/huggingface"
    config = folder / "ds_zero3_fp8.json"
    options = ("--output_dir", tmp_path / "trainer", "--bf16", "true", "--max_steps", 10, "--report_to", "none")
    options += ("--use_cpu", "true", "--per_device_train_batch_size", 2, "--save_strategy", "no")
    output = start_ranks(folder / "train_trainer.py", "--deepspeed", config, *options)
    assert "held-out loss" in output and "28 of 29 linears" in output
    assert (tmp_path / "trainer/model.safetensors").exists()


@pytest.mark.slow
def test_the_example_of_grpo_learns_from_completions_of_the_exported_weights(
    root: Path, start_ranks: Launch, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    folder = root / "examples/huggingface"
    output = start_ranks(folder / "train_grpo.py", folder / "ds_zero3_fp8.json", 20)
    rewards = [float(value) for value in re.search(r"'rewards': \[(.*)\]", output)[1].split(",")]  # type: ignore[index]
    sizes = [float(value) for value in re.search(r"'MB a sync': ([\d.]+), 'in bf16': ([\d.]+)", output).groups()]  # type: ignore[union-attr]
    assert rewards[-1] > 1.3 * rewards[0] and sizes[0] < 0.6 * sizes[1]


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
    assert done.stdout.count("\nfp8: 28 of 29 linears") == 1  # one rank prints, and saves
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) >= 2 and losses[-1] < losses[0] - 0.3
    assert (tmp_path / "out/model/model.safetensors").exists()
