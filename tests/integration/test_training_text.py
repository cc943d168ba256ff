"""The text that runs train on: what a machine has, held out by package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for number in range(60):
        package = root / "site-packages" / f"pack{number}"
        package.mkdir(parents=True)
        body = "".join(f"value_{number}_{line} = {line}\n" for line in range(40 + number))
        (package / "code.py").write_text(body)
        (package / "again.py").write_text(body)  # a vendored copy
    (root / "short.py").write_text("x = 1\n")
    (root / "table.txt").write_text("1" * 5000)
    (root / "not_text.py").write_bytes(b"\xff\xfe\n" * 200)
    return root


def test_held_out_packages_share_no_document_with_training(bench: Any, text_folder: Path) -> None:
    data = bench("training_text")
    documents = data.find_documents([text_folder])
    assert len(documents) == 60  # no copy, nothing short, no table, nothing that is not UTF-8
    assert [name for _, name, _ in documents] == sorted(name for _, name, _ in documents)
    held_out = data.choose_held_out(documents)
    share = sum(len(c) for p, _, c in documents if p in held_out) / sum(len(c) for _, _, c in documents)
    assert 0.03 <= share < 0.05
    assert held_out == data.choose_held_out(reversed(documents))
    assert {p for p, _, _ in documents} > set(held_out)


def test_tokens_are_the_same_again_and_too_little_text_stops(
    bench: Any, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bench("training_text")
    monkeypatch.setattr(data, "text_roots", lambda: [text_folder])
    first, cache = data.prepare(tmp_path / "a", "bytes", 512, 1000)
    again, _ = data.prepare(tmp_path / "b", "bytes", 512, 1000)
    cached, _ = data.prepare(tmp_path / "a", "bytes", 512, 1000)
    assert first.digest == again.digest == cached.digest
    assert cached == first
    train, held_out = (np.load(cache / f"{name}.npy") for name in ("train", "held_out"))
    assert first.num_bytes == train.size + held_out.size - first.num_files + 2  # joined by line feeds
    assert train.max() < 256
    with pytest.raises(SystemExit, match="expected at least 1,000,000 training tokens"):
        data.prepare(tmp_path / "a", "bytes", 512, 1_000_000)


def test_bpe_gives_back_the_text(bench: Any, text_folder: Path) -> None:
    pytest.importorskip("tokenizers")
    data = bench("training_text")
    contents = [content for _, _, content in data.find_documents([text_folder])]
    train, held_out = data._bpe(contents[:50], contents[50:], 512)
    assert (train == 0).sum() == 50 and (held_out == 0).sum() == 10  # documents end with token 0
    assert train.max() < 512
    assert train.size < 0.5 * sum(map(len, contents[:50]))


def test_windows_come_in_an_order_of_their_seed(bench: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(641, dtype=np.uint16))
    windows = bench("training_text").Windows(tmp_path / "train.npy", 64, torch.device("cpu"))
    assert windows.num_windows == 10
    order = windows.order(25, seed=3)
    assert order[:10].sort().values.equal(order[10:20].sort().values) and not order[:10].equal(order[10:20])
    assert order.equal(windows.order(25, seed=3)) and not order.equal(windows.order(25, seed=4))
    assert windows.batch(torch.tensor([9]))[0].tolist() == list(range(576, 641))
