from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_ds.errors import ConfigError
from fp8_ds.parity.text import Windows, prepare


def write(folder: Path, num: int) -> Path:
    folder.mkdir()
    for number in range(num):
        (folder / f"{number:03}.txt").write_text(f"document {number}, " * 20)
    return folder


def test_one_document_in_fifty_is_held_out_whole(tmp_path: Path) -> None:
    found = prepare(tmp_path / "text", [write(tmp_path / "data", 120)], [], None, 256, 2)
    train, held_out = (np.load(tmp_path / f"text/{name}.npy") for name in ("train", "held_out"))
    texts = bytes(held_out.astype(np.uint8)).decode().split("\n")[:-1]
    assert len(texts) == 3 and all(text.startswith("document ") for text in texts)
    assert not set(texts) & set(bytes(train.astype(np.uint8)).decode().split("\n"))
    assert (found.num_train, found.num_held_out, found.num_documents) == (len(train), len(held_out), 120)
    again = prepare(tmp_path / "again", [tmp_path / "data"], [], None, 256, 2)
    assert again.digest == found.digest


def test_of_few_documents_the_end_is_held_out_unless_others_are_named(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 3)
    found = prepare(tmp_path / "text", [data], [], None, 256, 2)
    assert found.num_held_out == (found.num_train + found.num_held_out) // 50
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "abc"}) + "\n\n" + json.dumps({"text": "de"}) + "\n")
    prepare(tmp_path / "second", [data], [other], None, 256, 2)
    assert bytes(np.load(tmp_path / "second/held_out.npy").astype(np.uint8)) == b"abc\nde\n"
    assert len(np.load(tmp_path / "second/train.npy")) == found.num_train + found.num_held_out


def test_tokens_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint32))
    prepare(tmp_path / "text", [tmp_path / "tokens.npy"], [], None, 100_000, 2)
    train = np.load(tmp_path / "text/train.npy")
    assert train.dtype == np.uint32 and train.tolist() == list(range(980))


def test_tokens_of_other_text_are_not_taken_for_these(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 3)
    found = prepare(tmp_path / "text", [data], [], None, 256, 2)
    assert prepare(tmp_path / "text", [data], [], None, 256, 2) == found
    (data / "more.txt").write_text("more")
    with pytest.raises(ConfigError, match=r"--data: expected .* Use another --out"):
        prepare(tmp_path / "text", [data], [], None, 256, 2)
    assert prepare(tmp_path / "text", [tmp_path / "not_on_this_machine"], [], None, 256, 2) == found


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="--data: expected UTF-8 text"):
        prepare(tmp_path / "text", [bad], [], None, 256, 2)
    bad.write_text("ab")
    with pytest.raises(ConfigError, match="--data: expected tokens from 0 to 63"):
        prepare(tmp_path / "text", [bad, bad], [bad], None, 64, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="--data: expected text, got none"):
        prepare(tmp_path / "text", [tmp_path / "empty"], [], None, 64, 2)
    (tmp_path / "nothing.txt").touch()
    with pytest.raises(ConfigError, match="--data: expected text, got none"):
        prepare(tmp_path / "text", [tmp_path / "nothing.txt"], [], None, 64, 2)
    with pytest.raises(FileNotFoundError):
        prepare(tmp_path / "text", [tmp_path / "missing.txt"], [], None, 64, 2)
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int64))
    with pytest.raises(ConfigError, match="expected one row of integers"):
        prepare(tmp_path / "text", [tmp_path / "square.npy"], [], None, 64, 2)
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=np.arange(3))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    (tmp_path / "nothing.npy").touch()
    whole = (tmp_path / "square.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "words.npy").write_text("no array")
    for name in ("objects", "several", "nothing", "cut", "words"):
        with pytest.raises(ConfigError, match=rf"--data: expected an array in NumPy's format in .*{name}\.npy, got "):
            prepare(tmp_path / "text", [tmp_path / f"{name}.npy"], [], None, 64, 2)


def test_a_tokenizer_that_is_not_there_is_not_said_to_lack_a_connection(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data = write(tmp_path / "data", 3)
    for name, why in ((str(tmp_path / "gone"), "no such folder, and nothing is downloaded"), (str(data), "")):
        with pytest.raises(ConfigError, match="--tokenizer: expected a folder of a tokenizer") as caught:
            prepare(tmp_path / "text", [data], [], name, 256, 2)
        assert why in str(caught.value) and (not why or "huggingface" not in str(caught.value))


def test_windows_come_in_an_order_of_their_seed(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(641, dtype=np.uint16))
    windows = Windows(tmp_path / "train.npy", 64, torch.device("cpu"))
    assert windows.num_windows == 10
    order = windows.order(25, seed=3)
    assert order[:10].sort().values.equal(order[10:20].sort().values) and not order[:10].equal(order[10:20])
    assert order.equal(windows.order(25, seed=3)) and not order.equal(windows.order(25, seed=4))
    assert windows.batch(torch.tensor([9]))[0].tolist() == list(range(576, 641))
