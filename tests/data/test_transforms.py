"""Tests of the view that each client gets and of the true groups that follow."""

import numpy as np
import pytest
import torch

from lcfl.data.spec import SampleSpec
from lcfl.data.transforms import ClientTransform, GaussianNoise, LabelPermutation, Rotation, true_groups
from lcfl.data.views import Noise, QuarterTurns, View

GROUPS = np.array([0, 0, 1, 1, 2])


def views(transform, num_clients=5, groups=GROUPS, seed=0, num_classes=4):
    return transform(num_clients, num_classes, groups, np.random.default_rng(seed))


def turns(*args, **options):
    return [view.number for view in views(*args, **options)]


def test_angles_are_assigned_by_client_or_group():
    assert turns(Rotation(), 6, None) == [0, 1, 2, 3, 0, 1]
    assert turns(Rotation((0, 180), by="group")) == [0, 0, 2, 2, 0]
    assert turns(Rotation((-90, 450), by="client"), 2) == [3, 1]


def test_angles_can_be_drawn():
    drawn = turns(Rotation(by="random"), 4000, None)
    assert np.bincount(drawn).tolist() == pytest.approx([1000] * 4, abs=130)
    assert drawn == turns(Rotation(by="random"), 4000, None) != turns(Rotation(by="random"), 4000, None, seed=1)


def test_noise_grows_with_the_clients_number():
    found = views(GaussianNoise(0.5))
    assert [view.sigma for view in found] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert len({view.key for view in found}) == 5 and min(view.key for view in found) >= 0
    assert found == views(GaussianNoise(0.5)) != views(GaussianNoise(0.5), seed=1)


def test_every_group_has_a_different_permutation():
    found = views(LabelPermutation())
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0].labels == (0, 1, 2, 3)
    assert len({found[0], found[2], found[4]}) == 3
    assert all(sorted(view.labels) == [0, 1, 2, 3] for view in found)
    assert found != views(LabelPermutation(), seed=1)
    assert len(set(views(LabelPermutation(6, by="client"), 6, num_classes=3))) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotation((0, 45)), r"multiples of 90, at least one; got \[0, 45\]"),
        (lambda: Rotation(()), "at least one"),
        (lambda: Rotation(by="image"), "got by='image'; allowed are client, random and group"),
        (lambda: GaussianNoise(-1.0), "sigma must be a finite number >= 0, got -1.0"),
        (lambda: GaussianNoise(float("nan")), "sigma"),
        (lambda: LabelPermutation(by="client"), "by 'client' needs num_groups"),
        (lambda: LabelPermutation(0), "num_groups must be at least 1, got 0"),
        (lambda: LabelPermutation(2, by="image"), "got by='image'"),
        (lambda: views(Rotation(by="group"), groups=None), "Rotation: by 'group' needs a partition that knows"),
        (lambda: views(LabelPermutation(), groups=None), "LabelPermutation: by 'group' needs a partition"),
        (
            lambda: views(LabelPermutation(7, by="client"), num_classes=3),
            "3 classes do not have 7 different permutations",
        ),
        (
            lambda: views(LabelPermutation(2, by="client"), num_classes=1),
            "1 classes do not have 2 different permutations",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


class Plain(View):
    """Has no dataclass decorator, so any two instances would compare equal whatever they do."""


class Given(ClientTransform):
    """Returns the views that the test gives it."""

    def __init__(self, *given):
        self.given = given

    def views(self, num_clients, num_classes, groups, generator):
        return self.given


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Given(View()), "Given: gives 1 views for 2 clients"),
        (Given(View(), Plain()), r"Given: the view Plain is not a dataclass.*@dataclass\(frozen=True\)"),
    ],
)
def test_user_defined_views_are_checked(transform, words):
    with pytest.raises(ValueError, match=words):
        views(transform, 2)


@pytest.mark.parametrize(
    ("angles", "shape", "fits"),
    [
        ((0, 90), (3, 32, 32), True),
        ((0, 90), (1, 28, 20), False),
        ((0, 180), (1, 28, 20), True),
        ((0, 180), (16,), False),
        ((0, 180), (28, 28), False),
    ],
)
def test_rotation_checks_the_shape_of_inputs(angles, shape, fits):
    if fits:
        Rotation(angles).check(SampleSpec(shape))
    else:
        with pytest.raises(ValueError, match=rf"Rotation: angles \[{angles[0]}, {angles[1]}\] need images .* are \("):
            Rotation(angles).check(SampleSpec(shape))
    GaussianNoise(1.0).check(SampleSpec(shape))


def test_noise_needs_floating_inputs():
    with pytest.raises(ValueError, match=r"GaussianNoise: needs floating-point inputs; the data set's are torch.int64"):
        GaussianNoise(1.0).check(SampleSpec((3,), torch.int64))
    LabelPermutation().check(SampleSpec((3,), torch.int64))


def test_true_groups_combine_partition_and_views():
    half = Rotation((0, 180), by="client")
    seen = [QuarterTurns(0), QuarterTurns(2), QuarterTurns(0), QuarterTurns(2), QuarterTurns(0)]
    assert true_groups(GROUPS, [half], [seen]).tolist() == [0, 1, 2, 3, 4]
    assert true_groups(None, [half], [seen]).tolist() == [0, 1, 0, 1, 0]
    by_group = [QuarterTurns(0), QuarterTurns(0), QuarterTurns(2), QuarterTurns(2), QuarterTurns(0)]
    assert true_groups(GROUPS, [half], [by_group]).tolist() == GROUPS.tolist()
    assert true_groups(None, [half, half], [seen, by_group]).tolist() == [0, 1, 2, 3, 0]


def test_noise_and_views_that_all_clients_share_make_no_groups():
    noise = [Noise(0.1, 1), Noise(0.2, 2)]
    assert true_groups(None, [GaussianNoise(0.2)], [noise]) is None
    assert true_groups(None, [Rotation((90,))], [[QuarterTurns(1)] * 2]) is None
    assert true_groups(GROUPS[:2], [GaussianNoise(0.2)], [noise]).tolist() == [0, 0]


def test_rotation_refuses_targets_that_are_no_masks():
    Rotation().check(SampleSpec((1, 4, 4), target_shape=(4, 4)))
    Rotation().check(SampleSpec((1, 4, 4), target_shape=(7,)))
    with pytest.raises(ValueError, match=r"targets of shape \(5, 2\) are no masks of images"):
        Rotation().check(SampleSpec((1, 4, 4), target_shape=(5, 2)))
