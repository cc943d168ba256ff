"""The walks of docs/how-a-step-works.md against the source. tests/distributed/test_walks.py takes them."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import pytest
from support.walks import PAGE, ROOT, Row, named, walks

from fp8_ds.engine.seams import SEAMS

LAYERS = ("zero", "optim", "nn", "ops", "comm", "numerics")
"""A call leads to the same package or to a later one."""
MAX_FILES = 12
TEXT = PAGE.read_text()
WALKS = walks(TEXT)
TABLES = [table for tables in WALKS.values() for table in tables]
WALK = pytest.mark.parametrize("title", WALKS)
TABLE = pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table[0].functions[0]}-{len(table)}")


@cache
def definitions(file: str) -> dict[str, list[Any]]:
    """Functions, classes and methods of a file, by dotted name; a property has several."""
    found: dict[str, list[Any]] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(prefix + node.name, []).append(node)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")

    path = ROOT / "fp8_ds" / file
    collect(ast.parse(path.read_text()).body if path.is_file() else [], "")
    return found


def plain(name: str) -> str:
    return name.rpartition(".")[2].strip("_")


def mentions(file: str, function: str) -> set[str]:
    """The names and attributes in a function's source."""
    nodes = [node for found in definitions(file)[function] for node in ast.walk(found)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return {plain(name) for name in names}


def unmentioned(rows: dict[int, Row], row: Row) -> list[str]:
    """Functions of a row that nothing before them names: the caller, what it calls first, or the row itself."""
    callers = [one for one in rows.values() if row.by.isdigit() and str(one.number) == row.by]
    siblings = [one for one in rows.values() if callers and one.by == row.by and one.number < row.number]
    before = [(one.file, name) for one in [*callers, *siblings] for name in one.functions]
    missing = []
    for function in row.functions:
        if before and plain(function) not in set().union(*(mentions(*one) for one in before)):
            missing.append(function)
        before.append((row.file, function))
    return missing


def left_before(table: list[Row]) -> list[int]:
    """Rows whose caller the walk has left: it is not the row above, nor its caller, that one's caller, and so on."""
    running: list[int] = []
    found = []
    for row in table:
        if not row.by.isdigit():
            running = [row.number]
        elif int(row.by) in running:
            running = [*running[: running.index(int(row.by)) + 1], row.number]
        else:
            found.append(row.number)
    return found


def returns(table: list[Row]) -> list[int]:
    """Rows of a file that has rows further up, not next to it, with another caller."""
    return [
        row.number
        for at, row in enumerate(table)
        for other in table[: max(at - 1, 0)]
        if other.file == row.file and table[at - 1].file != row.file and other.by != row.by
    ]


def test_what_the_page_names_is_in_the_file_that_it_names() -> None:
    found = named(TEXT)
    assert [(file, name) for file, name in found if name not in definitions(file)] == []
    assert len(found) > 60


def test_rows_are_numbered_through() -> None:
    for tables in WALKS.values():
        numbers = [row.number for table in tables for row in table]
        assert numbers == list(range(1, len(numbers) + 1))
    assert [len(tables) for tables in WALKS.values()] == [2, 1]


@WALK
def test_a_table_crosses_as_many_files_as_the_page_says_and_at_most_twelve(title: str) -> None:
    section = TEXT.partition(f"## {title}")[2].partition("\n## ")[0]
    said = [int(number) for number in re.findall(r"\b(\d+) files:", section)]
    assert said == [len({row.file for row in table}) for table in WALKS[title]]
    assert max(said) <= MAX_FILES


@TABLE
def test_callers_name_what_they_call(table: list[Row]) -> None:
    rows = {row.number: row for row in table}
    assert {row.number: missing for row in table if (missing := unmentioned(rows, row))} == {}


@TABLE
def test_a_walk_goes_down_a_call_or_on_to_the_next(table: list[Row]) -> None:
    assert left_before(table) == []


@TABLE
def test_a_file_comes_again_only_for_the_same_caller(table: list[Row]) -> None:
    assert returns(table) == []


@TABLE
def test_calls_lead_to_the_same_package_or_further_down(table: list[Row]) -> None:
    layer = {row.number: LAYERS.index(row.file.partition("/")[0]) for row in table}
    assert [row.number for row in table if row.by.isdigit() and layer[int(row.by)] > layer[row.number]] == []
    assert ", ".join(LAYERS) in TEXT


@TABLE
def test_what_deepspeed_calls_is_a_method_that_we_override(table: list[Row]) -> None:
    overridden = {seam.name.rpartition(".")[2] for seam in SEAMS if seam.kind == "override"}
    roots = [row for row in table if row.by == "DeepSpeed"]
    assert {plain(row.functions[0]) for row in roots} <= overridden
    assert all(row.by in ("DeepSpeed", "the model") for row in table if not row.by.isdigit())
