"""Messages about wrong keys of the "fp8" block: what was expected, what was there, and what to do.

They are about what pydantic refuses: unknown keys, and values that a key does not take. The models themselves refuse
values that contradict each other, in config/__init__.py.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

_ENDS = (
    'Write "preset": "precise", which keeps the first and last layer of each list in bf16; or name layers in '
    '"linear.filter_fqns": ["lm_head", "layers.0.", "layers.-1."], or in "schedule.layers"'
)
_LISTENER = "For another, add a listener that judges (engine.add_fp8_listener, docs/monitor.md)"
REMOVED = {
    "fp8.linear.layer_choice": (
        'Remove the key: all linears that may be in FP8 are. Name those that shall stay bf16 in "filter_fqns", such as '
        "`fp8-ds plan` calls too small to gain"
    ),
    "fp8.linear.num_layers_at_start_in_bf16": _ENDS,
    "fp8.linear.num_layers_at_end_in_bf16": _ENDS,
    "fp8.linear.tokens": 'Remove the key: it was for "layer_choice", which is gone',
    "fp8.linear.max_experts": (
        "Remove the key: more than 16 experts of a layer are in FP8 where all are computed in one launch. To leave "
        'experts in bf16 name them in "filter_fqns": ["lm_head", "experts"]'
    ),
    "fp8.activations.cross_entropy": (
        "Remove the key, and put the loss into the model before deepspeed.initialize: apply_liger_kernel_to_llama("
        "model=model, fused_linear_cross_entropy=True, rope=False, rms_norm=False, swiglu=False) or its like "
        "(Trainer: use_liger_kernel=True with these as liger_kernel_config)"
    ),
    "fp8.activations.smooth_swiglu": (
        "Remove the key. Where the monitor shows underflow in the inputs of down_proj, name these layers in "
        '"linear.filter_fqns"'
    ),
    "fp8.tensor_parallel.chunks": "Remove the key: shards are gathered at once",
    "fp8.tensor_parallel.reduce_scatter": "Remove the key: sums over ranks travel in bf16, which was faster on NVLink",
    "fp8.tensor_parallel.scales": "Remove the key: each rank scales its shard by its own amax",
    "fp8.guard.saturation": f"Remove the key: the limit is 0.01, with delayed scales another. {_LISTENER}",
    "fp8.guard.underflow": f"Remove the key: the limit is 0.2, with delayed scales there is none. {_LISTENER}",
    "fp8.guard.return_after": (
        "Remove the key: a layer that the guard has sent to bf16 stays there until "
        'engine.set_layer_precision(name, "schedule")'
    ),
    "fp8.attention.backend=sdpa": 'Remove the key: it is what transformers takes by itself, attn_implementation="sdpa"',
    "fp8.attention.backend=cudnn": (
        'Remove the key, and load the model with attn_implementation="sdpa": torch takes cuDNN for it on Hopper'
    ),
    "fp8.attention.backend=fa2": (
        'Remove the key, and load the model with attn_implementation="flash_attention_2", which needs flash-attn, too'
    ),
    "fp8.attention.backend=flex": 'Remove the key, and load the model with attn_implementation="flex_attention"',
    "fp8.zero.keep_bf16_shard": (
        "Remove the key. Read or write weights inside deepspeed.zero.GatheredParameters, or this rank's part by "
        "deepspeed.utils.safe_get_local_fp32_param and safe_set_local_fp32_param"
    ),
    "fp8.optimizer.outstanding_update_bytes": (
        "Remove the key: buckets of released gradients take 64 MiB at most; for less, lower "
        '"zero_optimization": {"reduce_bucket_size"}'
    ),
    "fp8.optimizer.release_clipping=per_tensor": (
        'Write "delayed_norm", which clips while gradients are released, by the global norm of the step before'
    ),
    "fp8.schedule.bf16_below_lr": (
        'Write "bf16_until_step" for the warm-up and "bf16_last_fraction" for the end of the run; or call '
        'engine.set_layer_precision("", "bf16") where your learning rate falls below it'
    ),
    "fp8.schedule.fp32_states_from_step": (
        'Remove the key. Save a checkpoint at that step, and resume from it with "optimizer": {"states": "fp32"}, '
        "which takes over masters and moments exactly"
    ),
}
"""Remedies for keys (`fp8.block.key`) and values (`fp8.block.key=value`) that this version has no more."""
COMMENT_SIGNS = ("_", "/", "#")
"""Beginnings of keys that stand in for comments, which JSON does not have."""
_BESIDE = {
    "fp8.zero.stage": '"zero_optimization"',
    "fp8.optimizer.type": 'DeepSpeed\'s "optimizer"',
    "fp8.optimizer.params": 'DeepSpeed\'s "optimizer"',
}
"""DeepSpeed's keys, and the block beside ours that each belongs in."""
_FOREIGN = {
    "MS-AMP": ("opt_level", "use_te"),
    "torchao": ("emulate", "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"),
    "Transformer Engine": ("amax_compute_algo", "amax_history_len", "format", "fp8_format", "margin"),
}
"""Keys of other libraries; docs/migrating.md says what takes their place."""
_ARTICLES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "list of strings": "a list of strings",
}


