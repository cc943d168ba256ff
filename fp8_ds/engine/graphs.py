"""How many graphs torch.compile may make of one function before it runs that in eager."""

from __future__ import annotations

import torch
import torch._dynamo

_TORCHS = 8
LIMIT = 32


def allow_more() -> None:
    """`torch._dynamo.config.recompile_limit` is 32 where it is torch's own 8, for the whole process and for good.

    Under ZeRO-3 all decoder layers are one function. Delayed scales make two graphs of it, layers that stay in bf16,
    evaluation, samples of the monitor and phases of the schedule further ones: seven are usual, and a ninth would send
    every layer that needs it to eager for the rest of the run.
    """
    if torch._dynamo.config.recompile_limit == _TORCHS:
        torch._dynamo.config.recompile_limit = LIMIT
