from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from support import HANG
from torch import nn

from fp8_ds.config import LinearConfig, OptimizerConfig
from fp8_ds.tools.estimate import (
    Parts,
    Setup,
    Weight,
    estimate_states,
    parts_by_rank,
    weights_of,
)


def setup(stage: int, num_ranks: int, master: Any = "e4m11", release: bool = False, **more: Any) -> Setup:
    optimizer = OptimizerConfig(states="fp8", master=master, release=release, **more.pop("optimizer", {}))
    return Setup(stage, num_ranks, optimizer, **more)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("master", "release", "expected"), [("e4m11", True, 4.0625), ("e4m19", False, 7.0625)])
def test_an_fp8_weight_takes_the_promised_bytes_on_one_rank(
    stage: int, master: str, release: bool, expected: float
) -> None:
    found = estimate_states([Weight(1 << 20, True)], setup(stage, 1, master, release))
    assert found.per_parameter == expected


def test_other_parameters_have_masters_of_24_bits_beside_split_ones() -> None:
    found = estimate_states([Weight(1 << 10, False)], setup(2, 1))
    expected = Parts(weights=2048, master=1024, moments=2048, moment_scales=64, gradients=2048)
    assert found.other == expected and found.fp8 == Parts()
    fp32 = estimate_states([Weight(1 << 10, False)], Setup(2, 1))
    assert fp32.other.master == 4096


def test_stage_2_cuts_padded_groups_and_pads_buffers_to_16_bytes() -> None:
    weights = [Weight(10, True), Weight(7, False)]  # 17 elements, padded to 20: rank 0 has the first, rank 1 the rest
    first, second = parts_by_rank(weights, setup(2, 2))
    assert first[True] == Parts(weights=16, master=128, moments=256, moment_scales=8, gradients=20)
    assert first[False] == second[True] == Parts(weights=16)
    assert second[False] == Parts(weights=16, master=128, moments=256, moment_scales=8, gradients=14)
    most = estimate_states(weights, setup(2, 2))
    assert (most.fp8, most.other) == (first[True], first[False])
    _, fp32 = parts_by_rank(weights, Setup(2, 2))
    assert fp32[False].master == 40  # its 7 elements and 3 of padding


def test_a_weight_that_a_partition_cuts_has_its_groups_on_both_ranks_and_its_gradient_whole() -> None:
    weights = [Weight(200, True)]
    first, second = (kinds[True] for kinds in parts_by_rank(weights, setup(1, 2)))
    assert (first.moment_scales, first.moments, first.gradients) == (8, 256, 400)
    assert (second.moment_scales, second.moments, second.gradients) == (16, 512, 400)  # elements 100 to 200: 2 groups
    _, fp32 = parts_by_rank(weights, setup(2, 2, grad_bytes=4))
    assert fp32[True].gradients == 400  # of its 100 elements alone


def test_stage_3_cuts_every_weight_and_some_ranks_hold_padding_only() -> None:
    found = [kinds[True] for kinds in parts_by_rank([Weight(5, True)], setup(3, 4))]
    held = Parts(weights=16, master=128, moments=256, moment_scales=8, gradients=4, gathered=5)
    assert found[:3] == [held, held, held]
    assert found[3] == Parts(weights=16, gradients=4, gathered=5)


def test_persistent_weights_cost_their_gathered_copy_on_several_ranks() -> None:
    weights = [Weight(4096, True), Weight(96, False)]
    few = estimate_states(weights, setup(3, 4, persistence_threshold=100))
    assert (few.fp8.gathered, few.other.gathered) == (0, 192)
    every = estimate_states(weights, setup(3, 4, persistence_threshold=5000))
    assert (every.fp8.gathered, every.other.gathered) == (4096, 192)
    assert estimate_states(weights, setup(3, 1, persistence_threshold=5000)).parts.gathered == 0


