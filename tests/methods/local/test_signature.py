"""Tests of the signatures of a client's data."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.methods.local import PixelSignature
from lcfl.methods.local.signature import left_singular_vectors
from lcfl.methods.local.training import LocalData


@pytest.mark.parametrize("shape", [(20, 6), (6, 20)])
def test_left_singular_vectors_are_numpys_up_to_sign(shape):
    matrix = np.random.default_rng(0).normal(size=shape)
    found = left_singular_vectors(torch.from_numpy(matrix), 3)
    expected = np.linalg.svd(matrix, full_matrices=False)[0][:, :3]
    np.testing.assert_allclose(np.abs((found.numpy() * expected).sum(axis=0)), 1, atol=1e-9)


def test_samples_that_span_fewer_directions_give_fewer_vectors():
    one = torch.tensor([[1.0], [2.0], [2.0]])
    assert left_singular_vectors(one, 3).shape == (3, 1)
    assert left_singular_vectors(one.repeat(1, 5), 3).shape == (3, 1)
    assert left_singular_vectors(torch.zeros(3, 2), 3).shape == (3, 0)
    torch.testing.assert_close(left_singular_vectors(one, 3).abs()[:, 0], torch.tensor([1, 2, 2]).double() / 3)


def test_a_signature_has_p_vectors_per_label_and_trains_nothing():
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.rand(12, 30, generator=draw), torch.tensor([4] * 2 + [7] * 10)
    engine = SimpleNamespace(pixels=lambda indices: (images[indices], labels[indices]))
    data = LocalData(np.arange(12), 5, 0, 0)
    found = PixelSignature(3)(ClientState(None, 5), Downlink({}), data, engine)
    assert found.extras["signature"].shape == (30, 2 + 3)
    assert (found.consumed, found.loss, found.model.numel()) == (5, None, 0)
    assert PixelSignature(3).cost(12, 5) == 12


def test_the_signature_of_two_cifar_labels_has_18432_floats():
    images, labels = torch.rand(40, 3072), torch.tensor([0, 1] * 20)
    engine = SimpleNamespace(pixels=lambda indices: (images, labels))
    found = PixelSignature(3)(ClientState(), Downlink({}), LocalData(np.arange(40), 5, 0, 0), engine)
    assert found.extras["signature"].numel() == 18_432
    assert found.extras["signature"].dtype == torch.float32


@pytest.mark.parametrize("targets", [torch.rand(12), torch.rand(12, 1), torch.ones(12, 5, dtype=torch.int64)])
def test_without_classes_all_samples_count_as_one_label(targets):
    inputs = torch.rand(12, 30, generator=torch.Generator().manual_seed(0))
    engine = SimpleNamespace(pixels=lambda indices: (inputs, targets))
    found = PixelSignature(3)(ClientState(), Downlink({}), LocalData(np.arange(12), 5, 0, 0), engine)
    torch.testing.assert_close(found.extras["signature"], left_singular_vectors(inputs.T, 3).float())


def test_no_vector_is_refused():
    with pytest.raises(ValueError, match="PixelSignature: got num_vectors=0; it must be at least 1"):
        PixelSignature(0)
