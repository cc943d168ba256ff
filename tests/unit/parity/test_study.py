"""The folder of a study, its runs by a worker that only writes a log, and what is said about them."""

from __future__ import annotations

import errno
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.errors import ConfigError
from fp8_ds.parity import study as module
from fp8_ds.parity.archive import pack, unpack
from fp8_ds.parity.folder import held
from fp8_ds.parity.study import Settings, Study

ARMS: dict[str, Any] = {"bf16": None, "default": {"enabled": True}}


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"model": "m", "settings": (), "pretrained": False, "config": {"a": 1}, "steps": 20}
    values |= {"seq": 8, "gpus": 1, "compile": False, "digest": "d"}
    return Settings(**{**values, **changes})


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the next runs do: "losses" by arm, "fails" and "pauses": names; "specs": what they were given."""
    plan: dict[str, Any] = {
        "losses": {"bf16": 2.0, "default": 2.0004},
        "fails": (),
        "pauses": (),
        "specs": [],
        "in_bf16": {},
    }

    def launch(study: Study, run: Any, seconds: float | None) -> tuple[int, str]:
        plan["specs"].append((run.name, seconds))
        if run.name in plan["fails"]:
            return 1, "ValueError: the reason"
        if run.name in plan["pauses"]:
            return 0, "paused"
        loss = plan["losses"][run.arm] + run.seed / 10
        lines = ["step,tokens,seconds,train_loss,held_out_loss", f"0,0,0,,{loss + 1}", f"20,160,1.0,{loss},{loss:.6f}"]
        study.log(run).write_text("\n".join(lines) + "\n")
        about = {"tokens_per_second": 160, "plan": None if run.arm == "bf16" else "all"}
        if run.arm in plan["in_bf16"]:
            about["held_out_loss_bf16"] = plan["in_bf16"][run.arm] + run.seed / 10
        study.log(run).with_suffix(".json").write_text(json.dumps(about))
        return 0, "finished"

    monkeypatch.setattr(Study, "_launch", launch)
    return plan


def test_runs_go_by_seed_and_finished_ones_do_not_run_again(tmp_path: Path, worker: dict[str, Any]) -> None:
    said: list[str] = []
    first = Study(tmp_path, settings(), ARMS, range(2))
    first.go_on(None, said.append)
    names = [name for name, _ in worker["specs"]]
    assert names == ["bf16-s0", "default-s0", "bf16-s1", "default-s1"]
    assert "default-s1: held-out loss 2.1004" in said
    again = Study(tmp_path, settings(), {**ARMS, "e4m11": {"enabled": True, "optimizer": {"states": "fp8"}}}, range(1))
    worker["losses"]["e4m11"] = 2.5
    again.go_on(None, said.append)
    assert [name for name, _ in worker["specs"][4:]] == ["e4m11-s0"]


def test_results_are_paired_and_have_the_verdicts_of_compare(tmp_path: Path, worker: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    study = Study(tmp_path, settings(), ARMS, range(3))
    study.go_on(None, lambda text: None)
    (result,) = study.results()
    assert result.paired.by_pair == pytest.approx([100 * 0.0004 / (2 + seed / 10) for seed in range(3)])
    assert result.verdict == "parity"
    study.write()
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in (tmp_path / "parity.html").read_text()
    lines = (tmp_path / "parity.csv").read_text().splitlines()
    assert lines[0] == "arm,seed,step,tokens,seconds,train_loss,held_out_loss" and len(lines) == 1 + 6 * 2
    page = (tmp_path / "parity.md").read_text()
    assert "| default | 1 | 2.1004 |  | 160 |  | all |" in page and ": parity (mean at most 0.1 %" in page
    assert "- bf16 went from 3.1000 to 2.1000: where little is learned" in page
    assert "computed in bf16" not in page  # no run has been evaluated so


def test_fp8_models_are_compared_as_they_compute_in_bf16_too(tmp_path: Path, worker: dict[str, Any]) -> None:
    worker["in_bf16"] = {"default": 2.0002}
    study = Study(tmp_path, settings(), ARMS, range(2))
    study.go_on(None, lambda text: None)
    (found,) = study.differences_in_bf16().values()
    assert found.by_pair == pytest.approx([0.01, 100 * 0.0002 / 2.1])
    page = study.report()
    assert "| default | 1 | 2.1004 | 2.1002 | 160 |" in page and "| bf16 | 1 | 2.1000 | 2.1000 | 160 |" in page
    assert "- default: +0.010 %, 95 % interval" in page.split("computed in bf16")[1]
    about = study.folder / "runs/default-s1.json"
    about.write_text(json.dumps({"plan": "all", "not_evaluated_in_bf16": "frozen"}))
    assert "- NOT EVALUATED in bf16: default-s1: frozen" in study.report()
    assert "- default: +0.010 %, one pair" in study.report()
    about.unlink()  # of a run that was cut after its last step: what its log ends with is no loss in bf16
    page = study.report()
    assert "- NOT EVALUATED in bf16: default-s1: the run was cut after its last step" in page
    assert "- default: +0.010 %, one pair" in page and "| default | 1 | 2.1004 |  |" in page


def test_training_losses_of_a_pair_are_compared_step_by_step(tmp_path: Path, worker: dict[str, Any]) -> None:
    study = Study(tmp_path, settings(), ARMS, range(2))
    study.go_on(None, lambda text: None)
    assert "Training loss" not in study.report()  # one logged step is no difference
    for arm, factor in (("bf16", 1.0), ("default", 1.002)):
        lines = ["step,tokens,seconds,train_loss,held_out_loss", "0,0,0,,3.0"]
        lines += [f"{step},8,1.0,{(2 + step % 3) * (factor if step > 18 else 5.0)}," for step in range(1, 21)]
        (study.folder / f"runs/{arm}-s1.csv").write_text("\n".join(lines) + "2.0\n")
    page = study.report().split("Training loss over the last tenth")[1]
    assert "- default: +0.200 ± 0.000 % (seed 1)\n" in page


def test_a_failure_does_not_stop_the_others_and_a_pause_does(tmp_path: Path, worker: dict[str, Any]) -> None:
    worker |= {"fails": ("default-s0",), "pauses": ("bf16-s1",)}
    study = Study(tmp_path, settings(), ARMS, range(2))
    study.go_on(1000.0, lambda text: None)
    assert [name for name, _ in worker["specs"]] == ["bf16-s0", "default-s0", "bf16-s1"]
    assert all(0 < seconds < 1000 for _, seconds in worker["specs"])
    assert [run.name for run in study.pending()] == ["bf16-s1", "default-s1"]
    assert study.results() == [] and "FAILED default-s0" in study.report()
    assert "NOT FINISHED: bf16-s1" in study.report()
    worker |= {"fails": (), "pauses": ()}
    again = Study(tmp_path, settings(), ARMS, range(2))  # a failure is tried again by the next call
    again.go_on(None, lambda text: None)
    assert again.pending() == []


def test_with_little_time_left_no_further_run_starts(
    tmp_path: Path, worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Study(tmp_path, settings(), ARMS, range(2)).go_on(module._SHORTEST_PIECE - 1, lambda text: None)
    assert [name for name, _ in worker["specs"]] == ["bf16-s0"]


def test_a_folder_of_another_study_is_refused(tmp_path: Path, worker: dict[str, Any]) -> None:
    Study(tmp_path, settings(), ARMS, range(1))
    with pytest.raises(ConfigError, match=r"--out: .* got one with another digest, steps"):
        Study(tmp_path, settings(steps=30, digest="e"), ARMS, range(1))
    with pytest.raises(ConfigError, match="another arm default"):
        Study(tmp_path, settings(), {**ARMS, "default": {"enabled": True, "monitor": {"every": 5}}}, range(1))
    with pytest.raises(ConfigError, match="--arms: expected a base and another, got bf16"):
        Study(tmp_path / "new", settings(), {"bf16": None}, range(1))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_study_travels_as_a_file(tmp_path: Path, worker: dict[str, Any]) -> None:
    study = Study(tmp_path / "a", settings(), ARMS, range(1))
    study.go_on(None, lambda text: None)
    (tmp_path / "a/state/default-s1/step5").mkdir(parents=True)
    (tmp_path / "a/state/default-s1/step5/weights").write_bytes(b"\x00\x01")
    assert pack(tmp_path / "a", tmp_path / "a.tar") == (tmp_path / "a.tar").stat().st_size
    unpack(tmp_path / "a.tar", tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") and len(contents(tmp_path / "a")) > 5
    assert Study(tmp_path / "b", settings(), ARMS, range(1)).pending() == []
    (tmp_path / "bad.tar").write_text("no tar")
    with pytest.raises(ConfigError, match="--archive: expected a file of an earlier call"):
        unpack(tmp_path / "bad.tar", tmp_path / "c")
    with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
        tar.add(tmp_path / "bad.tar", arcname="../outside")
    with pytest.raises(ConfigError, match="outside in it is no file of a study"):
        unpack(tmp_path / "hostile.tar", tmp_path / "c")
    assert not (tmp_path / "outside").exists()
    pack(tmp_path / "a", tmp_path / "small.tar", keep=lambda path: path.parts[0] != "state")
    unpack(tmp_path / "small.tar", tmp_path / "d")
    assert contents(tmp_path / "d").keys() == {path for path in contents(tmp_path / "a") if path.parts[0] != "state"}


def test_several_ranks_start_under_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    command, env = module.launcher(4, "spec.json")
    assert command[1:5] == ["-m", "deepspeed.launcher.runner", "--num_gpus", "4"]
    assert command[-3:] == ["--module", "fp8_ds.parity.worker", "spec.json"] and "RANK" not in env
    command, env = module.launcher(1, "spec.json")
    assert command[1:] == ["-m", "fp8_ds.parity.worker", "spec.json"]
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "1")


def test_a_run_that_outlives_its_call_still_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[subprocess.Popen[bytes]] = []

    def run(command: list[str], pass_fds: Sequence[int], **options: Any) -> None:
        runs.append(subprocess.Popen(["sleep", "60"], pass_fds=pass_fds))
        raise KeyboardInterrupt

    monkeypatch.setattr(module.subprocess, "run", run)
    with held(tmp_path) as lock, pytest.raises(KeyboardInterrupt):
        Study(tmp_path, settings(), ARMS, range(1), inherited=(lock,)).go_on(None, lambda text: None)
    with pytest.raises(ConfigError, match="--out: expected a folder that no other call works in"), held(tmp_path):
        pass
    runs[0].kill()
    runs[0].wait()
    with held(tmp_path):
        pass


def test_a_full_disk_leaves_the_study_as_it_was(
    tmp_path: Path, worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Study(tmp_path, settings(), ARMS, range(1)).go_on(None, lambda text: None)

    def write_text(path: Path, text: str) -> None:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(Path, "write_text", write_text)
        Study(tmp_path, settings(), ARMS, range(1))
    assert Study(tmp_path, settings(), ARMS, range(1)).pending() == []
