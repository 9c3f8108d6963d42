"""Onboarding: which cluster a newcomer joins by which rule, what it costs, and that nothing else changes."""

import signal
from functools import partial

import numpy as np
import pytest
import torch

from lcfl import FederatedDataModule, FederatedModule
from lcfl.data.datasets import Digits, Folders, Table, Tensors
from lcfl.data.partition import IID, ByOwner
from lcfl.federation import onboarding
from lcfl.federation.federation import Federation
from lcfl.federation.onboarding import onboard
from lcfl.methods.aggregation import ClusterMean
from lcfl.methods.clustering import Clustering, ClusterNumberTuning, OneShotHierarchical
from lcfl.methods.exchange import ClusterModel
from lcfl.methods.local import LocalTraining
from lcfl.methods.method import Method
from lcfl.models import MLP
from lcfl.runs import checkpoint, checkpoint_lookup
from tests.helpers.bits import assert_same_state, same
from tests.helpers.builders import (
    NormedMLP,
    alone,
    blobs,
    blobs_module,
    dealt,
    fedac,
    fedavg,
    lcfed,
    linear_module,
    two_sided,
)
from tests.helpers.clients_on_disk import write_wards
from tests.helpers.clustered import fedgroup, ifca, pacfl
from tests.methods.clustering.test_one_shot import fedclust

P, P_PHI, P_L = 408, 272, 136  # numbers of parameters of the network of `blobs_module`
LABELS, PIXELS = 2, 16  # labels and pixels of a client of `blobs`


class Parity(Clustering):
    """Two clusters that never change, with the default rule for newcomers."""

    def on_round_end(self, state):
        state.assignment = torch.arange(state.num_clients) // 3 % 2
        state.centres = state.initial.repeat(2, 1) if len(state.centres) != 2 else state.centres


def parity():
    return Method(LocalTraining(steps=5), ClusterModel(), ClusterMean("participants", "participants"), [Parity()])


METHODS = {
    "fedclust": lambda: fedclust({"steps": 5}, num_clusters=4),
    "fedclust_model": lambda: fedclust({"steps": 5}, num_clusters=4, reference="model"),
    "lcfed": lambda: lcfed(4, LocalTraining(steps=5)),
    "fedac": lambda: fedac(4, LocalTraining(steps=5), ClusterNumberTuning("silhouette")),
    "fedgroup": lambda: fedgroup(4, 5, 5, steps=5),
    "pacfl": lambda: pacfl(num_clusters=4),
    "parity": parity,
    "fedavg": lambda: fedavg(steps=5),
    "local": lambda: alone(steps=5),
}


def trained(root, method, data, module=None, rounds=8, **options):
    options = {"clients_per_round": 1.0, "evaluate_every": 0, "accelerator": "cpu", "devices": 1, **options}
    made = Federation(rounds, logger=False, enable_progress_bar=False, default_root_dir=root, name="run", **options)
    return made.fit(module or blobs_module(), data, method).path


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """``joined(name)``: data, module, checkpoint and onboarding result of a run of that method, computed once."""
    made = {}

    def of(name):
        if name not in made:
            data, module, method = blobs(20, newcomers=0.3), blobs_module(), METHODS[name]()
            path = checkpoint_lookup.newest([trained(tmp_path_factory.mktemp(name), method, data, module)])
            found = onboard(path, module, data, METHODS[name](), 5, "cpu")
            made[name] = data, module, checkpoint.read(path), found
        return made[name]

    return of


@pytest.mark.parametrize("name", ["fedclust", "fedclust_model", "lcfed", "fedac", "fedgroup", "pacfl"])
def test_a_newcomer_joins_the_cluster_of_its_group(joined, name):
    data, _, saved, found = joined(name)
    groups = data.population.groups
    assert [each.client for each in found.joined] == list(data.newcomer_clients) and len(found.joined) == 6
    for each in found.joined:
        members = saved.state.members(each.cluster)
        assert {int(groups[i]) for i in members} == {each.group} == {int(groups[each.client])}
    summary = found.evaluation.summary()
    assert summary["test/own_split/before/acc"] > 0.95


