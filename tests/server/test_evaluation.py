"""Evaluation: every kind of model is the right model, measured on the right samples."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torchmetrics import Metric

from lcfl.core.clients import ClientState
from lcfl.data.views import Relabelling, View
from lcfl.distributed.client_output import ClientError
from lcfl.distributed.rank_transport import RankTransport
from lcfl.distributed.ranks import Ranks
from lcfl.distributed.stop_flag import StopFlag
from lcfl.distributed.worker import ScoringTask, Worker
from lcfl.methods.local import LocalTraining
from lcfl.methods.local.training import LocalData
from lcfl.models.module import FederatedModule
from lcfl.server.evaluation import Evaluator, evaluated_metrics
from lcfl.server.schedule import Schedule
from tests.helpers.builders import alone, dealt, engine, fedavg, lcfed, linear, linear_module, state_of, two_sided

INPUTS, TARGETS, TRAIN, TEST = two_sided(num_clients=4, size=10, seed=3)
VAL = [share[-2:] for share in TRAIN]
TRAIN = [share[:-2] for share in TRAIN]
VIEW = [np.concatenate(TEST), TEST[0], TEST[1], np.concatenate(TEST[:2])]


def data(**options):
    options = {"val": VAL, "test": TEST, "label_view": VIEW, **options}
    return dealt(INPUTS, TARGETS, TRAIN, batch_size=3, **options)


def models(number, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(number, 17, generator=draw)


def state():
    """Returns a state with clusters {0, 2} and {1, 3}. Clients 0 to 2 have taken part, 3 has not. All models differ."""
    result = state_of(list(models(4, 0)), [0, 1, 0, 1], models(2, 1), [True, True, True, False], models(1, 2)[0])
    result.global_model = models(1, 3)[0]
    for client in range(4):
        result.clients[client] = replace(result.clients[client], consumed=5 * client)
    result.round = 7
    return result


def evaluator(method, population=None, module=None, **options):
    population = population or data(**options)
    module = module or linear_module(lr=0.1, cluster_weight=0.5, global_weight=0.5)
    fabric = Fabric(accelerator="cpu", devices=1)
    worker = Worker(fabric, module, population, method, seed=11)
    transport = RankTransport(Ranks(fabric, worker.run_all, StopFlag()), worker)
    return Evaluator(transport, method, population, module, Schedule(1, 4, 0), seed=0)


def by_hand(model, indices):
    """Returns loss and accuracy of the linear network, computed in numpy."""
    w = model.double().numpy()
    middle = INPUTS[indices].astype(np.float32) @ w[:6].reshape(3, 2).T + w[6:9]
    scores = middle @ w[9:15].reshape(2, 3).T + w[15:]
    targets = TARGETS[indices]
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(targets)), targets]
    return losses.mean(), (scores.argmax(axis=1) == targets).mean()


def assert_measured(found, name, owners):
    """Checks the metrics under `name`; `owners` maps each client to (model, indices)."""
    loss, acc = found.by_name[f"{name}/loss"], found.by_name[f"{name}/acc"]
    assert loss.clients.tolist() == acc.clients.tolist() == sorted(owners)
    assert acc.num_samples.tolist() == [len(owners[i][1]) for i in sorted(owners)]
    expected = [by_hand(*owners[i]) for i in sorted(owners)]
    np.testing.assert_allclose(loss.values, [each[0] for each in expected], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(acc.values, [each[1] for each in expected], atol=1e-7)


SETS = {"val/own_split": VAL, "test/own_split": TEST, "test/label_view": VIEW}


@pytest.mark.parametrize("name", SETS)
def test_personal_cluster_and_global(name):
    s = state()
    found = evaluator(lcfed())(s, ["personal", "cluster", "global"])
    sets = SETS[name]
    own = {i: (s.clients[i].model, sets[i]) for i in range(3)} | {3: (s.centres[1], sets[3])}
    assert_measured(found, f"{name}/personal", own)
    assert_measured(found, f"{name}/cluster", {i: (s.centres[i % 2], sets[i]) for i in range(4)})
    assert_measured(found, f"{name}/global", {i: (s.global_model, sets[i]) for i in range(4)})


def test_only_requested_kinds_and_stages_are_measured():
    found = evaluator(lcfed())(state(), ["cluster"], stages=["val"])
    assert list(found.by_name) == ["val/own_split/cluster/loss", "val/own_split/cluster/acc"]


@pytest.mark.parametrize(("method", "start"), [(fedavg, "global"), (alone, "own"), (lcfed, "own")])
def test_after_local_is_one_local_run_from_what_the_server_would_send(method, start):
    s = state()
    before = [s.clients[i] for i in range(4)]
    method = method()
    found = evaluator(method)(s, ["after_local"], stages=["test"])
    module = linear_module(lr=0.1, cluster_weight=0.5, global_weight=0.5)
    trained = {}
    for client in range(4):
        local = LocalData(TRAIN[client], 3, 11, client)
        begin = ClientState(s.global_model if start == "global" else s.clients[client].model, 5 * client)
        downlink = method.exchange.down(s, client, module.layout)
        trained[client] = LocalTraining(steps=3)(begin, downlink, local, engine(module, data())).model
    assert_measured(found, "test/own_split/after_local", {i: (trained[i], TEST[i]) for i in range(4)})
    assert [s.clients[i] for i in range(4)] == before
    assert not torch.equal(trained[0], s.clients[0].model)


def test_clients_without_samples_have_no_value():
    nobody = [[]] * 4
    sets = {"val": [VAL[0], [], [], []], "test": [[], TEST[1], [], TEST[3]], "label_view": nobody}
    s = state()
    found = evaluator(lcfed(), **sets)(s, ["personal"])
    assert_measured(found, "val/own_split/personal", {0: (s.clients[0].model, VAL[0])})
    assert_measured(found, "test/own_split/personal", {1: (s.clients[1].model, TEST[1]), 3: (s.centres[1], TEST[3])})
    assert not any(name.startswith("test/label_view") for name in found.by_name)


def test_evaluation_without_any_samples_is_empty():
    found = evaluator(lcfed(), val=[[]] * 4, test=[[]] * 4, label_view=[[]] * 4)(state(), ["personal", "after_local"])
    assert found.by_name == {}


def test_sharing_a_model_does_not_change_metrics():
    s = state()
    shared = evaluator(lcfed())(s, ["cluster"])
    copies = state()
    copies.centres = copies.centres[copies.assignment]  # every client in a separate cluster with the same centre
    copies.assignment = torch.arange(4)
    apart = evaluator(lcfed())(copies, ["cluster"])
    assert shared.by_name.keys() == apart.by_name.keys()
    for name, metric in shared.by_name.items():
        np.testing.assert_allclose(metric.values, apart.by_name[name].values, rtol=1e-6)
        assert metric.clients.tolist() == apart.by_name[name].clients.tolist()


def counting(scored):
    """Returns a linear module that appends the size of every batch to `scored`."""

    class Counting(FederatedModule):
        def forward(self, inputs):
            scored.append(len(inputs))
            return super().forward(inputs)

    return Counting(linear)


def test_shared_model_scores_a_sample_once():
    scored = []
    evaluator(lcfed(), module=counting(scored))(state(), ["global"], stages=["test"])
    assert scored == [len(np.unique(np.concatenate([*TEST, *VIEW])))]


def test_shared_model_scores_a_sample_once_for_each_view():
    scored, population, s = [], data(), state()
    examples, people = population._loaded
    views = [(View(),), (Relabelling((1, 0)),), (View(),), (Relabelling((1, 0)),)]
    population._loaded = examples, replace(people, views=views)
    found = evaluator(lcfed(), population, counting(scored))(s, ["global"], stages=["test"])
    assert sorted(scored) == sorted(
        len(np.unique(np.concatenate([each for i in pair for each in (TEST[i], VIEW[i])]))) for pair in ((0, 2), (1, 3))
    )
    for name, sets in (("own_split", TEST), ("label_view", VIEW)):
        values = found.by_name[f"test/{name}/global/acc"].values
        for client in range(4):
            acc = by_hand(s.global_model, sets[client])[1]
            assert values[client] == pytest.approx(1 - acc if client % 2 else acc)


def test_plain_protocol_applies_no_client_transform():
    population, s = data(), state()
    examples, people = population._loaded
    tests = {"global": VIEW, "global_plain": VIEW}
    population._loaded = examples, replace(people, test=tests, views=[(Relabelling((1, 0)),)] * 4)
    population.protocols = list(tests)
    found = evaluator(lcfed(), population)(s, ["cluster"], stages=["test"])
    seen, plain = (found.by_name[f"test/{name}/cluster/acc"].values for name in tests)
    assert_measured(found, "test/global_plain/cluster", {i: (s.centres[i % 2], VIEW[i]) for i in range(4)})
    np.testing.assert_allclose(seen, 1 - plain, atol=1e-6)


def test_evaluation_does_not_change_the_random_generators():
    measure = evaluator(lcfed())
    before = torch.get_rng_state()
    measure(state(), ["personal", "after_local"])
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_layers_are_off_during_evaluation():
    def noisy():
        network = linear_module().make_network()
        network.embedding = torch.nn.Sequential(network.embedding, torch.nn.Dropout(0.5))
        return network

    module = FederatedModule(noisy)
    s = state()
    found = evaluator(lcfed(), module=module)(s, ["global"], stages=["val"])
    assert_measured(found, "val/own_split/global", {i: (s.global_model, VAL[i]) for i in range(4)})


def test_many_models_are_measured_in_parts(monkeypatch):
    whole = evaluator(lcfed())(state(), ["personal", "after_local"])
    monkeypatch.setattr("lcfl.distributed.rank_transport.TASKS_AT_A_TIME", 3)
    by_parts = evaluator(lcfed())
    held, ranks = [], by_parts.transport._ranks
    original = ranks.map
    monkeypatch.setattr(ranks, "map", lambda tasks, work: held.append(len(tasks)) or original(tasks, work))
    parts = by_parts(state(), ["personal", "after_local"])
    assert whole.summary() == parts.summary()
    assert held == [3, 1, 3, 1, 3, 1][: len(held)] and len(held) == 6  # personal; local runs and measurements


def test_long_sets_are_scored_in_batches(monkeypatch):
    whole = evaluator(lcfed())(state(), ["personal"])
    monkeypatch.setattr("lcfl.engines.sequential.SCORED_BATCH", 3)
    assert evaluator(lcfed())(state(), ["personal"]).summary() == pytest.approx(whole.summary(), rel=1e-5)


def test_set_in_any_order_is_measured_on_its_own_samples():
    population, s = data(), state()
    module = linear_module()
    worker = Worker(Fabric(accelerator="cpu", devices=1), module, population, lcfed(), seed=0)
    sets = (np.array([9, 2, 30, 2]), np.array([30, 1]))
    for values, indices in zip(worker.score(ScoringTask(s.global_model, sets, (0,))), sets, strict=True):
        loss, acc = by_hand(s.global_model, indices)
        assert values["loss"] == pytest.approx(loss, rel=1e-4)
        assert values["acc"] == pytest.approx(acc)


def test_error_of_a_client_names_client_and_round():
    class Broken(FederatedModule):
        def training_step(self, batch, batch_idx=0):
            raise KeyError("oh")

    module = Broken(linear_module().make_network)
    with pytest.raises(ClientError, match=r"client 0, round 7, rank 0: KeyError: 'oh'") as error:
        evaluator(lcfed(), module=module)(state(), ["after_local"])
    assert "training_step" in "".join(error.value.__notes__)


def test_only_chosen_clients_are_measured():
    few = replace(evaluator(lcfed()), schedule=Schedule(1, 4, 0, most_clients=2))
    assert few(state(), ["cluster"], ["val"]).by_name["val/own_split/cluster/acc"].clients.tolist() == [0, 1]


def test_warning_names_diverged_models():
    s = state()
    s.clients[2] = replace(s.clients[2], model=torch.full((17,), torch.nan))
    with pytest.warns(UserWarning, match=r"personal/loss is not finite for 1 of 4 clients \(2\).*learning") as caught:
        found = evaluator(lcfed())(s, ["personal", "cluster"])
    names = sorted(str(warning.message).split()[0] for warning in caught)
    assert names == [f"{name}/personal/loss" for name in ("test/label_view", "test/own_split", "val/own_split")]
    assert np.isnan(found.by_name["test/own_split/personal/loss"].values).tolist() == [False, False, True, False]


ONE_CLASS_EACH = [np.flatnonzero(client % 2 == TARGETS)[:3] for client in range(4)]


class ShareOf(Metric):
    """The share of a label; NaN if there is none."""

    higher_is_better = True

    def __init__(self, label):
        super().__init__()
        self.label = label
        self.add_state("share", torch.tensor(0.0))

    def update(self, outputs, targets):
        self.share = (targets == self.label).float().mean()

    def compute(self):
        return torch.where(self.share > 0, self.share, torch.nan)


@pytest.mark.parametrize(("label", "defined"), [(1, [1, 3]), (2, [])])
def test_clients_for_which_a_metric_is_not_defined_do_not_count(label, defined):
    module = linear_module(metrics={"share": ShareOf(label)})
    sides = data(test=ONE_CLASS_EACH)
    with pytest.warns(UserWarning, match=f"^share: not defined for samples of {4 - len(defined)} clients"):
        evaluation = evaluator(lcfed(), sides, module=module)(state(), ["personal"], ["test"])
    metric = evaluation.by_name["test/own_split/personal/share"]
    assert metric.clients.tolist() == (defined or [0, 1, 2, 3])
    assert evaluation.summary()["test/own_split/personal/share"] == pytest.approx(1.0 if defined else nan, nan_ok=True)
    assert evaluation.by_name["test/own_split/personal/acc"].clients.tolist() == [0, 1, 2, 3]


def test_a_warning_names_the_set_in_which_a_metric_is_not_defined():
    module = linear_module(metrics={"share": ShareOf(1)})
    sides = data(test=ONE_CLASS_EACH, val=ONE_CLASS_EACH[::-1])
    with pytest.warns(UserWarning, match="^share: not defined") as caught:
        evaluator(lcfed(), sides, module=module)(state(), ["personal"])
    assert sorted(str(each.message).partition("clients ")[2][:24] for each in caught) == [
        "(0, 2) in test/own_split",
        "(1, 3) in val/own_split,",
    ]


def test_a_client_whose_targets_are_all_ignored_has_no_metrics():
    ignoring = linear_module(loss=torch.nn.CrossEntropyLoss(ignore_index=0))
    sides = data(test=ONE_CLASS_EACH)
    with pytest.warns(UserWarning, match="^loss and acc: not defined for samples of 2 clients .0, 2. in test/own"):
        evaluation = evaluator(lcfed(), sides, module=ignoring)(state(), ["personal"], ["test"])
    for metric in ("loss", "acc"):
        assert evaluation.by_name[f"test/own_split/personal/{metric}"].clients.tolist() == [1, 3]


def test_evaluated_metrics_are_those_that_an_evaluation_logs():
    module = linear_module()
    for options in ({}, {"val": [[]] * 4}):
        found = evaluator(lcfed(), **options)(state(), lcfed().exchange.reported)
        assert list(evaluated_metrics(module, data(**options), lcfed().exchange.reported, [0])) == sorted(
            found.summary()
        )


def test_metrics_are_known_whatever_device_the_module_is_on():
    """An engine moves the module to its device. The check and the trivial baseline compute on a CPU."""
    module, expected = linear_module(report="loss"), linear_module(report="loss")
    with torch.device("meta"):
        moved = module.to("meta")
    moved.cpu = lambda: expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("copy.deepcopy", lambda given: given)
        assert evaluated_metrics(moved, data(), ["global"], [0]) == evaluated_metrics(expected, data(), ["global"], [0])
