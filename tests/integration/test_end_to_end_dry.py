"""end_to_end.py, step_profile.py, gather.py on CPU: names, order, sums; and every mode runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_ds.config import Fp8Config
from fp8_ds.engine.liger_loss import with_liger_loss
from fp8_ds.errors import UnsupportedError

# --- arms ---


def test_models_have_the_sizes_of_the_issue(bench: Any) -> None:
    models = bench("end_to_end_arms").MODELS
    assert models["llama-2b"].num_parameters == 8 * 218_103_808 + 2 * 32000 * 4096
    assert models["llama-8b"].num_parameters / 1e9 == pytest.approx(8.03, abs=0.005)
    assert models["llama-8b"].tokens == models["llama-2b"].tokens == 8192


def test_deepspeed_arms_differ_in_the_fp8_block_only(bench: Any) -> None:
    arms = bench("end_to_end_arms")
    model = arms.MODELS["llama-2b"]
    stock, ours = (
        arms.ds_config(arms.parse_arm(name, model), model, 1.0, False)
        for name in ("stock-eager", "ours-e4m11-release-compiled+rowwise+nonlinear+zero.reduce_scatter=fp8")
    )
    block = ours.pop("fp8")
    assert stock == ours and stock["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    layers = arms.ds_config(arms.parse_arm("stock-compiled+leaf", model), model, 1.0, False)
    (leaf,) = layers["zero_optimization"].pop("leaf_module")["classes"]
    assert leaf.endswith(".LlamaDecoderLayer") and layers == stock | {"zero_optimization": layers["zero_optimization"]}
    assert layers["zero_optimization"] == stock["zero_optimization"]
    three = arms.MODELS["llama-8b"]
    settings = "+ds.stage3_prefetch_bucket_size=50000000+ds.contiguous_gradients=true"
    plain, leaf, changed = (
        arms.ds_config(arms.parse_arm(name, three), three, 1.0, False)["zero_optimization"]
        for name in ("stock-eager", "ours-e4m11-compiled+leaf", f"ours-e4m11-compiled+leaf{settings}")
    )
    assert leaf == plain | {"leaf_module": leaf["leaf_module"]}
    assert plain["stage3_prefetch_bucket_size"] >= 218_103_808  # a decoder layer
    assert changed == leaf | {"stage3_prefetch_bucket_size": 50_000_000, "contiguous_gradients": True}
    assert block["linear"]["recipe"] == "rowwise" and block["zero"] == {"reduce_scatter": "fp8"}
    assert block["activations"] == {"fused": True, "nonlinear": "fp8"}
    assert block["optimizer"] == {
        "states": "fp8",
        "master": "e4m11",
        "release": True,
        "release_clipping": "delayed_norm",
    }


def test_the_precise_arm_has_the_linears_of_its_configuration(bench: Any, root: Path) -> None:
    arms = bench("end_to_end_arms")
    arm = arms.parse_arm("ours-e4m11-compiled+fused+precise", arms.MODELS["llama-2b"])
    ready = json.loads((root / "configs/ds_zero2_fp8_precise.json").read_text())["fp8"]["linear"]
    assert arm.fp8["linear"] == {"recipe": "tensorwise"} | ready and len(ready) == 3


def test_a_peer_has_flash_attention_3_by_the_function_that_ours_has(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it runs; elsewhere the arm fails rather than to be timed with another kernel."""
    arms, trainers = bench("end_to_end_arms"), bench("end_to_end_trainers")
    model = arms.MODELS["tiny-llama"]
    spec = {"cross_entropy": "stock", "attention": "causal", "chunk_mem_const": 1, "weights": None}
    arm = arms.parse_arm("torchao-tensorwise-compiled+fa3", model)
    with pytest.raises(UnsupportedError, match="Hopper"):
        trainers.factory_of(arm, model, spec)
    monkeypatch.setattr("fp8_ds.attention.require_backend", lambda backend, device: None)
    made = {
        name: trainers.factory_of(one, model, spec)() for name, one in {"fa3": arm, "": replace(arm, fa3=False)}.items()
    }
    assert made["fa3"].config._attn_implementation == "fp8_ds_fa3"
    assert made[""].config._attn_implementation == "causal"


def test_an_arm_has_a_micro_batch_of_its_own(bench: Any) -> None:
    arms = bench("end_to_end_arms")
    arm = arms.parse_arm("ours-fp32-eager+mb=3", arms.MODELS["llama-124m"])
    config = arms.ds_config(arm, arms.MODELS["llama-124m"], 0.0, True)
    assert config["train_micro_batch_size_per_gpu"] == 3


def test_where_the_fp8_block_names_ligers_chunks_the_model_has_ligers_forward(bench: Any) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    arms, trainers = bench("end_to_end_arms"), bench("end_to_end_trainers")
    model, spec = arms.MODELS["tiny-llama"], {"cross_entropy": "stock"}
    names = {"stock-eager": "stock", "ours-e4m11-eager": "stock", "ours-e4m11-eager+liger": "patched"}
    for name, loss in names.items():
        assert trainers.loss_of_model(arms.parse_arm(name, model), spec) == loss
    made = {loss: trainers.transformers_model(model, loss, "causal", 1)() for loss in ("stock", "patched")}
    assert type(made["patched"]).__module__.startswith("transformers.")
    assert with_liger_loss(made["patched"]) is made["patched"] and with_liger_loss(made["stock"]) is None
    assert [name for name, module in made["patched"].named_modules() if "forward" in vars(module)] == [""]


