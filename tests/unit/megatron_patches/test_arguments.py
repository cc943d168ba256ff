"""Our flags beside Megatron's, and what of them is refused, on a parser with the flags of Megatron's that matter here.

tests/integration/test_megatron_clone.py has the same with Megatron's own parser.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches import arguments, compat

LOCAL = ["--transformer-impl", "local"]
FP8 = [*LOCAL, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
PADDING = ("moe-router-padding-for-fp8", "moe-router-padding-for-quantization")
SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False)
    found.add_argument("--fp8-format", dest="fp8", choices=("e4m3", "hybrid"))
    found.add_argument(
        "--fp8-recipe", choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"), default="delayed"
    )
    found.add_argument("--fp8-param-gather", dest="fp8_param", action="store_true")
    found.add_argument("--transformer-impl", default="transformer_engine")
    found.add_argument("--tensor-model-parallel-size", type=int, default=1)
    found.add_argument("--sequence-parallel", action="store_true")
    found.add_argument("--spec", nargs="*")
    found.add_argument("--attention-backend", default="auto")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--enable-cuda-graph", action="store_true")
    for flag in ("reset-attention-mask", "use-legacy-models", *PADDING, "fp8-output-proj"):
        found.add_argument(f"--{flag}", action="store_true")
    return arguments.add_arguments(found)


def digest(*words: str) -> argparse.Namespace:
    return arguments.digest_arguments(parser().parse_args(words))


def test_help_is_printed_where_megatrons_own_stops_it() -> None:
    found = parser()
    found.add_argument("--broken", help="at most 5% (of all), by default %(default)s", default=3)
    found.add_argument("--fine", help="100%% of %(prog)s, %(default)s", default=4)
    with pytest.raises(ValueError, match="unsupported format character"):
        found.format_help()
    arguments._mend_help(found)
    text = " ".join(found.format_help().split())
    assert "at most 5% (of all)" in text and "100% of" in text and ", 4" in text


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_local_layers_take_the_recipe(recipe: str) -> None:
    fp8_format = "e4m3" if recipe == "blockwise" else "hybrid"
    args = digest(*LOCAL, "--fp8-format", fp8_format, "--fp8-recipe", recipe)
    found = arguments.settings_from(args)
    assert found is not None
    assert (found.linear.recipe, found.linear.grad_dtype) == (recipe, "e5m2" if fp8_format == "hybrid" else "e4m3")
    assert args.spec == ["megatron_patches.layer_specs", "gpt"]
    assert (args.fp8, args.fp8_recipe) == (None, "delayed")  # Megatron reads that there is no FP8 of its own
    found = arguments.settings_from(digest(*FP8, *SP, "--fp8-tp-gather", "bf16"))
    assert found is not None and found.tensor_parallel.gather == "bf16"


def test_a_megatron_without_the_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one argument of Megatron's with choices"):
        arguments.add_arguments(argparse.ArgumentParser())


def test_only_plain_values_reach_megatrons_checkpoints() -> None:
    args = digest(*FP8, "--fp8-attention-backend", "fa3")
    assert all(isinstance(value, (str, int, float, bool, list, type(None))) for value in vars(args).values())


TE_HEALTH = ["--fp8-format", "hybrid", "--fp8-health-interval", "10", "--fp8-recipe"]
REFUSED: list[tuple[list[str], type[Exception], str]] = [
    ([*LOCAL, "--fp8-format", "hybrid"], UnsupportedError, "--fp8-recipe: .* got delayed"),
    ([*LOCAL, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"], UnsupportedError, "--fp8-recipe: .* got mxfp8"),
    ([*LOCAL, "--fp8-format", "e4m3", "--fp8-recipe", "custom"], UnsupportedError, "--fp8-recipe: .* got custom"),
    ([*LOCAL, "--fp8-format", "hybrid", "--fp8-recipe", "blockwise"], ConfigError, "--fp8-format: expected e4m3"),
    (["--fp8-recipe", "rowwise"], ConfigError, "--transformer-impl local with rowwise"),
    (["--fp8-recipe", "rowwise", "--fp8-format", "hybrid"], ConfigError, "got hybrid and transformer_engine"),
    ([*LOCAL, "--fp8-recipe", "rowwise"], ConfigError, "got None and local"),
    (["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"], UnsupportedError, "would train in bf16"),
    ([*FP8, "--fp8-tp-gather", "bf16"], ConfigError, "without --sequence-parallel"),
    ([*FP8, SP[-1], "--fp8-tp-gather", "bf16"], ConfigError, "--tensor-model-parallel-size"),
    ([*SP, "--fp8-tp-gather", "fp8"], ConfigError, "--fp8-tp-gather: .*without FP8 linears"),
    (["--fp8-gemm-backend", "reference"], ConfigError, "--fp8-gemm-backend"),
    ([*FP8, "--fp8-param-gather"], UnsupportedError, "--fp8-param-gather"),
    *(([*FP8, f"--{flag}"], UnsupportedError, f"--{flag}") for flag in PADDING),
    ([*FP8, "--fp8-output-proj"], UnsupportedError, "--fp8-output-proj"),
    (["--fp8-recipe", "tensorwise"], ConfigError, "--fp8-format with it, got tensorwise"),
    ([*LOCAL, "--fp8-recipe", "mxfp8"], ConfigError, "--fp8-format with it, got mxfp8"),
    ([*FP8, "--fp8-health-interval", "-1"], ConfigError, "--fp8-health-interval: .* got -1"),
    (["--fp8-health-interval", "5"], ConfigError, "--fp8-health-interval: .* got 5"),
    ([*TE_HEALTH, "mxfp8"], ConfigError, "--fp8-health-interval: expected 0 with --fp8-recipe mxfp8"),
    ([*TE_HEALTH, "tensorwise", "--enable-cuda-graph"], ConfigError, "expected 0 with --enable-cuda-graph"),
    (["--fp8-attention-hadamard"], ConfigError, "expected --fp8-attention-backend fa3_fp8"),
    ([*FP8, "--spec", "a", "b"], ConfigError, "--spec: .* got a b"),
    (["--attention-backend", "local", "--fp8-attention-backend", "fa3"], ConfigError, "got local"),
    (["--fp8-master", "bf16_8"], ConfigError, "--fp8-master"),
    (["--reset-attention-mask", "--fp8-attention-backend", "fa3"], UnsupportedError, "--reset-attention-mask"),
]


@pytest.mark.parametrize(("words", "error", "message"), REFUSED)
def test_what_cannot_take_effect_is_refused(
    words: list[str], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[:-1] == TE_HEALTH or words[:-2] == TE_HEALTH:
        monkeypatch.setattr(compat, "transformer_engine", lambda: compat.TransformerEngine(True, "2.11"))
    with pytest.raises(error, match=message):
        digest(*words)


def test_what_is_megatrons_own_affair_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args = digest()
    assert (args.spec, args.fp8, args.fp8_recipe, args.fp8_linear_recipe) == (None, None, "delayed", None)
    assert arguments.settings_from(args) is None
    assert digest(*(f"--{flag}" for flag in PADDING)).fp8_linear_recipe is None
    assert digest(*FP8, "--reset-attention-mask").reset_attention_mask
    monkeypatch.setattr(compat, "transformer_engine", lambda: compat.TransformerEngine(True, "2.11"))
    for recipe in ("tensorwise", "delayed", "blockwise"):  # health is sampled of these
        assert digest(*TE_HEALTH, recipe).fp8_health_interval == 10


def test_attention_that_is_not_ours_is_refused_with_megatrons_own_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        digest("--fp8-attention-backend", "sdpa")
    assert "Megatron's own attention --attention-backend chooses" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--fp8-recipe", "delayed"), ("--fp8-recipe=delayed",)])
def test_the_default_recipe_is_refused_where_it_was_named(monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    with pytest.raises(ConfigError, match="--fp8-recipe: expected --fp8-format with it, got delayed"):
        digest(*words)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--seed", "1"])
    assert digest("--seed", "1").fp8_recipe == "delayed"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the model, by our wrapper, from arguments that Megatron has then."""
    variables, training = ModuleType("megatron.training.global_vars"), ModuleType("megatron.training")
    training.global_vars = variables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)

    def run(args: Any) -> str:
        variables.get_args = lambda: args  # type: ignore[attr-defined]
        found: str = arguments.wrap_setup_model(lambda model, kind=None: f"{model} {kind}")("model", kind="built")
        return found

    return run


