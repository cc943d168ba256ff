"""What a plan says of matrices that are no linears: which there are, and which share of all weights is in FP8."""

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.plan.convert import revert
from fp8_ds.nn.plan.plan import OtherWeights, Plan, make_plan


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 32, 16))
        self.down = nn.Parameter(torch.zeros(4, 16, 32))
        self.bias = nn.Parameter(torch.zeros(1, 16))  # no matrix


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16))


class PatchEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(10, 16))


def model() -> nn.ModuleDict:
    """1,024 weights of linears, 4,096 + 64 of others, 160 + 160 that are looked up, and 16 + 16."""
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(10, 16),
            "patches": PatchEmbeddings(),
            "attention": nn.Linear(16, 32, bias=False),
            "router": Router(),
            "experts": Experts(),
            "norm": nn.LayerNorm(16, bias=False),
            "lm_head": nn.Linear(16, 32, bias=False),
        }
    )


TEXT = (
    "fp8: 1 of 2 linears, 50.0 % of linear weights, 9.2 % of all weights; bf16: lm_head (filter_fqns); "
    "bf16, not nn.Linear: 1 Experts, 1 Router (75.1 % of all weights)"
)


def test_the_line_says_which_share_of_all_weights_is_in_fp8_and_which_is_no_linear() -> None:
    assert make_plan(model(), LinearConfig()).describe() == TEXT
    only_linears = make_plan(model(), LinearConfig(filter_fqns=())).describe()
    assert only_linears.startswith("fp8: 2 of 2 linears, 100.0 % of linear weights, 18.5 % of all weights; bf16, not")


def test_shapes_are_the_true_ones_of_sharded_parameters() -> None:
    sharded = model()
    for p in sharded.parameters():
        p.ds_shape = p.shape  # type: ignore[attr-defined]
        p.data = torch.empty(0)
    assert make_plan(sharded, LinearConfig()).describe() == TEXT


def test_a_weight_counts_once_and_one_that_is_looked_up_not_at_all() -> None:
    tied = model()
    tied["again"] = Router()
    tied["again"].weight = tied["router"].weight
    tied["head"] = Router()
    tied["head"].weight = tied["embed"].weight
    found = OtherWeights.of(tied)
    assert found.kinds == (("Experts", 1), ("Router", 2))
    assert (found.numel, found.numel_model) == (4096 + 64, 1024 + 4096 + 64 + 160 + 160 + 16 + 16)


def test_of_more_than_four_classes_the_largest_are_named() -> None:
    kinds = [type(name, (Router,), {}) for name in "ABCDEF"]
    found = OtherWeights.of(nn.Sequential(*[kind() for kind in kinds], kinds[5]()))
    assert found.describe() == "2 F, 1 A, 1 B, 1 C, 2 more"


def test_classes_of_linears_of_another_library_are_no_others() -> None:
    assert OtherWeights.of(model(), (Router,)).kinds == (("Experts", 1),)


def test_a_conv1d_has_a_row_of_its_own() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    both = nn.ModuleDict({"experts": Experts(), "conv": pytorch_utils.Conv1D(32, 16)})
    assert make_plan(both, LinearConfig(filter_fqns=())).describe().startswith("fp8: 1 of 1 linears, 100.0 %")
    assert OtherWeights.of(both).kinds == (("Experts", 1),)


def test_a_plan_that_has_changed_still_says_it_and_one_from_a_checkpoint_is_equal() -> None:
    module = model()
    plan = make_plan(module, LinearConfig(filter_fqns=()))
    from_checkpoint = Plan.from_state(plan.to_state())
    assert from_checkpoint == plan and from_checkpoint.describe() == "fp8: 2 of 2 linears, 100.0 % of linear weights"
    assert "75.1 % of all weights" in revert(module, plan, [], "").describe()


def test_a_model_without_linears_is_refused_with_the_class_that_it_has_instead() -> None:
    with pytest.raises(
        ConfigError, match=r"got none of 0: no nn.Linear at all; 1 Router, not nn.Linear. Only"
    ) as error:
        make_plan(nn.Sequential(Router()), LinearConfig())
    assert "put nn.Linear in place of Router" in str(error.value)
    with pytest.raises(ConfigError) as error:
        make_plan(nn.Sequential(nn.ReLU()), LinearConfig())
    assert "Only linears" not in str(error.value)
