"""Tables, pairs and picture of end_to_end.py, made from its JSON alone."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import step_profile
from results_io import dated_stem

from fp8_ds.tools.compare import MEAN_BOUND, UPPER_BOUND, Paired

NAME = "training"
"""Of the files. Those of before 2026-11-28, "end-to-end" and "gpt-parity-...", have speed and loss apart."""
LAST_SHARE = 0.1
"""Of the steps, over which training losses are averaged."""
MOST_OFF = 3.0
"""Times the spread of two bf16 runs by which an arm's loss may be off."""
_SMOOTHED = 10
"""Blocks of the picture's running mean."""


# --- files ---


def load(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, none where there is no file."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


def write(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """The file as a whole or not at all; a line a result, so that its curves do not fill pages."""
    lines = []
    for run in runs:
        about = {key: value for key, value in run.items() if key != "results"}
        results = ",\n".join(json.dumps(result) for result in run["results"])
        lines.append(json.dumps(about)[:-1] + ', "results": [\n' + results + "\n]}")
    part = path.with_suffix(".part")
    part.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n")
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
        newest = sorted(out.glob(f"*-{NAME}.json"))
        if not newest:
            raise SystemExit(f"report: expected a file *-{NAME}.json in {out.name}, got none. Name one.")
        return newest[-1]
    added = [run for path in sources for run in load(path)]
    if not added:
        raise SystemExit(f"report: expected files with runs, got {[path.name for path in sources]}.")
    path = dated_stem(out, NAME).with_name(max(run["id"] for run in added)[:10] + f"-{NAME}.json")
    write(path, each_once([*load(path), *added]))
    return path


def each_once(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By its second and its command: those side by side on one host may have begun in the same second."""
    found = {(run["id"], run["command"]): run for run in runs}
    return [found[key] for key in sorted(found)]


# --- numbers of one result ---


def good(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [result for result in run["results"] if "error" not in result]


def in_cuda_graphs(result: Mapping[str, Any]) -> bool:
    """What replayed graphs keep counts as reserved, and not as allocated."""
    return "+cudagraphs" in result["arm"]


def late_loss(result: Mapping[str, Any]) -> float:
    """Mean training loss of the last tenth of the steps, at least of the last block."""
    first = (1 - LAST_SHARE) * result["last_steps"][-1]
    late = [loss for step, loss in zip(result["last_steps"], result["losses"], strict=True) if step > first]
    return fmean(late or result["losses"][-1:])


def held_out(result: Mapping[str, Any]) -> float:
    """Held-out loss after the last step."""
    loss: float = result["held_out"][-1][1]
    return loss


def bases(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]] = ()) -> dict[int, Mapping[str, Any]]:
    """By seed: the reference's run, of this run's results or, by `--base`, of the one of `runs` that is named there."""
    of_reference = (r for r in good(run) if r["arm"] == run["reference"] and not r["is_trunk"])
    own = {r["seed"]: r for r in of_reference if not r["is_second"]}
    named = run.get("base", {})
    others = [bases(other) for other in runs if other["id"] in named.values()]
    found = {seed: r for other in others for seed, r in other.items() if r["arm"] == run["reference"]}
    return {seed: found[seed] for seed in map(int, named) if seed in found} | own


SAME_IN_BASE = ("mode", "model", "steps", "trunk_steps", "cross_entropy", "clip", "text")


def base_runs(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]], seeds: Iterable[int]) -> dict[str, str]:
    """By seed: id of the newest of `runs` that trained the reference on this run's text, model and steps.

    Raises:
        SystemExit: a seed has none.
    """
    alike = [other for other in runs if all(other[key] == run[key] for key in SAME_IN_BASE)]
    found = {seed: other["id"] for other in alike for seed, r in bases(other).items() if r["arm"] == run["reference"]}
    if missing := sorted(set(seeds) - set(found)):
        raise SystemExit(
            f"--base: expected runs of {run['reference']} for the seeds {missing} with the same "
            f"{', '.join(SAME_IN_BASE)}, got none. The text here: {run['text']}. Leave --base out to train them."
        )
    return {str(seed): found[seed] for seed in seeds}


def spread(run: Mapping[str, Any]) -> float | None:
    """Per cent by which the training loss of the second bf16 run is from that of the first; None: there are no two."""
    second = next((r for r in good(run) if r["is_second"]), None)
    base = None if second is None else bases(run).get(second["seed"])
    return None if second is None or base is None else abs(percent(late_loss(second), late_loss(base)))


def percent(value: float, base: float) -> float:
    return 100 * (value / base - 1)


def is_timed(run: Mapping[str, Any]) -> bool:
    """Whether the runs had their GPUs to themselves."""
    return run.get("per_gpu", 1) == 1


def line(result: Mapping[str, Any]) -> str:
    """What is printed when a run is done."""
    name = f"{result['arm']}, seed {result['seed']}"
    if "error" in result:
        return f"{name}: FAILED after {result['wall_s']:.0f} s: {result['error'].splitlines()[0]}"
    if "losses" not in result:
        return f"{name}: profiled, {result['wall_s']:.0f} s"
    return (
        f"{name}: {result['step_ms']:.1f} ms, {result['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, "
        f"{result['peak_allocated_gib']:.1f} GiB, loss {late_loss(result):.4f}, held out {held_out(result):.4f}, "
        f"{result['wall_s']:.0f} s"
    )


# --- tables ---


def training_table(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]] = ()) -> str:
    """A row a run: speed, memory, and the loss beside that of bf16 on the same batches."""
    base_of, noise = bases(run, runs), spread(run)
    speed = [r["tokens_per_second_per_gpu"] for r in good(run) if r["arm"] == run["reference"] and not r["is_trunk"]]
    lines = [
        f"| arm | seed | ms/step | tokens/s a GPU | of {run['reference'] or 'the reference'} | peak GiB allocated / "
        "reserved | training loss, last tenth | % of bf16's | held out | % of bf16's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in run["results"]:
        name = r["arm"] + (" (trunk)" if r["is_trunk"] else " (other initial weights)" if r["is_second"] else "")
        if "error" in r:
            reason = r["error"].splitlines()[0][:200].replace("|", "/")
            lines.append(f"| {name} | {r['seed']} | **{reason}** |" + " |" * 7)
            continue
        base = None if r["is_trunk"] else base_of.get(r["seed"])
        off = ["", ""] if base is None or base is r else differences(r, base)
        if noise is not None and off[0] and not r["is_second"] and abs(float(off[0])) > MOST_OFF * noise:
            off[0] = f"**{off[0]}, off**"
        in_bf16 = f" ({r['step_ms_of_bf16_steps']:.1f} in bf16)" if r["step_ms_of_bf16_steps"] else ""
        ratio = f"{r['tokens_per_second_per_gpu'] / fmean(speed):.3f}" if speed and not r["is_trunk"] else ""
        speed_of = f"{r['step_ms']:.1f}{in_bf16} | {r['tokens_per_second_per_gpu']:,.0f} | {ratio}"
        timed = speed_of if is_timed(run) else "not timed | | "
        allocated = "in graphs" if in_cuda_graphs(r) else f"{r['peak_allocated_gib']:.2f}"
        lines.append(
            f"| {name} | {r['seed']} | {timed} | {allocated} / {r['peak_reserved_gib']:.2f} | {late_loss(r):.4f} "
            f"| {off[0]} | {held_out(r):.4f} | {off[1]} |"
        )
    if noise is not None:
        lines += ["", f"Two bf16 runs from other initial weights are {noise:.2f} % apart; an arm {MOST_OFF:g} times as "
                  "far from the first is marked as off."]  # fmt: skip
    if noise is not None and is_timed(run):
        lines += [f"The reference drifted by {percent(speed[-1], speed[0]):+.2f} % in speed from first to last."]
    return "\n".join([*lines, *_in_eager(run)])


def differences(result: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Training and held-out loss, in signed per cent of the base's."""
    return [f"{percent(of(result), of(base)):+.3f}" for of in (late_loss, held_out)]


def pairs(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], dict[str, dict[int, tuple[float, float]]]]:
    """By (model, reference, steps), by arm, by seed: per cent by which training and held-out loss are above bf16's.

    Of the same seed in several runs the last counts.
    """
    found: dict[tuple[str, str, int], dict[str, dict[int, tuple[float, float]]]] = {}
    for run in runs:
        if run["mode"] != "train" or not run["reference"]:
            continue
        base_of = bases(run, runs)
        arms = found.setdefault((run["model"]["name"], run["reference"], run["steps"]), {})
        for r in good(run):
            base = base_of.get(r["seed"])
            if base is not None and base["arm"] != r["arm"] and not r["is_trunk"]:
                values = tuple(percent(of(r), of(base)) for of in (late_loss, held_out))
                arms.setdefault(r["arm"], {})[r["seed"]] = values  # type: ignore[assignment]
    return {key: arms for key, arms in found.items() if any(len(seeds) > 1 for seeds in arms.values())}


def pair_tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Of arms with several seeds: each pair, the mean, its 95 % interval and the verdict."""
    lines = []
    for (model, reference, steps), arms in pairs(runs).items():
        lines += [f"## Pairs: {model}, {steps} steps, above {reference}", ""]
        lines += ["| arm | held out, % by seed | mean (95 % interval) | verdict | training loss, last tenth, % |"]
        lines += ["|---|---|---|---|---|"]
        for arm, by_seed in arms.items():
            training, ends = (Paired(tuple(by_seed[seed][k] for seed in sorted(by_seed))) for k in (0, 1))
            each = ", ".join(f"{value:+.3f}" for value in ends.by_pair)
            low, high = ends.mean - ends.half_width, ends.mean + ends.half_width
            lines.append(
                f"| {arm} | {each} | {ends.mean:+.3f} ({low:+.3f} to {high:+.3f}) | {ends.verdict()} "
                f"| {', '.join(f'{value:+.3f}' for value in training.by_pair)} |"
            )
        lines += [
            "",
            f"Parity: a mean of at most {MEAN_BOUND} %, its interval's upper end at most {UPPER_BOUND} %.",
            "",
        ]
    return "\n".join(lines)


def profile_tables(run: Mapping[str, Any]) -> str:
    """Every profiled arm."""
    parts = [step_profile.table(r["arm"], r) for r in good(run)]
    parts += [f"{line}\n" for line in _in_eager(run) if line]
    parts += [f"{r['arm']}: **{r['error'].splitlines()[0]}**\n" for r in run["results"] if "error" in r]
    return "\n".join(parts)


def _in_eager(run: Mapping[str, Any]) -> list[str]:
    """What torch.compile gave up on, a paragraph an arm."""
    told = [
        f"**In eager, past torch's limit**: {', '.join(r['in_eager'])}, in {r['arm']}"
        for r in good(run)
        if r.get("in_eager")
    ]
    return [line for one in told for line in ("", one)]


def section(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]] = ()) -> str:
    """One run: what it was, its table, what was left out."""
    m, box = run["model"], run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in box["versions"].items())
    zero = ", ".join(f"{key} {value}" for key, value in run["zero_optimization"].items())
    attention = "; ".join(sorted({r["attention"] for r in good(run) if "attention" in r}))
    chunks = f" with chunk_mem_const {run['chunk_mem_const']}" if run["chunk_mem_const"] != 1 else ""
    sharing = "" if is_timed(run) else f" {run['per_gpu']} runs shared a GPU, so none is timed."
    trunk = f" after {run['trunk_steps']} in bf16, which they share" if run["trunk_steps"] else ""
    if base := run.get("base"):
        trunk = trunk.replace("they", "the arms")
        sharing += f" Losses beside {run['reference']}'s of the runs {', '.join(sorted(set(base.values())))}"
        sharing += ", whose trunks were others of the same seeds." if trunk else "."
    lines = [
        f"## {m['name']}, {run['steps']} steps{trunk} ({run['id']})",
        "",
        f"`{run['command']}` on {box['num_gpus']} x {box['device']}; {versions}, Python {box['python']}, CUDA "
        f"{box['cuda']}.",
        f"{m['layers']} layers, hidden {m['hidden']}, ffn {m['ffn']}, vocab {m['vocab']}, seq {m['seq']}, micro-batch "
        f"{m['micro_batch']}; clip {run['clip']:g}; cross entropy {run['cross_entropy']}{chunks}; attention "
        f"{run['attention']} ({attention}). All DeepSpeed arms: {zero}.{sharing}",
        f"Text: {run['text']}.",
        "",
        profile_tables(run) if run["mode"] == "profile" else training_table(run, runs),
        "",
        *(f"- {skipped}" for skipped in run["skipped"]),
    ]
    return "\n".join(lines) + "\n"


# --- everything ---


def curves(run: Mapping[str, Any], runs: Iterable[Mapping[str, Any]] = ()) -> dict[str, tuple[list[int], list[float]]]:
    """By name: steps, and per cent by which the training loss is above the reference's, in a running mean."""
    base_of = bases(run, runs)
    found = {}
    for r in good(run):
        base = base_of.get(r["seed"])
        if base is None or base is r or r["is_trunk"] or "losses" not in r or len(r["losses"]) <= 2 * _SMOOTHED:
            continue
        off = [percent(mine, theirs) for mine, theirs in zip(r["losses"], base["losses"], strict=False)]
        means = [fmean(off[k - _SMOOTHED : k]) for k in range(_SMOOTHED, len(off) + 1)]
        name = f"{r['arm']}, seed {r['seed']}" + (", other initial weights" if r["is_second"] else "")
        found[name] = (r["last_steps"][_SMOOTHED - 1 : len(off)], means)
    return found


def draw(path: Path, runs: Sequence[Mapping[str, Any]]) -> bool:
    """A panel a model: how far each arm's training loss is from bf16's. False if there is nothing to show."""
    panels: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for run in runs:
        if run["mode"] == "train" and (found := curves(run, runs)):
            title = f"{run['model']['name']}, {run['steps']} steps: training loss above {run['reference']}, %"
            panels.setdefault(title, {}).update(found)
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(len(panels), 1, figsize=(10, 4 * len(panels)), squeeze=False, layout="constrained")
    for axis, (title, found) in zip(axes[:, 0], panels.items(), strict=True):
        for name, (steps, values) in found.items():
            axis.plot(steps, values, label=name if len(name) < 70 else name[:67] + "...", linewidth=1)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
    with Image.open(path) as image:  # 64 colours: a third of the bytes
        image.convert("RGB").quantize(64).save(path, optimize=True)
    return True


def publish(path: Path) -> str:
    """Markdown and picture beside the JSON; returns the Markdown."""
    runs = load(path)
    stem = path.with_suffix("")
    lines = [f"# {stem.name}", "", "Ratios and differences are taken within a run.", ""]
    if draw(stem.with_suffix(".png"), runs):
        lines += [f"![training losses beside bf16's]({stem.name}.png)", ""]
    text = "\n".join([*lines, pair_tables(runs), *(section(run, runs) for run in runs)])
    stem.with_suffix(".md").write_text(text)
    return text
