"""Runs DeepSpeed's own tests once with the stock engine and once with FP8 forced on, and writes docs/conformance.md.

    python tests/conformance/run_upstream.py --tests DIR [--list first|second] [--only FILE] [--differing]

DIR is the `tests` folder of a DeepSpeed checkout at the installed version, away from the rest of the checkout.
In our arm comparisons forgive FP8's rounding (rounding.py).
The exit status is 1 if no engine was FP8, or if a test that stock passes fails in our arm, or passes at that rounding,
and reasons.toml does not name it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from outcomes import Outcome, OutcomeStore, installed_versions, parse_events, select  # noqa: E402
from report import FIRST, Arms, differing, render, unexplained  # noqa: E402


@dataclass(frozen=True)
class Runner:
    """Starts pytest on upstream's tests.

    Args:
        tests: upstream's `tests` folder.
        timeout: seconds after which a test without news counts as hanging.
        logs: folder that keeps pytest's output.
    """

    tests: Path
    timeout: int
    logs: Path

    def collect(self, files: list[str]) -> list[str]:
        """All node ids of `files`, in pytest's order."""
        with tempfile.TemporaryDirectory(prefix="conformance_") as scratch:
            events, _ = self._pytest(Path(scratch), ["--collect-only", *files], {}, "collect")
        tests = [event["test"] for event in map(json.loads, events) if event["event"] == "collected"]
        missing = [file for file in files if not any(test.startswith(file + "::") for test in tests)]
        if missing:
            raise SystemExit(
                f"--tests must hold the files that selection.toml names, but none of {missing} was collected."
            )
        return tests

    def run(self, file: str, tests: list[str], force: bool, persistence: str) -> dict[str, Outcome]:
        """The outcome of each of `tests`, all of one file; a hang or crash costs that test and the rest goes on."""
        outcomes: dict[str, Outcome] = {}
        name = f"{file}.{'fp8' if force else 'stock'}"
        while remaining := [test for test in tests if test not in outcomes]:
            with tempfile.TemporaryDirectory(prefix="conformance_") as scratch:
                selected = Path(scratch) / "select.json"
                selected.write_text(json.dumps(remaining))
                environment = {
                    "FP8_DS_CONFORMANCE_SELECT": str(selected),
                    "FP8_DS_CONFORMANCE_PERSISTENCE": persistence,
                    "FP8_DS_FORCE": "1" if force else "0",
                }
                events, hang = self._pytest(Path(scratch), [file], environment, name)
            found = parse_events(events, persistence, "hang" if hang else "crash")
            if not found:
                found = {test: Outcome("error", message="pytest ended before the test") for test in remaining}
            outcomes.update(found)
        return outcomes

    def _pytest(self, scratch: Path, args: list[str], extra: dict[str, str], name: str) -> tuple[list[str], bool]:
        """The recorder's lines, and whether pytest had to be ended because nothing happened any more."""
        shutil.copy(HERE / "shim.py", scratch / "sitecustomize.py")
        for plugin in ("recorder", "rounding"):
            shutil.copy(HERE / f"{plugin}.py", scratch / f"fp8_ds_conformance_{plugin}.py")
        results = scratch / "results.jsonl"
        results.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(scratch), str(HERE.parent.parent)]),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "4",
            "OMP_NUM_THREADS": "1",
            "DS_UNITTEST_TIMEOUT": str(self.timeout),
            "FP8_DS_CONFORMANCE_RESULTS": str(results),
            "FP8_DS_CONFORMANCE_ENGINES": str(scratch / "engines.jsonl"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "fp8_ds_conformance_recorder"]
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / (name.replace("/", "_") + ".log")).open("w") as log:
            process = subprocess.Popen(
                [*command, f"--basetemp={scratch / 'tmp'}", *args],
                cwd=self.tests,
                env=environment | extra,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                hang = self._wait(process, results)
            finally:
                _end_group(process)
        return results.read_text().splitlines(), hang

    def _wait(self, process: subprocess.Popen[bytes], results: Path) -> bool:
        # Upstream's own timeout leaves through a pool that may be stuck itself: a minute more, then the group is ended.
        while process.poll() is None:
            if time.time() - results.stat().st_mtime > self.timeout + 60:
                return True
            time.sleep(0.2)
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest's process group: the fork server and its workers are in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_stock(runner: Runner, file: str, tests: list[str], arms: Arms) -> None:
    """`arms.stock` knows every one of `tests`; what fails without persistent parameters gets its own threshold back."""
    missing = [test for test in tests if test not in arms.stock.tests]
    if not missing:
        return
    outcomes = runner.run(file, missing, force=False, persistence="none")
    failed = [test for test, outcome in outcomes.items() if not outcome.is_good and outcome.outcome != "skipped"]
    if failed:
        again = runner.run(file, failed, force=False, persistence="default")
        outcomes.update({test: outcome for test, outcome in again.items() if outcome.is_good})
    arms.stock.add(outcomes)


def run_ours(runner: Runner, file: str, tests: list[str], arms: Arms) -> None:
    """Runs every one of `tests` with FP8 forced on, each with the persistence threshold that its stock run had."""
    for persistence in ("none", "default"):
        chosen = [test for test in tests if arms.stock.tests[test].persistence == persistence]
        if chosen:
            arms.ours.add(runner.run(file, chosen, force=True, persistence=persistence))


def run_all(runner: Runner, arms: Arms, chosen: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    """`arms` hold the outcomes of `chosen` (file -> node ids), each arm's as far as `arguments` ask for it."""
    if arguments.differing:
        wanted = set(differing(arms.stock, arms.ours))
        chosen = {file: kept for file, tests in chosen.items() if (kept := [test for test in tests if test in wanted])}

    def run_file(item: tuple[str, list[str]]) -> None:
        file, tests = item
        start = time.time()
        run_stock(runner, file, tests, arms)
        if not arguments.stock_only:
            run_ours(runner, file, tests, arms)
        print(f"{file}: {len(tests)} tests, {time.time() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run_file, chosen.items()))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a DeepSpeed checkout")
    parser.add_argument("--list", choices=("first", "second"), help="one list of selection.toml; default: both")
    parser.add_argument("--only", help="run only files whose path contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="files run at the same time")
    parser.add_argument(
        "--differing", action="store_true", help="run only tests whose stored outcomes differ between the arms"
    )
    parser.add_argument(
        "--stock-only", action="store_true", help="compute the missing part of the stock baseline, no more"
    )
    parser.add_argument("--no-run", action="store_true", help="write the page from what is stored, run nothing")
    parser.add_argument("--test-timeout", type=int, default=240, help="seconds before a test counts as hanging")
    parser.add_argument(
        "--baseline-cache",
        type=Path,
        default=HERE / "baseline.json",
        help="delete it for other tests",
    )
    parser.add_argument("--ours", type=Path, default=HERE / "ours.json", help="where our arm's outcomes are kept")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "fp8_ds_conformance_logs")
    parser.add_argument("--upstream", help="what DIR is (version, commit), for the page; kept with the baseline")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "conformance.md")
    return parser.parse_args(argv)


def plan(selection: dict[str, Any], arguments: argparse.Namespace, runner: Runner) -> dict[str, list[str]]:
    """File -> the node ids to run."""
    entries = [entry for name in ("first", "second") if arguments.list in (None, name) for entry in selection[name]]
    entries = [entry for entry in entries if not arguments.only or arguments.only in entry["file"]]
    if not entries:
        raise SystemExit(f"--only must be part of a file in selection.toml, got {arguments.only!r}.")
    tests = runner.collect([entry["file"] for entry in entries])
    return {entry["file"]: select(entry, tests) for entry in entries}


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    selection = tomllib.loads((HERE / "selection.toml").read_text())
    known = tomllib.loads((HERE / "reasons.toml").read_text())
    reasons = known["reason"]
    runner = Runner(arguments.tests.resolve(), arguments.test_timeout, arguments.logs)
    arms = Arms(
        stock=OutcomeStore(arguments.baseline_cache, installed_versions()),
        ours=OutcomeStore(arguments.ours, installed_versions()),
    )
    arms.stock.upstream = arguments.upstream or arms.stock.upstream
    if not arguments.no_run:
        run_all(runner, arms, plan(selection, arguments, runner), arguments)
    prose, _, _ = arguments.out.read_text().partition(FIRST)
    arguments.out.write_text(prose + render(selection, arms, reasons))
    if arguments.stock_only:
        return 0
    differences = unexplained(arms, reasons, known["forgiven"])
    for test in differences:
        outcome = arms.ours.tests[test]
        error = f"relative error {outcome.max_relative_error}"
        print(f"unexplained: {test}: {outcome.outcome}: {outcome.message or error}")
    num_engines = sum(outcome.num_fp8_engines for outcome in arms.ours.tests.values())
    print(f"{num_engines} engines were FP8; {len(differences)} differences without a reason")
    return 1 if differences or not num_engines else 0


if __name__ == "__main__":
    sys.exit(main())
