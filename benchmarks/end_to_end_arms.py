"""Models and arms of end_to_end.py: from names to settings. Needs no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Model:
    """A model and the run it is measured in.

    Args:
        kind: "llama" or "qwen3", of Hugging Face's classes.
        heads: of `head_dim` = hidden / heads features each.
        micro_batch: sequences a rank and step; no accumulation.
        stage: of ZeRO, in all DeepSpeed arms.
    """

    kind: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    micro_batch: int
    stage: int
    gpus: int

    @property
    def tokens(self) -> int:
        """A rank and step."""
        return self.micro_batch * self.seq

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """Of matrices."""
        attention = 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads)
        mlp = 3 * self.hidden * self.ffn
        return round(self.layers * (attention + mlp) + 2 * self.vocab * self.hidden)


MODELS = {
    "llama-2b": Model("llama", 8, 4096, 14336, 32, 8, 32000, 4096, 2, stage=2, gpus=1),
    "llama-8b": Model("llama", 32, 4096, 14336, 32, 8, 128256, 8192, 1, stage=3, gpus=4),
    "llama-8b-2gpus": Model("llama", 8, 4096, 14336, 32, 8, 128256, 8192, 1, stage=3, gpus=2),
    # The models of parity: 124 M and 0.94 B parameters, heads of 128 features, 32,768 and 65,536 tokens a step.
    "llama-124m": Model("llama", 12, 768, 2048, 6, 2, 32000, 1024, 32, stage=2, gpus=1),
    "llama-1b": Model("llama", 18, 2048, 5632, 16, 4, 32000, 2048, 32, stage=2, gpus=1),
    "qwen3-1b": Model("qwen3", 18, 2048, 5632, 16, 4, 32000, 2048, 4, stage=2, gpus=1),
    "tiny-llama": Model("llama", 2, 64, 256, 4, 2, 512, 32, 2, stage=2, gpus=1),
    "tiny-llama-3": Model("llama", 2, 64, 256, 4, 2, 512, 32, 1, stage=3, gpus=2),
    "tiny-qwen3": Model("qwen3", 2, 64, 256, 4, 2, 512, 32, 2, stage=2, gpus=1),
}

ZERO: dict[int, dict[str, Any]] = {
    2: {
        "stage": 2,
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    3: {
        "stage": 3,
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 250_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": 1_000_000_000,
        "overlap_comm": True,
        "contiguous_gradients": False,
    },
}
"""DeepSpeed's own defaults, written out; the same for all its arms. Stage 1 is stage 2's block.

