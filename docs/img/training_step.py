"""Draws docs/img/training-step.svg: what of one training step is in FP8, bf16 and float32.

    python docs/img/training_step.py

The picture is the preset "auto"; a dashed box names the key of the "fp8" block that changes it. A test compares the
keys with fp8_ds/config/__init__.py and the file with what this script draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("training-step.svg")
COLOURS = {"fp8": "#8fd6c4", "bf16": "#d5dde8", "fp32": "#f4dca8", "gemm": "#2f5d62"}
LEGEND = {
    "fp8": "FP8, one byte",
    "bf16": "bf16, two bytes",
    "fp32": "float32, four bytes",
    "gemm": "GEMM on FP8 operands",
}
LANE_LEFT, WIDTH, HEIGHT = 12, 1060, 752
_FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Box:
    """One tensor, or one operation on tensors.

    Args:
        kind: of COLOURS, the dtype.
        left, top, width, height: in the picture's units.
        lines: what it says; the first in bold.
        key: key of the "fp8" block that changes it, with the value, as "optimizer.states: fp8"; "": nothing does.
    """

    kind: str
    left: int
    top: int
    width: int
    height: int
    lines: tuple[str, ...]
    key: str = ""

    def svg(self) -> str:
        dash = " stroke-dasharray='5 3'" if self.key else ""
        ink = "white" if self.kind == "gemm" else "#1b2a33"
        texts = [(line, "bold" if number == 0 else "normal", 12) for number, line in enumerate(self.lines)]
        texts += [(self.key, "normal", 10)] if self.key else []
        first = self.top + self.height / 2 - 7.5 * (len(texts) - 1) + 4
        rows = [
            f"<text x='{self.left + self.width / 2:g}' y='{first + 15 * number:g}' font-size='{size}' fill='{ink}' "
            f"font-weight='{weight}' text-anchor='middle'{' font-style=' + repr('italic') if size == 10 else ''}>"
            f"{escape(text)}</text>"
            for number, (text, weight, size) in enumerate(texts)
        ]
        return "\n".join(
            [
                f"<rect x='{self.left}' y='{self.top}' width='{self.width}' height='{self.height}' rx='6' "
                f"fill='{COLOURS[self.kind]}' stroke='#40545e'{dash}/>",
                *rows,
            ]
        )


LANES = [
    (12, 116, "Held", "between steps"),
    (140, 76, "Gathered", "by ZeRO"),
    (228, 186, "Forward", "of one linear"),
    (426, 156, "Backward", "of one linear"),
    (594, 66, "Reduced", "between ranks"),
    (672, 68, "Updated", "once a step"),
]

BOXES = [
    Box("fp8", 130, 26, 190, 88, ("weights of linears", "E4M3 codes", "and their float32 scale_inv")),
    Box(
        "bf16",
        334,
        26,
        200,
        88,
        ("the other parameters", "embeddings, lm_head,", "norms, biases"),
        "linear.filter_fqns",
    ),
    Box(
        "fp32",
        548,
        26,
        236,
        88,
        ("masters", "split: the FP8 byte is their high part"),
        "optimizer.master: e4m19, e4m11",
    ),
    Box("fp32", 798, 26, 236, 88, ("Adam's moments m, v", "8 bytes, or 2.06 in FP8"), "optimizer.states: fp8"),
    Box("fp8", 130, 152, 190, 52, ("weights of linears", "1 byte on the wire")),
    Box("bf16", 334, 152, 200, 52, ("the other parameters", "2 bytes on the wire")),
    Box("bf16", 130, 244, 110, 70, ("input x",)),
    Box("fp8", 280, 244, 140, 70, ("x in E4M3", "cast(x · scale)")),
    Box("gemm", 460, 244, 180, 70, ("output = x · Wᵀ", "E4M3 · E4M3")),
    Box("bf16", 680, 244, 110, 70, ("output",)),
    Box("bf16", 830, 244, 204, 70, ("attention, softmax", "q, k, v"), "attention.backend: fa3_fp8"),
    Box("fp8", 280, 334, 140, 66, ("x kept", "for backward, E4M3")),
    Box(
        "bf16", 460, 334, 330, 66, ("norms, SwiGLU, residual", "inputs kept for backward"), "activations.nonlinear: fp8"
    ),
    Box("bf16", 130, 442, 110, 122, ("grad_output",)),
    Box("fp8", 280, 442, 140, 122, ("grad_output", "in E4M3"), "linear.grad_dtype: e5m2"),
    Box("gemm", 460, 442, 270, 56, ("grad_input = grad_output · W", "E4M3 · E4M3")),
    Box("gemm", 460, 508, 270, 56, ("grad_weight = grad_outputᵀ · x", "E4M3 · E4M3")),
    Box("bf16", 770, 442, 264, 56, ("grad_input",)),
    Box("bf16", 770, 508, 264, 56, ("grad_weight",)),
    Box("bf16", 770, 604, 264, 46, ("gradients",), "zero.reduce_scatter: fp8"),
    Box("fp32", 680, 682, 354, 48, ("Adam on masters, in float32 arithmetic",)),
    Box("fp32", 394, 682, 246, 48, ("amax of masters → scale", "one all-reduce for all weights")),
    Box("fp8", 130, 682, 224, 48, ("weights of linears", "cast(master · scale)")),
]

ARROWS = [
    ((225, 114), (225, 152)),
    ((434, 114), (434, 152)),
    ((240, 279), (280, 279)),
    ((420, 279), (460, 279)),
    ((640, 279), (680, 279)),
    ((790, 279), (830, 279)),
    ((350, 314), (350, 334)),
    ((240, 503), (280, 503)),
    ((420, 470), (460, 470)),
    ((420, 536), (460, 536)),
    ((730, 470), (770, 470)),
    ((730, 536), (770, 536)),
    ((902, 564), (902, 604)),
    ((902, 650), (902, 682)),
    ((680, 706), (640, 706)),
    ((394, 706), (354, 706)),
]


def draw() -> str:
    """The whole picture as SVG text."""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT + 44}' {_FONT}>",
            "<title>What is in FP8 in one training step</title>",
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            "orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#40545e'/></marker></defs>",
            f"<rect width='{WIDTH}' height='{HEIGHT + 44}' fill='white'/>",
            *map(_lane, LANES),
            *(
                f"<path d='M{a} {b} L{c} {d}' stroke='#40545e' stroke-width='1.6' marker-end='url(#head)'/>"
                for (a, b), (c, d) in ARROWS
            ),
            *(box.svg() for box in BOXES),
            *_legend(),
            "</svg>\n",
        ]
    )


def _lane(lane: tuple[int, int, str, str]) -> str:
    top, height, name, note = lane
    return (
        f"<rect x='{LANE_LEFT}' y='{top}' width='{WIDTH - 24}' height='{height}' rx='8' fill='#f6f8fa'/>"
        f"<text x='{LANE_LEFT + 10}' y='{top + height / 2 - 2:g}' font-size='14' font-weight='bold' fill='#1b2a33'>"
        f"{name}</text><text x='{LANE_LEFT + 10}' y='{top + height / 2 + 14:g}' font-size='11' fill='#40545e'>"
        f"{note}</text>"
    )


def _legend() -> list[str]:
    parts, left = [], 130
    for kind, text in LEGEND.items():
        parts.append(
            f"<rect x='{left}' y='{HEIGHT + 8}' width='18' height='18' rx='4' fill='{COLOURS[kind]}' stroke='#40545e'/>"
            f"<text x='{left + 26}' y='{HEIGHT + 21}' font-size='12' fill='#1b2a33'>{text}</text>"
        )
        left += 60 + 7 * len(text)
    parts.append(
        f"<rect x='{left}' y='{HEIGHT + 8}' width='18' height='18' rx='4' fill='white' stroke='#40545e' "
        f"stroke-dasharray='5 3'/><text x='{left + 26}' y='{HEIGHT + 21}' font-size='12' fill='#1b2a33'>"
        "a key changes it</text>"
    )
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw())