def test_frozen_weights_have_no_states() -> None:
    weights = [Weight(1024, True, is_trainable=False), Weight(64, False, is_trainable=False), Weight(128, True)]
    for stage, bf16_beside in ((2, 0), (3, 2048)):
        found = estimate_states(weights, setup(stage, 1))
        assert found.fp8 == Parts(1024 + 128 + bf16_beside, master=128, moments=256, moment_scales=8, gradients=256)
        assert found.other == Parts(weights=128)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_release_buffers_and_a_copy_stay_within_the_threshold(stage: int, overlap: bool) -> None:
    """Only stage 1 without overlap and release holds gradients that are not reduced."""
    num_buffers, copies = 2 if overlap and stage < 3 else 1, {"copies_gradients": stage == 3}
    release = estimate_states(LLAMA_8B, setup(stage, 8, release=True, overlap_comm=overlap, **copies))
    assert release.buckets + release.buckets // num_buffers == pytest.approx(1 << 26, abs=8)
    small = setup(stage, 8, release=True, overlap_comm=overlap, reduce_bucket_size=1000, **copies)
    assert estimate_states(LLAMA_8B, small).buckets == num_buffers * 2000
    held = estimate_states(LLAMA_8B, setup(stage, 8, overlap_comm=overlap, **copies))
    num = sum(weight.numel for weight in LLAMA_8B)
    assert held.buckets == num_buffers * 10**9 and release.unreduced == 0
    assert held.unreduced == (2 * num if stage == 1 and not overlap else 0)


def test_exact_clipping_holds_the_gradients_that_release_would_free() -> None:
    held = estimate_states(LLAMA_8B, setup(2, 8))
    assert held == estimate_states(LLAMA_8B, setup(2, 8, release=True, gradient_clipping=1.0))
    delayed_norm = setup(2, 8, release=True, gradient_clipping=1.0, optimizer={"release_clipping": "delayed_norm"})
    assert estimate_states(LLAMA_8B, delayed_norm).parts.gradients == 0
    assert held.at_step - held.between_steps == held.parts.gradients > 0
    assert held.at_step == held.parts.total
    for copies in (False, True):
        stage3 = estimate_states(LLAMA_8B, setup(3, 8, copies_gradients=copies))
        assert stage3.at_step == stage3.between_steps == stage3.parts.total + copies * 10**9


@pytest.mark.parametrize(("stage", "num_ranks"), [(2, 64), (3, 8)])
def test_states_of_all_ranks_together_do_not_depend_on_their_number(stage: int, num_ranks: int) -> None:
    one = estimate_states(LLAMA_8B, setup(stage, 1)).parts
    ranks = [kinds[True] + kinds[False] for kinds in parts_by_rank(LLAMA_8B, setup(stage, num_ranks))]
    for part in ("master", "moments", "moment_scales"):
        assert sum(getattr(found, part) for found in ranks) == pytest.approx(getattr(one, part), rel=1e-3)
    assert estimate_states(LLAMA_8B, setup(stage, num_ranks)).parts.total == max(found.total for found in ranks)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first = nn.Linear(16, 48)
        self.second = nn.Linear(48, 16, bias=False)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.second.weight.requires_grad_(False)


def test_weights_of_a_module_are_those_that_the_plan_converts_on_any_device() -> None:
    expected = [Weight(512, False), Weight(768, True), Weight(48, False), Weight(768, False, is_trainable=False)]
    assert weights_of(Net()) == expected
    with torch.device("meta"):
        assert weights_of(Net()) == expected
    frozen = weights_of(Net(), LinearConfig(frozen="fp8"))
    assert frozen == [*expected[:3], Weight(768, True, is_trainable=False)]
    assert not any(weight.is_fp8 for weight in weights_of(Net(), LinearConfig(filter_fqns=("first", "second"))))
    net: Any = Net()
    for p in net.parameters():  # what zero.Init leaves of a parameter
        p.ds_numel, p.ds_shape = p.numel(), p.shape
        p.data = torch.empty(0)
    assert weights_of(net) == expected


def test_neither_torch_nor_deepspeed_is_needed() -> None:
    code = "import sys, fp8_ds.tools.estimate; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)


def llama_weights(hidden: int, mlp: int, num_layers: int, key_value: int, vocabulary: int) -> list[Weight]:
    """Parameters of a Llama: FP8 all linears but the head.

    Args:
        hidden, mlp, key_value: widths of the residual stream, of the MLP, of keys and values.
    """
    matrices = (hidden * hidden, hidden * key_value, hidden * key_value, hidden * hidden, *[hidden * mlp] * 3)
    layer = [*(Weight(numel, True) for numel in matrices), *(Weight(hidden, False) for _ in range(2))]
    embedding, head = Weight(vocabulary * hidden, False), Weight(vocabulary * hidden, False)
    return [embedding, *layer * num_layers, Weight(hidden, False), head]


LLAMA_8B = llama_weights(4096, 14336, 32, 1024, 128256)
