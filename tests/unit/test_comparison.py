from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.comparison import (
    Group,
    as_data,
    compare,
    describe,
    describe_mean,
    describe_steps,
    pooled_half_widths,
    read_group,
    stepwise,
)
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


def test_a_deviation_for_all_is_pooled_over_arms_of_two_pairs_and_more() -> None:
    found = pooled_half_widths([Paired((0.0, 2.0)), Paired((0.0, 3.0, 6.0)), Paired((5.0,))])
    deviation = math.sqrt((2.0 * 1 + 9.0 * 2) / 3)  # variances 2 of one and 9 of two degrees of freedom
    wanted = [t_quantile(3) * deviation / math.sqrt(num_pairs) for num_pairs in (2, 3, 1)]
    assert found == pytest.approx(wanted)
    assert pooled_half_widths([Paired((5.0,))]) == [math.inf]


def test_a_mean_is_described_with_its_interval_where_there_is_one() -> None:
    assert describe_mean(Paired((0.5,))) == "+0.500 %, one pair"
    assert describe_mean(Paired((0.1, 0.3))) == "+0.200 %, 95 % interval -1.071 to +1.471 % of 2 pairs"


def test_a_bound_is_met_by_what_lies_on_it() -> None:
    pairs = Paired((0.25, 0.75))
    assert pairs.verdict(mean_bound=0.5, upper_bound=pairs.mean + pairs.half_width) == "parity"
    assert pairs.verdict(mean_bound=pairs.mean - pairs.half_width, upper_bound=1.0) == "undecided"


def test_losses_of_a_pair_are_compared_step_by_step_where_a_batch_adds_to_both() -> None:
    steps = tuple(range(10, 210, 10))
    of_batch = [2.0 + step % 7 for step in steps]
    base = Curve("base", steps, tuple(of_batch))
    late = tuple(loss * (1.001 if k % 2 else 1.003) if k >= 16 else 9.0 for k, loss in enumerate(of_batch))
    found = stepwise(Curve("other", steps, late), base, 40)
    assert found is not None and found.mean == pytest.approx(0.2) and found.last_step == 200
    assert found.error == pytest.approx(0.2 / math.sqrt(3) / math.sqrt(4))  # of 0.1, 0.3, 0.1, 0.3
    cut = Curve("cut", steps[:19], late[:19])
    found = stepwise(cut, base, 30)
    assert found is not None and found.last_step == 190 and found.mean == pytest.approx((0.3 + 0.1 + 0.3) / 3)
    assert stepwise(cut, base, 10) is None and stepwise(Curve("none", (5,), (1.0,)), base, 100) is None


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
        tuple(Curve(name, steps[:n], (level,) * n) for level in (2.0, 3.0))
        for name, n in (("whole", 100), ("dead", 50))
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


@pytest.mark.parametrize("levels", [(-2.0, -3.0), (0.0, 0.0), (2.0, -3.0)])
def test_a_base_that_is_not_above_0_is_refused_for_differences_are_relative_to_it(levels: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="base: expected a base whose mean loss is above 0, got "):
        compare([group("base", *levels), group("fp8", 1.0, 1.0)], 0.1)
    assert compare([group("base", 1.0, 1.0), group("fp8", *levels)], 0.1).results[0].loss == sum(levels) / 2


def diverged(name: str, step: int, value: float = math.nan) -> Curve:
    return Curve(name, tuple(range(100)), (2.0,) * step + (value,) * (100 - step))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_is_worse_and_the_other_groups_are_judged(value: float) -> None:
    base, same = group("base", 2.0, 2.5), group("same", 2.0, 2.5)
    bad = Group("bad", (diverged("bad0", 97, value), diverged("bad1", 50, value)))
    found = compare([base, bad, same], 0.1)
    assert [one.verdict for one in found.results] == ["worse", "parity"]
    assert describe(found.results[0]) == "bad: diverged at step 50: worse. Its loss is not finite there."
    data = json.loads(json.dumps(as_data(found)), parse_constant=pytest.fail)["results"]
    assert (data[0]["diverged_at"], data[0]["percent"], data[0]["half_width"], data[0]["loss"]) == (50, *[None] * 3)
    assert data[1]["diverged_at"] is None and data[1]["percent"] == 0.0


def test_a_run_is_whole_until_the_step_that_is_meant() -> None:
    bad = Group("bad", (diverged("bad", 50),))
    base = Group("base", (diverged("base", 100),))
    assert compare([base, bad], 0.1, 49).results[0].diverged_at is None
    assert compare([base, bad], 0.1, 50).results[0].diverged_at == 50
    assert compare([bad, base], 0.1, 49).results[0].paired.mean == 0.0
    with pytest.raises(ConfigError, match="bad: expected a base with finite losses, got nan in step 50"):
        compare([bad, base], 0.1)


