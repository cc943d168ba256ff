"""The bound of Adam's update against the sequence that reaches it, and the scales that follow from it."""

import math

import pytest
import torch
from support.bounds import update_bound

from fp8_ds.numerics.predicted import PredictedScales, check_betas, pow2_scale_inv

BETAS = [(0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.9, 0.999), (0.95, 0.95)]
NUM_STEPS = 10_000


def bounds(beta1, beta2, num_steps=NUM_STEPS):
    return update_bound(torch.arange(1, num_steps + 1), beta1, beta2)


def adam_on_growing_gradients(beta1, beta2, num_steps=NUM_STEPS):
    """Update of exact Adam in each step for gradients that grow by beta2 / beta1 a step, in units of the newest."""
    shrink = beta1 / beta2
    m = v = 0.0
    updates = []
    for step in range(1, num_steps + 1):
        m = beta1 * m * shrink + (1 - beta1)
        v = beta2 * v * shrink**2 + (1 - beta2)
        updates.append(m / (1 - beta1**step) / math.sqrt(v / (1 - beta2**step)))
    return torch.tensor(updates, dtype=torch.float64)


@pytest.mark.parametrize(("beta1", "beta2"), BETAS)
def test_bound_is_reached_in_every_step_up_to_10000(beta1, beta2):
    assert torch.allclose(adam_on_growing_gradients(beta1, beta2), bounds(beta1, beta2), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("beta1", "beta2"), BETAS)
def test_no_other_gradients_exceed_the_bound(beta1, beta2):
    """Random, one-signed, growing at other rates, one spike, spike after silence: 1000 sequences at once."""
    generator = torch.Generator().manual_seed(0)
    growth = torch.exp(0.2 * torch.randn(1000, generator=generator, dtype=torch.float64))
    m = v = torch.zeros(1000, dtype=torch.float64)
    limit = bounds(beta1, beta2, 300)
    closest = 0.0
    for step in range(1, 301):
        grad = growth.pow(step % 97) * torch.randn(1000, generator=generator, dtype=torch.float64)
        grad[250:500] = grad[250:500].abs()
        grad[500:750] = growth[500:750].pow(step % 97)
        grad[750:] *= torch.rand(250, generator=generator) < 0.02
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad.square()
        update = (m / (1 - beta1**step)).abs() / (v / (1 - beta2**step)).sqrt().clamp(min=1e-300)
        closest = max(closest, float(update.max() / limit[step - 1]))
    assert 0.9 < closest <= 1 + 1e-12


@pytest.mark.parametrize(
    ("beta1", "beta2", "limit"),
    [(0.9, 0.95, 1.1650), (0.9, 0.98, 1.6977), (0.9, 0.99, 2.3452), (0.9, 0.999, 7.2703), (0.95, 0.95, 1.0)],
)
def test_bound_starts_at_one_and_nears_its_limit(beta1, beta2, limit):
    bound = bounds(beta1, beta2)
    assert bound.dtype == torch.float64
    assert bound[0].item() == pytest.approx(1, rel=1e-12)
    assert bound[-1].item() == pytest.approx(limit, rel=1e-4)
    assert bound[-1].item() == pytest.approx((1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)), rel=1e-4)
    assert bound.max() <= bound[-1] * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.81), (0.9, 0.8), (0.95, 0.9), (0.99, 0.98)])
def test_betas_without_a_bound_are_refused(beta1, beta2):
    with pytest.raises(ValueError, match=rf"beta1\*\*2 < beta2, got \({beta1}, {beta2}\)"):
        check_betas(beta1, beta2)
    growing = adam_on_growing_gradients(beta1, beta2, 4000)
    assert growing[-1] > 1.2 * growing[1000]  # they have none indeed


@pytest.mark.parametrize(("beta1", "beta2"), [(1.0, 1.5), (-0.1, 0.9), (0.9, 1.0), (math.nan, 0.9), (0.9, math.nan)])
def test_betas_outside_0_to_1_are_refused(beta1, beta2):
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        check_betas(beta1, beta2)


def many_amaxes():
    """Float32 of all binades within 2**-90 .. 2**90, and what lies at and beside powers of two and 448 times those."""
    exponent = torch.empty(10**5).uniform_(-90, 90, generator=torch.Generator().manual_seed(0))
    power = torch.exp2(torch.arange(-90, 91).float())
    exact = torch.cat([power, 448 * power])
    inf = torch.full_like(exact, math.inf)
    return torch.cat([torch.exp2(exponent), exact, exact.nextafter(inf), exact.nextafter(-inf)])


def test_scale_is_the_smallest_power_of_two_that_holds_the_amax():
    amax = many_amaxes()
    scale_inv = pow2_scale_inv(amax)
    assert (torch.frexp(scale_inv).mantissa == 0.5).all()
    top = 448 * scale_inv.double()
    assert (amax.double() <= top).all() and (top < 2 * amax.double()).all()


