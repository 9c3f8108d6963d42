"""``lcfl configs``: lists the configurations that come with lcfl, or copies them."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from lcfl.cli.shipped_configs import configurations
from lcfl.core.files import check_new

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="lcfl configs",
        description="Lists or copies the configurations that come with lcfl.",
        allow_abbrev=False,
    )
    options.add_argument("--copy", type=Path, metavar="DIR", help="copy all of them to this new folder")
    return options


def main(args: Sequence[str]) -> None:
    """Prints every configuration with the comment in its first line, or copies all of them.

    Raises:
        FileExistsError: if the folder to copy to exists already.
    """
    options = parser().parse_args(args)
    folder = configurations()
    if options.copy is not None:
        check_new(options.copy)
        shutil.copytree(folder, options.copy)
        print(f"copied to {options.copy}")
        return
    print(folder)
    paths = sorted(folder.rglob("*.yaml"))
    width = max(len(str(path.relative_to(folder))) for path in paths)
    for path in paths:
        comment = path.read_text("utf-8").partition("\n")[0]
        print(f"  {path.relative_to(folder)!s:<{width}}  {comment.removeprefix('#').strip()}")
