"""Tables, verdicts and pictures of megatron_pretrain.py, made from its JSON alone."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from end_to_end_report import each_once, good, load, write
from megatron_pretrain_arms import WORDS, parse_arm, without_option
from results_io import dated_stem

from fp8_ds.comparison import Comparison, Group, compare, describe, plot
from fp8_ds.curves import Curve

NAME = "megatron-pretrain"
ID_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of a run: when it began."""
TARGET_MODEL = "llama-2b"
SPEED_TARGET = 1.1
MEMORY_TARGETS = {"a": 0.65, "b": 0.5}
"""Of the best stock arm's tokens/s and peak; by form of the optimizer's states."""
SAME_PERCENT = 0.5
"""Two runs have the same loss: between the means of the last halves, weights and data being the same."""
SIDE_BY_SIDE = datetime.timedelta(minutes=10)
"""Within which arms that are compared have begun, if they are not in one run."""
COMPARED, SMOOTHED = 0.2, 25
"""Share of the iterations, from the end, whose mean losses are compared; iterations that curves are smoothed over."""


# --- files ---


def merged(out: Path, files: Iterable[Path]) -> Path:
    """The JSON in `out`, dated by the newest run, with the runs of `files` added (see `each_once`).

    Raises:
        SystemExit: there is nothing to report.
    """
    sources = list(files)
    if not sources:
        newest = sorted(out.glob(f"*-{NAME}.json"))
        if not newest:
            raise SystemExit(f"--report: expected a file *-{NAME}.json in {out.name}, got none. Name one.")
        return newest[-1]
    added = [run for path in sources for run in load(path)]
    if not added:
        raise SystemExit(f"--report: expected files with runs, got {[path.name for path in sources]}. Name others.")
    path = dated_stem(out, NAME).with_name(f"{max(run['id'] for run in added)[:10]}-{NAME}.json")
    write(path, each_once([*load(path), *added]))
    return path


# --- runs put together ---


def kind(run: Mapping[str, Any]) -> str:
    """Its mode, or "seeds" for losses of arms that name theirs."""
    has_seeds = run["mode"] == "losses" and any("+seed=" in r["arm"] for r in run["results"])
    return "seeds" if has_seeds else run["mode"]


def _settings(run: Mapping[str, Any]) -> str:
    """What two runs must have in common for their losses to be compared."""
    box = {name: run["machine"][name] for name in ("device", "cuda", "python", "versions")}
    same = {name: run[name] for name in ("mode", "model", "timing", "text", "words")}
    return json.dumps([kind(run), same, box], sort_keys=True)


