"""`fp8-ds plan`: each matrix of a model, its shape, its recipe, or why it stays bf16."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
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
    from fp8_ds.config import ScheduleConfig
    from fp8_ds.nn.plan.flops import Product

_SCHEDULED = "fp8.schedule, in all steps"
_MODES = {"compiled": "in a compiled model", "eager": "in eager mode"}


def plan(
    model: Annotated[str, typer.Argument(help="A config.json, its folder, module:function, or llama-8b and the like.")],
    config: Annotated[Path, typer.Option("--config", help="The DeepSpeed configuration.")],
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks of the run.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq", min=1, help="Tokens of a sequence, for the share of attention. Default: 4096, or its positions."
        ),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Each layer, its shape, its recipe or the reason for bf16; the share of FLOPs in FP8. No GPU, no download.

    Exit codes: 0 done, 1 no layer would be in FP8, 2 wrong usage, refused or an error of your model, 3 file error,
    4 a defect.
    """
    with failures(as_json):
        found = _find(model, read_parsed_config(config), world, seq, settings or ())
    data = found | {"layers": [vars(product) for product in found["layers"]]}
    answer(data, as_json, lambda: _print(found), is_yes=found["num_fp8"] > 0)


def _find(model: str, config: dict[str, Any], world: int, seq: int | None, settings: Sequence[str]) -> dict[str, Any]:
    from fp8_ds.attention.huggingface import refuse_attention_of
    from fp8_ds.config import Fp8Config
    from fp8_ds.config.ds_config import block_of, number, zero_stage
    from fp8_ds.config.presets import is_written
    from fp8_ds.engine.compat.config import refuse_settings, total_steps
    from fp8_ds.engine.presets import facts_of, resolved
    from fp8_ds.errors import ConfigError, UnsupportedError
    from fp8_ds.nn.moe.products import MAX_IN_A_LOOP
    from fp8_ds.nn.plan.flops import SizeRule, attention_flops, products
    from fp8_ds.nn.plan.plan import make_plan
    from fp8_ds.tools.estimate.model_spec import read_spec, sequence_length

    block = config.get("fp8", {"enabled": False})
    if not Fp8Config.from_block(block).enabled:
        raise ConfigError('fp8.enabled: expected true, got false or no "fp8" block. Nothing would be in FP8.')
    if (autotp := number(block_of(config, "tensor_parallel").get("autotp_size"), 1)) > 1:
        raise UnsupportedError(
            f"tensor_parallel.autotp_size: expected 1 or none, got {autotp}. DeepSpeed shards layers when a run "
            "starts, and plan sees whole ones: leave it out to see which would be in FP8, and divide --world by it."
        )
    stage = zero_stage(config)
    with argument("MODEL"):
        module = read_spec(model, settings).build()
    fp8 = Fp8Config.from_block(block, facts_of(config, module, own_device()))
    refuse_settings(fp8, config)
    refuse_attention_of(module, fp8.attention)
    seq = sequence_length(module, seq)
    layers = make_plan(module, fp8.linear, may_be_empty=True)
    may_miss = not is_written(block, "schedule", "layers")
    found = _scheduled(products(module, layers), fp8.schedule, total_steps(config), may_miss)
    num_tokens = seq * number(config.get("train_micro_batch_size_per_gpu"), 1)
    sizes: dict[int, dict[str, tuple[float, int, int]]] = {2: {}, 3: {}}  # linears; weights of experts
    for row in found:
        num_out, num_in = row.shape[-2:]
        num_rows = num_tokens * row.flops / (2 * num_out * num_in)  # of experts more than there are tokens
        if row.in_fp8:
            sizes[len(row.shape)][row.fqn] = (num_rows, num_in, num_out)
    rules = {mode: SizeRule.of(fp8.linear.min_size, is_compiled=mode == "compiled") for mode in ("compiled", "eager")}
    in_bf16 = {mode: rule.too_small(sizes[2]) | rules["eager"].too_small(sizes[3]) for mode, rule in rules.items()}
    small = {mode: [row.fqn for row in found if row.fqn in names] for mode, names in in_bf16.items()}
    attention = attention_flops(module, seq)
    total = sum(product.flops for product in found)
    in_fp8 = [product for product in found if product.in_fp8]
    # Of a linear's three products that recipe leaves one in bf16. Of attention at most the forward is in FP8.
    flops_in_fp8 = (2 / 3 if fp8.linear.recipe == "rowwise_with_gw_hp" else 1) * sum(one.flops for one in in_fp8)
    attention_in_fp8 = attention / 3 if fp8.attention.backend in ("fa3_fp8", "fa3_fp8_emulated") else 0
    numel = sum(p.numel() for p in module.parameters())
    fp8_numel = sum(math.prod(product.shape) for product in in_fp8)
    beside = sum(math.prod(product.shape) for product in found if product.reason == _SCHEDULED)
    beside = beside if stage < 3 and in_fp8 else 0  # stages 1 and 2 gather runs of FP8 bytes whole
    return {
        "model": model,
        "parameters": numel,
        "block": resolved(fp8),
        "recipe": fp8.linear.recipe,
        "stage": stage,
        "world": world,
        "seq": seq,
        "num_layers": len(found),
        "num_fp8": len(in_fp8),
        "fp8_percent_of_parameters": 100 * fp8_numel / max(numel, 1),
        "fp8_percent_of_matrix_flops": 100 * flops_in_fp8 / max(total, 1),
        "fp8_percent_of_flops": 100 * (flops_in_fp8 + attention_in_fp8) / max(total + attention, 1),
        "attention_flops_per_token": attention,
        "attention_backend": fp8.attention.backend,
        "fp8_percent_of_attention_flops": 100 * attention_in_fp8 / max(attention, 1),
        "gathered_bytes_per_pass": fp8_numel + 2 * (numel - fp8_numel) + beside if world > 1 else 0,
        "schedule_varies": bool(in_fp8 and (fp8.schedule.bf16_until_step or fp8.schedule.bf16_last_fraction)),
        "tokens": num_tokens,
        "small_layers": small,
        "many_experts_by_device": any(len(one.shape) == 3 and one.shape[0] > MAX_IN_A_LOOP for one in in_fp8),
        "layers": found,
    }


