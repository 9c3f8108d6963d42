"""Runs with faulty clients: what they send, what the server and the clients remember, and what is measured."""

import csv
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from lcfl.core.callback import Callback
from lcfl.core.messages import Downlink
from lcfl.data.datasets import Digits
from lcfl.data.faults import Backdoor, LabelFlip, RandomUpdate, ScaledUpdate, StaleUpdate, UpdateFault
from lcfl.data.partition import IID
from lcfl.federation.federation import Federation
from lcfl.methods.aggregation import TrimmedMean
from lcfl.methods.exchange import (
    AllCentres,
    CentreAndEmbedding,
    ClusterUpdate,
    ControlledModel,
    FullModel,
    NamedLayers,
    NormalisedModel,
    SharedEmbedding,
    Signature,
)
from lcfl.models import MLP
from lcfl.models.layout import Layout
from lcfl.models.module import FederatedModule
from lcfl.server.metrics import fault_metrics
from tests.helpers.builders import (
    Normed,
    NormedMLP,
    alone,
    blobs,
    blobs_module,
    ditto,
    fedavg,
    fedper,
    fit,
    lcfed,
    scaffold,
    state_of,
)
from tests.helpers.clustered import fedgroup, ifca, pacfl
from tests.helpers.fits import ROUNDS, assert_same_run
from tests.helpers.fits import fit as fit_by_command

TRAINING = [0, 99]  # and no warm-up round
FAULTS = [
    ScaledUpdate([0], TRAINING, factor=-2.0),
    RandomUpdate([1], TRAINING, std=0.5),
    StaleUpdate([2], TRAINING),
    LabelFlip([3], TRAINING),
]


class Uploads(Callback):
    """Keeps the uploads of every round by client."""

    def __init__(self):
        self.rounds = []

    def on_uploads(self, uploads):
        self.rounds.append({upload.client: upload for upload in uploads})


class Signatures(Callback):
    """Keeps the signature that client 0 sends."""

    def on_extra_round_end(self, uploads):
        self.first = uploads[0].payload["signature"]


def trained(tmp_path, method, faults, rounds=1, **options):
    uploads = Uploads()
    watch = fit(blobs_module(), blobs(8, faults=faults), method, tmp_path, rounds, callbacks=[uploads], **options)
    return watch, uploads.rounds


METHODS = {
    "fedavg": fedavg,
    "fedper": fedper,
    "lcfed": lcfed,
    "ifca": partial(ifca, 2),
    "ditto": ditto,
    "scaffold": scaffold,
}


def received(upload):
    """Returns the model that a client was sent to train, or the centre of its cluster."""
    sent, model = upload.answers.payload, upload.payload["model"]
    if "centres" in sent:
        return sent["centres"][int(upload.payload["cluster"])]
    if "shared" in sent:
        return torch.cat([sent["shared"], model[len(sent["shared"]) :]])
    return sent.get("model", sent.get("centre"))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_by_hand(tmp_path, name):
    _, (honest,) = trained(tmp_path / "honest", METHODS[name](), [])
    _, (faulty,) = trained(tmp_path / "faulty", METHODS[name](), FAULTS)
    for client in range(4, 8):
        assert torch.equal(faulty[client].payload["model"], honest[client].payload["model"])
    start = received(honest[0])
    assert torch.allclose(faulty[0].payload["model"], 3 * start - 2 * honest[0].payload["model"], atol=1e-6)
    apart = faulty[1].payload["model"] - received(honest[1])
    assert 0.4 < apart[apart != 0].std() < 0.6
    assert torch.equal(faulty[2].payload["model"], received(honest[2]))  # it has nothing older
    assert not torch.equal(faulty[3].payload["model"], honest[3].payload["model"])


def test_a_late_client_sends_what_it_trained_before(tmp_path):
    _, rounds = trained(tmp_path, fedavg(), [StaleUpdate([2], rounds=[1, 3])], rounds=5)
    watch, _ = trained(tmp_path, fedavg(), [StaleUpdate([2], rounds=[1, 3])], rounds=2)
    previous = watch.state.clients[2].previous
    assert torch.equal(rounds[1][2].payload["model"], rounds[0][2].payload["model"])  # what it trained in round 0
    assert torch.equal(rounds[2][2].payload["model"][: len(previous)], previous)
    assert not torch.equal(rounds[4][2].payload["model"], rounds[3][2].payload["model"])


def test_what_a_late_client_keeps_is_in_the_checkpoint_without_the_statistics_of_its_network(tmp_path):
    module = FederatedModule(NormedMLP, partial(torch.optim.SGD, lr=0.1))
    data = blobs(4, faults=[StaleUpdate([2])])
    federation = Federation(
        1,
        logger=False,
        enable_progress_bar=False,
        devices=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        final_models=[],
    )
    state = federation.fit(module, data, fedavg()).state
    assert len(state.clients[2].previous) == module.layout.num_parameters < module.layout.size


