"""Tests when a run ends because its clients' updates cannot be used."""

import pytest

from lcfl.runs.metrics_table import MetricsTable
from lcfl.server.reception import Received
from lcfl.server.usable_updates import MOST_FAILED_ROUNDS, UsableUpdates

USED = Received({0: None}, num_lost=0, num_failed=3, num_refused=0, up_bytes=0)
FAILED = Received({}, num_lost=1, num_failed=2, num_refused=0, up_bytes=0)
REFUSED = Received({}, num_lost=0, num_failed=2, num_refused=1, up_bytes=0)
LOST = Received({}, num_lost=4, num_failed=0, num_refused=0, up_bytes=0)


@pytest.fixture
def updates(tmp_path):
    return UsableUpdates(MetricsTable(tmp_path / "metrics.csv"), tmp_path, max_update_norm=2.5)


def count(updates, *rounds):
    for received in rounds:
        updates.count(received)
        updates.check_last_rounds()


@pytest.mark.parametrize("other", [USED, REFUSED])
def test_an_update_that_is_finite_begins_the_count_again(updates, other):
    count(updates, *[FAILED] * (MOST_FAILED_ROUNDS - 1), other, *[FAILED] * (MOST_FAILED_ROUNDS - 1))
    with pytest.raises(ValueError, match=r"each of the last 20 rounds .*: 40 were not finite \(set a smaller model"):
        count(updates, FAILED)


def test_rounds_without_updates_do_not_count(updates):
    count(updates, *[LOST] * 2 * MOST_FAILED_ROUNDS, *[FAILED] * (MOST_FAILED_ROUNDS - 1), LOST)
    with pytest.raises(ValueError, match="does not go on"):
        count(updates, FAILED)
