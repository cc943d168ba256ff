"""RankPool: processes that stay up and run test functions as the ranks of one gloo group.

A start with torch and deepspeed costs 5 to 20 seconds: on CPU one process imports them for all pools and forks the
ranks. Functions are named by file and qualified name, so that a test module need not be importable; results and
arguments are pickled.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8_ds.host import free_port
from support import HANG

IMPORTED_ONCE = [
    *("torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon", "fp8_ds.engine.engine"),
    *("transformers.models.llama.modeling_llama", "transformers.models.llama.configuration_llama"),
    "support.seams_read",
]
"""Modules that the process has from which ranks are forked; what is not installed is passed over."""


class RankError(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a test whose body runs on every rank of a pool, with the fixture `ranks`.

    Its arguments are the test's parameters; `folder` is `tmp_path` as a string.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        names = [name for name in parameters if name != "folder"]

        def test(ranks: Callable[[int], RankPool], tmp_path: Path, **arguments: Any) -> None:
            if "folder" in parameters:
                arguments["folder"] = str(tmp_path)
            ranks(world_size).run(body, **arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter(name, kind) for name in ("ranks", "tmp_path", *names)]
        made: Any = test
        made.__signature__ = inspect.Signature(arguments)
        made.__name__, made.__module__, made.__doc__, made.body = body.__name__, body.__module__, body.__doc__, body
        body.__qualname__ = made.__qualname__ = body.__name__
        body.__qualname__ += ".body"  # by which ranks find it
        return test

    return decorate


def _load(path: str) -> ModuleType:
    name = f"_ranks_{abs(hash(path))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(Path(path).parent))
        spec.loader.exec_module(module)
    return sys.modules[name]


def _rank_main(
    rank: int, world_size: int, port: int, pipe: Connection, log_path: str, group_timeout: float | None
) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    if os.environ["DS_ACCELERATOR"] == "cuda":
        torch.cuda.set_device(rank)
    import deepspeed

    # Training never calls it, and g++ compiles it for a minute where no run did before.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    options = {} if group_timeout is None else {"timeout": timedelta(seconds=group_timeout)}
    deepspeed.init_distributed(verbose=False, **options)
    linear = torch.nn.functional.linear
    num_registered = _references_of_a_registered_group()
    while True:
        # DeepSpeed's stage 3 replaces it for good by one that rounds before it adds the bias.
        torch.nn.functional.linear = linear
        deepspeed.utils.groups.mpu = None  # of an engine before, and every engine after it would take it for its own
        # Every engine built or destroyed collects garbage: do not scan what is there for good, 1.5 million objects of
        # torch's compiler and what DeepSpeed keeps of each engine.
        gc.collect()
        gc.freeze()
        request = pipe.recv_bytes()
        if not request:
            break
        # Not before: another rank may still be connecting a group that this one has already.
        _destroy_groups(num_registered)
        pipe.send_bytes(_answer(request))


def _references_of_a_registered_group() -> int:
    """References to a process group where torch has it and nobody else. Collective."""
    import torch.distributed as dist

    if dist.get_backend() != "gloo":
        return 0
    dist.new_group()
    *_, group = dist.distributed_c10d._world.pg_map
    return sys.getrefcount(group)


def _destroy_groups(num_registered: int) -> None:
    """End gloo's groups that engines of earlier calls have left: torch keeps each, with three threads, and those of
    some hundred take more of a core than the tests do. What keeps a group must keep the object, not its name alone."""
    import torch.distributed as dist

    if dist.get_backend() != "gloo":
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        # One more than there: the list.
        if group is not dist.group.WORLD and sys.getrefcount(group) <= num_registered + 1:
            dist.destroy_process_group(group)


def _answer(request: bytes) -> bytes:
    """(True, result) or (False, traceback), pickled."""
    import torch

    path, qualname, args, kwargs = pickle.loads(request)
    torch.manual_seed(0)  # what is drawn without a seed does not depend on earlier calls
    try:
        function: Any = _load(path)
        for part in qualname.split("."):
            function = getattr(function, part)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:  # the parent re-raises it
        return pickle.dumps((False, traceback.format_exc()))


def _nothing() -> None:
    pass


class RankPool:
    """`world_size` processes in one gloo group (or NCCL, if DS_ACCELERATOR says cuda).

    Args:
        world_size: number of ranks.
        timeout: seconds that one call may take; then all ranks are killed and the next call starts new ones.
        grace: seconds that the others have to answer once a rank has failed.
        group_timeout: seconds, of the process group; None: DeepSpeed's default.
    """

    def __init__(
        self, world_size: int, timeout: float = HANG, grace: float = 10.0, group_timeout: float | None = None
    ) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.grace = grace
        self.group_timeout = group_timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        descriptor, self._log_path = tempfile.mkstemp(prefix=f"ranks{world_size}-", suffix=".log")
        os.close(descriptor)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; returns the results by rank.

        Raises:
            RankError: a rank raised or died, or the call took longer than the time-out.
        """
        try:
            return self._run(function, args, kwargs)
        except RankError:
            raise
        except BaseException:  # a test's own time-out: what ranks still answer is no answer to the next call
            self.close()
            raise

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not self._processes:
            self._start()
        path = str(Path(sys.modules[function.__module__].__file__ or "").resolve())
        request = pickle.dumps((path, function.__qualname__, args, kwargs))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(request)
        except OSError as error:
            self.close()
            raise RankError(f"a rank had died since the last call; its log is {self._log_path}") from error
        has_died = False
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.world_size and (left := deadline - time.monotonic()) > 0:
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], left)
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = (False, f"rank {rank} died; its log is {self._log_path}")
                    has_died = True
            if not all(ok for ok, _ in answers.values()):
                # Peers may hang in a collective: give them a moment, then start anew.
                deadline = min(deadline, time.monotonic() + self.grace)
        missing = sorted(set(range(self.world_size)) - set(answers))
        errors = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in sorted(answers.items()) if not ok]
        if missing:
            self.close()
            errors.append(f"ranks {missing} did not answer within {self.timeout} s and were killed")
        elif has_died or any(not process.is_alive() for process in self._processes):
            self.close()
        if errors:
            raise RankError("\n".join(errors))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _start(self) -> None:
        # CUDA does not survive a fork; gloo starts its threads after it.
        on_cuda = os.environ.setdefault("DS_ACCELERATOR", "cpu") == "cuda"
        context: Any = multiprocessing.get_context("spawn" if on_cuda else "forkserver")
        if not on_cuda:
            context.set_forkserver_preload(IMPORTED_ONCE)
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, port, theirs, self._log_path, self.group_timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def num_threads(self) -> int:
        """Most threads that one of the ranks has; 0 where none runs, or where the system has no /proc."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        return max((len(os.listdir(folder)) for folder in folders if folder.exists()), default=0)

    def settle(self) -> None:
        """Wait until the ranks have cleaned up after the last call, which they do before the next one."""
        if self._processes:
            self.run(_nothing)

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
