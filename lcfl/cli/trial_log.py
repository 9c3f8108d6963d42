"""What a run of a sweep has written to its log: its last error, and its warnings."""

from pathlib import Path

__all__ = ["last_error", "warnings_in"]


def last_error(log: Path, begin: int) -> str:
    """Returns the last error of ``lcfl`` from byte `begin` on, as a separate line; empty if there is none."""
    errors = _lines(log, begin, "lcfl: error: ")
    return f"\n  {errors[-1]}" if errors else ""


def warnings_in(log: Path, begin: int) -> list[str]:
    """Returns the warnings of ``lcfl`` from byte `begin` on, each once, without the words before them."""
    return [line.removeprefix("lcfl: ") for line in dict.fromkeys(_lines(log, begin, "lcfl: warning: "))]


def _lines(log: Path, begin: int, start: str) -> list[str]:
    output = log.read_bytes()[begin:].decode(errors="replace")
    return [line for line in output.splitlines() if line.startswith(start)]
