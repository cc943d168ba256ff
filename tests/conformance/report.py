"""The tables of docs/conformance.md, from the outcomes of all arms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outcomes import Outcome, OutcomeStore

COLUMNS = "pass / fail / skip / xfail"
FIRST = "## First list"
"""The page is written from this line on."""
ROUNDED = "of these passed at FP8's rounding"


@dataclass(frozen=True)
class Arms:
    """The outcomes of the stock engine, and of FP8 forced on, with comparisons that forgive FP8's rounding."""

    stock: OutcomeStore
    ours: OutcomeStore


def count(outcomes: Iterable[Outcome]) -> str:
    """Returns "12 / 0 / 3 / 1": passed, failed (hangs, crashes and errors too), skipped, failed as expected."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    num_passed = counts["passed"] + counts["xpassed"]
    num_failed = sum(counts[name] for name in ("failed", "error", "hang", "crash"))
    return f"{num_passed} / {num_failed} / {counts['skipped']} / {counts['xfailed']}"


def differing(stock: OutcomeStore, ours: OutcomeStore) -> list[str]:
    """The tests that ran in both arms with another outcome, in node id order."""
    return [t for t in sorted(stock.tests) if t in ours.tests and stock.tests[t].outcome != ours.tests[t].outcome]


def find_reason(test: str, outcome: Outcome, reasons: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row of reasons.toml whose `tests` matches the node id and whose `message` matches our failure."""
    for reason in reasons:
        if re.search(reason["tests"], test) and re.search(reason.get("message", ""), outcome.message):
            return reason
    return None


def only_ours_fails(arms: Arms) -> list[str]:
    tests = differing(arms.stock, arms.ours)
    return [test for test in tests if arms.stock.tests[test].is_good and not arms.ours.tests[test].is_good]


def unexplained(arms: Arms, reasons: list[dict[str, Any]], forgiven: list[str]) -> list[str]:
    """Tests that stock passes and ours does not, or at FP8's rounding, and that no row of reasons.toml explains."""
    failing = [test for test in only_ours_fails(arms) if find_reason(test, arms.ours.tests[test], reasons) is None]
    rounded = [test for test, outcome in arms.ours.tests.items() if outcome.is_good and outcome.num_forgiven]
    return failing + [test for test in rounded if not any(re.search(pattern, test) for pattern in forgiven)]


def _table(header: list[str], rows: Iterable[list[Any]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells), ""]


def _short(test: str) -> str:
    return "`" + test.removeprefix("unit/") + "`"


def _files_table(entries: list[dict[str, Any]], arms: Arms) -> list[str]:
    files = [entry["file"] for entry in entries]
    rows = [[_short(file), *_cells([file], arms)] for file in files] + [["**all**", *_cells(files, arms)]]
    header = ["file (tests/unit/)", f"stock {COLUMNS}", f"ours {COLUMNS}", ROUNDED]
    return _table([*header, "FP8 engines", "forced, no FP8 engine", "stock s", "ours s"], rows)


def _cells(files: list[str], arms: Arms) -> list[Any]:
    stock = {test: outcome for test, outcome in arms.stock.tests.items() if test.partition("::")[0] in files}
    ours = {test: arms.ours.tests[test] for test in stock if test in arms.ours.tests}
    forgiven = sum(outcome.is_good and outcome.num_forgiven > 0 for outcome in ours.values())
    engines = sum(outcome.num_fp8_engines for outcome in ours.values())
    not_fp8 = sum(outcome.num_forced_not_fp8 for outcome in ours.values())
    seconds = [round(sum(outcome.seconds for outcome in arm.values())) for arm in (stock, ours)]
    return [count(stock.values()), count(ours.values()), forgiven, engines, not_fp8, *seconds]


def _differences(arms: Arms, reasons: list[dict[str, Any]]) -> list[str]:
    rows = []
    for test in only_ours_fails(arms):
        ours = arms.ours.tests[test]
        reason = find_reason(test, ours, reasons) or {"reason": f"**no reason given**: {ours.message}"}
        rows.append([_short(test), ours.outcome, reason["reason"], reason.get("refusal", "")])
    return _table(["test", "ours", "reason", "refusal (row in docs/refusals.md)"], rows)


def _forgiven(arms: Arms) -> list[str]:
    errors: dict[str, list[float]] = {}
    for test, outcome in arms.ours.tests.items():
        if outcome.is_good and outcome.num_forgiven:
            errors.setdefault(test.partition("[")[0], []).append(outcome.max_relative_error)
    rows = ([_short(test), len(found), f"{max(found):.3f}"] for test, found in sorted(errors.items()))
    return _table(["test", "cases", "largest error"], rows)


def render(selection: dict[str, Any], arms: Arms, reasons: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    stock = arms.stock
    not_forced: Counter[str] = Counter()
    for outcome in arms.ours.tests.values():
        not_forced.update(outcome.not_forced)
    failed = [t for t, o in sorted(stock.tests.items()) if not o.is_good and o.outcome != "skipped"]
    skips = Counter(outcome.message for outcome in stock.tests.values() if outcome.outcome == "skipped")
    lines = [
        *[FIRST, "", f"Installed: {stock.key}. Tests: {stock.upstream or 'not stated'}.", ""],
        *_files_table(selection["first"], arms),
        *["## Second list", "", *_files_table(selection["second"], arms)],
        *["## Tests that stock passes and ours fails", "", *_differences(arms, reasons)],
        *["## Tests that pass at FP8's rounding, and not at upstream's tolerance", "", *_forgiven(arms)],
        *["## Calls of `initialize` that were left alone in our arm", ""],
        *_table(["why", "calls"], ([why, number] for why, number in not_forced.most_common())),
        *["## Tests that stock fails here", ""],
        *_table(
            ["test", "outcome", "message"],
            ([_short(t), o.outcome, o.message] for t in failed for o in [stock.tests[t]]),
        ),
        *[
            "## Why stock skips",
            "",
            *_table(["message", "tests"], ([text, number] for text, number in skips.most_common())),
        ],
    ]
    return "\n".join(lines).rstrip() + "\n"
