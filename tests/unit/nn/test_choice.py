"""The table of measured times: what it answers, the files it lives in, and the plan that follows from it."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_ds
from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.nn import choice, layer_table, make_plan, measure
from fp8_ds.nn.choice import Book, cases_of, choose, worth_fp8
from fp8_ds.nn.layer_table import Case, LayerTable, Machine, Times, cache_file
from fp8_ds.nn.measure import Taken, cuda_clock, make_steps, time_case
from fp8_ds.nn.recipe import Recipe
from fp8_ds.nn.sources import code_hash

CPU = torch.device("cpu")
HERE = Machine.of(CPU)
H200 = Machine(device="NVIDIA H200", torch_version="2.11.0", cuda_version="13.0", code="0123456789ab")
SHIPPED = sorted(choice.SHIPPED.glob("*.json"))


def case(m: int = 4096, k: int = 64, n: int = 128, **more: Any) -> Case:
    return Case(**{"recipe": "tensorwise", "grad_dtype": "e5m2", "backend": "torch", "m": m, "k": k, "n": n, **more})


def times(fp8_us: float, bf16_us: float, fp8_host_us: float = 0.1, bf16_host_us: float = 0.1) -> Times:
    return Times(fp8_us=fp8_us, bf16_us=bf16_us, fp8_host_us=fp8_host_us, bf16_host_us=bf16_host_us)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8_DS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache"


class Bench:
    """What measures in a Book's stead: notes the cases, and gives 1 us against 2."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.said: list[str] = []

    def __call__(self, measured: Case) -> Times:
        self.cases.append(measured)
        return times(1, 2)

    def book(self) -> Book:
        return Book(CPU, self.said.append, self)


# --- what the table answers ---


def test_times_between_two_token_counts_lie_on_their_line() -> None:
    table = LayerTable(HERE, {case(m=1024): times(100, 80, 30, 20), case(m=2048): times(140, 160, 34, 16)})
    assert table.lookup(case(m=1024)) == times(100, 80, 30, 20)
    assert table.lookup(case(m=1280)) == times(110, 100, 31, 19)
    table.times[case(m=1280)] = times(7, 8)
    assert table.lookup(case(m=1280)) == times(7, 8)
    assert table.lookup(case(m=1152)) == times(53.5, 44, 15.05, 10.05)


@pytest.mark.parametrize(
    "asked",
    [
        {"m": 512},
        {"m": 8192},
        {"m": 3000},
        {"m": 1280, "k": 65},
        {"m": 1280, "n": 129},
        {"m": 1280, "recipe": "delayed"},
        {"m": 1280, "grad_dtype": "e4m3"},
        {"m": 1280, "backend": "reference"},
        {"m": 1280, "bias": True},
        {"m": 1280, "frozen": True},
        {"m": 1280, "fast_accumulation": "all"},
    ],
    ids=str,
)
def test_the_table_is_silent_outside_its_rows_and_over_gaps_of_more_than_two(asked: dict[str, Any]) -> None:
    rows = {case(m=m): times(m, m) for m in (1024, 2048, 4097)}
    assert LayerTable(HERE, rows).lookup(case(**asked)) is None


