"""Pieces of end_to_end.py: which arms one command measures, and how long they take. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from end_to_end_arms import Arm, Model, sized


@dataclass(frozen=True)
class Timing:
    """Blocks of timed steps, after a warm-up."""

    warm_up: int
    blocks: int
    steps: int

    @property
    def num_steps(self) -> int:
        """Warm-up included."""
        return self.warm_up + self.blocks * self.steps

    def __str__(self) -> str:
        return f"{self.blocks} x {self.steps} steps after {self.warm_up}"


@dataclass(frozen=True)
class Piece:
    """What one command measures, in at most ten minutes; the reference runs first and last.

    Args:
        cross_entropy: of all arms: "stock", "liger", or None: as the command line says.
    """

    model: str
    reference: str | None
    arms: tuple[str, ...]
    mode: str = "speed"
    cross_entropy: str | None = None


_DELAYED = "ours-e4m11-compiled+delayed+fused+e4m3+linear.fast_accumulation=output_and_grad_input"
_LAYER_AHEAD = "leaf+liger+ds.stage3_prefetch_bucket_size=218103808+ds.stage3_max_live_parameters=2500000000"
"""One of Llama-3-8B, as a whole, so that each leaf is one gather; with DeepSpeed's default of live parameters there is
no room for it beside head and embedding, which Liger's loss by our key holds."""
_DELAYED_8B = f"{_DELAYED}+{_LAYER_AHEAD}+attention.backend=fa3"

