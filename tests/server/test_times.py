"""The seconds that a round logs, by a clock that only the tests move."""

from types import SimpleNamespace

import pytest

from lcfl.core.callback import Callback
from tests.helpers.builders import blobs, blobs_module, fit, lcfed

PARTS = ("send", "local", "receive", "cluster", "aggregate", "eval", "callbacks")
TAKES = {
    "on_round_start": 1.0,
    "on_clients_sampled": 2.0,
    "on_uploads": 4.0,
    "on_round_end": 8.0,
    "on_aggregated": 16.0,
    "on_evaluated": 32.0,
    "on_extra_round_end": 64.0,
    "on_round_logged": 128.0,
}


@pytest.fixture
def slow(monkeypatch):
    """Provides a callback whose hooks take the times above."""
    clock = SimpleNamespace(now=0.0)

    def hook(seconds):
        def wait(self, state=None, evaluation=None):
            clock.now += seconds

        return wait

    for module in ("server", "round_row", "run_log"):
        monkeypatch.setattr(f"lcfl.server.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return type("Slow", (Callback,), {name: hook(seconds) for name, seconds in TAKES.items()})()


def test_the_parts_of_a_round_add_up_to_the_round(tmp_path, slow):
    watch = fit(blobs_module(), blobs(8), lcfed(), tmp_path, 3, callbacks=[slow], evaluate_every=2)
    rows = watch.rows
    for row in rows:
        assert sum(row.get(f"time/{part}_s", 0.0) for part in PARTS) == row["time/round_s"]
    first, second, _ = rows
    assert [first[f"time/{part}_s"] for part in ("send", "local", "receive", "cluster", "aggregate")] == [
        3,
        0,
        4,
        24,
        0,
    ]
    assert (second["time/callbacks_s"], second["time/round_s"]) == (32, 63) and "time/eval_s" not in first
    assert [row["time/logging_s"] for row in rows] == [128, 128, 128]
    assert "time/logging_s" not in watch.metrics
