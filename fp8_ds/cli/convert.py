"""`fp8-ds convert`: a checkpoint of training as bf16 safetensors, either of them as a universal checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fp8_ds.cli.common import DECIMAL, JsonOption, argument, failures, in_units, show


class Target(str, Enum):
    """Forms to convert to; "deepspeed" is refused with what to do instead."""

    safetensors = "safetensors"
    universal = "universal"
    deepspeed = "deepspeed"


def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder of save_checkpoint, of a universal checkpoint, or of safetensors.")
    ],
    out: Annotated[Path, typer.Argument(help="An empty folder, or one that is not there.")],
    to: Annotated[Target, typer.Option("--to", help="The form to write.")],
    tag: Annotated[str | None, typer.Option("--tag", help="One of several saves. Default: the latest.")] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", min=1, max=3, help="ZeRO stage that is to load the universal checkpoint.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with config.json and tokenizer, copied beside safetensors.")
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Files may hold more than data: code of whoever wrote them is executed."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Converts checkpoints: of training to bf16 safetensors, and these or those to a universal checkpoint.

    Weights leave as bf16 of the masters, bitwise. Of safetensors a universal checkpoint has masters equal to them,
    moments of zero and step 0; it needs --stage, and an engine whose trainable parameters have the names in the files.
    Parameter groups, learning rates and the scheduler stay the engine's own.

    Exit codes: 0 done, 2 wrong usage or refused, 3 file error, 4 a defect.
    """
    with failures(as_json):
        from fp8_ds.checkpoint.convert import convert as run
        from fp8_ds.checkpoint.convert import kind_of

        with argument("source"):
            kind_of(source)
        found = run(source, out, to.value, tag, stage, model, trust_pickle)
    if as_json:
        show(asdict(found))
        return
    dtype = "fp32" if found.target == "universal" else "bf16"
    what = f"{found.num_tensors} tensors, {in_units(DECIMAL, found.num_bytes)} in {dtype}"
    typer.echo(f"{found.source} to {found.target}: {what}; {len(found.files)} entries in {out}")
    if found.latest is not None:
        latest = Path(found.latest)
        typer.echo(
            f"{latest} names it now: load_checkpoint({str(latest.parent)!r}) reads it, with "
            '"checkpoint": {"load_universal": true}.'
        )
