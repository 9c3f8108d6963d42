"""Refusals and warnings before training starts: the option, what it got, what is allowed, and what to change."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MultilabelAUROC

from lcfl.callbacks import Checkpoint
from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink
from lcfl.data.datasets import Digits, Tensors
from lcfl.data.partition import IID
from lcfl.distributed.client_output import ClientError
from lcfl.federation.checks import check_callbacks, check_method, number_of_clients
from lcfl.federation.effects import warn_of_idle_clusterings
from lcfl.federation.federation import Federation
from lcfl.federation.trial import _check_loss, check_batches, check_network
from lcfl.methods.aggregation import (
    ClusterMean,
    CoordinateMedian,
    GlobalMean,
    NoAggregation,
    NormalisedMean,
    ServerAdam,
    ServerDynamics,
)
from lcfl.methods.clustering import (
    ChoiceBeforeTraining,
    ClusterNumberTuning,
    GreedyIncentive,
    HierarchicalUpdates,
    LossVectorKMeans,
    LowRankCosine,
    RecursiveBipartition,
    RefreshedLowRankCosine,
)
from lcfl.methods.exchange import (
    AdaptedModel,
    AllCentres,
    AttentiveReference,
    CentreAndEmbedding,
    ClusterModel,
    ClusterReference,
    ControlledModel,
    EnvelopeModel,
    FullModel,
    GlobalReference,
    NoExchange,
    NormalisedModel,
)
from lcfl.methods.exchange.transforms import LowRankCompression
from lcfl.methods.local import (
    CalibratedTraining,
    ControlledTraining,
    DittoTraining,
    DynamicTraining,
    FineTunedTraining,
    InitialisedTraining,
    LeastLossTraining,
    LocalTraining,
    MetaTraining,
    NormalisedTraining,
)
from lcfl.methods.method import Method
from lcfl.models import MLP, LeNet5
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    Normed,
    alone,
    blobs,
    blobs_module,
    dealt,
    fedavg,
    fit,
    lcfed,
    linear,
    linear_module,
    loaded,
    scaffold,
    two_sided,
)
from tests.helpers.clustered import ifca


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


# callbacks, and parts of a method that cannot work together


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
        (LowRankCosine(6), "num_clusters=6 for data.num_clients=5"),
        (Clusters(2), r"method.clustering: Clusters.on_aggregate is not a hook.*Did you mean on_aggregated\?"),
    ],
)
def test_clustering_that_cannot_work_is_refused(clustering, words):
    method = Method(LocalTraining(steps=1), CentreAndEmbedding(), ClusterMean(), [clustering])
    with pytest.raises(ValueError, match=words):
        check_method(method, linear_module(), 5)


CENTRE, EMBEDDING = (LocalTraining(steps=1, start=start) for start in ("centre", "embedding"))
OWN = LocalTraining(steps=1)


@pytest.mark.parametrize(
    ("local_update", "exchange", "words"),
    [
        (CENTRE, NoExchange(), "method.local_update: got start=centre, but NoExchange sends no centre"),
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


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (Method(CENTRE, FullModel(), GlobalMean()), {}, "start=centre has no effect: FullModel sends a model"),
        (Method(EMBEDDING, FullModel(), GlobalMean()), {}, "start=embedding has no effect: FullModel sends a model"),
        (scaffold(steps=1, start="centre"), {}, "start=centre has no effect: ControlledModel sends a model"),
        (ifca(steps=1, start="centre"), {}, "start=centre has no effect: LeastLossTraining chooses a model"),
        (fedavg(), {"cluster_weight": 9.0, "lr": 1.0}, r"cluster_weight \(mu\) = 9.0 .* FullModel sends no centre\.$"),
        (fedavg(), {"global_weight": 0.3}, r"model.global_weight \(lambda\) = 0.3 .* FullModel sends no embedding\.$"),
        (alone(), {"cluster_weight": 0.3}, r"model.cluster_weight \(mu\) = 0.3 .* NoExchange sends no centre\.$"),
        (alone(), {"global_weight": 0.3}, r"model.global_weight \(lambda\) = 0.3 .* NoExchange sends no embedding\.$"),
        (lcfed(), {"lr": 1.0, "cluster_weight": 1.5, "global_weight": 0.5}, "rate 1.0 times .* = 2.0 is >= 2.* Keep"),
    ],
)
def test_setting_without_an_effect_or_that_diverges_gives_one_warning(method, options, words):
    with pytest.warns(UserWarning, match=words) as caught:
        check_method(method, linear_module(**options), 5)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_valid_settings_give_no_warning():
    check_method(lcfed(), linear_module(lr=1.0, cluster_weight=1.4, global_weight=0.5), 20)
    check_method(fedavg(), linear_module(), 20)
    check_method(alone(), linear_module(), 20)
    check_network(blobs_module(), blobs())
    check_callbacks([Callback(), Checkpoint(), Callback()])


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


def test_manual_optimization_is_refused():
    class Manual(FederatedModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"^model: Manual sets automatic_optimization=False, .* return the loss from"):
        check_method(fedavg(), Manual(linear), 5)


# networks and losses


class Twice(MLP):
    """Returns its scores and its inputs."""

    def forward(self, inputs):
        return super().forward(inputs), inputs


class Fussy(nn.Linear):
    def forward(self, inputs):
        raise TypeError("images wanted")


class Bare(nn.Module):
    """A network without the argument num_classes."""

    def __init__(self):
        super().__init__()
        self.decision = nn.Linear(16, 7)

    def forward(self, inputs):
        return self.decision(inputs)


def two_scores_a_class():
    return nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (8, 2)))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            partial(LeNet5, 1, 28),
            r"LeNet5 cannot take inputs of shape \(16,\) .* Synthetic .* arguments to fit\.$",
        ),
        (partial(MLP, 15, [4], 8), r"MLP cannot take inputs of shape \(16,\) .* to fit, e\.g\. in_features\.$"),
        (partial(Fussy, 16, 8), r"Fussy cannot take inputs .*\(TypeError: images wanted\)"),
        (partial(MLP, 16, [4], 7), r"scores of shape \(7,\), but Synthetic has 8 classes: set its num_classes to 8"),
        (Bare, "has 8 classes: it must return 8 for each sample"),
        (two_scores_a_class, r"Sequential returns scores of shape \(8, 2\)"),
        (partial(Twice, 16, [4], 8), "Twice returns a tuple for two samples; it must return one tensor \\[B, ...\\]"),
    ],
)
def test_network_that_does_not_fit_the_data_is_refused(network, words):
    with pytest.raises(ValueError, match=rf"^model.network: .*{words}"):
        check_network(FederatedModule(network, cut=None), blobs())


@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's, about the shapes
def test_loss_that_cannot_take_scores_and_labels_is_refused():
    module = FederatedModule(partial(MLP, 16, [4], 8), loss=nn.MSELoss())
    with pytest.raises(ValueError, match=r"MSELoss cannot take outputs \[2, 8\] and targets \[2\] of torch.int64"):
        check_network(module, blobs())


def test_a_weight_for_each_score_is_asked_for():
    module = FederatedModule(partial(MLP, 16, [4], 8), loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(ValueError, match=r"Its weight has 3 numbers; it needs one for each of the 8 scores\.$"):
        check_network(module, blobs())


class DefinedAUROC(BinaryAUROC):
    """The recipe for clients of one class, without the choice of a score."""

    def compute(self):
        targets = torch.cat(self.target)
        return super().compute() if targets.unique().numel() == 2 else torch.tensor(torch.nan)


def test_a_metric_of_one_score_is_refused_before_training():
    module = FederatedModule(partial(MLP, 16, [4], 2), metrics={"auroc": DefinedAUROC()})
    with pytest.raises(ValueError, match=r"in its update, give it outputs\.softmax\(-1\)\[:, 1\]\.$"):
        check_network(module, labelled(torch.tensor([0, 1, 1])))


def test_more_scores_than_classes_give_a_warning():
    with pytest.warns(UserWarning, match="MLP returns 9 scores, but Synthetic has 8 classes: set its num_classes to 8"):
        check_network(FederatedModule(partial(MLP, 16, [4], 9)), blobs())


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (MulticlassF1Score(3), r"cannot take outputs \[2, 8\] and targets \[2\] .* num_classes to 8"),
        (MulticlassF1Score(8, average="none"), r"gives a tensor of shape \[8\]; a metric must be one number"),
        (MulticlassF1Score(8), None),
    ],
)
def test_metric_that_is_not_one_number_for_the_scores_is_refused(metric, words):
    module = FederatedModule(partial(MLP, 16, [4], 8), metrics={"f1": metric})
    with nullcontext() if words is None else pytest.raises(ValueError, match=rf"^model\.metrics\.f1: Mult.* {words}"):
        check_network(module, blobs())
    assert metric.update_count == 0


def labelled(targets):
    return blobs(dataset=Tensors((torch.randn(3, 16), targets)), partition=IID())


def test_metrics_and_losses_that_want_another_type_of_the_same_targets_say_so():
    network, labels = partial(MLP, 16, [4], 4), torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 0]])
    made = partial(FederatedModule, network, loss=nn.BCEWithLogitsLoss(), report="auroc")
    with pytest.raises(ValueError, match=r"BCEWithLogitsLoss cannot take .* convert them with \.float\(\)\.$"):
        check_network(made(metrics={"auroc": MultilabelAUROC(4)}), labelled(labels))
    with pytest.raises(ValueError, match=r"MultilabelAUROC cannot take .* set its validate_args to false"):
        check_network(made(metrics={"auroc": MultilabelAUROC(4)}), labelled(labels.float()))
    check_network(made(metrics={"auroc": MultilabelAUROC(4, validate_args=False)}), labelled(labels.float()))
    with pytest.raises(
        ValueError, match=r"MultilabelAUROC cannot take .* Set its arguments to fit, e\.g\. num_labels to 4"
    ):
        check_network(made(metrics={"auroc": MultilabelAUROC(3)}), labelled(labels.float()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": nn.functional.mse_loss}, "model.loss: got function; it must be an instance of Module."),
        ({"loss": nn.MSELoss}, "model.loss: got the class MSELoss, not an instance of it"),
        ({"metrics": {"f1": MulticlassF1Score}}, "model.metrics.f1: got the class MulticlassF1Score, not an instance"),
        (
            {"metrics": [MulticlassF1Score(8)]},
            "model.metrics: got list; it must be a dict of metrics by name, e.g. {'f",
        ),
    ],
)
def test_losses_and_metrics_are_objects(options, says):
    with pytest.raises(TypeError) as caught:
        FederatedModule(partial(MLP, 16, [4], 8), **options)
    assert str(caught.value).startswith(says)


class Recurrent(nn.Module):
    """Reads series whose last channel is 1 where they have values and 0 in the padding."""

    def __init__(self):
        super().__init__()
        self.lstm, self.decision = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, inputs):
        lengths = inputs[..., -1].sum(dim=1).long()
        packed = nn.utils.rnn.pack_padded_sequence(inputs[..., :-1], lengths, batch_first=True, enforce_sorted=False)
        return self.decision(self.lstm(packed)[1][0][-1])


def test_network_that_refuses_empty_series_is_tried_with_full_ones():
    series = Tensors((torch.randn(6, 5, 3), torch.tensor([0, 1] * 3)))
    check_network(FederatedModule(Recurrent), blobs(dataset=series))
    made_up = r"Fussy cannot take inputs .*lcfl tries it with two made-up inputs, all ones, which it must take"
    with pytest.raises(ValueError, match=made_up):
        check_network(FederatedModule(partial(Fussy, 16, 8), cut=None), blobs())


def test_network_for_integers_is_tried_with_integers():
    tokens = blobs(dataset=Tensors((torch.tensor([[5, 6, 7], [8, 9, 9]]), torch.tensor([0, 1]))))

    def network():
        return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))

    check_network(FederatedModule(network, cut=None), tokens)
    advice = r"\(RuntimeError: .*Or convert the inputs: \.float\(\) for numbers, \.long\(\) for tokens\.$"
    with pytest.raises(ValueError, match=advice):
        check_network(FederatedModule(partial(MLP, 3, [4], 2)), tokens)
    with pytest.raises(
        ValueError, match=r"MLP cannot take .* shape \(3,\) and type torch.int64, which Tensors provides"
    ):
        check_network(FederatedModule(partial(MLP, 3, [4], 2)), tokens)


# batches of one sample


def normed():
    return FederatedModule(Normed, partial(torch.optim.SGD, lr=0.1))


def sized(*sizes, **options):
    """Returns a data module of clients with these numbers of training samples."""
    inputs, targets, *_ = two_sided(size=sum(sizes))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    train = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return dealt(inputs, targets, train, **options)


OF_FOUR, OF_ONE, WHOLE = {"batch_size": 4}, {"batch_size": 1}, {"drop_last": True}


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((8, 9, 5), OF_FOUR, "4, .* 2 of 3 clients .* client 1 with 9 training .*: set data.drop_last=true"),
        ((8, 1), OF_FOUR, "1 of 2 clients .* client 1 with 1 training .*: a client with one training sample"),
        ((8, 1), OF_FOUR | WHOLE, "client 1 with 1 .*: a client with one training sample needs a data.p"),
        ((5, 1), OF_FOUR, "2 of 2 .* set data.drop_last=true or another data.batch_size; a client with one"),
        ((8, 6), OF_ONE, "1, .* 2 of 2 clients .* client 0 with 8 training .*: set data.batch_size to 2 or more"),
        ((8, 6), OF_ONE | WHOLE, "2 of 2 clients .* set data.batch_size to 2 or more"),
    ],
)
def test_batch_of_one_sample_that_the_network_cannot_take_is_refused(sizes, options, words):
    with pytest.raises(ValueError, match=rf"^data.batch_size: got .*{words}") as error:
        check_batches(normed(), sized(*sizes, **options))
    assert "Normed cannot train on that (Expected more than 1 value per channel when training" in str(error.value)


def test_a_part_of_a_clients_samples_may_end_with_a_batch_of_one():
    update = InitialisedTraining(epochs=1, share=0.8)
    with pytest.raises(ValueError, match=r"1 of 2 clients .* client 1 with 7 training samples"):
        check_batches(normed(), sized(8, 7, batch_size=4), update)
    check_batches(normed(), sized(8, 7, batch_size=4, drop_last=True), update)


def test_a_client_with_a_name_is_named():
    data = sized(8, 1, batch_size=4)
    data._loaded = data.samples, replace(data.population, names=("north", "ward_b"))
    with pytest.raises(ValueError, match=r"the first is client 1 \(ward_b\) with 1 training samples"):
        check_batches(normed(), data)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((8, 6, 2), OF_FOUR), ((9, 5), OF_FOUR | WHOLE), ((9, 5), {"batch_size": 3}), ((3, 2), OF_FOUR | WHOLE)],
)
def test_larger_batches_are_fine(sizes, options):
    check_batches(normed(), sized(*sizes, **options))


def test_a_network_that_takes_one_sample_may_get_it():
    class Spatial(nn.Sequential):
        """Two positions per channel are enough for batch normalisation."""

        def __init__(self):
            super().__init__(nn.Unflatten(1, (1, 2)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(2, 2))

    for module in (linear_module(), FederatedModule(Spatial, cut=None)):
        check_batches(module, sized(9, 1, batch_size=4))


def test_a_step_that_skips_one_sample_may_get_it():
    class Skips(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            return super().training_step(batch) if len(batch[0]) > 1 else self.network.decision.weight.sum() * 0

    check_batches(Skips(Normed), sized(9, batch_size=4))


def test_a_step_that_logs_is_tried_like_any_other():
    class Logs(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            self.log("seen", 1.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"data.batch_size: got 4"):
        check_batches(Logs(Normed), sized(9, batch_size=4))


def test_check_of_batches_does_not_change_module_or_generators():
    module = FederatedModule(lambda: nn.Sequential(Normed(), nn.Dropout()), cut=None).eval()
    before, state = module.layout.pack(module.network), torch.get_rng_state()
    with pytest.raises(ValueError, match="batch_size"):
        check_batches(module, sized(9, batch_size=4))
    assert torch.equal(module.layout.pack(module.network), before) and not module.training
    assert torch.equal(torch.get_rng_state(), state)


class NormedDigits(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_batch_normalisation_trains_or_is_refused_before_training(tmp_path, monkeypatch):
    """The 20 clients have 60 or 61 training images, so batches of 10 leave some clients with a batch of one."""
    module = FederatedModule(NormedDigits, partial(torch.optim.SGD, lr=0.1), cut=None)

    def digits(**options):
        return blobs(20, dataset=Digits(), partition=IID(), **{"batch_size": 10, **options})

    sizes = loaded(digits()).population.sizes.tolist()
    number, first = sizes.count(61), sizes.index(61)
    assert 0 < number < 20
    with pytest.raises(
        ValueError, match=rf"leaves {number} of 20 clients .* client {first} with 61 .*data.drop_last=true"
    ):
        fit(module, digits(), fedavg(epochs=1), tmp_path)
    assert not list(tmp_path.iterdir())
    for cure in ({"drop_last": True}, {"batch_size": 9}):
        watch = fit(module, digits(**cure), fedavg(epochs=1), tmp_path, rounds=2)
        assert watch.metrics["test/own_split/global/acc"] > 0.1 and watch.rows[-1]["train/failed_clients"] == 0
    for module_name in ("federation", "session"):
        monkeypatch.setattr(f"lcfl.federation.{module_name}.check_batches", lambda *_: None)
    with pytest.raises(ClientError, match="Expected more than 1 value per channel"):
        fit(module, digits(), fedavg(epochs=1), tmp_path)


def test_trial_run_does_not_fail_because_its_clients_are_small(tmp_path):
    """Eight random inputs per client leave 5 for training: one batch of 4 and one of a single sample."""
    data = blobs(4, batch_size=4)
    assert loaded(data.random_like()).population.sizes.tolist() == [5] * 4
    module = FederatedModule(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), cut=None)
    fit(module, data, fedavg(), tmp_path, fast_dev_run=True)


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


def test_a_loss_that_is_not_one_number_is_refused():
    module = blobs_module(loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(
        ValueError, match=r"^model\.loss: CrossEntropyLoss gives shape \[2\] for two samples; it must give one"
    ):
        check_network(module, blobs())


class Squared(nn.Module):
    """A loss of the user's own, which broadcasts."""

    def forward(self, outputs, targets):
        return (outputs - targets).square().mean()