Two of stage 3 are not its defaults: a whole decoder layer of 8B (218 M weights) is prefetched, where the default is
50 M; and there is no contiguous bucket, into which DeepSpeed copies every gradient and reads none if it reduce-scatters
(docs/compile.md).
"""
LEAF = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"


@dataclass(frozen=True)
class Arm:
    """One way to train a model.

    Args:
        name: as on the command line.
        system: "stock" or "ours" (DeepSpeed), "torch" or "torchao" (plain, or FSDP2 on several GPUs).
        recipe: torchao's.
        optimizer: "adamw" or "adamwfp8".
        fp8: the "fp8" block of ours.
        micro_batch: None: the model's.
        timer_waits: DeepSpeed's throughput timer empties the device's queue twice a step, as it does by default.
        leaf: ZeRO-3 gathers a decoder layer as a whole, and it compiles to one graph.
        cuda_graphs: compiled graphs are replayed as CUDA graphs (mode "reduce-overhead").
        fa3: a peer's attention is FlashAttention-3, by the function that ours has by its key.
        zero: what differs from `ZERO`.
        env: variables of the environment in which its ranks start.
    """

    name: str
    system: str
    compiled: bool
    recipe: str | None = None
    optimizer: str = "adamw"
    fp8: dict[str, Any] | None = None
    micro_batch: int | None = None
    timer_waits: bool = True
    leaf: bool = False
    cuda_graphs: bool = False
    fa3: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def uses_deepspeed(self) -> bool:
        return self.system in ("stock", "ours")

    @property
    def releases(self) -> bool:
        """Gradients are freed in backward."""
        return self.fp8 is not None and bool(self.fp8.get("optimizer", {}).get("release"))

    @property
    def has_fp8_states(self) -> bool:
        """The block, or its preset, says so."""
        if self.fp8 is None:
            return False
        by_preset = "fp8" if self.fp8["preset"] == "fast" else "fp32"
        return self.fp8.get("optimizer", {}).get("states", by_preset) == "fp8"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_FAST = "compiled+delayed+fused+e4m3"
NAMED = {
    "headline": f"ours-e4m11-{_FAST}+linear.fast_accumulation=output_and_grad_input+attention.backend=fa3"
    "+schedule.bf16_last_fraction=0.03",
    "delayed-fp32": f"ours-fp32-{_FAST}+attention.backend=fa3+schedule.bf16_last_fraction=0.03",
    "torchao": "torchao-tensorwise-adamwfp8-compiled+fa3",
    "auto": "preset-auto-compiled+linear.min_size=0+schedule.bf16_last_fraction=0.03",
    "fallback": "preset-auto-compiled+linear.min_size=0",
}
"""Arms with a name of their own, which options may follow. "auto" and "fallback" are that preset with the number of
steps known and not; all linears are in FP8, also where that does not pay, and memory does not decide about the end."""

_NAME = re.compile(
    r"(?:(?P<plain>stock|torch)"
    rf"|torchao-(?P<recipe>{'|'.join(RECIPES)})(?P<low>-adamwfp8)?"
    r"|preset-(?P<preset>auto|fast|precise|serve)"
    r"|ours-(?P<states>fp32|e4m19|e4m11)(?P<release>-release)?)"
    r"-(?P<mode>eager|compiled)"
)
KEPT = {
    "ends": ["layers.0.", "layers.-1."],
    "last-attention": ["layers.-1.self_attn"],
    "two": [
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.k_proj",
        "layers.0.self_attn.v_proj",
        "layers.-1.mlp.down_proj",
    ],
}
"""Linears of the Llama that stay in bf16."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "fused": {"activations": {"fused": True}},
    "nonlinear": {"activations": {"fused": True, "nonlinear": "fp8"}},
    "liger": {"activations": {"cross_entropy_chunk_mem_const": 1}},
    "fast": {"linear": {"fast_accumulation": "all"}},
    "e4m3": {"linear": {"grad_dtype": "e4m3"}},
}
"""Of the fp8 block, by what they set."""
GRAMMAR = (
    f"{', '.join(NAMED)}, "
    "stock-MODE, torch-MODE, torchao-RECIPE[-adamwfp8]-MODE, preset-{auto|fast|precise|serve}-MODE, "
    "ours-{fp32|e4m19|e4m11}[-release]-MODE; MODE is eager or compiled; of ours with options: +RECIPE, +fused "
    "(activations.fused), +nonlinear (and activations.nonlinear fp8), +liger (Liger's forward, and "
    "activations.cross_entropy_chunk_mem_const), +fast (linear.fast_accumulation all), "
    "+e4m3 (linear.grad_dtype), +kept=NAME (that, and in bf16 "
    f"the linears of KEPT: {', '.join(KEPT)}), any +section.key=JSON of the fp8 block; of DeepSpeed's: +cudagraphs "
    "(compiled with mode reduce-overhead), +nowait (timers.throughput.synchronized false, as ours always has it), "
    "+leaf (stage 3: leaf_module, a decoder layer), "
    "+ds.KEY=JSON (of zero_optimization); of peers: +fa3 (FlashAttention-3, which ours have by "
    "+attention.backend=fa3); of all: +mb=N (micro-batch), +env.NAME=VALUE (a variable of its ranks' environment)"
)


