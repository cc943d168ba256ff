"""The tables of parallel_layers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel_layers_arms import PEERS


def report(rows: Sequence[Mapping[str, Any]], deaths: Sequence[str] = ()) -> str:
    """A table for each number of ranks: ms by cell and arm, the best peer over each of ours, or a dash where one of
    PEERS has no time; then the overlap; then failures.

    Args:
        rows: "ranks", the fields of a `Cell`, and what `measure` found.
        deaths: of ranks, each with how many there were and what ended them.
    """
    lines: list[str] = []
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    mine = [arm for arm in arms if arm.startswith("ours")]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        lines += [
            f"{ranks} ranks, ms forward and backward:",
            "",
            f"| | {' | '.join([*arms, *(f'best peer / {arm}' for arm in mine)])} |",
            "|---|" + "---|" * (len(arms) + len(mine)),
        ]
        own = [row for row in rows if row["ranks"] == ranks]
        for key in dict.fromkeys((row["part"], row["shape"], row["tokens"]) for row in own):
            ms = {row["arm"]: row.get("ms") for row in own if (row["part"], row["shape"], row["tokens"]) == key}
            peers = [value for arm, value in ms.items() if value and arm not in mine]
            is_fair = all(ms.get(peer) for peer in PEERS)
            cells = [f"{ms[arm]:.2f}" if ms.get(arm) else "failed" if arm in ms else "-" for arm in arms]
            cells += [f"{min(peers) / ms[arm]:.2f}" if is_fair and ms.get(arm) else "-" for arm in mine]
            lines.append(f"| {key[0]}, {key[1]}, {key[2]} tokens | {' | '.join(cells)} |")
        lines.append("")
    profiled = [row for row in rows if "hidden" in row]
    if profiled:
        lines += ["| ranks | part | tokens | arm | ms | GPU busy, ms | ms of gathers | hidden |", "|---|" + "---|" * 7]
        lines += [
            f"| {r['ranks']} | {r['part']}, {r['shape']} | {r['tokens']} | {r['arm']} | {r['ms']:.2f} | "
            f"{r.get('busy_ms', float('nan')):.2f} | {r['gather_ms']:.3f} | {r['hidden']:.0%} |"
            for r in profiled
        ]
    for row in (row for row in rows if "error" in row):
        cell = f"{row['ranks']} ranks, {row['arm']}, {row['part']}, {row['shape']}, {row['tokens']} tokens"
        lines += ["", f"FAILED {cell}", "```", row["error"], "```"]
    for death in deaths:
        lines += ["", "FAILED: a rank died, and what was left is not measured", "```", death, "```"]
    return "\n".join(lines) + "\n"
