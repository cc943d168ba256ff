"""Diagnosis of this machine for FP8: what it has, what is missing and what installs it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8_ds import run
from fp8_ds.errors import Fp8DsError, SeamError
from fp8_ds.host import uses_cuda

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TESTED_TORCH = ("2.11", "2.13", "2.14")
"""Versions that the suite has run with: on GPUs, in CI, and once on a CPU (docs/versions.md)."""
_TORCH_OF_CI = "2.13"
_INSTALL_TORCH = f"pip install 'torch=={_TORCH_OF_CI}.*'"
_INSTALL_CUDA = f"pip install --force-reinstall 'torch=={_TORCH_OF_CI}.*' (the wheel for Linux is a CUDA build)"
_CLONE = "MEGATRON_LM_PATH"
_PROBE_SIZE = {"cuda": 4096, "cpu": 128}
_LEAST_DB = 45.0
"""SQNR in dB that a product reaches where only the order of its sums is another than the reference's."""

Status = Literal["ok", "warning", "missing", "optional"]
"""missing: FP8 training needs it. optional: it is not there, and something less common needs it."""


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis: name, status, what was found, and what to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


_PACKAGES = (
    ("transformer_engine", "Megatron-LM's FP8 linears", "pip install 'transformer-engine[pytorch]'"),
    ("liger_kernel", "Liger's loss", "pip install liger-kernel"),
    ("transformers", "Hugging Face Trainer, `plan` and `estimate`", "pip install transformers accelerate"),
    ("accelerate", "Hugging Face Trainer and Accelerate", "pip install accelerate"),
    ("peft", "LoRA on frozen FP8 weights", "pip install --no-deps peft"),
)
"""(name, what needs it, what installs it)"""


def checks() -> list[Check]:
    """Run all checks of `fp8-ds doctor` but the probes; nothing is raised."""
    python = Check("python", "ok", sys.version.split()[0])
    if installed("torch") is None:
        text = "not installed, and without it nothing else is known"
        return [python, Check("torch", "missing", text, _INSTALL_TORCH)]
    triton = ("triton", "the kernels of this package on a GPU run by it", "pip install triton")
    found = [python, *_torch(), *_gpu(), *_deepspeed(), _package(*triton, "missing" if uses_cuda() else "optional")]
    return [*found, *_builds(), _flash_attention_3(), *starmap(_package, _PACKAGES), _megatron(), autoload_check()]


def installed(package: str) -> str | None:
    """Return the package's version; None if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    return _version_of(package.replace("_", "-")) or "of unknown version"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package(name: str, use: str, remedy: str, otherwise: Status = "optional") -> Check:
    found = installed(name)
    return Check(name, "ok", found) if found else Check(name, otherwise, f"not installed ({use})", remedy)


def _tested(name: str, found: str, tested: tuple[str, ...], remedy: str) -> Check:
    """Return the check of `found`, which begins with a version: ok if one of `tested` is that, or begins it."""
    is_tested = any(f"{found.split('+')[0].split()[0]}.".startswith(f"{one}.") for one in tested)
    text = f"{found} (tested: {', '.join(tested)})"
    return Check(name, "ok", text) if is_tested else Check(name, "warning", text, remedy)


def _torch() -> Iterator[Check]:
    import torch

    yield _tested("torch", torch.__version__, TESTED_TORCH, f"{_INSTALL_TORCH}, or run the tests of fp8_ds: make test")
    if torch.version.cuda is None:
        yield Check("CUDA", "missing", "this torch is a CPU build", _INSTALL_CUDA)
        return
    is_new = tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
    remedy = "" if is_new else f"for blockwise: {_INSTALL_CUDA}"
    yield Check("CUDA", "ok" if is_new else "warning", torch.version.cuda, remedy)
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
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(number)
        status: Status = "ok" if uses_cuda() else "warning"
        remedy = "" if uses_cuda() else f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']} leaves it unused: unset it"
        if (gpu.major, gpu.minor) < (8, 9):
            status, remedy = "missing", "its tensor cores have no FP8: use compute capability 8.9 or more"
        text = f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        yield Check(f"GPU {number}", status, text, remedy)


def _deepspeed() -> Iterator[Check]:
    if (found := installed("deepspeed")) is None:
        yield Check("deepspeed", "missing", "not installed", "pip install deepspeed")
        return
    from fp8_ds.engine.seam_check import check_seams
    from fp8_ds.engine.seams import TESTED_VERSIONS, rows

    install = f"pip install deepspeed=={TESTED_VERSIONS[-1]}"
    yield _tested("deepspeed", found, TESTED_VERSIONS, f"{install}, or run the tests of fp8_ds")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            check_seams()
        except SeamError as error:
            yield Check("seams", "missing", str(error), install)
            return
    differing = next((str(one.message) for one in said if "these bodies differ" in str(one.message)), "")
    if differing:
        yield Check("seams", "warning", differing, "run the tests of fp8_ds on this version: make test")
    else:
        yield Check("seams", "ok", f"all {len(rows())} symbols of DeepSpeed are as tested")


def _builds() -> Iterator[Check]:
    """Yield the tools that DeepSpeed builds its own kernels with, and the locks of builds that were killed."""
    for tool, use in (("ninja", "ops that DeepSpeed builds, FusedAdam with fp32 states"), ("nvcc", "the same")):
        if (found := shutil.which(tool)) is not None:
            yield Check(tool, "ok", found)
        elif tool == "ninja" or uses_cuda():
            remedy = "pip install ninja" if tool == "ninja" else 'install the CUDA toolkit, or use "torch_adam": true'
            yield Check(tool, "optional", f"not on PATH ({use})", remedy)
    for lock in abandoned(build_root()):
        text = "the lock of a build that no process of this machine runs: who wants that extension waits for ever"
        yield Check("extension build", "warning", text, f"if no other machine builds it: rm {lock}")


def _flash_attention_3() -> Check:
    from fp8_ds.attention.packages import INSTALL_FA3, find_fa3

    try:
        found = find_fa3()
    except Fp8DsError as error:
        reason = str(error).split("got ", 1)[-1].split(f". {INSTALL_FA3}")[0]
        return Check("FlashAttention-3", "optional", reason, INSTALL_FA3)
    fp8 = "no" if found.lacks("FP8") else "yes"
    return Check("FlashAttention-3", "ok", f"{found.describe()}; FP8 forward: {fp8}")


def _megatron() -> Check:
    """Check the clone that $MEGATRON_LM_PATH names, else the wheel; symbols are checked when they are patched."""
    from megatron_patches.compat import TESTED_VERSIONS, version_of_clone

    clone = os.environ.get(_CLONE)
    if not clone:
        name, remedy, wheel = "megatron-core", "pip install megatron-core==0.16.1", _version_of("megatron-core")
        if wheel is None:
            return Check(name, "optional", "not installed (megatron_patches)", remedy)
        return _tested(name, wheel, TESTED_VERSIONS, remedy)
    name, path, place = "Megatron-LM", Path(clone).expanduser(), shlex.quote(clone)
    remedy = f"git -C {place} checkout core_v0.16.1"
    if not (path / "megatron").is_dir():
        remedy = f"git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM {place}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a version that is not tested, which the check says
            found = version_of_clone(path)
    except SeamError as error:
        return Check(name, "warning", str(error), remedy)
    return _tested(name, f"{found} in {clone}, ${_CLONE}", TESTED_VERSIONS, remedy)


def autoload_check() -> Check:
    state = run.autoload_state(run.default_site_dir())
    if state == "on":
        return Check("autoload", "ok", "on: the JSON flag alone is enough in this environment")
    off = "off: a script must import fp8_ds, or be started through fp8_ds.run"
    return Check("autoload", "optional", off if state == "off" else "of another version", "fp8-ds autoload on")


def build_root() -> Path:
    """Return the folder where torch builds extensions: $TORCH_EXTENSIONS_DIR, else one in the user's cache."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def abandoned(root: Path) -> list[Path]:
    """Return locks of torch's extension builder below `root` that no process of this machine has open.

    A builder keeps its lock open until it is done. One that was killed leaves it, and the next process that wants that
    extension waits for ever and says nothing (torch 2.11 and 2.13, utils/file_baton.py). On a CPU DeepSpeed builds one
    before its first collective.

    The list is empty where /proc does not tell (other systems than Linux). Processes of other users and of other
    machines that share the folder are not seen.
    """
    locks = {str(lock.resolve()): lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)}
    if not locks or not (Path("/proc") / "self" / "fd").is_dir():
        return []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            locks.pop(os.readlink(descriptor), None)
        except OSError:  # closed, ended or somebody else's
            continue
    return sorted(locks.values())


