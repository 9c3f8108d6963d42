"""Any value for any option of a method is refused in words before a file is written, or the run works.

Every case runs in a process of its own, with a limit on time and memory.
"""

import json
import os
import resource
import select
import signal
import sys
import traceback
from pathlib import Path

import pytest
import yaml

from lcfl.__main__ import _user_errors
from lcfl.cli.federated_cli import FederatedCLI
from tests.helpers.commandline import CONFIGS, SYNTHETIC, files, printed

SECONDS = 60  # a case that takes longer hangs, also on a busy machine; most take less than one
MEMORY = 6 * 2**30  # bytes of address space beyond what the process has

TINY = (
    "--trainer.fast_dev_run=true",
    "--trainer.devices=1",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.engine=sequential",
)
VALUES = {
    "null": None,
    "negative": -1,
    "zero": 0,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "large": 1e30,
    "huge": 2**62,
    "fraction": 0.5,
    "text": "x",
    "empty text": "",
    "list": [],
    "mixed list": [1, "x", None],
    "mapping": {"x": 1},
    "true": True,
    "class": {"class_path": "lcfl.models.MLP", "init_args": {"in_features": 16}},
    "other class": {"class_path": "torch.nn.ReLU"},
}


def places(value, path=()):
    """Yields the path of every value in a nested configuration."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key != "class_path":
            yield from places(item, (*path, key))


def changed(value, path, new):
    """Returns a copy in which the value at the path is another one."""
    copy = value.copy()
    copy[path[0]] = new if len(path) == 1 else changed(value[path[0]], path[1:], new)
    return copy


class Ended(Exception):
    """Raised in the parent when all commands have been tried."""


def outcomes(commands):
    """Tries commands, each in a process of its own that is forked once the parser is built.

    Yields nothing in the children. Returns (how it ended, what it said) for each command.
    """
    parent, found = os.getpid(), []

    class Forking(FederatedCLI):
        def parse_arguments(self, parser, args):
            for words in commands:
                reading, self.writing = os.pipe()
                if (child := os.fork()) == 0:
                    os.close(reading)
                    limited()
                    return super().parse_arguments(parser, [str(word) for word in words])
                os.close(self.writing)
                found.append(awaited(child, reading))
            raise Ended

    cli = Forking.__new__(Forking)
    try:
        cli.__init__(args=["fit"])
        how, said = "worked", ""
    except Ended:
        return found
    except SystemExit as ended:
        how, said = "refused" if ended.code == 2 else f"exit {ended.code}", ""
    except _user_errors() as error:
        how, said = "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[-4:])
        how, said = "traceback", f"{type(error).__name__}: {error}\n{frames}"
    finally:
        if os.getpid() != parent:
            sys.stderr.flush()
            os.lseek(2, 0, os.SEEK_SET)
            said = said or os.read(2, 3000).decode(errors="replace")
            os.write(cli.writing, json.dumps([how, said[-3000:]]).encode())
            os._exit(0)
    raise AssertionError


def limited():
    """Limits the memory of this process, and redirects what it prints into memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (1, 2):
        os.dup2(os.memfd_create("said"), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))


def awaited(child, reading):
    """Returns how a child ended and what it said."""
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    return tuple(json.loads(content)) if content else (f"hung or died with {os.waitstatus_to_exitcode(status)}", "")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("method", ["fesem", "local", "pacfl"])
def test_any_value_of_any_option_is_refused_in_words_or_works(capsys, tmp_path, method):
    base = printed(capsys, *SYNTHETIC, "-c", CONFIGS / "methods" / f"{method}.yaml")
    names, commands = [], []
    for place in places(base):
        option = ".".join(map(str, place))
        if place[0] != "method" or place == ("method",):
            continue
        for word, value in VALUES.items():
            file = tmp_path / f"{len(names)}.yaml"
            file.write_text(yaml.safe_dump(changed(base, place, value)))
            names.append(f"{option}: {word}")
            commands.append(("fit", "-c", file, *TINY))
    before = files(tmp_path)
    found = dict(zip(names, outcomes(commands), strict=True))
    wrong = {name: each for name, each in found.items() if each[0] not in ("worked", "refused")}
    assert not wrong, "\n".join(f"{name}: {how}: {said}" for name, (how, said) in wrong.items())
    assert files(tmp_path) == before
    assert sum(how == "refused" for how, _ in found.values()) > len(found) / 3