def test_larger_chunks_are_told_to_liger_by_our_key_or_by_its_own_argument(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, driver, trainers = bench("end_to_end_arms"), bench("end_to_end"), bench("end_to_end_trainers")
    model = arms.MODELS["tiny-llama"]
    names = ("stock-eager", "torch-eager", "ours-e4m11-eager", "ours-e4m11-eager+liger")
    monkeypatch.setattr("sys.argv", ["end_to_end.py", "--arms", *names, "--cross-entropy", "liger"])
    args, told = driver.parse_args(), []

    def loss(hidden: Any, weight: Any, targets: Any, **more: Any) -> Any:
        told.append(more)
        return hidden.sum()

    functional = SimpleNamespace(liger_fused_linear_cross_entropy=loss)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", functional)
    monkeypatch.setattr(trainers, "need", lambda package: None)
    tokens = torch.randint(model.vocab, (1, model.seq))
    for args.chunk_mem_const in (1, 8):
        jobs = [driver.Job(arms.parse_arm(name, model), 0) for name in names]
        specs = {job.arm.name: driver.make_spec(args, job, model, Path("text")) for job in jobs}
        assert {spec["chunk_mem_const"] for spec in specs.values()} == {args.chunk_mem_const}
        by_key = specs.pop(names[-1])
        config = Fp8Config.from_block(by_key["ds_config"]["fp8"])
        assert config.activations.cross_entropy_chunk_mem_const == args.chunk_mem_const
        assert by_key["arm"]["fp8"] == by_key["ds_config"]["fp8"]
        assert specs["ours-e4m11-eager"]["ds_config"]["fp8"].get("activations") is None
        spec = specs["stock-eager"]
        make = trainers.factory(model, spec["cross_entropy"], spec["attention"], spec["chunk_mem_const"])
        make()(input_ids=tokens, labels=tokens)
    assert told == [{}, {"chunk_mem_const": 8}]  # 0.7 does not know the argument


def test_larger_chunks_of_a_loss_without_chunks_are_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["end_to_end.py", "--arms", "stock-eager", "--chunk-mem-const", "8"])
    driver = bench("end_to_end")
    with pytest.raises(SystemExit, match=r"^--chunk-mem-const: expected 1 with cross entropy stock, got 8\."):
        driver.measure(driver.parse_args())


@pytest.mark.parametrize(
    "name",
    [
        "stock-eager+cudagraphs",
        "torch-compiled+cudagraphs",
        "stock",
        "ours-bf16-eager",
        "torchao-eager",
        "stock-eager+rowwise",
        "ours-fp32-eager+quick",
        "ours-fp32-eager+fa3",
        "stock-eager+env.NCCL_MAX_CTAS",
        "ours-fp32-eager+env.=8",
        "torch-eager+env.NCCL-MAX-CTAS=8",
        "",
    ],
)
def test_arm_that_is_not_one_is_refused(bench: Any, name: str) -> None:
    arms = bench("end_to_end_arms")
    with pytest.raises(ValueError, match="arm: expected"):
        arms.parse_arm(name, arms.MODELS["llama-2b"])


def test_variables_are_of_the_arm_that_names_them_and_of_no_configuration(bench: Any) -> None:
    arms = bench("end_to_end_arms")
    model = arms.MODELS["llama-8b"]
    for stem in ("stock-eager", "torch-compiled", "torchao-tensorwise-compiled", "ours-e4m11-compiled"):
        plain = arms.parse_arm(stem, model)
        arm = arms.parse_arm(f"{stem}+env.NCCL_MAX_CTAS=8+env.NCCL_ALGO=allreduce:tree;x=y", model)
        assert arm.env == {"NCCL_MAX_CTAS": "8", "NCCL_ALGO": "allreduce:tree;x=y"} and plain.env == {}
        assert replace(arm, name=stem, env={}) == plain
        assert arms.ds_config(arm, model, 1.0, False) == arms.ds_config(plain, model, 1.0, False)
        assert arms.Arm(**json.loads(json.dumps(arm.as_dict()))) == arm


# --- the driver ---


def jobs_of(bench: Any, monkeypatch: pytest.MonkeyPatch, *options: Any) -> tuple[Any, list[Any]]:
    driver, arms = bench("end_to_end"), bench("end_to_end_arms")
    monkeypatch.setattr("sys.argv", ["end_to_end.py", *map(str, options)])
    args = driver.parse_args()
    return args, driver.work_list(args, arms.MODELS[args.model])


def test_reference_runs_first_and_last_and_with_several_seeds_once_a_seed(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--model", "tiny-llama", "--reference", "stock-eager", "--arms", "ours-fp32-eager", "torch-eager")
    _, jobs = jobs_of(bench, monkeypatch, *common)
    assert [(job.arm.name, job.is_second) for job in jobs] == [
        ("stock-eager", False),
        ("ours-fp32-eager", False),
        ("torch-eager", False),
        ("stock-eager", True),
    ]
    _, jobs = jobs_of(bench, monkeypatch, *common, "--seeds", 3, 4, "--trunk-steps", 20)
    assert [(job.seed, job.is_trunk) for job in jobs] == [(3, True), *[(3, False)] * 3, (4, True), *[(4, False)] * 3]
    _, jobs = jobs_of(bench, monkeypatch, *common, "--profile")
    assert [job.arm.name for job in jobs] == ["stock-eager", "ours-fp32-eager", "torch-eager"]


def test_the_reference_is_not_trained_where_a_base_has_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "--model",
        "tiny-llama",
        "--arms",
        "ours-fp32-eager",
        "--reference",
        "stock-eager",
        "--base",
        "some.json",
        "--seeds",
        60,
        "--trunk-steps",
        20,
    )
    _, jobs = jobs_of(bench, monkeypatch, *options)
    assert [(job.arm.name, job.is_trunk) for job in jobs] == [("stock-compiled", True), ("ours-fp32-eager", False)]