def side_by_side(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs, those of losses with equal settings as one: arms may have run at the same time, each on its own GPU.

    Of several hours only where arms name their seeds. An arm that is there already is a repetition.
    """
    found: list[dict[str, Any]] = []
    for run in runs:
        for earlier in found if run["mode"] == "losses" else ():
            if _belong_together(earlier, run):
                earlier["results"] = sorted([*earlier["results"], *run["results"]], key=_order)
                earlier["skipped"] = [*earlier["skipped"], *run["skipped"]]
                earlier["commands"].append(run["command"])
                break
        else:
            found.append({**run, "commands": [run["command"]]})
    return found


def _belong_together(earlier: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    arms, others = ({r["arm"] for r in one["results"]} for one in (earlier, run))
    begun, later = (datetime.datetime.strptime(one["id"], ID_FORMAT) for one in (earlier, run))
    is_near = kind(run) == "seeds" or later - begun <= SIDE_BY_SIDE
    return is_near and not arms & others and _settings(earlier) == _settings(run)


def _order(result: Mapping[str, Any]) -> tuple[int, int]:
    """Stock before ours, as in the table of arms; then by seed."""
    arm = parse_arm(result["arm"])
    return list(WORDS).index(arm.base), arm.seed


def by_seed(run: Mapping[str, Any]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Arm without its seed -> seed -> result; runs with one seed are a pair."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for r in good(run):
        found.setdefault(without_option(r["arm"], "seed"), {})[parse_arm(r["arm"]).seed] = r
    return found


# --- one run ---


def known_seconds(
    runs: Iterable[Mapping[str, Any]], model: Mapping[str, Any], timing: str
) -> dict[tuple[str, str], float]:
    """(arm, mode) to seconds that it took last, with the very model and as many steps."""
    return {
        (result["arm"], run["mode"]): result["wall_s"]
        for run in runs
        if run["model"] == model and run["timing"] == timing
        for result in run["results"]
        if "error" not in result
    }


def line(result: Mapping[str, Any]) -> str:
    """What is printed when an arm is done."""
    if "error" in result:
        return f"{result['arm']}: FAILED after {result['wall_s']:.0f} s: {result['error'].splitlines()[0]}"
    return (
        f"{result['arm']}: {result['step_ms']:.1f} ms, {result['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, "
        f"{result['peak_allocated_gib']:.1f} GiB, {result['wall_s']:.0f} s"
    )


def speeds(run: Mapping[str, Any]) -> dict[str, float]:
    """Arm to tokens/s a GPU, the mean where it was measured twice; of a "speed" run."""
    found: dict[str, list[float]] = {}
    for result in good(run):
        if "tokens_per_second_per_gpu" in result:
            found.setdefault(result["arm"], []).append(result["tokens_per_second_per_gpu"])
    return {arm: fmean(values) for arm, values in found.items()}


def best_stock(run: Mapping[str, Any]) -> str | None:
    """The stock arm with the most tokens/s a GPU, on as many GPUs as all arms of a "speed" run: one."""
    found = {arm: value for arm, value in speeds(run).items() if arm.startswith("stock")}
    return max(found, key=lambda arm: found[arm], default=None)


def peak(run: Mapping[str, Any], arm: str) -> float:
    """GiB allocated at most, the largest where it was measured twice."""
    return max(r["peak_allocated_gib"] for r in good(run) if r["arm"] == arm)


def _failed(result: Mapping[str, Any], num_columns: int) -> str:
    reason = result["error"].splitlines()[0][:200].replace("|", "/")
    return f"| {result['arm']} | **{reason}** |" + " |" * (num_columns - 2)


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.3f}" if base else ""


def speed_table(run: Mapping[str, Any]) -> str:
    """A line for each arm in the order they ran; ratios are to the best stock arm of this run."""
    speed, best = speeds(run), best_stock(run)
    base = peak(run, best) if best else None
    lines = [
        f"| arm | ms/iteration (lines) | tokens/s a GPU | of {best or 'the best stock arm'} | TFLOP/s a GPU "
        "| peak GiB allocated / reserved | of its memory | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in run["results"]:
        if "error" in r:
            lines.append(_failed(r, 8))
            continue
        each = ", ".join(f"{ms:.1f}" for ms in r["interval_ms"])
        loss = "none" if r["loss"] is None else f"{r['loss']:.3f}"
        lines.append(
            f"| {r['arm']} | {r['step_ms']:.1f} ({each}) | {r['tokens_per_second_per_gpu']:,.0f} "
            f"| {_ratio(r['tokens_per_second_per_gpu'], speed[best] if best else None)} "
            f"| {r['tflops_per_gpu'] or 0:.0f} | {r['peak_allocated_gib']:.2f} / {r['peak_reserved_gib']:.2f} "
            f"| {_ratio(r['peak_allocated_gib'], base)} | {loss}{'' if r['finite'] else ' **not finite**'} |"
        )
    measured = [r["tokens_per_second_per_gpu"] for r in good(run) if r["arm"] == run["reference"]]
    if len(measured) == 2:
        lines += ["", f"The reference drifted by {100 * (measured[1] / measured[0] - 1):+.2f} % from first to last."]
    elif len(measured) == 1:
        lines += ["", "The reference was measured once, not again at the end: its drift is not known."]
    return "\n".join(lines)


def curve(result: Mapping[str, Any]) -> Curve:
    """Losses by iteration."""
    steps, losses = zip(*result["losses"], strict=True)
    return Curve(result["arm"], tuple(steps), tuple(losses))


def half_mean(result: Mapping[str, Any]) -> float:
    """Mean loss of the second half."""
    losses = [loss for _, loss in result["losses"]]
    return fmean(losses[len(losses) // 2 :])


def comparisons(run: Mapping[str, Any]) -> list[Comparison]:
    """Each arm against the first, in pairs of the seeds that both have; an arm without a pair is not there."""
    names = list(by_seed(run))
    return [found for other in names[1:] if (found := _comparison(run, [names[0], other])) is not None]


def picture(run: Mapping[str, Any]) -> Comparison | None:
    """The first arm and those with the most pairs, of the seeds that all of these have; None: no seed is."""
    pairs = {found.groups[1].name: len(found.groups[1].curves) for found in comparisons(run)}
    most = max(pairs.values(), default=0)
    return _comparison(run, [*list(by_seed(run))[:1], *(name for name, count in pairs.items() if count == most)])


def _comparison(run: Mapping[str, Any], names: Sequence[str]) -> Comparison | None:
    arms = {name: by_seed(run)[name] for name in names}
    seeds = sorted(set.intersection(*map(set, arms.values()))) if len(arms) > 1 else []
    if not seeds:
        return None
    groups = [Group(name, tuple(curve(results[seed]) for seed in seeds)) for name, results in arms.items()]
    return compare(groups, COMPARED)


def loss_table(run: Mapping[str, Any]) -> str:
    """Losses beside those of the first arm with the same seed."""
    first: dict[int, Mapping[str, Any]] = {}
    for r in good(run):
        first.setdefault(parse_arm(r["arm"]).seed, r)
    lines = [
        "| arm | loss of the first iteration | mean of the second half | held out | held out, against the first arm "
        "| tokens/s a GPU | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in run["results"]:
        if "error" in r:
            lines.append(_failed(r, 7))
            continue
        base = first[parse_arm(r["arm"]).seed]
        lines.append(
            f"| {r['arm']} | {r['losses'][0][1]:.4f} | {half_mean(r):.4f} | {r['held_out_loss']:.4f} "
            f"| {100 * (r['held_out_loss'] / base['held_out_loss'] - 1):+.2f} % "
            f"| {r['tokens_per_second_per_gpu']:,.0f} | {r['peak_allocated_gib']:.2f} |"
        )
    told = [f"- last {COMPARED:.0%}: {describe(one)}" for found in comparisons(run) for one in found.results]
    if told:
        lines += ["", *told]
    return "\n".join(lines)


def section(run: Mapping[str, Any]) -> str:
    """One run of `side_by_side`: what it was, its table, what was left out."""
    m, box = run["model"], run["machine"]
    found = ", ".join(f"{name} {version}" for name, version in box["versions"].items())
    commands = ", ".join(f"`{command}`" for command in run["commands"])
    lines = [
        f"## {run['piece']} ({m['name']}, {run['id']})",
        "",
        f"{commands} on {box['num_gpus']} x {box['device']}; {found}, Python {box['python']}, CUDA {box['cuda']}.",
        *([f"{len(run['commands'])} runs with equal settings, put together."] if len(run["commands"]) > 1 else []),
        f"{m['layers']} layers, hidden {m['hidden']}, ffn {m['ffn']}, vocab {m['vocab']}, seq {m['seq']}, micro-batch "
        f"{m['micro_batch']}; {run['timing']}.",
        *([f"Text: {run['text']}."] if run["text"] else ["Data: Megatron's mock data."]),
        f"All arms: `{run['words']}`",
        "",
        speed_table(run) if run["mode"] == "speed" else loss_table(run),
        "",
        *(f"- {r['arm']}: `{r['words']}`" for r in run["results"] if r.get("words")),
        *(f"- {skipped}" for skipped in run["skipped"]),
    ]
    return "\n".join(lines) + "\n"


# --- verdicts ---


Check = tuple[str, bool, str]


def _speed_checks(run: Mapping[str, Any]) -> list[Check]:
    """(claim, met, numbers) that a "speed" run can judge."""
    speed, best = speeds(run), best_stock(run)
    ours = [arm for arm in speed if arm.startswith("ours")]
    if best is None or not ours:
        return []
    fastest = max(ours, key=lambda arm: speed[arm])
    ratio = speed[fastest] / speed[best]
    unequal = {arm: _unequal(arm, speed) for arm in ours}
    checks = [(_SPEED_CLAIM, ratio >= SPEED_TARGET, f"{fastest} / {best} = {ratio:.3f}{unequal[fastest]}")]
    for form, bound in MEMORY_TARGETS.items():
        arms = [arm for arm in ours if parse_arm(arm).form == form]
        if arms:
            least = min(arms, key=lambda arm: peak(run, arm))
            ratio = peak(run, least) / peak(run, best)
            checks.append((_memory_claim(form), ratio <= bound, f"{least} / {best} = {ratio:.3f}{unequal[least]}"))
    return checks


def _unequal(arm: str, measured: Iterable[str]) -> str:
    """What to say of an arm with gradients in bf16 where no stock arm had them, though Megatron can."""
    stock = [parse_arm(name).words for name in measured if name.startswith("stock")]
    if "--main-grads-dtype" not in parse_arm(arm).words or any("--main-grads-dtype" in words for words in stock):
        return ""
    return ", but gradients in bf16 were not measured with stock"


def _parallel_checks(run: Mapping[str, Any]) -> list[Check]:
    by_name = {r["arm"]: r for r in good(run)}
    checks = []
    for name, result in by_name.items():
        alone = without_option(name, "tp")
        if alone == name or alone not in by_name:
            continue
        percent = 100 * (half_mean(result) / half_mean(by_name[alone]) - 1)
        met = result["finite"] and abs(percent) <= SAME_PERCENT
        checks.append((_tp_claim(name.split("-")[0]), met, f"{name}: {percent:+.3f} % of {alone}"))
    return checks


def _loss_checks(run: Mapping[str, Any]) -> list[Check]:
    """Ours beside stock FP8: no more than it from bf16, or within what is called the same."""
    by_name = {r["arm"]: r for r in good(run)}
    ours = [name for name in by_name if name.startswith("ours")]
    if not {"stock-bf16", "stock-tensorwise"} <= set(by_name) or not ours:
        return []
    worst = max(ours, key=lambda name: by_name[name]["held_out_loss"])
    percent = 100 * (by_name[worst]["held_out_loss"] / by_name["stock-bf16"]["held_out_loss"] - 1)
    stock = 100 * (by_name["stock-tensorwise"]["held_out_loss"] / by_name["stock-bf16"]["held_out_loss"] - 1)
    numbers = f"{worst} {percent:+.2f} %, stock-tensorwise {stock:+.2f} %"
    return [(_LOSS_CLAIM, percent <= max(stock, SAME_PERCENT), numbers)]


_SPEED_CLAIM = f"tokens/s >= {SPEED_TARGET} x the best stock arm"
_LOSS_CLAIM = f"held-out loss of ours within {SAME_PERCENT} % of stock-bf16's, or as near as stock FP8's"


def _memory_claim(form: str) -> str:
    return f"peak with form ({form}) <= {MEMORY_TARGETS[form]} x the best stock arm's"


def _tp_claim(system: str) -> str:
    return f"TP=2 with sequence parallelism, {system}: runs, loss within {SAME_PERCENT} % of one GPU's"


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The issue's bounds, each met or missed by the newest run on GPUs that can judge it, or not measured."""
    checks = {"speed": _speed_checks, "parallel": _parallel_checks, "losses": _loss_checks}
    found: dict[str, str] = {}
    for run in runs:
        if run["model"]["name"] != TARGET_MODEL or run["machine"]["device"] == "cpu":
            continue
        of_run: dict[str, list[tuple[bool, str]]] = {}
        for claim, met, numbers in checks[run["mode"]](run):
            of_run.setdefault(claim, []).append((met, numbers))
        for claim, results in of_run.items():
            verdict = "met" if all(met for met, _ in results) else "MISSED"
            numbers = "; ".join(numbers for _, numbers in results)
            found[claim] = f"{verdict}: {claim} ({numbers}; {run['piece']}, {run['id']})"
    expected = [_SPEED_CLAIM, *map(_memory_claim, MEMORY_TARGETS), _tp_claim("ours"), _LOSS_CLAIM]
    return [*found.values(), *(f"NOT MEASURED: {claim}" for claim in expected if claim not in found)]


# --- everything ---


def write_curves(stem: Path, run: Mapping[str, Any]) -> bool:
    """`stem`.csv, a column of losses for each arm and seed of the picture, and `stem`.png; False: there is none."""
    found = picture(run)
    if found is None:
        return False
    with stem.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        curves = [one for group in found.groups for one in group.curves]
        writer.writerow(["iteration", *(one.name for one in curves)])
        writer.writerows(zip(found.steps, *(one.at(found.steps) for one in curves), strict=True))
    plot(found, stem.with_suffix(".png"), min(SMOOTHED, len(found.steps)))
    return True


def publish(path: Path) -> str:
    """Markdown, and CSV and PNG of the newest losses of each kind, beside the JSON; returns the Markdown."""
    runs = side_by_side(load(path))
    stem = path.with_suffix("")
    lines = [f"# {stem.name}", "", "Ratios are taken within a run.", ""]
    for name in ("losses", "seeds", "parallel"):
        newest = [run for run in runs if kind(run) == name][-1:]
        curves = stem.with_name(f"{stem.name}-{name}")
        if newest and write_curves(curves, newest[0]):
            lines += [f"![{name}]({curves.name}.png) ([CSV]({curves.name}.csv), run {newest[0]['id']})", ""]
    lines += [f"- {verdict}" for verdict in verdicts(runs)] + [""]
    text = "\n".join([*lines, *(section(run) for run in runs)])
    stem.with_suffix(".md").write_text(text)
    return text
