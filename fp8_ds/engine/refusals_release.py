"""What gradient release is refused together with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReleaseRefusal:
    """What contradicts gradient release, as `startup.refuse_release` and `retyping.check_release` find it."""

    what: str
    reason: str
    remedy: str


_NO_RELEASE = 'Set "release": false'
RELEASE_REFUSALS = (
    ReleaseRefusal(
        "gradient_accumulation_steps",
        "above 1: the weights are updated, and the gradients gone, before the second backward",
        f'{_NO_RELEASE}; or clip, with "release_clipping": "exact", which holds the reduced gradients.',
    ),
    ReleaseRefusal(
        "managed_gradient_accumulation",
        "false: a step may then follow any number of backwards, and the gradients of each are gone after it",
        'Remove "managed_gradient_accumulation"; true is its default.',
    ),
    ReleaseRefusal("PipelineModule", "it reduces gradients after its last backward", f"{_NO_RELEASE}."),
    ReleaseRefusal(
        "zero_optimization.contiguous_gradients",
        "false in stages 1 and 2: DeepSpeed then keeps reduced gradients in the parameters",
        'Remove "contiguous_gradients"; true is its default.',
    ),
    ReleaseRefusal(
        "data_types.grad_accum_dtype",
        "fp32: nothing is accumulated, and DeepSpeed would keep a float32 copy of the gradients",
        'Remove "grad_accum_dtype".',
    ),
    ReleaseRefusal(
        "tensor or model parallelism",
        "each rank would skip and clip a bucket by its own gradients, and weights that all of them hold would differ",
        f"{_NO_RELEASE}.",
    ),
)
