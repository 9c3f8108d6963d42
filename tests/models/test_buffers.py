"""BatchNorm's statistics under each buffer policy in every kind of model, computed by hand."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import lcfl
from lcfl.core.clients import ClientState
from lcfl.core.messages import Uplink
from lcfl.data.datasets import Tensors
from lcfl.data.partition import IID
from lcfl.distributed.tasks import TrainingResult
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.exchange import CentreAndEmbedding
from lcfl.methods.local.training import LocalOutput, LocalTraining
from lcfl.methods.method import Method
from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from lcfl.runs import checkpoint
from tests.helpers.bits import assert_same_state
from tests.helpers.builders import (
    Normed,
    NormedMLP,
    alone,
    blobs,
    blobs_module,
    dealt,
    engine,
    fedac,
    fedala,
    fedavg,
    fedbabu,
    fedbn,
    fednova,
    fedper,
    fedprox,
    fedrep,
    fit,
    lcfed,
    lg_fedavg,
    loaded,
    per_fedavg,
)
from tests.helpers.checkpoints import full_state
from tests.helpers.clustered import cfl, cgpfl, cgpfl_prox, clove, fedgroup, fesem, fl_hc, ifca, pacfl
from tests.helpers.commandline import KINDS
from tests.helpers.fits import assert_same_run
from tests.helpers.fits import fit as command
from tests.methods.clustering.test_one_shot import fedclust
from tests.methods.test_ascfl import ascfl

POLICIES = ("average", "keep_server", "local")
P, Q = 6, 3


class Scaled(SplitNetwork):
    """x -> W (x - mean) / sqrt(var + 1e-5) + b for one feature and two classes."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 2))


def module(policy, network=Scaled, lr=0.0):
    return FederatedModule(network, partial(torch.optim.SGD, lr=lr), buffer_policy=policy)


def data():
    """Returns batches of two. Client 0 has 0 and 2 (mean 1, variance 2), client 1 has 6 four times in two batches."""
    inputs = [[0.0], [2], [6], [6], [6], [6], [1], [5]]
    return dealt(inputs, [0, 1, 0, 1, 0, 1, 1, 0], [[0, 1], [2, 3, 4, 5]], test=[[6], [7]], batch_size=2)


def losses(made, norms):
    """Returns the loss of each client's only test sample with the initial parameters and these (mean, var)."""
    *_, w0, w1, b0, b1 = made.initial_model(0)[:P].tolist()
    values = []
    for (mean, var), x, label in zip(norms, (1, 5), (1, 0), strict=True):
        scores = np.array([w0, w1]) * (x - mean) / np.sqrt(var + 1e-5) + [b0, b1]
        values.append(np.log(np.exp(scores).sum()) - scores[label])
    return values


# Mean, variance and counter of each client after one round of one epoch without learning. They start at 0, 1 and 0 and
# move halfway to the statistics of each batch. Client 1 has two batches. TWICE holds the values after one more epoch.
ONCE = [[0.5, 1.5, 1], [4.5, 0.25, 2]]
TWICE = [[0.75, 1.75, 2], [5.625, 0.0625, 4]]
WEIGHTED = [(2 * 0.5 + 4 * 4.5) / 6, (2 * 1.5 + 4 * 0.25) / 6, 2]
UNIFORM = [2.5, 0.875, 2]


def one_more(start):
    """Returns both clients' statistics one epoch after they started from the same statistics."""
    mean, var, count = start
    return [[(mean + 1) / 2, (var + 2) / 2, count + 1], [(mean + 18) / 4, var / 4, count + 2]]


def expected(policy, kind, merged):
    """Returns the statistics for evaluating each client's model of a kind; `merged` are those of the server's mean."""
    if policy == "local":
        return TWICE if kind == "after_local" else ONCE
    if policy == "keep_server":
        return [[0, 1, 0]] * 2
    if kind == "personal":
        return ONCE
    return one_more(merged) if kind == "after_local" else [merged] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_fedavg_computed_by_hand(tmp_path, policy):
    made = module(policy)
    watch = fit(made, data(), fedavg(epochs=1), tmp_path, final_models=None)
    state, exchanged = watch.state, policy == "average"
    assert len(state.global_model) == made.layout.size == P + Q * exchanged
    assert watch.rows[0]["comm/total_bytes"] == 2 * 2 * 4 * (P + Q * exchanged)
    if exchanged:
        np.testing.assert_allclose(state.global_model[P:], WEIGHTED, rtol=1e-6)
        assert state.clients[0].buffers is None
    elif policy == "keep_server":
        assert state.clients[0].buffers is state.clients[1].buffers is state.clients.blank.buffers
        assert state.clients.blank.buffers.tolist() == [0, 1, 0]
    else:
        assert [state.clients[i].buffers.tolist() for i in (0, 1)] == ONCE
        assert state.clients[0].model is None  # the client keeps nothing else
    for kind in ("global", "after_local"):
        wanted = losses(made, [row[:2] for row in expected(policy, kind, WEIGHTED)])
        assert watch.metrics[f"test/own_split/{kind}/loss"] == pytest.approx(np.mean(wanted), rel=1e-5), kind