def parse_arm(name: str, model: Model) -> Arm:
    """The arm of that name, as `GRAMMAR` says.

    Raises:
        ValueError: naming the part that is not understood.
    """
    first, *more = name.split("+")
    stem, *options = "+".join([NAMED.get(first, first), *more]).split("+")
    match = _NAME.fullmatch(stem)
    if match is None:
        raise ValueError(f"arm: expected {GRAMMAR}; got {name!r}.")
    compiled = match["mode"] == "compiled"
    if match["plain"]:
        arm = Arm(name, match["plain"], compiled)
    elif match["recipe"]:
        arm = Arm(name, "torchao", compiled, match["recipe"], "adamwfp8" if match["low"] else "adamw")
    elif match["preset"]:
        arm = Arm(name, "ours", compiled, fp8={"enabled": True, "preset": match["preset"]})
    else:
        arm = Arm(name, "ours", compiled, fp8=_block(match["states"], bool(match["release"])))
    for option in options:
        key, _, value = option.partition("=")
        if key == "mb":
            arm = replace(arm, micro_batch=int(value))
        elif key.startswith("env."):
            variable = key.removeprefix("env.")
            if not variable.isidentifier() or not value:
                raise ValueError(f"arm: expected +env.NAME=VALUE, got {option!r} in {name!r}.")
            arm = replace(arm, env={**arm.env, variable: value})
        elif key == "nowait" and arm.uses_deepspeed:
            arm = replace(arm, timer_waits=False)
        elif key == "leaf" and arm.uses_deepspeed:
            arm = replace(arm, leaf=True)
        elif key == "cudagraphs" and compiled and arm.uses_deepspeed:
            arm = replace(arm, cuda_graphs=True)
        elif key == "fa3" and arm.system != "ours":
            arm = replace(arm, fa3=True)
        elif key.startswith("ds.") and value and arm.uses_deepspeed:
            arm = replace(arm, zero={**arm.zero, key.removeprefix("ds."): json.loads(value)})
        elif arm.fp8 is None:
            raise ValueError(f"arm: expected no option of the fp8 block with {stem!r}, got {option!r}. Use ours-....")
        else:
            _set_option(arm.fp8, key, value, name)
    return arm


def _block(states: str, release: bool) -> dict[str, Any]:
    """Released gradients are clipped by the factor of the step before: the exact norm would hold them all."""
    optimizer: dict[str, Any] = {"states": "fp32"}
    if states != "fp32":
        optimizer = {"states": "fp8", "master": states}
    if release:
        optimizer |= {"release": True, "release_clipping": "delayed_norm"}
    return {"enabled": True, "preset": None, "linear": {"recipe": "tensorwise"}, "optimizer": optimizer}


def _set_option(block: dict[str, Any], key: str, value: str, name: str) -> None:
    if key in RECIPES:
        block.setdefault("linear", {})["recipe"] = key
    elif key in OPTIONS and not value:
        for section, values in OPTIONS[key].items():
            block.setdefault(section, {}).update(values)
    elif key == "kept" and value in KEPT:
        block.setdefault("linear", {}).update(grad_dtype="e4m3", filter_fqns=["lm_head", *KEPT[value]])
    elif "." in key and value:
        section, _, leaf = key.partition(".")
        try:
            block.setdefault(section, {})[leaf] = json.loads(value)
        except json.JSONDecodeError:
            block.setdefault(section, {})[leaf] = value
    else:
        raise ValueError(f"arm: expected {GRAMMAR}; got option {key!r} in {name!r}.")


def sized(model: Model, arm: Arm) -> Model:
    """`model` with the arm's micro-batch."""
    return model if arm.micro_batch is None else replace(model, micro_batch=arm.micro_batch)


def ds_config(arm: Arm, model: Model, clip: float, on_cpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration: the same for all arms but for the "fp8" block, the micro-batch, and what names say."""
    optimizer: dict[str, Any] = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    if on_cpu:
        optimizer["torch_adam"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": sized(model, arm).micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {**ZERO[max(model.stage, 2)], "stage": model.stage, **arm.zero},
        "steps_per_print": 1_000_000_000,
    }
    if arm.leaf:
        config["zero_optimization"]["leaf_module"] = {"classes": [LEAF]}
    if not arm.timer_waits:
        config["timers"] = {"throughput": {"synchronized": False}}
    if arm.fp8 is not None:
        config["fp8"] = arm.fp8
    return config