def test_a_client_keeps_its_own_model_and_the_server_what_it_received(tmp_path):
    watch, rounds = trained(tmp_path, lcfed(), [ScaledUpdate([0], rounds=[0, 1])], rounds=2)
    state = watch.state.clients[0]
    assert torch.equal(state.stored_model, rounds[1][0].payload["model"])
    centre = rounds[1][0].answers.payload["centre"]
    assert torch.allclose(state.model, 2 * centre - state.received, atol=1e-5)
    again, rounds = trained(tmp_path, lcfed(), [ScaledUpdate([0], rounds=[0, 1])], rounds=3)
    state = again.state.clients[0]
    assert state.received is None and torch.equal(state.model, rounds[2][0].payload["model"])


def test_without_a_model_to_send_only_wrong_data_matter(tmp_path):
    honest, plain = trained(tmp_path / "honest", alone(), [], rounds=2)
    faulty, sent = trained(tmp_path / "faulty", alone(), FAULTS, rounds=2)
    assert all(not upload.payload for uploads in (*plain, *sent) for upload in uploads.values())
    same = [torch.equal(faulty.state.clients[i].model, honest.state.clients[i].model) for i in range(8)]
    assert same == [True, True, True, False, True, True, True, True]


def test_a_signature_of_images_is_made_of_flipped_labels(tmp_path):
    """PACFL trains nothing in its warm-up round, so only labels matter there."""
    signatures = []
    for number, faults in enumerate(([], [ScaledUpdate([0])], [LabelFlip([0])])):
        kept = Signatures()
        fit(blobs_module(), blobs(8, faults=faults), pacfl(), tmp_path / str(number), callbacks=[kept])
        signatures.append(kept.first)
    assert torch.equal(signatures[0], signatures[1])
    assert not torch.equal(signatures[0], signatures[2])


