"""Commands as a user types them: what they answer, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
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
    """A file with the configuration and these changes; `fp8` is the block without "enabled"."""
    path = tmp_path / "ds.json"
    if "fp8" in changes:
        changes["fp8"] = {"enabled": True, "preset": None, **changes["fp8"]}
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
        "convert": ["--format", "--json", "--model", "--stage", "--tag", "--to", "--trust-pickle", "--verify"],
    }
    assert sorted(option for p in commands.params for option in p.opts) == ["--json", "--version"]
    for name, options in found.items():
        section = page.split(f"\n## {name}")[1].split("\n## ")[0]
        assert all(f"`{option}" in section for option in options if option != "--json"), (name, options)
        assert "Exit codes" in section


def test_the_version_is_that_of_each_part() -> None:
    from fp8_ds import __version__

    expected = {"fp8_ds": __version__, **{name: metadata.version(name) for name in ("torch", "deepspeed")}}
    assert run("--version") == (0, expected)


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("estimate", "llama-8b", "--config", CONFIG, "--seq", 64, *ONE_LAYER),
            0,
            ("fp32 states", "under torch.compile"),
        ),
        (
            ("estimate", "llama-8b", "--config", CONFIG, "--seq", 64, *ONE_LAYER, "--memory", 0.001),
            1,
            ("does not fit into 0.001 GiB",),
        ),
        (
            ("plan", "llama-8b", "--config", CONFIG, "--world", 2, *SMALL),
            0,
            (
                '"fp8": {"enabled": true, "preset": null, "linear": {"recipe": "delayed"',
                "layers.{0..2}.mlp.down_proj (3)",
                "ZeRO stage 3",
                "21 of them in eager mode",
            ),
        ),
        (("plan", "mixtral-8x7b", "--config", CONFIG, *ONE_LAYER, "--set", "num_local_experts=17"), 0, ("16 experts",)),
        (("--version",), 0, ("fp8_ds ", "torch ", "deepspeed ")),
        (("doctor", "--no-probe", "--config", CONFIG), 1, ("seams", "deepspeed", "to do: `import fp8_ds`")),
        (("autoload", "on", "--site-dir", "."), 0, ("autoload",)),
        (("autoload", "status", "--site-dir", "."), 1, ("off",)),
        (("autoload", "off", "--site-dir", "."), 0, ("autoload",)),
    ],
)
def test_a_command_answers_in_text_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autoload_is: Any, arguments: tuple[Any, ...], code: int, words: Any
) -> None:
    pytest.importorskip("transformers")
    autoload_is(False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code and all(word in result.stdout for word in words), result.output


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
    [({"attention": {"backend": "fa3_fp8"}}, 1, 1 / 3), ({"linear": {"recipe": "rowwise_with_gw_hp"}}, 2 / 3, 0)],
)
def test_plan_counts_products_that_are_in_fp8_in_forward_or_backward_only(
    tmp_path: Path, block: dict[str, Any], of_linears: float, of_attention: float
) -> None:
    pytest.importorskip("transformers")
    _, found = run("plan", "llama-8b", "--config", written(tmp_path, fp8=block), "--seq", 32, *SMALL)
    converted = 2 * sum(row["shape"][0] * row["shape"][1] for row in found["layers"] if row["in_fp8"])
    matrices, attention = sum(row["flops"] for row in found["layers"]), found["attention_flops_per_token"]
    assert attention > 0
    in_fp8 = of_linears * converted + of_attention * attention
    assert found["fp8_percent_of_flops"] == pytest.approx(100 * in_fp8 / (matrices + attention))
    assert found["fp8_percent_of_matrix_flops"] == pytest.approx(100 * of_linears * converted / matrices)


def test_plan_shows_what_is_no_linear_and_answers_no_where_nothing_is_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, found = run("plan", "gpt2", "--config", CONFIG, "--set", "n_layer=2")
    assert code == 0 and found["num_fp8"] == 8
    by_name = {row["fqn"]: row for row in found["layers"]}
    assert by_name["transformer.h.0.attn.c_attn"]["shape"] == [2304, 768]  # of a weight [768, 2304]
    rowwise = written(tmp_path, fp8={"linear": {"recipe": "rowwise"}})
    code, found = run("plan", "gpt2", "--config", rowwise, "--set", "n_layer=2")
    assert code == 1 and found["num_fp8"] == 0
    code, found = run("plan", "mixtral-8x7b", "--config", CONFIG, *SMALL)
    experts = [row for row in found["layers"] if row["shape"][0] == 8 and len(row["shape"]) == 3]
    assert code == 0 and len(experts) == 6 and all(row["in_fp8"] for row in experts)
    assert found["num_fp8"] == found["num_layers"] - 4  # routers and the head
    numel = {row["fqn"]: row["shape"][0] * row["shape"][1] * row["shape"][2] for row in experts}
    assert all(row["flops"] == 2 * numel[row["fqn"]] // 4 for row in experts)  # a token visits 2 of 8


def test_plan_takes_a_config_json_and_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen2Config(**shape, num_key_value_heads=2, vocab_size=50).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert run("plan", path, "--config", CONFIG)[1]["num_fp8"] == 14
    source = "import torch\ndef make(): return torch.nn.Sequential(torch.nn.Linear(32, 32))"
    (tmp_path / "my_model.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert run("plan", "my_model:make", "--config", CONFIG)[1]["layers"][0]["fqn"] == "0"


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"zero_optimization": {"stage": 0}}, 2, "zero_optimization.stage: 0"),
        ({"fp8": {"enabled": False}}, 2, "fp8"),
        ({"fp8": {"schedule": {"layers": {"layers.1.": "bf16"}}}}, 0, ""),
        ({"fp8": {"schedule": {"bf16_until_step": 60, "bf16_last_fraction": 0.5, "total_steps": 100}}}, 1, ""),
        ({"fp8": {"schedule": {"layers": {"layers.7.": "bf16"}}}}, 2, "layers.7."),
        ({"fp8": {"schedule": {"layers": {"lm_head": "bf16"}}}}, 2, "lm_head"),
        ({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 1}}, 0, ""),
        # DeepSpeed reads the number in quotes, too.
        ({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": "4"}}, 2, "autotp_size"),
        ({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 4}}, 2, "autotp_size"),
    ],
)
def test_plan_refuses_what_training_would(tmp_path: Path, changes: dict[str, Any], code: int, word: str) -> None:
    pytest.importorskip("transformers")
    answer = run("plan", "llama-8b", "--world", 8, "--config", written(tmp_path, **changes), *SMALL, "--seq", 8)
    assert answer[0] == code and word in answer[1].get("error", "")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_the_schedule_keeps_in_bf16_is_not_called_fp8(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("transformers")
    on_two_ranks = ("plan", "llama-8b", "--world", 2, *SMALL, "--config")
    layers = {"mlp.down_proj": "bf16", "layers.0.": "fp8"}  # of both, the longer counts
    zero = {"stage": stage}
    (_, whole), (code, found) = (
        run(*on_two_ranks, written(tmp_path, fp8=fp8, zero_optimization=zero))
        for fp8 in ({}, {"schedule": {"layers": layers, "bf16_until_step": 2}})
    )
    assert code == 0 and (whole["num_fp8"], found["num_fp8"]) == (21, 18)
    assert (whole["schedule_varies"], found["schedule_varies"]) == (False, True)
    in_bf16 = [row["fqn"] for row in found["layers"] if not row["in_fp8"]]
    assert in_bf16 == [*(f"model.layers.{number}.mlp.down_proj" for number in range(3)), "lm_head"]
    assert found["fp8_percent_of_flops"] < whole["fp8_percent_of_flops"]
    # Stages 1 and 2 gather a layer's FP8 bytes beside its bf16.
    more = found["gathered_bytes_per_pass"] - whole["gathered_bytes_per_pass"]
    assert more == 3 * 64 * 128 * (2 if stage == 2 else 1)


def test_layers_that_are_too_small_to_gain_are_counted_by_the_tokens_of_a_micro_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = ("hidden_size=2048", "intermediate_size=8192", "num_attention_heads=16", "num_key_value_heads=4")
    words = [word for size in (*sizes, "num_hidden_layers=1", "vocab_size=100") for word in ("--set", size)]
    both = [f"model.layers.0.self_attn.{name}_proj" for name in "kv"]  # 512 x 2048
    square = [f"model.layers.0.self_attn.{name}_proj" for name in "qo"]  # 2048 x 2048
    plan = ("plan", "llama-8b", *words, "--seq", 8192, "--config")
    for linear, per_gpu, compiled, eager in (
        ({}, 1, [*both, *square], [*both, *square]),  # compiled: with q and o the mean is too small
        ({}, 4, both, both),
        ({"min_size": 8192 * 512 * 2048 + 1}, 1, both, both),
        ({"min_size": 0}, 1, [], []),
    ):
        config = written(tmp_path, fp8={"linear": linear}, train_micro_batch_size_per_gpu=per_gpu)
        _, found = run(*plan, config)
        assert (found["tokens"], found["num_fp8"]) == (8192 * per_gpu, 7)  # decided in a run: here they are in FP8
        assert {mode: sorted(names) for mode, names in found["small_layers"].items()} == {
            "compiled": sorted(compiled),
            "eager": sorted(eager),
        }


@pytest.mark.parametrize("command", [("plan",), ("estimate", "--micro-batch", 1, "--seq", 8)])
def test_attention_that_the_model_does_not_take_is_refused_on_any_machine(tmp_path: Path, command: Any) -> None:
    """What a start would say of GPT-2, whose attention has dropout; not that there is no Hopper GPU here."""
    pytest.importorskip("transformers")
    config = written(tmp_path, fp8={"attention": {"backend": "fa3_fp8", "hadamard": True}})
    small = ["--set", "n_layer=1", "--set", "attn_pdrop=0"]
    for more, key in (
        ([], "fp8.attention.backend"),
        (small, None),
        ([*small, "--set", "n_embd=96", "--set", "n_head=2"], "fp8.attention.hadamard"),
    ):
        code, found = run(*command, "gpt2", "--config", config, *more)
        assert code == (2 if key else 0) and (key is None or found["error"].startswith(f"{key}: "))


# --- estimate ---


def test_estimate_answers_no_where_it_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fp8 = {"optimizer": {"states": "fp8"}}  # on one rank without buckets, which would be 1 GB
    config = written(tmp_path, zero_optimization={"stage": 2}, fp8=fp8)
    common = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)
    code, found = run(*common)
    assert code == 0 and found["fits"] is None
    assert found["peak"] == max(found["peak_in_backward"], found["peak_in_step"])
    gib = found["peak"] / 2**30
    assert run(*common, "--memory", 0.99 * gib)[0] == 1
    code, found = run(*common, "--memory", 1.01 * gib)
    assert code == 0 and found["fits"] is True


def test_estimate_says_that_it_asks_for_no_size_where_a_run_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for size in (None, 0):
        config = written(tmp_path, fp8={"linear": {"min_size": size}})
        arguments = ("estimate", "llama-8b", "--config", config, "--seq", 64, "--micro-batch", 1, *ONE_LAYER)
        said = CliRunner().invoke(app, [*map(str, arguments)]).stdout
        assert "micro-batch 1 x 64" in said and ("linear.min_size" in said) == (size is None)


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


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("fp8", "script", "autoload", "on", "code"),
    [
        ({}, "import fp8_ds", False, "yes", 0),
        ({}, None, True, "yes", 0),
        ({}, None, False, "if", 1),
        ({"enabled": False}, "import fp8_ds", False, "no", 1),
        ({"linaer": {}}, "import fp8_ds", False, "no", 1),
    ],
)
def test_doctor_says_whether_fp8_would_be_on(
    tmp_path: Path, autoload_is: Any, fp8: dict[str, Any], script: str | None, autoload: bool, on: str, code: int
) -> None:
    autoload_is(autoload)
    arguments = ["doctor", "--no-probe", "--config", written(tmp_path, fp8=fp8)]
    if script is not None:
        (tmp_path / "train.py").write_text(script + "\n")
        arguments += ["--script", tmp_path / "train.py"]
    found = run(*arguments)
    assert (found[0], found[1]["config"]["on"]) == (code, on)


def test_commands_start_without_torch() -> None:
    code = "import sys, fp8_ds.cli.app; assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)


def test_what_deepspeed_logs_is_not_in_the_answer() -> None:
    """Without DS_ACCELERATOR its first import warns, on standard output."""
    code = "import sys; import fp8_ds; assert 'deepspeed' not in sys.modules; from fp8_ds.cli.app import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    command = [sys.executable, "-c", code, "doctor", "--no-probe", "--config", str(CONFIG), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG, check=False)
    assert json.loads(result.stdout)["checks"] and result.returncode in (0, 1)
