"""Steps of session.py that compare losses and gradients: text, first weights, pairs of runs."""

from __future__ import annotations

from parity.emulated import EMULATED
from session_step import Step, benchmark

_RECIPES = "delayed rowwise gw_hp blockwise"
_PARITY_ARMS = "stock fp8 e4m19 e4m11 e4m11-nearest bf16-nearest"


_GPT_PARITY = "{python} benchmarks/gpt_parity.py --compile --whole --out {own} --budget {seconds}"
"""Files of each step's own: runs of other settings are refused beside these, and steps run side by side."""


def _parity(more: str, regimes: str = "3 2", seeds: str = "3 4 5", arms: str = _PARITY_ARMS) -> str:
    """Seeds of their own: a machine's first weights of regimes 2 and 3 are not another's."""
    what = f"--by-regime --regimes {regimes} --seeds {seeds} --seeds2 3 4 --arms {arms} --estimate 300 {more}"
    return f"{_GPT_PARITY} {what}"


_EMULATED = " ".join(EMULATED)
_ENDS = "stock fp8-ends-e4m3 fp8-ends-e4m3-bf16-last"
_PARTS = f"{_GPT_PARITY} --study parts --own-cache --saving 5 --estimate 115"
_LAST_ATTENTION = "e4m11-e4m3-fast-input-last-attention"
_FASTEST = "e4m11-delayed-e4m3-fast-input"
_SHARES = {
    55: (("stock",), ("e4m11-delayed",), ("e4m11",)),
    **dict.fromkeys((56, 57), (("stock",), (_LAST_ATTENTION,))),
    **dict.fromkeys(range(58, 64), (("stock",), (_FASTEST, f"{_FASTEST}-bf16-last3", f"{_FASTEST}-bf16-last"))),
}
"""By seed, what each of some GPUs trains, 201 M tokens a run, from the same first weights: what has no
three pairs yet. Four GPUs train two seeds of a and b side by side.

The first share has stock, which all of a seed are compared with. A second run starts where time is left.
"""
_SECONDS = {"stock": 580, "e4m11": 590, "e4m11-delayed": 610, _LAST_ATTENTION: 610, _FASTEST: 610}
_SECONDS |= {f"{_FASTEST}-bf16-last3": 60, f"{_FASTEST}-bf16-last": 100}
"""Of a run on an H100, or a branch of one."""
_FEWER_FIRST_STEPS = "--checkpoint-at 0.5"
_FIRST_ESTIMATE = "--estimate 200"
"""Of first weights: with that of a whole run their step's own time would not let them begin."""
_FAST_WHY = "issue 4 H: does parity hold with E4M3 gradients and fast sums, {} tokens a micro-batch?"