def probes() -> list[Check]:
    """Check each recipe's forward product on the first GPU, or on the CPU if DeepSpeed has none; [] without torch."""
    if installed("torch") is None:
        return []
    import torch

    from fp8_ds.nn.linear.payload import OF_RECIPE

    device = torch.device("cuda", 0) if uses_cuda() else torch.device("cpu")
    return [_probe(recipe, device) for recipe in OF_RECIPE]


def _probe(recipe: str, device: torch.device) -> Check:
    """Check a product against the plain reference; time it on a GPU, for a CPU's speed says nothing."""
    import torch
    from torch.utils.benchmark import Timer

    from fp8_ds.engine.compat.model import capabilities, refuse_device
    from fp8_ds.testing import sqnr_db

    name, size = f"product, {recipe}", _PROBE_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    options: Any = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    x, weight = (torch.randn(size, size, **options) for _ in range(2))
    try:
        refuse_device(recipe, "torch", *capabilities(device))
        fast, reference = (_product(recipe, backend, x, weight) for backend in ("torch", "reference"))
        found, expected = fast(), reference()
        db = sqnr_db(expected, found)
        text = "the bits of the reference" if torch.equal(found, expected) else f"SQNR {db:.1f} dB to the reference"
        if device.type == "cuda":
            timers = (Timer("call()", globals={"call": call}) for call in (fast, lambda: x @ weight.t()))
            fp8, bf16 = (2 * size**3 / timer.blocked_autorange(min_run_time=0.1).median / 1e12 for timer in timers)
            text += f"; {fp8:.0f} TFLOP/s, bf16 {bf16:.0f}"
    except (Fp8DsError, RuntimeError) as error:
        return Check(name, "optional", str(error).splitlines()[0])
    is_right = db > _LEAST_DB  # of NaN it is False
    return Check(name, "ok" if is_right else "warning", text, "" if is_right else "report it: products are wrong here")


def _product(recipe: str, backend: str, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return the forward GEMM of a linear with this weight, its operands quantised once."""
    from torch import nn

    from fp8_ds.config import LinearConfig
    from fp8_ds.nn.linear.fp8_linear import read_weight
    from fp8_ds.nn.plan.convert import apply_plan
    from fp8_ds.nn.plan.plan import make_plan

    linear = LinearConfig.model_validate({"recipe": recipe, "backend": backend})
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
    model[0].weight = nn.Parameter(weight)
    apply_plan(model, make_plan(model, linear), linear, x.device)
    found: Any = model[0].fp8_recipe
    x_fp8 = found.quantize_input(x, needs_columns=False, record=False)
    return partial(found.output, x_fp8, read_weight(model[0].weight, found), x.dtype)
