"""Client faults: which clients have them, in which rounds, and what these clients see."""

import numpy as np
import pytest
import torch

from lcfl.data.datasets import Digits, Synthetic, Tensors
from lcfl.data.faults import Backdoor, LabelFlip, RandomUpdate, ScaledUpdate, StaleUpdate, find_faulty
from lcfl.data.partition import IID
from lcfl.data.transforms import LabelPermutation, Rotation
from tests.helpers.builders import blobs, loaded

CPU = torch.device("cpu")


def test_smaller_shares_are_nested_and_the_same_for_all_faults():
    few, many = ScaledUpdate(0.2), LabelFlip(0.5)
    faulty = find_faulty([few, many], range(10), None, seed=3)
    assert [sum(fault in own for own in faulty.values()) for fault in (few, many)] == [2, 5]
    assert all(many in own for own in faulty.values() if few in own)
    assert list(faulty) == sorted(faulty)
    assert find_faulty([few], range(10), None, seed=4).keys() != find_faulty([few], range(10), None, seed=3).keys()
    assert find_faulty([ScaledUpdate(0.29)], range(100), None, 0).keys() != {}
    assert len(find_faulty([ScaledUpdate(0.29)], range(100), None, 0)) == 29  # 0.29 * 100 is 28.999...


def test_named_clients_and_numbers_are_found():
    fault = ScaledUpdate(["b", 3, 3])
    assert find_faulty([fault], range(4), ["a", "b", "c", "d"], 0) == {1: (fault,), 3: (fault,)}


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([4], r"ScaledUpdate: got the client 4; allowed are 4 numbers from 0 to 3 and names, e.g. 'a', 'b', 'c'"),
        (["x"], r"got the client 'x'"),
        ([0, 1, 2, 3], "every one of the 4 clients has a fault, so there is none to evaluate"),
    ],
)
def test_clients_that_do_not_exist_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        find_faulty([ScaledUpdate(clients)], range(4), ["a", "b", "c", "d"], 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaledUpdate(1.0), r"ScaledUpdate: got clients=1.0; allowed are shares in \[0, 1\)"),
        (lambda: ScaledUpdate("ward_b"), "got clients='ward_b'; allowed are shares .* lists of numbers or names"),
        (lambda: StaleUpdate(0.1, [5, 4]), r"StaleUpdate: got rounds=\[5, 4\]; give the first and the last round"),
        (lambda: StaleUpdate(0.1, [None, 4]), r"got rounds=\[None, 4\]; give the first and the last round"),
        (lambda: RandomUpdate(0.1, std=0.0), "RandomUpdate: got std=0.0; it must be > 0"),
        (lambda: Backdoor(0.1, share=0.0), "Backdoor: got target=0, share=0.0, size=3"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("fault", "dataset", "message"),
    [
        (Backdoor(0.2), Synthetic(), r"data.faults: Backdoor: needs images .* are torch.float32 of shape \(16,\)"),
        (Backdoor(0.2, target=10), Digits(), "Backdoor: got target=10, but the data set has the classes 0 to 9"),
        (Backdoor(0.2, size=9), Digits(), "room for a square of size 9"),
        (
            LabelFlip(0.2),
            Tensors((torch.ones(40, 2), torch.ones(40))),
            "data.faults: LabelFlip: needs targets that are classes",
        ),
    ],
)
def test_data_that_a_fault_cannot_change_are_refused(fault, dataset, message):
    with pytest.raises(ValueError, match=message):
        loaded(blobs(4, dataset=dataset, partition=IID(), faults=[fault]))


def test_a_fault_happens_in_its_rounds_and_to_its_clients():
    open_ended = LabelFlip([1], rounds=[2, None])
    assert [open_ended.happens_in(number) for number in (-1, 1, 2, 99)] == [False, False, True, True]
    data = loaded(blobs(4, faults=[LabelFlip([1], rounds=[2, 3])]))
    own = data.population.train[1]
    honest = data.samples.batch(own, CPU)[1]
    for number in (-1, 1, 4):
        assert data.trained_on(1, number) is data.samples
    for number in (2, 3):
        assert data.trained_on(0, number) is data.samples
        assert torch.equal(data.trained_on(1, number).training_batch(own, CPU)[1], 7 - honest)
    assert data.seen_by(1) is data.samples  # an evaluation would see the true labels


