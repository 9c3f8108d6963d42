"""The command ``lcfl``.

It answers ``--help`` and ``--version`` without importing torch, and imports a command when it is run.
"""

import difflib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from lcfl import __version__
from lcfl.cli.error_lines import reported

__all__ = ["main"]

# The commands that do not use LightningCLI. Each module has a main(args).
NAMES = ("compare", "completion", "configs", "export", "fleet", "onboard", "partition", "predict", "sweep")
ALL_NAMES = ("fit", "validate", "test", *NAMES)
COMMANDS = {name: f"lcfl.cli.commands.{name}" for name in NAMES}
ASKS = (["-h"], ["--help"])  # what asks for help

SHOW_WARNING = warnings.showwarning  # another one is set by who records warnings

HELP = """usage: lcfl <command> [options]

Clustered and personalised federated learning on PyTorch Lightning and Fabric.

commands:
  fit         train a federation
  validate    evaluate a checkpoint on the clients' validation data
  test        evaluate a checkpoint on the clients' test data
  partition   show which client gets which data, without training
  sweep       run methods x options x seeds, tuned on validation data
  compare     compare finished runs in one table
  predict     predict the clients' test samples, or new ones
  export      write one trained model to a file
  onboard     add the clients that a finished run kept out
  fleet       train on machines that keep their own data
  configs     list or copy the configurations that come with lcfl
  completion  print a script that completes options in bash, zsh or fish

options of fit, validate and test:
  -c FILE               a YAML configuration; a later file overrides earlier ones
  --print_config        print the whole configuration and exit
  --ckpt_path PATH      the checkpoint to resume or evaluate: a path, last, or best;
                        auto starts a run or resumes it
  --trainer.rounds 50   any option of the groups trainer, method, model and data

lcfl <command> --help shows all options of a command, lcfl fit --help model.network all about one option,
and lcfl --version the version.
Set LCFL_DEBUG=1 in the environment to see the traceback of an error."""


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: the arguments, without the name of the program; None stands for those of this process.
    """
    words = sys.argv[1:] if args is None else args
    if words[:1] in ASKS and words[1:2] and words[1] in ALL_NAMES:  # lcfl --help fit
        words = [words[1], words[0], *words[2:]]
        if args is None:
            sys.argv[1:] = words
        else:
            args = words
    if words and not words[0].startswith("-") and words[0] not in ALL_NAMES:
        alike = difflib.get_close_matches(words[0], ALL_NAMES, 1)
        meant = f" Did you mean {alike[0]}?" if alike else ""
        sys.exit(f"lcfl: error: got the command {words[0]!r}; allowed are {', '.join(ALL_NAMES)}.{meant}")
    _run(words, args)


def _run(words: list[str], args: list[str] | None) -> None:
    """Runs a command.

    An error that the user can fix is reported in one line and ends with status 1, an error in the user's code in two.
    Ctrl-C outside of a round ends with status 130, SIGTERM with 143.
    """
    before, debug = warnings.showwarning, os.environ.get("LCFL_DEBUG")
    if not debug and before is SHOW_WARNING:  # not by formatwarning, which Lightning replaces when it is imported
        warnings.showwarning = _show_warning
    try:
        try:
            _answer(words, args)
        finally:
            sys.stdout.flush()  # here and not at exit, where a closed pipe could not be caught
    except BrokenPipeError:  # the reader, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt as interrupt:
        number = next(iter(interrupt.args), None)  # a text, if the user's code raised it
        sys.exit(128 + (number if isinstance(number, int) else signal.SIGINT))
    except Exception as error:
        if line := reported(error):
            sys.exit(line)
        raise
    finally:
        warnings.showwarning = before


def _answer(words: list[str], args: list[str] | None) -> None:
    if words[:1] in ([], *ASKS):
        print(HELP)
    elif words[0] == "--version":
        print(f"lcfl {__version__}")
    elif words[0] in COMMANDS:
        with _interrupted_by_sigterm():
            import_module(COMMANDS[words[0]]).main(words[1:])
    else:
        # args and not words, because LightningCLI warns if it is given arguments that the process has, too.
        import_module("lcfl.cli.federated_cli").main(args)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Has SIGTERM end what is done inside, if Python allows a handler: only the main thread may set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not one of Python's


def _interrupt(number: int, frame: object) -> None:
    """Ends a command in the same way as Ctrl-C; the status is that of the signal."""
    raise KeyboardInterrupt(number)


def _show_warning(message: Warning | str, *place: object, **more: object) -> None:
    """Prints a warning without the line of lcfl's code that issued it."""
    with suppress(OSError):  # as Python itself: a full disk behind 2>file loses the warning and not the run
        print(f"lcfl: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