PIECES = {
    # 1. One GPU, Llama 2.0 B.
    "peers": Piece(
        "llama-2b",
        "stock-eager",
        (
            "torchao-tensorwise-adamwfp8-compiled",
            "ours-e4m11-compiled+fused",
            "ours-e4m11-compiled+fused+delayed",
            "ours-e4m11-compiled+fused+delayed+liger",
            "ours-e4m11-release-compiled+nonlinear+delayed+liger",
        ),
    ),
    # What is left between kernels and before the forward, if the host launches a graph at a time.
    "graphs": Piece("llama-2b", "ours-e4m11-compiled+fused+delayed", ("ours-e4m11-compiled+fused+delayed+cudagraphs",)),
    # What our own attention and CUDA graphs give beside the best peer. A FlashAttention-3 with its backward is needed.
    "fastest": Piece(
        "llama-2b",
        "stock-eager",
        (
            "ours-e4m11-compiled+fast+fused+attention.backend=fa3+cudagraphs",
            "torchao-tensorwise-adamwfp8-compiled",
            "ours-e4m11-compiled+fast+e4m3+fused+attention.backend=fa3+cudagraphs",
        ),
    ),
    # Whether 16 GiB suffice with CUDA graphs, and what fast accumulation gives beside delayed scales, and by product.
    "accumulation": Piece(
        "llama-2b",
        "stock-eager",
        (
            "ours-e4m11-compiled+fast+nonlinear+delayed+attention.backend=fa3+cudagraphs",
            "torchao-tensorwise-adamwfp8-compiled",
            "ours-e4m11-compiled+fast+fused+delayed+attention.backend=fa3+cudagraphs",
            "ours-e4m11-compiled+fused+attention.backend=fa3+cudagraphs+linear.fast_accumulation=output_and_grad_input",
        ),
    ),
    "release": Piece("llama-2b", None, ("ours-e4m11-release-compiled+nonlinear+delayed+liger",)),
    "peers-more": Piece("llama-2b", "stock-eager", ("stock-compiled", "torchao-tensorwise-compiled", "torch-compiled")),
    "states": Piece(
        "llama-2b",
        "stock-eager",
        (
            "stock-eager+nowait",
            "ours-e4m11-eager+fused",
            "ours-e4m19-compiled+fused",
            "ours-fp32-eager",
            "ours-fp32-compiled",
            "ours-e4m11-release-eager+nonlinear+liger",
        ),
    ),
    # What no run had room for, what parity's best setting costs, and a sample of the monitor, by its arm's own steps.
    "rest": Piece(
        "llama-2b",
        "stock-eager",
        (
            "ours-e4m11-compiled+fused",
            "ours-fp32-compiled+fused",
            "stock-compiled",
            "ours-e4m11-compiled+fused+precise",
            "ours-fp32-eager+fused",
            "ours-e4m11-compiled+fused+monitor.every=10+monitor.sink=health-10.jsonl",
        ),
    ),
    # The ends in bf16, whose parity is shown, beside the best peer and what comes nearest to it.
    "precise": Piece(
        "llama-2b",
        "stock-eager",
        (
            "ours-e4m11-compiled+fused+kept=last-attention+cudagraphs+linear.fast_accumulation=output_and_grad_input",
            "torchao-tensorwise-adamwfp8-compiled",
            "ours-e4m11-compiled+fused+precise+cudagraphs+linear.fast_accumulation=output_and_grad_input",
            "ours-e4m11-compiled+fused+kept=last-attention+cudagraphs+fast",
            "ours-fp32-compiled+fused+precise+cudagraphs",
        ),
    ),
    # All layers in FP8 with delayed scales, E4M3 gradients and fast sums but for grad_weight, whose pairs of parity are
    # those of seeds 48 to 50 and 58 to 60: with FlashAttention-3, beside the best peer; then without it; then without
    # CUDA graphs, which take less memory; the best peer with FlashAttention-3.
    "delayed": Piece(
        "llama-2b",
        "stock-eager",
        (
            f"{_DELAYED}+cudagraphs+attention.backend=fa3",
            "torchao-tensorwise-adamwfp8-compiled",
            f"{_DELAYED}+cudagraphs",
            f"{_DELAYED}+attention.backend=fa3",
            "torchao-tensorwise-adamwfp8-compiled+fa3",
        ),
    ),
    # The headline: the same beside the best peer with our attention, and in steps that its schedule computes in bf16,
    # the last 3 % of a run.
    "last-steps": Piece(
        "llama-2b",
        "stock-eager",
        (
            f"{_DELAYED}+attention.backend=fa3",
            "torchao-tensorwise-adamwfp8-compiled+fa3",
            f"{_DELAYED}+attention.backend=fa3+schedule.bf16_until_step=1000000",
        ),
    ),
    "recipes": Piece(
        "llama-2b",
        "ours-e4m11-compiled+fused",
        ("ours-e4m11-compiled+blockwise+fused", "ours-e4m11-compiled+rowwise_with_gw_hp+fused"),
    ),
    "fused": Piece(
        "llama-2b",
        "ours-e4m11-eager",
        (
            "ours-e4m11-eager+fused",
            "ours-e4m11-eager+nonlinear",
            "ours-e4m11-eager+fused+liger",
            "ours-e4m11-eager+delayed+fused",
            "ours-e4m11-eager+rowwise",
            "ours-e4m11-eager+rowwise+fused",
            "ours-e4m11-eager+blockwise",
        ),
    ),
    # 2. Llama-3-8B. With Liger's loss in all arms or in none: it saves torchao and stock as much as ours.
    "8b": Piece(
        "llama-8b",
        "stock-eager",
        ("ours-e4m11-compiled+fused+leaf", "torchao-tensorwise-compiled"),
        cross_entropy="liger",
    ),
    "8b-more": Piece("llama-8b", "stock-eager", ("ours-e4m11-compiled+leaf", "torch-compiled"), cross_entropy="stock"),
    "8b-memory": Piece(
        "llama-8b",
        "stock-eager",
        (f"{_DELAYED_8B}+mb=2",),
        cross_entropy="liger",
    ),
    # With ZeRO-3's hooks called and not traced, a whole layer prefetched, and our own key for the loss, whose backward
    # does not wait (the same library's loss in all arms). Tensorwise, then delayed scales with and without
    # FlashAttention-3. On 2026-11-27 nothing was prefetched, and with FlashAttention-3 all layers ran in eager.
    "8b-hosts": Piece(
        "llama-8b",
        "torchao-tensorwise-compiled",
        (
            f"ours-e4m11-compiled+fused+{_LAYER_AHEAD}",
            _DELAYED_8B,
            f"{_DELAYED}+{_LAYER_AHEAD}",
            "stock-eager",
        ),
        cross_entropy="liger",
    ),
    # NCCL's kernels take an SM a channel from GEMMs of 132 blocks: with fewer channels, in ours and in torchao.
    "8b-channels": Piece(
        "llama-8b",
        "torchao-tensorwise-compiled",
        (
            _DELAYED_8B,
            f"{_DELAYED_8B}+env.NCCL_MAX_CTAS=8",
            "torchao-tensorwise-compiled+env.NCCL_MAX_CTAS=8",
            "stock-eager",
        ),
        cross_entropy="liger",
    ),
    "8b-profile": Piece(
        "llama-8b",
        "stock-eager",
        ("ours-e4m11-compiled+fused+leaf", "torchao-tensorwise-compiled"),
        mode="profile",
        cross_entropy="liger",
    ),
    # Two GPUs, eight of its layers: what settings of DeepSpeed are worth to ours, before and after.
    "8b-settings": Piece(
        "llama-8b-2gpus",
        "ours-e4m11-compiled+fused+leaf",
        (
            "ours-e4m11-compiled+fused+leaf+ds.stage3_prefetch_bucket_size=50000000+ds.contiguous_gradients=true",
            "ours-e4m11-compiled+fused+leaf+ds.stage3_prefetch_bucket_size=50000000",
            "ours-e4m11-compiled+fused+leaf+ds.contiguous_gradients=true",
        ),
        cross_entropy="liger",
    ),
    # Issue 8 C: what a sample of the monitor costs: blocks, and 60 steps one by one.
    "monitor": Piece(
        "llama-2b",
        "ours-e4m11-compiled+fused",
        ("ours-e4m11-compiled+fused+monitor.every=10+monitor.sink=health-10.jsonl",),
    ),
    # 4. Small layers.
    "gpt2": Piece(
        "gpt2",
        "stock-eager",
        (
            "ours-e4m11-eager+measured",
            "ours-e4m11-eager",
            "stock-compiled",
            "ours-e4m11-compiled+measured",
            "ours-e4m11-compiled",
        ),
    ),
    # Losses over 200 steps on real text.
    "losses": Piece(
        "llama-2b",
        "stock-eager",
        (
            "ours-e4m11-compiled+fused+delayed",
            "ours-e4m11-compiled+fused",
            "ours-e4m11-compiled+rowwise",
        ),
        mode="losses",
    ),
    "losses-more": Piece(
        "llama-2b",
        "stock-eager",
        ("ours-fp32-compiled", "ours-e4m19-compiled+fused", "ours-e4m11-compiled+blockwise"),
        mode="losses",
    ),
    "profiles": Piece(
        "llama-2b",
        "stock-eager",
        ("ours-e4m11-compiled", "ours-e4m11-eager", "torchao-tensorwise-adamwfp8-compiled"),
        mode="profile",
    ),
}


