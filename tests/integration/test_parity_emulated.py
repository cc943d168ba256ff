"""Parts of FP8's rounding in models that compute in bf16: each arm rounds what it names, together what ours does."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_ds.config import LinearConfig
from fp8_ds.nn import apply_plan, make_plan

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def values(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).bfloat16()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_leaves_fp8_numbers_times_a_power_of_two_near_what_was_there(bench: Any, dtype: torch.dtype) -> None:
    cast = bench("parity.emulated").cast
    x = values(1, 200, 300)
    found = cast(x, dtype)
    assert found.dtype == torch.bfloat16 and found.equal(cast(found, dtype))
    largest = found.float().abs().max()
    powers = [found.float() * 2.0**k for k in range(-20, 30)]
    assert any(p.to(dtype).float().equal(p) and p.abs().max() > 0.4 * torch.finfo(dtype).max for p in powers)
    assert largest <= 1.07 * x.float().abs().max()
    error = (found.float() - x.float()).abs() / x.float().abs()
    half_a_step = {torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8}[dtype]
    assert float(error[x.abs() > 0.05].max()) <= half_a_step and float(error.median()) > half_a_step / 8


@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_by_chance_are_neighbours_and_right_in_the_mean(bench: Any, dtype: torch.dtype) -> None:
    emulated = bench("parity.emulated")
    cast = emulated.cast
    torch.manual_seed(0)
    x = torch.cat([values(2, 500).float(), values(2, 500).float() * 1e-3, torch.tensor([40.0])])  # subnormal ones, too
    draws = torch.stack([cast(x, dtype, emulated.by_chance(x)) for _ in range(4000)])
    assert draws[:50].equal(torch.stack([cast(one, dtype) for one in draws[:50]]))  # FP8 numbers
    kinds = [len(column.unique()) for column in draws.T]
    assert max(kinds) == 2 and sum(kind == 2 for kind in kinds) > 800
    minority = torch.minimum((draws == draws.amin(0)).sum(0), (draws == draws.amax(0)).sum(0))
    often = (minority > 40) & (minority < 4000)  # else there is no deviation to compare with
    assert int(often.sum()) > 400
    deviation = draws.std(0) / 4000**0.5
    assert float(((draws.mean(0) - x).abs() / deviation)[often].max()) < 5.5


def test_each_arm_rounds_what_it_names_and_nothing_else(bench: Any) -> None:
    emulated = bench("parity.emulated")
    x, grad = values(3, 64, 48), values(4, 64, 32)
    linear = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)

    def results(model: nn.Module) -> list[Tensor]:
        given = x.clone().requires_grad_()
        model.weight.grad = None
        out = model(given)
        out.backward(grad)
        return [out.detach(), given.grad, model.weight.grad]

    exact = results(linear)
    weight, e4m3, e5m2 = linear.weight.detach(), *FORMATS

    def by_hand(w: Tensor, i: Tensor, g: Tensor) -> list[Tensor]:
        return [i @ w.T, g @ w, g.T @ i]

    expected = {
        "emulated": by_hand(*(emulated.cast(t, f) for t, f in ((weight, e4m3), (x, e4m3), (grad, e5m2)))),
        "only-forward": by_hand(emulated.cast(weight, e4m3), emulated.cast(x, e4m3), grad),
        "only-gradients": by_hand(weight, x, emulated.cast(grad, e5m2)),
        "only-gradients-e4m3": by_hand(weight, x, emulated.cast(grad, e4m3)),
        "only-weights": by_hand(emulated.cast(weight, e4m3), x, grad),
        "only-inputs": by_hand(weight, emulated.cast(x, e4m3), grad),
    }
    for name, casts in emulated.EMULATED.items():
        found = results(emulated.EmulatedLinear(linear, casts))
        if name in expected:  # chance and what moves have tests of their own
            for one, other in zip(found, expected[name], strict=True):
                torch.testing.assert_close(one, other, rtol=0.01, atol=0.02)
        rounded = {"weight": (0, 1), "input": (0, 2), "gradient": (1, 2)}
        touched = {k for part, ks in rounded.items() if getattr(casts, part) is not None for k in ks}
        assert [not a.equal(b) for a, b in zip(found, exact, strict=True)] == [k in touched for k in range(3)]


def test_weights_that_are_dithered_or_moved_are_right_in_the_mean_of_a_few_steps_where_chance_is_not(
    bench: Any,
) -> None:
    emulated = bench("parity.emulated")
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=False)
    identity = torch.eye(48)

    def error(arm: str, steps: int) -> float:
        model = emulated.EmulatedLinear(linear, emulated.EMULATED[arm])
        seen = torch.stack([model(identity).detach().T for _ in range(steps)])
        assert steps == 1 or seen[0].equal(seen[1]) == (arm == "only-weights")
        assert model.eval()(identity).equal(model(identity)) == (arm != "only-weights-stochastic")
        return float((seen.mean(0) - linear.weight.detach()).square().mean())

    nearest, chance, dithered, moving = (
        {steps: error(f"only-weights{name}", steps) for steps in (1, 2, 21)}
        for name in ("", "-stochastic", "-dithered", "-moving")
    )
    assert nearest[2] == nearest[21] == nearest[1]
    assert moving[1] == pytest.approx(nearest[1], rel=0.15)  # no more power in a step, and soon less in the mean
    assert moving[21] < 0.1 * nearest[21]
    assert chance[2] == pytest.approx(nearest[2], rel=0.15)  # twice the power, half of it in the mean of two
    assert dithered[21] < 0.1 * chance[21] < 0.02 * nearest[21]


def test_all_parts_together_are_what_the_default_recipe_rounds(bench: Any) -> None:
    """Up to scales, which are no powers of two there: the errors are as large, and gradients as far off."""
    emulated, models = bench("parity.emulated"), bench("parity.models")
    size = models.SIZES["tiny"]
    tokens = torch.randint(0, size.vocab_size, (4, 65), generator=torch.Generator().manual_seed(5))

    def gradients(change: Callable[[nn.Module], object]) -> Tensor:
        model = models.GPT(size, size.vocab_size, seed=0)
        change(model)
        model(tokens).backward()
        return torch.cat([p.grad.float().flatten() for p in model.blocks.parameters() if p.ndim == 2])

    def ours(model: nn.Module) -> None:
        config = LinearConfig()
        plan = make_plan(model, config)
        assert plan.num_converted == 4 * size.layers
        apply_plan(model, plan, config, torch.device("cpu"))

    exact = gradients(lambda model: None)
    errors = {
        name: float((gradients(change) - exact).square().sum() / exact.square().sum())
        for name, change in {
            "ours": ours,
            **{arm: lambda model, c=c: emulated.emulate(model.blocks, c) for arm, c in emulated.EMULATED.items()},
        }.items()
    }
    assert errors["emulated"] == pytest.approx(errors["ours"], rel=0.15)
    assert 0 < errors["only-weights"] < errors["only-forward"] < errors["emulated"]
    assert 0 < errors["only-gradients-e4m3"] < errors["only-gradients"] < errors["only-gradients-stochastic"]
    assert errors["emulated-e4m3"] < errors["emulated"]


@pytest.mark.slow
def test_an_arm_is_trained_and_evaluated_in_bf16_too(run_main: Callable[..., str], bench: Any, tmp_path: Path) -> None:
    common = ("--study", "parts", "--size", "tiny", "--steps", 20, "--text-bytes", 300_000, "--vocabulary", "bytes")
    common = (*common, "--lr", 1e-3, 1e-5, "--cache", tmp_path / "cache", "--out", tmp_path / "out", "--estimate", 1)
    said = run_main("gpt_parity", *common, "--arms", "stock", "emulated", "only-gradients", "--budget", 3000)
    assert "| emulated - stock |" in said and "| only-gradients - stock |" in said
    assert "evaluated in bf16" in said
    (written,) = (tmp_path / "out").glob("*.csv")
    with written.open() as file:
        last = {row["arm"]: float(row["held_out_loss"]) for row in csv.DictReader(file) if row["step"] == "20"}
    assert len(set(last.values())) == 3 and max(last.values()) < min(last.values()) + 0.05