def test_a_plan_keeps_in_fp8_what_is_faster_there_and_says_by_how_much() -> None:
    model = nn.ModuleDict({"fast": nn.Linear(64, 128), "slow": nn.Linear(64, 64, bias=False)})
    model["even"] = nn.Linear(128, 64)
    model["even"].weight.requires_grad_(False)
    model["lm_head"] = nn.Linear(64, 96)
    config = LinearConfig(recipe="delayed", layer_choice="measured", tokens=4096, frozen="fp8")
    plan = make_plan(model, config)
    cases = cases_of(model, plan, config)
    assert cases == {
        "fast": case(bias=True, recipe="delayed"),
        "slow": case(n=64, recipe="delayed"),
        "even": case(k=128, n=64, bias=True, frozen=True, recipe="delayed"),
    }
    known = {cases["fast"]: times(410.4, 655), cases["slow"]: times(57, 41), cases["even"]: times(30, 30)}
    chosen = choose(plan, cases, known, worth_fp8(dict.fromkeys(cases.values(), 1), known))
    assert [(row.fqn, row.converted, row.reason) for row in chosen.layers] == [
        ("fast", True, "fp8: 410 us against 655 us at M 4096"),
        ("slow", False, "bf16 is faster: 41 us against 57 us at M 4096"),
        ("even", False, "bf16 is faster: 30 us against 30 us at M 4096"),
        ("lm_head", False, "filter_fqns"),
    ]
    assert "slow (bf16 is faster: 41 us against 57 us at M 4096)" in chosen.describe()
    assert type(chosen).from_state(json.loads(json.dumps(chosen.to_state()))) == chosen
    assert chosen.others is plan.others is not None


@pytest.mark.parametrize(
    ("recipe", "keys", "found"),
    [
        ("tensorwise", {"fast_accumulation": "all"}, "all"),
        ("tensorwise", {"fast_accumulation": "output"}, None),
        ("tensorwise", {}, None),
        ("blockwise", {}, None),
        ("blockwise", {"fast_accumulation": "none"}, None),
    ],
)
def test_the_default_accumulation_of_a_recipe_is_the_one_that_rows_do_not_name(
    recipe: str, keys: dict[str, Any], found: str | None
) -> None:
    model = nn.Sequential(nn.Linear(64, 128))
    config = LinearConfig.model_validate({"recipe": recipe, "layer_choice": "measured", "tokens": 4096, **keys})
    (kind,) = cases_of(model, make_plan(model, config), config).values()
    assert kind.fast_accumulation == found
    asked = kind.linear_config()
    assert (asked.recipe, asked.fast_accumulation) == (recipe, config.fast_accumulation)
    measured, _ = make_steps(kind.model_copy(update={"m": 16}), CPU)
    assert measured.module.fp8_recipe.fast_gemms == config.fast_gemms


# --- host and device ---

BIG, SMALL = case(n=128), case(n=32)


def test_a_model_that_the_device_is_busy_with_takes_every_linear_that_is_faster_on_it() -> None:
    known = {BIG: times(2600, 4200, 1100, 200), SMALL: times(200, 280, 1100, 200)}
    assert worth_fp8({BIG: 3, SMALL: 2}, known) == {BIG, SMALL}
    assert worth_fp8({SMALL: 2}, known) == set()  # launching alone takes longer than bf16 does


def test_a_host_that_is_late_takes_in_what_saves_most_for_what_it_costs_the_host() -> None:
    known = {BIG: times(1300, 2100, 1100, 200), SMALL: times(110, 140, 1100, 200)}
    # All in FP8: host 7 x 1100, device 4120. The large ones alone: host 3 x 1100 + 4 x 200, device 4460. None: 6860.
    assert worth_fp8({BIG: 3, SMALL: 4}, known) == {BIG}
    assert worth_fp8({BIG: 3, SMALL: 4}, {**known, SMALL: times(110, 140, 250, 200)}) == {BIG, SMALL}


def test_where_the_host_is_late_in_bf16_already_nothing_is_worth_fp8() -> None:
    known = {BIG: times(100, 190, 250, 200), SMALL: times(10, 20, 250, 200)}
    assert worth_fp8({BIG: 4, SMALL: 4}, known) == set()


def test_linears_that_the_host_launches_no_later_in_fp8_come_in_first() -> None:
    # BIG costs the host nothing and is enough; with SMALL the host would be the slower one, without BIG the device.
    known = {BIG: times(100, 390, 150, 200), SMALL: times(10, 300, 900, 200)}
    assert worth_fp8({BIG: 4, SMALL: 1}, known) == {BIG}


