"""What pages say, against the code: keys, blocks of configuration, commands, imports, links, the picture."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fp8_ds.cli.app import app
from fp8_ds.config import Fp8Config
from fp8_ds.engine.compat.config import refuse_config
from fp8_ds.tools.doctor import diagnosis
from fp8_ds.tools.doctor.check_config import check_config
from fp8_ds.tools.doctor.diagnosis import Check

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CONFIGS = sorted((ROOT / "configs").glob("*.json"))
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
ABBREVIATED = re.compile(r"\.\.\.|[\[<]|\b[A-Z]{3,}\b")
"""In a command: it shows a form, and is not one that can be typed."""
COMMANDS: Any = typer.main.get_command(app)


def fenced(page: Path, *languages: str) -> Iterator[str]:
    """The code of the page's blocks in one of the languages."""
    pattern = rf"^( *)```(?:{'|'.join(languages)})\n(.*?)^ *```$"
    for match in re.finditer(pattern, page.read_text(), flags=re.MULTILINE | re.DOTALL):
        yield textwrap.dedent(match[2])


def inline(page: Path) -> Iterator[str]:
    """What stands in backticks in the page's text, where it goes over two lines too."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", text))


def config_sections() -> dict[str, dict[str, str]]:
    """The page's keys, each with its "- Field: text" lines (continued lines joined)."""
    page = (ROOT / "docs/config.md").read_text()
    sections = {}
    for section in page.split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        joined = re.sub(r"\n  +", " ", body)
        sections[name.strip("`")] = dict(re.findall(r"^- ([^:\n]+): (.+)$", joined, flags=re.MULTILINE))
    return sections


def test_page_and_models_list_the_same_keys_values_and_defaults() -> None:
    shown = {
        name: (fields["Values"].replace("`", ""), fields["Default"].replace("`", ""))
        for name, fields in config_sections().items()
    }
    assert shown == {name: tuple(key) for name, key in Fp8Config.keys().items()}


@PAGE
def test_blocks_of_configuration_can_be_loaded_and_whole_ones_would_start(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in braces are whole, and a reader takes them as they are; only whether fp8_ds is loaded is left open."""
    monkeypatch.setattr(diagnosis, "autoload_check", lambda: Check("autoload", "optional", "off"))
    for text in fenced(page, "json"):
        is_whole = text.lstrip().startswith("{")
        config = json.loads(text if is_whole else "{" + text + "}")
        fp8 = Fp8Config.from_block(config["fp8"]) if "fp8" in config else None
        if fp8 is not None:
            stage = {"zero_optimization": {"stage": config.get("zero_optimization", {}).get("stage", 2)}}
            fp8.validate_with(stage)
            refuse_config(stage | {"bf16": {"enabled": True}} | config)
        if is_whole:
            assert check_config(config).on == "if"
            optimizer = config.get("optimizer", {})
            is_adam = str(optimizer.get("type")).lower() in ("adam", "adamw")
            if is_adam and fp8.optimizer.states == "fp32" and not optimizer["params"].get("torch_adam"):
                assert '"torch_adam": true' in page.read_text()  # it is compiled, in silence


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_complete_and_would_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "autoload_check", lambda: Check("autoload", "optional", "off"))
    config = json.loads(path.read_text())
    assert '"auto"' not in path.read_text() and config["bf16"]["enabled"] is True
    assert path.stem.startswith(f"ds_zero{config['zero_optimization']['stage']}_")
    preset = path.stem.partition("_fp8")[2].removeprefix("_")
    expected = {"enabled": True, "preset": preset} if preset else {"enabled": True}
    assert config.get("fp8") == (expected if "_fp8" in path.stem else None)
    assert check_config({"fp8": {"enabled": True}, **config}).on == "if"


def test_fp8_and_bf16_at_stage_3_differ_in_the_block_only() -> None:
    fp8, bf16 = (json.loads((ROOT / f"configs/ds_zero3_{kind}.json").read_text()) for kind in ("fp8", "bf16"))
    assert fp8.pop("fp8") == {"enabled": True} and fp8 == bf16


@PAGE
def test_commands_of_fp8_ds_are_commands(page: Path) -> None:
    """Names, options and their values are read by the command itself; nothing is run."""
    commands = [
        line
        for text in fenced(page, "bash", "console")
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("fp8-ds ")
    ]
    for command in [*commands, *(code for code in inline(page) if code.startswith("fp8-ds "))]:
        words = shlex.split(command, comments=True)[1:]
        if words in (["COMMAND", "--help"], ["--version"]):
            continue
        assert words[0] in COMMANDS.commands, command
        if len(words) > 1 and not ABBREVIATED.search(command):
            read_by(COMMANDS.commands[words[0]], words[0], words[1:])


def read_by(command: Any, name: str, words: list[str]) -> None:
    """Raises a UsageError where the command would exit with 2."""
    if hasattr(command, "commands"):
        read_by(command.commands[words[0]], words[0], words[1:])
    else:
        command.make_context(name, list(words))


@PAGE
def test_files_and_modules_of_shell_blocks_exist(page: Path) -> None:
    for text in fenced(page, "bash", "console"):
        for path in re.findall(r"(?<![\w/$])(?:examples|configs|benchmarks|tests)/[\w./-]+", text):
            assert (ROOT / path).exists() or (page.parent / path).exists(), path
        for module in re.findall(r"(?:-m|--module) ((?:fp8_ds|megatron_patches)[\w.]*)", text):
            assert importlib.util.find_spec(module), module


@PAGE
def test_python_blocks_compile_and_import_what_exists(page: Path) -> None:
    for text in fenced(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("fp8_ds", "megatron_patches"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_importing_fp8_ds_is_enough_for_each_name_of_the_api() -> None:
    page = (ROOT / "docs/api/index.md").read_text()
    names = {*re.findall(r"`fp8_ds\.([\w.]+)`", page), "tp.parallelize", "attention.attention", "__all__"}
    assert {"tp", "attention", "monitor", "tools.estimate", "CheckpointError"} <= names
    code = f"import operator, sys, fp8_ds; operator.attrgetter(*{sorted(names)})(fp8_ds)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


def test_flags_of_megatron_pages_are_flags() -> None:
    arguments = importlib.import_module("megatron_patches.arguments")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp8-recipe", choices=("tensorwise",))  # as Megatron has it, with the others of its own:
    stock = ("format", "param-gather")
    for name in stock:
        parser.add_argument(f"--fp8-{name}")
    known = {option for action in arguments.add_arguments(parser)._actions for option in action.option_strings}
    for name in ("docs/quickstart-megatron.md", "docs/megatron.md"):
        found = set(re.findall(r"(?<!\w)--fp8-[a-z-]+", (ROOT / name).read_text()))
        assert found - known == set(), name


def test_links_between_pages_lead_to_files() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_page_of_promises_names_tests_that_there_are() -> None:
    """By their beginnings, or after three dots by a part; files by their stems."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = [name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE)]
    known += [file.stem for file in files]
    missing, num_named = [], 0
    for code in inline(ROOT / "docs/reliability.md"):
        for dots, name in re.findall(r"(\.\.\.)?((?:(?<=\.\.\.)|\btest_)\w+\b)(?!\*)", code):
            num_named += 1
            if not any(name in one if dots else one.startswith(name) for one in known):
                missing.append(name)
    assert missing == [] and num_named > 60
