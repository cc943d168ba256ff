"""`fp8-ds parity`: paired runs of a user's model in bf16 and in FP8, compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_ds.cli.common import (
    EXIT_NO,
    JsonOption,
    SetOption,
    argument,
    failures,
    read_config,
    refuse_attention,
    refuse_malformed,
    say_unknown_keys,
    show,
)
from fp8_ds.device import num_gpus

if TYPE_CHECKING:
    from fp8_ds.config import Fp8Config
    from fp8_ds.model_spec import ModelSpec
    from fp8_ds.parity.study import Study


def parity(
    model: Annotated[str, typer.Argument(help="A config.json, its folder, module:function, or llama-8b and the like.")],
    config: Annotated[Path, typer.Option("--config", help="The DeepSpeed configuration, as you train with it.")],
    data: Annotated[list[Path], typer.Option("--data", help="Text files, folders of these, or .npy files of tokens.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the study; a second call goes on in it.")] = Path(
        "parity"
    ),
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Text to evaluate on. Default: one document in 50.")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", help="The base, then others. Default: bf16 and the configuration's block, or default."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Pairs of runs: seeds 0, 1, ...")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=10, help="Of the optimizer, in each run.")] = 1000,
    seq: Annotated[int, typer.Option("--seq", min=2, help="Tokens of a sequence.")] = 1024,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Sequences a rank. Default: the configuration's.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Default: the configuration's; where it has no optimizer, AdamW's.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder of a tokenizer of transformers. Default: bytes.")
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from the weights in MODEL, a folder of save_pretrained.")
    ] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Ranks. Default: all GPUs; 1 without.")] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="engine.compile() in all arms.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, help="Stop in time; the next call goes on there.")
    ] = None,
    archive: Annotated[
        Path | None, typer.Option("--archive", help="The study as one file: read if --out is new, written at the end.")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trains your model in bf16 and in FP8 from the same weights on the same text, and says whether the loss is alike.

    Arms: bf16; default, exactly {"enabled": true}; config, the block in --config; tensorwise, delayed, rowwise,
    rowwise_with_gw_hp, blockwise, ends-in-bf16, e4m19, e4m11, which change that block; NAME=FILE.json.

    Exit codes: 0 parity of all arms, 1 not, or runs are left, 2 wrong usage or refused, 3 file error, 4 a defect.
    """
    from fp8_ds.errors import ConfigError
    from fp8_ds.parity import archive as archives

    with failures(as_json), ExitStack() as stack:
        if archive is not None:
            with argument("--archive"):
                archives.refuse_unwritable(archive)  # said before hours of runs, not after them
                if archive.exists() and not out.exists():
                    archives.unpack(archive, out)
        texts = _Texts(data, held_out or [], tokenizer)
        options = _Options(arms, seeds, steps, seq, pretrained, gpus, compile_model)
        if gpus is not None and gpus > 1 and num_gpus() == 0:
            raise ConfigError(f"--gpus: expected 1 without a GPU, got {gpus}. Leave it out.")
        given = _given(config, micro_batch, lr)
        study = _study(model, given, out, settings or [], texts, options, stack)
        try:
            study.go_on(None if minutes is None else 60 * minutes, _say)
        except KeyboardInterrupt:
            _say(f"Interrupted. Runs that are done are kept in {out}: the same command goes on.")
            raise
        with argument("--out"):
            study.write()
        if archive is not None:
            with argument("--archive"):
                archives.pack(out, archive)
    _show(study, as_json)


def _given(path: Path, micro_batch: int | None, lr: float | None) -> dict[str, Any]:
    """The configuration that the runs start with; what is filled in without being named is said.

    Raises:
        ConfigError: DeepSpeed could not read it, or `lr` is none.
    """
    from fp8_ds.errors import ConfigError
    from fp8_ds.parity.filled import filled

    if lr is not None and not 0 < lr < math.inf:
        raise ConfigError(f"--lr: expected a number above 0, got {lr}. Name the one that you train with.")
    config = read_config(path)
    say_unknown_keys(config)
    refuse_malformed(config)
    found, said = filled(config, micro_batch, lr)
    if said:
        _say(f"fp8-ds: --config: filled in as Trainer does by default: {', '.join(said)}.")
    return found


@dataclass(frozen=True)
class _Texts:
    """What is trained and evaluated on."""

    data: list[Path]
    held_out: list[Path]
    tokenizer: str | None


