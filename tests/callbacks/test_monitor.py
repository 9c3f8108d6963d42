"""`Monitor`: its tags, steps, numbers and figures are read back, and it does not change the run."""

import io
import random
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lcfl.callbacks import Monitor
from lcfl.core.metric_names import Reported
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic
from lcfl.data.partition import Pathological
from lcfl.data.population import Population
from lcfl.federation.federation import Federation
from lcfl.figures import save, shown
from lcfl.methods.aggregation import ClusterMean, GlobalMean
from lcfl.methods.clustering import LowRankCosine, ModelKMeans
from lcfl.methods.exchange import CentreAndEmbedding, ClusterModel, FullModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from lcfl.server.metrics import ClientMetrics, Evaluation
from tests.helpers.bits import assert_same_state

EVERYTHING = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
NUM_CLIENTS = 6
OF_CLUSTERS = ("assignment", "assignment_flow", "cluster_sizes", "similarity", "codes", "granularity")


def save_blank(figure, path):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGBA", (1, 1)).save(path)


@pytest.fixture
def blank(pictures, monkeypatch):
    """Makes `Monitor` build its pictures and write blank files, because arranging and rendering them takes longest."""
    monkeypatch.setattr("lcfl.callbacks.monitor.figures.save", save_blank)


def lcfed():
    return Method(
        LocalTraining(steps=2), CentreAndEmbedding(), ClusterMean(), [LowRankCosine(num_clusters=3, dimension=3)]
    )


def fedavg():
    return Method(LocalTraining(steps=2), FullModel(), GlobalMean())


def fesem():
    exchange, clustering = ClusterModel(keeps_model=True), [ModelKMeans(num_clusters=2)]
    return Method(LocalTraining(steps=2), exchange, ClusterMean("participants"), clustering)


def fit(root, method, rounds=4, ckpt_path=None, lr=0.05, **options):
    data = FederatedDataModule(
        Synthetic(num_classes=6, num_features=4, samples_per_class=20, test_per_class=4), Pathological(2), NUM_CLIENTS
    )
    module = FederatedModule(partial(MLP, 4, [4], 6), partial(torch.optim.SGD, lr=lr))
    options = {"evaluate_every": 2, "clients_per_round": 3, "devices": 1, "enable_progress_bar": False, **options}
    return Federation(rounds, default_root_dir=root, **options).fit(module, data, method, ckpt_path)