@pytest.mark.parametrize("name", METHODS)
def test_clients_of_other_data_join_the_cluster_of_their_group(joined, name):
    data, module, saved, _ = joined(name)
    new = blobs(4)
    found = onboard(saved.path, module, new, METHODS[name](), 5, "cpu", of_the_run=False)
    assert [each.client for each in found.joined] == [20, 21, 22, 23]
    if name in ("fedclust", "fedclust_model", "lcfed", "fedac", "fedgroup", "pacfl"):
        known, own = (each.population.label_counts > 0 for each in (data, new))
        for each in found.joined:
            assert all((known[i] == own[each.client - 20]).all() for i in saved.state.members(each.cluster))
        assert found.evaluation.summary()["test/own_split/before/acc"] > 0.95
    assert found.evaluation.summary()["test/own_split/after/acc"] > 0.9
    assert_same_state(checkpoint.read(saved.path).state, saved.state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": Tensors((torch.randn(40, 3), torch.arange(40) % 8))}, "MLP cannot take inputs of shape"),
        ({"dataset": Tensors((torch.randn(90, 16), torch.arange(90) % 9))}, "Tensors has 9 classes"),
    ],
)
def test_clients_of_data_that_do_not_fit_are_refused(joined, options, words):
    _, module, saved, _ = joined("fedavg")
    with pytest.raises(ValueError, match=words):
        onboard(saved.path, module, blobs(2, partition=IID(), **options), fedavg(), 5, "cpu", of_the_run=False)


def test_a_newcomer_whose_targets_are_all_ignored_has_no_metrics(tmp_path):
    """Its model is not diverged, and the others have metrics."""
    module = linear_module(loss=torch.nn.CrossEntropyLoss(ignore_index=0))
    inputs, targets, train, test = two_sided(num_clients=2, size=6)
    path = checkpoint_lookup.newest([trained(tmp_path, fedavg(), dealt(inputs, targets, train, test=test), module)])
    targets[train[0]], targets[test[0]], targets[test[1]] = [0, 1] * 3, 0, 1
    new = dealt(inputs, targets, train, test=test)
    found = onboard(path, module, new, fedavg(), 1, "cpu", of_the_run=False)
    assert found.evaluation.by_name["test/own_split/after/acc"].clients.tolist() == [3]


def test_clients_with_other_names_of_classes_are_refused(tmp_path):
    write_wards(tmp_path / "old", {"a": 12, "b": 12}, outcomes=("benign", "malignant"))
    write_wards(tmp_path / "new", {"c": 12}, outcomes=("no", "yes"))
    made = partial(FederatedModule, partial(MLP, 2, [4], 2))
    read = [Folders(str(tmp_path / name), Table("outcome")) for name in ("old", "new")]
    old, new = (FederatedDataModule(each, ByOwner(), batch_size=4) for each in read)
    path = checkpoint_lookup.newest([trained(tmp_path, fedavg(), old, made(), rounds=1)])
    with pytest.raises(
        ValueError, match=r"the run has the classes benign, malignant, and the new clients have no, yes\. Give them"
    ):
        onboard(path, made(), new, fedavg(), 5, "cpu", of_the_run=False)


def test_a_name_of_the_run_gives_a_warning(tmp_path):
    write_wards(tmp_path / "old", {"a": 12, "b": 12})
    write_wards(tmp_path / "new", {"b": 12, "c": 12})
    read = [Folders(str(tmp_path / name), Table("outcome")) for name in ("old", "new")]
    made, data = partial(FederatedModule, partial(MLP, 2, [4], 2)), partial(FederatedDataModule, partition=ByOwner())
    old, new = map(data, read)
    path = trained(tmp_path, fedavg(), old, made(), rounds=1)
    with pytest.warns(UserWarning, match="onboard: b took part in the run. If these are the same clients"):
        onboard(path, made(), new, fedavg(), 1, "cpu", of_the_run=False)