class Key(NamedTuple):
    """One key of the block, as docs/config.md shows it."""

    values: str
    """The allowed values as JSON, separated by ", ", or a phrase ("list of strings")."""
    default: str
    """The default as JSON, or "required"."""


def parse_json(text: str, **hooks: Any) -> Any:
    """Parse JSON of a user's file or argument, with a ValueError for every text that `json.loads` cannot read.

    Args:
        hooks: keyword arguments of `json.loads`.

    Raises:
        json.JSONDecodeError: the text is no JSON, or nested too deeply (Python's own error is a RecursionError).
        ValueError: an integer has more digits than Python reads.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as error:
        raise json.JSONDecodeError("Brackets nested too deeply", text, 0) from error


def as_json(value: Any) -> str:
    """Return one line of JSON, with Python's repr of values that JSON has no form for."""
    try:
        return json.dumps(value, default=repr)
    except RecursionError:
        return "what is nested too deep to be shown"


def explain(details: ErrorDetails, known: Mapping[str, Key]) -> str:
    """Return one line "<key>: expected ..., got <value>. <remedy>." for one pydantic error.

    Args:
        details: details of the error; its `loc` begins within the block. A model's own ConfigError is the line.
        known: every key, `Fp8Config.keys()`.
    """
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    path = [str(part) for part in details["loc"]]
    if details["type"] == "string_too_short" and path[-1] == "[key]":  # of an object whose keys name layers
        path = path[:-2]
    key = ".".join(["fp8", *path])
    value = details["input"]
    if details["type"] == "string_unicode":
        return f"{key}: expected whole characters, got {as_json(value)}. A lone surrogate is half of one: remove it."
    if key in REMOVED:
        return f"{key}: expected no such key, which this version has no more, got {as_json(value)}. {REMOVED[key]}."
    if details["type"] == "extra_forbidden":
        return f"{key}: expected a known key, got {as_json(value)}. {_unknown_key_remedy(key, known)}"
    if details["type"] == "missing":
        return f'{key}: expected true or false, got nothing. Write "{path[-1]}": true.'
    said = f"{key}: expected {_expected(key, details, known)}, got {as_json(value)}"
    if value == "auto":
        hint = "true or false" if key in known and known[key].values == "true, false" else "a value, or remove the key"
        return f'{said}. "auto" is not supported: no tool fills it in inside the "fp8" block; write {hint}.'
    if isinstance(value, str) and (remedy := REMOVED.get(f"{key}={value}")):
        return f"{said}, which this version has no more. {remedy}."
    if details["type"] == "model_type":
        return f"{said}. {_inner_block_remedy(key, value, known)}"
    return f"{said}. {_value_remedy(key, value, details, known.get(key))}"


def _expected(key: str, details: ErrorDetails, known: Mapping[str, Key]) -> str:
    limits = {"greater_than_equal": ("ge", "of at least"), "less_than_equal": ("le", "of at most")}
    if details["type"] in limits:
        name, words = limits[details["type"]]
        kind = "an integer" if isinstance(details["ctx"][name], int) else "a number"
        return f"{kind} {words} {details['ctx'][name]}"
    if key.startswith("fp8.schedule.layers."):
        return '"bf16" or "fp8"'
    if details["type"] == "string_too_short":
        return "a string of at least one character"
    if key in known:
        if known[key].values.startswith("object"):
            return f"an {known[key].values}".replace('", "', '" or "')
        values = [_ARTICLES.get(value, value) for value in known[key].values.split(", ")]
        return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
    return "a string" if key.startswith("fp8.linear.filter_fqns") else "an object of keys"


