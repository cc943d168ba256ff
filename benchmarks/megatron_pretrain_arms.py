"""Arms of megatron_pretrain.py: from names to Megatron's arguments. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from end_to_end_arms import BETAS, EPS, LR, WEIGHT_DECAY, Model

TENSORWISE = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
BLOCKWISE = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
GATHER = ("--fp8-param-gather",)
PRECISION_AWARE = ("--use-precision-aware-optimizer",)
BF16_GRADS = (*PRECISION_AWARE, "--main-grads-dtype", "bf16")
FA3, FA3_FP8 = ("--fp8-attention-backend", "fa3"), ("--fp8-attention-backend", "fa3_fp8")
STATES = ("--fp8-optimizer-states", "--fp8-master")


def _moments(dtype: str) -> tuple[str, ...]:
    return ("--exp-avg-dtype", dtype, "--exp-avg-sq-dtype", dtype)


WORDS: dict[str, tuple[str, ...]] = {
    "stock-bf16": (),
    "stock-tensorwise": TENSORWISE,
    "stock-blockwise": BLOCKWISE,
    "stock-gather": (*TENSORWISE, *GATHER),
    "stock-fp8-states": (*TENSORWISE, *GATHER, *PRECISION_AWARE, *_moments("fp8")),
    "stock-bf16-states": (*TENSORWISE, *BF16_GRADS, *_moments("bf16")),
    "ours-fa3": (*TENSORWISE, *FA3),
    "ours-fa3_fp8": (*TENSORWISE, *FA3_FP8),
    "ours-a": (*TENSORWISE, *FA3_FP8, *STATES, "bf16_8"),
    "ours-b": (*TENSORWISE, *FA3_FP8, *GATHER, *STATES, "e4m19"),
    "ours-b11": (*TENSORWISE, *FA3_FP8, *GATHER, *STATES, "e4m11"),
}
"""What an arm adds to the arguments that all have. ours-a: bf16 weights, masters of 24 bits, FP8 moments; ours-b: the
high byte of the master is the data of Transformer Engine's weight. stock-gather: FP8 weights as in ours-b, and the rest
of Megatron's, to tell which of the two makes a difference."""
GRAMMAR = (
    f"{', '.join(WORDS)}; with options: +bf16grads (gradients kept in bf16, Megatron's --main-grads-dtype), +fa3, "
    "+fa3_fp8 or +stock (attention of ours-...), +drop (--fp8-drop-transposes of ours-b and ours-b11), +tp=N (tensor "
    "and sequence parallelism over N GPUs), +seed=N"
)


@dataclass(frozen=True)
class Arm:
    """One way to run pretrain_gpt.py.

    Args:
        name: as on the command line.
        base: key of WORDS.
        words: Megatron's arguments, beside those that all arms have.
        tp: ranks, all of tensor parallelism.
    """

    name: str
    base: str
    words: tuple[str, ...]
    tp: int = 1
    seed: int = 1234

    @property
    def is_ours(self) -> bool:
        """By the wrapper; otherwise the clone's script as it is."""
        return self.base.startswith("ours")

    @property
    def needs_te(self) -> bool:
        """Whether no other linears can run it: Megatron's own FP8, and FP8 weights."""
        return "--fp8-format" in self.words and (not self.is_ours or "--fp8-param-gather" in self.words)


def parse_arm(name: str) -> Arm:
    """The arm of that name, as `GRAMMAR` says.

    Raises:
        ValueError: naming the part that is not understood.
    """
    base, *options = name.split("+")
    if base not in WORDS:
        raise ValueError(f"arm: expected {GRAMMAR}; got {name!r}.")
    arm = Arm(name, base, WORDS[base])
    for option in options:
        key, _, value = option.partition("=")
        if key in ("tp", "seed") and re.fullmatch(r"[1-9]\d*", value):
            arm = replace(arm, **{key: int(value)})
        elif option == "bf16grads":
            added = tuple(word for word in BF16_GRADS if word not in arm.words)
            arm = replace(arm, words=(*arm.words, *added))
        elif option == "drop" and GATHER[0] in arm.words and arm.is_ours:
            arm = replace(arm, words=(*arm.words, "--fp8-drop-transposes"))
        elif option in ("fa3", "fa3_fp8", "stock") and arm.is_ours:
            at = arm.words.index(FA3[0])
            chosen = () if option == "stock" else (FA3[0], option)
            arm = replace(arm, words=(*arm.words[:at], *chosen, *arm.words[at + 2 :]))
        else:
            raise ValueError(f"arm: expected {GRAMMAR}; got option {option!r} in {name!r}.")
    return arm


