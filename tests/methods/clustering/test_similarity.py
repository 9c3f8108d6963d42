"""Tests of low-rank models: comparison with scikit-learn's PCA, and invariants."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import silhouette_score
from torch.nn.functional import normalize

import lcfl.methods.clustering.similarity
from lcfl.methods.clustering.similarity import (
    assign,
    cosine,
    cosine_silhouette,
    principal_components,
    project,
    project_all,
    squared_distances_to_centres,
)


def models(num=8, size=40, seed=0, offset=0.0):
    """Returns models whose directions have clearly different spread."""
    draw = np.random.default_rng(seed)
    spread = 2.0 ** -np.arange(num)
    return torch.tensor(draw.normal(size=(num, num)) * spread @ draw.normal(size=(num, size)) + offset).float()


@pytest.mark.parametrize(("num", "dimension"), [(8, 4), (8, 7), (3, 1), (2, 5), (30, 6)])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_principal_components_equal_scikit_learns_pca_up_to_sign(num, dimension, offset):
    model_nP = models(num, offset=offset)
    basis_PD = principal_components(model_nP, dimension)
    dimension = min(dimension, num - 1)
    assert basis_PD.shape == (40, dimension)
    assert basis_PD.dtype == torch.float32
    reference = PCA(dimension, svd_solver="full").fit(model_nP.double().numpy()).components_
    cosines = (torch.tensor(reference) @ basis_PD.double()).abs()
    torch.testing.assert_close(
        cosines, torch.eye(dimension, dtype=torch.float64), rtol=0, atol=2e-3 if offset else 1e-4
    )


def test_chunks_of_columns_add_up(monkeypatch):
    whole = principal_components(models(), 4)
    monkeypatch.setattr(lcfl.methods.clustering.similarity, "CHUNK", 7)
    torch.testing.assert_close(principal_components(models(), 4), whole, rtol=0, atol=1e-5)


def test_the_largest_entry_of_a_component_is_positive():
    basis_PD = principal_components(models(), 7)
    largest = basis_PD.abs().argmax(dim=0)
    assert bool((basis_PD[largest, torch.arange(7)] > 0).all())
    torch.testing.assert_close(principal_components(-models(), 7), basis_PD, rtol=0, atol=1e-5)


def test_components_come_in_descending_order_of_variance():
    variance = (models() @ principal_components(models(), 7)).var(dim=0)
    assert bool((variance[:-1] > variance[1:]).all())


def test_directions_without_variance_are_left_out():
    one, other = models(2)
    assert principal_components(torch.stack([one, other, one, other, one]), 4).shape == (40, 1)
    line = torch.stack([t * one for t in torch.tensor([1.0, 2.0, 4.0, 8.0])])
    assert principal_components(line, 3).shape == (40, 1)


def test_there_are_fewer_components_than_models():
    assert principal_components(models(5), 50).shape == (40, 4)
    assert principal_components(models(8, size=3), 50).shape == (3, 3)


def test_equal_models_have_no_component():
    with pytest.raises(ValueError, match="the models are all equal; train them before"):
        principal_components(models(1).repeat(4, 1), 2)


def test_the_code_of_a_mean_is_the_mean_of_the_codes():
    model_NP, basis_PD = models(6), principal_components(models(8), 5)
    for offset_P in (None, models(9, seed=1).mean(dim=0)):
        code_ND = project(model_NP, basis_PD, offset_P)
        mean_D = project(model_NP.mean(dim=0), basis_PD, offset_P)
        torch.testing.assert_close(mean_D, code_ND.mean(dim=0), rtol=1e-5, atol=1e-5)


def test_projection_by_hand():
    model_NP = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    basis_PD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert project(model_NP, basis_PD).tolist() == [[4.0, 2.0], [10.0, 5.0]]
    assert project(model_NP, basis_PD, torch.tensor([1.0, 1.0, 1.0])).tolist() == [[2.0, 1.0], [8.0, 4.0]]
    assert project(model_NP[0], basis_PD).tolist() == [4.0, 2.0]


def test_a_rotation_of_the_components_does_not_change_cosines():
    basis_PD = principal_components(models(8), 5)
    rotation_DD = torch.tensor(np.linalg.qr(np.random.default_rng(2).normal(size=(5, 5)))[0]).float()
    client_NP, centre_KP = models(6, seed=1), models(3, seed=2)
    plain = cosine(project(client_NP, basis_PD), project(centre_KP, basis_PD))
    turned = cosine(project(client_NP, basis_PD @ rotation_DD), project(centre_KP, basis_PD @ rotation_DD))
    torch.testing.assert_close(plain, turned, rtol=0, atol=1e-5)
    assert plain.std() > 0.1


def test_cosines_by_hand():
    found = cosine(torch.tensor([[3.0, 4.0], [0.0, -2.0]]), torch.tensor([[1.0, 0.0], [0.0, 5.0], [-3.0, -4.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8, -1.0], [0.0, -1.0, 0.8]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cosine_does_not_depend_on_the_lengths(dtype):
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=dtype)
    torch.testing.assert_close(cosine(1e-15 * rows, 1e-18 * rows), cosine(rows, rows))


def test_a_zero_code_is_equally_near_to_every_centre():
    assert cosine(torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("similarities", "current", "expected"),
    [
        ([0.1, 0.9, 0.5], 0, 1),  # the best
        ([0.9, 0.9, 0.5], 1, 1),  # a tie goes to the current cluster
        ([0.9, 0.9, 0.9], 2, 2),
        ([0.5, 0.9, 0.9], 0, 1),  # a tie of other clusters goes to the lowest number
        ([-0.9, -0.5, -0.1], 1, 2),
    ],
)
def test_assignment_and_its_ties(similarities, current, expected):
    found = assign(torch.tensor([similarities]), torch.tensor([current]))
    assert found.tolist() == [expected]
    assert found.dtype == torch.int64


def test_every_row_is_assigned_separately():
    similarity_NK = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert assign(similarity_NK, torch.tensor([1, 0, 1, 0])).tolist() == [0, 1, 1, 0]


def test_squared_distances_to_equal_centres_are_equal():
    rows = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    found = squared_distances_to_centres(rows, torch.stack([rows[1], rows[1], rows[2]]))
    assert torch.equal(found[:, 0], found[:, 1])
    assert found[1, 0] == found[2, 2] == 0
    np.testing.assert_allclose(found, ((rows[:, None] - rows[None, [1, 1, 2]]) ** 2).sum(dim=2), rtol=1e-5)


def test_a_row_without_a_current_cluster_takes_the_lowest_of_a_tie():
    assert assign(torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]), torch.tensor([-1, 1, -1])).tolist() == [0, 1, 1]


def test_projections_of_many_models_are_correct_and_need_the_memory_of_one_block():
    def own_mb():
        return next(int(row.split()[1]) / 1e3 for row in Path("/proc/self/status").open() if row.startswith("RssAnon"))

    draw = torch.Generator().manual_seed(0)
    model, basis, offset = (torch.randn(*shape, generator=draw) for shape in ((20_003,), (20_000, 3), (20_000,)))
    models = [model * number for number in range(1, 20)]
    codes = project_all(iter(models), basis, offset)
    exact = torch.stack([each[:20_000].double() - offset for each in models]) @ basis.double()
    # The codes are sums of 20,000 numbers, added up in an order that depends on the processor. They reach 1,400, with
    # errors of about 1e-3.
    torch.testing.assert_close(codes.double(), exact, rtol=0, atol=0.05)
    assert project_all([], basis).shape == (0, 3)
    before = own_mb()
    project_all((model.clone() for _ in range(4000)), basis)  # 320 MB
    assert own_mb() - before < 60


@pytest.mark.parametrize("labels", [[0, 1] * 10, [7] * 18 + [3, 3], [0] * 9 + [1] * 10 + [2], [*range(19), 0]])
def test_cosine_silhouette_equals_scikit_learns(labels):
    direction_nD = normalize(torch.from_numpy(np.random.default_rng(1).normal(size=(20, 3))), dim=1)
    expected = silhouette_score(direction_nD.numpy(), labels, metric="cosine")
    assert cosine_silhouette(direction_nD, torch.tensor(labels)) == pytest.approx(expected, abs=1e-12)


def test_cosine_silhouette_of_equal_and_of_zero_vectors():
    same = normalize(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64), dim=1).expand(6, 3)
    assert cosine_silhouette(same, torch.tensor([0, 0, 0, 1, 1, 1])) == pytest.approx(0, abs=1e-3)
    close = normalize(same + 1e-8 * torch.eye(6, 3, dtype=torch.float64), dim=1)  # equal in float32
    assert cosine_silhouette(close, torch.tensor([0, 1, 2, 0, 0, 0])) == pytest.approx(0, abs=1e-3)
    with_empty = torch.cat([same[:4], torch.zeros(2, 3, dtype=torch.float64)])
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    expected = silhouette_score(with_empty.numpy(), labels.numpy(), metric="cosine")
    assert cosine_silhouette(with_empty, labels) == pytest.approx(expected, abs=1e-12)