def _value_remedy(key: str, value: Any, details: ErrorDetails, known: Key | None) -> str:
    if details["type"] == "literal_error" and isinstance(value, str):
        near = _near_value(value.lower(), re.findall("'([^']+)'", details["ctx"]["expected"]))
        if near is not None:
            return f'Did you mean "{near}"?'
    if details["type"] == "string_too_short" and key.startswith("fp8.linear.filter_fqns"):
        return "An empty string is part of every name and would leave no layer to convert: remove it."
    if details["type"] == "string_too_short" and key == "fp8.schedule.layers":
        return "An empty string is part of every name: name layers, or parts of their names."
    if known is None:
        return "See docs/config.md."
    names = _names(value)
    if names and known.values == "list of strings":
        return f"Write {as_json(names)}."
    if names and known.values.startswith("object of"):
        return f"Write {as_json(dict.fromkeys(names, 'bf16'))}."
    if isinstance(value, float) and value.is_integer() and "integer" in known.values.split(", "):
        return f"Write {int(value)}: what has a point or an exponent is no integer."
    if (bare := _without_quotes(value, known.values.split(", "))) is not None:
        return f"Write {bare} without quotes: in JSON they make a string of it."
    if known.default == "required":
        return "Write true or false."
    return f"Remove the key for the default, {known.default}."


def _names(value: Any) -> list[str]:
    """Return the names in a list, or in a string with commas, as on torchtitan's command line."""
    if isinstance(value, list):
        return value if all(isinstance(name, str) for name in value) else []
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else []


def _near_value(value: str, values: Sequence[str]) -> str | None:
    """Return the one of `values` that is within `value`, as in "float8_e4m3fn", or else nearest."""
    within = sorted((one for one in values if one in value), key=len)
    near = within or difflib.get_close_matches(value, values, n=1)
    return near[-1] if near else None


def _without_quotes(value: Any, values: Sequence[str]) -> str | None:
    """Return the JSON that a string would be without quotes, also in Python's spelling; None if not in `values`."""
    bare = value.strip().lower().replace("none", "null") if isinstance(value, str) else ""
    try:
        found = parse_json(bare)
    except ValueError:
        return None
    kind = {bool: bare, type(None): bare, int: "integer", float: "number"}.get(type(found))
    return bare if kind in values or (kind == "integer" and "number" in values) else None


def _unknown_key_remedy(key: str, known: Collection[str]) -> str:
    blocks = [block for block in dict.fromkeys(other.rpartition(".")[0] for other in known) if block != "fp8"]
    parent, _, name = key.rpartition(".")
    if name.startswith(COMMENT_SIGNS):
        return 'The block takes no comments: put it beside "fp8", where DeepSpeed passes over it.'
    if key in _BESIDE:
        return f"It belongs in {_BESIDE[key]}, beside the block."
    if library := next((library for library, keys in _FOREIGN.items() if name in keys), None):
        return f"It is {library}'s: docs/migrating.md says what takes its place."
    siblings = [other for other in (*known, *blocks) if other.rpartition(".")[0] == parent]
    if near := _near_key(name.lower().replace("-", "_"), siblings, known):
        return f"Did you mean {near}?"
    return f"Known here: {', '.join(siblings)}."


def _near_key(name: str, siblings: Collection[str], known: Collection[str]) -> str | None:
    """Return the key of that name, here or elsewhere, or else of the nearest. Only last parts are compared: a parent
    that keys share would make all of them near."""
    here, all_names = ({key.rpartition(".")[2]: key for key in keys} for keys in (siblings, known))
    if name in here or name in all_names:
        return here.get(name) or all_names[name]
    for names, cutoff in ((here, 0.6), (all_names, 0.8)):
        if near := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[near[0]]
    return None


def _inner_block_remedy(key: str, value: Any, known: Mapping[str, Key]) -> str:
    """Return the remedy for a value in a block's place, such as `"optimizer": "fp8"`."""
    inside = {name.rpartition(".")[2]: entry for name, entry in known.items() if name.rpartition(".")[0] == key}
    if value is None:
        return "Remove the key for the defaults."
    main = next((name for name, entry in inside.items() if entry.values.startswith('"')), None)
    if main is not None and as_json(value) in inside[main].values.split(", "):
        return f'Write {{"{main}": {as_json(value)}}}.'
    return f"Its keys: {', '.join(inside)}."
