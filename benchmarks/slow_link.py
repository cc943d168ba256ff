"""Step time over a slow network, with gathers in bf16 and in FP8: two hosts as network namespaces. Dated results.

    sudo python benchmarks/slow_link.py --out benchmarks/results
    sudo python benchmarks/slow_link.py --rates 300 --steps 4       # quick

Each host has one rank on CPU (gloo), `deepspeed --no_ssh` starts both, `tc` limits each direction of the cable between
them. The model is a byte-level Llama of 3.2 M linear weights, on batches of 4 sequences of 32 tokens: little to
compute, so that the network decides. Bytes are what the cable's own counters say.

Predictions, written before the first run. Nothing hides the network here (gloo on one core), so a step takes its time
on the free link plus its bytes in one direction over the rate. A gather moves half of the weights in each direction: 2
bytes a weight in ZeRO-2 (one gather) less 1 in FP8, halved: 1.6 MB saved a step; ZeRO-3 gathers twice and saves 3.2 MB.
Gradients are all-reduced or reduce-scattered in bf16, 6.6 MB in each direction if gloo does the latter by the former.
So at 100 Mbit/s ZeRO-3 falls from 13 to 10 MB, 1.1 to 0.85 s a step: 1.3 times as fast; ZeRO-2 from 10 to 8.2 MB: 1.2
times. At 30 Mbit/s the same factors, a little nearer to those of the bytes (1.33 and 1.2). On the free link FP8 is
slower, for a CPU has no FP8 arithmetic. FP8 reduce-scatters (an all-to-all of 1 byte a weight, half of it crosses)
leave 1.7 of the gradients' 6.6 MB: ZeRO-3 at 4.9 MB, 2.4 times as fast as bf16 at 30 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_io import ROOT, command_line, dated_stem, heading

MULTINODE = ROOT / "tests/multinode"
SIZE = {"dim": 256, "ffn_dim": 704, "num_layers": 4, "head_dim": 64}
ARMS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "FP8 gathers": {},
    "FP8 reduce-scatters too": {"zero": {"reduce_scatter": "fp8"}},
}
NUM_WARM = 2
"""Of train_cases.py: not timed."""


def cases(stages: list[int], steps: int) -> list[dict[str, Any]]:
    return [
        {"name": f"{stage}-{index}", "kind": "zero", "stage": stage, "fp8": fp8, "steps": steps, "size": SIZE}
        for stage in stages
        for index, fp8 in enumerate(ARMS.values())
    ]


def measure(hosts: Any, rate: float | None, stages: list[int], steps: int) -> list[dict[str, Any]]:
    """A row for each stage and arm at `rate` Mbit/s (None: the free link)."""
    from launchers import launch

    out = Path(tempfile.mkdtemp(prefix="out-", dir=hosts.folder))
    (out / "cases.json").write_text(json.dumps(cases(stages, steps)))
    hosts.limit(rate)
    try:
        launch(
            hosts, "no_ssh", MULTINODE / "train_cases.py", "--cases", out / "cases.json", "--out", out, timeout=1800.0
        )
    finally:
        hosts.limit(None)
    rows = []
    for stage in stages:
        for index, arm in enumerate(ARMS):
            found = json.loads((out / f"{stage}-{index}-rank0.json").read_text())
            rows.append(
                {
                    "mbit_per_s": rate,
                    "stage": stage,
                    "arm": arm,
                    "s_per_step": statistics.median(found["seconds"]),
                    "mb_per_step": found["cable"] / 2 / (steps - NUM_WARM) / 1e6,
                    "losses": found["losses"],
                }
            )
    return rows


def with_prediction(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `predicted_s`, own time on the free link plus bytes over the rate, and `speedup` over bf16."""
    free = {(row["stage"], row["arm"]): row["s_per_step"] for row in rows if row["mbit_per_s"] is None}
    bf16 = {(row["stage"], row["mbit_per_s"]): row["s_per_step"] for row in rows if row["arm"] == "bf16"}
    found = []
    for row in rows:
        key = (row["stage"], row["arm"])
        on_wire = 0.0 if row["mbit_per_s"] is None else row["mb_per_step"] * 8 / row["mbit_per_s"]
        speedup = bf16[row["stage"], row["mbit_per_s"]] / row["s_per_step"]
        found.append({**row, "predicted_s": free.get(key, float("nan")) + on_wire, "speedup": speedup})
    return found


def changed(rows: list[dict[str, Any]]) -> list[str]:
    """What had other losses at another rate; it must be nothing."""
    losses: dict[tuple[int, str], list[float]] = {}
    found = []
    for row in rows:
        key = (row["stage"], row["arm"])
        if losses.setdefault(key, row["losses"]) != row["losses"]:
            found.append(f"ZeRO-{row['stage']} {row['arm']} at {row['mbit_per_s']} Mbit/s")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| Mbit/s | ZeRO | | MB a step, each direction | s a step (median) | free link + bytes / rate | times bf16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = "free" if row["mbit_per_s"] is None else f"{row['mbit_per_s']:g}"
        lines.append(
            f"| {rate} | {row['stage']} | {row['arm']} | {row['mb_per_step']:.2f} | {row['s_per_step']:.3f} | "
            f"{row['predicted_s']:.3f} | {row['speedup']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[300, 100, 30], help="Mbit/s, beside the free link")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=8, help=f"{NUM_WARM} of them not timed")
    parser.add_argument("--out", type=Path, help="folder for the dated files; left out: printed only")
    args = parser.parse_args()
    sys.path.insert(0, str(MULTINODE))
    from hosts import Hosts, why_not

    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            rows = [row for rate in [None, *args.rates] for row in measure(hosts, rate, args.stages, args.steps)]
        finally:
            hosts.close()
    rows = with_prediction(rows)
    same = changed(rows)
    text = heading("Two hosts over a slow link") + table(rows) + "\n\n"
    text += f"Losses that the rate of the link changed: {', '.join(same) or 'none'}.\n"
    print(text)
    if args.out is not None:
        stem = dated_stem(args.out, "slow-link")
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"command": command_line(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
