"""What a test did: read from the recorder's lines, kept as JSON between runs, keyed by the installed versions."""

from __future__ import annotations

import importlib.metadata
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSING = ("passed", "xfailed", "xpassed")


@dataclass
class Outcome:
    """One test in one arm.

    Args:
        outcome: passed, failed, error, skipped, xfailed, xpassed, hang or crash.
        seconds: wall time of all phases.
        message: the failure's or the skip's text, shortened.
        persistence: "none" if ZeRO-3's persistence threshold was forced to 0, "default" if the test's own was left.
        num_fp8_engines: engines that hold at least one FP8 weight.
        num_forced_not_fp8: `initialize` calls that got the "fp8" block and gave no such engine (refusals too).
        not_forced: why the other calls did not get the block, with counts.
        num_forgiven: comparisons, of all ranks, that failed as upstream wrote them and were tried at FP8's rounding.
        max_relative_error: the largest relative L2 error of those comparisons, passed or not.
    """

    outcome: str
    seconds: float = 0.0
    message: str = ""
    persistence: str = "none"
    num_fp8_engines: int = 0
    num_forced_not_fp8: int = 0
    not_forced: dict[str, int] = field(default_factory=dict)
    num_forgiven: int = 0
    max_relative_error: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.outcome in PASSING


def _one_outcome(phases: list[dict[str, Any]]) -> tuple[str, str]:
    for phase in phases:
        if phase["outcome"] == "failed":
            return ("failed" if phase["when"] == "call" else "error"), phase["message"]
    for phase in phases:
        if phase["outcome"] in ("skipped", "xfailed", "xpassed"):
            return phase["outcome"], phase["message"]
    return "passed", ""


def parse_events(lines: Iterable[str], persistence: str, unfinished: str) -> dict[str, Outcome]:
    """Node id -> Outcome of every test that was started; `unfinished` (hang or crash) for one that never finished."""
    phases: dict[str, list[dict[str, Any]]] = {}
    finished: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        event = json.loads(line)
        if event["event"] == "start":
            phases[event["test"]] = []
        elif event["event"] == "phase":
            phases[event["test"]].append(event)
        elif event["event"] == "finish":
            finished[event["test"]] = event["engines"]
    outcomes = {}
    for test, parts in phases.items():
        name, message = _one_outcome(parts) if test in finished else (unfinished, "the test did not come to an end")
        seconds = round(sum(part["seconds"] for part in parts), 1)
        outcome = Outcome(name, seconds, " ".join(message.split())[:300], persistence)
        for engine in finished.get(test, []):
            if "relative_error" in engine:
                outcome.num_forgiven += 1
                outcome.max_relative_error = round(max(outcome.max_relative_error, engine["relative_error"]), 4)
            elif not engine["forced"]:
                outcome.not_forced[engine["why"]] = outcome.not_forced.get(engine["why"], 0) + 1
            elif engine["num_fp8"]:
                outcome.num_fp8_engines += 1
            else:
                outcome.num_forced_not_fp8 += 1
        outcomes[test] = outcome
    return outcomes


def select(entry: dict[str, Any], tests: Iterable[str]) -> list[str]:
    """The node ids of `tests` that an entry of selection.toml keeps, in their order."""
    kept = []
    for test in tests:
        file, _, name = test.partition("::")
        if file != entry["file"] or any(re.search(pattern, name) for pattern in entry.get("drop", [])):
            continue
        if not entry.get("keep") or any(re.search(pattern, name) for pattern in entry["keep"]):
            kept.append(test)
    return kept


def installed_versions() -> str:
    return " ".join(f"{name}-{importlib.metadata.version(name)}" for name in ("deepspeed", "torch"))


class OutcomeStore:
    """Outcomes of one arm in a JSON file that may hold several version keys; saving keeps the other keys."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self._lock = threading.Lock()
        everything = json.loads(path.read_text()) if path.exists() else {}
        mine = everything.get(key, {})
        self.upstream: str = mine.get("upstream", "")
        self.tests = {test: Outcome(**values) for test, values in mine.get("tests", {}).items()}

    def add(self, outcomes: dict[str, Outcome]) -> None:
        with self._lock:
            self.tests.update(outcomes)
            self.save()

    def save(self) -> None:
        everything = json.loads(self.path.read_text()) if self.path.exists() else {}
        tests = {test: _without_defaults(outcome) for test, outcome in sorted(self.tests.items())}
        everything[self.key] = {
            "upstream": self.upstream,
            "tests": tests,
        }
        self.path.write_text(json.dumps(everything, indent=0, sort_keys=False) + "\n")


def _without_defaults(outcome: Outcome) -> dict[str, Any]:
    defaults = asdict(Outcome(""))
    return {name: value for name, value in asdict(outcome).items() if value != defaults[name]}
