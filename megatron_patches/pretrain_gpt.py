"""`torchrun ... -m megatron_patches.pretrain_gpt ARGUMENTS`: your clone's pretrain_gpt.py, with our recipes and flags.

Arguments are those of Megatron and of megatron_patches (--help lists both). The clone is --megatron-path,
$MEGATRON_LM_PATH, or the working directory, in this order.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fp8_ds.errors import ConfigError, refusals_without_traceback
from megatron_patches import compat, patches

_SCRIPT = "pretrain_gpt.py"
_VARIABLE = "MEGATRON_LM_PATH"


def find_clone(argument: str | None, environment: str | None, directory: Path) -> Path:
    """Return the root of the user's clone, from the first of these that is given.

    Raises:
        ConfigError: there is none where the first of them says.
    """
    given = argument or environment
    path = Path(given).expanduser().resolve() if given else directory.resolve()
    if not (path / _SCRIPT).is_file() or not (path / "megatron" / "core").is_dir():
        source = "--megatron-path" if argument else f"${_VARIABLE}" if environment else "the working directory"
        raise ConfigError(
            f"{source}: expected a clone of Megatron-LM, got {path}, which has no {_SCRIPT} or no megatron/core. Run "
            "`git clone https://github.com/NVIDIA/Megatron-LM`, check out core_v0.16.1, and pass --megatron-path."
        )
    return path


def _own_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--megatron-path")
    parser.add_argument("--on-cpu", action="store_true")
    return parser.parse_known_args(list(arguments))[0]


def needs_own_final_norm(args: argparse.Namespace) -> bool:
    """Whether norms of a layer spec of ours, named or not, may be torch's under sequence parallelism: the last norm of
    the model is in no layer spec (norm.py)."""
    from megatron_patches.arguments import SPEC

    is_ours = bool(args.spec) and args.spec[0] == SPEC[0]
    return is_ours and args.transformer_impl == "local" and bool(args.sequence_parallel)


def prepare(arguments: Sequence[str], stack: ExitStack) -> Path:
    """Patch Megatron, on the CPU if the arguments say so, until `stack` is closed; return the script to run."""
    own = _own_arguments(arguments)
    path = find_clone(own.megatron_path, os.environ.get(_VARIABLE), Path.cwd())
    compat.use_clone(path)
    if own.on_cpu:
        from megatron_patches.cpu import on_cpu

        stack.enter_context(on_cpu(training=True))
    patches.check()  # all rows, before any is applied
    from megatron_patches import arguments as ours
    from megatron_patches import health, norm, optimizer

    def after(args: Any) -> None:
        replaced: dict[str, Any] = {}
        states = optimizer.from_arguments(args)
        if states is not None:
            replaced.update(optimizer.replacements(states))
        if needs_own_final_norm(args):
            replaced["megatron.core.transformer.transformer_block.LayerNormImpl"] = norm.without_refusal
        # Megatron parses its arguments more than once.
        missing = {path: replace for path, replace in replaced.items() if path not in patches.applied()}
        if missing:
            stack.callback(patches.apply(missing).remove)

    parse, log = ours.wrap_parse_args(after), health.HealthLog()
    applied = patches.apply(
        {
            "megatron.training.arguments.add_megatron_arguments": ours.wrap_add_arguments,
            "megatron.training.arguments.parse_args": parse,
            "megatron.training.initialize.parse_args": parse,
            "megatron.training.training.setup_model_and_optimizer": lambda original: ours.wrap_setup_model(
                log.wrap_setup_model(original)
            ),
            "megatron.training.training.training_log": log.wrap_training_log,
        }
    )
    stack.callback(applied.remove)
    return path / _SCRIPT


def main() -> None:
    """Run the script. A refusal is the last that a rank says, without a traceback, and ends it with status 2."""
    with refusals_without_traceback(), ExitStack() as stack:
        script = prepare(sys.argv[1:], stack)
        sys.argv[0] = str(script)
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
