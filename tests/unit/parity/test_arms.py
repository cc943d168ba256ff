from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8_ds.config import Fp8Config
from fp8_ds.errors import ConfigError
from fp8_ds.parity.arms import CHANGES, resolve, seeded


def test_every_arm_is_a_block_that_the_library_takes_and_no_two_are_alike() -> None:
    blocks = {name: resolve(name, None)[1] for name in ("default", *CHANGES)}
    found = [Fp8Config.from_block(block) for block in blocks.values() if block is not None]
    assert len(found) == len(blocks) == 9
    recipes = {name: one.linear.recipe for name, one in zip(blocks, found, strict=True)}
    assert {recipes[name] for name in CHANGES} == {
        *("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
    }
    masters = {name: one.optimizer.master_format for name, one in zip(blocks, found, strict=True)}
    assert (masters["tensorwise"], masters["e4m19"], masters["e4m11"]) == ("fp32", "e4m19", "e4m11")


def test_a_pair_rounds_by_its_own_seed_unless_the_block_names_one() -> None:
    block = {"enabled": True, "optimizer": {"states": "fp8", "master": "e4m11"}}
    assert seeded(block, 3) == {"enabled": True, "optimizer": {"states": "fp8", "master": "e4m11", "seed": 3}}
    assert "seed" not in block["optimizer"]
    assert seeded({"enabled": True}, 3) == {"enabled": True}
    assert seeded(seeded(block, 7), 3) == seeded(block, 7)


def test_an_arm_changes_the_users_own_block_and_default_does_not() -> None:
    own = {"enabled": True, "linear": {"filter_fqns": ["output"]}, "activations": {"fused": True}}
    assert resolve("rowwise", own)[1] == {
        "enabled": True,
        "linear": {"filter_fqns": ["output"], "recipe": "rowwise"},
        "activations": {"fused": True},
    }
    assert own["linear"] == {"filter_fqns": ["output"]}
    assert resolve("default", own)[1] == {"enabled": True}
    assert resolve("config", own)[1] == own
    assert resolve("bf16", own)[1] is None
    assert resolve("rowwise", {"enabled": False, "linear": {"grad_dtype": "e4m3"}})[1] == {
        "enabled": True,
        "linear": {"recipe": "rowwise"},
    }


def test_an_arm_of_a_file_and_what_is_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"fp8": {"enabled": True, "linear": {"recipe": "delayed"}}}))
    assert resolve(f"mine={file}", None) == ("mine", {"enabled": True, "linear": {"recipe": "delayed"}})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match='--arms: expected an "fp8" block as JSON'):
        resolve(f"mine={file}", None)
    for text, kind in (('{"fp8": true}', "bool"), ('{"fp8": null}', "NoneType"), ("[]", "list")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf'--arms: expected an "fp8" block, a JSON object, in .* got {kind}'):
            resolve(f"mine={file}", None)
    with pytest.raises(ConfigError, match="--arms: expected some of bf16, default, config, tensorwise"):
        resolve("rowise", None)
    with pytest.raises(ConfigError, match="--arms config: expected an enabled"):
        resolve("config", {"enabled": False})


def test_a_name_that_no_file_can_have_or_that_says_another_arm_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"enabled": true}')
    for name in ("", "a/b", "../a", ".", "a b", "bf16", "config", "e4m11"):
        with pytest.raises(ConfigError, match=r"--arms: expected a name of its own before =, .* name it otherwise"):
            resolve(f"{name}={file}", None)
    assert resolve(f"e4m11-2.b_c={file}", None)[0] == "e4m11-2.b_c"