@pytest.mark.parametrize("words", [FP8, ["--fp8-attention-backend", "fa3"]])
def test_a_spec_that_the_checkpoint_has_put_in_place_of_ours_is_refused(setup: Any, words: list[str]) -> None:
    """--use-checkpoint-args: Megatron reads them after it has parsed its own."""
    args = digest(*words)
    assert setup(args) == "model built"
    for spec in (["userspec", "plain"], ["megatron_patches.layer_specs", "gpt_fa3"], None):
        args.spec = spec
        with pytest.raises(ConfigError, match="--use-checkpoint-args"):
            setup(args)
    with pytest.raises(ConfigError, match="--use-legacy-models"):  # they have no spec
        setup(digest(*FP8, "--use-legacy-models"))
    for args in (digest("--spec", "a", "b"), SimpleNamespace(spec=None), digest("--use-legacy-models")):
        assert setup(args) == "model built"  # nothing of ours was asked for


def test_what_the_quick_start_says_for_the_wrapper_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "transformer_engine", lambda: compat.TransformerEngine(True, "2.8"))
    text = (Path(__file__).parents[3] / "docs/quickstart-megatron.md").read_text()
    commands = re.findall(r"^\|[^|]*\| `([^`]*)` \| the wrapper \|$", text, re.MULTILINE)
    commands += re.findall(r"-m megatron_patches\.pretrain_gpt ((?:.*\\\n)*.*)\n```", text)
    assert len(commands) == 4
    for command in commands:
        arguments.digest_arguments(parser().parse_known_args(command.replace("\\", "").split())[0])
    assert digest(*FP8, "--fp8-health-interval", "100").fp8_health_interval == 100
