"""The command ``lcfl``: help and version at once, everything else through LightningCLI."""

import os
import re
import signal
import sys
import sysconfig
import traceback
import warnings
from importlib import import_module
from pathlib import Path

from lcfl import __version__

__all__ = ["main"]

# The commands that are no LightningCLI: each module has a main(args).
NAMES = ("compare", "configs", "export", "onboard", "partition", "predict", "sweep")
COMMANDS = {name: f"lcfl.cli.commands.{name}" for name in NAMES}

HELP = """usage: lcfl <command> [options]

Clustered and personalised federated learning on PyTorch Lightning and Fabric.

commands:
  fit         train a federation
  validate    evaluate a checkpoint on the clients' validation data
  test        evaluate a checkpoint on the clients' test data
  partition   who would hold what, before any training
  sweep       methods x options x seeds, tuned on validation data
  compare     finished runs side by side
  predict     labels of the clients' test images by their models
  export      one trained model as a file
  onboard     clients that were kept out join a finished run
  configs     the configurations that come with lcfl

options of fit, validate and test:
  -c FILE               a YAML configuration; several files layer, later ones win
  --print_config        print the whole configuration and leave
  --ckpt_path PATH      resume or evaluate: a checkpoint, last, or best
  --trainer.rounds 50   any option of the groups trainer, method, model and data

lcfl <command> --help shows all options of a command; lcfl --version the version.
LCFL_DEBUG=1 in the environment shows where an error came from."""


def main(args: list[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: as on the command line, without the program's name; those of this process if None.
    """
    words = sys.argv[1:] if args is None else args
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
    elif words[0] == "--version":
        print(f"lcfl {__version__}")
    else:
        _run(words, args)


def _run(words: list[str], args: list[str] | None) -> None:
    """What a user can mend is one line and status 1; Ctrl-C outside of a round ends with status 130."""
    debug = bool(os.environ.get("LCFL_DEBUG"))
    before = warnings.formatwarning
    if not debug:
        warnings.formatwarning = lambda message, *_: f"lcfl: warning: {message}\n"
    try:
        if words[0] in COMMANDS:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended like by Ctrl-C: in order
            import_module(COMMANDS[words[0]]).main(words[1:])
        else:
            # LightningCLI warns of arguments that are also those of this process.
            import_module("lcfl.cli.federated_cli").main(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except _mendable() as error:
        if debug:
            raise
        sys.exit(f"lcfl: error: {error}{_origin(error)}")
    finally:
        warnings.formatwarning = before


def _mendable() -> tuple[type[Exception], ...]:
    """What a user did; Lightning's own kind only where Lightning is loaded: not every command needs it."""
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    own = (lightning.MisconfigurationException,) if lightning else ()
    return (ValueError, OSError, ModuleNotFoundError, *own)


def _origin(error: Exception) -> str:
    """A further line that says where in a user's own code an error comes from; empty where it does not.

    What a library says to lcfl is to be understood alone, as is what lcfl says itself.
    """
    ours = Path(__file__).parent
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    text = "".join(traceback.format_exception(error))  # with its notes, where an error of another rank has its frames
    for path, line in reversed(re.findall(r'File "(.+)", line (\d+)', text)):
        if Path(path).is_relative_to(ours):
            return ""
        if not path.startswith("<") and not any(Path(path).is_relative_to(library) for library in libraries):
            place = f"{type(error).__name__} at {path}, line {line}"
            return f"\n({place}; LCFL_DEBUG=1 in the environment shows the way there)"
    return ""


if __name__ == "__main__":
    main()
