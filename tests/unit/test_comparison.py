from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.comparison import Group, compare, describe, describe_steps
from fp8_ds.curves import Curve
from fp8_ds.errors import ConfigError
from fp8_ds.statistics import Paired, half_width, t_quantile


def group(name: str, *levels: float) -> Group:
    """Runs whose last ten of a hundred losses are one level each."""
    steps = tuple(range(100))
    return Group(name, tuple(Curve(name, steps, (9.0,) * 90 + (level,) * 10) for level in levels))


def test_the_interval_is_students() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert half_width([1.0]) == math.inf
    assert t_quantile(15) == t_quantile(99) == 2.131


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.05, 0.06, 0.04), "parity"),
        ((-1.0, -1.1, -0.9), "parity"),  # better is fine
        ((0.2, 0.21, 0.19), "worse"),
        ((0.05, 0.4, -0.3), "undecided"),
        ((0.0,), "undecided"),
    ],
)
def test_verdicts(percent: tuple[float, ...], verdict: str) -> None:
    assert Paired(percent).verdict() == verdict


def test_runs_are_paired_in_order_and_the_end_is_compared() -> None:
    found = compare([group("base", 2.0, 3.0), group("fp8", 2.002, 3.003)], 0.1)
    assert found.results[0].paired.by_pair == pytest.approx((0.1, 0.1))
    assert found.last == 10
    assert found.noise_percent == pytest.approx(100 * math.sqrt(0.5) / 2.5)


SHORT = Curve("short", tuple(range(0, 50, 5)), (1.0,) * 10)
LONG = Curve("long", tuple(range(100)), (1.0,) * 50 + (5.0,) * 50)


def test_only_common_steps_count() -> None:
    found = compare([Group("a", (SHORT,)), Group("b", (LONG,))], 0.3)
    assert found.results[0].paired.mean == 0.0
    assert describe_steps(found) == (
        "Compared: the mean loss of the last 3 of 10 common steps, 35 to 45; a ends at 45, b ends at 99."
    )


@pytest.mark.parametrize(
    ("end", "until", "verdict"),
    [
        (1000, None, "parity"),
        (990, None, "parity"),  # one logging interval
        (980, None, "undecided"),
        (500, None, "undecided"),
        (500, 500, "parity"),
        (500, 509, "parity"),
        (500, 700, "undecided"),
    ],
)
def test_a_run_that_ended_early_is_no_parity_unless_that_part_is_meant(
    end: int, until: int | None, verdict: str
) -> None:
    def runs(name: str, last: int) -> Group:
        steps = tuple(range(0, last + 1, 10))
        return Group(name, tuple(Curve(name, steps, (level,) * len(steps)) for level in (2.0, 3.0)))

    for base, other in ((1000, end), (end, 1000)):
        found = compare([runs("base", base), runs("fp8", other)], 0.1, until).results[0]
        assert (found.verdict, found.ends_early) == (verdict, verdict == "undecided")
        assert ("--until STEP" in describe(found)) == found.ends_early


def test_other_groups_are_judged_by_the_steps_that_are_compared() -> None:
    """The run that died leaves nothing but its own steps to all of them."""
    steps = tuple(range(100))
    whole, dead = (
        tuple(Curve(name, steps[:n], (2.0,) * n) for _ in "ab") for name, n in (("whole", 100), ("dead", 50))
    )
    found = compare([Group("base", whole), Group("same", whole), Group("dead", dead)], 0.1)
    assert [one.verdict for one in found.results] == ["undecided", "undecided"]
    assert compare([Group("base", whole), Group("same", whole)], 0.1).results[0].verdict == "parity"


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 2 runs, one for each of base, got 1"):
        compare([group("base", 1.0, 1.0), group("other", 1.0)], 0.1)
    with pytest.raises(ConfigError, match="expected a base and another, got 1"):
        compare([group("base", 1.0)], 0.1)
    apart = Group("apart", (Curve("apart", (1000, 1001), (1.0, 1.0)),))
    with pytest.raises(ConfigError, match="expected at least 2 steps that all have, got 0"):
        compare([group("base", 1.0), apart], 0.1)


def write(folder: Path, name: str, level: float) -> str:
    path = folder / f"{name}.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{level + 1 / (step + 1)}\n" for step in range(60)))
    return str(path)


def test_the_command_writes_a_picture_and_a_page_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base = ",".join(write(tmp_path, f"base{i}", 2.0 + i / 10) for i in range(3))
    same = ",".join(write(tmp_path, f"same{i}", 2.0 + i / 10 + 1e-4 * i) for i in range(3))
    png, page = tmp_path / "out.png", tmp_path / "out.html"
    arguments = ["compare", f"bf16={base}", f"fp8<b>={same}", "--png", str(png), "--html", str(page), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["results"][0]["verdict"] == "parity"
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert json.loads(result.output)["ends"] == {"bf16": [59] * 3, "fp8<b>": [59] * 3}
    text = page.read_text()
    assert "common steps, 54 to 59; bf16 ends at 59, fp8&lt;b&gt; ends at 59." in text
    assert "data:image/png;base64," in text and "src='http" not in text
    assert "fp8<b>" not in text and "fp8&lt;b&gt;" in text


def test_exit_codes(tmp_path: Path) -> None:
    one, other = write(tmp_path, "one", 2.0), write(tmp_path, "other", 2.1)
    result = CliRunner().invoke(app, ["compare", one, other])
    assert result.exit_code == 1
    assert "last 6 of 60 common steps, 54 to 59; one.csv ends at 59, other.csv ends at 59." in result.stdout
    assert CliRunner().invoke(app, ["compare", one, one + "," + one, "--until", "9"]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", one]).exit_code == 2
    missing = CliRunner().invoke(app, ["compare", one, str(tmp_path / "no.csv"), "--json"])
    assert missing.exit_code == 3 and "no.csv" in json.loads(missing.output)["error"]