@dataclass(frozen=True)
class _Options:
    """Of the command, by their names."""

    arms: str | None
    seeds: int
    steps: int
    seq: int
    pretrained: bool
    gpus: int | None
    compile: bool


def _study(
    model: str,
    config: dict[str, Any],
    out: Path,
    settings: list[str],
    texts: _Texts,
    options: _Options,
    stack: ExitStack,
) -> Study:
    """The study in its folder, text prepared; no other call has the folder until `stack` is closed.

    Raises:
        ConfigError: a setting is wrong.
    """
    from fp8_ds.errors import ConfigError
    from fp8_ds.model_spec import read_spec
    from fp8_ds.parity import arms as known_arms
    from fp8_ds.parity import text
    from fp8_ds.parity.folder import held
    from fp8_ds.parity.study import Settings, Study

    own = config.get("fp8")
    default = known_arms.OWN if own and own.get("enabled") else known_arms.DEFAULT
    names = (options.arms or f"{known_arms.BASE},{default}").split(",")
    with argument("--arms"):
        chosen = known_arms.resolve_all(names, own)
    gpus = options.gpus or max(1, num_gpus())
    _check(config, gpus)
    wanted = _enabled(config, chosen)
    with argument("MODEL"):
        spec = read_spec(model, settings)
    if options.pretrained and (not Path(model).is_dir() or settings):
        raise ConfigError(f"--pretrained: expected a folder with weights and no --set, got {model!r}. Name the folder.")
    _check_plans(spec, wanted, options.seq)
    _say_schedule(config, options.steps)
    _say_locks()
    vocab_size = int((spec.config or {}).get("vocab_size", 50257 if spec.config is not None else 2**31 - 1))
    with argument("--out"):
        lock = stack.enter_context(held(out))
    with _named_by_path({"--out": [out], "--held-out": texts.held_out}, "--data"):
        tokens = text.prepare(
            *(out / "text", texts.data, texts.held_out, texts.tokenizer, vocab_size, options.seq),
            per_evaluation=_sequences(config, gpus),
        )
    stock = {key: value for key, value in config.items() if key != "fp8"}
    shared = Settings(
        model=model,
        settings=tuple(settings),
        pretrained=options.pretrained,
        config=stock,
        steps=options.steps,
        seq=options.seq,
        gpus=gpus,
        compile=options.compile,
        digest=tokens.digest,
    )
    with argument("--out"):
        return Study(out, shared, chosen, range(options.seeds), inherited=(lock,))


@contextmanager
def _named_by_path(options: Mapping[str, Sequence[Path]], other: str) -> Iterator[None]:
    """Within `failures`: as `argument` of the option that has named the file, or a folder that it is in."""
    try:
        yield
    except OSError as error:
        file = Path(str(error.filename or ""))
        found = (name for name, paths in options.items() if any(file.is_relative_to(path) for path in paths))
        with argument(next(found, other)):
            raise


def _check(config: dict[str, Any], gpus: int) -> None:
    """Raises: ConfigError: DeepSpeed would not start, or the study cannot be written."""
    from fp8_ds.errors import ConfigError
    from fp8_ds.judgement import BATCH_SIZES, batch_mismatch
    from fp8_ds.parity.filled import OPTION_OF

    if find_spec("matplotlib") is None:  # said before hours of runs, not after them
        raise ConfigError("matplotlib: expected it to be installed, got none. `pip install matplotlib`.")
    if "optimizer" not in config:
        raise ConfigError('--config: expected an "optimizer" in it, got none. Add it, or name --lr for AdamW.')
    automatic = [key for key, value in config.items() if value == "auto"]
    for key in ("optimizer", "scheduler"):
        automatic += [f"{key}.params.{name}" for name, value in _params(config, key).items() if value == "auto"]
    if automatic:
        options = "".join(f", or name {OPTION_OF[key]}" for key in automatic if key in OPTION_OF)
        raise ConfigError(
            f'--config: expected numbers, got "auto" for {", ".join(automatic)}. Write the number{options}.'
        )
    if all(config.get(key) is None for key in BATCH_SIZES):
        raise ConfigError(
            f"--config: expected {' or '.join(BATCH_SIZES)} in it, got neither. DeepSpeed does not start then: add "
            "one, or name --micro-batch."
        )
    if (problem := batch_mismatch(config, gpus)) is not None:
        raise ConfigError(f"--config: {problem}")


