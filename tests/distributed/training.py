"""A small language model and a training loop that every distributed test shares. Runs inside the ranks of a pool."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from support.late_flag import flag_late as flag_late
from torch import Tensor, nn

VOCABULARY, LENGTH, MICRO_BATCH = 96, 32, 4
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 2e-3, "cycle_max_lr": 4e-3, "cycle_first_step_size": 20}}
"""A scheduler that moves beta1, as DeepSpeed's does unless told otherwise: 0.8 in the first step, then from 0.9 on."""


class Block(nn.Module):
    """Norm and a two-linear MLP with a residual. `hidden` not a multiple of 16 makes ragged shards.

    `external` reads the second weight in a matmul of its own, past the module that owns it. `conv1d`: both are
    transformers' Conv1D with the same numbers, whose biases, where a linear has none, are zero and frozen.
    """

    def __init__(self, width: int, hidden: int, bias: bool, external: bool = False, conv1d: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        up, down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=False)
        self.up, self.down = (as_conv1d(up), as_conv1d(down)) if conv1d else (up, down)
        self.external = external

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + (F.linear(h, self.down.weight) if self.external else self.down(h))


def as_conv1d(linear: nn.Linear) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    with torch.random.fork_rng(), torch.no_grad():  # what it draws is not drawn: the numbers are the linear's
        module: Any = Conv1D(linear.out_features, linear.in_features)
        module.weight.copy_(linear.weight.t())
        if linear.bias is None:
            module.bias.requires_grad_(False)
        else:
            module.bias.copy_(linear.bias)
    found: nn.Module = module
    return found


