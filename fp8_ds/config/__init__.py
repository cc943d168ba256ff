"""The "fp8" block of a DeepSpeed JSON configuration, checked in one place.

Only keys that work today are known; every other key is refused (see docs/config.md). Neither torch nor deepspeed is
imported here, so a configuration can be checked on a machine that has neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError
from typing_extensions import Self

from fp8_ds.config.ds_config import zero_stage
from fp8_ds.config.explain import Key, as_json, explain
from fp8_ds.config.presets import Facts, Preset, filled_in
from fp8_ds.errors import ConfigError


def _tuple_of_list(value: Any) -> Any:
    """Make a tuple of a list: JSON has lists only, and a frozen model holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _sinks_of_json(value: Any) -> Any:
    """Check for a string, or a tuple of one or more. A union type would have an error for each of its kinds."""
    value = _tuple_of_list(value)
    names = value if isinstance(value, tuple) else (value,)
    if not names or not all(isinstance(name, str) for name in names):
        raise PydanticCustomError("sinks", "a string or a list of strings")
    if not all(names):
        raise PydanticKnownError("string_too_short", {"min_length": 1})
    return value


DeepSpeedFix = Literal[
    "adam_step",
    "attention_masks",
    "epilogue_sync",
    "fetches_ahead",
    "gradient_bucket",
    "graph_gradients",
    "group_timeout",
    "hook_signatures",
    "hook_tracing",
    "logits_gradient",
    "max_live_parameters",
    "overflow_check",
    "reduce_scatter",
    "stale_gradients",
    "timer_sync",
    "tp_degree",
    "universal_step",
]
DEEPSPEED_FIXES: tuple[DeepSpeedFix, ...] = get_args(DeepSpeedFix)

Gemm = Literal["output", "grad_input", "grad_weight"]
"""The three products of a linear, by what they make (fp8_ds/ops/gemm)."""

_FAST_GEMMS: dict[str, tuple[Gemm, ...]] = {
    "none": (),
    "output": ("output",),
    "output_and_grad_input": ("output", "grad_input"),
    "all": ("output", "grad_input", "grad_weight"),
}
"""Products that accumulate fast, by values of `fast_accumulation`."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise a ConfigError if a key that is set cannot take effect beside another one of this block."""


class LinearConfig(_Block):
    recipe: Literal["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"] = "tensorwise"
    grad_dtype: Literal["e5m2", "e4m3"] = "e5m2"
    fast_accumulation: Literal["none", "output", "output_and_grad_input", "all"] = "output"
    backend: Literal["torch", "reference"] = "torch"
    filter_fqns: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple_of_list)] = (
        "lm_head",
    )
    frozen: Literal["bf16", "fp8"] = "bf16"
    weight_scales: Literal["float", "power_of_two"] | None = None
    min_size: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_blocks(cls, block: Any) -> Any:
        if isinstance(block, dict) and block.get("recipe") == "blockwise":
            return {"grad_dtype": "e4m3", "fast_accumulation": "none", **block}
        return block

    def check(self) -> None:
        if self.recipe == "blockwise" and self.fast_gemms:
            raise ConfigError(
                'fp8.linear.fast_accumulation: expected "none" with recipe "blockwise", got '
                f'"{self.fast_accumulation}". torch\'s product of blocks has none: remove the key.'
            )
        if self.recipe == "rowwise_with_gw_hp" and "grad_weight" in self.fast_gemms:
            raise ConfigError(
                'fp8.linear.fast_accumulation: expected "output_and_grad_input" at most with recipe '
                '"rowwise_with_gw_hp", got "all". Its grad_weight is computed in bf16.'
            )
        if self.backend == "reference" and len(self.fast_gemms) > 1:
            raise ConfigError(
                'fp8.linear.fast_accumulation: expected "none" or "output" with backend "reference", got '
                f'"{self.fast_accumulation}". It adds in float32 always: remove the key, or set "backend": "torch".'
            )
        if self.recipe == "blockwise" and self.grad_dtype == "e5m2" and self.backend == "torch":
            raise ConfigError(
                'fp8.linear.grad_dtype: expected "e4m3" with recipe "blockwise", got "e5m2". torch multiplies blocks '
                'in E4M3 only: remove the key, or set "backend": "reference".'
            )
        if self.recipe == "blockwise" and self.weight_scales == "float":
            raise ConfigError(
                'fp8.linear.weight_scales: expected "power_of_two" with recipe "blockwise", got "float". Scales of '
                "blocks are powers of two always: remove the key."
            )

    @property
    def fast_gemms(self) -> tuple[Gemm, ...]:
        """Products that accumulate fast."""
        return _FAST_GEMMS[self.fast_accumulation]