def test_every_set_of_a_few_kinds_is_tried() -> None:
    kinds = [case(n=16 * (i + 1)) for i in range(4)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows = torch.rand(len(kinds), 5, generator=generator).tolist()
        known = {
            c: times(100 * a + 1, 200 * b + 1, 150 * x + 50 * y + 1, 50 * y + 1)
            for c, (a, b, x, y, _) in zip(kinds, rows, strict=True)
        }
        counts = {c: 1 + int(8 * row[4]) for c, row in zip(kinds, rows, strict=True)}

        def step_us(in_fp8: Any, known: Any = known, counts: Any = counts) -> float:
            device = sum(n * (known[c].fp8_us if c in in_fp8 else known[c].bf16_us) for c, n in counts.items())
            host = sum(n * (known[c].fp8_host_us if c in in_fp8 else known[c].bf16_host_us) for c, n in counts.items())
            return max(device, host)

        least = min(step_us({c for i, c in enumerate(kinds) if bits >> i & 1}) for bits in range(16))
        assert step_us(worth_fp8(counts, known)) == pytest.approx(least)


def test_of_many_kinds_those_come_in_that_save_most_for_what_they_cost_the_host() -> None:
    kinds = [case(n=16 * (i + 1)) for i in range(30)]
    known = {}
    for i, c in enumerate(kinds):  # what is saved for a microsecond grows with i; times on both sides do not
        fp8_us, cost_us, host_us = 20 + 37 * i % 60, 50 + 53 * i % 100, 5 + 11 * i % 10
        known[c] = times(fp8_us, fp8_us + (0.1 + i / 100) * cost_us, host_us + cost_us, host_us)
    chosen = worth_fp8(dict.fromkeys(kinds, 1), known)
    assert chosen == set(kinds[-len(chosen) :]) and 5 < len(chosen) < 25


def test_a_layer_that_the_host_keeps_in_bf16_says_so() -> None:
    plan = make_plan(nn.Sequential(nn.Linear(64, 128, bias=False)), LinearConfig(filter_fqns=()))
    known = {case(): times(110, 140, 1100, 200)}
    (row,) = choose(plan, {"0": case()}, known, worth_fp8({case(): 1}, known)).layers
    assert not row.converted
    assert row.reason == (
        "bf16: the GPU would wait for the host, which launches it in 1100 us, in bf16 in 200 us; the GPU takes "
        "110 us against 140 us at M 4096"
    )


# --- files ---


def test_a_table_reads_back_as_it_was_written_one_row_a_line(tmp_path: Path) -> None:
    rows = {case(m=m, recipe=recipe): times(m / 3, m) for m in (2048, 512, 1024) for recipe in ("rowwise", "delayed")}
    path = tmp_path / "new" / "table.json"
    LayerTable(H200, rows).write(path)
    assert LayerTable.read(path).times == rows and LayerTable.read(path).machine == H200
    assert len(path.read_text().splitlines()) == 2 + len(rows)
    assert [row["case"]["m"] for row in json.loads(path.read_text())["rows"]] == [512, 1024, 2048] * 2


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "table.json"
    LayerTable(HERE, {case(): times(1, 2)}).write(path)

    def full(self: Path, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        LayerTable(HERE, {}).write(path)
    assert LayerTable.read(path).times == {case(): times(1, 2)}
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_named_by_device_versions_and_code_and_lies_in_the_cache_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "layer-table-v3-nvidia-h200-torch2.11.0-cuda13.0-code0123456789ab.json"
    assert cache_file(H200) == cache / name
    monkeypatch.delenv("FP8_DS_CACHE")
    monkeypatch.setenv("HOME", "/somebody")
    assert cache_file(H200) == Path("/somebody/.cache/fp8_ds") / name


def test_what_is_missing_is_measured_once_and_kept(cache: Path) -> None:
    first = Bench()
    LayerTable(HERE, {case(): times(5, 6)}).write(cache_file(HERE))
    assert first.book().times_of([case(), case(k=80)]) == {case(): times(5, 6), case(k=80): times(1, 2)}
    assert first.cases == [case(k=80)]
    (line,) = first.said
    assert line.startswith("fp8: measuring 1 kinds of linear at 4096 tokens on cpu") and str(cache) in line
    second = Bench()
    assert second.book().times_of([case(), case(k=80)]) == {case(): times(5, 6), case(k=80): times(1, 2)}
    assert second.cases == second.said == []


def test_rows_that_another_process_adds_meanwhile_are_kept() -> None:
    class Other(Bench):
        def __call__(self, measured: Case) -> Times:
            LayerTable(HERE, {case(n=48): times(3, 4)}).write(cache_file(HERE))
            return super().__call__(measured)

    Other().book().times_of([case()])
    assert LayerTable.read(cache_file(HERE)).times == {case(): times(1, 2), case(n=48): times(3, 4)}


ROW = '{"case": {"recipe": "a", "grad_dtype": "b", "backend": "c", "m": 1, "k": 1, "n": 1}, "times": %s}'
TIMES = '{"fp8_us": 7, "bf16_us": 1, "fp8_host_us": 1, "bf16_host_us": 1}'
MACHINE = HERE.model_dump_json()
HEAD = f'"machine": {MACHINE}, "measured": "2026-11-23"'


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"version": 1, "rows": [',
        "[]",
        f'{{"version": 2, {HEAD}, "rows": []}}',
        f'{{"version": 3, "machine": {MACHINE}, "rows": []}}',
        f'{{"version": 3, {HEAD}, "rows": [{ROW % {}}]}}',
        f'{{"version": 3, {HEAD}, "rows": [%s]}}' % (ROW % TIMES.replace("7", "NaN")),
        f'{{"version": 3, {HEAD}, "rows": [%s]}}' % (ROW % TIMES.replace("7", '"7"')),
    ],
    ids=["empty", "cut off", "a list", "of another version", "undated", "without times", "with a NaN", "with a string"],
)
def test_a_file_that_is_no_table_is_reported_measured_again_and_replaced(text: str) -> None:
    path = cache_file(HERE)
    path.parent.mkdir()
    path.write_text(text)
    bench = Bench()
    assert bench.book().times_of([case()]) == {case(): times(1, 2)}
    assert len(bench.said) == 2
    assert f"{path}: expected a layer table, got " in bench.said[0]
    assert LayerTable.read(path).times == {case(): times(1, 2)}


def test_a_cache_that_cannot_be_written_is_said_and_the_times_are_used(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    bench = Bench()
    assert bench.book().times_of([case()]) == {case(): times(1, 2)}
    assert "is not kept" in bench.said[-1] and "Set FP8_DS_CACHE" in bench.said[-1]


def test_tables_of_another_machine_or_version_are_not_used() -> None:
    for change in ("device", "torch_version", "cuda_version"):
        other = HERE.model_copy(update={change: "other"})
        LayerTable(other, {case(): times(9, 9)}).write(choice.SHIPPED / f"{change}.json")
    for copied_by_hand in (H200, HERE.model_copy(update={"code": "other"})):
        LayerTable(copied_by_hand, {case(): times(9, 9)}).write(cache_file(HERE))
        assert Bench().book().times_of([case()]) == {case(): times(1, 2)}
        assert LayerTable.read(cache_file(HERE)).machine == HERE, "replaced, so it is not measured in each start"


def test_what_was_measured_with_other_layers_or_kernels_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Bench()
    first.book().times_of([case()])
    monkeypatch.setattr(layer_table, "code_hash", lambda: "after an upgrade")
    second = Bench()
    second.book().times_of([case()])
    assert second.cases == first.cases == [case()]
    monkeypatch.undo()
    assert Machine.of(CPU) == HERE


def test_the_hash_of_the_code_is_another_after_any_change_of_layers_or_kernels_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    package = tmp_path / "fp8_ds"
    texts = {"nn/linear.py": "a", "ops/gemm/scaled_mm.py": "bc", "zero/stage3.py": "d", "nn/tables/a.json": "e"}
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    def now() -> str:
        code_hash.cache_clear()
        return code_hash(package)

    before = now()
    assert len(before) == 12 and before == now()
    for name, text in texts.items():
        (package / name).write_text(text + "!")
        assert (now() == before) == (not name.endswith(".py") or name.startswith("zero")), name
        (package / name).write_text(text)
    assert now() == before
    (package / "ops/gemm/scaled_mm.py").rename(package / "ops/scaled_mm.py")
    assert now() != before
    code_hash.cache_clear()
    assert HERE.code == code_hash() == code_hash(Path(fp8_ds.__file__).parent)
    assert code_hash.cache_info().hits == 0 and code_hash() == HERE.code and code_hash.cache_info().hits == 1


def test_a_shipped_table_of_this_machine_saves_the_measuring_but_own_times_come_first() -> None:
    LayerTable(HERE, {case(): times(9, 9), case(k=80): times(8, 8)}).write(choice.SHIPPED / "any-name.json")
    LayerTable(HERE, {case(): times(5, 6)}).write(cache_file(HERE))
    bench = Bench()
    assert bench.book().times_of([case(), case(k=80)]) == {case(): times(5, 6), case(k=80): times(8, 8)}
    assert bench.cases == []


def test_where_nothing_can_be_measured_a_missing_row_is_refused_with_the_remedy() -> None:
    LayerTable(HERE, {case(): times(5, 6)}).write(cache_file(HERE))
    book = Book(CPU, print, None)
    assert book.times_of([case()]) == {case(): times(5, 6)}
    with pytest.raises(ConfigError, match=r'^fp8\.linear\.layer_choice: .*got "measured"\. .*n=130.* Write "all"') as e:
        book.times_of([case(), case(n=130)])
    assert str(cache_file(HERE)) in str(e.value)


def test_a_table_that_ships_is_used_whatever_its_code_and_rank_0_says_which_and_of_what_day() -> None:
    path, day = choice.SHIPPED / "any.json", date(2026, 11, 23)
    for code, told in ((HERE.code, "this code"), ("old", f"other layers and kernels (code old, this is {HERE.code})")):
        LayerTable(HERE.model_copy(update={"code": code}), {case(): times(9, 9)}, day).write(path)
        bench = Bench()
        assert bench.book().times_of([case()]) == {case(): times(9, 9)} and bench.cases == []
        assert bench.said == [
            "fp8: 1 kinds of linear have times from any.json, which ships with fp8_ds: measured on 2026-11-23 with "
            f"{told}; `python benchmarks/layer_table.py` measures anew"
        ]
    assert bench.book().times_of([case(k=80)]) == {case(k=80): times(1, 2)}
    assert not any("any.json" in line for line in bench.said[1:]), "nothing was taken from it"


def test_a_table_is_dated_by_its_last_rows() -> None:
    table = LayerTable(HERE, {case(): times(5, 6)}, date(2020, 1, 1))
    table.write(cache_file(HERE))
    assert LayerTable.read(cache_file(HERE)).measured == date(2020, 1, 1)
    Bench().book().times_of([case(n=48)])
    assert LayerTable.read(cache_file(HERE)).measured >= date(2026, 1, 1)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_of_a_table_that_ships_the_page_says_code_day_and_versions(path: Path, root: Path) -> None:
    """So it cannot be replaced, nor said to be of today's kernels, without the page."""
    table, page = LayerTable.read(path), (root / "docs/layer-choice.md").read_text()
    machine = table.machine
    (line,) = (line for line in page.splitlines() if f"fp8_ds/nn/tables/{path.name}`, {len(table.times)} rows" in line)
    for said in (machine.device.split()[-1], f"torch {machine.torch_version[:4]}", f"CUDA {machine.cuda_version}"):
        assert said in line
    assert f"`{machine.code}`" in line and str(table.measured) in line
    assert ("older layers and kernels" in line) == (machine.code != HERE.code)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_table_that_ships_covers_powers_of_two(path: Path) -> None:
    table, llama = LayerTable.read(path), case(k=4096, n=14336)
    assert all(table.lookup(llama.model_copy(update={"m": m})) for m in (512, 3000, 32768))


def test_a_table_ships_for_the_h200() -> None:
    assert [path.name for path in SHIPPED] == ["nvidia-h200.json"]


# --- what is measured ---

RECIPES = ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_is_the_work_of_a_linear_under_zero_each_time(
    recipe: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cast(self: Recipe, weight: torch.Tensor) -> None:
        raise AssertionError("a weight under ZeRO is in FP8 already")

    for kind in (Recipe, *Recipe.__subclasses__()):
        if "quantize_weight" in vars(kind):
            monkeypatch.setattr(kind, "quantize_weight", cast)
    before = torch.get_rng_state()
    fp8, bf16 = make_steps(case(m=128, k=128, n=256, recipe=recipe, bias=True, frozen=frozen), CPU)
    grads: list[tuple[int, ...]] = []
    for step in (fp8, bf16):
        for p in step.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: grads.append(tuple(p.grad.shape)))
    runs = []
    for step in (fp8, fp8, bf16, bf16):
        with Count() as count:
            step()
        runs.append(count.names)
        assert all(p.grad is None for p in step.module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(grads) == ([] if frozen else [(256,)] * 4 + [(256, 128)] * 4)
    # The second call quantises the input again: nothing is remembered of the first.
    assert runs[0] == runs[1] and runs[2] == runs[3]
    assert any("quantize" in name for name in runs[0]) and not any("fp8_ds" in name for name in runs[2])
    assert any("scaled_mm" in name for name in runs[0])
    gemms = [name for name in runs[2] if "mm" in name]
    assert len(gemms) == (2 if frozen else 3)


def test_delayed_scaling_is_measured_after_its_first_update() -> None:
    fp8, _ = make_steps(case(m=32, k=32, n=32, recipe="delayed"), CPU)
    assert fp8.module.fp8_recipe.history.ready  # type: ignore[union-attr]


def test_times_are_the_clocks_in_the_order_of_the_steps() -> None:
    seen: list[str] = []

    def clock(steps: Any) -> list[Taken]:
        seen.extend(type(step.module).__name__ for step in steps)
        return [Taken(11.0, 3.0), Taken(22.0, 4.0)]

    assert time_case(case(m=16, k=16, n=16), CPU, clock) == times(11, 22, 3, 4)
    assert seen == ["Fp8Linear", "Linear"]


class Simulated:
    """A device and its host, in microseconds: what torch.cuda and time.perf_counter say of them.

    Args:
        speed: clock rate by the one that `torch.cuda._sleep` is told of.
        blocks: every launch waits for the device, as with CUDA_LAUNCH_BLOCKING.
    """

    def __init__(self, speed: float, blocks: bool = False) -> None:
        self.speed, self.blocks = speed, blocks
        self.host = self.device = 0.0
        self.num_sleeps = 0
        simulated = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                simulated.device = self.at = max(simulated.host, simulated.device)

            def query(self) -> bool:
                return self.at <= simulated.host

            def synchronize(self) -> None:
                simulated.host = max(simulated.host, self.at)

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        self.Event = Event

    def sleep(self, cycles: int) -> None:
        self.num_sleeps += 1
        self.device = max(self.host, self.device) + cycles / 2_000 / self.speed
        self.wait()

    def wait(self) -> None:
        if self.blocks:
            self.host = max(self.host, self.device)

    def step(self, device_us: float, host_us: float) -> Any:
        """A call that launches half of its work, computes on the host, and launches the rest."""

        def call() -> None:
            for _ in range(2):
                self.host += host_us / 2
                self.device = max(self.host, self.device) + device_us / 2
                self.wait()

        return call

    def replace_torchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", self.Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.host / 1e6)


@pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("taken", [[(620.0, 1100.0), (1098.0, 200.0)], [(5.0, 9_000.0), (9000.0, 3.0)]], ids=str)
def test_the_clock_tells_device_from_host_whoever_is_slower(
    taken: list[tuple[float, float]], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Simulated(speed)
    simulated.replace_torchs(monkeypatch)
    found = cuda_clock([simulated.step(*one) for one in taken])
    assert [(one.device_us, one.host_us) for one in found] == [pytest.approx(one) for one in taken]
    assert simulated.num_sleeps <= 4 * 18  # not many in vain


def test_a_host_that_takes_most_of_the_longest_sleep_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(1.0)
    simulated.replace_torchs(monkeypatch)
    (found,) = cuda_clock([simulated.step(5.0, 100_000.0)])
    assert (found.device_us, found.host_us) == (pytest.approx(5.0), pytest.approx(100_000.0))


def test_a_host_that_waits_at_every_launch_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(1.0, blocks=True)
    simulated.replace_torchs(monkeypatch)
    with pytest.raises(Fp8DsError, match=r"^layer times: .* unset CUDA_LAUNCH_BLOCKING"):
        cuda_clock([simulated.step(620.0, 1100.0)])
    assert simulated.num_sleeps < 12


# --- keeping the choice of a checkpoint ---


def names(*parts: str) -> nn.Module:
    model = nn.Module()
    for part in parts:
        at = model
        *path, last = part.split(".")
        for name in path:
            if name not in at._modules:
                at.add_module(name, nn.Module())
            at = at._modules[name]  # type: ignore[assignment]
        at.add_module(last, nn.Linear(16, 16))
    return model


@pytest.mark.parametrize(
    ("in_bf16", "expected"),
    [
        ((), []),
        (("a.0.up", "a.1.up", "lm_head"), ["a.0.up", "1.up", "lm_head"]),
        (("a.0.up",), ["a.0.up"]),
        (("a.0.up", "a.1.up", "a.10.up"), ["up"]),
        (("a.1.up",), ["1.up"]),
        (("a.0.up", "a.0.down", "a.1.up", "a.1.down", "a.10.up", "lm_head"), ["up", "down", "lm_head"]),
    ],
)
def test_a_filter_names_the_bf16_layers_of_a_plan_and_no_other(in_bf16: tuple[str, ...], expected: list[str]) -> None:
    model = names("a.0.up", "a.0.down", "a.1.up", "a.1.down", "a.10.up", "lm_head")
    everything = make_plan(model, LinearConfig(filter_fqns=()))
    cases = {row.fqn: case(n=i + 1) for i, row in enumerate(everything.layers)}
    known = {c: times(2 if fqn in in_bf16 else 1, 1.5) for fqn, c in cases.items()}
    plan = choose(everything, cases, known, worth_fp8(dict.fromkeys(known, 1), known))
    assert {row.fqn for row in plan.layers if not row.converted} == set(in_bf16)
    found = plan.filter_fqns()
    assert found == expected
    again = make_plan(model, LinearConfig(filter_fqns=tuple(found or ())), may_be_empty=True)
    assert [row.converted for row in again.layers] == [row.converted for row in plan.layers]


def test_no_filter_names_a_layer_whose_name_is_part_of_anothers() -> None:
    plan = make_plan(nn.Sequential(*[nn.Linear(16, 16) for _ in range(11)]), LinearConfig())
    cases = {row.fqn: case(n=int(row.fqn) + 1) for row in plan.layers}
    known = {c: times(3 if fqn == "1" else 1, 2) for fqn, c in cases.items()}
    assert choose(plan, cases, known, worth_fp8(dict.fromkeys(known, 1), known)).filter_fqns() is None
