"""Patches of other libraries: the record that `fp8_ds.uninstall()` undoes, and those of an engine with FP8.

This module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from fp8_ds.errors import SeamError


class PatchRecord:
    """Patches that are applied now.

    Attributes:
        patches: (object, attribute, original value), newest last; of a dict, an item.
        finder: the import hook that waits for deepspeed; None if there is none.
    """

    def __init__(self) -> None:
        self.patches: list[tuple[Any, str, Any]] = []
        self.finder: Any = None

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute of `target`, or an item of a dict, and keep the original."""
        self.patches.append((target, name, target[name] if isinstance(target, dict) else getattr(target, name)))
        _assign(target, name, value)

    def undo(self) -> None:
        """Put every original value back."""
        while self.patches:
            _assign(*self.patches.pop())


def _assign(target: Any, name: str, value: Any) -> None:
    if isinstance(target, dict):
        target[name] = value
    else:
        setattr(target, name, value)


RECORD = PatchRecord()


def apply_patches() -> None:
    """Check every seam and patch the one function, once per `install()`, and Accelerate's export once it is
    imported."""
    from deepspeed.runtime.zero import stage_1_and_2

    from fp8_ds.engine.seam_check import check_seams
    from fp8_ds.zero.zero12 import patched_all_gather

    if hasattr(stage_1_and_2.all_gather_dp_groups, "fp8_ds_original"):
        patch_accelerate()
        return
    check_seams()
    patch_accelerate()
    RECORD.set(stage_1_and_2, "all_gather_dp_groups", patched_all_gather(stage_1_and_2.all_gather_dp_groups))


def patch_accelerate() -> None:
    """Let Accelerate, if it is imported, export bf16 of the masters in ZeRO 1 and 2, as stage 3 gives it.

    `Accelerator.get_state_dict`, which Trainer's saves and `save_pretrained` go through, reads a plain `state_dict()`
    there, which is no collective and gives FP8 values. A state_dict hook cannot know whether all ranks call it;
    Accelerate's own callers always do so. Tested: accelerate 1.15.0.

    Raises:
        SeamError: Accelerate has no such method.
    """
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        return
    original = getattr(module.Accelerator, "get_state_dict", None)
    if hasattr(original, "fp8_ds_original"):
        return
    if original is None or original.__code__.co_varnames[:2] != ("self", "model"):
        raise SeamError(
            "expected accelerate.Accelerator.get_state_dict(self, model), got another one. fp8_ds needs it to save "
            "bf16 of the masters. Install accelerate 1.15.0."
        )
    RECORD.set(module.Accelerator, "get_state_dict", _exporting(original))


def _exporting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from fp8_ds.engine.compat.model import refuse_one_ranks_part
        from fp8_ds.zero.stage12 import Fp8ZeroStage12

        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, Fp8ZeroStage12):
            return original(self, model, *args, **kwargs)
        knows_autotp = self.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) > 1
        refuse_one_ranks_part(model.module, 1 if knows_autotp else model.autotp_size(), "Accelerator.get_state_dict")
        model._fp8_note_save()
        with optimizer.fp8.export(True):
            return original(self, model, *args, **kwargs)

    get_state_dict.fp8_ds_original = original  # type: ignore[attr-defined]
    return get_state_dict