def written(run):
    """Returns the accumulator, the steps of histograms and images by tag, and the steps of scalars by tag.

    Orphans of resumed runs are kept so that duplicates would show.
    """
    events = EventAccumulator(str(run.path), EVERYTHING, purge_orphaned_data=False).Reload()
    tags = events.Tags()
    steps = {tag: [event.step for event in events.Histograms(tag)] for tag in tags["histograms"]}
    steps |= {tag: [event.step for event in events.Images(tag)] for tag in tags["images"]}
    scalars = {tag: [event.step for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return events, steps, scalars


def names(folder):
    return {path.stem for path in (folder / "figures").iterdir()}


def rendered(run):
    return {path.stem: np.asarray(Image.open(path)) for path in (run.path / "figures").iterdir()}


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("logs"), lcfed(), callbacks=Monitor(figure_every=1))


def test_tags_and_steps(run):
    _, steps, scalars = written(run)
    during = {
        f"{stage}/own_split/{kind}/acc_clients": [1, 3] for stage in ("val", "test") for kind in ("personal", "cluster")
    }
    at_the_end = {
        f"{stage}/own_split/{kind}/acc_clients": [3] for stage in ("val", "test") for kind in ("global", "after_local")
    }
    figures = {f"figures/{name}": [1, 3] for name in OF_CLUSTERS}
    last_figures = {f"figures/accuracies_{stage}_own_split": [3] for stage in ("val", "test")}
    figures |= {"figures/partition": [0]}
    assert steps == during | at_the_end | figures | last_figures
    assert not steps.keys() & scalars.keys()  # TensorBoard shows only one kind of data for a tag


def test_histograms_hold_every_client(run):
    events, _, _ = written(run)
    accuracy = events.Histograms("test/own_split/personal/acc_clients")[-1].histogram_value
    assert accuracy.num == NUM_CLIENTS
    assert accuracy.sum / NUM_CLIENTS == pytest.approx(run.metrics["test/own_split/personal/acc"])


def test_pictures_on_disk_are_those_of_the_last_step(run):
    events, _, _ = written(run)
    found = rendered(run)
    assert found.keys() == {*OF_CLUSTERS, "accuracies_test_own_split", "accuracies_val_own_split", "partition"}
    for name, picture in found.items():
        logged = np.asarray(Image.open(io.BytesIO(events.Images(f"figures/{name}")[-1].encoded_image_string)))
        assert np.array_equal(logged, picture)
        assert picture[..., :3].std() > 10  # not blank


@pytest.mark.parametrize("lr", [0.05, 0.0])
def test_models_without_codes_are_shown_by_their_own_principal_components(tmp_path, blank, lr):
    found = names(fit(tmp_path, fesem(), lr=lr, logger=False, callbacks=Monitor()).path)
    assert {"similarity", "codes"} <= found if lr else not {"similarity", "codes"} & found  # all models are equal


def test_an_error_while_drawing_a_map_is_not_taken_for_equal_models(tmp_path, blank, monkeypatch):
    def broken(*arguments):
        raise ValueError("by hand")

    monkeypatch.setattr(Monitor, "_draw_codes", broken)
    with pytest.raises(ValueError, match="by hand"):
        fit(tmp_path, fesem(), logger=False, callbacks=Monitor())


def test_fewer_large_models_are_shown(tmp_path, blank, monkeypatch):
    seen = []
    monkeypatch.setattr("lcfl.callbacks.monitor.MODEL_NUMBERS", 3 * 50)  # three models of MLP(4, [4], 6)
    monkeypatch.setattr(Monitor, "_draw_codes", lambda *arguments: seen.append(arguments[-2:]))
    fit(tmp_path, fesem(), clients_per_round=NUM_CLIENTS, logger=False, callbacks=Monitor())
    assert seen[-1][0].tolist() == [0, 2, 5] and len(seen[-1][1]) == 3


def test_resumed_run_draws_the_same_pictures_and_duplicates_nothing(run, tmp_path, pictures, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("lcfl.callbacks.monitor.figures.save", save_blank)
        half = fit(tmp_path, lcfed(), rounds=2, callbacks=Monitor(figure_every=1))
    assert half.state.callbacks["Monitor"]["rounds"].tolist() == [0, 1]
    resumed = fit(tmp_path, lcfed(), rounds=4, ckpt_path="last", callbacks=Monitor(figure_every=1))
    assert resumed.path == half.path
    found = rendered(resumed)
    for name in {*OF_CLUSTERS, "accuracies_test_own_split", "accuracies_val_own_split"}:
        np.testing.assert_array_equal(found[name], rendered(run)[name], err_msg=name)
    _, steps, scalars = written(resumed)
    doubled = {tag: each for tag, each in (steps | scalars).items() if len(set(each)) != len(each)}
    assert doubled == {"cluster/stability": [1, 2, 2, 3, 4]}  # the final mean of the first half, which readers drop
    assert steps["figures/assignment"] == [1, 3]


def test_monitor_does_not_change_the_run(run, tmp_path):
    alone = fit(tmp_path, lcfed(), logger=False)
    assert not (alone.path / "figures").exists()
    assert_same_state(alone.state, run.state, but=("callbacks",))


def test_method_without_clusters_has_no_pictures_of_clusters(tmp_path, blank):
    run = fit(tmp_path, fedavg(), rounds=2, logger=CSVLogger(tmp_path), callbacks=Monitor(figure_every=1))
    assert names(run.path) == {"accuracies_test_own_split", "accuracies_val_own_split", "partition"}
    assert run.state.callbacks["Monitor"]["assignments"].numel() == 0


class Writer:
    """Records calls like those of a SummaryWriter."""

    def __init__(self):
        self.calls = []

    def add_figure(self, tag, figure, step, close):
        self.calls.append((tag, step))

    def add_histogram(self, tag, values, step, bins):
        self.calls.append((tag, step))


def fake(tmp_path, num_clients=4, evaluate_every=1):
    writer = Writer()
    counts = np.ones((num_clients, 3), dtype=int)
    everything = [np.arange(3)] * num_clients
    data = SimpleNamespace(population=Population(everything, [], {}, None, counts))
    loggers = [SimpleNamespace(experiment=writer), SimpleNamespace()]
    server = SimpleNamespace(
        loggers=loggers,
        run_log=SimpleNamespace(tell_loggers=lambda method, tell: [tell(each) for each in loggers]),
        run_dir=tmp_path,
        method=SimpleNamespace(is_clustered=True, exchange=SimpleNamespace(keeps_model=False)),
        schedule=SimpleNamespace(evaluate_every=evaluate_every),
        data=data,
        is_interrupted=False,
    )
    state = SimpleNamespace(
        round=0,
        num_clients=num_clients,
        num_clusters=2,
        assignment=torch.arange(num_clients) % 2,
        active=torch.ones(num_clients, dtype=torch.bool),
        codes=torch.eye(num_clients)[:, :3],
        participated=torch.ones(num_clients, dtype=torch.bool),
    )
    return server, state, writer


def evaluation(num_clients=4):
    ones = np.ones(num_clients)
    return Evaluation({"val/own_split/personal/acc": ClientMetrics(np.arange(num_clients), ones, ones.astype(int))})


def play(monitor, server, state, rounds):
    monitor.on_fit_start(server, state)
    while state.round < rounds:
        monitor.on_aggregated(server, state)
        state.round += 1
        monitor.on_evaluated(server, state, evaluation(state.num_clients))
    monitor.on_fit_end(server, state, {"some": 1.0})


def test_pictures_come_at_every_third_evaluation_and_at_the_end(tmp_path, blank):
    server, state, writer = fake(tmp_path)
    play(Monitor(figure_every=3), server, state, rounds=4)
    assert [step for tag, step in writer.calls if tag == "figures/assignment"] == [2, 3]


def test_a_run_that_a_signal_stopped_keeps_its_pictures_of_clusters(tmp_path, blank):
    server, state, writer = fake(tmp_path, evaluate_every=0)
    monitor = Monitor(figure_every=1)
    monitor.on_fit_start(server, state)
    monitor.on_aggregated(server, state)
    state.round = 1
    server.is_interrupted = True
    monitor.on_fit_end(server, state, {})
    assert writer.calls == [(f"figures/{name}", 0) for name in ("partition", *OF_CLUSTERS[:-1])]


def test_nothing_is_logged_for_a_round_of_an_earlier_process(tmp_path, blank):
    server, state, writer = fake(tmp_path)
    state.round = 5
    monitor = Monitor(figure_every=1)
    monitor.on_fit_start(server, state)
    monitor.on_evaluated(server, state, evaluation())
    assert writer.calls == []
    assert "similarity" in names(tmp_path)


def test_history_is_small_and_is_restored_and_cut_to_the_state(tmp_path, blank):
    server, state, _ = fake(tmp_path, num_clients=1000, evaluate_every=0)
    monitor = Monitor(figure_every=1)
    play(monitor, server, state, rounds=3)
    buffer = io.BytesIO()
    torch.save(monitor.state_dict(), buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert saved["assignments"].shape == (3, 256) and saved["assignments"].dtype == torch.int16
    np.testing.assert_array_equal(saved["assignments"][0], state.assignment[shown(1000)])
    assert len(set(shown(1000))) == 256 and shown(1000)[[0, -1]].tolist() == [0, 999]

    other = Monitor(figure_every=1)
    other.load_state_dict(saved)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in saved.items())
    state.round = 2
    other.on_fit_start(server, state)
    assert other.state_dict()["rounds"].tolist() == [0, 1]
    state.round = -1  # a new run of the same object
    other.on_fit_start(server, state)
    assert other.state_dict()["rounds"].tolist() == []
    Monitor(figure_every=1).load_state_dict(other.state_dict())


def test_drawing_gives_no_warnings_and_draws_no_random_numbers(tmp_path, pictures):
    server, state, _ = fake(tmp_path, num_clients=2)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(Monitor(figure_every=1), server, state, rounds=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "figures" / "picture.png"

    class Torn(Figure):
        def savefig(self, path, format):
            path.write_bytes(b"half")
            raise OSError("disk full")

    path.parent.mkdir()
    path.write_bytes(b"whole")
    with pytest.raises(OSError, match="disk full"):
        save(Torn(), path)
    assert [each.name for each in path.parent.iterdir()] == ["picture.png"] and path.read_bytes() == b"whole"


def test_figure_every_must_be_positive():
    with pytest.raises(ValueError, match="figure_every=0"):
        Monitor(figure_every=0)


def test_a_diverged_client_is_not_in_the_histogram_and_ends_nothing(tmp_path):
    server, state, writer = fake(tmp_path)
    monitor = Monitor(figure_every=100)
    reported = Reported("mae", larger_is_better=False)
    for values, written in (([1.0, np.nan, np.inf], 1), ([np.nan], 1)):
        metric = ClientMetrics(np.arange(len(values)), np.array(values), np.ones(len(values)))
        evaluation = Evaluation({"val/own_split/global/mae": metric}, reported)
        state.round += 1
        monitor.on_evaluated(server, state, evaluation)
        assert len(writer.calls) == written
