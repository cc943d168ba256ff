"""What session.py can measure on a lent GPU machine: its steps, with what each takes and what is predicted.

The order is that in which `session.py` without names takes them. Here are tests and speed; those of parity come first.
"""

from __future__ import annotations

from session_step import Step, benchmark
from session_steps_parity import PARITY_STEPS


def _tests(selection: str) -> str:
    return f"{{python}} -m pytest -q -m gpu -p no:cacheprovider tests/gpu {selection}"


_TESTS_OF_KERNELS = (
    "(test_adamw_gpu or test_attention_backends_gpu or test_blockwise_gpu or test_fused_gpu or test_grouped_gpu or "
    "test_linear_gpu or test_producers_gpu or test_quantize_gpu or test_squares_gpu or test_weighted_sum_gpu)"
)


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


_LAYERS_WHY = "issue 5 E, G: what 8B's layers at 8192 tokens wait for"


def _parallel_layers(gpus: str) -> str:
    return benchmark(
        "parallel_layers",
        f"--gpus {gpus} --budget {{seconds}} --trace {{out}} --shapes 8b --arms bf16 torchao torchao-cudagraphs te "
        "ours ours-compiled ours-cudagraphs",
    )


_PROFILE_8B = (
    "--model llama-8b --gpus 4 --attention cudnn --warm-up 5 --steps 5 --cross-entropy liger --chunk-mem-const 8 "
    "--budget {seconds} --traces {out}/traces --profile ours-e4m11-compiled+delayed+fused+e4m3"
    "+linear.fast_accumulation=output_and_grad_input+leaf+liger+ds.stage3_prefetch_bucket_size=218103808"
    "+ds.stage3_max_live_parameters=2500000000+attention.backend=fa3"
)
"""Ends in the arm: options of it may follow."""


