"""Every symbol of Megatron that we replace or rely on, with why, what was tried first, and its signature.

Nothing of Megatron is touched that has no row here. `apply` checks all rows of the parts it touches before it replaces
anything; it replaces all that it was asked for, or nothing; what it returns undoes it. Subclasses and specs need no
replacement: their rows are of kind "rely", in symbols.py. What a row does not have refuses everything; a body that is
none of the tested ones (bodies.json: version -> path -> hash) is reported once.

    python -m megatron_patches.patches [CLONE]             prints the rows, and whether the clone, that of
                                                           $MEGATRON_LM_PATH or else the installed core has them
    python -m megatron_patches.patches --update            merges the hashes of the Megatron that `import` finds into
                                                           bodies.json: once the tests pass there (docs/megatron.md)
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from fp8_ds.engine.seam_check import body_hash
from fp8_ds.errors import Fp8DsError, SeamError
from megatron_patches import compat
from megatron_patches.symbols import RELIED, Part, Patch, parse

_BODIES = Path(__file__).with_name("bodies.json")

PATCHES = (
    parse("""
megatron.training.arguments
  our recipes and flags, in --help too
  tried first: extra_args_provider: pretrain_gpt.py passes its own to pretrain(), and cannot add choices to a flag
    wrap add_megatron_arguments(parser)
  our values checked, and taken out of Megatron's flags before validate_args reads them; --spec set
  tried first: extra_args_provider: pretrain_gpt.py passes its own to pretrain(), and cannot add choices to a flag
    wrap parse_args(extra_args_provider, ignore_unknown_args)
megatron.training.initialize <0.17
  the same function, imported by name
  tried first: extra_args_provider: pretrain_gpt.py passes its own to pretrain(), and cannot add choices to a flag
    wrap parse_args(extra_args_provider, ignore_unknown_args)
megatron.training.training
  arguments.py: a spec that --use-checkpoint-args has replaced is refused before the model is built
  tried first: parse_args: Megatron reads the checkpoint's arguments after it
    wrap setup_model_and_optimizer
  FP8 health in the log, TensorBoard and W&B, at the intervals of --log-interval
  tried first: a custom loss_dict key: it is averaged over ranks and printed as a loss; there is no log hook
    wrap training_log(loss_dict, total_loss_dict, learning_rate, iteration)
  cpu.py: allow_no_cuda, which pretrain() does not pass on
  tried first: an argument: there is none
    wrap initialize_megatron
megatron.core.optimizer
  --fp8-optimizer-states: the class from which Megatron makes Adam, for both of its optimizers
  tried first: get_megatron_optimizer has no argument for a class; a wrapper after it would find fp32 states made
    swap Adam
  --fp8-optimizer-states: without Transformer Engine, Adam is asked for by that name, and not torch's
  tried first: none: a constant
    swap USING_PYTORCH_OPTIMIZER
  --fp8-optimizer-states: a subclass that knows where in its weight a shard starts, and what checkpoints hold of it
  tried first: FusedAdam's get_unscaled_state: float32 of all shards at once on the GPU, and no place in the weight
    swap DistributedOptimizer
  --fp8-optimizer-states: a subclass that makes no float32 main parameters and no float32 gradients
  tried first: none: the class's constructor makes them
    swap Float16OptimizerWithFloat16Params
  --fp8-optimizer-states: a subclass that skips a step whose norm is infinite or NaN
  tried first: each optimizer for itself: the norm is that of all of them
    swap ChainedOptimizer
  --fp8-optimizer-states: what it does not support is refused, and the optimizer owns the masters
  tried first: get_megatron_optimizer: imported by name all over
    wrap _get_megatron_optimizer_based_on_param_groups(config, model_chunks)
megatron.core.optimizer.distrib_optimizer
  --fp8-optimizer-states: the distributed optimizer takes instances of it only
  tried first: a subclass of torch's AdamW: it would be two optimizers with two sets of states
    swap Adam
megatron.core.optimizer.optimizer_config
  --fp8-optimizer-states with --use-precision-aware-optimizer: FusedAdam is not needed
  tried first: none: it imports FusedAdam
    wrap OptimizerConfig.__post_init__(self)
