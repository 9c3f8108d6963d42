"""Start of the ranks: their number, how they are started, one clean error, and signals that become a flag."""

import ctypes
import faulthandler
import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lcfl.core.validation import shortened

__all__ = [
    "STRATEGIES",
    "LostRankError",
    "Placement",
    "StopFlag",
    "device_type",
    "handlers_kept",
    "launch",
    "one_thread",
    "resolve_placement",
    "usable_cores",
]

STRATEGIES = ("auto", "ddp", "ddp_fork", "ddp_spawn")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONSEQUENCE = "\nThe above exception was the direct cause"  # the end of what `lcfl.__main__` reads
NOTE_CHARACTERS = 1200  # of a traceback that is too large for a pipe
MOST_RANKS = 1024
PIPE_BYTES = 4 * 2**10  # a pipe holds sixteen times as much before its writer must wait for a reader
NOTE_BYTES = 128  # of the task that a rank works on, in memory that the parent sees
GRACE = 2.0  # seconds; more than a busy parent needs to see that a rank has ended
# Who reports how ranks are started and ended, and the lowest level of what is of interest.
REPORTERS = {
    "lightning.fabric": logging.WARNING,
    "lightning.pytorch": logging.WARNING,
    "torch.multiprocessing.spawn": logging.ERROR,
}
LOST = -1  # a rank has failed, so ranks that wait for it need not finish the round


class LostRankError(RuntimeError, ConnectionError):
    """Raised if a rank ended without an exception of its own, or if it can no longer be reached."""


@dataclass(frozen=True)
class Placement:
    """What Fabric is configured with: ranks per machine, machines, and how the ranks are started."""

    devices: int | list[int]
    num_nodes: int
    strategy: str


def device_type(accelerator: str) -> Literal["cpu", "cuda"]:
    """Returns the type of the device: for ``auto``, CUDA if there is a GPU. Fabric may choose another type."""
    is_cuda = torch.cuda.is_available() if accelerator == "auto" else accelerator in ("cuda", "gpu")
    return "cuda" if is_cuda else "cpu"