class TinyLM(nn.Module):
    """Embedding, blocks, head. Returns the mean cross-entropy of predicting the next token.

    `tiny` adds a linear of 5 weights, of which some rank of 4 owns none in ZeRO-3. `frozen` is a name prefix.
    """

    def __init__(
        self,
        width: int = 64,
        hidden: int = 192,
        num_blocks: int = 3,
        bias: bool = True,
        checkpointing: str = "",
        external: bool = False,
        conv1d: bool = False,
        tiny: bool = False,
        frozen: str = "",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden, bias, external, conv1d) for _ in range(num_blocks))
        self.tiny = nn.Linear(1, 5, bias=False) if tiny else None
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        if frozen:
            for name, p in self.named_parameters():
                p.requires_grad_(not name.startswith(frozen))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            if self.checkpointing:
                reentrant = self.checkpointing == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
        if self.tiny is not None:
            x = x + self.tiny(x.mean(-1, keepdim=True)).sum(-1, keepdim=True)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def ds_config(stage: int, fp8: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """A complete configuration; `fp8=None` is stock bf16, `{}` FP8 without a preset, on a GPU with its small linears,
    too. No parameter is persistent.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if fp8 is not None:
        config["fp8"] = {"enabled": True, "preset": None, **fp8, "linear": {"min_size": 0, **fp8.get("linear", {})}}
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return copy.deepcopy(config)


def build(
    config: dict[str, Any],
    model: dict[str, Any] | None = None,
    seed: int = 0,
    groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    weights: str | None = None,
    **kwargs: Any,
) -> Any:
    """An engine over a seeded TinyLM; `kwargs` go to deepspeed.initialize (`model_parameters` unless `optimizer`).

    Args:
        groups: parameter groups of the model; default: all in one.
        weights: a file of safetensors that the model starts from.
    """
    torch.manual_seed(seed)
    net = TinyLM(**(model or {}))
    if weights is not None:
        from safetensors.torch import load_file

        net.load_state_dict(load_file(weights))
    if groups:
        kwargs["model_parameters"] = groups(net)
    return start(net, config, **kwargs)


def start(net: nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
    """An engine over `net`; `kwargs` go to deepspeed.initialize (`model_parameters` unless `optimizer`)."""
    import deepspeed

    import fp8_ds  # noqa: F401

    if "optimizer" not in kwargs:
        kwargs.setdefault("model_parameters", [p for p in net.parameters() if p.requires_grad])
    return deepspeed.initialize(model=net, config=copy.deepcopy(config), **kwargs)[0]


def reports_of(engine: Any) -> list[dict[str, Any]]:
    """What the engine's monitor reports from now on; nothing without one."""
    reports: list[dict[str, Any]] = []
    if engine._fp8_step_callbacks.monitor is not None:
        engine._fp8_step_callbacks.monitor.sinks.append(lambda report: reports.append(report.to_json()))
    return reports


def macs_of_second_step(engine: Any) -> dict[str, int]:
    """What DeepSpeed's flops profiler, which is on rank 0, counts of each module without its parts. Ends the engine.

    Args:
        engine: with `"flops_profiler": {"enabled": True, "profile_step": 1}`.
    """
    found: dict[str, int] = {}

    def keep(**_: Any) -> None:
        found.update({name: module.__macs__ for name, module in engine.module.named_modules()})
        assert all(module.__duration__ > 0 for module in engine.module.modules() if module.__flops__)

    engine.flops_profiler.print_model_profile = keep
    train(engine, 3)
    assert not any(module._forward_hooks_with_kwargs for module in engine.module.modules())
    destroy(engine)
    return found


def destroy(engine: Any) -> None:
    """Free an engine so that the pool's process can build the next one."""
    engine.destroy()
    del engine
    gc.collect()


def micro_batches(step: int, num: int, seed: int = 1234) -> list[Tensor]:
    """`num` micro-batches [MICRO_BATCH, LENGTH + 1] of a learnable sequence (affine modulo, with noise)."""
    generator = torch.Generator().manual_seed(seed + step)
    batches = []
    for _ in range(num):
        start = torch.randint(0, VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (MICRO_BATCH, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        noise = torch.rand(tokens.shape, generator=generator) < 0.05
        batches.append(torch.where(noise, torch.randint(0, VOCABULARY, tokens.shape, generator=generator), tokens))
    return batches


def train(engine: Any, num_steps: int, first_step: int = 0) -> list[float]:
    """Train on the same global batch whatever the world size: rank r takes its share of the micro-batches of a step.

    Returns:
        The mean loss over all micro-batches of each step, the same on all ranks.
    """
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in range(first_step, first_step + num_steps):
        batches = micro_batches(step, accumulation * world)
        total = torch.zeros(())
        for batch in batches[rank * accumulation : (rank + 1) * accumulation]:
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float().cpu()
        total = total.to(engine.device)
        dist.all_reduce(total)
        losses.append(float(total) / (accumulation * world))
    return losses


def run_and_destroy(make: Callable[[int], Any], folder: str = "", steps: int = 4) -> dict[str, Any]:
    """What a run leaves; with a folder, of one that is saved after two steps and resumed by another engine.

    Args:
        make: builds an engine from a seed.
    """
    engine = make(0)
    is_fp8 = getattr(engine, "fp8", None) is not None
    found = {"first": fp8_state(engine)} if is_fp8 else {}
    losses = train(engine, 2 if folder else steps)
    if folder:
        engine.save_checkpoint(folder)
        destroy(engine)
        engine = make(7)
        engine.load_checkpoint(folder)
        losses += train(engine, steps - 2, 2)
    found |= {"losses": losses, "masters": full_masters(engine)}
    if is_fp8:
        found |= {"last": fp8_state(engine), "report": engine.fp8_report()}
    destroy(engine)
    return found


def fp8_state(engine: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (FP8 bytes as uint8 [out, in], scale_inv) of every FP8 weight; ZeRO-3 weights are gathered for it."""
    found = {}
    for name, p in engine.fp8.weights.items():
        payload = p._fp8
        if hasattr(p, "ds_id"):
            shards = engine.optimizer.fp8.shards
            if payload.data is None:
                shards.gather(shards.of([p])).wait()
            data = payload.data.clone()
            p.partition()
        else:
            data = payload.data.clone()
        found[name] = (data.view(torch.uint8).cpu(), payload.scale_inv.clone().cpu())
    return found


def full_masters(engine: Any) -> dict[str, Tensor]:
    """name -> fp32 master, full shape, of every trainable parameter. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(p).clone().cpu()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def expected_fp8(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes as uint8, scale_inv) that a weight with this fp32 master must have: the definition, in three lines."""
    from fp8_ds.numerics.formats import E4M3
    from fp8_ds.numerics.scale import scale_from_amax
    from fp8_ds.ops.quantize import quantize

    scale, scale_inv = scale_from_amax(master.abs().max(), E4M3.max)
    return quantize(master, scale, E4M3).view(torch.uint8), scale_inv


def assert_fp8_equals(left: dict[str, tuple[Tensor, Tensor]], right: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Two results of `fp8_state` have the same names, bytes and scales."""
    assert left.keys() == right.keys() and left
    for name, (data, scale_inv) in left.items():
        assert torch.equal(data, right[name][0]), name
        assert torch.equal(scale_inv, right[name][1]), name


def assert_fp8_follows_masters(state: dict[str, tuple[Tensor, Tensor]], masters: dict[str, Tensor]) -> None:
    """FP8 bytes and scales are those of quantising the (trainable) masters, bitwise."""
    checked = {name: expected_fp8(masters[name]) for name in state if name in masters}
    assert_fp8_equals({name: state[name] for name in checked}, checked)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What the logger is told."""
    from fp8_ds.log import logger

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
