"""The scales that follow from the bound of Adam's update."""

import math

import pytest
import torch

from fp8_ds.numerics.predicted import PredictedScales, check_betas, pow2_scale_inv


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        *(((0.9, beta2), r"beta1\*\*2 < beta2") for beta2 in (0.81, 0.8)),
        *((pair, r"in \[0, 1\)") for pair in ((1.0, 1.5), (-0.1, 0.9), (0.9, 1.0), (math.nan, 0.9), (0.9, math.nan))),
    ],
)
def test_betas_without_a_bound_are_refused(betas, message):
    """The bound itself is shown by exact Adam in optim/test_core.py."""
    with pytest.raises(ValueError, match=message):
        check_betas(*betas)


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
    edges = pow2_scale_inv(torch.tensor([0.0, math.nan, math.inf, 448.0, 1e-38, 3.4e38]))
    assert edges[1:3].isnan().all() and edges[[0, 3, 4, 5]].tolist() == [1, 1, 2.0**-100, 2.0**100]


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


def test_a_prediction_is_in_force_after_commit_for_the_weights_named_and_until_an_amax_is_measured():
    scales = scales_from(1.0, 440.0, 440.0, 440.0)
    predict(scales, lr=10.0, decay=1.0, bound=1.165, moves=[True, True, True, False])
    assert scales.next_scale_inv.tolist() == [2.0**-5, 2, 2, 1]  # the last does not move
    assert scales.scale_inv.tolist() == scales.previous_scale_inv.tolist() == [2.0**-8, 1, 1, 1]
    scales.commit(torch.tensor([0, 2]))
    assert scales.scale_inv.tolist() == [2.0**-5, 1, 2, 1] and scales.scale.tolist() == [2.0**5, 1, 0.5, 1]
    scales.commit()
    assert scales.scale_inv.tolist() == [2.0**-5, 2, 2, 1] and scales.scale.tolist() == [2.0**5, 0.5, 0.5, 1]
    scales.measured[:3] = torch.tensor([1.0, 430.0, 450.0])
    predict(scales, lr=10.0, decay=1.0, bound=1.165, moves=[True, True, True, False])
    assert scales.amax.tolist() == [1.0, 430.0, 450.0, 440.0] and not scales.measured.any()
    assert scales.previous_scale_inv.tolist() == [2.0**-5, 2, 2, 1]
    assert scales.next_scale_inv.tolist() == [2.0**-5, 1, 2, 1]


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
