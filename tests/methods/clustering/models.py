"""Models that are easy to tell apart, and the state of a clustering after a warm-up round with these models."""

import numpy as np
import torch

from lcfl.models import Layout
from tests.helpers.builders import linear, server_of, state_of, upload

LAYOUT = Layout.from_network(linear())  # P = 17: embedding 6 + 3, decision 6 + 2
SIZE = LAYOUT.size


def axis(place, value=1.0):
    model = torch.zeros(SIZE)
    model[place] = value
    return model


def flat(*entries):
    """Returns a model, or an update of one, with these first entries and zeros."""
    return torch.tensor([*map(float, entries), *[0.0] * (SIZE - len(entries))])


def opened(clustering, models, num_clients=None, layout=LAYOUT, initial=None):
    """Returns the state after the warm-up round of clients 0, 1, ... with these models."""
    num_clients = num_clients or len(models)
    size = layout.size
    state = state_of([], [0] * num_clients, [[0.0] * size], [False] * num_clients, initial)
    clustering.on_extra_round_end(server_of(layout), state, [upload(i, model) for i, model in enumerate(models)])
    return state


def four_ways(num=12, seed=0):
    """Returns models near four axes in turn, and their groups.

    The models have different lengths, but by direction the groups are clear.
    """
    draw = torch.Generator().manual_seed(seed)
    models = [axis(i % 4, 1 + i / 4) + 0.02 * torch.randn(SIZE, generator=draw) for i in range(num)]
    return models, np.arange(num) % 4


def groups_of(num_groups=4, size=6, noise=0.05, seed=0):
    """Returns models along one axis per group, with noise, and their groups."""
    draw = torch.Generator().manual_seed(seed)
    groups = [client % num_groups for client in range(num_groups * size)]
    models = noise * torch.randn(len(groups), SIZE, generator=draw)
    for client, group in enumerate(groups):
        models[client, group] += 1.0
    return list(models), groups
