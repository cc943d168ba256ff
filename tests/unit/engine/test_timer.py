"""Whether DeepSpeed's throughput timer empties the device's queue."""

from types import SimpleNamespace

import pytest

from fp8_ds.engine.engine import _let_the_host_run_ahead, _let_the_timer_wait


@pytest.mark.parametrize(
    ("block", "with_fp8"),
    [({}, False), ({"timers": {"throughput": {}}}, False), ({"timers": {"throughput": {"synchronized": True}}}, True)],
)
def test_the_timer_waits_where_the_configuration_says_so_or_nothing_is_in_fp8(block, with_fp8):
    config = SimpleNamespace(_param_dict=block, timers_config=SimpleNamespace(synchronized=True))
    _let_the_host_run_ahead(config)
    assert config.timers_config.synchronized is with_fp8
    _let_the_timer_wait(config)
    assert config.timers_config.synchronized is True
