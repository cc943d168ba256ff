"""What this machine has for FP8, what is missing and what installs it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8_ds.device import uses_cuda
from fp8_ds.errors import Fp8DsError, SeamError
from fp8_ds.statistics import finite_or_none

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TESTED_TORCH = ("2.11", "2.13", "2.14")
"""Versions that the suite has run with: on GPUs, in CI, and once on a CPU (docs/versions.md)."""
_TORCH_OF_CI = "2.13"
_INSTALL_TORCH = f"pip install 'torch=={_TORCH_OF_CI}.*'"
_INSTALL_CUDA = f"pip install --force-reinstall 'torch=={_TORCH_OF_CI}.*' (the wheel for Linux is a CUDA build)"
_CLONE = "MEGATRON_LM_PATH"
_SURVEY_SECONDS = 120
_PROBE_SIZE = {"cuda": 4096, "cpu": 128}

Status = Literal["ok", "warning", "missing", "optional"]
"""missing: FP8 training needs it. optional: it is not there, and something less common needs it."""


@dataclass(frozen=True)
class Check:
    """One line: what, how it stands, what was found, and what to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Probe:
    """One recipe's forward product on this device.

    Attributes:
        recipe: its name.
        refused: why it does not run here, or "".
        is_exact: the same bits as the plain reference gives.
        sqnr_db: against the reference, in dB, where it is not exact.
        teraflops: None on a CPU, whose speed says nothing.
        bf16_teraflops: of the same product in bf16.
    """

    recipe: str
    refused: str = ""
    is_exact: bool = False
    sqnr_db: float | None = None
    teraflops: float | None = None
    bf16_teraflops: float | None = None


def checks() -> list[Check]:
    """All that `fp8-ds doctor` looks at, but for probes; nothing is raised."""
    python = Check("python", "ok", sys.version.split()[0])
    if installed("torch") is None:
        return [
            python,
            Check("torch", "missing", "not installed, and without it nothing else is known", _INSTALL_TORCH),
        ]
    return [
        python,
        *_torch(),
        *_gpu(),
        *_deepspeed(),
        _package("triton", "the kernels of this package on a GPU run by it", needed=uses_cuda()),
        *_compilers(),
        *_build_locks(),
        *_attention(),
        _package("transformer_engine", "Megatron-LM's FP8 linears", "pip install 'transformer-engine[pytorch]'"),
        *_megatron(),
        _package("liger_kernel", '"activations.cross_entropy": "liger"', "pip install liger-kernel"),
        _package("transformers", "Hugging Face Trainer, `plan` and `estimate`", "pip install transformers accelerate"),
        _package("accelerate", "Hugging Face Trainer and Accelerate"),
        _package("peft", "LoRA on frozen FP8 weights", "pip install --no-deps peft"),
        _package("safetensors", "`convert` from and to safetensors"),
        _package("matplotlib", "`parity`, and the pictures of `compare`"),
        autoload_check(),
    ]


def can_train(found: list[Check]) -> bool:
    return not any(check.status == "missing" for check in found)


