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
ROUNDED = "ours, comparisons at FP8's rounding"


@dataclass(frozen=True)
class Arms:
    """The outcomes of all runs.

    Args:
        stock: the stock engine.
        ours: FP8 forced on, upstream's tests as they are.
        rounded: FP8 forced on and comparisons that forgive FP8's rounding; only tests that `needs_rounding_run`.
    """

    stock: OutcomeStore
    ours: OutcomeStore
    rounded: OutcomeStore


def count(outcomes: Iterable[Outcome]) -> str:
    """Returns "12 / 0 / 3 / 1": passed, failed (hangs, crashes and errors too), skipped, failed as expected."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    num_passed = counts["passed"] + counts["xpassed"]
    num_failed = sum(counts[name] for name in ("failed", "error", "hang", "crash"))
    return f"{num_passed} / {num_failed} / {counts['skipped']} / {counts['xfailed']}"


def differing(stock: OutcomeStore, ours: OutcomeStore) -> list[str]:
    """The tests that ran in both arms with another outcome, in node id order."""
    return [t for t in sorted(stock.tests) if t in ours.tests and stock.tests[t].outcome != ours.tests[t].outcome]


def needs_rounding_run(test: str, arms: Arms) -> bool:
    """Whether stock passes the test and ours fails it because values differ."""
    if test not in arms.stock.tests or test not in arms.ours.tests:
        return False
    return arms.stock.tests[test].is_good and arms.ours.tests[test].is_comparison_failure


def passes_at_rounding(test: str, arms: Arms) -> bool:
    """Whether forgiving FP8's rounding made the test pass; one that passed with nothing to forgive is only unsteady."""
    outcome = arms.rounded.tests.get(test)
    return outcome is not None and outcome.is_good and outcome.num_forgiven > 0


def find_reason(test: str, outcome: Outcome, reasons: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first row of reasons.toml whose `tests` matches the node id and whose `message` matches our failure."""
    for reason in reasons:
        if re.search(reason["tests"], test) and re.search(reason.get("message", ""), outcome.message):
            return reason
    return None


def is_explained(test: str, arms: Arms, reasons: list[dict[str, Any]]) -> bool:
    """Whether a row of reasons.toml names our failure and, if the row says "rounding", forgiving rounding is enough."""
    reason = find_reason(test, arms.ours.tests[test], reasons)
    return reason is not None and (not reason.get("rounding") or passes_at_rounding(test, arms))


def only_ours_fails(arms: Arms) -> list[str]:
    return [
        test
        for test in differing(arms.stock, arms.ours)
        if arms.stock.tests[test].is_good and not arms.ours.tests[test].is_good
    ]


def unexplained(arms: Arms, reasons: list[dict[str, Any]]) -> list[str]:
    """Tests that stock passes and ours does not, and that no row of reasons.toml explains."""
    return [test for test in only_ours_fails(arms) if not is_explained(test, arms, reasons)]


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
    rounded = [arms.rounded.tests[test] if passes_at_rounding(test, arms) else ours[test] for test in ours]
    engines = sum(outcome.num_fp8_engines for outcome in ours.values())
    not_fp8 = sum(outcome.num_forced_not_fp8 for outcome in ours.values())
    seconds = [round(sum(outcome.seconds for outcome in arm.values())) for arm in (stock, ours)]
    return [count(stock.values()), count(ours.values()), count(rounded), engines, not_fp8, *seconds]


def _class_of(test: str, arms: Arms, reasons: list[dict[str, Any]]) -> str:
    reason = find_reason(test, arms.ours.tests[test], reasons)
    if reason is None:
        return "**without a reason**"
    if not is_explained(test, arms, reasons):
        return "**above the bound of FP8's rounding**"
    return "refusal" if reason.get("refusal") else "FP8's rounding, no refusal"


def _differences(arms: Arms, reasons: list[dict[str, Any]]) -> list[str]:
    rows, counts = [], Counter[tuple[str, str]]()
    for test in only_ours_fails(arms):
        ours, rounded = arms.ours.tests[test], arms.rounded.tests.get(test)
        reason = find_reason(test, ours, reasons) or {}
        name, text = _class_of(test, arms, reasons), reason.get("reason", ours.message)
        counts[name, text] += 1
        error = f"{rounded.outcome}, error {rounded.max_relative_error:.3f}" if rounded is not None else ""
        rows.append([_short(test), ours.outcome, error, name, text, reason.get("refusal", "")])
    header = ["test", "ours", ROUNDED, "class", "reason", "refusal (row in docs/refusals.md)"]
    classes = [[*key, number] for key, number in sorted(counts.items())]
    return [*_table(["class", "reason", "tests"], [*classes, ["**all**", "", counts.total()]]), *_table(header, rows)]


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
