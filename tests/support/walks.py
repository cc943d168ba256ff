"""The tables of docs/how-a-step-works.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-a-step-works.md"


class Row(NamedTuple):
    """One row of a walk.

    Attributes:
        by: the number of the row that calls it; a word where the call comes from elsewhere.
        file: below `fp8_ds/`.
        functions: in the order of their calls.
    """

    number: int
    by: str
    file: str
    functions: list[str]


def code_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table: its head, then its rows."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    split = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]
    return [[head, *rows] for head, _, *rows in split]


def named(text: str) -> list[tuple[str, str]]:
    """(file, function or class) of every table with a column for files."""
    found = []
    for head, *rows in tables(text):
        if "file" in head:
            at = head.index("file")
            found += [(code_of(row[at])[0], name) for row in rows for name in code_of(row[at + 1])]
    return found


def walks(text: str) -> dict[str, list[list[Row]]]:
    """The tables of each walk, by the title of its section."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        if title.startswith("Walk "):
            found[title] = [
                [Row(int(row[0]), row[1], code_of(row[2])[0], code_of(row[3])) for row in rows]
                for _, *rows in tables(body)
            ]
    return found
