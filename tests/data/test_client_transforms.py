"""Tests of client transforms in a data module: roles, groups, files and loaders."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Synthetic, Tensors
from lcfl.data.partition import IID, ClassDirichlet, CopyPerGroup, FromFile, Pathological
from lcfl.data.transforms import ClientTransform, GaussianNoise, LabelPermutation, Rotation
from lcfl.data.views import View

CPU = torch.device("cpu")
DRAW = torch.Generator().manual_seed(0)
IMAGES = Tensors(
    (torch.rand(240, 1, 4, 4, generator=DRAW), torch.arange(240) % 6),
    (torch.rand(60, 1, 4, 4, generator=DRAW), torch.arange(60) % 6),
)


def ready(partition, *transforms, **options):
    options = {"dataset": IMAGES, "num_clients": 8, "protocols": ["own_split", "global"], **options}
    data = FederatedDataModule(partition=partition, client_transforms=transforms, **options)
    data.prepare_data()
    data.setup()
    return data


def test_groups_of_ifca_see_rotated_copies():
    data = ready(CopyPerGroup(4), Rotation(by="group"))
    people = data.population
    assert people.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for client, group in enumerate(people.groups):
        # The rotation is the same in every role.
        for role in (people.train, people.val, people.test["own_split"], people.test["global"]):
            raw = data.samples.batch(role[client], CPU)
            seen = data.seen_by(client).batch(role[client], CPU)
            assert torch.equal(seen[0], torch.rot90(raw[0], int(group), dims=(2, 3)))
            assert torch.equal(seen[1], raw[1])


def test_rotations_of_as_cfl_make_groups_of_a_dirichlet_partition():
    data = ready(ClassDirichlet(0.8, 3, balance=False), Rotation())
    assert data.population.groups.tolist() == [0, 1, 2, 3] * 2
    assert data.seen_by(1) is data.seen_by(5) is not data.seen_by(2)


def test_label_blocks_and_views_together_make_the_groups():
    data = ready(Pathological(3), Rotation((0, 90)), LabelPermutation(), GaussianNoise(0.1))
    assert data.population.groups.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert len({data.seen_by(client) for client in range(8)}) == 8
    indices = data.population.train[7]
    labels = data.population.views[7][1].labels
    assert labels != tuple(range(6))
    _, targets = data.seen_by(7).batch(indices, CPU)
    assert targets.tolist() == [labels[each] for each in data.samples.labels[indices]]
    assert data.seen_by(7).labels[indices].tolist() == targets.tolist()
    assert data.population.label_counts[7].tolist() == np.bincount(targets, minlength=6).tolist()


def test_without_transforms_clients_see_the_data_set_unchanged():
    data = ready(Pathological(3))
    assert data.seen_by(0) is data.samples and data.population.views is None


def test_views_are_part_of_the_fingerprint_and_follow_the_data_seed():
    plain = ready(Pathological(3)).population.fingerprint
    prints = [
        ready(Pathological(3), *transforms, seed=seed).population.fingerprint
        for transforms, seed in (
            ((Rotation(),), 0),
            ((Rotation((0, 180)),), 0),
            ((GaussianNoise(0.1),), 0),
            ((GaussianNoise(0.2),), 0),
            ((Rotation(), GaussianNoise(0.1)), 0),
        )
    ]
    assert len({plain, *prints}) == 6
    torch.manual_seed(5)
    assert ready(Pathological(3), GaussianNoise(0.1)).population.fingerprint == prints[2]
    first, second = (ready(Pathological(3), GaussianNoise(0.1), seed=seed).population.views for seed in (0, 1))
    assert first != second
    # The shares do not depend on transforms.
    assert all(
        map(
            np.array_equal, ready(Pathological(3)).population.train, ready(Pathological(3), Rotation()).population.train
        )
    )


@pytest.mark.parametrize(
    "transforms",
    [
        (Rotation((0, 90)), LabelPermutation()),
        (Rotation(by="group"), LabelPermutation(2, by="client"), GaussianNoise(0.3)),
        (),
    ],
)
@pytest.mark.parametrize("partition", [Pathological(3), CopyPerGroup(2)])
def test_from_file_restores_the_same_views(tmp_path, partition, transforms):
    data = ready(partition, *transforms)
    data.write(tmp_path / "partition.json")
    content = json.loads((tmp_path / "partition.json").read_text())
    again = ready(FromFile(str(tmp_path / "partition.json")), *transforms)
    assert again.population.fingerprint == data.population.fingerprint
    assert again.population.to_dict() == data.population.to_dict()
    assert content["true_groups"] == data.population.groups.tolist()
    assert (content["views"] is None) == (transforms == ())
    if transforms:
        assert content["views"][0][0] == "QuarterTurns(number=0)" and len(content["views"]) == 8


def test_loaders_give_every_image_as_clients_see_it():
    data = ready(Pathological(3), Rotation((0, 180)), protocols=["global"], batch_size=7)
    for loader, role in ((data.train_dataloader(), "train"), (data.test_dataloader(), "test")):
        lists = data.population.train if role == "train" else data.population.test["global"]
        expected = {tuple(image) for client, indices in enumerate(lists) for image in seen_flat(data, client, indices)}
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert {tuple(image) for image in inputs.flatten(1).tolist()} == expected
        assert len(inputs) == len(targets) == len(expected)
    # Every official test image occurs in both rotations.
    assert len(inputs) == 120


def test_loader_gives_a_plain_test_set_unchanged():
    data = ready(Pathological(3), Rotation((0, 180)), protocols=["global_plain", "global"])
    inputs = torch.cat([batch[0] for batch in data.test_dataloader()])
    assert torch.equal(inputs, data.samples.batch(np.arange(240, 300), CPU)[0])


def seen_flat(data, client, indices):
    return data.seen_by(client).batch(indices, CPU)[0].flatten(1).tolist()


def test_trial_data_have_the_transforms():
    trial = FederatedDataModule(
        IMAGES, Pathological(3), 8, client_transforms=[Rotation(by="group"), LabelPermutation()]
    ).random_like()
    trial.prepare_data()
    trial.setup()
    assert len(trial.population.views) == 8 and trial.population.groups.tolist() == [0] * 8


def test_shapes_are_checked_before_data_is_read():
    class Unread(Synthetic):
        def load(self):
            raise AssertionError("it was read")

    with pytest.raises(
        ValueError,
        match=r"data.client_transforms: Rotation: angles .* need images .* the data set's inputs are \(16,\)",
    ):
        ready(IID(), Rotation(), dataset=Unread())


@dataclass(frozen=True)
class Negative(View):
    def inputs(self, inputs, indices):
        return 1 - inputs


class EveryOtherNegative(ClientTransform):
    makes_groups = True

    def views(self, num_clients, num_classes, groups, generator):
        return [Negative() if client % 2 else View() for client in range(num_clients)]


def test_user_defined_transform_works():
    data = ready(IID(), EveryOtherNegative())
    assert data.population.groups.tolist() == [0, 1] * 4 and data.seen_by(0) is data.seen_by(2)
    plain = FederatedDataModule(IMAGES, IID(), 8)
    plain.setup()
    assert torch.equal(data.seen_by(1).batch([3], CPU)[0], 1 - plain.samples.batch([3], CPU)[0])


class Forgetful(ClientTransform):
    def views(self, num_clients, num_classes, groups, generator):
        return [object()] * num_clients


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Forgetful(), "data.client_transforms: Forgetful: the view object is not a dataclass"),
        (Rotation(by="group"), "data.client_transforms: Rotation: by 'group' needs a partition"),
    ],
)
def test_errors_begin_with_the_option(transform, words):
    with pytest.raises(ValueError, match=words):
        ready(IID(), transform)
