"""The layer choice of a whole job: rank 0 looks times up or measures them, and every rank chooses by its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from deepspeed import comm as ds_comm
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.choice import Book, cases_of, choose, worth_fp8
from fp8_ds.nn.convert import Plan
from fp8_ds.nn.layer_table import Case, Times
from fp8_ds.nn.measure import time_case


def choose_layers(
    module: nn.Module, plan: Plan, config: LinearConfig, device: torch.device, say: Callable[[str], None]
) -> Plan:
    """`plan`, where a layer that is not worth FP8 stays bf16. Collective over all ranks.

    Pipeline stages have layers of their own: all are told of all, so that one kind of layer gets one answer.

    Args:
        module: of this rank.
        plan: of this module, before it is applied.
        config: the "linear" block.
        device: of this rank.
        say: called with lines for rank 0.

    Raises:
        ConfigError: rank 0 has no times; on every rank.
    """
    cases = cases_of(module, plan, config)
    of_ranks: list[Counter[Case]] = [Counter()] * ds_comm.get_world_size()
    ds_comm.all_gather_object(of_ranks, Counter(cases.values()))
    counts = sum(of_ranks, Counter[Case]())
    wanted = sorted(counts, key=lambda case: (case.k, case.n, case.bias, case.frozen))
    if not wanted:
        return plan
    times = _from_rank_0(wanted, device, say)
    in_fp8 = worth_fp8(counts, times)
    rows = [f"  {case.describe()}: {times[case].verdict(case in in_fp8)}" for case in wanted]
    say("\n".join([f"fp8: forward and backward of a linear [out, in] at {config.tokens} tokens:", *rows]))
    if not in_fp8:
        say("fp8: no linear is worth FP8 at this number of tokens; all of them stay bf16")
    return choose(plan, cases, times, in_fp8)


def _from_rank_0(wanted: list[Case], device: torch.device, say: Callable[[str], None]) -> dict[Case, Times]:
    answer: list[tuple[dict[Case, Times], str]] = [({}, "")]
    cause: Exception | None = None
    if ds_comm.get_rank() == 0:
        try:
            measure = partial(time_case, device=device) if device.type == "cuda" else None
            answer = [(Book(device, say, measure).times_of(wanted), "")]
        except ConfigError as error:
            answer = [({}, str(error))]
        except Exception as error:  # the other ranks wait: they must hear of it
            cause = error
            text = f"expected times from rank 0, got {type(error).__name__}: {error}"
            answer = [({}, f'fp8.linear.layer_choice: {text}. Write "all", or remove the key.')]
    ds_comm.broadcast_object_list(answer, src=0)
    times, problem = answer[0]
    if problem:
        raise ConfigError(problem) from cause
    return times