PARITY_STEPS = (
    Step(
        "parity-first",
        _parity(f"--only-first-weights {_FIRST_ESTIMATE}"),
        400,
        "issue 3 H: text and first weights, for those below",
    ),
    Step("parity-8gpus", _parity(""), 900, "issue 3 H: three pairs of each arm, regime 2 twice", 8, "parity-first"),
    Step("parity-4gpus", _parity(""), 1200, "issue 3 H: the same without regime 2", gpus=4, after="parity-first"),
    Step("parity-1gpu", _parity("", "3", "6", "stock e4m11 fp8 e4m19"), 1560, "issue 3 H: a pair of each arm, alone"),
    Step(
        "parity-delayed-first",
        _parity(f"--only-first-weights {_FEWER_FIRST_STEPS} {_FIRST_ESTIMATE}"),
        290,
        "issue 4 H: text and first weights, for the next one",
    ),
    Step(
        "parity-delayed",
        _parity(_FEWER_FIRST_STEPS, "3", "9 10 11", "stock e4m11-delayed"),
        860,
        "issue 4 H: does parity hold for the fastest recipe? Three pairs, 100.7 M tokens a run",
        gpus=2,
        after="parity-delayed-first",
    ),
    Step(
        "parity-delayed-1gpu",
        _parity(f"{_FEWER_FIRST_STEPS} --per-gpu 2", "3", "9 10", "stock e4m11-delayed"),
        1300,
        "the next two pairs, on one GPU; two runs at a time, which is no slower and no faster than one after another",
        after="parity-delayed-first",
    ),
    Step(
        "gradient-error",
        benchmark("gradient_error", ""),
        50,
        "issue 4 H: what formats of gradients, fast accumulation and ends in bf16 do to gradients of the trained model",
        after="parity-delayed-first",
    ),
    Step(
        "gradient-error-each",
        benchmark("gradient_error", "--each --batches 2"),
        90,
        "issue 8 E: which linears have the noise; a second each, 48 of them",
        after="parity-201m-first",
    ),
    *(
        Step(
            f"parity-{name}",
            _parity(f"{_FEWER_FIRST_STEPS} {more}", "3", str(seed), arms),
            seconds,
            why,
            after="parity-delayed-first",
        )
        for name, seed, arms, more, seconds, why in (
            ("8k-32", 32, "stock e4m11-fast-e4m3 blockwise", "--micro-batches 4", 1280, _FAST_WHY.format("8,192")),
            (
                "8k-32-e4m11",
                32,
                "e4m11",
                "--micro-batches 4",
                400,
                "the same of accurate sums, beside it on another GPU",
            ),
            ("8k-33", 33, "stock e4m11-fast-e4m3", "--micro-batches 4", 720, _FAST_WHY.format("8,192")),
            ("e4m3-34", 34, "stock e4m11-e4m3-fast-input e4m11", "", 900, _FAST_WHY.format("32,768")),
            ("e4m3-35", 35, "stock e4m11-e4m3-fast-input e4m11", "", 900, _FAST_WHY.format("32,768")),
        )
    ),
    *(
        Step(
            f"parity-recipes-{k}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {k} --arms stock fp8 {_RECIPES} --estimate 480",
            1700,
            f"issue 8 E: every recipe beside stock over 201 M tokens, seed {k}",
            gpus=2,
        )
        for k in (0, 1, 2)
    ),
    Step(
        "parity-1b",
        "{python} benchmarks/gpt_parity.py --study 1b --seeds 0 --arms stock fp8 --gpus-per-run 2 --compile "
        "--out {own} --saving 5 --budget {seconds}",
        1690,
        "issue 8 E: 0.92 B parameters, 100.7 M tokens; predicted 60 s of text, then 810 and 615 s, on both GPUs each",
        gpus=2,
    ),
    *(
        Step(
            f"parity-201m-{seed}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {seed} --arms {_ENDS} --estimate 640",
            1320,
            f"issue 8 E: {_ENDS}, seed {seed}, 201 M tokens; another seed on the other GPU",
            after="parity-201m-first",
        )
        for seed in (16, 20)
    ),
    *(
        Step(
            f"parity-201m-one-{seed}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {seed} --arms {_ENDS} --estimate 640",
            1600,
            f"issue 8 E: {_ENDS}, seed {seed}, on one GPU, whose hour counts half; text 60, first weights 180, runs "
            "540 to 570 s each, the branch 70",
        )
        for seed in (19, 21)
    ),
    *(
        Step(
            f"parity-201m-one-{seed}-{arm}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {seed} --arms stock {arm} --estimate {estimate}",
            estimate,
            f"issue 8 E: {arm} beside the same stock run, which the cache has",
            after=f"parity-201m-one-{seed}",
        )
        for seed in (19, 21)
        for arm, estimate in (("e4m11", 590), ("rowwise", 750))
    ),
    *(
        Step(
            f"parity-201m-{seed}-{letter}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {seed} --arms {' '.join(arms)} "
            f"--estimate {_SECONDS[arms[0]]}",
            sum(_SECONDS[arm] for arm in arms),
            f"issue 8 E: {' and '.join(arms)}, seed {seed}; another share or seed on the other GPU beside it",
            after="parity-201m-first",
        )
        for seed, shares in _SHARES.items()
        for letter, arms in zip("abc", shares, strict=False)
    ),
    *(
        Step(
            f"parity-201m-low-{seed}-{letter}",
            f"{_GPT_PARITY} --study recipes --regimes 2 --seeds {seed} --arms {arms} --estimate {estimate}",
            1200,
            f"issue 8 E: the low learning rate over 201 M tokens: {arms}, seed {seed}",
            after="parity-201m-first",
        )
        for seed in (53, 54)
        for letter, arms, estimate in (("a", "stock fp8", 580), ("b", "e4m11 delayed", 590))
    ),
    Step(
        "parity-parts-first",
        f"{_PARTS} --arms stock --only-first-weights",
        170,
        "issue 8 E: text and first weights of the small model; 60 and 59 s on an H100",
    ),
    *(
        Step(
            f"parity-parts-{seed}",
            f"{_PARTS} --seeds {seed} --arms stock {_EMULATED}",
            1400,
            f"issue 8 E: which rounding costs what, and what helps? Seed {seed}; stock 63 s, others 80 to 112",
            after="parity-parts-first",
        )
        for seed in (0, 1)
    ),
    Step(
        "parity-parts-real",
        f"{_PARTS} --seeds 2 --arms stock emulated fp8 fp8-e4m3 fp8-ends fp8-ends-e4m3",
        520,
        "issue 8 E: the same in FP8 beside its emulation, and with ends in bf16; 63 to 112 s a run",
        after="parity-parts-first",
    ),
    Step(
        "parity-parts-kept",
        f"{_PARTS} --per-gpu 2 --seeds 5 6 --arms stock fp8-e4m3 fp8-ends-e4m3 fp8-e4m3-last-attention "
        "fp8-e4m3-three-attentions fp8-e4m3-attention fp8-e4m3-first-up",
        420,
        "issue 8 E: which linears of the ends matter; two runs at a time, 100 to 160 s each on an H100",
        after="parity-parts-first",
    ),
    Step(
        "parity-1b-trained",
        f"{_GPT_PARITY} --study 1b --regimes 3 --seeds 0 --arms stock fp8 fp8-e4m3 --gpus-per-run 2 --steps 1792 "
        "--checkpoint-at 0.502 --saving 5 --estimate 460",
        1690,
        "issue 8 E: is the difference as large at 0.92 B? From trained weights, 58.7 M tokens a run on both GPUs; "
        "predicted 60 s of text, 260 of first weights (900 steps), 458, 393 and 393 s",
        gpus=2,
    ),
    Step(
        "parity-blockwise-1gpu",
        _parity(_FEWER_FIRST_STEPS, "3", "21", "stock blockwise"),
        1050,
        "issue 8 E: the recipe without a pair; text 65, first weights 184, stock 280, blockwise 400 s, it is guessed",
    ),
    *(
        Step(
            f"parity-rows-{seed}",
            _parity(_FEWER_FIRST_STEPS, "3", str(seed), "stock rowwise gw_hp"),
            1230,
            f"issue 8 E: the next pair of each, seed {seed}; as long as 2026-11-24's",
        )
        for seed in (22, 23)
    ),
    *(
        Step(
            f"parity-{name}-2gpus",
            _parity(_FEWER_FIRST_STEPS, "3", seeds, f"stock {arms}"),
            1600,
            why,
            gpus=2,
        )
        for name, seeds, arms, why in (
            ("rows", "22 23", "rowwise gw_hp blockwise", "issue 8 E: two more pairs of each; 300 to 400 s a run"),
        )
    ),
    Step(
        "parity-201m-first",
        f"{_GPT_PARITY} --study recipes --regimes 3 --arms stock --gpus-per-run 2 --only-first-weights --estimate 100",
        240,
        "issue 8 E: text and first weights of the next ones, on both GPUs; 205 s on two H100",
        gpus=2,
    ),
    Step(
        "parity-201m-first-4gpus",
        f"{_GPT_PARITY} --study recipes --regimes 3 --arms stock --gpus-per-run 4 --only-first-weights --estimate 70",
        170,
        "the same on four; predicted 60 s of text, then 100",
        gpus=4,
    ),
    Step(
        "parity-last-2gpus",
        f"{_GPT_PARITY} --study recipes --regimes 3 --seeds 12 13 --arms stock fp8 fp8-bf16-last fp8-bf16-last5 "
        "--estimate 480",
        1560,
        "issue 8 D, E: do the last 10 or 5 % in bf16 close the gap? 201 M tokens, branches off fp8's runs; on H100 620 "
        "and 670 s a run, 120 and 90 a branch, so that two pairs and one's branches fit",
        gpus=2,
        after="parity-201m-first",
    ),
)