def test_only_honest_clients_are_measured(tmp_path):
    watch, _ = trained(tmp_path, fedavg(), FAULTS, rounds=2, evaluate_every=1)
    with open(tmp_path / "run" / "version_0" / "clients.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["faults"] for row in table[:5]] == ["ScaledUpdate", "RandomUpdate", "StaleUpdate", "LabelFlip", ""]
    values = [row["test/own_split/global/acc"] for row in table]
    assert values[:4] == [""] * 4
    assert np.mean([float(value) for value in values[4:]]) == pytest.approx(watch.metrics["test/own_split/global/acc"])
    assert watch.rows[-1]["fault/among_honest"] == watch.rows[-1]["fault/among_faulty"] == 0.5


def test_clients_without_a_cluster_are_in_no_bad_company():
    state = state_of([None] * 8, [-1, -1, -1, -1, 0, 0, 1, 1], torch.zeros(2, 2))
    assert fault_metrics(state, [0, 6, 7]) == {"fault/among_honest": 0, "fault/among_faulty": 1}


def test_shares_of_faulty_clients_in_clusters_by_hand(tmp_path):
    watch, _ = trained(tmp_path, fedgroup(2), [ScaledUpdate([0, 1, 2])], rounds=2)
    is_faulty = np.arange(8) < 3
    cluster = watch.state.assignment.numpy()
    share = np.array([is_faulty[cluster == k].mean() for k in cluster])
    assert watch.rows[-1]["fault/among_honest"] == pytest.approx(share[~is_faulty].mean())
    assert watch.rows[-1]["fault/among_faulty"] == pytest.approx(share[is_faulty].mean())


def test_a_trimmed_mean_holds_where_a_mean_fails(tmp_path):
    attack = [ScaledUpdate(0.25, factor=-4.0)]
    mean, trimmed = fedavg(steps=5), fedavg(steps=5)
    trimmed = replace(trimmed, aggregation=replace(trimmed.aggregation, rule=TrimmedMean(0.25)))
    results = {}
    for name, method, faults in (("none", mean, []), ("mean", mean, attack), ("trimmed", trimmed, attack)):
        results[name] = trained(tmp_path / name, method, faults, 30)[0].metrics["test/own_split/global/acc"]
    assert results["none"] > 0.6 and results["trimmed"] > 0.6
    assert results["mean"] < 0.3


def test_a_backdoor_is_learnt_and_measured(tmp_path):
    module = FederatedModule(partial(MLP, 64, [64], 10), partial(torch.optim.SGD, lr=0.1))
    data = blobs(10, dataset=Digits(), partition=IID(), faults=[Backdoor(0.3, target=3)])
    metrics = fit(module, data, fedavg(steps=5), tmp_path, rounds=60).metrics
    assert metrics["test/own_split/global/acc"] > 0.8
    assert metrics["test/backdoor/global/acc"] > 0.6
    assert "test/own_split/trivial/acc" in metrics and "test/backdoor/trivial/acc" not in metrics


@pytest.mark.parametrize("limit", [10.0, None])
def test_enormous_updates_are_refused_and_counted(tmp_path, limit, recwarn):
    watch, rounds = trained(tmp_path, lcfed(), [RandomUpdate([1, 5], std=1e15)], 2, max_update_norm=limit)
    model = watch.state.global_model
    if limit is None:
        assert model.abs().max() > 1e10 and "train/refused_clients" not in watch.rows[0]
        return
    assert [row["train/refused_clients"] for row in watch.rows] == [2, 2]
    assert sorted(rounds[0]) == [0, 2, 3, 4, 6, 7]
    assert model.abs().max() < 10 and not watch.state.participated[[1, 5]].any()
    assert any("beyond trainer.max_update_norm=10.0 (1, 5)" in str(each.message) for each in recwarn)


def test_norm_of_an_update_by_hand():
    """Parameters and control variates count; buffers and a number of a cluster do not."""
    layout = Layout.from_network(Normed())
    start = torch.arange(layout.size, dtype=torch.float32)
    moved = start.clone()
    moved[[0, layout.num_embedding]] += torch.tensor([3.0, 4.0])
    moved[layout.num_parameters :] += 100

    def norm(exchange, payload, sent):
        return exchange.update_norm(payload, Downlink(sent), layout)

    change = torch.zeros(layout.num_parameters)
    change[-2:] = torch.tensor([5.0, 12.0])
    assert norm(FullModel(), {"model": moved}, {"model": start}) == 5
    assert norm(CentreAndEmbedding(), {"model": moved}, {"centre": start, "embedding": start[:15]}) == 5
    for normaliser, factor in (
        ([900.0], 1),
        ([0.25], 4),
        ([2.0, 6.0], 3),
        ([1e-30, 1e-30], 1e30),
        ([1e-40], 1e40),
        ([0.0], 1),
    ):
        payload = {"model": moved, "normaliser": torch.tensor(normaliser)}
        assert norm(NormalisedModel(), payload, {"centre": start}) == pytest.approx(5 * factor, rel=1e-3)
    assert norm(ClusterUpdate(), {"update": moved - start}, {"model": start}) == 5
    assert norm(ControlledModel(), {"model": moved, "control_change": change}, {"model": start}) == (25 + 169) ** 0.5
    centres = torch.stack([start - 7, start])
    assert norm(AllCentres(), {"model": moved, "cluster": torch.tensor([1])}, {"centres": centres}) == 5
    embedding = SharedEmbedding().subset(layout)
    assert norm(SharedEmbedding(), {"shared": embedding.take(moved)}, {"shared": embedding.take(start)}) == 3
    assert norm(NamedLayers(), {"layers": NamedLayers().subset(layout).take(moved)}, {"model": start}) == 4
    assert norm(Signature(), {"signature": torch.full((1, 1), 1e30)}, {}) == 0


@pytest.mark.slow
def test_faults_have_the_same_bits_on_two_ranks_and_after_a_resume(tmp_path):
    words = []
    for fault, more in (("StaleUpdate", ()), ("RandomUpdate", ("std=0.1",)), ("LabelFlip", ("rounds=[2,5]",))):
        words += [f"--data.faults+={fault}", *(f"--data.faults.{each}" for each in ("clients=0.3", *more))]
    for method in ("lcfed", "fedavg"):
        one = fit_by_command(tmp_path / method / "1", method, 1, ROUNDS, *words).path
        assert_same_run(one, fit_by_command(tmp_path / method / "2", method, 2, ROUNDS, *words).path)
        fit_by_command(tmp_path / method / "3", method, 1, 4, *words)
        resumed = fit_by_command(tmp_path / method / "3", method, 1, ROUNDS, *words, "--ckpt_path=last").path
        assert_same_run(one, resumed)
        with pytest.raises(Exception, match="partition: the checkpoint has"):
            fit_by_command(tmp_path / method / "3", method, 1, ROUNDS, *words[2:], "--ckpt_path=last")


def test_a_trial_run_has_the_faults(tmp_path):
    watch, _ = trained(tmp_path, fedavg(), [ScaledUpdate([7])], fast_dev_run=True)
    assert watch.state.round == 1 and "fault/among_faulty" in watch.rows[-1]


@dataclass(frozen=True)
class Wrong(UpdateFault):
    """Returns a number, as a first attempt of a user might."""

    def sent(self, trained, received, before, draw):
        return 0


def test_a_fault_that_returns_something_else_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"data.faults: Wrong.sent returned int of shape \[\]; it must return a tensor"
    ):
        trained(tmp_path, fedavg(), [Wrong([0])], fast_dev_run=True)


def test_a_fault_of_updates_that_are_never_sent_is_warned_about(tmp_path):
    with pytest.warns(
        UserWarning, match=r"ScaledUpdate has no effect, .* because with NoExchange clients send nothing"
    ):
        trained(tmp_path, alone(), [ScaledUpdate([0])], rounds=1)


def test_a_fault_that_would_begin_after_the_last_round_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="ScaledUpdate begins in round 2, but the run has 2 rounds"):
        trained(tmp_path, fedavg(), [ScaledUpdate([0], rounds=[2, None])], rounds=2)
