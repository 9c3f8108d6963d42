"""Which part is shared, clustered or private may be given by pattern for every method that splits a network."""

from functools import partial

import pytest
import torch
from torch import nn

from lcfl.models import SplitNetwork
from lcfl.models.module import FederatedModule
from tests.helpers.builders import blobs, fedper, fit, lcfed, lg_fedavg

ROUNDS = 3


class Nested(SplitNetwork):
    """Two blocks with batch normalisation and a head: P = 16 x 6 + 6 + 12 + 6 x 5 + 5 + 10 + 5 x 8 + 8."""

    def __init__(self):
        blocks = [nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()]
        super().__init__(nn.Sequential(*blocks), nn.Linear(5, 8))


class Reversed(Nested):
    """The same network with its head registered first."""

    def __init__(self):
        super().__init__()
        self._modules = {name: self._modules[name] for name in ("decision", "embedding")}


NORMS = ["embedding.1", "*.4"]


def module(network=Nested, **options):
    return FederatedModule(network, partial(torch.optim.SGD, lr=0.05), **options)


def networks(watch):
    """Returns the clients' personal models as state dicts."""
    server = watch.server
    personal = [server.method.exchange.personal(watch.state, client, server.layout) for client in range(4)]
    made = [watch.state.clients[client] for client in range(4)]
    return [
        server.module.network_of(model, own.buffers).state_dict() for model, own in zip(personal, made, strict=True)
    ]


def differing(states):
    """Returns the layers whose tensors differ between the clients, and those that are equal."""
    names = [name for name in states[0] if any(not torch.equal(state[name], states[0][name]) for state in states)]
    layers = {name.rpartition(".")[0] for name in names}
    return layers, {name.rpartition(".")[0] for name in states[0]} - layers


@pytest.mark.parametrize("policy", ["average", "local"])
def test_fedper_with_a_cut_at_the_normalisations_is_fedbn(tmp_path, policy):
    """Clients keep scale, shift and statistics of their normalisations, and share everything else."""
    made = module(cut=NORMS, buffer_policy=policy)
    watch = fit(made, blobs(4), fedper(), tmp_path, ROUNDS)
    private, shared = differing(networks(watch))
    assert private == {"embedding.1", "embedding.4"}
    assert shared == {"embedding.0", "embedding.3", "decision"}
    assert watch.rows[-1]["comm/up_bytes"] == 4 * 4 * (made.layout.num_parameters - 12 - 10)


def test_a_part_of_a_layer_may_be_private(tmp_path):
    made = module(cut=["*.bias"])
    watch = fit(made, blobs(4), fedper(), tmp_path, ROUNDS)
    states = networks(watch)
    names = ("embedding.1.weight", "embedding.1.bias", "decision.weight", "decision.bias")
    equal = {name: all(torch.equal(state[name], states[0][name]) for state in states) for name in names}
    assert list(equal.values()) == [True, False, True, False]


def test_lg_fedavg_shares_what_patterns_cover(tmp_path):
    made = module()
    watch = fit(made, blobs(4), lg_fedavg(["decision", "*.[03]"]), tmp_path, ROUNDS)
    private, shared = differing(networks(watch))
    assert private == {"embedding.1", "embedding.4"} and "decision" in shared


def test_lcfed_pulls_the_part_outside_of_the_patterns(tmp_path):
    """A pull of weight 1 / lr moves every client's embedding to Phi and leaves its normalisations alone."""
    options = {"cut": NORMS, "buffer_policy": "local"}
    pulled, free = (module(global_weight=weight, **options) for weight in (19.0, 0.0))
    parts = []
    for number, made in enumerate((pulled, free)):
        watch = fit(made, blobs(4), lcfed(2), tmp_path / str(number), ROUNDS)
        size = made.layout.num_embedding
        assert watch.rows[-1]["comm/down_bytes"] == 4 * 4 * (made.layout.num_parameters + size)
        models = torch.stack([watch.state.clients[client].model for client in range(4)])
        spread = (models - models.mean(dim=0)).abs().mean(dim=0)
        parts.append((float(spread[:size].mean()), float(spread[size:].mean())))
    assert parts[0][0] < 0.2 * parts[1][0]
    assert parts[0][1] > 0.3 * parts[1][1]


@pytest.mark.parametrize("method", [fedper, lcfed, partial(lg_fedavg, ["decision"])], ids=["fedper", "lcfed", "lg"])
def test_a_cut_by_pattern_equals_the_cut_by_name_of_the_same_split(tmp_path, method):
    """The head is first in one network and last in the layouts of both, so the models are equal."""
    runs = []
    for number, (network, cut) in enumerate(((Nested, "decision"), (Reversed, ["decision"]))):
        made = module(network, cut=cut, cluster_weight=0.2, global_weight=0.3)
        start = torch.linspace(-0.5, 0.5, made.layout.size).roll(7)
        made.initial_model = lambda seed, number=0, start=start: start
        assert made.layout.num_embedding == made.layout.num_parameters - 48
        watch = fit(made, blobs(4), method(), tmp_path / str(number), ROUNDS, engine="sequential")
        runs.append(watch)
    for client in range(4):
        one, other = (watch.state.clients[client].model for watch in runs)
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(runs[0].state.global_model, runs[1].state.global_model, atol=1e-6, rtol=1e-5)
