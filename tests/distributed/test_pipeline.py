"""PipelineEngine with ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn

from fp8_ds.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN = 64, 160


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, training.VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def data(accumulation: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(1_000_000):
        for tokens in training.micro_batches(step, accumulation):
            yield tokens[:, :-1], tokens[:, 1:]


def pipeline_engine(
    fp8: dict[str, Any] | None,
    bounds: str,
    num_micro_batches: int = 2,
    num_stages: int = 2,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Of two stages: "balanced" has two blocks in each, "lopsided" none in the second."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import fp8_ds  # noqa: F401

    layers = [LayerSpec(nn.Embedding, training.VOCABULARY, WIDTH)]
    layers += [LayerSpec(training.Block, WIDTH, HIDDEN, True) for _ in range(4 if bounds == "balanced" else 2)]
    if bounds == "lopsided":
        layers += [LayerSpec(nn.LayerNorm, WIDTH), LayerSpec(nn.LayerNorm, WIDTH)]
    layers.append(LayerSpec(Head))
    torch.manual_seed(seed)
    net = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform", base_seed=7 + seed)
    config = training.ds_config(1, fp8, gradient_accumulation_steps=num_micro_batches, **overrides)
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


def destroy(engine: Any) -> None:
    from deepspeed.utils import groups

    training.destroy(engine)
    groups.mpu = None  # stock leaves the pipeline's grid behind, for the next engine of this process to trip over


def pipeline(fp8: dict[str, Any] | None, bounds: str, num_steps: int = 8, num_micro_batches: int = 2) -> dict[str, Any]:
    engine = pipeline_engine(fp8, bounds, num_micro_batches)
    batches = data(2)
    losses = [float(engine.train_batch(batches)) for _ in range(num_steps)]
    result: dict[str, Any] = {"losses": losses, "engine": type(engine).__name__}
    if fp8 is not None:
        result["num_weights"] = len(engine.fp8.weights)
        result["report"] = engine.fp8_report()
        if engine.fp8.weights:
            training.assert_fp8_follows_masters(training.fp8_state(engine), training.full_masters(engine))
    destroy(engine)
    return result


@pytest.mark.parametrize(
    ("bounds", "num_weights"), [pytest.param("balanced", (4, 4), marks=pytest.mark.slow), ("lopsided", (4, 0))]
)
def test_pipeline_trains_in_fp8_as_stock_does(ranks: Any, bounds: str, num_weights: tuple[int, int]) -> None:
    ours, stock = ranks(2).run(pipeline, {}, bounds), ranks(2).run(pipeline, None, bounds)
    assert tuple(result["num_weights"] for result in ours) == num_weights
    assert {result["engine"] for result in ours} == {"Fp8PipelineEngine"}
    for result, other in zip(ours, stock, strict=True):
        assert result["losses"][-1] < 0.95 * result["losses"][0]
        assert max(abs(a - b) for a, b in zip(result["losses"], other["losses"], strict=True)) < 0.03


def name_from_the_end_error() -> str:
    """What initialize raises where a pipeline's last layer shall stay in bf16."""
    from deepspeed.utils import groups

    with pytest.raises(UnsupportedError) as caught:
        pipeline({"linear": {"filter_fqns": ["-1."]}}, "balanced")
    groups.mpu = None
    return str(caught.value)


def test_a_pipeline_has_no_ends_that_a_stage_could_know(ranks: Any) -> None:
    for text in ranks(2).run(name_from_the_end_error):
        assert "filter_fqns" in text


def test_pipeline_stages_without_the_layers_of_a_schedule_follow_it_too(ranks: Any) -> None:
    schedule = {"bf16_until_step": 3, "layers": {"1.up": "bf16"}}  # the first stage's only
    ours = ranks(2).run(pipeline, {"schedule": schedule}, "lopsided", 5)
    stock = ranks(2).run(pipeline, None, "lopsided", 5)
    assert [result["report"]["num_layers_in_bf16"] for result in ours] == [1, 0]
    for result, other in zip(ours, stock, strict=True):
        assert result["losses"][:3] == other["losses"][:3]
        assert result["losses"][3:] != other["losses"][3:]


def save_stages(directory: str) -> list[float]:
    """Losses of two more steps of a pipeline that has been saved after two, and of one that has loaded it."""
    import test_checkpoint

    engine = pipeline_engine({}, "balanced")
    batches = data(2)
    for _ in range(2):
        engine.train_batch(batches)
    before = test_checkpoint.snapshot(engine)
    engine.save_checkpoint(directory)
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    destroy(engine)

    again = pipeline_engine({}, "balanced", seed=1)
    again.load_checkpoint(directory)
    test_checkpoint.assert_same(test_checkpoint.snapshot(again), before)
    batches = after_two_steps()
    assert [float(again.train_batch(batches)) for _ in range(2)] == losses
    destroy(again)
    name = next(name for name in before if name.startswith("master.") and name.endswith("up.weight"))
    saved = torch.load(f"{directory}/global_step2/layer_{int(name.split('.')[1]):02d}-model_states.pt")
    assert torch.equal(saved["up.weight"], before[name].bfloat16())
    return losses


def after_two_steps() -> Iterator[tuple[Tensor, Tensor]]:
    batches = data(2)
    for _ in range(2 * 2):
        next(batches)
    return batches


def load_as_one_stage(directory: str) -> tuple[list[float], list[str]]:
    """The same losses of one stage that has loaded it, and what was said of its layers."""
    engine = pipeline_engine({}, "balanced", num_stages=1, checkpoint={"load_universal": True})
    with training.log_lines() as said:
        engine.load_checkpoint(directory)
    training.assert_fp8_follows_masters(training.fp8_state(engine), training.full_masters(engine))
    batches = after_two_steps()
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    destroy(engine)
    return losses, [line for line in said if "layers" in line]


def test_checkpoints_of_stages_go_on_bit_for_bit_also_in_another_number_of_them(ranks: Any, tmp_path: Path) -> None:
    """A universal checkpoint's model files are stages, whole layers each, not parts to be joined."""
    from fp8_ds.tools.convert import convert

    losses = ranks(2).run(save_stages, str(tmp_path))[0]
    convert(tmp_path, tmp_path / "universal", "universal", stage=1)
    assert ranks(1).run(load_as_one_stage, str(tmp_path))[0] == (losses, [])


def load_other_shapes(directory: str) -> None:
    engine = pipeline_engine({}, "balanced", checkpoint={"load_universal": True})
    before = training.full_masters(engine)
    with pytest.raises(CheckpointError, match=r"of another model: .*lm_head.weight \[48, 128\] in the checkpoint, \["):
        engine.load_checkpoint(directory)
    after = training.full_masters(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    destroy(engine)


def test_a_shape_that_one_stage_alone_can_see_is_refused_on_all(ranks: Any, tmp_path: Path) -> None:
    from fp8_ds.checkpoint.folders import seal_universal
    from fp8_ds.tools.convert import convert

    ranks(2).run(save_stages, str(tmp_path))
    convert(tmp_path, tmp_path / "universal", "universal")
    path = next((tmp_path / "universal/zero").glob("*lm_head.weight")) / "fp32.pt"
    torch.save({"param": torch.load(path)["param"].view(48, 128)}, path)  # as many numbers
    seal_universal(tmp_path / "universal", "universal")
    ranks(2).run(load_other_shapes, str(tmp_path))