def _sequences(config: dict[str, Any], gpus: int) -> int:
    """Of a micro-batch on all ranks, in a configuration that `_check` has let pass."""
    from fp8_ds.judgement import autotp_size

    if (micro := config.get("train_micro_batch_size_per_gpu")) is not None:
        return int(micro) * (gpus // autotp_size(config))
    return int(config["train_batch_size"]) // int(config.get("gradient_accumulation_steps") or 1)


def _params(config: dict[str, Any], key: str) -> Mapping[str, Any]:
    params = config.get(key, {}).get("params")
    return params if isinstance(params, Mapping) else {}


def _enabled(config: dict[str, Any], arms: Mapping[str, dict[str, Any] | None]) -> dict[str, Fp8Config]:
    """The blocks of the arms that are in FP8. Raises: ConfigError, UnsupportedError: a start would refuse one."""
    from fp8_ds.config import Fp8Config
    from fp8_ds.judgement import refuse_here

    read = {name: Fp8Config.from_block(block) for name, block in arms.items() if block is not None}
    found = {name: fp8 for name, fp8 in read.items() if fp8.enabled}
    for name, fp8 in found.items():
        with _named_by_arm(name):
            refuse_here(fp8, {**config, "fp8": arms[name]})
    return found


@contextmanager
def _named_by_arm(name: str) -> Iterator[None]:
    """Within `failures`: what is refused is that of one arm."""
    from fp8_ds.errors import Fp8DsError

    try:
        yield
    except Fp8DsError as error:
        raise type(error)(f"--arms {name}: {error}") from error


def _check_plans(spec: ModelSpec, arms: Mapping[str, Fp8Config], seq: int) -> None:
    """What the first run of an arm would say hours later.

    Raises:
        ConfigError: no layer of the model would be in FP8 in an arm; or it has fewer positions than a sequence has
            tokens.
        UnsupportedError: its attention does not take the backend of an arm.
    """
    from fp8_ds.errors import ModelError
    from fp8_ds.model_spec import sequence_length
    from fp8_ds.nn.convert import make_plan

    try:
        module = spec.build()
    except ModelError as error:  # it may need weights that it can read, which it gets in a run
        typer.echo(
            f"fp8-ds: {error.problem}. Whether it has layers for FP8 shows when the first run in FP8 starts.", err=True
        )
        return
    sequence_length(module, seq)
    for name, fp8 in arms.items():
        with _named_by_arm(name):
            make_plan(module, fp8.linear)
            refuse_attention(module, fp8.attention)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_schedule(config: dict[str, Any], steps: int) -> None:
    """A scheduler that ends before or after the runs is as the user has it, and may not be what the user wants here."""
    total = _params(config, "scheduler").get("total_num_steps")
    if total is not None and total != steps:
        typer.echo(
            f"fp8-ds: scheduler.params.total_num_steps: expected {steps}, as --steps, got {total}. The learning rate "
            'follows the scheduler: change one, or remove "scheduler" for one that ends with the runs.',
            err=True,
        )


def _say_locks() -> None:
    """A run that wants such an extension would wait for ever and say nothing."""
    from fp8_ds.build_locks import abandoned, build_root

    for lock in abandoned(build_root()):
        _say(
            f"fp8-ds: {lock}: expected no lock of a build that no process of this machine runs, got one. Runs that "
            f"want the extension wait for ever: if no other machine builds it, rm {lock}."
        )


def _show(study: Study, as_json: bool) -> None:
    from fp8_ds.comparison import describe, result_as_data

    results, left = study.results(), [run.name for run in study.pending()]
    if as_json:
        found = [result_as_data(result) for result in results]
        show({"results": found, "left": left, "failures": study.failures, "folder": str(study.folder)})
    else:
        for result in results:
            typer.echo(describe(result))
        for name in study.failures:
            typer.echo(f"FAILED: {name}, see {study.folder / 'runs' / name}.log")
        if left:
            typer.echo(f"Left: {', '.join(left)}. The same command goes on.")
        files = sorted(study.folder.glob("parity.*"), key=lambda path: (path.suffix != ".md", path))
        typer.echo(", ".join([str(files[0]), *(path.suffix for path in files[1:])]))
    is_whole = len(results) == len(study.arms) - 1 and not left and not study.failures
    if not is_whole or any(result.verdict != "parity" for result in results):
        raise typer.Exit(EXIT_NO)