START_SECONDS = {
    "deepspeed": 28,
    "plain": 18,
    "several GPUs": 15,
    "compiled": 40,
    "compiled layers": 15,
    "adamwfp8": 40,
    "profile": 30,
}
"""What an arm takes beside its steps: launcher, imports and building (28 s, seen on an H200), on several GPUs so much
more; compiling the model, or its layers one by one, as FSDP2 has them; compiling AdamWFp8's step for each shape of
parameter; both traces. Of Llama-3-8B on four H200s torchao took 46 to 63 s, stock 57 to 62, ours 73 to 99."""
FLOPS = 4e14
"""A GPU's rate in a step of stock DeepSpeed: 8192 tokens of Llama 2.0 B in 250 ms."""


def predicted_seconds(
    arm: Arm, model: Model, mode: str, num_steps: int, known: Mapping[tuple[str, str], float]
) -> float:
    """Seconds that an arm will take, its start included.

    Args:
        num_steps: all that it takes, warm-up included.
        known: (arm, mode) to seconds that it took before, with this model; these are believed, plus a tenth.
    """
    if (arm.name, mode) in known:
        return 1.1 * known[arm.name, mode]
    seconds = START_SECONDS["deepspeed" if arm.uses_deepspeed else "plain"]
    seconds += START_SECONDS["several GPUs"] if model.gpus > 1 else 0
    by_layers = model.gpus > 1 and not arm.uses_deepspeed
    seconds += START_SECONDS["compiled layers" if by_layers else "compiled"] if arm.compiled else 0
    seconds += START_SECONDS["adamwfp8"] if arm.optimizer == "adamwfp8" else 0
    seconds += START_SECONDS["profile"] if mode == "profile" else 0
    m = sized(model, arm)
    return seconds + num_steps * (0.02 + 6 * m.num_parameters * m.tokens / FLOPS)
