"""Our flags in Megatron's parser, and changes to the parsed arguments before Megatron validates them.

Where linears are computed by fp8_ds, --fp8-format and --fp8-recipe become `args.fp8_linear_format` and
`args.fp8_linear_recipe`, and Megatron reads that neither was given: with them it would need Transformer Engine. Only
plain values are put into the arguments: Megatron writes them into checkpoints.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from fp8_ds.attention import BACKENDS
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.ops.gemm import BACKENDS as GEMM_BACKENDS
from megatron_patches import compat, optimizer
from megatron_patches.engine_observers import RECIPES as SAMPLED
from megatron_patches.recipes import GRAD_DTYPES, OTHER_ATTENTION, OURS, Fp8Settings, cuda_graphs, settings

SPEC = ("megatron_patches.layer_specs", "gpt")
_RECIPE = "fp8_recipe"
_DEFAULT_RECIPE = "delayed"
_OF_ENGINES_FP8 = {
    "fp8_param_gather": "FP8 parameters are its own",
    "fp8_param": "FP8 parameters are its own",
    "fp8_output_proj": "The head stays in high precision",
    "moe_router_padding_for_fp8": "GEMMs of fp8_ds pad by themselves",
    "moe_router_padding_for_quantization": "GEMMs of fp8_ds pad by themselves",
}
"""Arguments that ask for Transformer Engine's FP8, and why linears of fp8_ds do without them."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our recipes to the choices of --fp8-recipe and our flags in a group, and let --help print.

    Raises:
        ConfigError: this Megatron has no --fp8-recipe with choices.
    """
    actions = [action for action in parser._actions if action.dest == _RECIPE]
    if len(actions) != 1 or actions[0].choices is None:
        raise ConfigError(
            "--fp8-recipe: expected one argument of Megatron's with choices, got another. Use a tested version: "
            f"{', '.join(compat.TESTED_VERSIONS)}."
        )
    actions[0].choices = (*actions[0].choices, *OURS)
    group = parser.add_argument_group("fp8_ds", "FP8 by megatron_patches; --fp8-recipe also takes " + ", ".join(OURS))
    add = group.add_argument
    add("--megatron-path", help="clone of Megatron-LM; else $MEGATRON_LM_PATH, else the working directory")
    add("--on-cpu", action="store_true", help="a trial without a GPU, over gloo")
    add(
        "--fp8-attention-backend",
        type=_attention_backend,
        metavar=f"{{{','.join(BACKENDS)}}}",
        help="attention by fp8_ds; left out: Megatron's (docs/attention.md)",
    )
    add("--fp8-attention-hadamard", action="store_true", help="rotate q and k before they go into FP8 (fa3_fp8)")
    add("--fp8-gemm-backend", choices=GEMM_BACKENDS, help="of linears without Transformer Engine; left out: torch")
    gathers = "how activations are gathered under --sequence-parallel without Transformer Engine; left out: fp8"
    add("--fp8-tp-gather", choices=("fp8", "bf16"), help=gathers)
    between = "iterations between samples of amax, saturation and underflow of linears; 0: coverage and bytes only"
    add("--fp8-health-interval", type=int, default=0, help=between)
    add("--fp8-optimizer-states", action="store_true", help="Adam's moments in FP8 (docs/megatron.md)")
    masters = f"{{{','.join(optimizer.MASTERS)}}}"
    add("--fp8-master", metavar=masters, help="format of master weights with FP8 states")
    own = "FP8 weights' transposes, a byte a parameter, exist in their own backward only"
    add("--fp8-drop-transposes", action="store_true", help=own)
    _mend_help(parser)
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Double lone percent signs in Megatron's help texts, which stop --help in core_v0.19.0 and later."""
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help)


