"""The walks of docs/how-a-step-works.md against a step: each function is called, in that order, by that row."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
import training
from support.ranks import on_ranks
from support.walks import PAGE, Row, code_of, tables, walks


def module_of(file: str) -> ModuleType:
    path = file.removesuffix(".py").removesuffix("/__init__")
    return importlib.import_module("fp8_ds." + path.replace("/", "."))


def code_objects(row: Row) -> list[CodeType]:
    """Those of a row's functions; of a class that of the method by which it is called."""
    found = []
    for name in row.functions:
        function: Any = attrgetter(name)(module_of(row.file))
        if isinstance(function, property):
            function = function.fget
        if inspect.isclass(function):
            function = function.forward if issubclass(function, torch.autograd.Function) else function.__call__
        found.append(inspect.unwrap(function).__code__)
    return found


class Calls:
    """Calls of the functions of a table.

    Attributes:
        found: (code object, row that called it: the nearest on the stack, None where there is none), by first calls.
    """

    def __init__(self, table: list[Row]) -> None:
        self.codes = {row.number: code_objects(row) for row in table}
        self.found: dict[tuple[CodeType, int | None], None] = {}
        self._row_of = {code: number for number, codes in self.codes.items() for code in codes}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        sys.setprofile(self._record)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in self._row_of:
            above = frame.f_back
            while above is not None and above.f_code not in self._row_of:
                above = above.f_back
            self.found[frame.f_code, None if above is None else self._row_of[above.f_code]] = None


def check(table: list[Row], calls: Calls) -> None:
    """A row's functions are called by the row that the page says, or by the row itself, after those of rows above."""
    found = list(calls.found)
    firsts = []
    for row in table:
        by = int(row.by) if row.by.isdigit() else None
        first, *others = calls.codes[row.number]
        assert (first, by) in found, row
        assert [code for code in others if (code, by) not in found and (code, row.number) not in found] == [], row
        firsts.append(found.index((first, by)))
    assert firsts == sorted(firsts), firsts


def take(tables: list[list[Row]], fp8: dict[str, Any], steps: int) -> None:
    """Check each table against the last of some training steps."""
    for table in tables:
        engine = training.build(training.ds_config(2, fp8))
        training.train(engine, steps - 1)
        calls = Calls(table)
        with calls.recorded():
            training.train(engine, 1, steps - 1)
        check(table, calls)
        training.destroy(engine)


@on_ranks(2)
def test_the_walk_of_an_amax_is_what_a_step_and_a_forward_do() -> None:
    take(next(iter(walks(PAGE.read_text()).values())), {}, steps=2)


@on_ranks(2)
def test_the_walk_of_a_gradient_is_what_a_backward_and_a_step_do() -> None:
    """The first step, in which the update is prepared."""
    take(list(walks(PAGE.read_text()).values())[1], {"optimizer": {"states": "fp8"}}, steps=1)


@on_ranks(2)
def test_parts_are_held_where_the_page_says() -> None:
    held = next(rows for head, *rows in tables(PAGE.read_text()) if head == ["what", "stages", "file", "class"])
    for stage in (2, 3):
        engine = training.build(training.ds_config(stage, {"optimizer": {"states": "fp8"}}))
        assert [name for name in vars(engine.optimizer) if "fp8" in name] == ["fp8"]
        places = SimpleNamespace(optimizer=engine.optimizer, p=next(iter(engine.fp8.weights.values())))
        what, num_checked = "", 0
        for place, stages, file, kind in held:
            what = code_of(place)[0] if place else what
            if str(stage) in stages:
                expected = attrgetter(code_of(kind)[0])(module_of(code_of(file)[0]))
                assert isinstance(attrgetter(what)(places), expected), (stage, what)
                num_checked += 1
        assert num_checked == 7
        training.destroy(engine)
