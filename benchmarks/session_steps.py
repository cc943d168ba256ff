"""What session.py can measure on a lent GPU machine: its steps, with what each takes and what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from parity.emulated import EMULATED


@dataclass(frozen=True)
class Step:
    """One measurement.

    Args:
        name: of it.
        command: of a shell in this checkout; {python}, {out} and {own}, a folder in it for this step alone, are filled
            in; {seconds} is what it may take, up to 1.3 times `seconds`.
        seconds: that it takes on an H200, about.
        why: what is shown by it.
        gpus: that it needs.
        after: the step that must have ended before, where that one is in the list.
    """

    name: str
    command: str
    seconds: float
    why: str
    gpus: int = 1
    after: str = ""


def _benchmark(script: str, arguments: str) -> str:
    return f"{{python}} benchmarks/{script}.py {arguments} --out {{out}}"


def _tests(selection: str) -> str:
    return f"{{python}} -m pytest -q -m gpu -p no:cacheprovider tests/gpu {selection}"


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


def _tests_megatron(options: str) -> str:
    return f"{{python}} -m pytest -v -m gpu -p no:cacheprovider tests/gpu/test_megatron_gpu.py {options}"


_SHARED = "-n 4 --dist worksteal"
"""Of tests that take little of a GPU."""


def _megatron(name: str, what: str = "") -> str:
    """$MEGATRON_LM_PATH must name a clone that can be written to. Files of its own: pieces run side by side.

    Args:
        what: arguments that say what is measured; default: the piece of that name.
    """
    own = f'--out {{out}}/megatron-{name} --cache "$(mktemp -d)"'
    return f"{{python}} benchmarks/megatron_pretrain.py {what or f'--piece {name}'} --budget {{seconds}} {own}"


_FEWER_FIRST_STEPS = "--checkpoint-at 0.5"
_FIRST_ESTIMATE = "--estimate 200"
"""Of first weights: with that of a whole run their step's own time would not let them begin."""

_LAYERS_WHY = "issue 5 E, G: what 8B's layers at 8192 tokens wait for"


def _parallel_layers(gpus: str) -> str:
    return _benchmark(
        "parallel_layers",
        f"--gpus {gpus} --budget {{seconds}} --trace {{out}} --shapes 8b --arms bf16 torchao torchao-cudagraphs te "
        "ours ours-compiled ours-cudagraphs",
    )


_FAST_WHY = "issue 4 H: does parity hold with E4M3 gradients and fast sums, {} tokens a micro-batch?"

