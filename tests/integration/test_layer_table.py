"""benchmarks/layer_table.py on CPU: it writes rows that the engine finds, and a second run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fp8_ds.nn.choice import LayerTable, Machine


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
