"""Accelerate's export in ZeRO 1 and 2: bf16 of the masters, as stage 3 gives it.

`Accelerator.get_state_dict`, which Trainer's saves and `save_pretrained` go through, reads a plain `state_dict()`
there, which is no collective and gives FP8 values. A state_dict hook cannot know whether all ranks call it;
Accelerate's own callers always do so. Tested: accelerate 1.15.0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from fp8_ds.engine.patch_record import RECORD
from fp8_ds.errors import SeamError


def patch_accelerate() -> None:
    """Patch Accelerate if it is imported. Raise a SeamError if it has no such method."""
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        return
    stock = getattr(module.Accelerator, "get_state_dict", None)
    if hasattr(stock, "fp8_ds_stock"):
        return
    if stock is None or stock.__code__.co_varnames[:2] != ("self", "model"):
        raise SeamError(
            "expected accelerate.Accelerator.get_state_dict(self, model), got another one. fp8_ds needs it to save "
            "bf16 of the masters. Install accelerate 1.15.0."
        )
    RECORD.set(module.Accelerator, "get_state_dict", _exporting(stock))


def _exporting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from fp8_ds.engine.tp_sharded_models import refuse_one_ranks_part
        from fp8_ds.zero.stage12 import Fp8ZeroStage12

        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, Fp8ZeroStage12):
            return stock(self, model, *args, **kwargs)
        knows_autotp = self.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0) > 1
        refuse_one_ranks_part(model.module, 1 if knows_autotp else model.autotp_size(), "Accelerator.get_state_dict")
        with optimizer.fp8_export(True):
            return stock(self, model, *args, **kwargs)

    get_state_dict.fp8_ds_stock = stock  # type: ignore[attr-defined]
    return get_state_dict