STEPS = (
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
        _benchmark("gradient_error", ""),
        50,
        "issue 4 H: what formats of gradients, fast accumulation and ends in bf16 do to gradients of the trained model",
        after="parity-delayed-first",
    ),
    Step(
        "gradient-error-each",
        _benchmark("gradient_error", "--each --batches 2"),
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
            f"parity-201m-{arm}-{seed}",
            f"{_GPT_PARITY} --study recipes --regimes 3 --seeds {seed} --arms stock {arm} --estimate {estimate}",
            780 + estimate,
            f"issue 8 E: {arm}, seed {seed}, 201 M tokens: text 60, first weights 180, stock 540, then {estimate} s",
        )
        for arm, seed, estimate in (("e4m11", 24, 590), ("rowwise", 25, 720))
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
        "parity-last-2gpus",
        f"{_GPT_PARITY} --study recipes --regimes 3 --seeds 12 13 --arms stock fp8 fp8-bf16-last fp8-bf16-last5 "
        "--estimate 480",
        1560,
        "issue 8 D, E: do the last 10 or 5 % in bf16 close the gap? 201 M tokens, branches off fp8's runs; on H100 620 "
        "and 670 s a run, 120 and 90 a branch, so that two pairs and one's branches fit",
        gpus=2,
        after="parity-201m-first",
    ),
    Step("tests", _tests("-n 8"), 300, "all of tests/gpu for one GPU; 947 tests took 211 s"),
    Step(
        "tests-unseen",
        _tests(
            "-n 6 -k 'test_observe_gpu or test_conv1d_gpu or test_doctor_gpu or test_monitor_gpu or test_schedule_gpu "
            "or sampled'"
        ),
        150,
        "issue 8 A to D: tests written or repaired on 2026-11-25, which no GPU has run since",
    ),
    Step(
        "doctor",
        "{python} -c 'from fp8_ds.cli.app import main; main()' doctor --json --config configs/ds_zero2_fp8_states.json "
        "> {out}/doctor.json",
        40,
        "issue 8 B: what doctor says on this machine, and how fast products by each recipe are",
    ),
    Step("layer-table", "{python} benchmarks/layer_table.py --out {out}/nvidia-h200.json", 320, "issue 4 D: the table"),
    Step(
        "attention",
        _benchmark("attention", "--budget {seconds} --name attention"),
        285,
        "issue 6 D: latency and accuracy of the backends (fa3-fwd wheel needed)",
    ),
    Step("states", _benchmark("end_to_end", "--piece states --budget {seconds}"), 420, "issue 4 H 1: states, release"),
    Step(
        "rest",
        _benchmark("end_to_end", "--piece rest --budget {seconds}"),
        590,
        "issue 4 H 1: arms without a number, what the setting nearest to parity costs (predicted: 0.91 of the same "
        "without it), and issue 8 C: a sample of the monitor (predicted 11 to 16 ms)",
    ),
    Step("recipes", _benchmark("end_to_end", "--piece recipes --budget {seconds}"), 340, "issue 4 B, H 1: recipes"),
    Step("losses", _benchmark("end_to_end", "--piece losses --budget {seconds}"), 400, "issue 4 H: losses on text"),
    Step(
        "losses-more", _benchmark("end_to_end", "--piece losses-more --budget {seconds}"), 400, "the same, other arms"
    ),
    Step(
        "monitor",
        _benchmark("end_to_end", "--piece monitor --budget {seconds}"),
        480,
        "issue 8 C: its cost, step by step; predicted 11 to 16 ms a sampled step, where it was 43 to 66; three arms, "
        "136 to 168 s each on an H100 beside other work",
    ),
    Step("gpt2", _benchmark("end_to_end", "--piece gpt2 --budget {seconds}"), 200, "issue 4 H 4: small layers"),
    Step("megatron-speed", _megatron("speed"), 480, "issue 6 G: ours beside stock Megatron-LM"),
    Step("megatron-states", _megatron("states"), 450, "issue 6 G: FP8 Adam in forms (a) and (b)"),
    Step("megatron-losses", _megatron("losses"), 555, "issue 6 G: 500 iterations on text"),
    *(
        Step(f"megatron-seeds-{k}", _megatron(f"seeds-{k}"), 555, f"issue 6 G: is form (b)'s loss worse? Seed {k}")
        for k in (1, 2, 3)
    ),
    Step("parallel-layers", _parallel_layers("2 4"), 200, f"{_LAYERS_WHY}; four GPUs", gpus=4),
    Step("parallel-layers-2gpus", _parallel_layers("2"), 200, f"{_LAYERS_WHY}; two GPUs", gpus=2),
    Step(
        "blocks-2gpus",
        _benchmark(
            "parallel_layers",
            "--gpus 2 --budget {seconds} --shapes 8b --parts block --attention cudnn --arms bf16 torchao "
            "torchao-cudagraphs te ours ours-cudagraphs",
        ),
        80,
        "issue 5 G: layers with cuDNN's attention in all arms, Transformer Engine's too",
        gpus=2,
    ),
    Step(
        "fastest",
        _benchmark("end_to_end", "--piece fastest --budget {seconds}"),
        480,
        "issue 4 H 1: with FlashAttention-3 and CUDA graphs (a FlashAttention-3 wheel with backward needed)",
    ),
    Step(
        "accumulation",
        "{python} benchmarks/accumulation.py --out {out}",
        50,
        "issue 4 H 1: products by accumulation, alone: predicted 8.87, 8.64, 8.50 ms a layer",
    ),
    Step(
        "fast-arms",
        _benchmark("end_to_end", "--piece accumulation --budget {seconds}"),
        480,
        "issue 4 H 1: what fast accumulation gives in a step; predicted 112.3 ms with delayed scales, 116 and 15.0 GiB "
        "with these and inputs of norms and SwiGLUs in FP8, 115 tensorwise with a fast grad_input",
    ),
    Step(
        "kernels-tune",
        "{python} benchmarks/kernels_tune.py --budget {seconds} --out {out}/kernels-tune.json",
        90,
        "issue 4 A: launch settings against those that ship",
    ),
    Step(
        "kernels-shares",
        "{python} benchmarks/kernels_tune.py --shipped --budget {seconds} --out {out}/kernels-shares.json",
        60,
        "issue 4 A: shares of the copy rate, of a copy of as many bytes too",
    ),
    Step(
        "precise",
        _benchmark("end_to_end", "--piece precise --budget {seconds}"),
        400,
        "issue 4 H 1: the setting nearest to parity as CUDA graphs beside the best peer, with the update made faster",
    ),
    Step("release", _benchmark("end_to_end", "--piece release --budget {seconds}"), 75, "issue 4 H 1: release's peak"),
    Step(
        "tests-new",
        "{python} -m pytest -q -m gpu -p no:cacheprovider -n 12 tests/gpu/test_producers_gpu.py "
        "tests/gpu/test_quantize_gpu.py tests/gpu/test_blockwise_gpu.py tests/gpu/test_squares_gpu.py",
        110,
        "kernels whose tiles or launches changed on 2026-11-23, beside their references",
    ),
    Step("tests-linear", _tests("-n 8 -k test_linear_gpu"), 80, "the linears' own tests, fast accumulation among them"),
    Step(
        "profile-tensorwise",
        _benchmark(
            "end_to_end",
            "--model llama-2b --profile ours-e4m11-compiled+fast+fused+attention.backend=fa3+cudagraphs "
            "--budget {seconds}",
        ),
        125,
        "issue 4 H 1: where the headline's recipe spends its time",
    ),
    Step(
        "profile-nonlinear",
        _benchmark(
            "end_to_end",
            "--model llama-2b --profile ours-e4m11-compiled+fast+nonlinear+attention.backend=fa3+cudagraphs "
            "--budget {seconds}",
        ),
        125,
        "issue 4 H 1: what 16 GiB with CUDA graphs cost; 6.5 ms where 0.4 were expected",
    ),
    Step("peers", _benchmark("end_to_end", "--piece peers --budget {seconds}"), 540, "issue 4 H 1: ours beside peers"),
    Step(
        "graphs", _benchmark("end_to_end", "--piece graphs --budget {seconds}"), 260, "issue 4 C: idle between kernels"
    ),
    Step("launch-host", "{python} benchmarks/launch_host.py --out {out}", 30, "issue 4 C: what launches take the host"),
    Step(
        "linear-host",
        "{python} benchmarks/linear_host.py --out {out}",
        60,
        "issue 4 C: what an eager linear takes the host",
    ),
    Step("peers-more", _benchmark("end_to_end", "--piece peers-more --budget {seconds}"), 330, "the same, other peers"),
    Step("gather", _benchmark("gather", "--gpus 2 4"), 40, "issue 4 H 3: one layer's gather", gpus=4),
    Step(
        "gather-2gpus",
        _benchmark("gather", "--gpus 2"),
        30,
        "issue 4 H 3: one layer's gather, ZeRO-3's own too; predicted 1.3 ms in bf16, 0.75 in FP8",
        gpus=2,
    ),
    Step(
        "8b-settings",
        _benchmark("end_to_end", "--piece 8b-settings --attention cudnn --budget {seconds}"),
        400,
        "issue 4 H 2: 8 layers of 8B; predicted 165 ms, and 170, 168, 173 with DeepSpeed's default settings",
        gpus=2,
    ),
    Step(
        "8b-2gpus",
        _benchmark("end_to_end", "--piece 8b --layers 8 --gpus 2 --attention cudnn --budget {seconds}"),
        330,
        "issue 4 H 2: 8 layers of 8B beside stock and torchao; predicted ours 165 ms",
        gpus=2,
    ),
    Step(
        "8b-all-2gpus",
        _benchmark("end_to_end", "--piece 8b --gpus 2 --attention cudnn --warm-up 5 --steps 5 --budget {seconds}"),
        470,
        "issue 4 H 2: all of Llama-3-8B on two GPUs, where four are not lent; predicted ours 680 ms, 1.62 and 1.29 x",
        gpus=2,
    ),
    Step(
        "8b-profile",
        _benchmark(
            "end_to_end",
            "--piece 8b-profile --layers 8 --gpus 2 --attention cudnn --budget {seconds} --traces {out}/traces",
        ),
        330,
        "issue 4 H 2: where 8 layers of 8B spend their time; host waits beside stock's",
        gpus=2,
    ),
    Step(
        "tests-dataflow",
        "{python} -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_dataflow_gpu.py -k leaves",
        120,
        "issue 4 C: leaves with a prefetch smaller than a layer change no bit, over NCCL; never run yet",
        gpus=2,
    ),
    Step(
        "8b",
        _benchmark("end_to_end", "--piece 8b --gpus 4 --attention cudnn --budget {seconds}"),
        500,
        "issue 4 H 2: Llama-3-8B, ZeRO-3",
        gpus=4,
    ),
    Step(
        "8b-profile-4gpus",
        _benchmark(
            "end_to_end", "--piece 8b-profile --gpus 4 --attention cudnn --budget {seconds} --traces {out}/traces"
        ),
        330,
        "issue 4 H 2: why ours takes 659 ms on four GPUs where two take 605; likely the host is late",
        gpus=4,
    ),
    Step(
        "8b-memory",
        _benchmark("end_to_end", "--piece 8b-memory --gpus 4 --attention cudnn --budget {seconds}"),
        400,
        "issue 4 H 2: ours at micro-batch 2 in stock's memory",
        gpus=4,
    ),
    Step(
        "tests-ranks",
        "{python} -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_tp_gpu.py tests/gpu/test_zero_gpu.py "
        "tests/gpu/test_states_gpu.py",
        300,
        "tests of several ranks, over NCCL; 43 of 76 took 150 s",
        gpus=4,
    ),
    Step("tests-megatron", _tests_megatron(_SHARED), 400, "issue 6: those of two GPUs among them, too", gpus=2),
    Step(
        "tests-megatron-1gpu",
        _tests_megatron(_SHARED),
        400,
        "issue 6: checkpoints, experts, dropped transposes with Transformer Engine; one of 12 has run, 135 s of five "
        "launches, nothing beside it",
    ),
    Step(
        "megatron-dp2",
        _tests_megatron("-n 0 -x -k 'data and parallel'"),
        260,
        "issue 6: FP8 weights with two data parallel ranks, one launch after another; passed in 256 s",
        gpus=2,
    ),
    Step(
        "megatron-drop",
        _megatron("drop", "--arms ours-b11+bf16grads+drop --reference stock-tensorwise+bf16grads"),
        240,
        "issue 6 G: is form (b) at half of stock's memory without kept transposes? Predicted 0.49",
    ),
    Step(
        "megatron-both",
        _megatron(
            "both",
            "--arms ours-a+bf16grads ours-b11+bf16grads+drop stock-bf16-states --reference stock-tensorwise+bf16grads",
        ),
        380,
        "issue 6 G: speed and half the memory in one run; predicted 54.7k and 53.5k tokens/s beside 49.5k, 35.5 GiB",
    ),
    Step("megatron-tp2", _megatron("tp2"), 380, "issue 6 G: TP=2 with sequence parallelism", gpus=2),
)
