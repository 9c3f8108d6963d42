"""What is tried before training: the network, the loss, the metrics, and batches of one sample."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MultilabelAUROC, MultilabelF1Score
from torchmetrics.segmentation import DiceScore

from lcfl.data.datasets import Digits, Tensors
from lcfl.data.partition import IID
from lcfl.distributed.client_output import ClientError
from lcfl.federation.trial import _check_loss, check_batches, check_network
from lcfl.methods.local import InitialisedTraining
from lcfl.models import MLP, LeNet5
from lcfl.models.module import FederatedModule
from tests.helpers.builders import (
    Normed,
    blobs,
    blobs_module,
    dealt,
    fedavg,
    fit,
    linear_module,
    loaded,
    two_sided,
)


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


def test_a_metric_is_not_told_to_take_the_number_of_classes_that_it_has():
    module = FederatedModule(partial(MLP, 16, [4], 8), metrics={"dice": DiceScore(8, input_format="index")})
    with pytest.raises(ValueError, match=r"\. Set its arguments to fit, or report another metric \(model\.report\)\.$"):
        check_network(module, blobs())


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
        (
            {"loss": nn.functional.mse_loss},
            "model.loss: got function; it must be an instance of Module. Wrap a function: a class L(nn.Module) whose",
        ),
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


def test_warns_of_metrics_of_probabilities_beside_metrics_of_logits_and_of_a_loss_that_is_a_sum():
    metrics = {"f1": MultilabelF1Score(4), "error": MeanAbsoluteError()}
    network, loss = partial(MLP, 16, [4], 4), nn.BCEWithLogitsLoss()
    module = FederatedModule(network, loss=loss, metrics=metrics, report="f1")
    targets = torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 0]])
    with pytest.warns(UserWarning, match=r"model\.metrics: f1 would read logits from 0 to 1 as probabilities"):
        check_network(module, labelled(targets))
    with pytest.warns(UserWarning, match=r"model\.loss: MSELoss is a sum, which grows with the number of samples"):
        check_network(FederatedModule(network, loss=nn.MSELoss(reduction="sum"), report="loss"), labelled(targets))