def test_what_depends_on_the_run_is_in_the_arms_block(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("headline", "stock-eager", "delayed-fp32", "ours-e4m11-eager+schedule.bf16_last_fraction=0.0")
    options = ("--model", "tiny-llama", "--arms", *names, "--seeds", 7, "--trunk-steps", 20)
    args, jobs = jobs_of(bench, monkeypatch, *options, "--steps", 60)
    driver, model = bench("end_to_end"), bench("end_to_end_arms").MODELS["tiny-llama"]
    trunk, headline, stock, *others = (driver.make_spec(args, job, model, Path("text")) for job in jobs)
    block = headline["ds_config"]["fp8"]
    assert block["schedule"] == {"total_steps": 60, "bf16_last_fraction": 0.03} and block["optimizer"]["seed"] == 7
    for one in (headline, *others):
        Fp8Config.from_block(one["ds_config"]["fp8"])
    assert (trunk["steps"], trunk["first_step"], trunk["decays"]) == (20, 0, False)
    assert (stock["steps"], stock["first_step"], stock["decays"]) == (60, 20, True)
    assert trunk["save_weights"] == stock["weights"] == headline["weights"] != None  # noqa: E711
    assert {one["seed"] for one in (trunk, headline, stock)} == {7} and "fp8" not in stock["ds_config"]


@pytest.mark.parametrize("name", ["headline", "delayed-fp32"])
def test_named_arms_are_the_configurations_of_their_pages(bench: Any, root: Path, name: str) -> None:
    arms = bench("end_to_end_arms")
    block = arms.parse_arm(f"{name}+attention.backend=null", arms.MODELS["llama-124m"]).fp8
    if name == "headline":
        ready = json.loads((root / "configs/ds_zero2_fp8_delayed_fast_last.json").read_text())["fp8"]
        assert Fp8Config.from_block(block) == Fp8Config.from_block(ready)
    else:
        assert Fp8Config.from_block(block).optimizer.states == "fp32" and block["linear"]["grad_dtype"] == "e4m3"


def test_learning_rate_rises_and_falls_to_zero_or_stays(bench: Any) -> None:
    rate, peak = bench("end_to_end_worker").learning_rate, bench("end_to_end_arms").LR
    assert [rate(step, 200, True) / peak for step in (0, 9, 19, 20, 110, 200)] == pytest.approx(
        [0.05, 0.5, 1, 1, 0.5, 0]
    )
    assert rate(199, 200, False) == peak and rate(199, 6000, True) < peak == rate(300, 6000, True)


def test_time_of_a_step_is_the_mean_over_steps_in_fp8_and_in_bf16(bench: Any) -> None:
    worker = bench("end_to_end_worker")
    slow = [worker.Block(10, 900.0, 5.0), worker.Block(20, 800.0, 4.0)]  # compile
    blocks = slow + [worker.Block(30 + 10 * k, ms, 3.0) for k, ms in enumerate((10.0, 10.0, 12.0))]
    found = worker.timing(blocks, 1000)
    assert found["step_ms"] == 10.0 and found["step_ms_of_bf16_steps"] is None
    assert found["tokens_per_second_per_gpu"] == 100_000
    ends = [worker.Block(60 + 10 * k, ms, 3.0, num_in_bf16=7) for k, ms in enumerate((20.0, 20.0, 500.0))]
    found = worker.timing(blocks + ends, 1000)
    assert found["step_ms"] == (5 * 10 + 3 * 20) / 8 and found["step_ms_of_bf16_steps"] == 20.0


def schedule(bench: Any, jobs: list[Any], seconds: dict[str, float], budget: float, groups: int = 1) -> Any:
    """(names with seeds in the order of their starts, lines of those left out)"""
    driver, now, started = bench("end_to_end"), [0.0], []

    def run(job: Any, group: int, left: float) -> dict[str, Any]:
        started.append(f"{job.arm.name} {job.seed}{' trunk' if job.is_trunk else ''}")
        now[0] += seconds.get(job.arm.name, 10.0)
        return {"wall_s": seconds.get(job.arm.name, 10.0), "error": "broke"}

    def good(job: Any, group: int, left: float) -> dict[str, Any]:
        found = run(job, group, left)
        if not job.arm.name.startswith("torch-"):
            del found["error"]
        return {**found, "step_ms": 1.0, "tokens_per_second_per_gpu": 1.0, "peak_allocated_gib": 1.0}

    results, skipped = driver.Scheduler(jobs, groups, budget, good, clock=lambda: now[0]).run()
    assert len(results) == len(started)
    return started, skipped


def test_a_failure_does_not_stop_the_rest_and_what_does_not_fit_is_left_out(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("torch-eager", "ours-fp32-eager", "ours-e4m11-eager")
    _, jobs = jobs_of(bench, monkeypatch, "--model", "tiny-llama", "--arms", *names)
    assert schedule(bench, jobs, {}, 1000)[0] == [f"{name} 0" for name in names]
    started, skipped = schedule(bench, jobs, {"ours-fp32-eager": 50.0}, 90)
    assert started == ["torch-eager 0", "ours-fp32-eager 0"]
    assert skipped == ["ours-e4m11-eager, seed 0: left out, it takes 50 s, 30 are left"]


def test_runs_of_a_seed_wait_for_its_trunk(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--model", "tiny-llama", "--reference", "stock-eager", "--arms", "ours-fp32-eager", "--seeds", 1, 2)
    _, jobs = jobs_of(bench, monkeypatch, *options, "--trunk-steps", 20)
    started, _ = schedule(bench, jobs, {}, 1000, groups=3)
    assert len(started) == 6
    for seed in (1, 2):
        of_seed = [name for name in started if name.split()[1] == str(seed)]
        assert of_seed[0].endswith(" trunk") and len(of_seed) == 3


def test_runs_that_share_gpus_are_spread_over_them(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("stock-eager", "ours-fp32-eager", "ours-e4m11-eager", "torch-eager")
    options = ("--model", "tiny-llama", "--per-gpu", 2, "--out", tmp_path, "--arms", *names)
    args, _ = jobs_of(bench, monkeypatch, *options)
    driver, slots = bench("end_to_end"), []

    def run_arm(spec: Any, arm: Any, model: Any, slot: int, *more: Any) -> dict[str, Any]:
        slots.append(slot)
        all_run.wait(30)
        return {"wall_s": 1.0, "error": "not run"}

    all_run = Barrier(4)
    for name, value in {"num_gpus": lambda: 2, "uses_cuda": lambda: True, "machine": dict, "run_arm": run_arm}.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(driver, "prepare_text", lambda args, model: ("none", tmp_path))
    driver.measure(args)
    assert sorted(slots) == [0, 0, 1, 1]


TELLS = """
import argparse, json, os
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--local_rank", "--spec", "--out"):
    parser.add_argument(name)
variables = {name: os.environ.get(name) for name in ("NCCL_MAX_CTAS", "HELD")}
rank = int(os.environ.get("RANK", 0))
print("rank", rank, variables, flush=True)
if rank == 0:
    Path(parser.parse_args().out).write_text(json.dumps(variables))
"""
"""A worker that only says what it has started with."""


@pytest.mark.parametrize(
    ("stem", "gpus"),
    [
        ("torch-eager", 1),
        pytest.param("torch-eager", 2, marks=pytest.mark.slow),
        pytest.param("ours-fp32-eager", 2, marks=[pytest.mark.slow, pytest.mark.launcher]),
    ],
)
def test_every_rank_of_an_arm_starts_with_its_variables_and_of_the_next_without(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpu_environment: dict[str, str],
    stem: str,
    gpus: int,
) -> None:
    arms, driver = bench("end_to_end_arms"), bench("end_to_end")
    (tmp_path / "end_to_end_worker.py").write_text(TELLS)
    monkeypatch.setattr(driver, "HERE", tmp_path)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    for name, value in (cpu_environment | {"HELD": "theirs"}).items():
        monkeypatch.setenv(name, value)
    model, log = replace(arms.MODELS["tiny-llama"], gpus=gpus), tmp_path / "log"
    found = []
    for options in ("+env.NCCL_MAX_CTAS=8+env.HELD=ours", ""):
        found.append(driver.run_arm({}, arms.parse_arm(stem + options, model), model, 0, 100.0, log))
    assert [(one.get("NCCL_MAX_CTAS"), one.get("HELD")) for one in found] == [("8", "ours"), (None, "theirs")], found
    for rank in range(gpus):
        assert f"rank {rank} {{'NCCL_MAX_CTAS': '8', 'HELD': 'ours'}}" in log.read_text()


def test_rival_that_is_not_installed_says_so(bench: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        bench("end_to_end_trainers").need("no_such_package")
    log = f"start\n[rank0]: {raised.value}\nRuntimeError: something after it\n"
    assert bench("processes").error_of(1, log, 10) == "NOT INSTALLED: no_such_package. This arm needs it."
    first = bench("processes").error_of(1, "Traceback\n[rank0]: ValueError: expected x, got y.\nends with 1\n", 10)
    assert first.splitlines()[0] == "exit status 1: [rank0]: ValueError: expected x, got y."


def test_launcher_is_that_of_the_arm(bench: Any) -> None:
    arms, command = bench("end_to_end_arms"), bench("end_to_end").launch_command
    one, four = arms.MODELS["llama-2b"], arms.MODELS["llama-8b"]
    ours = command(arms.parse_arm("ours-fp32-eager", four), four, 1)
    assert ours[1:5] == ["-m", "deepspeed.launcher.runner", "--num_gpus", "4"]
    assert "torch.distributed.run" in command(arms.parse_arm("torch-eager", four), four, 1)
    assert len(command(arms.parse_arm("torch-eager", one), one, 1)) == 2


# --- step_profile.py ---


def test_steps_are_timed_one_by_one(bench: Any) -> None:
    found = bench("step_profile").time_steps(lambda number: time.sleep(0.02), 3, on_cuda=False)
    assert found["device_ms"] >= found["host_ms"] >= 20 > found["cpu_ms"]


KERNELS = {
    "nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT": "GEMM fp8",
    "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT": "GEMM fp8",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_kernel__5x_cublas": "GEMM fp8",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, cutlass::float_e4m3_t>>": (
        "GEMM fp8"
    ),
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM bf16",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas": "GEMM bf16",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": "GEMM bf16",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1": "attention",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<...>": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "quantize_kernel": "cast/transpose",
    "_quantize_kernel": "cast/transpose",
    "quantize_and_transpose_kernel": "cast/transpose",
    "amax_cols_kernel": "cast/transpose",
    "transpose_kernel": "cast/transpose",
    "triton_red_fused_abs_max_3": "cast/transpose",
    "triton_poi_fused__to_copy_clamp_mul_reciprocal_5": "cast/transpose",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>": (
        "cast/transpose"
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>": "cast/transpose",
    "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm/elementwise",
    "triton_poi_fused_mul_silu_2": "norm/elementwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_1": "cast/transpose",
    "triton_poi_fused__scaled_mm_add_view_7": "norm/elementwise",
    "rmsnorm_backward_kernel": "norm/elementwise",
    "swiglu_kernel": "norm/elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(...)>": "norm/elementwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>": (
        "optimizer"
    ),
    "adamw_kernel": "optimizer",
    "triton_poi_fused_add_div_lerp_mul_sqrt_0": "optimizer",
    "Memcpy DtoD (Device -> Device)": "memcpy",
    "Memset (Device)": "memcpy",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "some_kernel_of_theirs": "other",
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_are_grouped_by_name(bench: Any, name: str) -> None:
    assert bench("step_profile").kernel_group(name) == KERNELS[name]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_idle_time_is_what_no_kernel_of_any_stream_covers(bench: Any) -> None:
    profile = bench("step_profile")
    assert profile.union_ms([(0, 1000), (500, 1500), (3000, 4000), (3200, 3300)]) == pytest.approx(2.5)
    events = [
        event("kernel", "nvjet_tst_1", 0, 1000, tid=7),
        event("kernel", "ncclDevKernel_AllGather", 500, 1000, tid=9),  # half of it beside the product
        event("kernel", "nvjet_tst_1", 600, 100, tid=7),
        event("cuda_runtime", "cudaMemcpyAsync", 2100, 10, correlation=3),  # 600 after anything has run
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3000, 1000, tid=7, correlation=3),
        event("kernel", "nvjet_tst_1", 4200, 800, tid=7),  # of no call
        event("gpu_user_annotation", "phase forward", 0, 9000, tid=7),
        event("cpu_op", "aten::mm", 0, 9000),
        {"ph": "M", "name": "process_name"},
    ]
    found = profile.summarize_device(events[::-1], num_steps=2)
    assert (found["busy_ms"], found["idle_ms"], found["late_ms"]) == (1.65, 0.85, 0.3)
    assert (found["exposed_nccl_ms"], found["num_kernels"]) == (0.25, 2)
    assert {k: v for k, v in found["groups_ms"].items() if v} == {"GEMM bf16": 0.95, "nccl": 0.5, "memcpy": 0.5}
    assert found["kernels"][0] == ["nvjet_tst_1", "GEMM bf16", 0.95, 1.5] and len(found["kernels"]) == 3
    assert profile.summarize_device([], 1)["busy_ms"] == 0


def host_events() -> list[dict[str, Any]]:
    node = "autograd::engine::evaluate_function: "
    launches = [
        # (host time, thread, kernel, microseconds): model forward, node, gradient hook, epilogue, update, collective,
        # hook on a leaf's backward, fetch and release of a module
        (10, 1, "nvjet_tst_1", 1000),
        (110, 2, "nvjet_tst_1", 2000),
        (130, 2, "void at::native::direct_copy_kernel_cuda", 30),
        (190, 1, "void at::native::direct_copy_kernel_cuda", 40),
        (210, 1, "adamw_kernel", 5000),
        (131, 2, "ncclDevKernel_AllReduce", 600),
        (141, 2, "void at::native::direct_copy_kernel_cuda", 100),
        (143, 2, "void at::native::direct_copy_kernel_cuda", 200),
        (145, 2, "void at::native::direct_copy_kernel_cuda", 400),
        (211, 1, "Memcpy DtoH (Device -> Pinned)", 1),
    ]
    events = [
        event("user_annotation", "phase forward", 0, 100),
        event("user_annotation", "phase backward", 100, 100),
        event("user_annotation", "phase update", 200, 100),
        event("cpu_op", f"{node}MmBackward0", 105, 15, tid=2),
        event("cpu_op", f"{node}torch::autograd::AccumulateGrad", 125, 10, tid=2),
        event("cpu_op", f"{node}BackwardHookFunctionBackward", 140, 2, tid=2),
        event("cpu_op", f"{node}PreBackwardFunctionForModuleBackward", 142, 2, tid=2),
        event("cpu_op", f"{node}PostBackwardFunctionModuleBackward", 144, 2, tid=2),
        event("cuda_runtime", "cudaStreamSynchronize", 20, 5),
        event("cuda_runtime", "cudaDeviceSynchronize", 220, 5),
        event("cpu_op", "aten::item", 19, 7),
        event("cuda_runtime", "cudaStreamSynchronize", 5000, 5),
    ]
    for number, (ts, tid, name, dur) in enumerate(launches):
        events.append(event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, number))
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        events.append(event(kind, name, 10_000 * (number + 1), dur, 7, number))
    return events


def test_kernels_of_hooks_epilogue_and_update_are_the_engines(bench: Any) -> None:
    profile = bench("step_profile")
    host = profile.summarize_host(host_events(), num_steps=1)
    assert host["owner_ms"] == {
        "model": 3.0,
        "engine in backward": 0.77,
        "engine in update": 5.001,
        "nccl": 0.6,
    }
    assert host["waits"] == {"forward": 1, "backward": 0, "update": 2}
    ranks = [{"device_ms": 20.0, "host_ms": 4.0, "cpu_ms": 3.0}] * 2
    blocks = [(100.0, 2, "ours.py:3 a | b")]
    found = {"step_ms": 20.0, "ranks": ranks, "host": host, "device": profile.summarize_device(host_events(), 1)}
    memory = {"before_gib": 1.0, "peak_gib": {"forward": 1.5, "backward": 2.25}, "blocks": blocks}
    text = profile.table("an arm", found | {"memory": memory})
    idle = 20 - found["device"]["busy_ms"]
    assert f"**{idle + 0.77 + 5.001:.1f} ms**" in text and f"| idle | {idle:.2f} |" in text
    assert "| 1 | 20.0 | 4.0 | 3.0 |" in text and "| `adamw_kernel` | optimizer | 5.000 | 1 |" in text
    assert "1.00 when the step begins; at the peak of forward 1.50, backward 2.25." in text
    assert "| 100.0 | 2 | `ours.py:3 a / b` |" in text and "GiB" not in profile.table("an arm", found)


def test_memory_at_the_peak_is_what_lives_then_by_the_line_that_asked_for_it(bench: Any) -> None:
    def event(action: str, addr: int, mib: float, line: int = 1) -> dict[str, Any]:
        frames = [{"filename": "/x/torch/nn/y.py", "line": 9}, {"filename": "/x/ours.py", "line": line}]
        return {"action": action, "addr": addr, "size": int(mib * 2**20), "frames": frames}

    events = [
        event("alloc", 1, 100, line=1),
        event("alloc", 2, 50, line=2),
        event("free_requested", 1, 100),
        event("free_completed", 1, 100),
        event("alloc", 1, 70, line=3),
        event("alloc", 3, 30, line=3),
        event("alloc", 4, 2, line=4),
        event("free_completed", 3, 30),
        event("alloc", 5, 29, line=5),
    ]
    live_at_peak = bench("step_profile").live_at_peak
    assert live_at_peak(events) == [(100.0, 2, "ours.py:3 "), (50.0, 1, "ours.py:2 "), (2.0, 1, "all others")]
    assert live_at_peak([]) == []


def test_what_torch_compile_gave_up_on_is_part_of_the_result(bench: Any) -> None:
    """On 2026-11-27 an arm was timed twice whose layers were all in eager."""

    class Numbered(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Any) -> Any:
            return x * self.number

    with torch._dynamo.config.patch(recompile_limit=2), bench("end_to_end_worker").InEager() as heard:
        for number in range(4):
            layer = Numbered(number)
            layer.compile(backend="eager")
            layer(torch.ones(1))
    assert len(heard.functions) == 1
    assert heard.functions[0].startswith("'forward' (test_end_to_end_dry.py:")
    report, run = bench("end_to_end_report"), training_run()
    assert "past torch's limit" not in report.training_table(run)
    run["results"][1]["in_eager"] = heard.functions
    assert f"**In eager, past torch's limit**: {heard.functions[0]}, in ours-fp32-eager" in report.training_table(run)


# --- the report ---


def result(arm: str, losses: tuple[float, ...], seed: int = 0, tokens: float = 30e3, **more: Any) -> dict[str, Any]:
    steps = [10 * (k + 1) for k in range(len(losses))]
    return {
        "arm": arm,
        "seed": seed,
        "is_second": False,
        "is_trunk": False,
        "step_ms": 1.0,
        "step_ms_of_bf16_steps": None,
        "tokens_per_second_per_gpu": tokens,
        "peak_allocated_gib": 15.0,
        "peak_reserved_gib": 16.0,
        "last_steps": steps,
        "losses": list(losses),
        "block_ms": [1.0] * len(losses),
        "held_out": [[steps[-1], losses[-1]]],
        "wall_s": 1.0,
        **more,
    }


def training_run(*results: dict[str, Any], number: int = 1, **more: Any) -> dict[str, Any]:
    shape = vars(import_module("end_to_end_arms").MODELS["tiny-llama"])  # on the path by `bench`
    some = (result("stock-eager", (5.0, 4.0)), result("ours-fp32-eager", (5.0, 4.01), tokens=60e3))
    return {
        "id": f"2026-11-2{number}T00:00:00Z",
        "mode": "train",
        "model": {"name": "tiny-llama", **shape},
        "reference": "stock-eager",
        "steps": 20,
        "trunk_steps": 0,
        "cross_entropy": "stock",
        "chunk_mem_const": 1,
        "attention": "causal",
        "clip": 1.0,
        "zero_optimization": {"stage": 2},
        "text": "some",
        "command": "end_to_end.py",
        "machine": {"device": "cpu", "num_gpus": 0, "versions": {}, "python": "3", "cuda": None},
        "results": list(results or some),
        "skipped": [],
        **more,
    }


def test_an_arm_is_marked_whose_loss_is_off_by_more_than_three_times_the_spread_of_bf16(bench: Any) -> None:
    table = bench("end_to_end_report").training_table
    stock = result("stock-eager", (5.0, 4.0))
    second = result("stock-eager", (5.0, 4.02), is_second=True, tokens=33e3)  # 0.5 % apart
    near, far = result("ours-fp32-eager", (5.0, 4.05), tokens=63e3), result("ours-e4m11-eager", (5.0, 4.07))
    text = table(training_run(stock, near, far, second))
    assert "| +1.250 |" in text and "| **+1.750, off** |" in text and "are 0.50 % apart" in text
    assert f"| {63 / 31.5:.3f} |" in text and "drifted by +10.00 %" in text
    assert "off**" not in table(training_run(stock, near, far))  # nothing to judge by


def test_runs_that_shared_a_gpu_are_not_timed(bench: Any) -> None:
    report = bench("end_to_end_report")
    second = result("stock-eager", (5.0, 4.02), is_second=True, tokens=33e3)
    own, shared = (report.section(training_run(*training_run()["results"], second, per_gpu=k)) for k in (1, 2))
    assert "60,000" in own and "drifted" in own and "shared a GPU" not in own
    assert "60,000" not in shared and "drifted" not in shared and "2 runs shared a GPU" in shared
    assert "| +0.250 |" in own and "| +0.250 |" in shared


def test_pairs_are_of_one_seed_and_of_the_last_tenth_of_the_steps(bench: Any) -> None:
    report = bench("end_to_end_report")

    def run(seed: int, off: float) -> dict[str, Any]:
        start = [4.0] * 18
        base, mine = ((*start, 2.0, 2.0), (*start, 2.0 * (1 + off / 100), 2.0 * (1 + off / 100)))
        trunk = result("stock-eager", (9.0,), seed, is_trunk=True)
        both = result("stock-eager", base, seed), result("ours-fp32-eager", mine, seed)
        return training_run(trunk, *both, number=seed, steps=200)

    runs = [run(1, 0.02), run(2, 0.06), run(3, 0.04)]
    ((_, by_arm),) = report.pairs(runs).items()
    assert {seed: round(ends, 6) for seed, (_, ends) in by_arm["ours-fp32-eager"].items()} == {
        1: 0.02,
        2: 0.06,
        3: 0.04,
    }
    assert [round(training, 6) for training, _ in by_arm["ours-fp32-eager"].values()] == [0.02, 0.06, 0.04]
    text = report.pair_tables(runs)
    assert "| +0.040 (-0.010 to +0.090) | parity |" in text
    assert report.pairs(runs[:1]) == {}


def test_losses_are_compared_with_the_references_run_of_a_base(bench: Any) -> None:
    report = bench("end_to_end_report")
    old = [training_run(result("stock-eager", (5.0, loss), seed=k), number=k) for k, loss in ((1, 4.0), (2, 4.2))]
    run = training_run(result("ours-fp32-eager", (5.0, 4.04), seed=1), result("ours-fp32-eager", (5.0, 4.2), seed=2))
    run["id"] = "2026-11-29T00:00:00Z"
    run["base"] = report.base_runs(run, old, [1, 2])
    assert run["base"] == {"1": old[0]["id"], "2": old[1]["id"]}
    (arms,) = report.pairs([*old, run]).values()
    assert arms["ours-fp32-eager"] == {1: (pytest.approx(1.0),) * 2, 2: (pytest.approx(0.0),) * 2}
    text = report.section(run, [*old, run])
    assert "| +1.000 |" in text and old[1]["id"] in text and "| 30,000 |  |" in text  # losses compared, speed not
    with pytest.raises(SystemExit, match=r"seeds \[3\]"):
        report.base_runs(run, old, [1, 3])
    with pytest.raises(SystemExit, match=r"seeds \[1\]"):
        report.base_runs(run | {"text": "another"}, old, [1])


def test_failures_and_memory_of_replayed_graphs_are_told(bench: Any) -> None:
    report = bench("end_to_end_report")
    graphs = result("ours-e4m11-compiled+fused+cudagraphs", (5.0, 4.0), peak_reserved_gib=17.5)
    failed = {"arm": "torch-eager", "seed": 0, "is_second": False, "is_trunk": False, "error": "it broke\nhere"}
    text = report.training_table(training_run(graphs, failed | {"wall_s": 1.0}))
    assert "| in graphs / 17.50 |" in text and "| torch-eager | 0 | **it broke** |" in text


def test_runs_of_several_files_are_joined_once_each(bench: Any, tmp_path: Path) -> None:
    report = bench("end_to_end_report")
    long = [result(arm, tuple(5.0 - k / 100 for k in range(40))) for arm in ("stock-eager", "ours-fp32-eager")]
    for name, numbers in (("a.json", (1, 2)), ("b.json", (2, 3))):
        report.write(tmp_path / name, [training_run(*long, number=number) for number in numbers])
    path = report.merged(tmp_path / "out", [tmp_path / "a.json", tmp_path / "b.json"])
    assert path.name == "2026-11-23-training.json" and len(report.load(path)) == 3
    assert report.merged(tmp_path / "out", [tmp_path / "a.json"]).name == "2026-11-22-training.json"
    report.write(tmp_path / "beside.json", [training_run(number=3, command="beside it, in the same second")])
    assert len(report.load(report.merged(tmp_path / "out", [tmp_path / "beside.json"]))) == 4
    text = report.publish(path)
    assert {file.suffix for file in (tmp_path / "out").glob("2026-11-23*")} == {".json", ".md", ".png"}
    assert "](2026-11-23-training.png)" in text


def test_runs_side_by_side_on_one_host_keep_each_others_results(bench: Any, tmp_path: Path) -> None:
    report, path = bench("end_to_end_report"), tmp_path / "shared.json"

    def save_some(number: int) -> None:
        for end in (1, 2):
            run = training_run(number=number)
            report.add(path, run | {"results": run["results"][:end]})

    with ThreadPoolExecutor() as threads:
        list(threads.map(save_some, (1, 2, 3)))
    runs = report.load(path)
    assert len(runs) == 3 and all(run["results"] == training_run()["results"] for run in runs)


# --- dry runs ---


def the_run(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*-training.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert str(folder) not in path.read_text()
    for result in run["results"]:
        assert "error" not in result, result["error"]
    return run


def test_a_run_gives_speed_and_losses_dry(run_main: Callable[..., str], tmp_path: Path) -> None:
    options = ("--steps", 40, "--cache", tmp_path / "text", "--out", tmp_path / "out")
    output = run_main(
        "end_to_end", "--model", "tiny-llama", "--reference", "torch-eager", "--arms", "ours-e4m11-eager", *options
    )
    plain, ours, second = the_run(tmp_path / "out")["results"]
    assert len(plain["losses"]) == 4 and plain["losses"][-1] < plain["losses"][0] - 0.2
    # The same weights and the same tokens: and the second run of bf16 has other weights.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=0.005)
    assert second["losses"][0] != plain["losses"][0] and ours["fp8"]["resident_weight_bytes"] > 0
    assert ours["held_out"][-1][0] == 40 and "| ours-e4m11-eager | 0 |" in output and "% apart" in output


@pytest.mark.slow
@pytest.mark.launcher
def test_arms_start_from_a_trunk_dry(run_main: Callable[..., str], bench: Any, tmp_path: Path) -> None:
    options = ("--steps", 40, "--trunk-steps", 40, "--seeds", 0, 1, "--evaluations", 3, "--per-gpu", 2)
    own = ("--cache", tmp_path / "text", "--out", tmp_path / "out")
    arms = ("--reference", "stock-eager", "--arms", "ours-e4m11-eager")
    output = run_main("end_to_end", "--model", "tiny-qwen3", *arms, *options, *own)
    results = the_run(tmp_path / "out")["results"]
    for trunk, stock, ours in (results[:3], results[3:]):
        assert trunk["held_out"][-1][1] == pytest.approx(stock["held_out"][0][1], rel=1e-3)
        assert ours["held_out"][0][1] == pytest.approx(stock["held_out"][0][1], rel=0.005)
        assert [step for step, _ in ours["held_out"]] == [0, 10, 30, 40]
    assert "## Pairs: tiny-qwen3, 40 steps, above stock-eager" in output
    assert output.count("| not timed | |  |") == len(results) == 6


@pytest.mark.slow
@pytest.mark.launcher
def test_sharded_arms_run_dry(run_main: Callable[..., str], tmp_path: Path) -> None:
    arms = ("stock-eager", "ours-e4m11-eager+mb=2", "torch-eager")
    own = ("--steps", 20, "--cache", tmp_path / "text", "--out", tmp_path / "out")
    run_main("end_to_end", "--model", "tiny-llama-3", "--arms", *arms, *own)
    assert [r["arm"] for r in the_run(tmp_path / "out")["results"]] == list(arms)


@pytest.mark.slow
@pytest.mark.launcher
def test_profile_runs_dry(run_main: Callable[..., str], tmp_path: Path) -> None:
    arms = ("stock-eager", "ours-e4m11-eager")
    traces = tmp_path / "traces"
    own = ("--cache", tmp_path / "text", "--out", tmp_path / "out", "--traces", traces)
    output = run_main("end_to_end", "--model", "tiny-llama", "--profile", "--arms", *arms, *own)
    assert {path.name for arm in arms for path in (traces / arm).iterdir()} == {"device.json.gz", "both.json.gz"}
    found = {r["arm"]: r for r in the_run(tmp_path / "out")["results"]}
    for one in found.values():
        assert one["host"]["cpu_ops"] > 1000 and one["ranks"][0]["host_ms"] > 0
    assert "Outside the model's kernels" in output


# --- gather.py ---


def test_gather_measures_both_dtypes(run_main: Callable[..., str], tmp_path: Path) -> None:
    output = run_main("gather", "--gpus", 2, "--scale", 4096, "--out", tmp_path)
    (path,) = tmp_path.glob("*-gather.json")
    (run,) = json.loads(path.read_text())
    layer = {name: row["bytes"] for name, row in run["layer"].items()}
    weights = 218_103_808 // 4096
    assert layer["fp8, one buffer"] == layer["fp8, weight by weight"] == weights
    assert layer["bf16, one buffer"] == 2 * weights
    assert layer["bf16, ZeRO-3's own"] == 2 * weights and layer["fp8, ZeRO-3's own"] == weights
    assert output.count("| 2 | ") == len(layer) == 6
