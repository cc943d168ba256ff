"""Commands as a user types them: what they answer, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support import HANG
from typer.testing import CliRunner

from fp8_ds.cli.app import app
from fp8_ds.cli.common import num_parameters
from fp8_ds.cli.plan import _runs
from fp8_ds.nn.plan.flops import Product
from fp8_ds.tools.doctor import diagnosis
from fp8_ds.tools.doctor.diagnosis import Check

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/ds_zero3_fp8.json"
SMALL = ["--set", "hidden_size=64", "--set", "intermediate_size=128", "--set", "num_hidden_layers=3"]
SMALL += ["--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=100"]
ONE_LAYER = [*SMALL, "--set", "num_hidden_layers=1"]


def run(*arguments: object) -> tuple[int, Any]:
    """(exit code, the JSON object)"""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text()) | changes))
    return path


def test_the_options_of_every_command_are_those_of_the_page() -> None:
    """A change here changes what scripts of users rely on; docs/cli.md names each."""
    page = (ROOT / "docs/cli.md").read_text()
    commands: Any = typer.main.get_command(app)
    found = {
        name: sorted(option for p in command.params for option in p.opts if option.startswith("--"))
        for name, command in commands.commands.items()
        if name != "autoload"
    }
    assert found == {
        "doctor": ["--config", "--json", "--probe", "--script", "--world"],
        "plan": ["--config", "--json", "--seq", "--set", "--world"],
        "estimate": [
            *("--checkpointing", "--config", "--json", "--memory", "--micro-batch", "--seq", "--set", "--world"),
        ],
        "compare": ["--column", "--json", "--last", "--until"],
        "convert": ["--json", "--model", "--stage", "--tag", "--to", "--trust-pickle"],
    }
    assert sorted(option for p in commands.params for option in p.opts) == ["--json", "--version"]
    for name, options in found.items():
        section = page.split(f"\n## {name}")[1].split("\n## ")[0]
        assert all(f"`{option}" in section for option in options if option != "--json"), (name, options)
        assert "Exit codes" in section


def test_the_version_is_that_of_each_part() -> None:
    from fp8_ds import __version__

    expected = {"fp8_ds": __version__, **{name: metadata.version(name) for name in ("torch", "deepspeed")}}
    code, found = run("--version")
    assert code == 0 and found == expected
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == [f"{name} {version}" for name, version in expected.items()]


def test_the_version_of_what_is_not_installed_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed", lambda _: None)
    assert run("--version")[1]["torch"] is None
    assert "deepspeed not installed" in CliRunner().invoke(app, ["--version"]).stdout


def test_help_says_first_what_a_command_is_for() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.replace("│", "").split())
    assert "convert Converts checkpoints: " in shown
    assert all(f" {name} " in shown for name in ("--version", "doctor", "plan", "estimate", "compare"))
    assert " parity " not in shown


# --- plan ---


def test_plan_says_of_each_matrix_what_it_is_and_why() -> None:
    pytest.importorskip("transformers")
    code, found = run("plan", "llama-8b", "--config", CONFIG, "--world", 4, "--seq", 32, *SMALL)
    assert code == 0
    assert (found["num_fp8"], found["num_layers"]) == (21, 22)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert found["fp8_percent_of_matrix_flops"] == pytest.approx(100 * 3 * layer / (3 * layer + 6400))
    attention = 3 * 2 * 32 * 64  # 2 products of 2 FLOPs, half of 32 keys of 64 features, in each of 3 layers
    assert found["attention_flops_per_token"] == attention
    assert found["fp8_percent_of_flops"] == pytest.approx(100 * 6 * layer / (2 * (3 * layer + 6400) + attention))
    others = found["parameters"] - 3 * layer
    assert found["gathered_bytes_per_pass"] == 3 * layer + 2 * others
    by_name = {row["fqn"]: row for row in found["layers"]}
    assert by_name["lm_head"]["reason"] == "filter_fqns" and not by_name["lm_head"]["in_fp8"]
    assert by_name["model.layers.2.mlp.up_proj"]["shape"] == [128, 64]


@pytest.mark.parametrize(
    ("block", "of_linears", "of_attention"),
    [
        ({"attention": {"backend": "fa3_fp8"}}, 1, 1 / 3),
        ({"attention": {"backend": "fa3"}}, 1, 0),
        ({"linear": {"recipe": "rowwise_with_gw_hp"}}, 2 / 3, 0),
    ],
)
def test_plan_counts_products_that_are_in_fp8_in_forward_or_backward_only(
    tmp_path: Path, block: dict[str, Any], of_linears: float, of_attention: float
) -> None:
    pytest.importorskip("transformers")
    config = written(tmp_path, fp8={"enabled": True, **block})
    common = ("plan", "llama-8b", "--config", config, "--seq", 32, *SMALL)
    _, found = run(*common)
    converted = 2 * sum(row["shape"][0] * row["shape"][1] for row in found["layers"] if row["in_fp8"])
    matrices, attention = sum(row["flops"] for row in found["layers"]), found["attention_flops_per_token"]
    assert attention > 0
    in_fp8 = of_linears * converted + of_attention * attention
    assert found["fp8_percent_of_flops"] == pytest.approx(100 * in_fp8 / (matrices + attention))
    assert found["fp8_percent_of_matrix_flops"] == pytest.approx(100 * of_linears * converted / matrices)
    page = " ".join(CliRunner().invoke(app, [str(word) for word in common]).stdout.split())
    assert ("with attention, whose forward is in FP8." in page) == (of_attention > 0)


def test_plan_shows_what_is_no_linear_and_answers_no_where_nothing_is_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, found = run("plan", "gpt2", "--config", CONFIG, "--set", "n_layer=2")
    assert code == 0 and found["num_fp8"] == 8
    by_name = {row["fqn"]: row for row in found["layers"]}
    assert by_name["transformer.h.0.attn.c_attn"]["shape"] == [2304, 768]  # of a weight [768, 2304]
    config = json.loads(Path(CONFIG).read_text())
    config["fp8"].setdefault("linear", {})["recipe"] = "rowwise"
    (tmp_path / "rows.json").write_text(json.dumps(config))
    code, found = run("plan", "gpt2", "--config", tmp_path / "rows.json", "--set", "n_layer=2")
    assert code == 1 and found["num_fp8"] == 0
    reasons = [row["reason"] for row in found["layers"]]
    assert reasons.count("a Conv1D, which can be tensorwise or delayed") == 8
    code, found = run("plan", "mixtral-8x7b", "--config", CONFIG, *SMALL)
    experts = [row for row in found["layers"] if row["shape"][0] == 8 and len(row["shape"]) == 3]
    assert code == 0 and len(experts) == 6 and all(row["in_fp8"] for row in experts)
    assert found["num_fp8"] == found["num_layers"] - 4  # routers and the head
    assert found["fp8_percent_of_parameters"] > 90
    numel = {row["fqn"]: row["shape"][0] * row["shape"][1] * row["shape"][2] for row in experts}
    assert all(row["flops"] == 2 * numel[row["fqn"]] // 4 for row in experts)  # a token visits 2 of 8
    assert not found["many_experts_by_device"]


def test_a_plan_is_that_of_a_gpu_that_computes_many_experts_at_once() -> None:
    pytest.importorskip("transformers", minversion="5")
    many = ["--set", "num_local_experts=40"]
    _, few = run("plan", "mixtral-8x7b", "--config", CONFIG, *SMALL)
    code, found = run("plan", "mixtral-8x7b", "--config", CONFIG, *SMALL, *many)
    assert code == 0 and found["num_fp8"] == few["num_fp8"] and found["many_experts_by_device"]
    text = CliRunner().invoke(app, ["plan", "mixtral-8x7b", "--config", str(CONFIG), *SMALL, *many]).stdout
    assert "Layers of more than 16 experts are in FP8 on GPUs of compute capability 9.0" in " ".join(text.split())


def test_plan_takes_every_key_that_the_class_of_the_configuration_has() -> None:
    pytest.importorskip("transformers")
    scaling = 'rope_scaling={"rope_type": "linear", "factor": 2.0}'  # a property of the class in transformers 5
    for setting in ("attention_bias=true", "tie_word_embeddings=true", "rope_theta=1e4", scaling):
        code, found = run("plan", "llama-8b", "--config", CONFIG, *SMALL, "--set", setting)
        assert code == 0 and found["num_layers"] == 22
    code, found = run("plan", "gpt2", "--config", CONFIG, "--set", "num_hidden_layers=2")  # its other name for n_layer
    assert code == 0 and found["num_fp8"] == 8


def test_plan_joins_rows_that_differ_in_numbers_only() -> None:
    pytest.importorskip("transformers")
    result = CliRunner().invoke(app, ["plan", "llama-8b", "--config", str(CONFIG), *SMALL])
    assert result.exit_code == 0
    assert "model.layers.{0..2}.self_attn.q_proj (3)" in result.stdout
    assert "21 of 22 matrices in FP8" in result.stdout


def test_plan_and_estimate_take_a_config_json_and_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen2Config(**shape, num_key_value_heads=2, vocab_size=50).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert run("plan", path, "--config", CONFIG)[1]["num_fp8"] == 14
    (tmp_path / "my_model.py").write_text(
        "import torch\ndef make(): return torch.nn.Sequential(torch.nn.Linear(32, 32))"
    )
    monkeypatch.chdir(tmp_path)
    assert run("plan", "my_model:make", "--config", CONFIG)[1]["layers"][0]["fqn"] == "0"
    code, found = run("plan", "my_model:missing", "--config", CONFIG)
    assert code == 2 and "expected a function at my_model:missing" in found["error"]
    code, found = run("plan", "llama-9b", "--config", CONFIG)
    assert code == 2 and "Nothing is downloaded" in found["error"]
    assert found["error"].endswith("save the model's configuration with save_pretrained and name its folder.")


def test_plan_refuses_what_training_would(tmp_path: Path) -> None:
    code, found = run("plan", "llama-8b", "--config", written(tmp_path, zero_optimization={"stage": 0}), *SMALL)
    assert code == 2 and "zero_optimization.stage: 0" in found["error"]
    code, found = run("plan", "llama-8b", "--config", written(tmp_path, fp8={"enabled": False}), *SMALL)
    assert code == 2 and "Nothing would be in FP8" in found["error"]
    for layers, code in (({"layers.1.": "bf16"}, 0), ({"layers.7.": "bf16"}, 2), ({"lm_head": "bf16"}, 2)):
        fp8 = {"enabled": True, "schedule": {"layers": layers}}
        answer = run("plan", "llama-8b", "--config", written(tmp_path, fp8=fp8), *SMALL)
        assert answer[0] == code and (code == 0 or f"got '{next(iter(layers))}'" in answer[1]["error"])
    assert run("plan", "llama-8b", "--config", tmp_path / "missing.json")[0] == 3
    (tmp_path / "bad.json").write_text("{")
    assert run("plan", "llama-8b", "--config", tmp_path / "bad.json")[0] == 2


@pytest.mark.parametrize("size", [4, "4"])
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_what_autotp_would_cut_is_refused_and_not_shown_whole(tmp_path: Path, command: str, size: int | str) -> None:
    """DeepSpeed reads the number in quotes, too."""
    changes = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": size}}
    common = ("llama-8b", "--world", 8, *SMALL, "--seq", 8, "--config")
    more = ("--micro-batch", 1) if command == "estimate" else ()
    code, found = run(command, *common, written(tmp_path, **changes), *more)
    assert code == 2 and re.search("tensor_parallel.autotp_size: (expected 1 or none, got )?4", found["error"])
    assert run(command, *common, written(tmp_path, **changes | {"tensor_parallel": {"autotp_size": 1}}), *more)[0] == 0


def test_world_has_one_meaning() -> None:
    commands: Any = typer.main.get_command(app)
    helps = {
        name: option.help
        for name, command in commands.commands.items()
        for option in command.params
        if "--world" in option.opts
    }
    assert set(helps) == {"doctor", "plan", "estimate"}
    assert all(text.startswith("Ranks of the run") for text in helps.values())


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("plan", "llama-8b", "--config", "gone.json"), "--config"),
        (("estimate", "llama-8b", "--config", "gone.json"), "--config"),
        (("plan", "gone.json", "--config", CONFIG), "MODEL"),
        (("estimate", "gone/config.json", "--config", CONFIG), "MODEL"),
        (("doctor", "--no-probe", "--config", CONFIG, "--script", "gone.py"), "--script"),
        (("compare", "gone.csv", "other.csv"), "RUNS"),
    ],
)
def test_a_missing_file_is_named_with_its_argument(arguments: tuple[object, ...], argument: str) -> None:
    code, found = run(*arguments)
    assert code == 3 and "gone" in found["error"]
    assert found["error"].startswith(f"{argument}: expected a file or folder to work with, got ")


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"{", b"[1]"])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    code, found = run("plan", "llama-8b", "--config", path)
    assert code == 2 and found["error"].startswith("--config: expected ")
    assert found["error"].endswith("Name a DeepSpeed configuration.")
    if content != b"[1]":
        code, found = run("plan", path, "--config", CONFIG)
        assert code == 2 and found["error"].startswith("model: expected JSON in ")


# --- estimate ---


def test_bf16_that_trainer_fills_in_is_taken_for_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = written(tmp_path, zero_optimization={"stage": 2}, bf16={"enabled": "auto"}, fp8={"enabled": True})
    assert run("plan", "llama-8b", "--config", config, *ONE_LAYER)[0] == 0
    assert run("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)[0] == 0


def test_estimate_answers_no_where_it_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fp8 = {"enabled": True, "optimizer": {"states": "fp8"}}  # on one rank without buckets, which would be 1 GB
    config = written(tmp_path, zero_optimization={"stage": 2}, fp8=fp8)
    common = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)
    code, found = run(*common)
    assert (
        code == 0 and found["fits"] is None and found["peak"] == max(found["peak_in_backward"], found["peak_in_step"])
    )
    gib = found["peak"] / 2**30
    assert run(*common, "--memory", 0.99 * gib)[0] == 1
    code, found = run(*common, "--memory", 1.01 * gib)
    assert code == 0 and found["fits"] is True


def test_an_estimate_is_of_eager_and_says_what_a_compiled_run_takes_at_most(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fp8 = {"enabled": True, "optimizer": {"states": "fp8"}}
    config = written(tmp_path, zero_optimization={"stage": 2, "reduce_bucket_size": 1000}, fp8=fp8)
    common = ("estimate", "llama-8b", "--config", config, "--seq", 8, "--micro-batch", 1, "--world", 2, *ONE_LAYER)
    _, found = run(*common)
    assert found["peak"] < found["peak_compiled_at_most"]
    page = " ".join(CliRunner().invoke(app, [str(word) for word in (*common, "--memory", 1)]).stdout.split())
    compiled = found["peak_compiled_at_most"] / 2**20
    assert "peak of forward and backward, eager" in page and f"under torch.compile, at most │ {compiled:.2f}" in page
    assert f"Compiled: at most {compiled:.2f} MiB." in page


@pytest.mark.parametrize(("world", "words"), [(1, "stage 3, 1 rank, "), (2, "stage 3, 2 ranks, ")])
def test_the_title_of_an_estimate_counts_ranks(world: int, words: str) -> None:
    pytest.importorskip("transformers")
    common = ("estimate", "llama-8b", "--config", CONFIG, "--seq", 64, "--micro-batch", 1, "--world", world, *ONE_LAYER)
    assert words in CliRunner().invoke(app, [str(word) for word in common]).stdout


def test_small_models_are_shown_in_a_unit_that_fits(tmp_path: Path) -> None:
    """Two decimals of GiB would be zero everywhere."""
    pytest.importorskip("transformers")
    fp8 = {"enabled": True, "optimizer": {"states": "fp8"}}
    config = written(tmp_path, zero_optimization={"stage": 2}, fp8=fp8)
    common = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)
    _, found = run(*common, "--memory", 0.0001)
    words = [str(word) for word in (*common, "--memory", 0.0001)]
    page = " ".join(CliRunner().invoke(app, words).stdout.split())
    mib = found["peak"] / 2**20
    assert 0.1 < mib < 100 and f"{mib:.2f} MiB: does not fit into 0.0001 GiB." in page
    weights = found["bytes"]["weights"] / 2**20
    assert weights > 0.01 and f"│ weights │ {weights:.2f} │" in page
    code, plan = run("plan", "llama-8b", "--config", config, "--world", 2, *ONE_LAYER)
    words = ["plan", "llama-8b", "--config", str(config), "--world", "2", *ONE_LAYER]
    page = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert code == 0 and f"all weights once are {plan['gathered_bytes_per_pass'] / 1e3:.2f} kB on the wire" in page
    assert f"of {plan['parameters']:,} parameters" in page


def test_deepspeeds_buckets_do_not_choose_the_unit_of_a_small_model(tmp_path: Path) -> None:
    """They are 5e8 elements whatever the model is."""
    pytest.importorskip("transformers")
    config = written(tmp_path, zero_optimization={"stage": 2})
    common = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, "--world", 2, *ONE_LAYER)
    _, found = run(*common)
    page = " ".join(CliRunner().invoke(app, [str(word) for word in common]).stdout.split())
    assert found["bytes"]["buffers"] > 100 * found["bytes"]["masters"] > 0
    assert f"│ masters │ {found['bytes']['masters'] / 2**20:.2f} │" in page


@pytest.mark.parametrize(
    ("number", "shown"),
    [(8.03e9, "8.03 B parameters"), (124_439_808, "0.124 B parameters"), (1234, "1,234 parameters")],
)
def test_parameters_are_counted_in_a_unit_that_fits(number: float, shown: str) -> None:
    assert num_parameters(int(number)) == shown


def test_estimate_says_what_fits_while_layers_are_in_bf16(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    schedule = {"bf16_last_fraction": 0.1, "total_steps": 1000}
    fp8 = {"enabled": True, "optimizer": {"states": "fp8"}, "schedule": schedule}
    config = written(tmp_path, zero_optimization={"stage": 2, "reduce_bucket_size": 1000}, fp8=fp8)
    common = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)
    code, found = run(*common)
    low = found["bf16_layers"]
    assert code == 0
    assert low["bytes"]["weights"] == found["bytes"]["weights"] + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    before, after = (max(one["peak_in_backward"], one["peak_in_step"]) for one in (found, low))
    assert before < after == found["peak"]
    assert run(*common, "--memory", (before + after) / 2 / 2**30)[0] == 1
    assert run(*common, "--memory", 1.001 * after / 2**30)[0] == 0
    page = CliRunner().invoke(app, [str(word) for word in (*common, "--memory", 1)]).stdout
    assert "layers in bf16" in page and f"{after / 2**20:.2f} MiB: fits into 1 GiB." in page


# --- doctor ---


@pytest.fixture
def autoload_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(on: bool) -> None:
        monkeypatch.setattr(diagnosis, "autoload_check", lambda: Check("autoload", "ok" if on else "optional", ""))

    return be


@pytest.fixture(scope="module")
def of_this_machine() -> list[Check]:
    return diagnosis.checks()


@pytest.fixture
def checked_once(monkeypatch: pytest.MonkeyPatch, of_this_machine: list[Check]) -> None:
    """For tests of what is said of a configuration: the machine is looked at once for all of them."""
    monkeypatch.setattr(diagnosis, "checks", lambda: list(of_this_machine))


def test_doctor_says_on_a_cpu_what_is_missing_and_what_installs_it() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    code, found = run("doctor")
    by_name = {check["name"]: check for check in found["checks"]}
    assert code == 1 and found["can_train"] is False
    assert by_name["GPU"]["status"] == "missing" and "8.9" in by_name["GPU"]["remedy"]
    assert by_name["seams"]["status"] == "ok" and by_name["deepspeed"]["status"] == "ok"
    for name in ("FlashAttention-3", "transformer_engine", "megatron-core", "CUDA"):
        assert by_name[name]["status"] == "ok" or "pip install" in by_name[name]["remedy"], name
    for recipe in ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"):
        product = by_name[f"product, {recipe}"]
        assert product["status"] == "ok" and "the reference" in product["found"], product


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_doctor_warns_of_products_that_are_wrong(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = diagnosis._product
    monkeypatch.setattr(
        diagnosis,
        "_product",
        lambda recipe, backend, *operands: (
            lambda: right(recipe, backend, *operands)() * (factor if backend == "torch" else 1)
        ),
    )
    assert {check.status for check in diagnosis.probes()} == {"warning"}


def test_doctor_with_a_configuration_has_one_answer(tmp_path: Path) -> None:
    of_the_machine = ("FP8 training on this machine lacks", "All that FP8 training needs is here")
    without = CliRunner().invoke(app, ["doctor", "--no-probe"]).stdout
    assert any(text in without for text in of_the_machine)
    with_config = CliRunner().invoke(app, ["doctor", "--no-probe", "--config", str(written(tmp_path))]).stdout
    assert "FP8 would be " in with_config and not any(text in with_config for text in of_the_machine)


@pytest.mark.parametrize(("version", "status"), [("2.11.0+cu130", "ok"), ("2.14.1", "ok"), ("2.15.0", "warning")])
def test_doctor_says_which_torch_is_tested(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr("torch.__version__", version)
    found = next(check for check in diagnosis.checks() if check.name == "torch")
    assert (found.status, bool(found.remedy)) == (status, status == "warning")
    assert all(one in found.found for one in diagnosis.TESTED_TORCH)


@pytest.mark.parametrize(("older", "status"), [(None, "ok"), ("cuDNN 9.14.0 is loaded", "warning")])
def test_doctor_warns_of_an_older_cudnn_than_torchs(
    monkeypatch: pytest.MonkeyPatch, older: str | None, status: str
) -> None:
    import torch

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("fp8_ds.attention.packages.older_cudnn", lambda: older)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    found = next(check for check in diagnosis.checks() if check.name == "cuDNN")
    assert found.status == status
    assert (older or str(torch.backends.cudnn.version())) in found.found and ("CUDNN_HOME" in found.remedy) == (
        status == "warning"
    )


def test_doctor_names_a_seam_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8_ds.engine import seams

    monkeypatch.setattr(seams, "SEAMS", (seams.Seam("deepspeed", "no_such", (), "rely", "a test"),))
    found = {check.name: check for check in diagnosis.checks()}
    assert found["seams"].status == "missing" and "deepspeed.no_such" in found["seams"].found


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("changes", "script", "on", "code", "word"),
    [
        ({}, "import fp8_ds", "yes", 0, "imports fp8_ds"),
        ({}, "from fp8_ds import Fp8Config", "yes", 0, "imports fp8_ds"),
        ({}, "import fp8_ds_other", "no", 1, "no import of fp8_ds was found in"),
        ({}, None, "if", 1, "trains in bf16 without a word"),
        ({"fp8": {"enabled": False}}, "import fp8_ds", "no", 1, "is false"),
        ({"fp8": {"enabled": True, "linaer": {}}}, "import fp8_ds", "no", 1, "Did you mean"),
        ({"fp16": {"enabled": True}}, "import fp8_ds", "no", 1, "fp16.enabled: true"),
    ],
)
def test_doctor_says_whether_fp8_would_be_on(
    tmp_path: Path, autoload_is: Any, changes: dict[str, Any], script: str | None, on: str, code: int, word: str
) -> None:
    autoload_is(False)
    arguments = ["doctor", "--no-probe", "--config", written(tmp_path, **changes)]
    if script is not None:
        (tmp_path / "train.py").write_text(script + "\n")
        arguments += ["--script", tmp_path / "train.py"]
    found = run(*arguments)
    assert (found[0], found[1]["config"]["on"]) == (code, on)
    assert word in " ".join(found[1]["config"]["reasons"])


@pytest.mark.usefixtures("checked_once")
def test_without_a_script_doctor_ends_as_the_quick_start_says(tmp_path: Path, autoload_is: Any) -> None:
    autoload_is(False)
    code, found = run("doctor", "--no-probe", "--config", written(tmp_path))
    page = (ROOT / "docs/quickstart-deepspeed.md").read_text()
    assert f'`doctor` ends with "{found["verdict"]}" and exit code {code}' in page
    assert f'`"{found["config"]["on"]}"` where only the loading is open' in page


@pytest.mark.parametrize("name", ["train.py", "gone.py"])
def test_a_script_without_a_configuration_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("import fp8_ds\n")
    code, found = run("doctor", "--no-probe", "--script", tmp_path / name)
    assert code == 2 and found["error"].startswith("--script: expected --config beside it")


def test_doctor_has_no_for_an_answer_where_deepspeed_is_missing(
    tmp_path: Path, autoload_is: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoload_is(True)
    installed = diagnosis.installed
    monkeypatch.setattr(diagnosis, "installed", lambda name: None if name == "deepspeed" else installed(name))
    code, found = run("doctor", "--no-probe", "--config", written(tmp_path))
    assert code == 1 and found["config"]["on"] == "no"
    assert found["config"]["reasons"] == ["deepspeed: not installed."]
    assert found["config"]["remedies"] == ["deepspeed: pip install deepspeed."]


def clone(folder: Path, version: str) -> Path:
    """A Megatron-LM that has a version and nothing else."""
    core = folder / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(f'__version__ = "{version}"\n')
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True))
    (core / "package_info.py").write_text("".join(f"{key} = {value}\n" for key, value in numbers.items()))
    return folder


@pytest.mark.parametrize(
    ("version", "status", "found", "remedy"),
    [
        ("0.16.1", "ok", "0.16.1 in ", ""),
        ("0.99.0", "warning", "0.99.0 in ", "git -C CLONE checkout core_v0.16.1"),
        ("0.9.0", "warning", "expected Megatron 0.16.0 or later, got 0.9.0", "git -C CLONE checkout core_v0.16.1"),
        (None, "warning", "expected a clone of Megatron-LM", "git clone --branch core_v0.16.1 https://"),
    ],
)
def test_doctor_says_whether_a_clone_of_megatron_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, status: str, found: str, remedy: str
) -> None:
    place = tmp_path / "clone" if version is None else clone(tmp_path / "clone", version)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(place))
    check = diagnosis._megatron()
    assert (check.name, check.status, bool(check.remedy)) == ("Megatron-LM", status, bool(remedy))
    assert found in check.found and remedy.replace("CLONE", str(place)) in check.remedy


@pytest.mark.parametrize(("version", "status"), [("0.16.1", "ok"), ("0.99.0", "warning"), (None, "optional")])
def test_without_a_clone_doctor_looks_at_the_wheel(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setattr(diagnosis, "_version_of", lambda _: version)
    assert (diagnosis._megatron().name, diagnosis._megatron().status) == ("megatron-core", status)


def test_doctor_names_a_command_for_each_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(diagnosis, "installed", lambda name: None)
        missing = {check.name: check for check in diagnosis.checks()}["torch"]
    assert missing.status == "missing" and missing.remedy == "pip install 'torch==2.13.*'"
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("fp8_ds.attention.packages.older_cudnn", lambda: None)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    found = {check.name: check for check in diagnosis._torch()}
    for name in ("CUDA", "NCCL"):
        assert found[name].status == "warning" and "pip install --force-reinstall 'torch==2.13.*'" in found[name].remedy


def test_doctor_ends_with_the_verdict_then_reasons_and_what_to_do(tmp_path: Path, autoload_is: Any) -> None:
    autoload_is(False)
    (tmp_path / "train.py").write_text("import deepspeed\n")
    refused = written(tmp_path, fp16={"enabled": True}).rename(tmp_path / "refused.json")
    common = ["doctor", "--no-probe", "--config"]
    words = [*common, str(written(tmp_path)), "--script", str(tmp_path / "train.py")]
    lines = CliRunner().invoke(app, words).stdout.splitlines()
    end = lines[lines.index("FP8 would be OFF.") :]
    assert "accept the configuration" in end[1] and end[-2].endswith("trains in bf16 without a word.")
    assert end[-1].startswith("  to do: `import fp8_ds` at the top of the script") and end[-1].endswith("autoload on`.")
    lines = CliRunner().invoke(app, [*common, str(refused)]).stdout.splitlines()
    end = lines[lines.index("FP8 would be OFF.") :]
    assert end[1].startswith("  DeepSpeed refuses it at start: ") and len(end) == 4
    assert end[2].startswith("  It is refused at start: fp16.enabled: true: ") and end[3].startswith("  to do: ")
    code, found = run(*words)
    assert code == 1 and list(found) == ["verdict", "checks", "can_train", "config"]
    assert found["verdict"] == "FP8 would be OFF."


def test_doctor_without_a_configuration_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Check("python", "ok", "3.12"),
        Check("GPU", "missing", "none", "use one"),
        Check("peft", "optional", "", "x"),
    ]
    monkeypatch.setattr(diagnosis, "checks", lambda: found)
    lines = CliRunner().invoke(app, ["doctor", "--no-probe"]).stdout.splitlines()
    assert lines[-2:] == ["FP8 training on this machine lacks: GPU.", "  to do: GPU: use one."]


def test_autoload_alone_turns_it_on(tmp_path: Path, autoload_is: Any) -> None:
    autoload_is(True)
    code, found = run("doctor", "--no-probe", "--config", written(tmp_path))
    assert code == 0 and found["config"]["on"] == "yes"


def test_commands_start_without_torch() -> None:
    code = "import sys, fp8_ds.cli.app; assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)


def test_plan_does_not_name_layers_that_a_row_does_not_hold() -> None:
    """Layers 0 and 3 in one row are not {0..3}, the name of all four."""
    kept = {0, 3}
    layers = [
        Product(f"layers.{i}.fc", "Linear", (16, 16), 1, i not in kept, "kept" if i in kept else "eligible")
        for i in range(4)
    ]
    assert [name for name, _ in _runs(layers)] == ["layers.{0,3}.fc (2)", "layers.{1..2}.fc (2)"]


def test_what_deepspeed_logs_is_not_in_the_answer() -> None:
    """Without DS_ACCELERATOR its first import warns, on standard output."""
    code = "import sys; import fp8_ds; assert 'deepspeed' not in sys.modules; from fp8_ds.cli.app import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    command = [sys.executable, "-c", code, "doctor", "--no-probe", "--config", str(CONFIG), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG, check=False)
    assert json.loads(result.stdout)["checks"] and result.returncode in (0, 1)
