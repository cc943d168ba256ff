"""The page docs/conformance.md, from the outcomes of all arms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outcomes import Outcome, OutcomeStore

COLUMNS = ("pass", "fail", "skip", "xfail")
ROUNDED = "ours, comparisons at FP8's rounding"
ABOUT_ROUNDING = """\
*Ours, comparisons at FP8's rounding.* Some of these tests compare our gradients or weights with bf16 arithmetic
at bf16's tolerance or tighter, which FP8 cannot meet: it keeps 3 bits of a number (2 of a gradient) where bf16
keeps 7. Such a test *is* counted as failed under *ours*. It is then run once more, with FP8 forced on in the
same way, and with another comparison (`tests/conformance/rounding.py`): where `torch.testing.assert_close` or
`torch.allclose` misses its tolerance, two floating-point tensors of one shape and dtype still count as equal if
NaN and infinities are in the same places and the relative L2 error ‖a - b‖ / ‖b‖ is at most 1/8, one step of
E4M3. All else in the test stays as it is: exact comparisons, states, counts, errors. So the second run shows
that the right values are in the right place (a wrong sign, a factor of 2, a missing half or a NaN fails); it
does not show bf16's precision, and a small part of a large tensor could be wrong unseen. *error* in the table
of differences is the largest relative L2 error of the comparisons that missed upstream's tolerance, over all
ranks. Such a difference is no refusal: the configuration is supported. The tables of files count these tests
under this column by their second run, all others as under *ours*.""".splitlines()


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


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(header: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(_escape(str(cell)) for cell in row)} |" for row in rows), ""]


def _short(test: str) -> str:
    return "`" + test.removeprefix("unit/") + "`"


def _files_table(entries: list[dict[str, Any]], arms: Arms) -> list[str]:
    header = ["file (tests/unit/)", f"stock {' / '.join(COLUMNS)}", f"ours {' / '.join(COLUMNS)}", ROUNDED]
    files = [entry["file"] for entry in entries]
    rows = [[_short(file), *_cells([file], arms)] for file in files]
    rows.append(["**all**", *_cells(files, arms)])
    return _table([*header, "FP8 engines", "forced, no FP8 engine", "stock s", "ours s"], rows)


def _cells(files: list[str], arms: Arms) -> list[Any]:
    stock = {test: outcome for test, outcome in arms.stock.tests.items() if test.partition("::")[0] in files}
    ours = {test: arms.ours.tests[test] for test in stock if test in arms.ours.tests}
    rounded = [arms.rounded.tests[test] if passes_at_rounding(test, arms) else ours[test] for test in ours]
    seconds = round(sum(outcome.seconds for outcome in stock.values()))
    counts = count(stock.values()) if stock else "not run"
    if not ours:
        return [counts, "not run", "not run", "", "", seconds, ""]
    engines = sum(outcome.num_fp8_engines for outcome in ours.values())
    not_fp8 = sum(outcome.num_forced_not_fp8 for outcome in ours.values())
    our_seconds = round(sum(outcome.seconds for outcome in ours.values()))
    return [counts, count(ours.values()), count(rounded), engines, not_fp8, seconds, our_seconds]


def _rounded_cell(test: str, arms: Arms) -> str:
    outcome = arms.rounded.tests.get(test)
    if outcome is None:
        return ""
    return f"{outcome.outcome}, error {outcome.max_relative_error:.3f}" if outcome.num_forgiven else outcome.outcome


def _class_of(test: str, arms: Arms, reasons: list[dict[str, Any]]) -> str:
    reason = find_reason(test, arms.ours.tests[test], reasons)
    if reason is None:
        return "**without a reason**"
    if not is_explained(test, arms, reasons):
        return "**above the bound of FP8's rounding**"
    return "refusal" if reason.get("refusal") else "FP8's rounding, no refusal"


def _classes(arms: Arms, reasons: list[dict[str, Any]]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for test in only_ours_fails(arms):
        reason = find_reason(test, arms.ours.tests[test], reasons)
        counts[_class_of(test, arms, reasons), reason["reason"] if reason else ""] += 1
    rows: list[list[Any]] = [[name, reason, number] for (name, reason), number in sorted(counts.items())]
    return _table(["class", "reason", "tests"], [*rows, ["**all**", "", counts.total()]])


def _differences(arms: Arms, reasons: list[dict[str, Any]]) -> list[str]:
    rows = []
    for test in differing(arms.stock, arms.ours):
        stock, ours = arms.stock.tests[test], arms.ours.tests[test]
        reason = find_reason(test, ours, reasons)
        text = reason["reason"] if reason else f"**no reason given**: {ours.message}"
        if reason and not is_explained(test, arms, reasons):
            text = f"**above the bound of FP8's rounding**: {text}"
        if ours.is_good and not stock.is_good:
            text = "Only stock fails: see below."
        refusal = (reason or {}).get("refusal", "")
        rows.append([_short(test), stock.outcome, ours.outcome, _rounded_cell(test, arms), text, refusal])
    if not rows:
        return ["None." if arms.ours.tests else "Our arm has not run.", ""]
    table = _table(["test", "stock", "ours", ROUNDED, "reason", "refusal (row in docs/refusals.md)"], rows)
    return ["Tests that stock passes and ours fails:", "", *_classes(arms, reasons), *table]


def render(selection: dict[str, Any], arms: Arms, reasons: list[dict[str, Any]]) -> str:
    """The whole page as Markdown."""
    stock, ours = arms.stock, arms.ours
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
        *ABOUT_ROUNDING,
        "",
        "```",
        "python tests/conformance/run_upstream.py --tests DIR               # all arms; stock only where unknown",
        "python tests/conformance/run_upstream.py --tests DIR --differing   # ours again where it differs",
        "python tests/conformance/run_upstream.py --tests DIR --stock-only  # the stock baseline alone",
        "```",
        "",
        "## First list",
        "",
        *_files_table(selection["first"], arms),
        "## Second list",
        "",
        *_files_table(selection["second"], arms),
        "## Differences",
        "",
        *_differences(arms, reasons),
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
