"""Tables, verdicts and chart of end_to_end.py, made from its JSON alone."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import end_to_end_chart
import memory_profile
import sampled_steps
import step_profile
from end_to_end_arms import MODELS
from results_io import dated_stem

LAST = 20
"""Steps over which the end of a loss curve is averaged."""


# --- files ---


def load(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, none where there is no file."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


def write(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """The file as a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    os.replace(part, path)


def add(path: Path, run: Mapping[str, Any]) -> None:
    """The run is in the file as it is now, beside those of other processes, which may write it at the same time."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(path, each_once([*load(path), run]))


def merged(out: Path, files: Iterable[Path]) -> Path:
    """The JSON in `out`, dated by the newest run, with the runs of `files` added, each once (by second and command)."""
    sources = list(files)
    if not sources:
        newest = sorted(out.glob("*-end-to-end.json"))
        if not newest:
            raise SystemExit(f"report: expected a file *-end-to-end.json in {out.name}, got none. Name one.")
        return newest[-1]
    added = [run for path in sources for run in load(path)]
    if not added:
        raise SystemExit(f"report: expected files with runs, got {[path.name for path in sources]}.")
    stem = dated_stem(out, "end-to-end")
    path = stem.with_name(max(run["id"] for run in added)[:10] + "-end-to-end.json")
    write(path, each_once([*load(path), *added]))
    return path


def each_once(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By its second and its command: those side by side on one host may have begun in the same second."""
    found = {(run["id"], run["command"]): run for run in runs}
    return [found[key] for key in sorted(found)]


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


# --- one run ---


def is_whole(run: Mapping[str, Any]) -> bool:
    """Whether the model is what its name says, layers, lengths and GPUs: only the micro-batch may be another."""
    model = run["model"]
    expected = vars(MODELS[model["name"]])
    return all(model[key] == value for key, value in expected.items() if key != "micro_batch")


def good(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result for result in run["results"] if "error" not in result]


def peak(result: Mapping[str, Any]) -> float:
    """GiB. What replayed graphs keep counts as reserved, and not as allocated."""
    gib: float = result["peak_reserved_gib" if "+cudagraphs" in result["arm"] else "peak_allocated_gib"]
    return gib


def line(result: Mapping[str, Any]) -> str:
    """What is printed when an arm is done."""
    if "error" in result:
        return f"{result['arm']}: FAILED after {result['wall_s']:.0f} s: {result['error'].splitlines()[0]}"
    if "losses" in result:
        return f"{result['arm']}: held-out loss {result['held_out_loss']:.4f}, {result['wall_s']:.0f} s"
    return (
        f"{result['arm']}: {result['step_ms']:.1f} ms, {result['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, "
        f"{peak(result):.1f} GiB, {result['wall_s']:.0f} s"
    )


def speeds(run: Mapping[str, Any]) -> dict[str, float]:
    """Arm to tokens/s a GPU, the mean where it was measured twice; of a "speed" run."""
    found: dict[str, list[float]] = {}
    for result in good(run):
        if "tokens_per_second_per_gpu" in result:
            found.setdefault(result["arm"], []).append(result["tokens_per_second_per_gpu"])
    return {arm: fmean(values) for arm, values in found.items()}


def _failed(result: Mapping[str, Any], num_columns: int) -> str:
    reason = result["error"].splitlines()[0][:200].replace("|", "/")
    return f"| {result['arm']} | **{reason}** |" + " |" * (num_columns - 2)


