"""The cluster that a newcomer joins, computed again in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from lcfl.federation.onboarding import onboard
from lcfl.runs import checkpoint, checkpoint_lookup
from tests.federation.test_onboarding import Parity, trained
from tests.helpers.builders import blobs, blobs_module, dealt, fedavg, linear_module, linear_step, two_sided
from tests.helpers.clustered import fedgroup, pacfl
from tests.methods.clustering.test_one_shot import fedclust


def test_nan_loss_is_never_the_smallest():
    class View:
        def losses(self, models):
            return [float("nan"), 3.0, 2.0, 2.0]

    state = type("State", (), {"centres": torch.zeros(4, 1)})
    assert Parity().place_newcomer(View(), state) == 2


@pytest.mark.parametrize("place", [None, -1, 2, 1.5, "a"])
def test_a_place_that_is_no_cluster_is_refused(tmp_path, monkeypatch, place):
    data, module, method = blobs(8, newcomers=2), blobs_module(), fedgroup(2)
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module, rounds=1)])
    monkeypatch.setattr(type(method.clustering[0]), "place_newcomer", lambda *_: place)
    with pytest.raises(ValueError, match=rf"place_newcomer: got {place!r}; .* the number of a cluster, from 0 to 1\.$"):
        onboard(path, module, data, method, 1, "cpu")


def test_a_newcomer_whose_classes_weigh_nothing_is_measured_without_a_loss(tmp_path):
    weight = torch.tensor([1.0] * 4 + [0.0] * 4)
    data, module, method = blobs(8, newcomers=4), blobs_module(loss=nn.CrossEntropyLoss(weight)), fedavg()
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module, rounds=1)])
    found = onboard(path, module, data, method, 1, "cpu").evaluation.by_name
    measured = {name: len(found[f"test/own_split/after/{name}"].values) for name in ("acc", "loss")}
    assert measured["acc"] == 4 > measured["loss"]


def five_clients():
    """Returns inputs, targets, training and test places of five clients, their data, and the one that is a newcomer."""
    dealt_out = two_sided(5, size=6)
    inputs, targets, train, test = dealt_out
    data = dealt(inputs, targets, train, test=test, newcomers=1)
    (newcomer,) = data.newcomer_clients
    object.__setattr__(data.population, "newcomers", (newcomer,))
    data.prepare_data = data.setup = lambda stage=None: None
    return *dealt_out, data, newcomer


def test_fedclust_places_by_the_members_warm_up_layers_in_numpy(tmp_path):
    """Computes Algorithm 2 with all samples in every batch, and five epochs from the cluster's model."""
    inputs, targets, train, test, data, newcomer = five_clients()
    module, method = linear_module(lr=0.5), fedclust({"steps": 2}, num_clusters=2, warmup_steps=3)
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module, rounds=3)])
    found = onboard(path, module, data, method, 5, "cpu")
    saved = checkpoint.read(path).state

    def run_optimizer(w, client, steps):
        for _ in range(steps):
            w = w - 0.5 * linear_step(w, inputs[train[client]], targets[train[client]])[1]
        return w

    w0 = module.initial_model(0).double().numpy()
    last = {client: run_optimizer(w0, client, 3)[9:] for client in range(5)}
    r = saved.assignment.numpy()
    means = [np.mean([last[i] for i in range(5) if r[i] == k and i != newcomer], axis=0) for k in (0, 1)]
    expected = int(np.argmin([np.linalg.norm(mean - last[newcomer]) for mean in means]))
    assert found.joined[0].cluster == expected
    for stage, steps in (("before", 0), ("after", 5)):
        model = run_optimizer(saved.centres[expected].double().numpy(), newcomer, steps)
        loss, _ = linear_step(model, inputs[test[newcomer]], targets[test[newcomer]])
        assert found.evaluation.by_name[f"test/own_split/{stage}/loss"].values[0] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
def test_pacfl_places_by_the_angles_of_the_data_in_numpy(tmp_path, linkage):
    data, module, method = blobs(20, newcomers=0.3), blobs_module(), pacfl(num_clusters=7, linkage=linkage)
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module, rounds=1)])
    found = onboard(path, module, data, method, 1, "cpu")
    state = checkpoint.read(path).state

    def signature(client):
        pixels, label = data.samples.batch(data.population.train[client], torch.device("cpu"))
        of_label = [pixels[label == each].double().numpy().T for each in label.unique()]
        return np.concatenate([np.linalg.svd(image, full_matrices=False)[0][:, :3] for image in of_label], axis=1)

    def angle(one, other):
        return np.degrees(np.arccos(np.abs(signature(one).T @ signature(other)).max().clip(max=1)))

    join = {"average": np.mean, "single": np.min, "complete": np.max}[linkage]
    for each in found.joined:
        far = [join([angle(each.client, i) for i in state.members(k)]) for k in range(state.num_clusters)]
        assert far[each.cluster] == pytest.approx(min(far), abs=1e-3)
        assert max(far) - min(far) > 1


def test_fedgroup_places_by_the_direction_of_the_pre_training_in_numpy(tmp_path):
    """All samples are in every batch, and the direction of a group is the mean of its members' first updates."""
    inputs, targets, train, _, data, newcomer = five_clients()
    module, method = linear_module(lr=0.5), fedgroup(2, 3, 5, steps=2)
    path = checkpoint_lookup.newest([trained(tmp_path, method, data, module, rounds=2)])
    found = onboard(path, module, data, method, 1, "cpu")
    state = checkpoint.read(path).state

    def update(client):
        w = start = module.initial_model(0).double().numpy()
        for _ in range(3):
            w = w - 0.5 * linear_step(w, inputs[train[client]], targets[train[client]])[1]
        return w - start

    def cosine(one, other):
        return one @ other / (np.linalg.norm(one) * np.linalg.norm(other))

    directions = [np.mean([update(i) for i in state.members(k) if i != newcomer], axis=0) for k in (0, 1)]
    cosines = [cosine(update(newcomer), direction) for direction in directions]
    assert found.joined[0].cluster == int(np.argmax(cosines)) and abs(cosines[0] - cosines[1]) > 0.1
