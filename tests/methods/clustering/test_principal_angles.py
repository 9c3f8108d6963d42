"""Tests of PACFL: signatures and angles against plain numpy, a run in numpy, and exact properties."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lcfl.core.messages import Uplink
from lcfl.data.samples import TensorSamples
from lcfl.methods.clustering import PrincipalAngles, principal_angles
from lcfl.methods.clustering.principal_angles import angle_between, angles
from lcfl.methods.local import LocalTraining
from tests.helpers.bits import same
from tests.helpers.builders import (
    blobs,
    blobs_module,
    dealt,
    engine,
    fit,
    linear_module,
    linear_step,
    server_of,
    state_of,
    two_sided,
)
from tests.helpers.clustered import pacfl
from tests.methods.clustering.models import LAYOUT
from tests.methods.clustering.runs import are_the_groups

INPUTS, TARGETS, TRAIN, TEST = two_sided(4, size=7)
TRAIN = [share[: 7 - i // 2] for i, share in enumerate(TRAIN)]  # unequal sizes make weights by samples visible
TURNED = INPUTS @ np.array([[0.0, 1.0], [-1.0, 0.0]])
for CLIENT in (1, 3):  # clients whose points lie along other axes
    INPUTS[TRAIN[CLIENT]] = TURNED[TRAIN[CLIENT]] * [0.05, 4.0]
for CLIENT in (0, 2):
    INPUTS[TRAIN[CLIENT]] *= [4.0, 0.05]
LR = 0.05


def signature(client, number):
    """Returns, label by label, the first left singular vectors of the matrix whose columns are the samples."""
    parts = []
    for label in sorted(set(TARGETS[TRAIN[client]])):
        columns = INPUTS[TRAIN[client]][TARGETS[TRAIN[client]] == label].T
        parts.append(np.linalg.svd(columns, full_matrices=False)[0][:, :number])
    return np.concatenate(parts, axis=1)


def smallest_angle(one, other):
    return min(np.degrees(np.arccos(min(abs(u @ v), 1.0))) for u, v in product(one.T, other.T))


def test_signatures_clusters_and_a_round_match_numpy(tmp_path):
    data = dealt(INPUTS, TARGETS, TRAIN, test=TEST)
    watch = fit(linear_module(LR), data, pacfl(LocalTraining(steps=2), num_vectors=1, num_clusters=2), tmp_path)
    signatures = [signature(i, 1) for i in range(4)]
    angle = np.array([[smallest_angle(one, other) for other in signatures] for one in signatures])
    groups = [[0, 2], [1, 3]]
    assert max(angle[0, 2], angle[1, 3]) < min(angle[i, j] for i in (0, 2) for j in (1, 3))
    w0 = linear_module().initial_model(0).double().numpy()
    for number, group in enumerate(groups):
        models = []
        for i in group:
            w = w0
            for _ in range(2):
                w = w - LR * linear_step(w, INPUTS[TRAIN[i]], TARGETS[TRAIN[i]])[1]
            models.append(w)
        expected = np.average(models, axis=0, weights=[len(TRAIN[i]) for i in group])
        np.testing.assert_allclose(watch.state.centres[number], expected, atol=3e-6)
    assert watch.state.assignment.tolist() == [0, 1, 0, 1]
    opening = watch.history[0].row
    assert opening["comm/down_bytes"] == 0
    assert opening["comm/up_bytes"] == 4 * sum(each.size for each in signatures)
    assert "train/loss" not in opening
    size = len(w0)
    assert watch.rows[0]["comm/down_bytes"] == watch.rows[0]["comm/up_bytes"] == 4 * 4 * size
    between = (max(angle[0, 2], angle[1, 3]), angle[[0, 2]][:, [1, 3]].mean())
    assert opening["cluster/threshold"] == pytest.approx(np.mean(between), abs=0.05)


def columns(*vectors):
    return torch.tensor(vectors, dtype=torch.float32).T


def test_angles_worked_by_hand():
    x, y = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    diagonal, lifted = [0.6, 0.8, 0.0], [0.8, 0.0, 0.6]
    for kind in ("vector_min", "principal", "trace"):
        assert angle_between(columns(x), columns(y), kind) == pytest.approx(90)
        assert angle_between(columns(x), columns([-1.0, 0.0, 0.0]), kind) == pytest.approx(0, abs=1e-5)  # any sign
        assert angle_between(columns(x), columns(lifted), kind) == pytest.approx(np.degrees(np.arccos(0.8)), rel=1e-6)
    # The diagonal lies in the plane of x and y. It is 36.9 degrees from these vectors and 0 degrees from the plane.
    assert angle_between(columns(x, y), columns(diagonal), "vector_min") == pytest.approx(36.8699, abs=1e-3)
    assert angle_between(columns(x, y), columns(diagonal), "principal") == pytest.approx(0, abs=0.05)
    # Vectors are compared at the same place: in one plane, two vectors in the other order are at right angles.
    assert angle_between(columns(x, y), columns(lifted, y), "trace") == pytest.approx(36.8699, abs=0.05)
    assert angle_between(columns(x, y), columns(y, x), "trace") == pytest.approx(180)
    assert angle_between(columns(x, y), columns(y, x), "principal") == pytest.approx(0, abs=0.05)
    assert angle_between(columns(diagonal, y), columns(x), "trace") == pytest.approx(53.1301, abs=1e-3)
    # Linearly dependent vectors span no plane.
    assert angle_between(columns(x, x), columns(y), "principal") == pytest.approx(90)
    assert angle_between(columns(x), torch.empty(3, 0), "vector_min") == 90


@pytest.mark.parametrize("angle", ["vector_min", "principal", "trace"])
def test_a_signature_is_prepared_once_for_all_its_angles(monkeypatch, angle):
    draw = torch.Generator().manual_seed(0)
    signatures = [torch.randn(20, number, generator=draw) for number in (3, 6, 0, 9, 1)]
    pairs = [[0.0 if one is other else angle_between(one, other, angle) for other in signatures] for one in signatures]
    prepared, original = [], principal_angles._units
    monkeypatch.setattr(principal_angles, "_units", lambda *given: prepared.append(given) or original(*given))
    matrix = angles(signatures, angle)
    assert len(prepared) == len(signatures)
    assert (np.tril(matrix) == np.tril(pairs)).all()


def test_identical_clients_are_at_angle_zero():
    draw = np.random.default_rng(0)
    signatures = [torch.from_numpy(np.linalg.qr(draw.normal(size=(50, 4)))[0]).float() for _ in range(3)]
    matrix = angles([signatures[0], signatures[1], signatures[0]], "vector_min")
    assert matrix[0, 2] < 1e-5 and matrix[0, 1] > 10
    assert (matrix == matrix.T).all() and (np.diag(matrix) == 0).all()


def clustered(clustering, signatures, clients=None):
    state = state_of([], [0] * 4, [[0.0] * LAYOUT.size])
    clients = range(len(signatures)) if clients is None else clients
    uploads = [Uplink(i, {"signature": each}, 1) for i, each in zip(clients, signatures, strict=True)]
    clustering.on_extra_round_end(server_of(LAYOUT), state, uploads)
    return state


def test_ties_thresholds_and_missing_clients():
    x, y = columns([1.0, 0.0]), columns([0.0, 1.0])
    by_angle = {"threshold": 10.0, "num_clusters": None}
    assert clustered(PrincipalAngles(**by_angle), [x, y, x, y]).assignment.tolist() == [0, 1, 0, 1]
    assert clustered(PrincipalAngles(**by_angle), [x, x, x, x]).num_clusters == 1
    assert clustered(PrincipalAngles(threshold=180.0, num_clusters=None), [x, y, x, y]).num_clusters == 1
    state = clustered(PrincipalAngles(num_clusters=4), [x, y], clients=[1, 3])
    assert state.assignment.tolist() == [-1, 0, -1, 1]


def test_a_client_whose_samples_are_nan_is_left_out_and_changes_nobody_else(tmp_path):
    inputs = INPUTS.copy()
    inputs[TRAIN[2][0]] = np.nan
    method = pacfl(LocalTraining(steps=1), num_clusters=2)
    with pytest.warns(UserWarning, match=r"round -1: .* 1 of 4 clients is not finite \(2\); they are left out"):
        watch = fit(linear_module(LR), dealt(inputs, TARGETS, TRAIN, test=TEST), method, tmp_path)
    assert [cluster >= 0 for cluster in watch.state.assignment.tolist()] == [True, True, False, True]
    assert watch.state.participated.tolist() == [True, True, False, True]
    assert watch.state.centres.isfinite().all() and watch.state.global_model.isfinite().all()
    with pytest.raises(ValueError, match="got no finite signature"):
        fit(linear_module(LR), dealt(INPUTS * np.nan, TARGETS, TRAIN, test=TEST), method, tmp_path)


def test_the_linkage_decides_where_the_tree_is_cut():
    """The directions are at 0, 20, 42 and 65 degrees. The third is 22 from the first two, or 42 by complete linkage."""
    at = [columns([np.cos(np.radians(x)), np.sin(np.radians(x))]) for x in (0, 20, 42, 65)]
    for linkage, expected in (("single", [0, 0, 0, 1]), ("complete", [0, 0, 1, 1])):
        assert clustered(PrincipalAngles(num_clusters=2, linkage=linkage), at).assignment.tolist() == expected


@pytest.mark.parametrize("angle", ["vector_min", "principal", "trace"])
def test_separable_groups_are_found_at_once(tmp_path, angle):
    watch = fit(blobs_module(), blobs(12), pacfl(angle=angle, num_vectors=2), tmp_path, rounds=1, clients_per_round=3)
    for each in watch.history:
        assert are_the_groups(each.assignment)
    sampled = {int(watch.state.assignment[i]) for i in watch.sampled[0]}
    for cluster in range(4):
        assert same(watch.state.centres[cluster], watch.state.initial) is (cluster not in sampled)


def test_pixels_undo_the_normalisation():
    images = torch.randint(0, 256, (5, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for options in ({"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}, {}):
        examples = TensorSamples(images, [0, 1, 0, 1, 0], 5, 2, **options)
        inputs, _ = examples.batch(np.arange(5), torch.device("cpu"))
        torch.testing.assert_close(examples.pixels(inputs), images.float(), rtol=0, atol=1e-3)
        seen, _ = engine(linear_module(), SimpleNamespace(samples=examples)).pixels(np.array([3, 1]))
        torch.testing.assert_close(seen, images[[3, 1]].flatten(1).float(), rtol=0, atol=1e-3)
