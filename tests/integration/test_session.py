"""benchmarks/session.py: steps run in order, within their limits, and leave their results whatever happens."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.testing import HANG


def steps(bench: Any, *commands: str, seconds: float = 20.0) -> list[Any]:
    session = bench("session")
    return [session.Step(f"step{i}", command, seconds, "a test") for i, command in enumerate(commands)]


def test_a_failure_does_not_stop_the_others_and_is_in_the_status(bench: Any, tmp_path: Path) -> None:
    done = bench("session").run_session(
        steps(bench, "echo {seconds} > {out}/a", "echo why; exit 3", "{python} -c 'print(1)'"), tmp_path, 100.0
    )
    assert [one.status for one in done] == [0, 3, 0]
    assert int((tmp_path / "a").read_text()) == 26
    assert (tmp_path / "logs" / "step1.txt").read_text() == "why\n"
    written = json.loads((tmp_path / "session.json").read_text())
    assert [one["status"] for one in written] == [0, 3, 0]
    assert str(tmp_path) not in json.dumps(written)


def test_a_step_may_take_longer_than_predicted_but_no_longer_than_the_call(bench: Any, tmp_path: Path) -> None:
    """On a slow host runs that were cut at the predicted time ended 100 of 6,144 steps early, with 100 s left."""
    session = bench("session")
    first, second = steps(bench, "echo {seconds} > {out}/a", "echo {seconds} > {out}/b", seconds=100.0)
    session.run_session([first], tmp_path, 1000.0)
    session.run_session([second], tmp_path, 120.0)
    assert int((tmp_path / "a").read_text()) == 130
    assert 100 <= int((tmp_path / "b").read_text()) <= 110


def test_steps_are_told_where_torchs_own_cudnn_is(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to take the machine's, whatever its environment says."""
    folder = tmp_path / "site" / "nvidia" / "cudnn"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setenv("CUDNN_HOME", "the machine's")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    bench("session").run_session(steps(bench, "echo $CUDNN_HOME > {out}/home"), tmp_path, 100.0)
    assert (tmp_path / "home").read_text().strip() == str(folder)


