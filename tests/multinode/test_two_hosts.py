"""Training on two hosts: what it computes is what one host computes, and what it sends is what FP8 promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hosts import Hosts

pytestmark = [pytest.mark.multinode, pytest.mark.launcher]

Results = dict[str, list[dict[str, Any]]]
Train = Callable[..., Results]

STEPS = 6
NUM_WARM = 2
"""Of train_cases: bytes are counted in the steps after them."""
NUM_GATHERS = {1: 1, 2: 1, 3: 2}
"""Of each weight in a step, by ZeRO stage; 3: in forward and in backward."""


def zero_case(stage: int, fp8: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    name = f"zero{stage}-{'bf16' if fp8 is None else 'fp8'}"
    return {"name": name, "kind": "zero", "stage": stage, "fp8": fp8, "steps": STEPS, **more}


ZERO = [zero_case(stage, fp8) for stage in (1, 2, 3) for fp8 in ({}, None)]
IN_FP8 = [case for case in ZERO if case["fp8"] is not None]
# Of four ranks in ZeRO-1/2, the first owns the embedding and the last the head: shares of FP8 weights so uneven go by a
# broadcast per owner, whose tree over gloo crosses the cable more often than a ring does (docs/reliability.md).
EVEN = [{**case, "body_only": True} for case in ZERO]
OTHERS = [
    {"name": "pipeline", "kind": "pipeline", "stage": 1, "fp8": {}, "steps": 4},
    {"name": "tensor_parallel", "kind": "tensor_parallel", "stage": 2, "fp8": {}, "steps": 4},
]

TP_OF_FOUR = [{**OTHERS[1], "name": f"tensor_parallel-{tp_size}", "tp_size": tp_size} for tp_size in (4, 2)]


def losses(results: Results, name: str) -> list[float]:
    """Of a case, all ranks of which have the same."""
    of_ranks = [one["losses"] for one in results[name]]
    assert all(one == of_ranks[0] for one in of_ranks), name
    return of_ranks[0]


def assert_trained_alike(ours: Results, reference: Results, names: list[str]) -> None:
    for name in names:
        assert losses(ours, name) == losses(reference, name), name
        assert losses(ours, name)[-1] < losses(ours, name)[0], name


def share_that_crosses(ranks_per_host: int) -> float:
    """Of a gathered buffer, what goes over the cable in both directions together.

    gloo gathers in a ring: every edge of it carries all shares but one, and two edges of the ring join the hosts.
    """
    world_size = 2 * ranks_per_host
    return 2 * (world_size - 1) / world_size


HEADERS = 0.015
"""Of the bytes that cross in bf16: by which headers and acknowledgements differ from run to run, more on a busy machine
(1.0 % seen, where the saving is 14 %)."""


def assert_fp8_saves_one_byte_per_weight(results: Results, ranks_per_host: int) -> None:
    for stage in (1, 2, 3):
        fp8, bf16 = results[f"zero{stage}-fp8"], results[f"zero{stage}-bf16"]
        report = fp8[0]["report"]
        num_weights = report["num_fp8_weights"]
        expected = num_weights * NUM_GATHERS[stage] * (STEPS - NUM_WARM) * share_that_crosses(ranks_per_host)
        for host in range(2):  # both ends of the cable count the same bytes
            rank = host * ranks_per_host
            saved = bf16[rank]["cable"] - fp8[rank]["cable"]
            print(f"ZeRO-{stage}, host {host}: {saved} bytes saved of {bf16[rank]['cable']}, {saved / expected:.4f}")
            off_by = abs(saved - expected)
            assert off_by < 0.05 * expected + HEADERS * bf16[rank]["cable"], (stage, host, saved / expected)


@pytest.mark.short
def test_two_hosts_train_as_one_and_fp8_sends_a_byte_less_per_weight(train: Train) -> None:
    two, one = train(ZERO), train(IN_FP8, num_hosts=1, ranks_per_host=2)
    assert_trained_alike(two, one, [case["name"] for case in IN_FP8])
    assert_fp8_saves_one_byte_per_weight(two, ranks_per_host=1)
    for name in one:  # not all is ours: ARP and IPv6 send a packet now and then, also over a cable that nobody uses
        bytes_of_one, bytes_of_two = (max(found["cable"] for found in results[name]) for results in (one, two))
        assert bytes_of_one < 0.001 * bytes_of_two, (name, bytes_of_one, bytes_of_two)


def test_two_hosts_of_two_ranks_train_as_one_of_four(train: Train) -> None:
    cases = [*IN_FP8, OTHERS[0]]
    two, one = train(cases, ranks_per_host=2), train(cases, num_hosts=1, ranks_per_host=4)
    assert_trained_alike(two, one, [case["name"] for case in IN_FP8])
    assert_stages_trained_alike(two, one)


def test_two_hosts_of_two_ranks_send_a_byte_less_per_weight(train: Train) -> None:
    assert_fp8_saves_one_byte_per_weight(train(EVEN, ranks_per_host=2), ranks_per_host=2)


def assert_stages_trained_alike(ours: Results, reference: Results) -> None:
    for own, other in zip(ours["pipeline"], reference["pipeline"], strict=True):
        assert own["losses"] == other["losses"]
        assert own["losses"][-1] < own["losses"][0]


def test_a_pipeline_and_a_tensor_parallel_group_reach_across_hosts(train: Train) -> None:
    two, one = train(OTHERS), train(OTHERS, num_hosts=1, ranks_per_host=2)
    assert_stages_trained_alike(two, one)
    assert losses(two, "tensor_parallel") == pytest.approx(losses(one, "tensor_parallel"), abs=0.02)


def test_a_tensor_parallel_group_of_four_reaches_across_hosts_of_two_ranks(train: Train) -> None:
    """Over all four, and two by two: within each host, with replicas across."""
    two, one = train(TP_OF_FOUR, ranks_per_host=2), train(TP_OF_FOUR, num_hosts=1, ranks_per_host=4)
    for case in TP_OF_FOUR:
        assert losses(two, case["name"]) == pytest.approx(losses(one, case["name"]), abs=0.02)
        assert losses(two, case["name"])[-1] < losses(two, case["name"])[0], case["name"]


@pytest.mark.parametrize("ranks_per_host", [pytest.param(1, marks=pytest.mark.short), 2])
def test_torchrun_trains_as_the_deepspeed_launcher_does(train: Train, ranks_per_host: int) -> None:
    cases = ZERO if ranks_per_host == 1 else [*IN_FP8, OTHERS[0]]
    ours = train([zero_case(3, {}), zero_case(2, {})], "torchrun", ranks_per_host=ranks_per_host)
    assert_trained_alike(ours, train(cases, ranks_per_host=ranks_per_host), ["zero3-fp8", "zero2-fp8"])


def test_a_slow_link_changes_no_result(train: Train, hosts: Hosts) -> None:
    hosts.limit(100)
    try:
        slow = train([*ZERO, OTHERS[0]], anew=True)
    finally:
        hosts.limit(None)
    assert_trained_alike(slow, train(ZERO), [case["name"] for case in ZERO])
    assert_stages_trained_alike(slow, train(OTHERS))
    (fp8, _), (bf16, _) = slow["zero3-fp8"], slow["zero3-bf16"]
    assert fp8["cable"] < 0.85 * bf16["cable"]


def test_a_link_that_delays_and_loses_packets_changes_no_result(train: Train, hosts: Hosts) -> None:
    if reason := hosts.why_no_netem():
        pytest.skip(reason)
    hosts.disturb(delay_ms=5, loss_percent=1)
    try:
        poor = train([*IN_FP8, OTHERS[0]], anew=True)
        num_lost = [hosts.num_dropped(host) for host in range(2)]
    finally:
        hosts.limit(None)
    assert_trained_alike(poor, train(ZERO), [case["name"] for case in IN_FP8])
    assert_stages_trained_alike(poor, train(OTHERS))
    assert min(num_lost) > 0


def test_the_deepspeed_launcher_reaches_both_hosts_by_pdsh_and_ssh(train: Train, hosts: Hosts) -> None:
    import ssh

    if reason := ssh.why_not():
        pytest.skip(reason)
    cases = [zero_case(3, {}), zero_case(1, {})]
    ours = train(cases, "pdsh", env=ssh.serve(hosts))
    assert_trained_alike(ours, train(ZERO), ["zero3-fp8", "zero1-fp8"])
    assert ours["zero3-fp8"][1]["cable"] > 0
    for host in range(2):
        assert "Accepted publickey" in (hosts.folder / f"daemon{host}.log").read_text()