STEPS = (
    *PARITY_STEPS,
    Step("tests", _tests("-n 8"), 300, "all of tests/gpu for one GPU; 947 tests took 211 s"),
    *(
        Step(
            f"tests-{part}",
            _tests(f"-n 12 --dist worksteal -k '{kept}{_TESTS_OF_KERNELS}'"),
            170,
            f"tests/gpu for one GPU, {what}; both halves took 430 s of one GPU with eight processes",
        )
        for part, kept, what in (
            ("engine", "not ", "those of the engine, models and ranks"),
            ("kernels", "", "those of the kernels"),
        )
    ),
    Step("tests-adamw", _tests("-n 4 -k test_adamw_gpu"), 60, "issue 3: the moments' codes of 2026-11-26, bit for bit"),
    Step(
        "tests-unseen",
        _tests("-n 6 -k 'test_long_gpu or test_schedule_gpu or test_monitor_gpu or test_fused_gpu or test_states_gpu'"),
        300,
        "issue 4, 8: what was cut off on 2026-11-26",
    ),
    Step(
        "tests-unseen-2gpus",
        "{python} -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_many_owners_gpu.py "
        "tests/gpu/test_dataflow_gpu.py -k 'leaves or balanced or added'",
        120,
        "gathers and reductions of many owners, and waits of the host with leaves, over NCCL",
        gpus=2,
    ),
    Step(
        "optimizer-step",
        "{python} benchmarks/optimizer_step.py --out {out}/optimizer-step.json",
        60,
        "issue 4 C: the update with the moments' codes of 2026-11-26: up to 3 % more than before is predicted",
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
        benchmark("attention", "--budget {seconds} --name attention"),
        285,
        "issue 6 D: latency and accuracy of the backends (fa3-fwd wheel needed)",
    ),
    Step("states", benchmark("end_to_end", "--piece states --budget {seconds}"), 420, "issue 4 H 1: states, release"),
    Step(
        "rest",
        benchmark("end_to_end", "--piece rest --budget {seconds}"),
        590,
        "issue 4 H 1: arms without a number, what the setting nearest to parity costs (predicted: 0.91 of the same "
        "without it), and issue 8 C: a sample of the monitor (predicted 11 to 16 ms)",
    ),
    Step("recipes", benchmark("end_to_end", "--piece recipes --budget {seconds}"), 340, "issue 4 B, H 1: recipes"),
    Step("losses", benchmark("end_to_end", "--piece losses --budget {seconds}"), 400, "issue 4 H: losses on text"),
    Step("losses-more", benchmark("end_to_end", "--piece losses-more --budget {seconds}"), 400, "the same, other arms"),
    Step(
        "monitor",
        benchmark("end_to_end", "--piece monitor --budget {seconds}"),
        480,
        "issue 8 C: its cost, step by step; predicted 11 to 16 ms a sampled step, where it was 43 to 66; three arms, "
        "136 to 168 s each on an H100 beside other work",
    ),
    Step("gpt2", benchmark("end_to_end", "--piece gpt2 --budget {seconds}"), 200, "issue 4 H 4: small layers"),
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
        benchmark(
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
        benchmark("end_to_end", "--piece fastest --budget {seconds}"),
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
        benchmark("end_to_end", "--piece accumulation --budget {seconds}"),
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
        "kernels-rest",
        "{python} benchmarks/kernels_tune.py --only rmsnorm_backward 'kept in FP8' 'blockwise transpose' 'masters to' "
        "--budget {seconds} --out {out}/kernels-rest.json",
        60,
        "issue 4 A: those below 0.85 of an equal copy; predicted 0.86, at 128 MiB 0.88, and 0.81 or, of 16 rows, 0.83",
    ),
    Step(
        "kernels-shares",
        "{python} benchmarks/kernels_tune.py --shipped --budget {seconds} --out {out}/kernels-shares.json",
        60,
        "issue 4 A: shares of the copy rate, of a copy of as many bytes too",
    ),
    Step(
        "precise",
        benchmark("end_to_end", "--piece precise --budget {seconds}"),
        480,
        "issue 4 H 1: ends in bf16 beside the best peer, with the states of the pairs, and with the last layer's "
        "attention alone in bf16",
    ),
    Step(
        "delayed",
        benchmark("end_to_end", "--piece delayed --budget {seconds}"),
        560,
        "issue 4 H 1: delayed scales in all layers beside the best peer, both with FlashAttention-3 and without",
    ),
    Step(
        "last-steps",
        benchmark("end_to_end", "--piece last-steps --budget {seconds}"),
        460,
        "issue 4 H 1: the headline's steps beside torchao with FlashAttention-3; predicted 110, 174 and 147 ms",
    ),
    Step(
        "profile-delayed",
        benchmark(
            "end_to_end",
            "--model llama-2b --budget {seconds} --profile ours-e4m11-compiled+delayed+fused+e4m3"
            "+linear.fast_accumulation=output_and_grad_input+attention.backend=fa3",
        ),
        125,
        "issue 4 C: what lies between the kernels of the fastest recipe, where the host was late, with fewer guards; "
        "predicted 8.6 ms outside the model's kernels, 0.5 of it the host",
    ),
    Step("release", benchmark("end_to_end", "--piece release --budget {seconds}"), 75, "issue 4 H 1: release's peak"),
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
        benchmark(
            "end_to_end",
            "--model llama-2b --profile ours-e4m11-compiled+fast+fused+attention.backend=fa3+cudagraphs "
            "--budget {seconds}",
        ),
        125,
        "issue 4 H 1: where one current scale a tensor spends its time",
    ),
    Step(
        "profile-nonlinear",
        benchmark(
            "end_to_end",
            "--model llama-2b --profile ours-e4m11-compiled+fast+nonlinear+attention.backend=fa3+cudagraphs "
            "--budget {seconds}",
        ),
        125,
        "issue 4 H 1: what 16 GiB with CUDA graphs cost; 6.5 ms where 0.4 were expected",
    ),
    Step("peers", benchmark("end_to_end", "--piece peers --budget {seconds}"), 540, "issue 4 H 1: ours beside peers"),
    Step(
        "graphs", benchmark("end_to_end", "--piece graphs --budget {seconds}"), 260, "issue 4 C: idle between kernels"
    ),
    Step("launch-host", "{python} benchmarks/launch_host.py --out {out}", 30, "issue 4 C: what launches take the host"),
    Step(
        "linear-host",
        "{python} benchmarks/linear_host.py --out {out}",
        60,
        "issue 4 C: what an eager linear takes the host",
    ),
    Step("peers-more", benchmark("end_to_end", "--piece peers-more --budget {seconds}"), 330, "the same, other peers"),
    Step("gather", benchmark("gather", "--gpus 2 4"), 40, "issue 4 H 3: one layer's gather", gpus=4),
    Step(
        "gather-2gpus",
        benchmark("gather", "--gpus 2"),
        30,
        "issue 4 H 3: one layer's gather, ZeRO-3's own too; predicted 1.3 ms in bf16, 0.75 in FP8",
        gpus=2,
    ),
    Step(
        "8b-settings",
        benchmark("end_to_end", "--piece 8b-settings --attention cudnn --budget {seconds}"),
        400,
        "issue 4 H 2: 8 layers of 8B; predicted 165 ms, and 170, 168, 173 with DeepSpeed's default settings",
        gpus=2,
    ),
    Step(
        "8b-2gpus",
        benchmark("end_to_end", "--piece 8b --layers 8 --gpus 2 --attention cudnn --budget {seconds}"),
        330,
        "issue 4 H 2: 8 layers of 8B beside stock and torchao; predicted ours 165 ms",
        gpus=2,
    ),
    Step(
        "8b-all-2gpus",
        benchmark("end_to_end", "--piece 8b --gpus 2 --attention cudnn --warm-up 5 --steps 5 --budget {seconds}"),
        470,
        "issue 4 H 2: all of Llama-3-8B on two GPUs, where four are not lent; predicted ours 680 ms, 1.62 and 1.29 x",
        gpus=2,
    ),
    Step(
        "8b-profile",
        benchmark(
            "end_to_end",
            "--piece 8b-profile --layers 8 --gpus 2 --attention cudnn --budget {seconds} --traces {out}/traces",
        ),
        330,
        "issue 4 H 2: where 8 layers of 8B spend their time; host waits beside stock's",
        gpus=2,
    ),
    Step(
        "8b",
        benchmark("end_to_end", "--piece 8b --gpus 4 --attention cudnn --budget {seconds}"),
        500,
        "issue 4 H 2: Llama-3-8B, ZeRO-3",
        gpus=4,
    ),
    Step(
        "8b-hosts",
        benchmark(
            "end_to_end",
            "--piece 8b-hosts --gpus 4 --attention cudnn --warm-up 5 --steps 5 --chunk-mem-const 8 --budget {seconds}",
        ),
        480,
        "issue 4 H 2: layers that are prefetched, and compiled with FlashAttention-3: tensorwise, delayed scales with "
        "FlashAttention-3, and without; predicted 545, 490, 505 ms",
        gpus=4,
    ),
    Step(
        "8b-hosts-profile",
        benchmark("end_to_end", _PROFILE_8B),
        150,
        "issue 4 H 2: where that one waits",
        gpus=4,
    ),
    Step(
        "8b-channels",
        benchmark(
            "end_to_end",
            "--piece 8b-channels --gpus 4 --attention cudnn --warm-up 5 --steps 5 --chunk-mem-const 8 "
            "--budget {seconds}",
        ),
        520,
        "issue 4 H 2: weights and gradients sent without copies, ours and torchao with fewer channels, too; measured "
        "508.6 ms, with 8 channels 516 and 692",
        gpus=4,
    ),
    Step(
        "8b-channels-profile",
        benchmark("end_to_end", f"{_PROFILE_8B}+env.NCCL_MAX_CTAS=8"),
        150,
        "issue 4 H 2: where the same waits with 8 channels, and what its GEMMs take then",
        gpus=4,
    ),
    Step(
        "8b-profile-4gpus",
        benchmark(
            "end_to_end", "--piece 8b-profile --gpus 4 --attention cudnn --budget {seconds} --traces {out}/traces"
        ),
        330,
        "issue 4 H 2: where ours waits for the gathers of ranks that are late; ran on 2026-11-26 before and after",
        gpus=4,
    ),
    Step(
        "8b-memory",
        benchmark(
            "end_to_end",
            "--piece 8b-memory --gpus 4 --attention cudnn --warm-up 5 --steps 5 --chunk-mem-const 8 --budget {seconds}",
        ),
        330,
        "issue 4 H 2: ours at micro-batch 2 in stock's memory; predicted 930 ms, 17.6k tokens/s a GPU, 69 GiB",
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