class ZeroConfig(_Block):
    reduce_scatter: Literal["bf16", "fp8"] = "bf16"


class OptimizerConfig(_Block):
    states: Literal["fp32", "fp8"] = "fp32"
    master: Literal["fp32", "e4m19", "e4m11"] | None = None
    release: bool = False
    release_clipping: Literal["exact", "delayed_norm"] = "exact"
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0

    def check(self) -> None:
        if self.states == "fp8" and self.master == "fp32":
            raise ConfigError(
                'fp8.optimizer.master: expected "e4m19" or "e4m11" with states "fp8", got "fp32". Remove the key: '
                '"e4m19", the default then, loads a checkpoint with fp32 masters and ends with the same loss.'
            )
        if self.states == "fp32" and self.master not in (None, "fp32"):
            raise ConfigError(
                f'fp8.optimizer.master: expected "fp32" with states "fp32", got "{self.master}". Others are updated '
                'together with FP8 moments: set "states": "fp8", or remove the key.'
            )
        if self.states == "fp32" and self.release:
            raise ConfigError(
                'fp8.optimizer.release: expected false with states "fp32", got true. The update during the backward is '
                'that of FP8 states: set "states": "fp8", or remove the key.'
            )
        if self.states == "fp32" and self.seed:
            raise ConfigError(
                f'fp8.optimizer.seed: expected 0 with states "fp32", got {self.seed}. Nothing is rounded '
                'stochastically then: set "states": "fp8", or remove the key.'
            )

    def releases(self, gradient_clipping: float) -> bool:
        """Whether weights are updated during the backward: exact clipping must hold the reduced shards instead."""
        return self.release and not (gradient_clipping > 0 and self.release_clipping == "exact")

    @property
    def master_format(self) -> str:
        """Format of the masters: with FP8 states e4m19 unless configured otherwise, else fp32."""
        return "fp32" if self.states == "fp32" else self.master or "e4m19"


class ActivationsConfig(_Block):
    fused: bool = False
    nonlinear: Literal["bf16", "fp8"] = "bf16"
    cross_entropy_chunk_mem_const: Annotated[int, Field(ge=1)] | None = None

    def check(self) -> None:
        if self.nonlinear == "fp8" and not self.fused:
            raise ConfigError(
                'fp8.activations.nonlinear: expected "bf16" with fused false, got "fp8". It says what fused modules '
                'keep: set "fused": true, or remove the key.'
            )


class TensorParallelConfig(_Block):
    gather: Literal["fp8", "bf16"] = "fp8"


class ScheduleConfig(_Block):
    bf16_until_step: Annotated[int, Field(ge=0)] = 0
    bf16_last_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    total_steps: Annotated[int, Field(ge=1)] | None = None
    layers: dict[Annotated[str, Field(min_length=1)], Literal["bf16", "fp8"]] = Field(default_factory=dict)


class MonitorConfig(_Block):
    every: Annotated[int, Field(ge=0)] = 0
    sink: Annotated[str | tuple[str, ...], BeforeValidator(_sinks_of_json)] = "deepspeed"

    @property
    def sinks(self) -> tuple[str, ...]:
        """Entries of `sink` as a tuple: "deepspeed", or paths."""
        return (self.sink,) if isinstance(self.sink, str) else self.sink

    def check(self) -> None:
        if self.every == 0 and self.sinks != ("deepspeed",):
            raise ConfigError(
                f'fp8.monitor.sink: expected "deepspeed" with every 0, got {as_json(self.sink)}. Nothing is written '
                'then: set "every": 100, or remove the key.'
            )
        if twice := next((sink for sink in self.sinks if self.sinks.count(sink) > 1), None):
            raise ConfigError(
                f'fp8.monitor.sink: expected each sink once, got "{twice}" {self.sinks.count(twice)} times. Leave one.'
            )


class GuardConfig(_Block):
    action: Literal["report", "bf16"] | None = None


class AttentionConfig(_Block):
    backend: Literal["fa3", "fa3_fp8", "fa3_fp8_emulated"] | None = None
    hadamard: bool = False

    def check(self) -> None:
        if self.hadamard and self.backend not in ("fa3_fp8", "fa3_fp8_emulated"):
            raise ConfigError(
                f"fp8.attention.hadamard: expected false with backend {as_json(self.backend)}, got true. It is for "
                'what is rounded to FP8: set "backend": "fa3_fp8", or remove the key.'
            )