@pytest.mark.parametrize(("shape", "warns"), [((2, 1), True), ((2,), False)])
def test_a_loss_of_ones_own_that_may_broadcast_is_warned_about(shape, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check_loss(Squared(), torch.zeros(2), torch.zeros(shape))
    assert any("Squared got outputs [2] and targets [2, 1]. Unless" in str(each.message) for each in caught) == warns


@pytest.mark.parametrize(
    ("local_update", "optimizer", "words"),
    [
        (DynamicTraining(1), None, "DynamicTraining is one half of FedDyn, and ServerDynamics is the other"),
        (
            LocalTraining(1, start="centre"),
            ServerDynamics(),
            "ServerDynamics is one half of FedDyn, and DynamicTraining",
        ),
        (DynamicTraining(1), ServerDynamics(), None),
    ],
)
def test_half_of_feddyn_is_warned_about(local_update, optimizer, words):
    method = Method(local_update, GlobalReference(), GlobalMean("uniform", optimizer=optimizer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(cluster_weight=0.1), 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


def test_feddyn_with_weights_by_samples_is_warned_about():
    method = Method(DynamicTraining(1), GlobalReference(), GlobalMean("samples", optimizer=ServerDynamics()))
    with pytest.warns(UserWarning, match="with weights=samples, FedDyn converges to a wrong model"):
        check_method(method, linear_module(cluster_weight=0.1), 5)


@pytest.mark.parametrize(
    ("transforms", "rule", "words"),
    [
        (
            [LowRankCompression(0.9)],
            None,
            "exchange: the transform LowRankCompression makes FedDyn converge to a wrong",
        ),
        ([], CoordinateMedian(), "method.aggregation: the rule CoordinateMedian makes FedDyn converge to a wrong"),
    ],
)
def test_feddyn_whose_server_sees_other_changes_is_warned_about(transforms, rule, words):
    mean = GlobalMean("uniform", optimizer=ServerDynamics(), rule=rule)
    method = Method(DynamicTraining(1), GlobalReference(transforms=transforms), mean)
    with pytest.warns(UserWarning, match=words):
        check_method(method, linear_module(cluster_weight=0.1), 5)


def test_pulls_that_a_local_update_does_not_have_are_warned_about():
    method = Method(MetaTraining(steps=1), ClusterReference(), ClusterMean("participants", "participants"))
    with pytest.warns(UserWarning, match=r"cluster_weight \(mu\) = 0.5 has no effect: MetaTraining has no pulls"):
        check_method(method, linear_module(cluster_weight=0.5), 5)


@pytest.mark.parametrize(
    ("exchange", "start", "warns"),
    [(ClusterReference(), "own", True), (ClusterReference(), "centre", False), (ClusterModel(), "own", False)],
)
def test_updates_from_different_models_are_warned_about(exchange, start, warns):
    mean, clustering = ClusterMean("participants", "participants"), HierarchicalUpdates(2, num_clusters=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(Method(LocalTraining(1, start=start), exchange, mean, [clustering]), linear_module(), 5)
    assert any("HierarchicalUpdates compares updates from the common" in str(each.message) for each in caught) == warns


LOCAL, BOTH = LocalTraining(1), ("participants", "participants")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Method(LOCAL, FullModel(), ClusterMean(*BOTH, optimizer=ServerAdam())), "Use GlobalMean instead"),
        (Method(LOCAL, FullModel(), GlobalMean(optimizer=ServerAdam())), None),
        (Method(LOCAL, FullModel(), ClusterMean(*BOTH, rule=CoordinateMedian())), None),
        (Method(LOCAL, AttentiveReference(), GlobalMean(optimizer=ServerAdam())), "AttentiveReference sends means of"),
        (Method(LOCAL, AttentiveReference(), GlobalMean(rule=CoordinateMedian())), "rule=CoordinateMedian has no"),
        (
            Method(LOCAL, AttentiveReference(), ClusterMean(*BOTH), [LowRankCosine(2)]),
            "no client trains the model of its cluster",
        ),
        (Method(LOCAL, NoExchange(), NoAggregation()), None),
        (
            Method(FineTunedTraining(1, fine_tuning_steps=1), FullModel(), GlobalMean()),
            "no client fine-tunes its model with FullModel",
        ),
        (Method(FineTunedTraining(1, fine_tuning_steps=1), AdaptedModel(), GlobalMean()), None),
    ],
)
def test_parts_that_no_client_notices_are_warned_about(method, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(), 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


@pytest.mark.parametrize(
    ("clustering", "words"),
    [
        (HierarchicalUpdates(after=10), "HierarchicalUpdates begins in round 10, but the run has 10 rounds"),
        (HierarchicalUpdates(after=9), None),
        (ClusterNumberTuning(start=30), "ClusterNumberTuning begins in round 30"),
        (RecursiveBipartition(min_round=20, stale_max=5), "RecursiveBipartition begins in round 20"),
        (
            RecursiveBipartition(min_round=2, stale_max=0),
            "only 3 of 5 clients take part in a round, but a",
        ),
        (RecursiveBipartition(min_round=2, stale_max=5), None),
        (GreedyIncentive(once=True), "only 3 of 5 clients take part in a round, but with once=true"),
        (GreedyIncentive(), None),
    ],
)
def test_clusterings_that_never_cluster_are_warned_about(clustering, words):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_idle_clusterings([clustering], 10, 3, 5)
    assert [bool(words) and words in str(each.message) for each in caught] == [True] * bool(words)


@pytest.mark.parametrize(("taken", "tested"), list(product(("uniform", "samples"), repeat=2)))
def test_a_bipartition_that_tests_another_mean_is_warned_about(taken, tested):
    mean = ClusterMean("participants", "participants", weights=taken)
    method = Method(LocalTraining(1), ClusterModel(), mean, [RecursiveBipartition(weights=tested)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_method(method, linear_module(), 5)
    assert [f"tests a mean with weights={tested}" in str(each.message) for each in caught] == [True] * (taken != tested)


def test_a_clustering_that_needs_everyone_is_not_warned_about_if_everyone_takes_part():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_clusterings([RecursiveBipartition(min_round=2, stale_max=0)], 10, 5, 5)
        warn_of_idle_clusterings([LowRankCosine()], 0, 3, 5)  # its offline round takes place


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
