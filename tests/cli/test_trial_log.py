"""What a sweep says of the log of a run."""

import pytest

from lcfl.cli.trial_log import last_error, warnings_in

LOG = """lcfl fit -c a.yaml
lcfl: warning: few samples
lcfl: error: of an earlier start
BEGIN
lcfl: warning: few samples
lcfl: warning: few samples
lcfl: error: it was made with another configuration:
  seed: 0, and 1 now
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(LOG)
    return path


def test_the_last_error_is_told_with_all_its_lines(log):
    said = "\n  lcfl: error: it was made with another configuration:\n    seed: 0, and 1 now"
    assert last_error(log, LOG.index("BEGIN")) == last_error(log, 0) == said
    assert last_error(log, len(LOG)) == ""
    log.write_text("lcfl: error: first\n" + "line\n" * 30)
    assert last_error(log, 0) == "\n  lcfl: error: first" + "\n  line" * 9


def test_a_warning_is_told_once_and_only_from_this_start(log):
    assert warnings_in(log, 0) == ["warning: few samples"]
    assert warnings_in(log, LOG.index("lcfl: error: it was")) == []