@pytest.mark.parametrize("policy", POLICIES)
def test_lcfed_with_one_cluster_computed_by_hand(tmp_path, policy):
    made = module(policy)
    method = Method(LocalTraining(epochs=1), CentreAndEmbedding(), ClusterMean())
    watch = fit(made, data(), method, tmp_path, final_models=None)
    assert torch.equal(watch.state.global_model[:P], made.initial_model(0)[:P])
    for kind in ("personal", "cluster", "global"):
        wanted = losses(made, [row[:2] for row in expected(policy, kind, UNIFORM)])
        assert watch.metrics[f"test/own_split/{kind}/loss"] == pytest.approx(np.mean(wanted), rel=1e-5), kind


@pytest.mark.parametrize("policy", POLICIES)
def test_local_computed_by_hand(tmp_path, policy):
    """The second round continues with the statistics of the first, unless the server keeps them."""
    made = module(policy)
    watch = fit(made, data(), alone(epochs=1), tmp_path, rounds=2)
    states = [watch.state.clients[i] for i in (0, 1)]
    if policy == "average":
        assert [state.model[P:].tolist() for state in states] == TWICE
    else:
        assert [len(state.model) for state in states] == [P, P]
        wanted = TWICE if policy == "local" else [[0, 1, 0]] * 2
        assert [state.buffers.tolist() for state in states] == wanted
    statistics = [[0, 1]] * 2 if policy == "keep_server" else [row[:2] for row in TWICE]
    assert watch.metrics["test/own_split/personal/loss"] == pytest.approx(np.mean(losses(made, statistics)), rel=1e-5)
    assert watch.rows[0]["comm/total_bytes"] == 0


METHODS = {  # and the number of batches that a participation trains on
    "fedprox": (fedprox(steps=2), 2),
    "fednova": (fednova(steps=2), 2),
    "fedper": (fedper(steps=2), 2),
    "fedrep": (fedrep(steps=2, head_steps=3), 5),
    "fedbabu": (fedbabu(steps=2), 2),
    "fedbn": (fedbn(["embedding.1"], steps=2), 2),
    "lg_fedavg": (lg_fedavg(1, steps=2), 2),
    "per_fedavg": (per_fedavg(steps=2), 4),
    "per_fedavg, exact": (per_fedavg(steps=2, hessian=True), 4),  # the batch for the Hessian changes no buffers
    "ifca": (ifca(2), 3),
    "clove": (clove(2), 3),
    "fesem": (fesem(3), 3),
    "cfl": (cfl(eps1=1e9, eps2=0.0, min_round=0, stale_max=9), 3),
    "fedgroup": (fedgroup(4, pretrain_steps=3, clients_per_group=1), 3),
    "fl_hc": (fl_hc(1, num_clusters=3), 3),
    "pacfl": (pacfl(), 3),
    "cgpfl": (cgpfl(3), 15),  # three batches, five times each
    "cgpfl_prox": (cgpfl_prox(3), 3),
    "lcfed": (lcfed(2), 3),
    "fedac": (fedac(2), 3),
    "ascfl": (ascfl(local=LocalTraining(steps=3)), 3),
    "fedclust": (fedclust(), 3),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in METHODS]
)
def test_every_method_follows_the_policy(tmp_path, name, policy):
    method, batches = METHODS[name]
    watch = fit(module(policy, NormedMLP, 0.1), blobs(drop_last=True), method, tmp_path, rounds=2, clients_per_round=3)
    state, times = watch.state, Counter(client for sampled in watch.sampled.values() for client in sampled)
    assert len(state.global_model) == state.centres.shape[1] == watch.server.layout.size
    for client in range(12):
        own = state.clients[client].buffers
        if policy == "local":
            assert own[-1] == batches * times[client]  # the counter of batches seen; a warm-up round leaves none behind
        else:
            assert own is state.clients.blank.buffers
    if policy == "average":
        kept_below, pre_trained = name in ("lg_fedavg", "fedbn"), name == "fedgroup"
        assert state.global_model[-1] == (0 if kept_below else (2 + pre_trained) * batches)
    assert all(np.isfinite(value) for name, value in watch.metrics.items() if name.endswith("loss"))


