"""Which kinds of model the evaluations of a run measure, in a round and at the end."""

import pytest

from lcfl.callbacks import EarlyStopping
from lcfl.federation.federation import Federation
from lcfl.methods import FullModel, GlobalMean, LocalTraining, Method
from lcfl.server.schedule import Schedule
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import blobs, blobs_module, fedavg, fit, lcfed


@pytest.mark.parametrize(
    ("during", "final", "in_a_round", "at_the_end"),
    [
        ([], None, "personal cluster", "personal cluster global after_local"),
        ([], [], "personal cluster", "personal cluster"),
        ([], ["after_local", "personal"], "personal cluster", "personal cluster after_local"),
        (["after_local"], [], "personal cluster after_local", "personal cluster after_local"),
        (["after_local"], ["global"], "personal cluster after_local", "personal cluster global after_local"),
        (None, [], "personal cluster global after_local", "personal cluster global after_local"),
    ],
)
def test_options_select_the_kinds_measured_in_a_round_and_at_the_end(tmp_path, during, final, in_a_round, at_the_end):
    schedule = Schedule(1, 4, 1, final_models=final, evaluate_models=during)
    exchange = lcfed().exchange
    assert schedule.evaluated_kinds(exchange) == in_a_round.split()
    assert schedule.evaluated_kinds(exchange, is_final=True) == at_the_end.split()
    watch = fit(
        blobs_module(), blobs(), lcfed(2), tmp_path, 2, 4, evaluate_every=2, evaluate_models=during, final_models=final
    )
    for metrics, kinds in ((watch.rows[1], in_a_round), (watch.metrics, f"{at_the_end} trivial")):
        assert {name.split("/")[2] for name in metrics if name.startswith("test/")} == set(kinds.split())


class Adapted(FullModel):
    """Reports what it lists last."""

    models = ("global", "after_local")
    reported = ("after_local",)


@pytest.mark.parametrize("during", [None, [], ["global"]])
def test_what_a_method_reports_comes_first(tmp_path, during):
    """Callbacks, sweeps and tables take the first kind of model."""
    method = Method(LocalTraining(steps=3), Adapted(), GlobalMean())
    watch = fit(blobs_module(), blobs(), method, tmp_path, 2, 4, evaluate_every=2, evaluate_models=during)
    for metrics in (watch.rows[1], watch.metrics):
        first = next(name for name in metrics if name.startswith("test/") and name.endswith("/acc"))
        assert first == "test/own_split/after_local/acc"


def test_evaluating_adapted_models_during_a_run_changes_nothing_else(tmp_path):
    watches = [
        fit(blobs_module(), blobs(val_fraction=0.2), lcfed(2), tmp_path, 3, 4, evaluate_every=1, evaluate_models=kinds)
        for kinds in ([], ["after_local"])
    ]
    plain, adapted = ([{k: v for k, v in row.items() if "time/" not in k} for row in each.rows] for each in watches)
    assert_same_state(watches[0].state, watches[1].state)
    for row, more in zip(plain, adapted, strict=True):
        assert row.items() <= more.items() and "val/own_split/after_local/acc" in more


def test_a_callback_can_wait_for_a_metric_of_adapted_models(tmp_path):
    stopping = EarlyStopping("val/own_split/after_local/acc", patience=1)
    options = {"rounds": 6, "evaluate_every": 1, "callbacks": [stopping]}
    data = blobs(val_fraction=0.2)
    with pytest.raises(ValueError, match=r"no metric val/own_split/after_local/acc; the metrics are"):
        fit(blobs_module(), data, fedavg(), tmp_path, **options)
    watch = fit(blobs_module(), data, fedavg(), tmp_path, evaluate_models=["after_local"], **options)
    assert len(watch.rows) < 6, "the accuracy of adapted models is 1 long before the last round"


@pytest.mark.parametrize("option", ["evaluate_models", "final_models"])
def test_unknown_kind_of_model_is_refused(option):
    with pytest.raises(
        ValueError, match=rf"trainer.{option}: got 'locals'; allowed are personal, cluster, global and aft"
    ):
        Federation(**{option: ["locals"]})