def usable_cores() -> int:
    """Returns the number of cores that this process may use: its affinity, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, math.floor(int(limit) / int(period))))
    return cores


def resolve_placement(
    accelerator: str, devices: int | list[int] | str, num_nodes: int, strategy: str, most: int
) -> Placement:
    """Resolves ``auto``: to the ranks in the environment under torchrun or SLURM, else to one rank per core or GPU.

    Args:
        accelerator: ``cpu`` or ``cuda``, already resolved.
        devices: a number, a list of GPUs or ``auto``.
        num_nodes: number of machines.
        strategy: one of `STRATEGIES`.
        most: the largest number of ranks that ``auto`` starts: clients per round.

    Raises:
        ValueError: if the settings and the environment disagree.
    """
    started = _started_ranks()
    if started is not None:
        local, nodes = started
        # num_nodes has no "auto", so its default of 1 stands for it.
        for name, got, actual, free in (("devices", devices, local, "auto"), ("num_nodes", num_nodes, nodes, 1)):
            if got not in (free, actual):
                raise ValueError(f"trainer.{name}: got {got}, but this job was started with {actual}: use auto.")
        if strategy not in ("auto", "ddp"):
            raise ValueError(f"trainer.strategy: got {strategy}, but the ranks are already started: use auto or ddp.")
        return Placement(local, nodes, "ddp" if local * nodes > 1 else "auto")
    if num_nodes > 1:
        raise ValueError(
            f"trainer.num_nodes: got {num_nodes}, but nothing has started the ranks of other machines: start the same "
            "command on every machine with torchrun, or let SLURM do it, and leave num_nodes as it is."
        )
    if devices == "auto":
        can_fork = sys.platform == "linux" or strategy in ("ddp", "ddp_spawn")
        available = usable_cores() if accelerator == "cpu" else torch.cuda.device_count()
        devices = max(1, min(available, most)) if can_fork else 1
    if accelerator == "cpu" and isinstance(devices, list):
        raise ValueError(
            f"trainer.devices: got {devices} on a CPU; a list names GPUs. Give the number of processes, or auto."
        )
    if isinstance(devices, str):
        raise ValueError(f"trainer.devices: got {devices!r}; allowed are a number, a list of GPUs or auto.")
    num_ranks = (devices if isinstance(devices, int) else len(devices)) * num_nodes
    if num_ranks < 1:
        raise ValueError(f"trainer: got devices={devices}, num_nodes={num_nodes}; at least one of each is needed.")
    if num_ranks > MOST_RANKS:
        raise ValueError(f"trainer.devices: got {devices}; at most {MOST_RANKS} processes can be started on a machine.")
    if accelerator == "cpu" and num_ranks > usable_cores():
        warnings.warn(
            f"trainer.devices: got {devices}, but only {usable_cores()} cores can be used; more processes than cores "
            "are slower. Leave devices at auto.",
            stacklevel=2,
        )
    if num_ranks == 1:
        return Placement(devices, 1, "auto")
    return Placement(devices, 1, "ddp_fork" if strategy == "auto" else strategy)


def _started_ranks() -> tuple[int, int] | None:
    """Returns ranks per machine and machines if torchrun or SLURM has started this process, else None."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        return int(environ["LOCAL_WORLD_SIZE"]), int(environ["GROUP_WORLD_SIZE"])
    if (
        "SLURM_NTASKS" in environ
        and "SLURM_PROCID" in environ
        and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        nodes = int(environ.get("SLURM_NNODES", "1"))
        return int(environ["SLURM_NTASKS"]) // nodes, nodes
    return None


class StopFlag:
    """A signal handler. The first SIGINT or SIGTERM requests a stop after the round, a second one ends everything.

    The flag is made before the ranks are forked, so that they share its number. Forked and spawned ranks leave signals
    to the parent.

    It also holds, in memory that the ranks share, what every rank works on.

    Args:
        num_ranks: the number of ranks that this process starts.
    """

    def __init__(self, num_ranks: int = 0) -> None:
        self._shared = torch.zeros(1, dtype=torch.int32).share_memory_()
        self._notes = torch.zeros(num_ranks, NOTE_BYTES, dtype=torch.uint8).share_memory_()
        self._owner = os.getpid()
        self._asked = False
        self._outer: StopFlag | None = None  # that of a caller, which must hear of a signal as well

    @property
    def signal(self) -> int:
        """The number of the signal received, 0 for none."""
        return max(0, int(self._shared))

    def mark_lost(self) -> None:
        """Notes that a rank has failed."""
        self._shared.fill_(LOST)

    def note(self, rank: int, task: str) -> None:
        """Notes what a rank works on; an empty text for nothing."""
        if len(self._notes):
            text = task.encode()[:NOTE_BYTES].ljust(NOTE_BYTES)
            self._notes[rank] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def noted(self, rank: int) -> str:
        """Returns what a rank worked on when it ended."""
        return bytes(self._notes[rank].tolist()).rstrip(b" \0").decode(errors="ignore")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if os.getpid() != self._owner:
            if int(self._shared) == LOST:  # torch ends the siblings of a failed rank with SIGTERM
                os._exit(128 + number)
            self._shared.fill_(number)
        elif self._asked:
            for child in multiprocessing.active_children():
                child.kill()
            raise KeyboardInterrupt
        else:
            self._asked = True
            self._shared.fill_(number)
            if self._outer is not None and not self._outer._asked:
                self._outer(number, frame)

    def install(self) -> None:
        """Installs the flag as the handler of the two signals, in the process that made it.

        Python allows no handlers outside the main thread. There, none is set.
        """
        if os.getpid() == self._owner and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.signal(number, self)
                if isinstance(before, StopFlag) and before is not self:
                    self._outer = before


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM when the block ends."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because ranks are the only parallelism and thread counts change bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what Lightning and torch report about starting and ending ranks, unless ``LCFL_DEBUG`` is set."""
    loggers = (
        {} if os.environ.get("LCFL_DEBUG") else {logging.getLogger(name): level for name, level in REPORTERS.items()}
    )
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def launch(fabric: Fabric, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(fabric, flag, *args)`` on every rank and returns what rank 0 returned.

    Under fork and spawn the return value must be small and plain. The first exception of any rank is raised here, not
    the exceptions that follow from it. Its notes contain the rank and the traceback on that rank.
    """
    launcher = fabric.strategy.launcher
    start_method = getattr(launcher, "_start_method", None)
    flag = StopFlag(0 if start_method is None else fabric.world_size)
    # A queue only works with processes of the same start method. If no processes are started here, it is not needed,
    # and its semaphores would outlive a rank that is killed.
    errors = None if start_method is None else multiprocessing.get_context(start_method).SimpleQueue()
    guarded = _Guarded(function, flag, errors, os.getpid())
    environ = dict(os.environ)
    with handlers_kept(), one_thread(), quiet():
        # Ranks that were started elsewhere first have to meet (`Ranks`). Until then, one of them may wait for another
        # that has failed, in a call that no Python handler interrupts. The signal that is sent then must end it.
        if launcher is None or start_method is not None:
            flag.install()
        if start_method == "fork":  # otherwise the first full collection in a rank would copy all memory that it shares
            gc.freeze()
        try:
            return fabric.launch(guarded, *args)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _cause(error, errors, flag) from None
        finally:
            gc.unfreeze()
            # Lightning leaves the address of the ranks behind, and a second launch would try to use it again.
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in environ:
                    os.environ.pop(name, None)


class _Guarded:
    """Runs `function` on one rank: with one thread, until its parent dies. Reports its exception before it ends."""

    def __init__(self, function: Callable[..., Any], flag: StopFlag, errors: Any, parent: int) -> None:
        self.function, self.flag, self.errors, self.parent = function, flag, errors, parent

    def __call__(self, fabric: Fabric, *args: Any) -> Any:
        is_child = os.getpid() != self.parent and multiprocessing.parent_process() is not None
        if is_child:
            _die_with(self.parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent's flag is enough
        torch.set_num_threads(1)
        if not faulthandler.is_enabled():
            with suppress(OSError, ValueError):  # standard error may have no file, as in a notebook
                faulthandler.enable(all_threads=False)  # shows the line of user code that crashes the process
        try:
            return self.function(fabric, self.flag, *args)
        except BaseException as error:
            if not is_child:
                raise
            error.add_note("".join(traceback.format_tb(error.__traceback__))[-PIPE_BYTES // 2 :].rstrip())
            if self.errors.empty():  # only the first is raised, and the parent reads after all have ended
                self.errors.put((fabric.global_rank, _portable(error)))
            is_being_ended = self.flag.signal > 0
            self.flag.mark_lost()
            if _is_consequence(error) and not is_being_ended:
                time.sleep(GRACE)  # so that the parent first sees the rank that was lost, and then ends this one
            sys.exit(1)  # for an exception torch would leave a file behind


def _portable(error: BaseException) -> BaseException:
    """Returns the exception if pickling does not change it and it is small enough for a pipe.

    Otherwise returns the most similar one: of its type, a base class or RuntimeError, with its text, shortened.
    """
    if _survives(error, str(error)):
        return error
    said = shortened(str(error))
    # The last frames before what lcfl raised for the exception name the place in the user's code.
    parts = [note.partition(CONSEQUENCE) for note in getattr(error, "__notes__", [])[-2:]]
    notes = [before[-NOTE_CHARACTERS:] + mark for before, mark, _ in parts]
    for kind in type(error).__mro__:
        text = said if kind is type(error) else f"{type(error).__name__}: {said}"
        with suppress(Exception):  # of any kind, because the constructor may want other arguments
            similar: BaseException = (RuntimeError if kind in (Exception, BaseException) else kind)(text)
            similar.__notes__ = notes
            if _survives(similar, text):
                return similar
    return RuntimeError(f"{type(error).__name__}: {said}")


def _survives(error: BaseException, text: str) -> bool:
    """Returns whether the exception says `text` after pickling, and is small enough for a pipe."""
    try:
        pickled = pickle.dumps(error)
        return len(pickled) <= PIPE_BYTES and str(pickle.loads(pickled)) == text
    except Exception:
        return False


def _cause(error: Exception, errors: Any, flag: StopFlag) -> BaseException:
    """Returns the first exception, or a LostRankError if a rank ended without reporting one."""
    rank, first = (None, None) if errors.empty() else errors.get()
    if first is None or _is_consequence(first):
        return LostRankError(
            f"a rank was lost: {_end_of(error, flag)}. The run can be resumed from its last checkpoint."
        )
    assert isinstance(first, BaseException)
    first.add_note(f"(raised on rank {rank})")
    return first


def _is_consequence(error: BaseException) -> bool:
    """Returns whether an exception says that another rank was lost."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return is_of_gloo or isinstance(error, LostRankError)


def _end_of(error: Exception, flag: StopFlag) -> str:
    """Returns how a rank ended that reported no exception, and what it worked on."""
    how = str(error).strip().splitlines()[-1]  # ends with the signal or the status
    if not isinstance(error, ProcessExitedException):
        return how
    task = flag.noted(error.error_index)
    how = f"rank {error.error_index} ended with {error.signal_name or f'status {error.exit_code}'}"
    how += " (out of memory, or killed)" * (error.signal_name == "SIGKILL")
    return f"{how} during {task}" if task else how


def _die_with(parent: int) -> None:
    """Makes Linux kill this process when `parent` dies, so that it does not continue as an orphan."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