def test_a_client_that_never_took_part_has_the_initial_buffers(tmp_path):
    watch = fit(module("local", NormedMLP, 0.1), blobs(drop_last=True), fedavg(), tmp_path, clients_per_round=3)
    (sampled,) = watch.sampled.values()
    initial = [0.0] * 8 + [1.0] * 8 + [0.0]
    for client in range(12):
        buffers = watch.state.clients[client].buffers
        assert (buffers.tolist() == initial) == (client not in sampled)
        assert (buffers is watch.state.clients.blank.buffers) == (client not in sampled)


def test_initial_buffers_can_be_drawn_or_read_from_a_file(tmp_path):
    class Random(SplitNetwork):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), nn.Linear(3, 2))
            self.register_buffer("features", torch.randn(4))

    made = module("local", Random)
    assert torch.equal(made.initial_buffers(3), module("average", Random).initial_model(3)[-4:])
    assert not torch.equal(made.initial_buffers(3), made.initial_buffers(4))
    trained = Normed()
    trained(torch.randn(8, 2))
    torch.save(trained.state_dict(), tmp_path / "start.pt")
    modules = [FederatedModule(Normed, init_from=tmp_path / "start.pt", buffer_policy=each) for each in POLICIES]
    assert modules[0].initial_buffers(0) is None and len({each.initial_fingerprint for each in modules}) == 1
    for each in modules[1:]:
        assert torch.equal(torch.cat([each.initial_model(0), each.initial_buffers(0)]), modules[0].initial_model(0))


def test_exported_models_have_the_buffers_of_the_client(tmp_path):
    federation = lcfl.Federation(1, devices=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    run = federation.fit(module("local"), data(), fedavg(epochs=1))
    norms = [run.model("global", client=client).embedding for client in (0, 1)] + [run.model("global").embedding]
    found = [[norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()] for norm in norms]
    assert found == [*ONCE, [0, 1, 0]]


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        ("local", "lcfed"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("keep_server", "lcfed"), ("average", "lcfed"), ("local", "fedavg"), ("local", "local"))
        ),
    ],
)
def test_the_number_of_ranks_and_a_resumption_do_not_change_the_bits(tmp_path, policy, method):
    network = "model: {network: {class_path: tests.helpers.builders.NormedMLP}}"
    words = ("-c", network, f"--model.buffer_policy={policy}", "--data.drop_last=true")
    whole = command(tmp_path / "whole", method, 1, 4, *words).path
    command(tmp_path / "parts", method, 2, 2, *words)
    assert_same_run(whole, command(tmp_path / "parts", method, 1, 4, *words, "--ckpt_path=last").path)
    if method == "lcfed":
        other = "--model.buffer_policy=" + ("local" if policy != "local" else "average")
        named = rf"model.buffer_policy: the checkpoint has '{policy}', this run '{other.rpartition('=')[2]}'"
        with pytest.raises(checkpoint.CheckpointError, match=named):
            command(tmp_path / "parts", method, 1, 5, *words, other, "--ckpt_path=last")


@pytest.mark.parametrize("own", [(), (1,), (0, 1, 4)])
def test_checkpoints_keep_the_buffers_of_clients(tmp_path, own):
    state = full_state()
    state.clients.blank = ClientState(state.initial, buffers=torch.tensor([0.0, 1.0]))
    for client in (0, 1, 4):
        buffers = torch.tensor([client, -0.0]) if client in own else None
        state.clients[client] = ClientState(state.clients[client].model, client, buffers)
    back = checkpoint.read(checkpoint.write(tmp_path, state, {})).state
    assert_same_state(state, back)
    assert back.clients.blank.buffers.tolist() == [0, 1]
    assert [i for i in range(5) if back.clients[i].buffers is not back.clients.blank.buffers] == list(own)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.ones(2, dtype=torch.complex64), "it is complex"),
        (torch.tensor([2**31 - 1]), "integers that float32 cannot hold"),
        (torch.tensor([0.0, -torch.inf]), "values that are not finite"),
        (torch.tensor([1e300], dtype=torch.float64), "values that are not finite in float32"),
        (torch.zeros(1).expand(3), "its entries share memory"),
    ],
)
def test_a_buffer_that_no_model_can_have_is_refused(value, why):
    def network(persistent=True):
        made = NormedMLP()
        made.embedding.register_buffer("given", value, persistent=persistent)
        return made

    with pytest.raises(ValueError, match=rf"the buffer 'embedding\.given' cannot be part of a model: .*{why}"):
        FederatedModule(network)
    FederatedModule(partial(network, persistent=False))


