"""Checks that values or states are equal to the last bit."""

from dataclasses import is_dataclass

import torch

from lcfl.core.raw_bytes import raw_bytes


def same(one, other):
    """Returns whether two values are equal to the last bit, and in type and structure."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(raw_bytes(one), raw_bytes(other))  # NaN equals NaN, but -0.0 differs from 0.0
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    return type(one) is type(other) and one == other


def assert_same_clients(one, other):
    """Asserts that every client keeps the same in two states, and that the same clients have taken part."""
    assert list(one.clients) == list(other.clients)
    assert same(one.participated, other.participated)
    for client in range(one.num_clients):
        assert same(one.clients[client], other.clients[client]), client


def assert_same_state(one, other, but=()):
    """Asserts that two states have the same clients, sums over clients, and fields except those in `but`."""
    assert_same_clients(one, other)
    assert same(one.clients.sums, other.clients.sums)
    for name in vars(one).keys() - {"clients", *but}:
        assert same(getattr(one, name), getattr(other, name)), name
