"""What a run of a sweep has written to its log: its last error, and its warnings."""

from pathlib import Path

__all__ = ["last_error", "warnings_in"]


MOST_LINES = 10  # of an error


def last_error(log: Path, begin: int) -> str:
    """Returns the last error of ``lcfl`` from byte `begin` on, as separate lines; empty if there is none."""
    _, start, error = ("\n" + _output(log, begin)).rpartition("\nlcfl: error: ")
    lines = f"{start[1:]}{error}".splitlines()[:MOST_LINES] if start else []
    return "".join(f"\n  {line}" for line in lines)


def warnings_in(log: Path, begin: int) -> list[str]:
    """Returns the warnings of ``lcfl`` from byte `begin` on, each once, without the words before them."""
    said = [line for line in _output(log, begin).splitlines() if line.startswith("lcfl: warning: ")]
    return [line.removeprefix("lcfl: ") for line in dict.fromkeys(said)]


def _output(log: Path, begin: int) -> str:
    return log.read_bytes()[begin:].decode(errors="replace")
