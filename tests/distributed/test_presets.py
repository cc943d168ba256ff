"""Presets in an engine: what `{"enabled": true}` trains with, how it ends, and how it goes on from a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from support.ranks import on_ranks

from fp8_ds.config import Fp8Config
from fp8_ds.config.presets import Facts
from fp8_ds.engine.bf16_memory import Bf16Memory, Memory
from fp8_ds.engine.patches import patch_accelerate

pytestmark = pytest.mark.distributed

PLAIN = {"preset": None}
AUTO: dict[str, Any] = {}
"""Nothing written; the support's own "preset": null is taken away by `config`."""


def config(stage: int, fp8: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = training.ds_config(stage, fp8, **more)
    if "preset" not in fp8:
        del found["fp8"]["preset"]
    return found


@on_ranks(2)
def test_rank_0_is_told_what_one_key_comes_to_and_of_no_save_that_succeeds(folder: str) -> None:
    """One line, an INFO, whose JSON is the block in which a preset has nothing to say."""
    ends, beginning = ("blocks.0.", "blocks.2."), 'fp8: preset "{}" is '
    for preset in ("auto", "serve"):
        lines = Lines()
        engine = training.build(config(2, {} if preset == "auto" else {"preset": preset}))
        told, rest = [text for text in lines.texts if text.startswith(beginning.format(preset))], len(lines.texts)
        assert (len(told), rest > 0, lines.levels <= {logging.INFO}) == (int(dist.get_rank() == 0),) * 2 + (True,)
        for text in told:
            block, end = json.JSONDecoder().raw_decode(text, len(beginning.format(preset)))
            one = {"enabled": True, "preset": preset, "linear": {"min_size": 0}}
            expected = Fp8Config.from_block(one, Facts(None, ends)).model_copy(update={"preset": None})
            assert Fp8Config.from_block(block) == expected
            assert ("0.101 %" in text[end:]) == (preset == "serve")
        training.train(engine, 1)
        del lines.texts[:]
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
        assert lines.texts == []
        training.destroy(engine)
        lines.close()


def scheduler(total: int) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": total, "warmup_num_steps": 1}}}


class Lines(logging.Handler):
    """What rank 0 is told, from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.levels: set[int] = set()
        logging.getLogger("fp8_ds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.levels.add(record.levelno)

    def close(self) -> None:
        logging.getLogger("fp8_ds").removeHandler(self)
        super().close()

    def having(self, words: str) -> list[str]:
        return [text for text in self.texts if words in text]


def trained(stage: int, fp8: dict[str, Any], steps: int, more: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Losses, and the number of layers in bf16 in each step."""
    engine = training.build(config(stage, fp8, **more))
    losses, nums = [], []
    for step in range(steps):
        nums.append(engine.fp8_report()["num_layers_in_bf16"])
        losses += training.train(engine, 1, step)
    training.destroy(engine)
    return losses, nums


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_key_trains_as_what_it_says_it_is(ranks: Any, stage: int) -> None:
    """The resolved block, written out, gives the same bits."""
    for more, steps, facts in (({}, 3, Facts(None, ("blocks.0.", "blocks.2."))), (scheduler(20), 20, Facts(20))):
        written = Fp8Config.from_block({"enabled": True}, facts).model_dump(mode="json") | {"preset": None}
        one, other = (ranks(1).run(trained, stage, fp8, steps, more)[0] for fp8 in (AUTO, written))
        assert one == other
        assert one[1] == ([4] * 3 if not more else [0] * 19 + [6])


def saved(stage: int, fp8: dict[str, Any], folder: str, steps: int, more: dict[str, Any], is_old: bool) -> None:
    """Train and save; of old, with the state that the version before presets has written."""
    original = Fp8Config.to_state

    def without_preset(self: Fp8Config) -> dict[str, Any]:
        return {key: value for key, value in original(self).items() if key != "preset"}

    Fp8Config.to_state = without_preset if is_old else original  # type: ignore[method-assign]
    try:
        engine = training.build(config(stage, fp8, **more))
        training.train(engine, steps)
        engine.save_checkpoint(folder)
        training.destroy(engine)
    finally:
        Fp8Config.to_state = original  # type: ignore[method-assign]


def resumed(
    stage: int, fp8: dict[str, Any], folder: str, first: int, steps: int, more: dict[str, Any]
) -> tuple[list[float], dict[str, Any], list[str], list[int]]:
    """Losses; the recipe's name, layers in bf16 and the state's block; lines of the load; layers in bf16 by step."""
    engine = training.build(config(stage, fp8, **more), seed=7)
    lines = Lines()
    engine.load_checkpoint(folder)
    told = list(lines.texts)
    lines.close()
    losses, nums = [], []
    for step in range(first, first + steps):
        nums.append(engine.fp8_report()["num_layers_in_bf16"])
        losses += training.train(engine, 1, step)
    layer = engine.module.blocks[1].up.fp8_recipe
    found = {"recipe": layer.name, "grad": layer.grad_format.name, "block": engine.fp8.config.to_state()}
    found["samples"] = engine._fp8_step_callbacks.monitor is not None  # for the guard, where scales are not delayed
    training.destroy(engine)
    return losses, found, told, nums


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_checkpoint_without_a_preset_goes_on_as_it_was_trained(ranks: Any, tmp_path: Path, stage: int) -> None:
    folder = str(tmp_path)
    straight = ranks(2).run(trained, stage, PLAIN, 5, {})[0][0]
    ranks(2).run(saved, stage, PLAIN, folder, 3, {}, True)
    losses, found, told, _ = ranks(2).run(resumed, stage, AUTO, folder, 3, 2, {})[0]
    assert losses == straight[3:]
    assert (found["recipe"], found["grad"], found["samples"]) == ("tensorwise", "e5m2", True)
    (line,) = [line for line in told if "settings of its checkpoint" in line]
    assert all(f'"{value}"' in line for value in ("tensorwise", "e5m2", "output"))
    assert not any("amax histories" in line for line in told)  # tensorwise scales have none
    for fp8 in ({"preset": "auto"}, {"linear": {"recipe": "delayed"}}):  # what is written is what counts
        _, found, told, _ = ranks(2).run(resumed, stage, fp8, folder, 3, 2, {})[0]
        assert found["recipe"] == "delayed" and not found["samples"]
    assert not any("settings of its checkpoint" in line for line in told) or fp8 != {"preset": "auto"}


def test_what_goes_on_so_is_saved_so_and_told_of_no_more(ranks: Any, tmp_path: Path) -> None:
    """The second resume finds its own settings in the checkpoint, with the ends of the first."""
    ranks(2).run(saved, 2, AUTO, str(tmp_path), 3, {}, False)
    straight = ranks(2).run(trained, 2, AUTO, 6, {})[0][0]
    losses, found, told, nums = ranks(2).run(resumed, 2, AUTO, str(tmp_path), 3, 3, {})[0]
    assert losses == straight[3:] and nums == [4, 4, 4] and not any("settings of" in line for line in told)
    # With a number of steps the preset would have its end in bf16: the checkpoint's ends stay.
    known = {"schedule": {"total_steps": 23}}
    _, found, told, nums = ranks(2).run(resumed, 2, known, str(tmp_path), 3, 20, {})[0]
    assert nums[0] == nums[-1] == 4 and sum("settings of" in line for line in told) == 1
    assert found["block"]["schedule"]["layers"] == {"blocks.0.": "bf16", "blocks.2.": "bf16"}


def test_a_longer_run_goes_back_to_fp8_and_ends_later(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(saved, 2, AUTO, str(tmp_path), 20, scheduler(20), False)  # the last step was in bf16
    _, _, told, nums = ranks(1).run(resumed, 2, AUTO, str(tmp_path), 20, 5, scheduler(25))[0]
    assert nums == [0, 0, 0, 0, 6]
    assert sum("goes back to FP8, until step 24" in line for line in told) == 1
    _, _, told, nums = ranks(1).run(resumed, 2, AUTO, str(tmp_path), 20, 1, scheduler(20))[0]
    assert nums == [6] and not any("back to FP8" in line for line in told)


def loaded_twice(old: str, new: str) -> tuple[list[float], str]:
    engine = training.build(config(2, AUTO), seed=7)
    engine.load_checkpoint(old)
    engine.load_checkpoint(new)
    losses, name = training.train(engine, 2, 3), engine.module.blocks[1].up.fp8_recipe.name
    training.destroy(engine)
    return losses, name


def test_a_second_checkpoint_brings_its_own_settings(ranks: Any, tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    ranks(2).run(saved, 2, PLAIN, old, 3, {}, True)
    ranks(2).run(saved, 2, AUTO, new, 3, {}, False)
    straight = ranks(2).run(trained, 2, AUTO, 5, {})[0][0]
    assert ranks(2).run(loaded_twice, old, new)[0] == (straight[3:], "delayed")


def ended_early(folder: str, steps: int, save: str, stage: int = 2) -> list[str]:
    lines = Lines()
    gathers = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    engine = training.build(config(stage, AUTO, **scheduler(20), **gathers))
    training.train(engine, steps)
    if save == "accelerate":
        from accelerate import Accelerator, DistributedType

        patch_accelerate()
        accelerator: Any = SimpleNamespace(deepspeed_config=engine._config._param_dict)
        accelerator.distributed_type, accelerator.unwrap_model = DistributedType.DEEPSPEED, lambda model: model.module
        Accelerator.get_state_dict(accelerator, engine)
    elif save:
        getattr(engine, save)(folder)
    training.destroy(engine)
    lines.close()
    return lines.having("before the bf16 steps")


def test_a_run_that_ends_before_its_bf16_steps_says_so_once(ranks: Any, tmp_path: Path) -> None:
    assert len(ranks(1).run(ended_early, str(tmp_path), 4, "save_checkpoint")[0]) == 1
    assert ranks(1).run(ended_early, str(tmp_path), 4, "")[0] == []
    assert ranks(1).run(ended_early, str(tmp_path), 20, "save_checkpoint")[0] == []


@pytest.mark.parametrize(("stage", "save"), [(2, "save_16bit_model"), (2, "accelerate"), (3, "accelerate")])
def test_a_model_alone_is_a_save_too(ranks: Any, tmp_path: Path, stage: int, save: str) -> None:
    """Also by Trainer, whose `save_model` goes through Accelerate."""
    pytest.importorskip("accelerate")
    assert len(ranks(1).run(ended_early, str(tmp_path), 4, save, stage)[0]) == 1


def without_room(stage: int, fp8: dict[str, Any], folder: str = "") -> tuple[list[int], list[str], dict[str, Any]]:
    original, made = Bf16Memory.of, Memory(40, 85, 100)
    Bf16Memory.of = classmethod(lambda cls, engine: cls(10, lambda: made, lambda: None))  # type: ignore[method-assign, assignment]
    lines, nums = Lines(), []
    try:
        engine, first = training.build(config(stage, fp8, **scheduler(20))), 0
        if folder:  # of 3 steps
            training.train(engine, 1)
            engine.load_checkpoint(folder)
            first = 3
        for step in range(first, 20):
            nums.append(engine.fp8_report()["num_layers_in_bf16"])
            training.train(engine, 1, step)
        block = engine.fp8.config.to_state()
        training.destroy(engine)
    finally:
        Bf16Memory.of = original  # type: ignore[method-assign]
        lines.close()
    return nums, lines.having("might not fit"), block["schedule"]


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_last_steps_that_do_not_fit_are_ends_in_bf16_from_then_on(ranks: Any, tmp_path: Path, stage: int) -> None:
    (nums, told, schedule), (others, told_there, _) = ranks(2).run(without_room, stage, AUTO)
    assert nums == others == [0] * 5 + [4] * 15
    assert len(told) == 1 and told_there == []
    assert schedule["layers"] == {"blocks.0.": "bf16", "blocks.2.": "bf16"} and not schedule["bf16_last_fraction"]
    written = {"schedule": {"layers": {"blocks.1.up": "bf16"}}}
    assert ranks(1).run(without_room, stage, written)[0][0] == [1] * 5 + [5] * 15
    ranks(1).run(saved, stage, AUTO, str(tmp_path), 3, scheduler(20), False)
    nums, told, _ = ranks(1).run(without_room, stage, AUTO, str(tmp_path))[0]
    assert nums == [0] * 5 + [4] * 12 and len(told) == 1  # judged anew after a load


def compiled_then_loaded(folder: str) -> tuple[list[float], str]:
    engine = training.build(config(2, AUTO))
    engine.compile(backend="eager")
    training.train(engine, 1)
    engine.load_checkpoint(folder)
    losses = training.train(engine, 2, 3)
    name = engine.module.blocks[1].up.fp8_recipe.name
    training.destroy(engine)
    torch._dynamo.reset()
    return losses, name


def test_graphs_made_before_a_load_do_not_keep_the_recipe(ranks: Any, tmp_path: Path) -> None:
    straight = ranks(1).run(trained, 2, PLAIN, 5, {})[0][0]
    ranks(1).run(saved, 2, PLAIN, str(tmp_path), 3, {}, True)
    assert ranks(1).run(compiled_then_loaded, str(tmp_path))[0] == (straight[3:], "tensorwise")
