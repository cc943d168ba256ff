"""`fp8-ds estimate`: memory of a GPU in training, by part; the largest model that fits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_ds.cli.common import (
    BINARY,
    EXIT_NO,
    JsonOption,
    SetOption,
    argument,
    console,
    failures,
    fitting_unit,
    in_gib,
    num_parameters,
    read_config,
    refuse_attention,
    refuse_malformed,
    say_unknown_keys,
    show,
)

if TYPE_CHECKING:
    from fp8_ds.counted_run import Run
    from fp8_ds.footprint import Footprint

_PARTS = {
    "weights": "weights",
    "masters": "masters",
    "moments": "moments and their scales",
    "gathered": "weights of other ranks, gathered",
    "gradients": "gradients that wait for the step",
    "activations": "activations kept for the backward",
    "temporaries": "temporaries at the largest moment",
    "buffers": "buffers that gradients are reduced in",
}


def estimate(
    model: Annotated[str, typer.Argument(help="A config.json, its folder, module:function, or llama-8b and the like.")],
    config: Annotated[Path, typer.Option("--config", help="The DeepSpeed configuration.")],
    world: Annotated[int, typer.Option("--world", min=1, max=100_000, help="Ranks of the run.")] = 1,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, help="Tokens of a sequence. Default: 4096, or a model's positions.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Sequences a rank. Default: the configuration's.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Layers are computed again in the backward.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Count a run under torch.compile, which takes less; up to minutes.")
    ] = False,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.0, help="GiB that a GPU has, such as 139 of an H200.")
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Also the most layers that fit into --memory.")] = False,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Memory of the GPU that holds most, by part, for stage, ranks, states and release of the configuration.

    With a schedule or guard that sends layers to bf16 also with these there; what must fit is the larger.

    Exit codes: 0 done, 1 more than --memory, 2 wrong usage, refused or your model cannot be built, 3 file error,
    4 an error in its forward, or a defect.
    """
    from fp8_ds.errors import ConfigError

    with failures(as_json):
        if largest and memory is None:
            raise ConfigError("--largest: expected --memory beside it, got none. Name the GiB of a GPU.")
        if memory is not None and not math.isfinite(memory * 2**30):
            raise ConfigError(f"--memory: expected the GiB of a GPU, got {memory:g}. Name a number such as 139.")
        from fp8_ds import counted_run, footprint
        from fp8_ds.judgement import filled_in
        from fp8_ds.model_spec import read_spec, sequence_length

        given = filled_in(read_config(config))
        say_unknown_keys(given)
        refuse_malformed(given)
        with argument("MODEL"):
            spec = read_spec(model, settings or ())
        module = spec.build()
        length = sequence_length(module, seq)
        run = counted_run.read_run(given, world, micro_batch, length, checkpointing, compiled)
        if run.fp8 is not None:
            refuse_attention(module, run.fp8.attention)
        found = footprint.estimate(spec, run)
        # A graph of every number of layers that is tried would take minutes each.
        fitting = footprint.largest(spec, replace(run, compiled=False), int((memory or 0) * 2**30)) if largest else None
    fits = memory is None or found.peak <= memory * 2**30
    if as_json:
        show(_as_json(model, found, run, memory, fits, largest, fitting))
    else:
        _print(model, found, run, memory)
        if largest:
            _print_largest(fitting, memory, compiled)
    if not fits:
        raise typer.Exit(EXIT_NO)


def _as_json(
    model: str,
    found: Footprint,
    run: Run,
    memory: float | None,
    fits: bool,
    wants_largest: bool,
    fitting: tuple[int, Footprint] | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": model,
        "parameters": found.num_parameters,
        "stage": run.setup.stage,
        "world": run.setup.num_ranks,
        "micro_batch": run.micro_batch,
        "seq": run.seq_len,
        "fp8": run.fp8 is not None,
        "compiled": run.compiled,
        **_numbers(found),
        "peak": found.peak,
        "memory": None if memory is None else int(memory * 2**30),
        "fits": None if memory is None else fits,
    }
    if wants_largest:
        # Always of eager: `footprint.largest` with what `estimate` gives it.
        largest = fitting and {"layers": fitting[0], "parameters": fitting[1].num_parameters, "compiled": False}
        result["largest"] = largest
    return result


def _numbers(found: Footprint) -> dict[str, Any]:
    return {
        "bytes": {name: getattr(found, name) for name in _PARTS},
        "peak_in_backward": found.in_backward,
        "peak_in_step": found.in_step,
        "bf16_layers": found.in_bf16 and _numbers(found.in_bf16),
    }


def _print(model: str, found: Footprint, run: Run, memory: float | None) -> None:
    from rich.table import Table

    setup = run.setup
    states = f"{setup.optimizer.states} states, {setup.optimizer.master_format} masters" if run.fp8 else "stock bf16"
    ranks = "1 rank" if setup.num_ranks == 1 else f"{setup.num_ranks} ranks"
    title = f"{model}, stage {setup.stage}, {ranks}, {states}, {'compiled' if run.compiled else 'eager'}"
    # Of the smaller peak: DeepSpeed's buckets are 1 GB by default, beside which a small model would be rows of 0.00.
    unit, size = fitting_unit(BINARY, min(found.in_backward, found.in_step))
    columns = {unit: found}
    if found.in_bf16 is not None:
        columns |= {"layers in bf16": found.in_bf16}
    table = Table("part", *columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {**_PARTS, "in_backward": "peak of forward and backward", "in_step": "peak of the step"}
    for name, text in rows.items():
        table.add_row(
            text, *(f"{getattr(each, name) / size:.2f}" for each in columns.values()), end_section=name == "buffers"
        )
    out = console()
    out.print(table)
    how = "Eager; a run under torch.compile takes less: --compile counts it."
    if run.compiled:
        how = "Compiled as docs/compile.md has it, the model returning the loss alone; a run in eager takes more."
    out.print(
        f"{num_parameters(found.num_parameters)}, micro-batch {run.micro_batch} x {run.seq_len} tokens. Parts "
        f"do not add up to a peak: gradients and activations are not all there at once. {how}"
    )
    if memory is not None:
        verdict = "fits into" if found.peak <= memory * 2**30 else "does not fit into"
        limit = in_gib(memory * 2**30)
        also = "" if limit.endswith("GiB") else f" ({limit})"
        out.print(f"{in_gib(found.peak)}: {verdict} {memory:g} GiB{also}.")


def _print_largest(fitting: tuple[int, Footprint] | None, memory: float | None, is_compiled: bool) -> None:
    eager = " in eager, which this search counts with --compile too" if is_compiled else ""
    if fitting is None:
        typer.echo(f"Not even one layer of this model fits into {memory:g} GiB{eager}.")
        return
    layers, found = fitting
    typer.echo(
        f"Most that fits{eager}: {layers} layers of this model, {num_parameters(found.num_parameters)} "
        f"({in_gib(found.peak)})."
    )