def write(folder: Path, name: str, level: float) -> str:
    path = folder / f"{name}.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{level + 1 / (step + 1)}\n" for step in range(60)))
    return str(path)


def test_the_same_run_named_as_two_seeds_is_refused(tmp_path: Path) -> None:
    one, copy, other = (write(tmp_path, name, level) for name, level in (("a", 2.0), ("copy", 2.0), ("b", 2.1)))
    for text in (f"fp8={one},{one}", f"fp8={one},{other},{copy}"):
        with pytest.raises(ConfigError, match=r"fp8: expected a run of its own for each seed, got .*a\.csv and "):
            read_group(text, None)
    assert len(read_group(f"fp8={one},{other}", None).curves) == 2


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (("{0}/a/log.csv", "{0}/b/log.csv"), ("a/log.csv", "b/log.csv")),
        (("{0}/a/log.csv", "{0}/c.csv"), ("log.csv", "c.csv")),
        (("{0}/a/log.csv", "{0}/a/x/log.csv", "{0}/b/x/log.csv"), ("a/log.csv", "a/x/log.csv", "b/x/log.csv")),
        (("{0}/a/x", "{0}/b/x", "{0}/lr=1"), ("a/x", "b/x", "lr=1")),  # folders with one curve
        (("log.csv={0}/a/log.csv", "{0}/b/log.csv"), ("log.csv", "b/log.csv")),
        (("c.csv={0}/a/log.csv", "c.csv"), ("c.csv", "c.csv (2)")),
        (("{0}/lr=1/log.csv", "{0}/lr=2/log.csv"), ("lr=1/log.csv", "lr=2/log.csv")),
        (("bf16={0}/lr=1/log.csv", "fp8={0}/lr=2/log.csv"), ("bf16", "fp8")),
    ],
)
def test_runs_of_one_file_name_have_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...], names: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    level = 2.0
    for folder in ("a", "a/x", "b", "b/x", "lr=1", "lr=2"):
        (tmp_path / folder).mkdir(exist_ok=True)
        write(tmp_path / folder, "log", level := level + 0.1)
    write(tmp_path, "c", 2.0)
    result = CliRunner().invoke(app, ["compare", *(text.format(tmp_path) for text in texts), "--json"])
    assert result.exit_code == 1, result.output
    assert tuple(json.loads(result.output)["ends"]) == tuple(name.format(tmp_path) for name in names)


def test_two_runs_that_are_given_one_name_are_refused(tmp_path: Path) -> None:
    runs = [f"{name}={write(tmp_path, file, 2.0)}" for name, file in (("bf16", "a"), ("fp8", "b"), ("fp8", "c"))]
    result = CliRunner().invoke(app, ["compare", *runs, "--json"])
    assert result.exit_code == 2
    assert json.loads(result.output)["error"].startswith("fp8: expected a name of its own for each run, got it twice.")


def test_a_file_in_two_runs_is_refused_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    one, other = write(tmp_path / "out", "one", 2.0), write(tmp_path, "other", 2.1)
    link = tmp_path / "link.csv"
    link.symlink_to(one)
    for again in (one, str(tmp_path / "out"), str(tmp_path / "out/../out/one.csv"), str(link)):
        result = CliRunner().invoke(app, ["compare", f"bf16={one},{other}", f"fp8={again},{other}", "--json"])
        assert result.exit_code == 2
        assert json.loads(result.output)["error"].startswith("fp8: expected files of its own, got ")
    copies = [write(tmp_path, name, level) for name, level in (("copy", 2.0), ("other_copy", 2.1))]
    runs = [f"bf16={one},{other}", f"fp8={','.join(copies)}"]
    assert CliRunner().invoke(app, ["compare", *runs]).exit_code == 0  # of numbers alone nothing is known


def test_a_picture_and_a_page_show_where_a_run_diverged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bad = tmp_path / "bad.csv"
    bad.write_text("step,loss\n" + "".join(f"{step},{'nan' if step > 40 else 2.0}\n" for step in range(60)))
    base, page = write(tmp_path, "base", 2.0), tmp_path / "out.html"
    result = CliRunner().invoke(app, ["compare", base, str(bad), "--html", str(page)])
    assert result.exit_code == 1 and "bad.csv: diverged at step 41: worse." in result.stdout
    assert "<td>diverged</td><td>worse</td>" in page.read_text()
    assert CliRunner().invoke(app, ["compare", str(bad), base]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", str(bad), base, "--until", "40"]).exit_code == 1  # one pair


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
