"""Equality to the last bit, of values and of states."""

from dataclasses import is_dataclass

import torch


def same(one, other):
    """Equal to the last bit, in type and in structure."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        ours, theirs = (each.detach().contiguous().reshape(-1) for each in (one, other))
        return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))  # NaN is NaN, and -0.0 is not 0.0
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    return type(one) is type(other) and one == other


def assert_same_clients(one, other):
    """Of two states what every client keeps, and who has taken part."""
    assert list(one.clients) == list(other.clients)
    assert same(one.participated, other.participated)
    for client in range(one.num_clients):
        assert same(one.clients[client], other.clients[client]), client


def assert_same_state(one, other, but=()):
    """Of two states every client, the sums over clients, and every field, but for those named."""
    assert_same_clients(one, other)
    assert same(one.clients.sums, other.clients.sums)
    for name in vars(one).keys() - {"clients", *but}:
        assert same(getattr(one, name), getattr(other, name)), name
