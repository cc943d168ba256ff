"""DeepSpeed's saves and loads for an FP8 engine, with bf16 of the masters as weights and our state beside them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from fp8_ds.checkpoint.folders import as_file_errors, refuse_tag
from fp8_ds.checkpoint.state import (
    BOUND_SUMS_KEY,
    CALLBACKS_KEY,
    CHECKPOINT_KEY,
    LATE_KEY,
    restore_state,
    save_state,
    split_master_scales,
)
from fp8_ds.engine import serving
from fp8_ds.engine.checking import Load, checked
from fp8_ds.engine.compat.model import refuse_one_ranks_part
from fp8_ds.engine.deepspeed_fixes import correct_tp_degree
from fp8_ds.engine.parts import universal_info
from fp8_ds.engine.presets import go_on_as_trained
from fp8_ds.engine.ranks import say, tell_all
from fp8_ds.engine.saving import save_whole
from fp8_ds.engine.step_callbacks import StepCallbacks
from fp8_ds.engine.zero_optimizer import start_count_anew
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.tp.autotp import as_plain_weights
from fp8_ds.tp.linears import contexts_of
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage3 import Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12


class Fp8Checkpoints:
    """Mix-in before DeepSpeedEngine or PipelineEngine."""

    fp8: Fp8Context | None = None
    _fp8_unused: Fp8Context | None = None
    _fp8_step_callbacks: StepCallbacks | None = None

    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed does, with bf16 of the masters and our state; only a complete checkpoint gets its name.

        Raises:
            CheckpointError: a rank could not write; on all ranks, and earlier checkpoints are kept.
            ConfigError: `client_state` has our key on some rank, `tag` is no name of a folder, or ranks differ in it;
                on all ranks.
        """
        if not save_dir:
            raise ValueError(f"save_dir: expected a path, got {save_dir!r}.")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with_our_key, tags = zip(*tell_all((CHECKPOINT_KEY in (client_state or {}), tag)), strict=True)
        if len(set(tags)) > 1:
            raise ConfigError(
                f"tag: expected the same one on all ranks, got {sorted(set(tags))[:3]}. Pass one of them."
            )
        refuse_tag(tag)
        if any(with_our_key):
            raise ConfigError(
                f"client_state: expected no key {CHECKPOINT_KEY!r}, under which the checkpoint has the state of FP8 "
                f"training, got one on rank {with_our_key.index(True)}. Give it another name."
            )
        client_state = {**universal_info(self.module), **(client_state or {})}
        if (context := self.fp8 or self._fp8_unused) is not None:
            frozen = [name for name, p in self.module.named_parameters() if not p.requires_grad]
            client_state[CHECKPOINT_KEY] = save_state(context, frozen if exclude_frozen_parameters else [])
        if self._fp8_step_callbacks is not None:
            client_state[CHECKPOINT_KEY][CALLBACKS_KEY] = self._fp8_step_callbacks.state_dict()
            self._fp8_step_callbacks.leave_out_evaluations(client_state[CHECKPOINT_KEY]["history"])
        if self.fp8 is not None and (states := self.optimizer.fp8.masters.states) is not None:
            client_state[CHECKPOINT_KEY][LATE_KEY] = states.flag.late()
            client_state[CHECKPOINT_KEY][BOUND_SUMS_KEY] = states.bound_sums()
        save = super().save_checkpoint  # type: ignore[misc]

        def write(tag: str) -> Any:
            return save(
                save_dir, tag, client_state, save_latest=False, exclude_frozen_parameters=exclude_frozen_parameters
            )

        writes = self.save_non_zero_checkpoint or isinstance(self, PipelineEngine)
        with_frozen = not exclude_frozen_parameters
        with self.optimizer.fp8.export(writes, with_frozen=with_frozen) if self.fp8 is not None else nullcontext():
            saved = save_whole(self, save_dir, tag, save_latest, write)
        self._fp8_note_save()
        return saved

    def _fp8_note_save(self) -> None:
        if self._fp8_step_callbacks is not None:
            self._fp8_step_callbacks.note_save()

    def _common_checkpoint_state(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return DeepSpeed's entries of a model file, with the number of tensor-parallel ranks."""
        state: dict[str, Any] = super()._common_checkpoint_state(*args, **kwargs)  # type: ignore[misc]
        context = self.fp8 or self._fp8_unused
        if context is not None and context.config.has_fix("tp_degree"):
            correct_tp_degree(self, state)
        return state

    def _copy_recovery_script(self: Any, save_path: str) -> None:
        """Copy as DeepSpeed does, but keep rank 0's failure until all ranks can hear of it."""
        self.checkpoint_engine.attempt(super()._copy_recovery_script, save_path)  # type: ignore[misc]

    def save_16bit_model(
        self: Any, save_dir: str, save_filename: str = "pytorch_model.bin", *args: Any, **kwargs: Any
    ) -> Any:
        """Save bf16 of the masters by DeepSpeed's own method. Collective in every stage.

        Raises:
            UnsupportedError: the model is TP-sharded: DeepSpeed would write one rank's part.
            OSError: on rank 0, which writes: the file cannot be written, as on a full disk.
        """
        if self.fp8 is None:
            return super().save_16bit_model(save_dir, save_filename, *args, **kwargs)  # type: ignore[misc]
        refuse_one_ranks_part(self.module, self.autotp_size(), "save_16bit_model")
        self._fp8_note_save()
        with self.optimizer.fp8.export(ds_comm.get_rank() == 0), as_file_errors(Path(save_dir, save_filename)):
            return super().save_16bit_model(save_dir, save_filename, *args, **kwargs)  # type: ignore[misc]

    def save_fp8_pretrained(self: Any, folder: str | Path, form: str | None = None) -> None:
        """Save the model as a folder of FP8 safetensors, as vLLM, SGLang and transformers read them. Collective.

        Linears in FP8 are stored with the bytes that training computes with where `form` can hold them; all else is
        bf16. Beside them are config.json with its "quantization_config", and the tokenizer's files if the model was
        loaded from a folder. The folder is whole or absent.

        Args:
            folder: empty or not there; rank 0 writes it.
            form: "fp8-block" or "compressed-tensors" (docs/serving.md); None: the one that keeps training's bytes.

        Raises:
            UnsupportedError: the model is not transformers', cannot be exported, or nothing of it is in FP8.
            ConfigError: the folder has files.
            CheckpointError: rank 0 could not write; on all ranks.
        """
        self._fp8_note_save()
        serving.save_folder(self, Path(folder), form)

    def fp8_tensors(self: Any, form: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `fp8_ds.checkpoint.iter_fp8_tensors`."""
        return serving.tensors_of(self, serving.export_of_engine(self, form, "iter_fp8_tensors"))

    def _zero3_consolidated_16bit_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather weights as DeepSpeed does, for transformers and accelerate.

        Raises:
            UnsupportedError: the model is TP-sharded.
        """
        if self.fp8 is not None:
            refuse_one_ranks_part(self.module, self.autotp_size(), "_zero3_consolidated_16bit_state_dict")
            self._fp8_note_save()
        return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _replace_module_consolidated_state_dict(self: Any) -> Any:
        """Gather AutoTP's shards as DeepSpeed does, as bf16 of the masters."""
        if self.fp8 is None:
            return super()._replace_module_consolidated_state_dict()  # type: ignore[misc]
        with self.optimizer.fp8.export(True, on_device=True), as_plain_weights(self.module.parameters()):
            return super()._replace_module_consolidated_state_dict()  # type: ignore[misc]

    def load_checkpoint(
        self: Any,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Check a checkpoint, load it as DeepSpeed does, then take over our state, if it has one, and log other
        settings. If there is no checkpoint, return (None, None), as DeepSpeed does, and change nothing.

        Raises:
            CheckpointError: the checkpoint is torn, damaged, of another model or layout, holds more than data, or has
                values in our state that no save writes: on all ranks, before anything is loaded.
            ConfigError: our state is of an unknown version: on all ranks, before anything is loaded.
            UnsupportedError: it is universal, and the model TP-sharded in stage 3, for which DeepSpeed makes no shards.
        """
        if self.load_universal_checkpoint() and self.zero_optimization_partition_weights() and contexts_of(self.module):
            raise UnsupportedError(
                "checkpoint.load_universal: expected ZeRO stage 1 or 2 with fp8_ds.tp.parallelize, got 3, where "
                "DeepSpeed shards no weight for tensor parallelism. Convert it with --stage 2 and load it there, or "
                "load it into the whole model."
            )
        asked = Load(self, Path(load_dir), None if tag is None else str(tag), load_module_only, load_optimizer_states)
        options = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        load = super().load_checkpoint  # type: ignore[misc]
        with checked(asked) as found:
            if found is None or (context := self.fp8 or self._fp8_unused) is None:
                return load(load_dir, found, *options)
            with self.optimizer.fp8.dense() if self.fp8 is not None else nullcontext({}) as scales:
                path, client_state = load(load_dir, found, *options)
                state = None if client_state is None else client_state.pop(CHECKPOINT_KEY, None)
                if not load_module_only:
                    scales.update(split_master_scales(state))  # masters are stored with those they were saved with
            if client_state is not None:
                of_a_stage = isinstance(self, PipelineEngine) and self.load_universal_checkpoint()
                if not load_module_only:
                    go_on_as_trained(self, state)
                restore_state(context, state, say, load_module_only, of_a_stage)
                if self.fp8 is not None:
                    self._fp8_go_on(state or {}, load_optimizer_states, load_module_only)
            return path, client_state

    def _fp8_go_on(self: Any, state: Mapping[str, Any], load_optimizer_states: bool, load_module_only: bool) -> None:
        """Take over state that is in no `Fp8Context`, after a load."""
        start_count_anew(self.fp8)
        if self.fp8.release is not None:
            self.fp8.release.restart()
        states = self.optimizer.fp8.masters.states
        if not load_module_only and states is not None:
            states.flag.load(bool(state.get(LATE_KEY)))
            if load_optimizer_states:
                states.load_bound_sums(state.get(BOUND_SUMS_KEY, {}))
        self._fp8_step_callbacks.resume(None if load_module_only else state.get(CALLBACKS_KEY))

    def load_module_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does. Masters of FP8 weights get the loaded values, without an FP8 rounding between."""
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(optimizer, Fp8ZeroStage12 | Fp8ZeroStage3):
            return super().load_module_state_dict(*args, **kwargs)  # type: ignore[misc]
        with optimizer.fp8.load():
            return super().load_module_state_dict(*args, **kwargs)  # type: ignore[misc]


class BeforeStateDict:
    """Hook of an engine's model that tells once what a plain state_dict(), which is no collective, holds in ZeRO-1/2.

    Copies of the model have it too. They do not copy the engine and its process groups, and stay silent.
    """

    def __init__(self, engine: Fp8Checkpoints) -> None:
        self._engine, self._has_said = weakref.ref(engine), False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        engine: Any = self._engine()
        optimizer = getattr(engine, "optimizer", None)
        if self._has_said or not isinstance(optimizer, Fp8ZeroStage12) or engine.module is not module:
            return
        if engine.fp8.weights and not optimizer.fp8.is_exporting:
            self._has_said = True
            say(
                "fp8: module.state_dict() gives de-quantised FP8 weights; engine.save_checkpoint and "
                "engine.save_16bit_model give bf16 of the masters"
            )
