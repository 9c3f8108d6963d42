"""What is refused or warned of before any data is loaded: the option, what it got, what it may be, and the cure."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from lcfl.aggregation import ClusterMean, GlobalMean, NoAggregation
from lcfl.checks import check_callbacks, check_method, check_network, clients_per_round
from lcfl.clustering import LowRankCosine
from lcfl.exchange import CentreAndEmbedding, FullModel, NoExchange
from lcfl.federation import Federation
from lcfl.hooks import Callback
from lcfl.local import LocalTraining
from lcfl.method import Method
from lcfl.module import FederatedModule
from lcfl.networks import MLP, LeNet5
from tests.builders import alone, blobs, blobs_module, fedavg, lcfed, linear, linear_module


@pytest.mark.parametrize(
    ("wanted", "num_clients", "expected"),
    [
        (0.25, 100, 25),
        (0.1, 100, 10),
        (0.29, 100, 29),  # 0.29 * 100 is 28.999...
        (0.3, 7, 2),
        (0.01, 10, 1),
        (1.0, 7, 7),
        (1, 7, 1),
        (7, 7, 7),
    ],
)
def test_clients_per_round(wanted, num_clients, expected):
    assert clients_per_round(wanted, num_clients) == expected


@pytest.mark.parametrize("wanted", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_lies_between_0_and_1(wanted):
    with pytest.raises(ValueError, match=r"trainer.clients_per_round: got the fraction") as error:
        clients_per_round(wanted, 20)
    for text in (str(wanted), "(0, 1]", "counts from 1 to data.num_clients=20"):
        assert text in str(error.value)


@pytest.mark.parametrize("wanted", [0, -3, 21])
def test_a_count_lies_between_1_and_n(wanted):
    with pytest.raises(ValueError, match=rf"trainer.clients_per_round: got {wanted} for data.num_clients=20") as error:
        clients_per_round(wanted, 20)
    assert "counts from 1 to 20 and fractions in (0, 1]" in str(error.value)


def test_a_trainers_callback_would_never_be_called():
    with pytest.raises(ValueError, match=r"trainer.callbacks: LearningRateMonitor is a callback of lightning.Trainer"):
        check_callbacks([Callback(), LearningRateMonitor()])


def test_a_misspelt_hook_would_never_be_called():
    class Misspelt(Callback):
        def on_round_ends(self):
            pass

    with pytest.raises(ValueError, match=r"Misspelt.on_round_ends is no hook.*Did you mean on_round_end\?"):
        check_callbacks([Misspelt()])

    class Clusters(LowRankCosine):
        def on_aggregate(self):
            pass

    method = Method(LocalTraining(steps=1), CentreAndEmbedding(), ClusterMean(), [Clusters()])
    with pytest.raises(ValueError, match=r"Clusters.on_aggregate is no hook.*Did you mean on_aggregated\?"):
        check_method(method, linear_module(), 20)


def test_good_settings_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_method(lcfed(), linear_module(lr=0.1, cluster_weight=0.5, global_weight=0.5), 20)
        check_method(fedavg(), linear_module(), 20)
        check_method(alone(), linear_module(), 20)
        check_network(blobs_module(), blobs())
        check_callbacks([Callback()])


def test_more_clusters_than_clients():
    with pytest.raises(ValueError, match=r"num_clusters=4 for data.num_clients=3"):
        check_method(lcfed(4), linear_module(), 3)


@pytest.mark.parametrize("start", ["centre", "embedding"])
def test_a_start_that_is_not_sent(start):
    method = Method(LocalTraining(steps=1, start=start), NoExchange(), NoAggregation())
    with pytest.raises(ValueError, match=rf"method.local_update: got start={start}, but NoExchange sends no {start}"):
        check_method(method, linear_module(), 5)


@pytest.mark.parametrize("start", ["centre", "embedding"])
def test_a_start_without_an_effect(start):
    method = Method(LocalTraining(steps=1, start=start), FullModel(), GlobalMean())
    with pytest.warns(UserWarning, match=rf"method.local_update: start={start} has no effect: FullModel sends a model"):
        check_method(method, linear_module(), 5)


@pytest.mark.parametrize(
    ("option", "symbol", "needed"), [("cluster_weight", "mu", "centre"), ("global_weight", "lambda", "embedding")]
)
@pytest.mark.parametrize("method", [fedavg, alone])
def test_a_weight_without_an_effect(option, symbol, needed, method):
    module = linear_module(**{option: 0.3})
    with pytest.warns(UserWarning) as caught:
        check_method(method(), module, 5)
    name = type(method().exchange).__name__
    text = f"model.{option} ({symbol}) = 0.3 has no effect: {name} sends no {needed}."
    assert [str(each.message) for each in caught] == [text]


def test_steps_that_diverge_by_the_pull_alone():
    with pytest.warns(UserWarning, match=r"learning rate 1.0 times .* = 2.0 is >= 2.*Keep the product at 1 or below"):
        check_method(lcfed(), linear_module(lr=1.0, cluster_weight=1.5, global_weight=0.5), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_method(lcfed(), linear_module(lr=1.0, cluster_weight=1.4, global_weight=0.5), 5)


def test_a_pull_that_is_not_sent_does_not_diverge():
    with pytest.warns(UserWarning) as caught:
        check_method(fedavg(), linear_module(lr=1.0, cluster_weight=9.0), 5)
    assert len(caught) == 1


def test_one_optimizer_and_nothing_else():
    class Scheduled(FederatedModule):
        def configure_optimizers(self):
            return {"optimizer": torch.optim.SGD(self.network.parameters(), lr=0.1)}

    with pytest.raises(
        ValueError, match=r"Scheduled.configure_optimizers: got dict; a local run needs one torch.optim"
    ):
        check_method(fedavg(), Scheduled(linear), 5)


def test_a_network_of_another_shape():
    with pytest.raises(ValueError, match=r"model.network: LeNet5 cannot take inputs of shape \(16,\)") as error:
        check_network(FederatedModule(partial(LeNet5, 1, 28)), blobs())
    assert "Synthetic" in str(error.value)
    assert "in_channels and image_size" in str(error.value)


def test_too_few_classes():
    module = FederatedModule(partial(MLP, 16, [4], 7))
    with pytest.raises(ValueError, match=r"MLP gives scores of shape \(7,\), but Synthetic has 8 classes") as error:
        check_network(module, blobs())
    assert "set its num_classes to 8" in str(error.value)


def test_scores_are_one_vector_per_input():
    module = FederatedModule(lambda: nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (8, 2))), cut=None)
    with pytest.raises(ValueError, match=r"Sequential gives scores of shape \(8, 2\)"):
        check_network(module, blobs())


def test_more_scores_than_classes_are_fine():
    check_network(FederatedModule(partial(MLP, 16, [4], 9)), blobs())


@pytest.mark.parametrize(
    ("options", "module", "method", "words"),
    [
        ({"clients_per_round": 13}, blobs_module, fedavg, "clients_per_round"),
        ({}, blobs_module, partial(lcfed, 13), "num_clusters=13"),
        ({}, partial(FederatedModule, partial(MLP, 15, [4], 8)), fedavg, "cannot take inputs"),
    ],
)
def test_errors_come_before_any_data_is_loaded(tmp_path, monkeypatch, options, module, method, words):
    data = blobs(12)
    monkeypatch.setattr(data.dataset, "load", lambda: pytest.fail("data was loaded"))
    federation = Federation(1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path, devices=1, **options)
    with pytest.raises(ValueError, match=words):
        federation.fit(module(), data, method())
    assert list(tmp_path.iterdir()) == []
