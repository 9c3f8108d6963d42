"""Reports an error that the user can fix in one line. This module imports nothing heavy."""

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

__all__ = ["origin_of", "reported", "user_errors"]


def reported(error: Exception) -> str:
    """Returns the line that tells of an error; empty if only a traceback does.

    An error in the user's code gets a second line. With ``LCFL_DEBUG`` in the environment, every error has a traceback.
    """
    origin = origin_of(error)
    if os.environ.get("LCFL_DEBUG") or not (origin or isinstance(error, user_errors())):
        return ""
    if origin:  # messages of lcfl itself are of a sensible length
        from lcfl.core.validation import shortened

        return f"lcfl: error: {shortened(str(error))}{origin}"
    return f"lcfl: error: {error}"


def user_errors() -> tuple[type[Exception], ...]:
    """Returns the types of errors that a user can fix. That of Lightning is included if Lightning is loaded."""
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    own = (lightning.MisconfigurationException,) if lightning else ()
    return (ValueError, OSError, ModuleNotFoundError, *own)


def origin_of(error: BaseException) -> str:
    """Returns a second line with the place in user code that an error comes from, or an empty text.

    Errors of lcfl, and those of libraries that lcfl called, need no such line.
    """
    ours = Path(__file__).parents[1]
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    text = "".join(traceback.format_exception(error))  # includes the notes, which hold the frames of another rank
    text = text.partition("\nThe above exception was the direct cause")[0]  # what lcfl itself raised for it comes later
    cause: BaseException = error
    while cause.__cause__:
        cause = cause.__cause__
    for path, line in reversed(re.findall(r'File "(.+)", line (\d+)', text)):
        if Path(path).is_relative_to(ours):
            return ""
        if not path.startswith("<") and not any(Path(path).is_relative_to(library) for library in libraries):
            place = f"{type(cause).__name__} at {path}, line {line}"
            return f"\n({place}; set LCFL_DEBUG=1 in the environment to see the traceback)"
    return ""