def speed_table(run: Mapping[str, Any]) -> str:
    speed = speeds(run)
    reference = speed.get(run["reference"])
    lines = [
        f"| arm | ms/step (blocks) | tokens/s a GPU | of {run['reference'] or 'the reference'} "
        "| peak GiB allocated / reserved | peak while building | resident FP8 weights GiB | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in run["results"]:
        if "error" in r:
            lines.append(_failed(r, 8))
            continue
        ratio = f"{r['tokens_per_second_per_gpu'] / reference:.3f}" if reference else ""
        blocks = ", ".join(f"{ms:.1f}" for ms in r["block_ms"])
        resident = f"{r['fp8']['resident_weight_bytes'] / 2**30:.2f}" if r["fp8"] else ""
        allocated = "in graphs" if "+cudagraphs" in r["arm"] else f"{r['peak_allocated_gib']:.2f}"
        lines.append(
            f"| {r['arm']} | {r['step_ms']:.1f} ({blocks}) | {r['tokens_per_second_per_gpu']:,.0f} | {ratio} "
            f"| {allocated} / {r['peak_reserved_gib']:.2f} | {r['build_peak_allocated_gib']:.2f} "
            f"| {resident} | {r['loss']:.3f}{'' if r['finite'] else ' **not finite**'} |"
        )
    lines += _in_eager(run)
    measured = [r["tokens_per_second_per_gpu"] for r in good(run) if r["arm"] == run["reference"]]
    if len(measured) == 2:
        lines += ["", f"The reference drifted by {100 * (measured[1] / measured[0] - 1):+.2f} % from first to last."]
    sampled = [sampled_steps.sentence(r["arm"], r["samples"]) for r in good(run) if "samples" in r]
    if sampled:
        lines += ["", *sampled]
    return "\n".join(lines)


def _in_eager(run: Mapping[str, Any]) -> list[str]:
    """What torch.compile gave up on, a paragraph an arm; runs of before 2026-11-28 do not say."""
    told = [
        f"**In eager, past torch's limit**: {', '.join(r['in_eager'])}, in {r['arm']}"
        for r in good(run)
        if r.get("in_eager")
    ]
    return [line for one in told for line in ("", one)]


def loss_table(run: Mapping[str, Any]) -> str:
    """Losses beside those of the first arm that is stock."""
    base = next((r for r in good(run) if r["arm"].startswith("stock")), None)
    lines = [
        f"| arm | loss at the middle | mean of the last {LAST} | held-out | held-out against stock |",
        "|---|---|---|---|---|",
    ]
    for r in run["results"]:
        if "error" in r:
            lines.append(_failed(r, 5))
            continue
        ratio = f"{100 * (r['held_out_loss'] / base['held_out_loss'] - 1):+.2f} %" if base else ""
        losses = r["losses"]
        lines.append(
            f"| {r['arm']} | {losses[len(losses) // 2]:.4f} | {fmean(losses[-LAST:]):.4f} | {r['held_out_loss']:.4f} "
            f"| {ratio} |"
        )
    return "\n".join(lines)


def profile_tables(run: Mapping[str, Any]) -> str:
    """Every profiled arm; waits of the host beside stock's."""
    parts = [step_profile.table(r["arm"], r) + memory_profile.table(r.get("memory")) for r in good(run)]
    parts += [f"{line}\n" for line in _in_eager(run) if line]
    parts += [f"{r['arm']}: **{r['error'].splitlines()[0]}**\n" for r in run["results"] if "error" in r]
    stock = next((r for r in good(run) if r["arm"] == "stock-eager"), None)
    if stock:
        base = step_profile.host_waits(stock["host"])
        for r in good(run):
            more = step_profile.host_waits(r["host"]) - base
            parts.append(f"- {r['arm']}: host waits in forward and backward, more than stock-eager's: {more:+g}\n")
    return "\n".join(parts)


def _picked(run: Mapping[str, Any]) -> str:
    """What SDPA took; runs of before 2026-11-22 do not say."""
    found = sorted({r["attention"] for r in good(run) if "attention" in r})
    return f" ({'; '.join(found)})" if found else ""


def _loss(run: Mapping[str, Any]) -> str:
    """Which one, and how much larger than by itself Liger makes its logits, of which the first runs do not say."""
    times = run.get("chunk_mem_const", 1)
    return f"cross entropy {run['cross_entropy']}" + (f" with chunk_mem_const {times}" if times != 1 else "")


def section(run: Mapping[str, Any]) -> str:
    """One run: what it was, its table, what was left out."""
    m, box = run["model"], run["machine"]
    tables = {"speed": speed_table, "losses": loss_table, "profile": profile_tables}
    versions = ", ".join(f"{name} {version}" for name, version in box["versions"].items())
    zero = ", ".join(f"{key} {value}" for key, value in run["zero_optimization"].items())
    lines = [
        f"## {run['piece']} ({m['name']}, {run['id']})",
        "",
        f"`{run['command']}` on {m['gpus']} x {box['device']}; {versions}, Python {box['python']}, CUDA {box['cuda']}.",
        f"{m['layers']} layers, hidden {m['hidden']}, ffn {m['ffn']}, vocab {m['vocab']}, seq {m['seq']}, micro-batch "
        f"{m['micro_batch']}; {run['timing']}; clip {run['clip']:g}; {_loss(run)}; attention "
        f"{run['attention']}{_picked(run)}. All DeepSpeed arms: {zero}.",
        *([f"Text: {run['text']}."] if run.get("text") else []),
        "",
        tables[run["mode"]](run),
        "",
        *(f"- {skipped}" for skipped in run["skipped"]),
    ]
    return "\n".join(lines) + "\n"


# --- verdicts ---


def _best(speed: Mapping[str, float], prefix: str, without: str = "+mb=") -> str | None:
    names = [name for name in speed if name.startswith(prefix) and "+mb=" not in name and without not in name]
    return max(names, key=lambda name: speed[name], default=None)


def _peak(run: Mapping[str, Any], arm: str) -> float:
    return max(peak(r) for r in good(run) if r["arm"] == arm)


TARGETS = {
    # model: (tokens/s a GPU, of stock-eager, of the best torchao arm, GiB)
    "llama-2b": (72_000, 2.2, 1.3, 16.0),
    "llama-8b": (15_000, 1.87, 1.29, 45.0),
}
RELEASE_GIB = 13.0


def _speed_checks(run: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """(claim, met, numbers) that this run can judge."""
    model, speed = run["model"]["name"], speeds(run)
    ours = _best(speed, "ours")
    if ours is None or model not in TARGETS:
        return []
    tokens, of_stock, of_peer, gib = TARGETS[model]
    checks = []
    if "stock-eager" in speed:  # a run of recipes, or of one arm, is not where the fastest one is
        checks = [
            (f"{model}: >= {tokens:,} tokens/s a GPU", speed[ours] >= tokens, f"{ours} {speed[ours]:,.0f}"),
            (f"{model}: peak <= {gib:g} GiB", _peak(run, ours) <= gib, f"{ours} {_peak(run, ours):.2f}"),
        ]
    # Where the others have stock's loss ours is to have it, too.
    alike = ours if run.get("cross_entropy") == "liger" else _best(speed, "ours", "+liger")
    for claim, other, target in (("stock-eager", "stock-eager", of_stock), ("the best torchao", None, of_peer)):
        name = other if other in speed else _best(speed, "torchao") if other is None else None
        if name is not None and alike is not None:
            ratio = speed[alike] / speed[name]
            checks.append((f"{model}: >= {target} x {claim}", ratio >= target, f"{alike} / {name} = {ratio:.3f}"))
    released = [name for name in speed if "-release" in name]
    if model == "llama-2b" and released:
        least = min(released, key=lambda name: _peak(run, name))
        checks.append(
            (
                f"{model}: peak with release <= {RELEASE_GIB:g} GiB",
                _peak(run, least) <= RELEASE_GIB,
                f"{least} {_peak(run, least):.2f}",
            )
        )
    return checks


def _small_checks(run: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    speed = speeds(run)
    checks = []
    for mode in ("eager", "compiled"):
        ours = [name for name in speed if name.startswith("ours") and f"-{mode}" in name and "measured" in name]
        if run["model"]["name"] == "gpt2" and ours and f"stock-{mode}" in speed:
            ratio = max(speed[name] for name in ours) / speed[f"stock-{mode}"]
            checks.append((f"gpt2 {mode}, layer_choice measured: >= 1.0 x stock", ratio >= 1.0, f"{ratio:.3f}"))
    return checks


def _memory_checks(run: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """Ours at the largest micro-batch that fits into stock's peak; no bound but that it is there."""
    stock = [r for r in good(run) if r["arm"] == "stock-eager"]
    tried = [r for r in good(run) if "+mb=" in r["arm"]]
    if run["model"]["name"] != "llama-8b" or not stock or not tried:
        return []
    bound = max(map(peak, stock))
    fits = [r for r in tried if peak(r) <= bound]
    if not fits:
        return [
            ("llama-8b: a larger micro-batch in stock's memory", False, f"none of {len(tried)} within {bound:.1f} GiB")
        ]
    best = max(fits, key=lambda r: int(r["arm"].rpartition("+mb=")[2].split("+")[0]))
    ratio = best["tokens_per_second_per_gpu"] / speeds(run)["stock-eager"]
    numbers = f"{best['arm']}: {peak(best):.1f} of {bound:.1f} GiB, {ratio:.3f} x stock"
    return [("llama-8b: a larger micro-batch in stock's memory", True, numbers)]


def _waits_claim(model: str) -> str:
    return f"{model}: no host wait in forward and backward that stock-eager has not"


def _profile_checks(run: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    checks = []
    model = run["model"]["name"]
    ours = [r for r in good(run) if r["arm"].startswith("ours")]
    for r in ours if model == "llama-2b" else []:
        owners = r["host"]["owner_ms"]
        outside = r["step_ms"] - r["device"]["busy_ms"] + owners["engine in backward"] + owners["engine in update"]
        if "ours-fp32" not in r["arm"]:
            checks.append((f"{r['arm']}: <= 8 ms outside the model's kernels", outside <= 8, f"{outside:.1f} ms"))
        if r["dispatches_per_linear"] is not None:
            count = r["dispatches_per_linear"]
            checks.append((f"{r['arm']}: <= 20 dispatches per linear", count <= 20, str(count)))
    stock = next((r for r in good(run) if r["arm"] == "stock-eager"), None)
    if stock and ours and model in TARGETS:
        base = step_profile.host_waits(stock["host"])
        more = {r["arm"]: step_profile.host_waits(r["host"]) - base for r in ours}
        numbers = ", ".join(f"{arm} {number:+g}" for arm, number in more.items())
        checks.append((_waits_claim(model), max(more.values()) <= 0, numbers))
    return checks


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The issue's bounds: met or missed by the newest run of the whole model that can judge it, or not measured."""
    found: dict[str, str] = {}
    checks: dict[str, list[Callable[[Mapping[str, Any]], list[tuple[str, bool, str]]]]] = {
        "speed": [_speed_checks, _small_checks, _memory_checks],
        "profile": [_profile_checks],
        "losses": [],
    }
    for run in filter(is_whole, runs):
        for check in checks[run["mode"]]:
            for claim, met, numbers in check(run):
                found[claim] = f"{'met' if met else 'MISSED'}: {claim} ({numbers}; {run['piece']}, {run['id']})"
    expected = [f"{model}: >= {target[0]:,} tokens/s a GPU" for model, target in TARGETS.items()]
    expected += [f"{model}: >= {target[1]} x stock-eager" for model, target in TARGETS.items()]
    expected += [f"{model}: >= {target[2]} x the best torchao" for model, target in TARGETS.items()]
    expected += [f"{model}: peak <= {target[3]:g} GiB" for model, target in TARGETS.items()]
    expected += [f"llama-2b: peak with release <= {RELEASE_GIB:g} GiB"]
    expected += [_waits_claim(model) for model in TARGETS]
    expected += [f"gpt2 {mode}, layer_choice measured: >= 1.0 x stock" for mode in ("eager", "compiled")]
    return [*found.values(), *(f"NOT MEASURED: {claim}" for claim in expected if claim not in found)]


# --- everything ---


def chart(path: Path, runs: Sequence[Mapping[str, Any]]) -> bool:
    """Bars of tokens/s, a panel for the newest run of each piece that compares arms on a whole model.

    Returns:
        False if there is nothing to show.
    """
    compared = [run for run in runs if run["mode"] == "speed" and len(speeds(run)) > 1 and is_whole(run)]
    newest = {(run["model"]["name"], run["piece"]): run for run in compared}
    panels = [
        end_to_end_chart.Panel(f"{model}, {piece}: tokens/s a GPU", speeds(run), run["reference"])
        for (model, piece), run in newest.items()
    ]
    if panels:
        end_to_end_chart.draw(path, panels)
    return bool(panels)


def publish(path: Path) -> str:
    """Markdown and chart beside the JSON; returns the Markdown."""
    runs = load(path)
    stem = path.with_suffix("")
    has_chart = chart(stem.with_suffix(".png"), runs)
    lines = [f"# {stem.name}", "", "Ratios are taken within a run.", ""]
    lines += [f"![tokens/s]({stem.name}.png)", ""] if has_chart else []
    lines += [f"- {verdict}" for verdict in verdicts(runs)] + [""]
    text = "\n".join([*lines, *(section(run) for run in runs)])
    stem.with_suffix(".md").write_text(text)
    return text
