"""Start of the ranks, and one clean error if a rank fails."""

import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lcfl.core.validation import shortened
from lcfl.distributed.stop_flag import StopFlag, handlers_kept

__all__ = ["LostRankError", "gradients_on", "launch", "one_at_a_time", "one_thread"]

CONSEQUENCE = "\nThe above exception was the direct cause"  # the end of what `lcfl.__main__` reads
NOTE_CHARACTERS = 1200  # of a traceback that is too large for a pipe
PIPE_BYTES = 4 * 2**10  # a pipe holds sixteen times as much before its writer must wait for a reader
GRACE = 30.0  # seconds; more than a busy parent needs to see that a rank has ended
# Who reports how ranks are started and ended, and the lowest level of what is of interest.
REPORTERS = {
    "lightning.fabric": logging.WARNING,
    "lightning.pytorch": logging.WARNING,
    "torch.multiprocessing.spawn": logging.ERROR,
}


class LostRankError(RuntimeError, ConnectionError):
    """Raised if a rank ended without an exception of its own, or if it can no longer be reached."""


_TURN = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Makes the threads of a process wait for one another, because they share torch's generators and its settings."""
    with _TURN:
        yield


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
def gradients_on() -> Iterator[None]:
    """Switches gradients on, in case the caller has switched them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


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

    Raises:
        ValueError: if spawned ranks cannot get the function or its arguments.
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
        # Ranks that were started elsewhere first have to meet, and then `Session` installs their flags. Until then, one
        # of them may wait for another that has failed, in a call that no Python handler interrupts. The signal that is
        # sent then must end it.
        if launcher is None or start_method is not None:
            flag.install()
        if start_method == "fork":  # otherwise the first full collection in a rank would copy all memory that it shares
            gc.freeze()
        try:
            return fabric.launch(guarded, *args)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _cause(error, errors, flag) from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if start_method != "spawn":
                raise
            # No rank has started: what one raises comes as one of the exceptions above.
            raise ValueError(
                f"trainer.strategy: got ddp_spawn, whose processes import everything that they use ({error}). In place "
                "of a lambda or a function in a function, give a class or a functools.partial of one, or set "
                "trainer.strategy to ddp_fork or trainer.devices to 1."
            ) from error
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
            frames = "".join(traceback.format_tb(error.__traceback__))[-PIPE_BYTES // 2 :].rstrip()
            # The notes that were there come last, because they name the place in a client's work.
            error.__notes__ = [frames, *getattr(error, "__notes__", [])]
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
    frames, *others = getattr(error, "__notes__", None) or [""]
    parts = [note.partition(CONSEQUENCE) for note in (frames, *others[-1:])]
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
    lines = str(error).strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]  # CUDA adds lines of advice
    how = [lines[-1], *raised][-1]  # without an exception, the last line names the signal or the status
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