@dataclass(frozen=True)
class Settings:
    """What all arms of a run have in common.

    Args:
        iterations: all, those that warm up included.
        interval: iterations in one line of the log; times and losses are their means.
        eval_iters: batches of held-out text after the last iteration.
        text: folder of train and held_out in Megatron's format; None: Megatron's mock data.
        cpu_init: weights are drawn on the CPU, the same for any number of ranks. Not so with on_cpu: there Megatron's
            warm-up of fused functions draws from the same generator, the less the more ranks share a layer.
        on_cpu: no GPU, gloo, Megatron's and our own layers without Transformer Engine.
        extra: more arguments, of all arms.
    """

    iterations: int
    interval: int
    eval_iters: int = 0
    text: Path | None = None
    cpu_init: bool = False
    on_cpu: bool = False
    extra: tuple[str, ...] = ()


ON_CPU = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--num-workers", "0"),
)
"""What Megatron's kernels for GPUs would do otherwise; as in examples/megatron/cpu_trial.sh."""
BACKENDS_ON_CPU = {"fa3": "reference", "fa3_fp8": "fa3_fp8_emulated"}
"""Attention by plain torch: the same backward as FlashAttention-3's, but for the order of sums."""


def _model_words(m: Model) -> list[str]:
    return [
        *("--num-layers", str(m.layers), "--hidden-size", str(m.hidden), "--ffn-hidden-size", str(m.ffn)),
        *("--num-attention-heads", str(m.heads), "--group-query-attention", "--num-query-groups", str(m.kv_heads)),
        *("--seq-length", str(m.seq), "--max-position-embeddings", str(m.seq)),
        *("--swiglu", "--normalization", "RMSNorm", "--norm-epsilon", "1e-5", "--disable-bias-linear"),
        *("--position-embedding-type", "rope", "--rotary-base", "500000", "--untie-embeddings-and-output-weights"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        # NullTokenizer adds one token, which ends a document.
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(m.vocab - 1)),
    ]


def _training_words(m: Model, s: Settings) -> list[str]:
    beta1, beta2 = map(str, BETAS)
    return [
        *("--micro-batch-size", str(m.micro_batch), "--global-batch-size", str(m.micro_batch)),
        *("--train-iters", str(s.iterations), "--lr", str(LR), "--min-lr", str(LR), "--lr-decay-style", "constant"),
        *("--lr-warmup-iters", str(min(20, s.iterations // 5)), "--clip-grad", "1.0"),
        *("--weight-decay", str(WEIGHT_DECAY), "--adam-beta1", beta1, "--adam-beta2", beta2, "--adam-eps", str(EPS)),
        *("--bf16", "--use-distributed-optimizer"),
        # Megatron's head wants apex for it, which few have.
        "--no-gradient-accumulation-fusion",
        *("--eval-iters", str(s.eval_iters), "--eval-interval", str(10 * s.iterations)),
        *("--log-interval", str(s.interval), "--log-memory-interval", str(s.interval), "--log-throughput"),
    ]


def _data_words(s: Settings, cache: Path) -> list[str]:
    if s.text is None:
        return ["--mock-data"]
    paths = ("--train-data-path", str(s.text / "train"), "--valid-data-path", str(s.text / "held_out"))
    return [*paths, "--data-cache-path", str(cache)]


def words_of(arm: Arm, m: Model, s: Settings, cache: Path) -> list[str]:
    """All arguments of pretrain_gpt.py; arms of a run differ in `arm.words`, `arm.tp` and `arm.seed` only.

    Args:
        cache: folder for Megatron's indices of the text.

    Raises:
        ValueError: FP8 weights with weights drawn on the CPU: masters are made of what Transformer Engine keeps when it
            makes a weight, and that is before Megatron draws it there.
    """
    if s.cpu_init and GATHER[0] in arm.words:
        raise ValueError(f"arm: expected bf16 weights where they are drawn on the CPU, got {arm.name!r}. Leave it out.")
    words = [*_model_words(m), *_training_words(m, s), *_data_words(s, cache), "--seed", str(arm.seed)]
    if arm.tp > 1:
        words += ["--tensor-model-parallel-size", str(arm.tp), "--sequence-parallel"]
    if s.cpu_init:
        words.append("--use-cpu-initialization")
    own = list(arm.words)
    if s.on_cpu:
        words += ON_CPU
        own = [BACKENDS_ON_CPU.get(word, word) for word in own]
        if arm.is_ours:
            own.append("--on-cpu")
    else:
        # Named, so that Transformer Engine cannot fall back to unfused attention; ours leaves it evaluation only.
        words += ["--attention-backend", "fused"]
    return [*words, *own, *s.extra]
