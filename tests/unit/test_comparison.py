from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.comparison import Group, compare
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


def test_only_common_steps_count() -> None:
    short = Curve("short", tuple(range(0, 50, 5)), (1.0,) * 10)
    long = Curve("long", tuple(range(100)), (1.0,) * 50 + (5.0,) * 50)
    assert compare([Group("a", (short,)), Group("b", (long,))], 1.0).results[0].paired.mean == 0.0


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
    text = page.read_text()
    assert "data:image/png;base64," in text and "src='http" not in text
    assert "fp8<b>" not in text and "fp8&lt;b&gt;" in text


def test_exit_codes(tmp_path: Path) -> None:
    one, other = write(tmp_path, "one", 2.0), write(tmp_path, "other", 2.1)
    assert CliRunner().invoke(app, ["compare", one, other]).exit_code == 1
    assert CliRunner().invoke(app, ["compare", one]).exit_code == 2
    missing = CliRunner().invoke(app, ["compare", one, str(tmp_path / "no.csv"), "--json"])
    assert missing.exit_code == 3 and "no.csv" in json.loads(missing.output)["error"]