def test_clients_with_columns_in_another_order_are_refused(tmp_path):
    write_wards(tmp_path / "old", {"a": 12, "b": 12})
    write_wards(tmp_path / "new", {"c": 12})
    reader = Table("outcome")
    known = list(Folders(str(tmp_path / "old"), reader).columns)
    made = partial(FederatedModule, partial(MLP, len(known), [4], 2))
    readers = {"old": reader, "new": Table("outcome", features=known[::-1])}
    read = [Folders(str(tmp_path / name), each) for name, each in readers.items()]
    old, new = (FederatedDataModule(each, ByOwner(), batch_size=4) for each in read)
    path = checkpoint_lookup.newest([trained(tmp_path, fedavg(), old, made(), rounds=1)])
    words = f"the run has the columns {', '.join(known)}, and the new clients have {', '.join(known[::-1])}"
    with pytest.raises(ValueError, match=words):
        onboard(path, made(), new, fedavg(), 5, "cpu", of_the_run=False)


def test_clients_whose_inputs_are_normalised_in_another_way_are_refused(tmp_path):
    def made(normalisation):
        return FederatedDataModule(Written(normalisation), IID(), 2, batch_size=4)

    class Written(Digits):
        """Digits, whose data module says how they are normalised."""

        def __init__(self, normalisation):
            super().__init__()
            self._normalisation = normalisation

        def load(self):
            samples = super().load()
            samples.normalisation = self._normalisation
            return samples

    half, none, unknown = {"mean": [0.5], "std": [0.5]}, {"mean": [0.0], "std": [1.0]}, None
    network = partial(MLP, 64, [4], 10)
    path = trained(tmp_path, fedavg(), made(half), FederatedModule(network), rounds=1)
    for alike in (half, unknown):
        assert onboard(str(path), FederatedModule(network), made(alike), fedavg(), 1, "cpu", of_the_run=False)
    with pytest.raises(
        ValueError, match=r"the run are normalised by \{'mean': \[0.5\], .*, and those of .* by .'mean': .0.0"
    ):
        onboard(path, FederatedModule(network), made(none), fedavg(), 1, "cpu", of_the_run=False)


def test_without_signatures_the_loss_decides_and_the_rule_says_so(tmp_path):
    path = checkpoint_lookup.newest([trained(tmp_path, METHODS["pacfl"](), blobs(20), blobs_module())])
    found = onboard(path, blobs_module(), blobs(4), METHODS["pacfl"](), 1, "cpu", of_the_run=False)
    assert found.rule == "the cluster whose model has the smallest loss on the newcomer's training samples"
    assert sorted(each.cluster for each in found.joined) == [0, 1, 2, 3]


def test_a_newcomer_warms_up_with_the_learning_rate_of_the_founders(tmp_path):
    data, module = blobs(20, newcomers=0.3), blobs_module()
    method = fedclust({"steps": 5, "lr_decay": 0.5}, num_clusters=4)  # the rate of round 8 would be eta / 256
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module)])
    found = onboard(path, module, data, method, 1, "cpu")
    state = checkpoint.read(path).state
    for each in found.joined:
        assert {int(data.population.groups[i]) for i in state.members(each.cluster)} == {each.group}