megatron.core.distributed.param_and_grad_buffer
  --fp8-drop-transposes: Transformer Engine makes no transposes where weights have been gathered
  tried first: dropping them in the next forward: 1 ms a step of Llama 2.0 B to make them for nothing
    wrap post_all_gather_processing(model_params)
megatron.core.distributed.distributed_data_parallel <0.17
  --fp8-drop-transposes: Transformer Engine makes no transposes where weights have been gathered
  tried first: dropping them in the next forward: 1 ms a step of Llama 2.0 B to make them for nothing
    wrap post_all_gather_processing(model_params)
megatron.core.transformer.transformer_block
  norm.py: the final norm, with sequence parallelism and neither Transformer Engine nor Apex
  tried first: the layer spec: it has a slot for each norm but the final one
    swap LayerNormImpl
megatron.core.tensor_parallel.random
  cpu.py: trials without a GPU
  tried first: torch.cuda's own functions: it calls the generators of devices
    swap _get_cuda_rng_state(device, clone, graph_safe)
  cpu.py: trials without a GPU
  tried first: torch.cuda's own functions: it waits until CUDA is initialised
    swap _set_cuda_rng_state(new_state, device, graph_safe)
megatron.training.initialize
  cpu.py: CUDA kernels are not compiled
  tried first: an argument: there is none
    swap _compile_dependencies