def digest_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Set `fp8_linear_format` and `fp8_linear_recipe` (None: linears are Megatron's), and `spec` where ours is needed.

    Raises:
        ConfigError, UnsupportedError: flags that cannot take effect.
    """
    optimizer.from_arguments(args)
    args.fp8_linear_format = args.fp8_linear_recipe = None
    _check_attention(args)
    if args.transformer_impl == "local" and args.fp8 is not None:
        _take_over(args)
    else:
        _check_engine_fp8(args)
    _check_health(args)
    if not _needs_spec(args):
        return args
    if args.spec is not None:
        raise ConfigError(
            f"--spec: expected none with --fp8-recipe of fp8_ds or --fp8-attention-backend, got {' '.join(args.spec)}. "
            "Remove it: layers are built from Megatron's spec, changed where these flags say so."
        )
    args.spec = list(SPEC)
    return args


def _needs_spec(args: argparse.Namespace) -> bool:
    return any(getattr(args, name, None) is not None for name in ("fp8_linear_recipe", "fp8_attention_backend"))


def check_spec(args: argparse.Namespace) -> None:
    """Check that final arguments, from which the model is built next, still have our spec where it is needed.

    Raises:
        ConfigError: --use-checkpoint-args has put another spec in its place, or the model is built without one.
    """
    if not _needs_spec(args):
        return
    if list(args.spec or ()) != list(SPEC):
        raise ConfigError(
            f"--use-checkpoint-args: expected a checkpoint without --spec, or with --spec {' '.join(SPEC)}, got "
            f"{' '.join(args.spec or ('none',))}. The model would have no FP8 linears or attention of fp8_ds: remove "
            "--use-checkpoint-args, and pass the model's arguments."
        )
    if getattr(args, "use_legacy_models", False):
        raise ConfigError(
            "--use-legacy-models: expected off with --fp8-recipe of fp8_ds or --fp8-attention-backend, got on. Legacy "
            "models are built without a layer spec: remove the flag."
        )


def wrap_setup_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `setup_model_and_optimizer`: `check_spec`, then Megatron's own."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import global_vars

        check_spec(global_vars.get_args())
        return original(*args, **kwargs)

    return setup_model_and_optimizer


def settings_from(args: argparse.Namespace) -> Fp8Settings | None:
    """Return the settings in digested arguments; None if linears are Megatron's, or the script is Megatron's own.

    Raises:
        ConfigError, UnsupportedError: see `recipes.settings`.
    """
    if getattr(args, "fp8_linear_recipe", None) is None:
        return None
    return settings(
        args.fp8_linear_format,
        args.fp8_linear_recipe,
        backend=args.fp8_gemm_backend or "torch",
        gather=args.fp8_tp_gather or "fp8",
    )


def _take_over(args: argparse.Namespace) -> None:
    """Hand the linears over to fp8_ds, and refuse flags that do not go with it."""
    is_sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    if args.fp8_tp_gather is not None and not is_sequence_parallel:
        raise ConfigError(
            "--fp8-tp-gather: expected it left out without --sequence-parallel over two or more ranks of "
            f"--tensor-model-parallel-size, got {args.fp8_tp_gather}. All-reduces are in bf16: remove it, or add both."
        )
    for name, reason in _OF_ENGINES_FP8.items():
        if getattr(args, name, False):
            flag = "--fp8-param-gather" if name == "fp8_param" else f"--{name.replace('_', '-')}"
            raise UnsupportedError(
                f"{flag}: expected off without Transformer Engine, got on. {reason}: remove the flag."
            )
    args.fp8_linear_format, args.fp8_linear_recipe = args.fp8, args.fp8_recipe
    settings_from(args)  # refused now, not when the model is built
    args.fp8, args.fp8_recipe = None, _DEFAULT_RECIPE


def _attention_backend(value: str) -> str:
    """Check the value for argparse, whose own error does not say what to take instead."""
    if value not in BACKENDS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(BACKENDS)}, got {value}. {OTHER_ATTENTION}.")
    return value


def check_masks(args: argparse.Namespace, backend: str | None) -> None:
    """Refuse --reset-attention-mask with attention by fp8_ds.

    Args:
        args: parsed, of the wrapper or of Megatron's own script.
        backend: that of attention; None: Megatron's own.
    """
    if backend is not None and getattr(args, "reset_attention_mask", False):
        raise UnsupportedError(
            f"--reset-attention-mask: expected off with attention by fp8_ds ({backend}), got on. Documents in one "
            "sequence would attend to each other: pack them (packed_seq_params, as --sft does), or leave the attention "
            "backend out."
        )


def _check_attention(args: argparse.Namespace) -> None:
    check_masks(args, args.fp8_attention_backend)
    if args.fp8_attention_hadamard and args.fp8_attention_backend not in ("fa3_fp8", "fa3_fp8_emulated"):
        raise ConfigError(
            "--fp8-attention-hadamard: expected --fp8-attention-backend fa3_fp8 with it, got "
            f"{args.fp8_attention_backend}. Set that, or remove it."
        )
    # Megatron puts its own class into the slot for this one, after the spec has been made.
    own = getattr(args, "attention_backend", None)
    if args.fp8_attention_backend is not None and getattr(own, "name", own) == "local":
        raise ConfigError(
            f"--attention-backend: expected it left out with --fp8-attention-backend {args.fp8_attention_backend}, got "
            "local. It would take the other's place: remove one."
        )


def check_recipe(args: argparse.Namespace) -> None:
    """Refuse --fp8-recipe without --fp8-format, in arguments of the wrapper or of Megatron's own script."""
    if args.fp8 is not None or getattr(args, "fp8_linear_recipe", None) is not None:
        return
    recipe = getattr(args, _RECIPE, _DEFAULT_RECIPE)
    # Parsed arguments do not tell the default from the same that was named.
    if recipe != _DEFAULT_RECIPE or any(word.partition("=")[0] == "--fp8-recipe" for word in sys.argv[1:]):
        raise ConfigError(
            f"--fp8-recipe: expected --fp8-format with it, got {recipe} and no format. Everything would stay in high "
            f"precision: add --fp8-format {' or '.join(GRAD_DTYPES)}, or remove --fp8-recipe."
        )


def _check_health(args: argparse.Namespace) -> None:
    interval = args.fp8_health_interval
    if interval < 0:
        raise ConfigError(
            f"--fp8-health-interval: expected 0 or more iterations, got {interval}. Pass 0 for coverage and bytes only."
        )
    if not interval or args.fp8_linear_recipe is not None:
        return
    if args.fp8 is None:
        raise ConfigError(
            f"--fp8-health-interval: expected 0 without FP8 linears, got {interval}. There are none to sample: remove "
            "it, or pass --fp8-format and --fp8-recipe."
        )
    if args.fp8_recipe not in SAMPLED:
        raise ConfigError(
            f"--fp8-health-interval: expected 0 with --fp8-recipe {args.fp8_recipe} of Transformer Engine, got "
            f"{interval}. Of {', '.join(SAMPLED)} the casts are known: remove it."
        )
    if flag := cuda_graphs(args):
        raise ConfigError(
            f"--fp8-health-interval: expected 0 with {flag}, got {interval}. Graphs call no hook: remove one of them."
        )


def _check_engine_fp8(args: argparse.Namespace) -> None:
    """Check that Transformer Engine is there if FP8 needs it, and that no flag asks for linears of fp8_ds."""
    if args.fp8_recipe in OURS:
        raise ConfigError(
            f"--fp8-recipe: expected --fp8-format {' or '.join(GRAD_DTYPES)} and --transformer-impl local with "
            f"{args.fp8_recipe}, got {args.fp8} and {args.transformer_impl}. It is computed by fp8_ds: pass both."
        )
    for flag, value in (("--fp8-gemm-backend", args.fp8_gemm_backend), ("--fp8-tp-gather", args.fp8_tp_gather)):
        if value is not None:
            raise ConfigError(
                f"{flag}: expected it left out without FP8 linears of fp8_ds, got {value}. Remove it, or pass "
                "--transformer-impl local and --fp8-format."
            )
    check_recipe(args)
    if args.fp8 is None:
        return
    engine = compat.transformer_engine()
    if not engine.found:
        raise UnsupportedError(
            f"--fp8-format {args.fp8}: expected Transformer Engine, got none ({engine.detail}). Megatron would train "
            "in bf16 without a word. Install it, or pass --transformer-impl local: fp8_ds then computes --fp8-recipe "
            "tensorwise, blockwise, " + ", ".join(OURS) + "."
        )


def wrap_add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `add_megatron_arguments`."""
    return lambda parser: add_arguments(original(parser))


def wrap_parse_args(after: Callable[[argparse.Namespace], None]) -> Callable[[Any], Callable[..., Any]]:
    """Make the wrapper of `parse_args` that calls `after` with the digested arguments."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
            args = digest_arguments(original(extra_args_provider, ignore_unknown_args))
            after(args)
            return args

        return parse_args

    return wrap
