"""Refusals and warnings before training starts: the option, what it got, what is allowed, and what to change."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink
from lcfl.federation.checks import check_callbacks, check_method, number_of_clients
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import (
    ClusterMean,
    GlobalMean,
    NoAggregation,
    NormalisedMean,
)
from lcfl.methods.clustering import (
    ChoiceBeforeTraining,
    HierarchicalUpdates,
    LossVectorKMeans,
    LowRankCosine,
    RefreshedLowRankCosine,
)
from lcfl.methods.exchange import (
    AllCentres,
    CentreAndEmbedding,
    ClusterModel,
    ControlledModel,
    EnvelopeModel,
    FullModel,
    GlobalReference,
    NoExchange,
    NormalisedModel,
)
from lcfl.methods.local import (
    CalibratedTraining,
    ControlledTraining,
    DittoTraining,
    DynamicTraining,
    LeastLossTraining,
    LocalTraining,
    LocalUpdate,
    MetaTraining,
    NormalisedTraining,
)
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.models.module import FederatedModule
from lcfl.models.pulls import NO_PULLS, Pulls
from lcfl.models.step_loss import loss_of_step
from tests.helpers.builders import (
    blobs,
    blobs_module,
    fedavg,
    lcfed,
    linear,
    linear_module,
)


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
    assert number_of_clients("clients_per_round", wanted, num_clients) == expected


@pytest.mark.parametrize("wanted", [0.0, -0.5, 1.5, float("nan"), 0, -3, 21])
def test_impossible_clients_per_round_are_refused(wanted):
    with pytest.raises(ValueError) as error:
        number_of_clients("clients_per_round", wanted, 20)
    said = f"got {wanted} for data.num_clients=20; allowed are counts from 1 to 20 and fractions in (0, 1]."
    if isinstance(wanted, float):
        said = f"got the fraction {wanted}; allowed are fractions in (0, 1] and counts from 1 to data.num_clients=20."
    assert str(error.value) == f"trainer.clients_per_round: {said}"


class Misspelt(Callback):
    def on_round_ends(self):
        pass


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (LearningRateMonitor(), "trainer.callbacks: LearningRateMonitor is a callback of lightning.Trainer"),
        (Misspelt(), r"Misspelt.on_round_ends is not a hook.*Did you mean on_round_end\?"),
        (LowRankCosine(2), r"trainer.callbacks: LowRankCosine is a clustering, .* List it in method\.clustering\.$"),
        (Checkpoint(monitor="val/own_split/personal/acc"), r"got 2 Checkpoint; allowed is one.*every_n_rounds and mon"),
    ],
)
def test_wrong_callback_is_refused(callback, words):
    with pytest.raises(ValueError, match=words):
        check_callbacks([Checkpoint(), callback])


class Clusters(LowRankCosine):
    def on_aggregate(self):
        pass


@pytest.mark.parametrize(
    ("clustering", "words"),
    [
        (LowRankCosine(6), "num_clusters=6 for the 5 clients of the run"),
        (Clusters(2), r"method.clustering: Clusters.on_aggregate is not a hook.*Did you mean on_aggregated\?"),
    ],
)
def test_clustering_that_cannot_work_is_refused(clustering, words):
    method = Method(LocalTraining(steps=1), CentreAndEmbedding(), ClusterMean(), [clustering])
    with pytest.raises(ValueError, match=words):
        check_method(method, linear_module(), 5)


CENTRE, EMBEDDING = (LocalTraining(steps=1, start=start) for start in ("centre", "embedding"))


OWN = LocalTraining(steps=1)


class Users(LocalUpdate):
    """A user's local update, which is no `LocalTraining`."""

    start = "centre"

    def __call__(self, state, downlink, data, engine):
        raise NotImplementedError

    def cost(self, num_samples, batch_size):
        return num_samples