@pytest.mark.parametrize("name", ["fedclust_model", "lcfed", "fedac", "fedgroup"])
def test_batch_norm_statistics_do_not_decide_which_cluster_a_newcomer_joins(name, tmp_path):
    data, module = blobs(20, newcomers=0.3), FederatedModule(NormedMLP, partial(torch.optim.SGD, lr=0.1))
    path = checkpoint_lookup.newest([trained(tmp_path, METHODS[name](), data, module)])
    found = onboard(path, module, data, METHODS[name](), 5, "cpu")
    state = checkpoint.read(path).state
    for each in found.joined:
        assert {int(data.population.groups[i]) for i in state.members(each.cluster)} == {each.group}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_its_rule_and_its_bytes(joined, name):
    _, _, saved, found = joined(name)
    k = saved.state.num_clusters
    rules = {
        "fedclust": ("nearest to the newcomer's layers", P + P, P_L),
        "fedclust_model": ("nearest to the newcomer's layers", P + P, P_L),
        "lcfed": ("closest to the newcomer's after a short training run", P + P + P_PHI, P),
        "fedac": ("closest to the newcomer's after a short training run", P + P + P_PHI, P),
        "fedgroup": ("the newcomer's pre-training", P + P, P),
        "pacfl": ("smallest angle", P, 3 * LABELS * PIXELS),
        "parity": ("smallest loss", k * P + P, 0),
        "fedavg": ("no clusters", P, 0),
        "local": ("no clusters", 0, 0),
    }
    words, down, up = rules[name]
    assert words in found.rule
    assert {(each.down_bytes, each.up_bytes) for each in found.joined} == {(4 * down, 4 * up)}
    assert all((each.cluster is None) == (name in ("fedavg", "local")) for each in found.joined)


def test_a_newcomer_of_ifca_is_sent_the_models_once(tmp_path):
    data, module = blobs(20, newcomers=0.3), blobs_module()
    path = checkpoint_lookup.newest([trained(tmp_path, ifca(3), data, module, rounds=2)])
    found = onboard(path, module, data, ifca(3), 1, "cpu")
    assert {(each.down_bytes, each.up_bytes) for each in found.joined} == {(4 * 3 * P, 0)}


@pytest.mark.parametrize("name", METHODS)
def test_personalisation_helps_and_is_reported_separately(joined, name):
    _, _, _, found = joined(name)
    summary = found.evaluation.summary()
    before, after = (summary[f"test/own_split/{stage}/acc"] for stage in ("before", "after"))
    assert after >= before - 0.01 and after > 0.9
    assert list(found.evaluation.by_name) == [
        f"{stage}/own_split/{when}/{metric}"
        for stage in ("test", "val")
        for when in ("before", "after")
        for metric in ("loss", "acc")
    ]
    for metric in found.evaluation.by_name.values():
        assert metric.clients.tolist() == [each.client for each in found.joined]


def test_fedavg_gives_the_global_model_and_local_the_initial_one(joined):
    for name in ("fedavg", "local"):
        data, module, saved, found = joined(name)
        model = saved.state.global_model if name == "fedavg" else saved.state.initial
        network = module.layout.unpack(model, module.make_network()).eval()
        accuracy = []
        for client in data.newcomer_clients:
            inputs, targets = data.samples.batch(data.population.test["own_split"][client], torch.device("cpu"))
            accuracy.append(float((network(inputs).argmax(dim=1) == targets).float().mean()))
        np.testing.assert_allclose(found.evaluation.by_name["test/own_split/before/acc"].values, accuracy)


def test_cluster_with_the_smallest_loss_matches_computation_by_hand(joined):
    data, module, saved, found = joined("parity")
    for each in found.joined:
        inputs, targets = data.samples.batch(data.population.train[each.client], torch.device("cpu"))
        losses = []
        for centre in saved.state.centres:
            network = module.layout.unpack(centre, module.make_network()).eval()
            losses.append(torch.nn.functional.cross_entropy(network(inputs), targets).item())
        assert each.cluster == int(np.argmin(losses))


def test_one_newcomer_does_not_depend_on_the_others(joined, monkeypatch):
    data, module, saved, found = joined("fedclust")
    last = data.newcomer_clients[-1]
    monkeypatch.setattr(type(data), "newcomer_clients", property(lambda self: (last,)))
    alone_there = onboard(saved.path, module, data, METHODS["fedclust"](), 5, "cpu")
    assert alone_there.joined == [found.joined[-1]]
    for name, metric in alone_there.evaluation.by_name.items():
        assert metric.values[0] == found.evaluation.by_name[name].values[-1]


