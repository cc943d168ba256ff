"""What a plan says of matrices that are no linears: which there are, and which share of all weights is in FP8."""

import pytest
import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.plan.plan import OtherWeights, make_plan


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


def test_a_weight_counts_once_and_one_that_is_looked_up_not_at_all() -> None:
    tied = model()
    tied["again"] = Router()
    tied["again"].weight = tied["router"].weight
    tied["head"] = Router()
    tied["head"].weight = tied["embed"].weight
    found = OtherWeights.of(tied)
    assert found.kinds == (("Experts", 1), ("Router", 2))
    assert (found.numel, found.numel_model) == (4096 + 64, 1024 + 4096 + 64 + 160 + 160 + 16 + 16)


def test_a_model_without_linears_is_refused_with_the_class_that_it_has_instead() -> None:
    with pytest.raises(
        ConfigError, match=r"got none of 0: no nn.Linear at all; 1 Router, not nn.Linear. Only"
    ) as error:
        make_plan(nn.Sequential(Router()), LinearConfig())
    assert "put nn.Linear in place of Router" in str(error.value)
    with pytest.raises(ConfigError) as error:
        make_plan(nn.Sequential(nn.ReLU()), LinearConfig())
    assert "Only linears" not in str(error.value)