@pytest.mark.parametrize(
    ("local_update", "exchange", "words"),
    [
        (CENTRE, NoExchange(), "method.local_update: got start=centre, but NoExchange sends no centre"),
        (Users(), NoExchange(), "method.local_update: got start=centre, but NoExchange sends no centre"),
        (EMBEDDING, NoExchange(), "method.local_update: got start=embedding, but NoExchange sends no embedding"),
        (OWN, GlobalReference(), "GlobalReference .* use start=centre or an exchange that sends a model or keeps it"),
        (NormalisedTraining(steps=1), NormalisedModel(), "NormalisedModel .* use start=centre or an exchange"),
        (MetaTraining(steps=1), GlobalReference(), "GlobalReference .* use an exchange that sends a model or keeps it"),
        (DynamicTraining(1, start="own"), GlobalReference(), "GlobalReference .* use start=centre or an exchange"),
        (DynamicTraining(1, start="embedding"), GlobalReference(), "start=embedding, but GlobalReference sends no emb"),
        (DittoTraining(1, start="embedding"), EnvelopeModel(), "start=embedding, but EnvelopeModel sends no embedding"),
        (
            DittoTraining(1),
            FullModel(),
            "DittoTraining needs the model that a client keeps, but with FullModel clients",
        ),
        (DittoTraining(1), ClusterModel(keeps_model=True), "ClusterModel would upload that of the client. Use Env"),
    ],
)
def test_local_update_without_a_model_to_start_from_is_refused(local_update, exchange, words):
    with pytest.raises(ValueError, match=words):
        aggregations = {NormalisedModel: NormalisedMean(), EnvelopeModel: GlobalMean()}
        aggregation = aggregations.get(type(exchange), NoAggregation())
        check_method(Method(local_update, exchange, aggregation), linear_module(cluster_weight=0.1), 5)


@pytest.mark.filterwarnings("error")
def test_user_defined_parts_may_find_a_model_elsewhere():
    class Halved(GlobalReference):
        def at_client(self, downlink, state, layout):
            return Downlink({"model": downlink.payload["centre"] / 2})

    class FromCentre(LocalTraining):
        def __call__(self, state, downlink, data, engine):
            return super().__call__(state, Downlink({"model": downlink.payload["centre"]}), data, engine)

    for local_update, exchange in ((OWN, Halved()), (FromCentre(steps=1), GlobalReference())):
        check_method(Method(local_update, exchange, GlobalMean()), linear_module(), 5)


HOOKS = [
    "optimizer_step",
    "on_train_batch_start",
    "on_after_batch_transfer",
    "test_step",
    "on_train_epoch_end",
    "setup",
]


@pytest.mark.parametrize("names", [*([name] for name in HOOKS), ["validation_step", "on_before_optimizer_step"]])
def test_hooks_of_lightning_trainer_are_a_warning(names):
    hooked = type("Hooked", (FederatedModule,), dict.fromkeys([*names, "training_step"], lambda self: None))
    derived = type("Derived", (hooked,), {})
    with pytest.warns(UserWarning, match=f"^model: Derived defines {', '.join(names)}, which lightning.T") as caught:
        check_method(fedavg(), derived(linear), 5)
    assert len(caught) == 1


class OwnOptimizer(FederatedModule):
    def configure_optimizers(self):
        return torch.optim.Adam(self.trained_parameters())


class Adjusted(FederatedModule):
    def configure_optimizers(self):
        return super().configure_optimizers()


class Grouped(FederatedModule):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.trained_parameters()}], **self.optimizer.keywords)


