"""benchmarks/layer_table.py on CPU: it writes rows that the engine finds, and a second run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8_ds.nn.choice import Book
from fp8_ds.nn.layer_table import LayerTable, Machine, Times, cache_file


def test_layer_table_is_written_row_by_row_and_completed_by_a_second_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import layer_table

    monkeypatch.setattr(layer_table, "SHAPES", [(4096, 1024)])
    monkeypatch.setattr(layer_table, "BIASED", [(768, 2304)])
    out = tmp_path / "tables" / "cpu.json"
    command = ["layer_table.py", "--dry-run", "--out", str(out), "--recipes", "tensorwise"]

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        layer_table.main()
        return capsys.readouterr().out

    assert "out of time" in run("--minutes", "0")
    assert not out.exists()
    assert "14 of 14 rows to measure" in run()
    table = LayerTable.read(out)
    assert table.machine == Machine.of(torch.device("cpu"))
    assert {(case.k, case.n, case.bias) for case in table.times} == {(64, 16, False), (12, 36, True)}
    assert {case.m for case in table.times} == {8 << i for i in range(7)}
    before = dict(table.times)
    assert "0 of 14 rows to measure" in run()
    assert "14 of 28 rows to measure" in run("--recipes", "tensorwise", "delayed")
    after = LayerTable.read(out).times
    assert len(after) == 28 and before.items() <= after.items()
    other = Machine.of(torch.device("cpu")).model_copy(update={"torch_version": "other"})
    LayerTable(other).write(out)
    with pytest.raises(SystemExit, match="Name another file"):
        run()


def test_without_a_file_it_fills_the_cache_which_rows_of_a_dry_run_do_not(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.setenv("FP8_DS_CACHE", str(tmp_path / "cache"))
    import layer_table

    monkeypatch.setattr(sys, "argv", ["layer_table.py", "--dry-run"])
    with pytest.raises(SystemExit):
        layer_table.main()
    assert "--dry-run needs --out" in capsys.readouterr().err
    cpu = torch.device("cpu")
    case = layer_table.Case(recipe="tensorwise", grad_dtype="e5m2", backend="torch", m=512, k=16, n=16)
    times = Times(fp8_us=1.0, bf16_us=2.0, fp8_host_us=1.0, bf16_host_us=1.0)
    monkeypatch.setattr(layer_table.torch, "device", lambda name: cpu)
    monkeypatch.setattr(layer_table, "make_cases", lambda recipes, divisor: [case])
    monkeypatch.setattr(layer_table, "time_case", lambda case, device: times)
    monkeypatch.setattr(sys, "argv", ["layer_table.py"])
    layer_table.main()
    path = cache_file(Machine.of(cpu))
    assert path.parent == tmp_path / "cache" and str(path) in capsys.readouterr().out
    assert Book(cpu, print, None).times_of([case]) == {case: times}
