"""`fp8-ds estimate`: memory of a GPU in training, by part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8_ds.cli.common import (
    JsonOption,
    SetOption,
    answer,
    argument,
    console,
    failures,
    num_parameters,
    own_device,
    read_parsed_config,
)

if TYPE_CHECKING:
    from fp8_ds.tools.estimate.footprint import Footprint, Run

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


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
    memory: Annotated[
        float | None, typer.Option("--memory", min=0, max=100_000, help="GiB that a GPU has, such as 139 of an H200.")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Memory of the GPU that holds most, by part, for stage, ranks, states and release of the configuration.

    It is of eager mode, with an upper bound of a run under torch.compile. With a schedule or guard that sends layers to
    bf16 also with these there; the larger must fit.

    Exit codes: 0 done, 1 more than --memory, 2 wrong usage, refused or your model cannot be built, 3 file error,
    4 an error in its forward, or a defect.
    """
    with failures(as_json):
        from fp8_ds.attention.huggingface import refuse_attention_of
        from fp8_ds.engine.presets import facts_of
        from fp8_ds.tools.estimate import footprint
        from fp8_ds.tools.estimate.model_spec import read_spec, sequence_length

        given = read_parsed_config(config)
        with argument("MODEL"):
            spec = read_spec(model, settings or ())
        module = spec.build()
        facts = facts_of(given, module, own_device())
        run = footprint.read_run(given, world, micro_batch, sequence_length(module, seq), checkpointing, facts)
        if run.fp8 is not None:
            refuse_attention_of(module, run.fp8.attention)
        found = footprint.estimate(spec, run)
    fits = memory is None or found.peak <= memory * 2**30
    data = {
        "model": model,
        "parameters": found.num_parameters,
        "stage": run.setup.stage,
        "world": run.setup.num_ranks,
        "micro_batch": run.micro_batch,
        "seq": run.seq_len,
        "fp8": run.fp8 is not None,
        **_numbers(found),
        "peak": found.peak,
        "peak_compiled_at_most": found.peak_compiled,
        "fits": None if memory is None else fits,
    }
    answer(data, as_json, lambda: _print(model, found, run, memory), is_yes=fits)


def _numbers(found: Footprint) -> dict[str, Any]:
    from fp8_ds.tools.estimate.footprint import PARTS

    return {
        "bytes": {name: getattr(found, name) for name in PARTS},
        "peak_in_backward": found.in_backward,
        "peak_in_step": found.in_step,
        "bf16_layers": found.in_bf16 and _numbers(found.in_bf16),
    }


def _print(model: str, found: Footprint, run: Run, memory: float | None) -> None:
    from rich.table import Column, Table

    from fp8_ds.tools.estimate.footprint import PARTS, PEAKS

    optimizer, num_ranks = run.setup.optimizer, run.setup.num_ranks
    states = f"{optimizer.states} states, {optimizer.master_format} masters" if run.fp8 else "stock bf16"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    # Of the smaller peak: DeepSpeed's buckets are 1 GB by default, beside which a small model would be rows of 0.00.
    smaller = min(found.in_backward, found.in_step)
    unit, size = next((one for one in _UNITS if smaller >= one[1] / 10), _UNITS[-1])
    shown = {unit: found} if found.in_bf16 is None else {unit: found, "layers in bf16": found.in_bf16}
    columns = (Column(name, justify="right") for name in shown)
    table = Table("part", *columns, title=f"{model}, stage {run.setup.stage}, {ranks}, {states}")
    for name, text in {**PARTS, **PEAKS}.items():
        numbers = (f"{getattr(each, name) / size:.2f}" for each in shown.values())
        table.add_row(text, *numbers, end_section=name == "buffers")
    out = console()
    out.print(table)
    out.print(
        f"{num_parameters(found.num_parameters)}, micro-batch {run.micro_batch} x {run.seq_len} tokens. Parts do not "
        "add up to a peak: gradients and activations are not all there at once. The last row has activations as eager "
        "keeps them, of which a graph keeps fewer, and the gradients that a graph gives all at once."
    )
    if run.fp8 is not None and run.fp8.linear.min_size != 0:
        out.print(
            "Linears are counted in FP8 whatever their size. A GPU leaves those below linear.min_size in bf16, which "
            "takes more: `fp8-ds plan` says how many they are."
        )
    if memory is not None:
        verdict = "fits into" if found.peak <= memory * 2**30 else "does not fit into"
        at_most = f" Compiled: at most {found.peak_compiled / size:.2f} {unit}."
        compiled = "" if found.peak_compiled == found.peak else at_most
        out.print(f"{found.peak / size:.2f} {unit}: {verdict} {memory:g} GiB.{compiled}")