def test_an_optimizer_without_effect_is_a_warning():
    with pytest.warns(
        UserWarning, match=r"^model.optimizer has no effect: OwnOptimizer.configure_optimizers does not use"
    ):
        check_method(fedavg(), OwnOptimizer(linear, partial(torch.optim.SGD, lr=0.1)), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_method(fedavg(), OwnOptimizer(linear), 5)
        check_method(fedavg(), Adjusted(linear, partial(torch.optim.SGD, lr=0.1)), 5)
        check_method(fedavg(), Grouped(linear, partial(torch.optim.SGD, lr=0.1)), 5)


class OwnStep(FederatedModule):
    def training_step(self, batch, batch_idx=0):
        return self.loss(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("pulls", "what"),
    [
        ((torch.ones(4), None, None), "model.cluster_weight"),
        ((torch.ones(4), torch.ones(2), None), "model.cluster_weight and model.global_weight"),
        ((None, None, torch.ones(4)), "the method's correction of gradients"),
    ],
)
def test_a_step_that_leaves_out_the_pulls_is_a_warning(pulls, what):
    made = OwnStep(linear, cluster_weight=0.5, global_weight=0.5)
    made.pulls = Pulls(*pulls)
    batch = torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.warns(
        UserWarning,
        match=rf"^model: OwnStep.training_step does not call self.regularizer\(\), so this has no effect: {what}",
    ):
        loss_of_step(made, batch)
    plain = FederatedModule(linear, cluster_weight=0.5, global_weight=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of_step(plain, batch)
        made.pulls = NO_PULLS
        loss_of_step(made, batch)


def test_manual_optimization_is_refused():
    class Manual(FederatedModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"^model: Manual sets automatic_optimization=False, .* return the loss from"):
        check_method(fedavg(), Manual(linear), 5)


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


def test_another_default_dtype_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match=r"parameters must be torch.float32 .* Remove torch.set_default_dtype"):
            linear_module()
        with pytest.raises(ValueError, match=r"torch.set_default_dtype: got torch.float64; a federation computes in"):
            Federation(1, logger=False).fit(FederatedModule(lambda: linear().float()), blobs(), fedavg())
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_that_nothing_trains_are_warned_about():
    class Weighted(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    module, method = FederatedModule(partial(MLP, 4, [], 2), loss=Weighted()), fedavg()
    with pytest.warns(UserWarning, match=r"^model: loss\.scale of FederatedModule are parameters outside of"):
        check_method(method, module, 5)
    module.loss.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_method(method, module, 5)


def test_an_optimizer_of_parameters_outside_of_the_network_is_refused():
    class Tempered(FederatedModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, method = Tempered(partial(MLP, 4, [], 2)), Method(LocalTraining(1), FullModel(), GlobalMean())
    check_method(method, module, 5)
    module.temperature = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"Tempered.configure_optimizers: got parameters outside of the network: temp"):
        check_method(method, module, 5)


@pytest.mark.parametrize("other", [ChoiceBeforeTraining(4), HierarchicalUpdates(after=2, num_clusters=4)])
def test_two_clusterings_with_rounds_of_their_own_are_refused(other):
    method = Method(
        LocalTraining(1), ClusterModel(), ClusterMean("participants", "participants"), [LowRankCosine(4), other]
    )
    with pytest.raises(
        ValueError, match=rf"got LowRankCosine and {type(other).__name__}, which both have clients train"
    ):
        check_method(method, linear_module(), 10)


@pytest.mark.parametrize("other", [LowRankCosine(4), ChoiceBeforeTraining(4), LossVectorKMeans(2, first="random")])
def test_two_clusterings_that_set_the_first_clusters_are_refused(other):
    exchange, mean = ClusterModel(keeps_model=True), ClusterMean("participants", "participants")
    method = Method(LocalTraining(1), exchange, mean, [other, RefreshedLowRankCosine(2)])
    words = f"got {type(other).__name__} and RefreshedLowRankCosine, which both set the first clusters"
    with pytest.raises(ValueError, match=words):
        check_method(method, linear_module(), 10)


def test_a_warm_up_round_that_an_exchange_cannot_join_is_refused():
    method = Method(LeastLossTraining(1), AllCentres(), ClusterMean("participants", "participants"), [LowRankCosine()])
    with pytest.raises(ValueError, match=r"LowRankCosine begins with a warm-up round .* AllCentres cannot exchange"):
        check_method(method, linear_module(), 20)


@pytest.mark.parametrize(
    "local_update", [LocalTraining(steps=1), MetaTraining(steps=1), CalibratedTraining(1), ControlledTraining(1)]
)
def test_more_than_an_optimizer_is_refused_whatever_the_local_update(local_update):
    class WithSchedule(FederatedModule):
        def configure_optimizers(self):
            return {"optimizer": super().configure_optimizers()}

    exchange = ControlledModel() if isinstance(local_update, ControlledTraining) else FullModel()
    method = Method(local_update, exchange, GlobalMean())
    with pytest.raises(ValueError, match=r"WithSchedule.configure_optimizers: got dict; a local run needs one torch"):
        check_method(method, WithSchedule(partial(MLP, 4, [], 2)), 5)