""")
    + RELIED
)


def rows(*parts: Part) -> list[Patch]:
    """Return the rows that the installed Megatron must have, of these parts; of all parts if none is given."""
    installed = compat.version()
    wanted = parts or ("core", "training")
    return [
        row
        for row in PATCHES
        if row.part in wanted and SpecifierSet(row.versions).contains(installed, prereleases=True)
    ]


def find(row: Patch) -> Any:
    """Return the symbol of a row as Megatron has it, also where it is replaced now.

    Raises:
        SeamError: it is missing, or lacks a parameter.
    """
    found = _APPLIED[row.path].originals[row.path] if row.path in _APPLIED else _current(row)
    if row.parameters:
        accepted = tuple(inspect.signature(inspect.unwrap(found)).parameters)
        if accepted[: len(row.parameters)] != row.parameters:
            raise SeamError(_missing(row, f"its parameters are {accepted}, expected {row.parameters} first"))
    return found


def _current(row: Patch) -> Any:
    try:
        owner, name = _owner(row)
        return getattr(owner, name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "megatron":
            raise SeamError(_missing(row, str(error))) from error
        raise SeamError(
            f"{row.module}: expected to import it, got {error}. Install what Megatron's scripts need: "
            '`pip install "fp8-ds[megatron]"`.'
        ) from error
    except (ImportError, AttributeError) as error:
        raise SeamError(_missing(row, str(error))) from error


def check(*parts: Part) -> None:
    """Find every row of these parts (SeamError: the first that is not there); warn of bodies that were not tested."""
    checked = rows(*parts)
    for row in checked:
        find(row)
    _warn_of_other_bodies(tuple(checked))


@functools.cache
def _warn_of_other_bodies(checked: tuple[Patch, ...]) -> None:
    """Warn of bodies that were not tested, once for the same rows."""
    if text := other_bodies({row.path: find(row) for row in checked}):
        warnings.warn(text, stacklevel=4)


def other_bodies(symbols: Mapping[str, Any]) -> str:
    """Name the functions whose body is none of the tested ones; empty if there is none.

    Args:
        symbols: path of a row -> what Megatron has there.
    """
    tested = json.loads(_BODIES.read_text()).values()
    found = {path: body_hash(symbol) for path, symbol in symbols.items() if any(path in table for table in tested)}
    unknown = [path for path, digest in found.items() if all(table.get(path) != digest for table in tested)]
    if not unknown:
        return ""
    return (
        f"megatron_patches is tested with Megatron {', '.join(compat.TESTED_VERSIONS)}; in {compat.version()} these "
        f"bodies differ: {', '.join(unknown)}. Run tests/integration/test_megatron_clone.py with this clone before you "
        "rely on it."
    )


def update_bodies(path: Path = _BODIES) -> None:
    """Merge the hashes of the Megatron that `import` finds into the file, beside those of other versions."""
    symbols = {row.path: find(row) for row in rows()}
    hashes = {path: body_hash(symbol) for path, symbol in symbols.items() if inspect.isroutine(symbol)}
    known = json.loads(path.read_text()) | {compat.version().public: hashes}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


class Applied:
    """Symbols that `apply` has replaced; `originals`: path -> what was there."""

    def __init__(self, originals: dict[str, Any], ours: dict[str, Any]) -> None:
        self.originals = originals
        self._ours = ours

    def remove(self) -> None:
        """Restore Megatron's own symbols.

        Raises:
            SeamError: somebody else has replaced one of the symbols since; nothing is changed then.
        """
        table = {row.path: row for row in rows()}
        for path, replacement in self._ours.items():
            if _current(table[path]) is not replacement:
                raise SeamError(
                    f"{path}: expected what megatron_patches has put there, got another. Undo what replaced it since, "
                    "then this."
                )
        for path, symbol in self.originals.items():
            owner, name = _owner(table[path])
            setattr(owner, name, symbol)
            del _APPLIED[path]
        self._ours, self.originals = {}, {}


_APPLIED: dict[str, Applied] = {}
"""Replacements in force, by path."""


def apply(replacements: Mapping[str, Callable[[Any], Any]]) -> Applied:
    """Replace each of these symbols, or none; the result undoes it.

    Args:
        replacements: path of a row of kind "wrap" or "swap" -> a function of the original symbol that gives what
            replaces it. Rows that this Megatron does not have are left out.

    Raises:
        SeamError: a row of a part that is touched does not hold; a path has no row; or it is applied already. Nothing
            is changed then.
    """
    table = {row.path: row for row in PATCHES if row.kind != "rely"}
    for path in replacements:
        if path not in table:
            raise SeamError(f"{path}: expected a row of megatron_patches/patches.py, got none. Add it there.")
        if path in _APPLIED:
            raise SeamError(f"{path}: expected Megatron's own symbol, got ours. Remove what was applied first.")
    check(*{table[path].part for path in replacements})
    here = {row.path for row in rows()}
    originals = {path: find(table[path]) for path in replacements if path in here}
    ours = {path: replacements[path](symbol) for path, symbol in originals.items()}
    applied = Applied(originals, ours)
    for path, replacement in ours.items():
        owner, name = _owner(table[path])
        setattr(owner, name, replacement)
        _APPLIED[path] = applied
    return applied


def applied() -> tuple[str, ...]:
    """Return the paths that are replaced now."""
    return tuple(sorted(_APPLIED))


def _owner(row: Patch) -> tuple[Any, str]:
    owner: Any = importlib.import_module(row.module)
    *parents, name = row.name.split(".")
    for part in parents:
        owner = getattr(owner, part)
    return owner, name


def _missing(row: Patch, detail: str) -> str:
    return (
        f"expected {row.path} as in Megatron {', '.join(compat.TESTED_VERSIONS)}, got Megatron {compat.version()} "
        f"({detail}). megatron_patches needs it ({row.why}). Use a tested version."
    )


def _main() -> str:
    """Return the text that the command prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", nargs="?")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    if args.update:
        update_bodies()
        return f"{_BODIES}: has the bodies of Megatron {compat.version()}."
    named = args.clone or os.environ.get("MEGATRON_LM_PATH")
    try:
        if named:
            compat.use_clone(Path(named).expanduser().resolve())
        symbols = {row: find(row) for row in (rows() if named else rows("core"))}
    except Fp8DsError as error:
        sys.exit(f"megatron_patches: {error}")
    listed = [f"{row.kind}  {row.path}\n      {row.why}" for row in symbols]
    place = Path(str(importlib.import_module("megatron.core").__file__)).parents[2]
    other = other_bodies({row.path: found for row, found in symbols.items()})
    bodies = other or "Their bodies are those of a tested version."
    return "\n".join([*listed, f"Megatron {compat.version()} at {place} has all {len(listed)}. {bodies}"])


if __name__ == "__main__":
    print(_main())