class Standardised(NormedMLP):
    """Remembers the mean of the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


def test_a_buffer_that_is_none_at_first_is_none_for_each_client():
    made = engine(FederatedModule(Standardised, partial(torch.optim.SGD, lr=0.1)), loaded(blobs(2)))
    start, (first, second) = made.module.initial_model(0), np.split(np.arange(16), 2)
    alone = made.run_optimizer(start, [second]).model
    made.run_optimizer(start, [first])
    assert torch.equal(made.run_optimizer(start, [second]).model, alone)


def test_fedala_learns_its_weights_without_moving_the_buffers_of_the_client(tmp_path):
    watch = fit(module("local", NormedMLP, 0.1), blobs(2), fedala(steps=1), tmp_path, rounds=3, engine="sequential")
    counted = FederatedModule(NormedMLP, buffer_policy="local").buffer_layout.places["embedding.1.num_batches_tracked"]
    assert [int(state.buffers[counted]) for state in watch.state.clients.states([0, 1])] == [3, 3]


def test_a_client_whose_buffers_are_not_finite_is_left_out():
    trained, uplink = LocalOutput(torch.ones(2), 0, 1.0), Uplink(0, {}, 1)
    assert TrainingResult.of(uplink, trained, ClientState(buffers=torch.ones(2))).is_finite()
    assert not TrainingResult.of(uplink, trained, ClientState(buffers=torch.tensor([1, torch.inf]))).is_finite()


def test_a_client_whose_upload_is_not_finite_is_left_out():
    trained = LocalOutput(torch.ones(2), 0, 1.0)
    for number, finite in ((1.0, True), (torch.nan, False)):
        uplink = Uplink(0, {"model": trained.model, "code": torch.tensor([1, number])}, 1)
        assert TrainingResult.of(uplink, trained, ClientState()).is_finite() is finite


@pytest.mark.parametrize(("policy", "number"), [("average", 1), ("keep_server", 1), ("local", 12)])
def test_clients_that_share_model_and_buffers_are_evaluated_once(tmp_path, monkeypatch, policy, number):
    watch = fit(module(policy, NormedMLP, 0.1), blobs(drop_last=True), fedavg(), tmp_path)
    measured, ranks = [], watch.server.transport._ranks
    original = ranks.map
    monkeypatch.setattr(ranks, "map", lambda tasks, work: measured.extend(tasks) or original(tasks, work))
    watch.server.evaluator(watch.state, ["global"], ["test"])
    assert len(measured) == number


def test_an_unknown_policy_is_refused_and_a_policy_without_buffers_causes_a_warning(tmp_path):
    with pytest.raises(ValueError, match=r"buffer_policy: got 'drop'; allowed are average, keep_server and local"):
        module("drop")
    without = blobs_module(buffer_policy="local")
    assert module("local").keeps_buffers and not without.keeps_buffers and not module("keep_server").keeps_buffers
    with pytest.warns(UserWarning, match=r"model.buffer_policy: MLP has no buffers, so it has no effect"):
        fit(without, blobs(), fedavg(steps=1), tmp_path, clients_per_round=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", [lcfed(2, dimension=2), fedavg(), alone()])
@pytest.mark.parametrize("policy", POLICIES)
def test_resnet18(tmp_path, method, policy):
    made = FederatedModule(
        partial(resnet18, num_classes=2), partial(torch.optim.SGD, lr=0.01), "fc", buffer_policy=policy
    )
    inputs, targets = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    few = blobs(3, dataset=Tensors((inputs, targets)), partition=IID(), batch_size=3, drop_last=True)
    watch = fit(made, few, method, tmp_path, clients_per_round=2)
    assert all(np.isfinite(value) for name, value in watch.metrics.items() if name.endswith("loss"))
    if policy == "local":
        taken = [i for i in range(3) if watch.state.clients[i].buffers is not watch.state.clients.blank.buffers]
        assert taken == watch.sampled[0] and len(watch.state.clients[taken[0]].buffers) == 2 * 4_800 + 20
        assert watch.state.clients[taken[0]].buffers[-1] == 3  # the last counter, after three steps
    assert len(watch.state.global_model) == made.layout.size