def installed(package: str) -> str | None:
    """Its version; None where it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "of unknown version"


def _package(name: str, use: str, remedy: str = "", needed: bool = False) -> Check:
    found = installed(name)
    if found is not None:
        return Check(name, "ok", found)
    return Check(name, "missing" if needed else "optional", f"not installed ({use})", remedy or f"pip install {name}")


def _torch() -> Iterator[Check]:
    import torch

    is_tested = any(torch.__version__.startswith(f"{one}.") for one in TESTED_TORCH)
    text = f"{torch.__version__} (tested: {', '.join(TESTED_TORCH)})"
    remedy = "" if is_tested else f"{_INSTALL_TORCH}, or run the tests of fp8_ds: make test"
    yield Check("torch", "ok" if is_tested else "warning", text, remedy)
    if torch.version.cuda is None:
        yield Check("CUDA", "missing", "this torch is a CPU build", _INSTALL_CUDA)
        for name, use in (("cuDNN", "attention"), ("NCCL", "several GPUs")):
            yield Check(name, "optional", f"none: this torch is a CPU build ({use})", "comes with a torch for CUDA")
        return
    status: Status = "ok" if tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9) else "warning"
    yield Check("CUDA", status, torch.version.cuda, "" if status == "ok" else f"for blockwise: {_INSTALL_CUDA}")
    from fp8_ds.attention.packages import CUDNN_REMEDY, older_cudnn

    if older := older_cudnn():
        yield Check("cuDNN", "warning", f"{older}: SDPA may leave cuDNN for a slower attention", CUDNN_REMEDY)
    else:
        yield Check("cuDNN", "ok", str(torch.backends.cudnn.version()))
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield Check("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Check("NCCL", "warning", "none in this torch (several GPUs)", _INSTALL_CUDA)


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        remedy = "run on an H100, H200 or another GPU of compute capability 8.9 or more; tests run on CPU"
        yield Check("GPU", "missing", "none that torch can use", remedy)
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        text = f"{properties.name}, {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        status: Status = "ok"
        remedy = ""
        if (properties.major, properties.minor) < (8, 9):
            status, remedy = "missing", "its tensor cores have no FP8: use compute capability 8.9 or more"
        elif not uses_cuda():
            status, remedy = "warning", f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']} leaves it unused: unset it"
        yield Check(f"GPU {number}", status, text, remedy)


def _deepspeed() -> Iterator[Check]:
    found = installed("deepspeed")
    if found is None:
        yield Check("deepspeed", "missing", "not installed", "pip install deepspeed")
        return
    from fp8_ds.engine.seam_check import check_seams
    from fp8_ds.engine.seams import TESTED_VERSIONS, rows

    is_tested = found.split("+")[0] in TESTED_VERSIONS
    tested = f"tested: {', '.join(TESTED_VERSIONS)}"
    remedy = "" if is_tested else f"pip install deepspeed=={TESTED_VERSIONS[-1]}, or run the tests of fp8_ds"
    yield Check("deepspeed", "ok" if is_tested else "warning", f"{found} ({tested})", remedy)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_seams()
        except SeamError as error:
            yield Check("seams", "missing", str(error), f"pip install deepspeed=={TESTED_VERSIONS[-1]}")
            return
    differing = [str(one.message) for one in said if "these bodies differ" in str(one.message)]
    if differing:
        yield Check("seams", "warning", differing[0], "run the tests of fp8_ds against this version: make test")
    else:
        yield Check("seams", "ok", f"all {len(rows())} symbols of DeepSpeed are as tested")


def _build_locks() -> Iterator[Check]:
    from fp8_ds.build_locks import abandoned, build_root

    for lock in abandoned(build_root()):
        text = "the lock of a build that no process of this machine runs: who wants that extension waits for ever"
        yield Check("extension build", "warning", text, f"if no other machine builds it: rm {lock}")


def _compilers() -> Iterator[Check]:
    for tool, use in (("ninja", "ops that DeepSpeed builds, FusedAdam with fp32 states"), ("nvcc", "the same")):
        if (found := shutil.which(tool)) is not None:
            yield Check(tool, "ok", found)
        elif tool == "ninja" or uses_cuda():
            remedy = "pip install ninja" if tool == "ninja" else 'install the CUDA toolkit, or use "torch_adam": true'
            yield Check(tool, "optional", f"not on PATH ({use})", remedy)


def _attention() -> Iterator[Check]:
    from fp8_ds.attention.packages import INSTALL_FA3, find_fa3

    try:
        found = find_fa3()
    except Fp8DsError as error:
        reason = str(error).split("got ", 1)[-1].split(f". {INSTALL_FA3}")[0]
        yield Check("FlashAttention-3", "optional", reason, INSTALL_FA3)
    else:
        fp8 = "FP8 forward: no" if found.lacks("FP8") else "FP8 forward: yes"
        yield Check("FlashAttention-3", "ok", f"{found.describe()}; {fp8}")


def _megatron() -> Iterator[Check]:
    """Of the wheel and of the clone that $MEGATRON_LM_PATH names, each where it is there."""
    found = next((value for name in ("megatron-core", "megatron_core") if (value := _version_of(name))), None)
    clone = os.environ.get(_CLONE)
    install = "pip install megatron-core==0.16.1"
    if found is None and not clone:
        yield Check("megatron-core", "optional", "not installed (megatron_patches)", install)
        return
    try:
        from megatron_patches.compat import TESTED_VERSIONS
    except ImportError as error:
        text = f"megatron_patches cannot be imported ({error})"
        yield Check("megatron-core", "warning", text, "pip install 'fp8-ds[megatron]'")
        return
    tested = f"tested: {', '.join(TESTED_VERSIONS)}"
    if found is not None:
        is_tested = found.split("+")[0] in TESTED_VERSIONS
        remedy = "" if is_tested else install
        yield Check("megatron-core", "ok" if is_tested else "warning", f"{found} ({tested})", remedy)
        yield _megatron_seams("seams of megatron-core", _survey(None), install)
    if clone:
        place = shlex.quote(clone)
        remedy = f"git -C {place} checkout core_v0.16.1"
        if not (Path(clone).expanduser() / "megatron/core").is_dir():
            remedy = f"git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM {place}"
        survey = _survey(clone)
        is_tested = survey["version"] in TESTED_VERSIONS
        text = f"{survey['version'] or 'no version'} in {clone}, ${_CLONE} ({tested})"
        yield Check("Megatron-LM", "ok" if is_tested else "warning", text, "" if is_tested else remedy)
        yield _megatron_seams("seams of Megatron-LM", survey, remedy)


def _megatron_seams(name: str, survey: dict[str, Any], remedy: str) -> Check:
    """A warning where they are missing: training under DeepSpeed does not need them."""
    if survey["error"]:
        return Check(name, "warning", survey["error"], remedy)
    if survey["differing"]:
        return Check(name, "warning", survey["differing"], "MEGATRON_LM_PATH=CLONE make test-slow")
    return Check(name, "ok", f"all {survey['num_symbols']} symbols of Megatron are as tested")


@cache
def _survey(clone: str | None) -> dict[str, Any]:
    """What megatron_patches/survey.py says, in a process of its own, once for each Megatron."""
    import megatron_patches

    root = Path(str(megatron_patches.__file__)).parents[1]  # not the working directory, which may be a clone
    command = [sys.executable, "-B", "-m", "megatron_patches.survey"]
    command += [] if clone is None else [str(Path(clone).expanduser().resolve())]
    nothing = {"version": "", "num_symbols": 0, "differing": ""}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SURVEY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return nothing | {"error": f"its import did not end in {_SURVEY_SECONDS} s"}
    except OSError as error:
        return nothing | {"error": f"its import could not be tried: {error}"}
    try:
        survey: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.splitlines() or [f"it ended with {done.returncode}"]
        return nothing | {"error": f"its import failed: {lines[-1]}"}
    return survey


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def autoload_check() -> Check:
    from fp8_ds.cli import autoload

    state = autoload.state(autoload.default_site_dir())
    if state == "on":
        return Check("autoload", "ok", "on: the JSON flag alone is enough in this environment")
    text = {
        "off": "off: a script must import fp8_ds, or be started through fp8_ds.run",
        "outdated": "of another version",
    }
    return Check("autoload", "optional", text[state], "fp8-ds autoload on")


# --- probes ---


def probes() -> list[Probe]:
    """Each recipe's forward product on the first GPU, or where DeepSpeed has none on the CPU; nothing without torch."""
    if installed("torch") is None:
        return []
    import torch

    from fp8_ds.scaling.granularity import OF_RECIPE

    device = torch.device("cuda", 0) if uses_cuda() else torch.device("cpu")
    return [_probe(recipe, device) for recipe in OF_RECIPE]


