"""FP8 optimizer states under the engine on GPUs: the kernel, streams and release must not change a bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MODEL = {"width": 512, "hidden": 2048, "num_blocks": 4}
STEPS = 6
E4M11 = {"states": "fp8", "master": "e4m11"}


def build(stage: int, states: dict[str, Any], **overrides: Any) -> Any:
    import os

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    zero = {"stage": stage, **overrides.pop("zero_optimization", {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 0, **zero}
    return training.build(training.ds_config(stage, {"optimizer": states}, zero_optimization=zero, **overrides), MODEL)


def all_bytes(engine: Any) -> dict[str, torch.Tensor]:
    """Everything a step writes, by shard and tensor."""
    core = engine.optimizer.optimizer.core
    found = {
        "step": core.step_count.cpu(),
        "scale_inv": core.scales.scale_inv.clone(memory_format=torch.contiguous_format).cpu(),
    }
    for shard in core.shards:
        for name in ("hi", "lo", "m", "v", "m_scale_inv", "v_scale_inv"):
            tensor = getattr(shard, name)
            if tensor is not None:
                found[f"{shard.name}.{name}"] = tensor.detach().cpu().clone()
    return found


def run(stage: int, states: dict[str, Any], by_reference: bool = False, **overrides: Any) -> Any:
    """(losses, all bytes) after a few steps, with the kernel or with the plain reference."""
    import fp8_ds.optim.core as core_module
    from fp8_ds.ops.adamw.reference import adamw_step

    prepare = core_module.prepare
    if by_reference:
        core_module.prepare = lambda shards: partial(adamw_step, tuple(shards))
    try:
        engine = build(stage, states, **overrides)
        losses = training.train(engine, STEPS)
        state = all_bytes(engine)
        training.destroy(engine)
    finally:
        core_module.prepare = prepare
    torch.cuda.empty_cache()
    return losses, state


def assert_same(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    for name, tensor in left[1].items():
        assert torch.equal(tensor.view(torch.uint8), right[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("master", ["e4m19", "e4m11"])
def test_engine_with_the_kernel_is_bit_equal_to_the_engine_with_the_reference(
    gpu_ranks: Any, stage: int, master: str
) -> None:
    states = {"states": "fp8", "master": master}
    kernel = gpu_ranks(1).run(run, stage, states)[0]
    assert_same(kernel, gpu_ranks(1).run(run, stage, states, True)[0])
    assert kernel[0][-1] < kernel[0][0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_release_and_overlap_change_no_bit(gpu_ranks: Any, stage: int, world_size: int) -> None:
    clip = {"gradient_clipping": 0.0}
    held = gpu_ranks(world_size).run(run, stage, E4M11, **clip)
    release = {**E4M11, "release": True}
    for overlap in (False, True):
        zero = {"overlap_comm": overlap, "reduce_bucket_size": 1 << 18}
        for rank, released in enumerate(gpu_ranks(world_size).run(run, stage, release, zero_optimization=zero, **clip)):
            assert_same(held[rank], released)


def with_offload(stage: int, is_offloaded: bool) -> Any:
    from types import SimpleNamespace

    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine = build(stage, E4M11)
    losses = training.train(engine, 3)
    if is_offloaded:
        include = [OffloadStateTypeEnum(name) for name in ("optim_states", "hp_params", "lp_params")]
        engine.optimizer.offload_states(include=include, device=SimpleNamespace(value="cpu"), pin_memory=False)
        assert not len(engine.optimizer.optimizer.core._prepared)
        engine.reload_states()
        assert not len(engine.optimizer.optimizer.core._prepared)
    result = losses + training.train(engine, 3, first_step=3), all_bytes(engine)
    training.destroy(engine)
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_kernel_goes_on_where_states_lie_after_offload_and_reload(gpu_ranks: Any, stage: int) -> None:
    assert_same(gpu_ranks(1).run(with_offload, stage, False)[0], gpu_ranks(1).run(with_offload, stage, True)[0])