def test_scale_of_nothing_is_one_and_of_a_non_finite_amax_nan():
    scale_inv = pow2_scale_inv(torch.tensor([0.0, math.nan, math.inf, 448.0]))
    assert scale_inv[0] == 1 and scale_inv[1:3].isnan().all() and scale_inv[3] == 1


def test_scale_and_its_inverse_stay_normal_at_the_ends_of_float32():
    scale_inv = pow2_scale_inv(torch.tensor([1e-38, 3.4e38]))
    assert scale_inv.tolist() == [2.0**-100, 2.0**100]
    assert torch.equal(scale_inv * scale_inv.reciprocal(), torch.ones(2))


def scales_from(*amaxes):
    scales = PredictedScales(len(amaxes), torch.device("cpu"))
    scales.set(torch.tensor(amaxes))
    return scales


def predict(scales, lr, decay, bound, moves=True):
    vector = torch.ones(scales.num)
    scales.predict(lr * vector, decay * vector, bound * vector, torch.tensor(moves))


def test_predicted_scale_holds_the_decayed_amax_and_the_largest_update():
    scales = scales_from(400.0, 440.0, 440.0)
    assert scales.scale_inv.tolist() == [1, 1, 1]
    predict(scales, lr=10.0, decay=1.0, bound=1.165)
    assert scales.next_scale_inv.tolist() == [1, 2, 2]
    predict(scales, lr=10.0, decay=0.99, bound=1.165)  # 440 * .99 + 11.65 = 447.25
    assert scales.next_scale_inv.tolist() == [1, 1, 1]
    predict(scales, lr=-10.0, decay=-1.0, bound=1.165)  # a weight that is reflected is as large
    assert scales.next_scale_inv.tolist() == [1, 2, 2]


def test_predicted_scale_is_in_force_after_commit_only_and_for_the_weights_named():
    scales = scales_from(1.0, 440.0, 440.0)
    predict(scales, lr=10.0, decay=1.0, bound=1.165)
    assert scales.scale_inv.tolist() == scales.previous_scale_inv.tolist() == [2.0**-8, 1, 1]
    scales.commit(torch.tensor([0, 2]))
    assert scales.scale_inv.tolist() == [2.0**-5, 1, 2] and scales.scale.tolist() == [2.0**5, 1, 0.5]
    scales.commit()
    assert scales.scale_inv.tolist() == [2.0**-5, 2, 2] and scales.scale.tolist() == [2.0**5, 0.5, 0.5]


def test_a_weight_that_does_not_move_keeps_scale_and_amax():
    scales = scales_from(440.0, 440.0)
    predict(scales, lr=10.0, decay=1.0, bound=1.165, moves=[True, False])
    assert scales.next_scale_inv.tolist() == [2, 1]
    scales.measured[0] = 450.0
    scales.start_reduce()
    scales.wait()
    assert scales.amax.tolist() == [450.0, 440.0]


def test_measured_amax_replaces_the_prediction_in_the_next_step_and_is_collected_anew():
    scales = scales_from(440.0)
    predict(scales, lr=10.0, decay=1.0, bound=1.165)
    scales.commit()
    scales.measured.fill_(430.0)
    predict(scales, lr=10.0, decay=1.0, bound=1.165)
    assert scales.amax.tolist() == [430.0] and scales.measured.tolist() == [0.0]
    assert scales.previous_scale_inv.tolist() == [2] and scales.next_scale_inv.tolist() == [1]


def test_scale_of_a_checkpoint_is_taken_where_the_masters_fit_it():
    scales = PredictedScales(4, torch.device("cpu"))
    scales.set(torch.tensor([100.0, 100.0, 900.0, 0.0]), torch.tensor([1.0, 0.25, 1.0, 0.0]))
    assert scales.scale_inv.tolist() == [1, 0.25, 4, 1]


def test_scales_that_are_set_anew_first_wait_for_the_reduction_under_way():
    """It writes into `measured` whenever it ends: after the amaxes that were set, if nobody waits."""

    class Reduction:
        is_waited_for = False

        def wait(self):
            self.is_waited_for = True
            scales.measured.fill_(900.0)

    scales = scales_from(100.0)
    scales._work = reduction = Reduction()
    scales.set(torch.tensor([3.0]))
    scales.wait()
    assert reduction.is_waited_for
    assert scales.amax.tolist() == [3.0] and scales.measured.tolist() == [0.0]
    scales._work = Reduction()
    scales.replace(0, torch.tensor(448.0))
    scales.wait()
    assert scales.amax.tolist() == [448.0] and scales.scale_inv.tolist() == [1.0]