def _probe(name: str, device: torch.device) -> Probe:
    from fp8_ds.config import LinearConfig
    from fp8_ds.engine.refusals_device import capabilities, refuse_device
    from fp8_ds.nn.convert import apply_plan, make_plan
    from fp8_ds.nn.linear import read_weight
    from fp8_ds.testing import sqnr_db

    size = _PROBE_SIZE[device.type]
    products: list[Callable[[], Tensor]] = []
    try:
        refuse_device(name, "torch", *capabilities(device))
        generator = torch.Generator(device).manual_seed(0)
        x, weight = (
            torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in range(2)
        )
        for backend in ("torch", "reference"):
            config = LinearConfig.model_validate({"recipe": name, "backend": backend})
            model = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False, device="meta", dtype=x.dtype))
            model[0].weight = torch.nn.Parameter(weight)
            apply_plan(model, make_plan(model, config), config, device)
            recipe: Any = model[0].fp8_recipe
            x_fp8 = recipe.quantize_input(x, needs_columns=False, record=False)
            products.append(partial(recipe.output, x_fp8, read_weight(model[0].weight, recipe), x.dtype))
        db = sqnr_db(products[1](), products[0]())
        measured = Probe(name, is_exact=db == math.inf, sqnr_db=finite_or_none(db))
        if device.type != "cuda":
            return measured
        from triton.testing import do_bench

        fp8_ms, bf16_ms = (do_bench(one, return_mode="median") for one in (products[0], lambda: x @ weight.t()))
    except (Fp8DsError, RuntimeError) as error:
        return Probe(name, refused=str(error).splitlines()[0])
    flops = 2 * size**3
    return replace(measured, teraflops=flops / fp8_ms / 1e9, bf16_teraflops=flops / bf16_ms / 1e9)