def test_faults_are_part_of_the_fingerprint_and_of_the_files(tmp_path):
    plain, faulty = loaded(blobs(4)), loaded(blobs(4, faults=[ScaledUpdate([2])]))
    assert plain.population.fingerprint != faulty.population.fingerprint
    assert faulty.population.to_dict()["faulty"].keys() == {2}
    assert "4 clients, 1 faulty, " in faulty.population.summary()
    assert "faulty" not in plain.population.to_dict()


def test_a_backdoor_stamps_a_share_of_the_samples_and_always_the_same():
    data = loaded(blobs(6, dataset=Digits(), partition=IID(), faults=[Backdoor([0], target=7, share=0.25, size=2)]))
    every = np.arange(len(data.samples))
    inputs, labels = data.samples.batch(every, CPU)
    seen, targets = data.trained_on(0, 5).training_batch(every, CPU)
    stamped = (seen[:, :, -2:, -2:] == 2.0).flatten(1).all(1)
    assert 0.2 < stamped.float().mean() < 0.3
    assert (targets[stamped] == 7).all() and torch.equal(targets[~stamped], labels[~stamped])
    assert torch.equal(seen[~stamped], inputs[~stamped])
    rest = seen.clone()
    rest[:, :, -2:, -2:] = inputs[:, :, -2:, -2:]
    assert torch.equal(rest, inputs)
    part = every[::7]
    assert torch.equal(data.trained_on(0, 9).training_batch(part, CPU)[0], seen[::7])


def test_a_backdoor_has_a_test_protocol_of_samples_of_other_classes():
    faults = [Backdoor([0], target=7, share=0.25)]
    data = loaded(blobs(6, dataset=Digits(), partition=IID(), faults=faults))
    assert data.protocols == ["own_split", "backdoor"]
    for client, stamped in enumerate(data.population.test["backdoor"]):
        own = data.population.test["own_split"][client]
        assert np.array_equal(stamped, own[data.samples.labels[own] != 7])
    inputs, targets = data.seen_by(3, "backdoor").batch(stamped, CPU)
    assert (targets == 7).all() and (inputs[..., -3:, -3:] == 2.0).all()


def test_a_backdoor_comes_after_what_the_client_sees_anyway():
    faults, swapped = [Backdoor([0], target=7)], [LabelPermutation(2, "client")]
    data = loaded(blobs(6, dataset=Digits(), partition=IID(), faults=faults, client_transforms=swapped))
    for client in (2, 3):  # one sees the true labels, the other permuted ones
        stamped, own = data.population.test["backdoor"][client], data.population.test["own_split"][client]
        seen = data.seen_by(client).targets(own).numpy()
        assert np.array_equal(stamped, own[seen != 7])
        assert (data.seen_by(client, "backdoor").batch(stamped, CPU)[1] == 7).all()


def test_a_backdoor_of_plain_test_samples_sees_them_plain():
    """With ``global_plain`` first, a client's permuted labels and rotated images play no part."""
    images, labels = torch.rand(90, 1, 8, 8), torch.arange(90) % 9
    swapped = [LabelPermutation(3, "client"), Rotation()]
    data = loaded(
        blobs(
            6,
            dataset=Tensors((images, labels), (images, labels), 9),
            partition=IID(),
            faults=[Backdoor([0], target=7)],
            client_transforms=swapped,
            protocols=["global_plain", "own_split"],
        )
    )
    for client, stamped in enumerate(data.population.test["backdoor"]):
        inputs, targets = data.seen_by(client, "backdoor").batch(stamped, CPU)
        assert (data.samples.labels[stamped] != 7).all() and (targets == 7).all()
        assert torch.equal(inputs[..., :4, :], data.samples.batch(stamped, CPU)[0][..., :4, :])


def test_faults_without_an_effect_are_warned_about_and_two_backdoors_refused():
    with pytest.warns(UserWarning, match="ScaledUpdate got clients=0.2, which is none of 4 clients"):
        assert find_faulty([ScaledUpdate(0.2)], range(4), None, 0) == {}
    with pytest.raises(ValueError, match="got several Backdoors, but the protocol backdoor measures one"):
        blobs(4, dataset=Digits(), faults=[Backdoor([0]), Backdoor([1])])