def _scheduled(found: Sequence[Product], config: ScheduleConfig, total_steps: object, may_miss: bool) -> list[Product]:
    """Return the products, with those in bf16 that the "schedule" block puts there in every step.

    Raises:
        ConfigError: it names what is not in FP8.
    """
    from fp8_ds.config.schedule import PrecisionSchedule

    names = [product.fqn for product in found if product.in_fp8]
    schedule = PrecisionSchedule.of(config, names, total_steps, may_miss)
    usual = "bf16" if schedule.is_never_fp8 else "fp8"
    return [
        replace(product, in_fp8=False, reason=_SCHEDULED)
        if product.in_fp8 and schedule.fixed.get(product.fqn, usual) == "bf16"
        else product
        for product in found
    ]


def _print(found: dict[str, Any]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    out = console()
    out.print(f'"fp8": {json.dumps(found["block"])}', markup=False, soft_wrap=True)
    table = Table("layer", "class", "shape", "computed in", "why")
    for fqns, product in _runs(found["layers"]):
        where = found["recipe"] if product.in_fp8 else "bf16"
        table.add_row(fqns, product.kind, str(list(product.shape)), where, product.reason)
    out.print(table)
    forward = ", whose forward is in FP8" if found["fp8_percent_of_attention_flops"] else ""
    out.print(
        f"{found['num_fp8']} of {found['num_layers']} matrices in FP8: {found['fp8_percent_of_parameters']:.1f} % of "
        f"{num_parameters(found['parameters'])}, {found['fp8_percent_of_matrix_flops']:.1f} % of the FLOPs of "
        f"matrices, {found['fp8_percent_of_flops']:.1f} % with attention{forward}."
    )
    if found["world"] > 1:
        bf16 = 2 * found["parameters"]
        share = found["gathered_bytes_per_pass"] / bf16
        out.print(
            f"ZeRO stage {found['stage']}, {found['world']} ranks: all weights once are "
            f"{decimal(found['gathered_bytes_per_pass'], precision=2)} on the wire, {share:.2f} of bf16's."
        )
    if found["schedule_varies"]:
        out.print('"schedule" puts FP8 layers into bf16 for a part of the run: the above is of the other steps.')
    if found["many_experts_by_device"]:
        out.print(
            "Layers of more than 16 experts are in FP8 on GPUs of compute capability 9.0 or later (but 12.x), else in "
            "bf16."
        )
    numbers = {mode: len(names) for mode, names in found["small_layers"].items()}
    if any(numbers.values()):
        none = '. Where none is left in FP8, set "optimizer.states" to "fp8", or leave the block out'
        out.print(
            f"Too small to gain, these stay bf16 on GPUs, with {found['tokens']:,} tokens a rank: "
            f"{' and '.join(f'{number} of them {_MODES[mode]}' for mode, number in numbers.items())}"
            f"{none if found['num_fp8'] in numbers.values() else ''}."
        )


def _runs(layers: Sequence[Product]) -> list[tuple[str, Product]]:
    """Join layers whose names differ in numbers only to one row: `model.layers.{0..31}.mlp.up_proj`."""
    rows: dict[tuple[Any, ...], list[tuple[list[str], Any]]] = {}
    for product in layers:
        pattern = re.sub(r"\d+", "*", product.fqn)
        key = pattern, product.kind, product.shape, product.in_fp8, product.reason
        rows.setdefault(key, []).append((re.findall(r"\d+", product.fqn), product))
    found = []
    for (pattern, *_), members in rows.items():
        columns = zip(*(numbers for numbers, _ in members), strict=True)
        names = pattern
        for column in columns:
            names = names.replace("*", _numbers(list(dict.fromkeys(column))), 1)
        count = f" ({len(members)})" if len(members) > 1 else ""
        found.append((names + count, members[0][1]))
    return found


def _numbers(distinct: Sequence[str]) -> str:
    """Return `{0..31}` if none between is missing; else all numbers."""
    if len(distinct) == 1:
        return distinct[0]
    is_range = [int(text) for text in distinct] == list(range(int(distinct[0]), int(distinct[-1]) + 1))
    return f"{{{distinct[0]}..{distinct[-1]}}}" if is_range else f"{{{','.join(distinct)}}}"