class Fp8Config(_Block):
    enabled: bool
    preset: Preset | None = "auto"
    linear: LinearConfig = Field(default_factory=LinearConfig)
    zero: ZeroConfig = Field(default_factory=ZeroConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    activations: ActivationsConfig = Field(default_factory=ActivationsConfig)
    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    without_deepspeed_fixes: Annotated[tuple[str, ...], BeforeValidator(_tuple_of_list)] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, block: Any, info: ValidationInfo) -> Any:
        """Write the preset's values at the keys that the block leaves out, by the facts in pydantic's context."""
        if not isinstance(block, dict):
            return block
        return filled_in(block, info.context if isinstance(info.context, Facts) else Facts())

    def check(self) -> None:
        if self.optimizer.states == "fp8" and self.linear.weight_scales == "float":
            raise ConfigError(
                'fp8.linear.weight_scales: expected "power_of_two" with optimizer.states "fp8", got "float". Scales of '
                "split masters are powers of two always: remove the key."
            )
        if unknown := [name for name in self.without_deepspeed_fixes if name not in DEEPSPEED_FIXES]:
            raise ConfigError(
                f"fp8.without_deepspeed_fixes: expected names among {', '.join(DEEPSPEED_FIXES)}, got "
                f"{as_json(unknown[0])}. docs/config.md says what each of these repairs."
            )

    def has_fix(self, name: DeepSpeedFix) -> bool:
        """Whether a repair of DeepSpeed is on (fp8_ds/engine/deepspeed_fixes.py)."""
        return name not in self.without_deepspeed_fixes

    @classmethod
    def from_block(cls, block: Any, facts: Facts | None = None) -> Fp8Config:
        """Check the block and build the configuration, with the values of its preset where it says nothing.

        Args:
            block: value of the "fp8" key, as `json.load` returns it.
            facts: facts of the run; None: nothing is known of it.

        Raises:
            ConfigError: a key is wrong; the message names every such key, its value and the remedy.
        """
        if not isinstance(block, dict):
            said = f"fp8: expected an object, got {as_json(block)}"
            raise ConfigError(f'{said}. Write "fp8": {{"enabled": true}}, or leave the block out.')
        try:
            return cls.model_validate(block, context=facts)
        except ValidationError as error:
            known = cls.keys()
            lines = [explain(details, known) for details in error.errors(include_url=False)]
        if len(lines) == 1:
            raise ConfigError(lines[0])
        raise ConfigError(f'{len(lines)} errors in the "fp8" block:\n' + "\n".join(f"  {line}" for line in lines))

    def validate_with(self, ds_config: Mapping[str, Any]) -> None:
        """Check that every key can take effect in a run with this configuration.

        Args:
            ds_config: DeepSpeed's configuration, as `json.load` returns it.

        Raises:
            ConfigError: `zero.reduce_scatter` is "fp8", but the ZeRO stage is neither 2 nor 3.
        """
        stage = zero_stage(ds_config)
        if self.zero.reduce_scatter == "fp8" and stage not in (2, 3):
            raise ConfigError(
                f'fp8.zero.reduce_scatter: expected "bf16" with zero_optimization.stage {stage}, got "fp8". '
                "Stage 1 reduces the sum of micro-batches, which stays unrounded here: remove the key, or use stage 2."
            )

    def to_state(self) -> dict[str, Any]:
        """Return builtin types for a checkpoint, with values that follow from defaults written out."""
        state: dict[str, Any] = self.model_dump(mode="json")
        state["optimizer"]["master_format"] = self.optimizer.master_format
        return state

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Return every key by its dotted name ("fp8.linear.recipe"), in the order of the models."""
        return dict(_walk(cls, "fp8"))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Key]]:
    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, f"{prefix}.{name}")
        else:
            default = "required" if field.is_required() else as_json(field.get_default(call_default_factory=True))
            yield f"{prefix}.{name}", Key(_values_of(schemas[name]), default)


def _values_of(schema: dict[str, Any]) -> str:
    """Describe the values that a key's JSON schema allows."""
    if "anyOf" in schema:
        return ", ".join(map(_values_of, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(map(as_json, schema["enum"]))
    if schema["type"] == "object":
        return f"object of {_values_of(schema['additionalProperties'])} by name"
    names = {"boolean": "true, false", "array": "list of strings"}
    return str(names.get(schema["type"], schema["type"]))
