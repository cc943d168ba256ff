"""The page docs/conformance.md, from the outcomes of both arms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from outcomes import Outcome, OutcomeStore

COLUMNS = ("pass", "fail", "skip", "xfail")


def count(outcomes: Iterable[Outcome]) -> str:
    """Returns "12 / 0 / 3 / 1": passed, failed (hangs, crashes and errors too), skipped, failed as expected."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    num_passed = counts["passed"] + counts["xpassed"]
    num_failed = sum(counts[name] for name in ("failed", "error", "hang", "crash"))
    return f"{num_passed} / {num_failed} / {counts['skipped']} / {counts['xfailed']}"


def differing(stock: OutcomeStore, ours: OutcomeStore) -> list[str]:
    """The tests that ran in both arms with another outcome, in node id order."""
    return [t for t in sorted(stock.tests) if t in ours.tests and stock.tests[t].outcome != ours.tests[t].outcome]


def find_reason(test: str, outcome: Outcome, reasons: list[dict[str, str]]) -> dict[str, str] | None:
    """The first row of reasons.toml whose `tests` matches the node id and whose `message` matches our failure."""
    for reason in reasons:
        if re.search(reason["tests"], test) and re.search(reason.get("message", ""), outcome.message):
            return reason
    return None


def unexplained(stock: OutcomeStore, ours: OutcomeStore, reasons: list[dict[str, str]]) -> list[str]:
    """Tests that stock passes and ours does not, and that no row of reasons.toml explains."""
    return [
        test
        for test in differing(stock, ours)
        if stock.tests[test].is_good
        and not ours.tests[test].is_good
        and not find_reason(test, ours.tests[test], reasons)
    ]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(header: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(_escape(str(cell)) for cell in row)} |" for row in rows), ""]


def _short(test: str) -> str:
    return "`" + test.removeprefix("unit/") + "`"


def _files_table(entries: list[dict[str, Any]], stock: OutcomeStore, ours: OutcomeStore) -> list[str]:
    rows: list[list[Any]] = []
    totals: list[tuple[Outcome, Outcome | None]] = []
    for entry in entries:
        file = entry["file"]
        pairs = [(o, ours.tests.get(t)) for t, o in stock.tests.items() if t.partition("::")[0] == file]
        totals += pairs
        rows.append([_short(file), *_cells(pairs)])
    rows.append(["**all**", *_cells(totals)])
    header = ["file (tests/unit/)", f"stock {' / '.join(COLUMNS)}", f"ours {' / '.join(COLUMNS)}"]
    return _table([*header, "FP8 engines", "forced, no FP8 engine", "stock s", "ours s"], rows)


def _cells(pairs: list[tuple[Outcome, Outcome | None]]) -> list[Any]:
    stock, ours = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1] is not None]
    seconds = round(sum(outcome.seconds for outcome in stock))
    if not ours:
        return [count(stock) if stock else "not run", "not run", "", "", seconds, ""]
    engines, not_fp8 = sum(o.num_fp8_engines for o in ours), sum(o.num_forced_not_fp8 for o in ours)
    return [count(stock), count(ours), engines, not_fp8, seconds, round(sum(outcome.seconds for outcome in ours))]


def _differences(stock: OutcomeStore, ours: OutcomeStore, reasons: list[dict[str, str]]) -> list[str]:
    rows = []
    for test in differing(stock, ours):
        outcome = ours.tests[test]
        reason = find_reason(test, outcome, reasons)
        text = reason["reason"] if reason else f"**no reason given**: {outcome.message}"
        if outcome.is_good and not stock.tests[test].is_good:
            text = "Only stock fails: see below."
        row = (reason or {}).get("refusal", "")
        rows.append([_short(test), stock.tests[test].outcome, outcome.outcome, text, row])
    if not rows:
        return ["None." if ours.tests else "Our arm has not run.", ""]
    return _table(["test", "stock", "ours", "reason", "refusal (row in docs)"], rows)


def render(selection: dict[str, Any], stock: OutcomeStore, ours: OutcomeStore, reasons: list[dict[str, str]]) -> str:
    """The whole page as Markdown."""
    lines = [
        "# DeepSpeed's own tests against the FP8 engine",
        "",
        "Written by `tests/conformance/run_upstream.py`; do not edit. The tests are not part of this project: the",
        "script takes a checkout of DeepSpeed's `tests` folder, and `tests/conformance/selection.toml` picks from it.",
        "",
        f"Installed: {stock.key}. Tests: {stock.upstream or 'not stated'}.",
        "",
        "Both arms run on CPU with gloo and with the same repairs (`tests/conformance/shim.py`): the bf16 version",
        "check that wants NCCL says yes, DDP loses its `device_ids`, flags are not reduced on a device called '0',",
        "engines have the attribute `sparse_tensor_module_names` that 0.19.8 dropped and older tests compare, and",
        "ZeRO-3 has no persistent parameters unless stock fails without them. In our arm every `deepspeed.initialize`",
        'whose configuration FP8 accepts gets `"fp8": {"enabled": true, "linear": {"filter_fqns": []}}`. *FP8 engines*',
        "counts the engines, on rank 0, that hold FP8 weights: a file with none only shows that the hook is inert.",
        "",
        "```",
        "python tests/conformance/run_upstream.py --tests DIR               # both arms; stock only where unknown",
        "python tests/conformance/run_upstream.py --tests DIR --stock-only  # the stock baseline alone",
        "```",
        "",
        "## First list",
        "",
        *_files_table(selection["first"], stock, ours),
        "## Second list",
        "",
        *_files_table(selection["second"], stock, ours),
        "## Differences",
        "",
        *_differences(stock, ours, reasons),
    ]
    not_forced: Counter[str] = Counter()
    for outcome in ours.tests.values():
        not_forced.update(outcome.not_forced)
    if not_forced:
        lines += ["## Calls of `initialize` that were left alone in our arm", ""]
        lines += _table(["why", "calls"], [[why, number] for why, number in not_forced.most_common()])
    bad = [t for t, o in sorted(stock.tests.items()) if not o.is_good and o.outcome != "skipped"]
    lines += ["## Tests that stock fails here", ""]
    lines += _table(
        ["test", "outcome", "message"], [[_short(t), stock.tests[t].outcome, stock.tests[t].message] for t in bad]
    )
    skips = Counter(outcome.message for outcome in stock.tests.values() if outcome.outcome == "skipped")
    lines += [
        "## Why stock skips",
        "",
        *_table(["message", "tests"], [[text, number] for text, number in skips.most_common()]),
    ]
    kept = [t for t, o in sorted(stock.tests.items()) if o.persistence == "default"]
    lines += ["## Tests that keep their own persistence threshold", "", "Stock fails them with a threshold of 0.", ""]
    return "\n".join([*lines, *(f"- {_short(test)}" for test in kept)]).rstrip() + "\n"