def test_what_hangs_is_killed_with_its_children_and_what_does_not_fit_is_left_out(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = bench("session")
    monkeypatch.setattr(session, "MIN_SECONDS", 0.1)
    hangs, fits_not = steps(bench, "sleep 600 & echo $! > {out}/pid; wait", "touch {out}/never", seconds=2.0)
    start = time.monotonic()
    done = session.run_session([hangs, fits_not], tmp_path, 2.0)
    assert time.monotonic() - start < HANG / 2  # it sleeps 600 s
    ended = {one.name: (one.status, one.note.split()[0]) for one in done}
    assert ended == {"step0": (-signal.SIGKILL, "killed"), "step1": (None, "left")}
    assert not (tmp_path / "never").exists()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + HANG
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "a child of a killed step runs on"
        time.sleep(0.05)


def test_steps_run_side_by_side_each_on_gpus_of_its_own(bench: Any, tmp_path: Path) -> None:
    session = bench("session")
    meet = "echo $CUDA_VISIBLE_DEVICES > {out}/%s; until [ -e {out}/%s ]; do sleep 0.05; done"
    two = session.Step("two", meet % ("a", "b"), 20.0, "a test", gpus=2)
    one = session.Step("one", meet % ("b", "a"), 20.0, "a test")
    later = session.Step("later", "test -e {out}/a && echo $CUDA_VISIBLE_DEVICES > {out}/c", 20.0, "a test", gpus=3)
    more = session.Step("more", "true", 20.0, "a test", gpus=4)
    done = {ran.name: ran for ran in session.run_session([two, one, later, more], tmp_path, 100.0, ("4", "5", "6"))}
    assert [done[name].status for name in ("two", "one", "later", "more")] == [0, 0, 0, None]
    assert (tmp_path / "a").read_text() == "4,5\n" and (tmp_path / "b").read_text() == "6\n"
    assert sorted((tmp_path / "c").read_text().strip().split(",")) == ["4", "5", "6"]
    assert done["more"].note == "left out: 3 GPUs"


def test_a_step_waits_for_another_and_for_its_gpus_and_is_not_overtaken(bench: Any, tmp_path: Path) -> None:
    session = bench("session")
    note = "echo %s >> {out}/order; sleep 0.5"
    first = session.Step("first", note % "first", 20.0, "a test")
    beside = session.Step("beside", note % "beside" + "; sleep 1.5", 20.0, "a test")
    then = session.Step("then", note % "then", 20.0, "a test", gpus=2, after="first")
    late = session.Step("late", note % "late", 20.0, "a test")
    session.run_session([first, then, beside, late], tmp_path, 100.0, ("0", "1"))
    order = (tmp_path / "order").read_text().split()
    assert set(order[:2]) == {"first", "beside"} and order[2:] == ["then", "late"]
    (tmp_path / "order").unlink()
    session.run_session([then], tmp_path, 100.0, ("0", "1"))
    assert (tmp_path / "order").read_text() == "then\n"


def test_pieces_of_megatron_side_by_side_write_no_file_of_each_other(bench: Any) -> None:
    """Each reads the JSON and the text of its folders, and writes them again."""
    commands = [step.command for step in bench("session").STEPS if "megatron_pretrain" in step.command]
    words = [
        shlex.split(command.format(python="python", out="out", own="out/own", seconds=100)) for command in commands
    ]
    folders = [line[line.index("--out") + 1] for line in words]
    assert len(set(folders)) == len(folders) >= 7
    assert all(line[line.index("--cache") + 1] == "$(mktemp -d)" for line in words)
    assert all('"$(mktemp -d)"' in command for command in commands)


def test_every_command_is_one_that_its_script_takes(
    bench: Any, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in bench("session").STEPS:
        words = shlex.split(step.command.format(python="python", out="out", own="out/own", seconds=100))
        if words[1:3] == ["-m", "pytest"]:
            assert all((root / word).exists() for word in words if word.startswith("tests/"))
            continue
        if words[1] == "-c":  # the command of a user
            assert words[2] == "from fp8_ds.cli.app import main; main()" and words[3] == "doctor"
            continue
        script, arguments = Path(words[1]), words[2:]
        assert (root / script).exists(), step.name
        monkeypatch.setattr("sys.argv", [script.name, *arguments, "--help"])  # values are checked on the way to it
        with pytest.raises(SystemExit) as stop:
            bench(script.stem).main()
        shown = capsys.readouterr()
        assert stop.value.code == 0, (step.name, shown.err)
        options = [word for word in arguments if word.startswith("--")]
        assert all(f"{option} " in shown.out for option in options), (step.name, options)
        files = [word for word in arguments if word.startswith("benchmarks/")]
        assert all((root / name).exists() for name in files), (step.name, files)


def test_steps_are_chosen_by_name_or_by_gpus(
    run_main: Any, bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = bench("session")
    chosen: list[str] = []
    monkeypatch.setattr(
        session, "run_session", lambda steps, out, limit, gpus: chosen.extend(s.name for s in steps) or []
    )
    for arguments in (("gather", "tests"), ("--gpus", 2)):
        with pytest.raises(SystemExit) as stop:
            run_main("session", *arguments, "--out", tmp_path)
        assert stop.value.code == 0
    assert chosen == ["gather", "tests", *(step.name for step in session.STEPS if step.gpus == 2)]
    assert "parity-8gpus" in run_main("session", "--list")


def test_parity_runs_of_two_steps_share_no_files(bench: Any, tmp_path: Path) -> None:
    session = bench("session")
    show = [
        session.Step(step.name, f"echo {{own}} > {{out}}/{step.name}.txt", 20.0, "a test")
        for step in session.STEPS
        if "gpt_parity.py" in step.command
    ]
    assert all("--out {own} " in step.command for step in session.STEPS if "gpt_parity.py" in step.command)
    session.run_session(show[:2], tmp_path, 100.0)
    folders = {(tmp_path / f"{step.name}.txt").read_text().strip() for step in show[:2]}
    assert folders == {str(tmp_path / step.name) for step in show[:2]} and len(folders) == 2


def test_a_detached_session_runs_on_in_a_copy_of_the_tree(
    run_main: Any, bench: Any, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a call replaces in the tree meanwhile is nothing to it."""
    tree, out = tmp_path / "tree", tmp_path / "R"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / ".site").mkdir()
    (tree / ".site" / "carried.py").write_text("")
    (tree / "benchmarks" / "session.py").write_text(
        "import os, sys, time, carried\nfrom pathlib import Path\n"
        "out = Path(sys.argv[2])\n"
        "while not (out / 'go').exists(): time.sleep(0.05)\n"
        "import late\n"
        "(out / 'logs').mkdir(); (out / 'logs' / 'a.txt').write_text('a log')\n"
        "(out / 'traces').mkdir(); (out / 'traces' / 'large').touch(); (out / 'weights.pt').touch()\n"
        "print(carried.__file__, Path.cwd() == Path(__file__).parents[1], *sys.argv[3:])\n"
        "(out / 'session.ended').touch()\n"
    )
    (tree / "late.py").write_text("")
    detached = bench("session_detached")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tree / ".site"), str(tree), "elsewhere"]))
    detached.detach(["--out", str(out), "--limit", "100"], out, tree)
    (tree / "late.py").unlink()
    assert not detached.wait(out, 0.2)
    (out / "go").touch()
    shown = run_main("session", "--out", out, "--wait", HANG, "--archive", tmp_path / "R.tgz")
    assert "ended" in shown and "a log" in shown, shown
    where, in_copy, *arguments = (out / "session.log").read_text().split()
    assert not Path(where).is_relative_to(tree) and in_copy == "True" and arguments == ["--limit", "100"]
    with tarfile.open(tmp_path / "R.tgz") as tar:
        assert sorted(tar.getnames()) == ["R/go", "R/logs/a.txt", "R/session.ended", "R/session.log"]


def test_traces_of_the_device_alone_leave_the_machine_unless_they_are_large(bench: Any, tmp_path: Path) -> None:
    """On 2026-11-28 a machine was lost with traces that no archive had."""
    traces = tmp_path / "R" / "traces"
    sizes = {
        "ours/device.json.gz": 2**23 - 1,
        "stock/device.json.gz": 2**23,
        "ours/both.json.gz": 1,
        "ours/device.pt": 1,
    }
    for name, size in sizes.items():
        (traces / name).parent.mkdir(parents=True, exist_ok=True)
        (traces / name).touch()
        os.truncate(traces / name, size)
    bench("session_detached").archive(tmp_path / "R", tmp_path / "R.tgz")
    with tarfile.open(tmp_path / "R.tgz") as tar:
        assert tar.getnames() == ["R/traces/ours/device.json.gz"]


def test_a_session_that_is_detached_has_its_arguments_and_says_when_it_has_ended(
    run_main: Any, bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = bench("session")
    started: list[list[str]] = []
    monkeypatch.setattr(session, "detach", lambda arguments, out: started.append(list(arguments)) or 1)
    run_main("session", "--out", tmp_path, "--limit", 900, "--detach", "tests", "gather")
    assert started == [["--out", str(tmp_path), "--limit", "900.0", "--gpus", "1", "tests", "gather"]]
    monkeypatch.setattr(session, "run_session", lambda *_: [])
    with pytest.raises(SystemExit):
        run_main("session", *started[0])
    with pytest.raises(SystemExit) as wrong:
        run_main("session", "--out", tmp_path, "--archive", tmp_path / "R.tgz")
    assert wrong.value.code == 2
    assert bench("session_detached").wait(tmp_path, 0.0)


def test_nobody_waits_for_a_session_that_was_never_started_here(run_main: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got none: is this another machine\?"):
        run_main("session", "--out", tmp_path, "--wait", HANG)