@pytest.mark.parametrize("has_cuda", [False, True])
def test_auto_is_cuda_or_the_cpu_and_no_other_kind_of_device(joined, monkeypatch, has_cuda):
    class Chosen(Exception):
        """Raised in place of using the device, which this machine may lack."""

    def fabric(accelerator, **_):
        raise Chosen(accelerator)

    data, module, saved, _ = joined("fedavg")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(onboarding, "Fabric", fabric)
    with pytest.raises(Chosen, match="cuda" if has_cuda else "cpu"):
        onboard(saved.path, module, data, METHODS["fedavg"]())


def test_onboarding_is_deterministic_and_does_not_change_the_checkpoint(joined):
    data, module, saved, found = joined("lcfed")
    again = onboard(saved.path, module, data, METHODS["lcfed"](), 5, "cpu")
    assert again.joined == found.joined
    assert same(again.evaluation.summary(), found.evaluation.summary())
    assert_same_state(checkpoint.read(saved.path).state, saved.state)


def test_leavers_are_no_reference_for_newcomers(tmp_path):
    """All members of a cluster leave, so no newcomer joins it."""
    plain = blobs(20, newcomers=0.3)
    group = int(blobs_groups()[plain.newcomer_clients[0]])
    leavers = {i: 1 for i in range(20) if blobs_groups()[i] == group and i not in plain.newcomer_clients}
    data, module = blobs(20, newcomers=0.3, leavers=leavers), blobs_module()
    path = checkpoint_lookup.newest([trained(tmp_path, METHODS["fedclust"](), data, module, rounds=2)])
    found = onboard(path, module, data, METHODS["fedclust"](), 5, "cpu")
    state = checkpoint.read(path).state
    emptied = set(range(4)) - set(state.assignment[state.active].tolist())
    assert len(emptied) == 1 and not emptied & {each.cluster for each in found.joined}


def blobs_groups():
    return np.repeat(np.arange(4), 5)


# refusals


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_newcomers_train_where_gradients_are_switched_off(joined, context):
    data, module, saved, expected = joined("fedavg")
    with context():
        found = onboard(saved.path, module, data, fedavg(steps=5), 5, "cpu")
    assert found.evaluation.summary() == expected.evaluation.summary()


def test_a_signal_ends_onboarding_at_once(joined, monkeypatch):
    """Unlike a run, it has no rounds after which it could stop."""
    data, module, saved, _ = joined("fedavg")
    monkeypatch.setattr(onboarding.Onboarding, "add", lambda self, client: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            onboard(saved.path, module, data, METHODS["fedavg"](), 5, "cpu")
    finally:
        signal.signal(signal.SIGINT, before)


def test_run_without_newcomers_is_refused(tmp_path):
    data, module = blobs(4), blobs_module()
    path = checkpoint_lookup.newest([trained(tmp_path, fedavg(), data, module, rounds=1)])
    with pytest.raises(ValueError, match=r"kept no newcomers out .* data.newcomers > 0"):
        onboard(path, module, data, fedavg(), 5, "cpu")


def test_other_data_other_newcomers_and_no_epochs_are_refused(joined):
    data, module, saved, _ = joined("fedavg")
    with pytest.raises(ValueError, match="epochs=0; it must be at least 1"):
        onboard(saved.path, module, data, fedavg(), 0, "cpu")
    for other in (blobs(20, newcomers=0.3, seed=1), blobs(20, newcomers=5)):
        with pytest.raises(checkpoint.CheckpointError, match="partition: the checkpoint has"):
            onboard(saved.path, module, other, fedavg(), 5, "cpu")


def test_a_newcomer_that_diverges_is_named(joined):
    data, _, saved, _ = joined("fedavg")
    first = data.newcomer_clients[0]
    with pytest.raises(ValueError, match=f"newcomer {first}: its local run diverged"):
        onboard(saved.path, blobs_module(lr=1e30), data, fedavg(), 5, "cpu")


def test_a_wrong_reference_is_refused():
    with pytest.raises(ValueError, match=r"reference='mean'; allowed are warm_up and model"):
        OneShotHierarchical(reference="mean")
