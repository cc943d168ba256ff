"""One rank of hundreds, in one process: what a rank of 512 sends in a step, counted without the other 511.

    python one_of_many.py WORLD_SIZE RANK CONFIG...     # configurations as JSON; prints what a step of each calls

The process group answers at once, as if every other rank held what this one holds; where a collective delivers what
only others have, zeros. So numbers mean nothing here, but which collectives are called, with how many elements, does.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, LAYERS, VOCABULARY, TOKENS = 256, 4, 512, 64
STEPS = 3

calls: Counter[str] = Counter()
"""By name, since it was last cleared."""


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class OneOfMany(dist.ProcessGroup):
    """All ranks but this one are imagined. Methods have torch's names, those of 2.11 and of 2.13."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.own, self.size_ = rank, size

    def _get_backend(self, device: torch.device) -> OneOfMany:
        return self

    def getBackendName(self) -> str:
        return "one_of_many"

    def _sum(self, tensor: Tensor, options: Any) -> None:
        if getattr(options.reduceOp, "op", options.reduceOp) == dist.ReduceOp.SUM:
            tensor.mul_(self.size_)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        calls["all_reduce"] += 1
        for tensor in tensors:
            self._sum(tensor, opts)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        calls["broadcast"] += 1
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        calls["all_gather"] += 1
        for many, one in zip(outputs, [one.clone() for one in inputs], strict=True):
            for each in many:
                each.copy_(one)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, one: Tensor, opts: Any = None) -> Any:
        calls["all_gather"] += 1
        output.view(self.size_, -1).copy_(one.clone().view(1, -1))
        return _done([output])

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        calls["reduce_scatter"] += 1
        output.copy_(whole.view(self.size_, -1)[self.own].clone().view_as(output))
        self._sum(output, opts)
        return _done([output])

    def alltoall_base(self, output: Tensor, sent: Tensor, received: Any, splits: Any, opts: Any = None) -> Any:
        calls["all_to_all"] += 1
        return _done([output.zero_()])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return [self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        return [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, wholes, strict=True)][-1]

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    allreduce_coalesced, all_gather_single = allreduce, _allgather_base
    reduce_scatter_single, all_to_all_single = _reduce_scatter_base, alltoall_base


class Operators(TorchDispatchMode):
    """Counts them: what a GPU's host would launch, but for views."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


class Block(nn.Module):
    """Weights of several sizes, none a multiple of what 512 ranks need; a bias; a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH // 4, bias=False)
        self.up = nn.Linear(WIDTH + WIDTH // 4, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(self.up(torch.cat([normed, self.narrow(normed)], -1)).relu())


class Model(nn.Module):
    """Embedding and head, bf16, are a fourth of all weights: many ranks own none in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.lm_head(self.blocks(self.embedding(tokens))).float(), tokens)


def main() -> None:
    world_size, rank = int(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    dist.Backend.register_backend("one_of_many", lambda _, r, size, __: OneOfMany(r, size), devices=["cpu"])
    dist.init_process_group("one_of_many", store=dist.HashStore(), rank=rank, world_size=world_size)
    for config in sys.argv[3:]:
        print("STEP", json.dumps(step(json.loads(config))))


def step(config: dict[str, Any]) -> dict[str, Any]:
    """The last step's calls, operators and gathered bytes."""
    import deepspeed

    import fp8_ds  # noqa: F401

    torch.manual_seed(0)
    model = Model().bfloat16()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        calls.clear()
        with Operators() as operators:
            engine.backward(engine(torch.randint(VOCABULARY, (TOKENS,))))
            engine.step()
    report = engine.fp8_report()
    engine.destroy()
    return {"calls": dict(calls), "operators": operators.number, "gathered": report["gathered_bytes"]}


if __name__ == "__main__":
    main()
