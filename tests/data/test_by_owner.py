"""Tests of clients that a data set already has."""

import json

import numpy as np
import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import Datasets, Tensors
from lcfl.data.owners import TEST, TRAIN, VAL, Owners
from lcfl.data.partition import IID, ByOwner, FromFile, PartOfPool, Subsampled
from lcfl.data.partition.by_owner import OneClient
from lcfl.data.partition.pool import Pool
from tests.helpers.builders import loaded

WARDS = ["b", "a", "c", "b", "b", "a", "b", "b"]


def own(owners=WARDS, test_owners=None, partition=None, **options):
    """Returns data whose inputs are their own index."""
    total = len(owners) + len(test_owners or [])
    inputs, labels = torch.arange(float(total))[:, None], torch.arange(total) % 2
    split = len(owners)
    test = None if test_owners is None else (inputs[split:], labels[split:])
    dataset = Tensors((inputs[:split], labels[:split]), test, 2, owners=[*owners, *(test_owners or [])])
    return FederatedDataModule(dataset, partition or ByOwner(), **options)


def shares(population):
    lists = zip(population.train, population.val, population.test["own_split"], strict=True)
    return [sorted(np.concatenate(each).tolist()) for each in lists]


def test_one_client_keeps_the_parts_of_all_owners():
    owners = Owners(("a", "b"), np.array([0, 0, 1, 1, 0, 1]), np.array([TRAIN, VAL, TRAIN, TRAIN, TEST, TEST], np.int8))
    pool = Pool.of_owners(4, None, owners, keeps_parts=True)
    shares = OneClient()(pool, 1, np.random.default_rng(0))
    found = (shares.indices, shares.val, shares.test)
    assert [each.tolist() for (each,) in found] == [[0, 1, 2, 3], [1], [4, 5]] and shares.names is None
    assert loaded(own(["a"] * 8, partition=OneClient())).population.names == ("a",)
    assert OneClient()(Pool(3), 1, np.random.default_rng(0)).indices[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="OneClient: num_clients must be 1, got 2"):
        OneClient()(pool, 2, np.random.default_rng(0))


def test_each_owner_is_a_client_in_the_order_of_names():
    data = loaded(own())
    assert data.num_clients == 3 and data.population.names == ("a", "b", "c")
    assert shares(data.population) == [[1, 5], [0, 3, 4, 6, 7], [2]]
    assert data.population.called(1) == "1 (b)"


def test_owners_that_are_numbers_are_sorted_as_numbers():
    for owners in ([10, 9, 10, 2], ["10", "9", "10", "2"]):
        found = Owners.of_column(owners, 4)
        assert found.names == ("2", "9", "10") and found.number.tolist() == [2, 1, 2, 0]
    assert Owners.of_column(["10", "9", "b"], 3).names == ("10", "9", "b")


@pytest.mark.parametrize("missing", [np.nan, None, "", " "])
def test_a_missing_owner_in_a_list_is_refused(missing):
    with pytest.raises(ValueError, match="1 of 3 samples have no owner"):
        Owners.of_column(["ann", missing, "bob"], 3)


def test_owners_that_are_bytes_are_read_as_utf8():
    owners = Owners.of_column(["Köln".encode(), b"Bonn", "Köln".encode()], 3)
    assert owners.names == ("Bonn", "Köln") and owners.number.tolist() == [1, 0, 1]


def test_owners_beyond_int64_stay_apart():
    large = [2**63 + 1, 2**63 + 2, 7, -1]
    assert set(Owners.of_column(large, 4).names) == {str(each) for each in large}


def test_spellings_that_may_mean_one_owner_give_a_warning():
    with pytest.warns(
        UserWarning, match="'Ann Lee' and 'ann  lee' differ only in case or spaces, and are separate clients"
    ):
        data = loaded(own(["Ann Lee", "bob", "ann  lee"] * 4))
    assert data.num_clients == 3


def test_newcomers_and_leavers_may_be_named():
    data = loaded(own([*WARDS, "2"], newcomers=["c", "2"], leavers={"b": 2}))
    assert data.population.names == ("2", "a", "b", "c")
    assert data.newcomer_clients == data.population.newcomers == (0, 3) and data.leavers == {2: 2}
    assert data.random_like().newcomer_clients == (0, 3)
    assert own([*WARDS, "2"], newcomers=[2]).newcomer_clients == (2,)  # a number is no name
    assert own(newcomers=["b"], num_clients=2).newcomer_clients == (1,)
    with pytest.raises(
        ValueError, match=r"data.newcomers: there is no client 'ab'; .* the names a, b, c. Did you mean"
    ):
        own(newcomers=["ab"])
    with pytest.raises(ValueError, match=r"data.leavers: got .*, in which one client is given twice"):
        own(leavers={"a": 2, 0: 2})
    with pytest.raises(ValueError, match=r"data.leavers: there is no client 'a'; there are the numbers 0 to 2"):
        own(partition=IID(), num_clients=3, leavers={"a": 3})


def test_owners_with_few_samples_are_left_out():
    data = loaded(own(partition=ByOwner(min_samples=2)))
    assert data.population.names == ("a", "b")


def test_the_largest_owners_are_chosen_and_ties_go_to_the_first_name():
    assert loaded(own(num_clients=1)).population.names == ("b",)
    assert loaded(own(num_clients=2)).population.names == ("a", "b")
    tied = own(["x", "y", "z", "y", "x", "z"], num_clients=2)
    assert loaded(tied).population.names == ("x", "y")


def test_random_owners_depend_on_the_seed_alone():
    owners = [f"{number:02}" for number in range(20)] * 2
    chosen = [
        loaded(own(owners, partition=ByOwner(choose="random"), num_clients=5, seed=seed)).population.names
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert list(chosen[0]) == sorted(chosen[0])


def test_own_test_samples_are_the_test_set_and_others_get_a_split():
    data = loaded(own([*"aaaa", *"bbbb"], [*"aa"], val_fraction=0.0))
    population = data.population
    assert population.train[0].tolist() == [0, 1, 2, 3]  # nothing of it is held out
    assert population.test["own_split"][0].tolist() == [8, 9]
    assert len(population.train[1]) == 3 and len(population.test["own_split"][1]) == 1


def test_own_validation_samples_are_kept_for_validation():
    dataset = Tensors((torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64)), num_classes=2)
    part = np.array([TRAIN, TRAIN, VAL, TRAIN, TRAIN, TRAIN, TRAIN, TRAIN], dtype=np.int8)
    known = Owners(("a", "b"), np.array([0, 0, 0, 0, 1, 1, 1, 1]), part)
    dataset.owners = lambda by=None: known
    population = loaded(FederatedDataModule(dataset, ByOwner(), val_fraction=0.5, test_fraction=0.3)).population
    assert population.val[0].tolist() == [2] and 2 not in population.train[0]
    assert len(population.train[0]) == 2 and len(population.test["own_split"][0]) == 1
    assert len(population.val[1]) == 2  # round(0.5 * 3)


def test_a_merged_pool_forgets_the_parts():
    data = loaded(own([*"aaaa", *"bbbb"], [*"aa"], pool="all", val_fraction=0.0))
    assert shares(data.population) == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]]


def test_an_owner_with_test_samples_alone_is_no_client_unless_parts_are_merged():
    data = loaded(own([*"aaaa"], [*"bbb"]))
    assert data.population.names == ("a",) and data.num_clients == 1
    assert loaded(own([*"aaaa"], [*"bbb"], pool="all")).population.names == ("a", "b")


def test_no_client_is_tested_on_what_another_one_trains_on():
    data = loaded(own([*"aaaabbbb"], [*"aab"], protocols=["own_split", "global"]))
    learnt = set(np.concatenate([*data.population.train, *data.population.val]).tolist())
    for lists in data.population.test.values():
        assert not learnt & set(np.concatenate(lists).tolist())
    assert data.population.test["global"][0].tolist() == [8, 9, 10]


@pytest.mark.parametrize(
    ("wrap", "sizes"), [(lambda base: Subsampled(base, sizes=(2, 2)), [2, 2, 1]), (lambda base: base, [2, 5, 1])]
)
def test_other_partitions_may_cut_the_clients(wrap, sizes):
    data = loaded(own(partition=wrap(ByOwner()), num_clients=3))
    assert [len(each) for each in shares(data.population)] == sizes
    assert data.population.names == ("a", "b", "c")


def test_a_part_of_the_pool_keeps_the_owners_of_its_samples():
    data = loaded(own(WARDS * 4, partition=PartOfPool(ByOwner(), 16), num_clients=2))
    owners = np.array(WARDS * 4)
    for name, own_samples in zip(data.population.names, shares(data.population), strict=True):
        assert set(owners[own_samples]) == {name}


def test_a_partition_file_keeps_the_names(tmp_path):
    first = loaded(own())
    first.write(tmp_path / "partition.json")
    again = loaded(own(partition=FromFile(str(tmp_path / "partition.json"))))
    assert again.num_clients == 3 and again.population.names == ("a", "b", "c")
    assert shares(again.population) == shares(first.population)


def test_names_are_part_of_the_fingerprint():
    first, second = (loaded(own([*names])).population for names in ("aabb", "aacc"))
    assert shares(first) == shares(second) and first.fingerprint != second.fingerprint


class Items(list):
    """A data set with an attribute that names the owner of each item."""

    def __init__(self, wards):
        super().__init__((torch.tensor([float(n)]), n % 2) for n in range(len(wards)))
        self.ward = wards


def test_the_owners_of_a_data_set_class_are_an_attribute():
    dataset = Datasets(Items([*"bab"]), 2, Items([*"ab"]))
    data = loaded(FederatedDataModule(dataset, ByOwner("ward"), val_fraction=0.0))
    assert data.population.names == ("a", "b")
    assert [each.tolist() for each in data.population.test["own_split"]] == [[3], [4]]


def test_a_partition_that_does_not_know_its_clients_has_a_hundred():
    assert FederatedDataModule(Tensors((torch.zeros(200, 1), torch.zeros(200))), IID()).num_clients == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensors((torch.zeros(2, 1), torch.zeros(2)), owners=["a"]), "got 1 owners for 2 samples"),
        (lambda: own(partition=ByOwner("ward")), "data.dataset: Tensors: there is no column 'ward'"),
        (
            lambda: FederatedDataModule(Datasets(Items([*"ab"]), 2), ByOwner("city")),
            "data.dataset: Datasets: train has no attribute 'city' with one owner for each of its 2 items",
        ),
        (
            lambda: FederatedDataModule(Tensors((torch.zeros(2, 1), torch.zeros(2))), ByOwner()),
            "data.partition: ByOwner: this data set does not know who its samples belong to",
        ),
        (lambda: loaded(own(num_clients=4)), "ByOwner: 3 of 3 owners have training samples and at least 1 samples"),
        (
            lambda: loaded(own(partition=ByOwner(min_samples=9))),
            "ByOwner: none of 3 owners has training samples and at least 9 samples",
        ),
        (lambda: ByOwner(min_samples=0), "min_samples must be at least 1, got 0"),
        (lambda: ByOwner(choose="smallest"), "got choose='smallest'; allowed are largest and random"),
    ],
)
def test_errors_say_what_to_change(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_a_client_without_training_samples_is_named():
    part = np.array([TRAIN, VAL, TRAIN, TRAIN], dtype=np.int8)
    pool = Pool.of_owners(4, None, Owners(("a", "b"), np.array([0, 0, 1, 1]), part), keeps_parts=True)
    assert ByOwner().num_clients(pool) == 2
    only_val = Owners(("a", "b"), np.array([0, 0, 1, 1]), np.array([VAL, VAL, TRAIN, TEST], dtype=np.int8))
    assert ByOwner().num_clients(Pool.of_owners(3, None, only_val, keeps_parts=True)) == 1


@pytest.mark.parametrize("names", [["a", "a"], ["a"], ["a", "b", "b"]])
def test_clients_without_a_name_of_their_own_are_refused(tmp_path, names):
    content = {"indices": [[0], [1]], "names": names}
    (tmp_path / "partition.json").write_text(json.dumps(content))
    words = f"gives {len(names)} names, {len(set(names))} of them different, for 2 clients"
    with pytest.raises(ValueError, match=words):
        loaded(own(partition=FromFile(str(tmp_path / "partition.json"))))


def test_a_file_keeps_the_parts_that_clients_brought_along(tmp_path):
    first = loaded(own([*"aaaabbbb"], [*"aab"], val_fraction=0.0))
    first.write(tmp_path / "partition.json")
    partition = FromFile(str(tmp_path / "partition.json"))
    again = loaded(own([*"aaaabbbb"], [*"aab"], partition=partition, val_fraction=0.0)).population
    for role in ("train", "val"):
        assert list(map(list, getattr(again, role))) == list(map(list, getattr(first.population, role)))
    assert list(map(list, again.test["own_split"])) == list(map(list, first.population.test["own_split"]))


def test_the_proxy_set_has_no_test_sample_of_a_client():
    data = own([*"aaaabbbb"], [*"aab", *"ccccc"], val_fraction=0.0, protocols=["own_split", "global"], proxy=3)
    population = loaded(data).population
    assert not set(population.proxy) & set(np.concatenate(population.test["own_split"]))
    with pytest.raises(ValueError, match=r"data\.proxy takes 5 .* but 5 are free"):
        loaded(own([*"aaaabbbb"], [*"aab", *"ccccc"], proxy=5))


@pytest.mark.parametrize("wrap", [lambda base: Subsampled(base, sizes=(2, 2)), lambda base: PartOfPool(base, 3)])
def test_a_partition_of_a_partition_knows_its_column_and_its_clients(wrap):
    data = loaded(FederatedDataModule(Datasets(Items([*"bab"]), 2), wrap(ByOwner("ward"))))
    assert data.num_clients == 2 and data.population.names == ("a", "b")


def test_a_cut_client_keeps_its_own_validation_samples():
    part = np.array([VAL, VAL, VAL, TRAIN, TRAIN, TRAIN], dtype=np.int8)
    known = Owners(("a",), np.zeros(6, dtype=np.int64), part)
    shares = Subsampled(ByOwner(), sizes=(2, 2))(
        Pool.of_owners(6, None, known, keeps_parts=True), 1, np.random.default_rng(0)
    )
    assert len(shares.indices[0]) == 5 and shares.val[0].tolist() == [0, 1, 2]


class NotAvailable:
    """Like pandas' NA."""

    def __eq__(self, other):
        return self

    __ne__ = __eq__
    __hash__ = None

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


@pytest.mark.parametrize("missing", [None, float("nan"), "", NotAvailable()])
def test_a_sample_without_an_owner_is_refused(missing):
    with pytest.raises(ValueError, match=r"1 of 2 samples have no owner \(the first is sample 1\)"):
        Tensors((torch.zeros(2, 1), torch.zeros(2)), owners=["a" if isinstance(missing, str) else 1.0, missing])


def test_the_kinds_of_arguments_are_checked_first():
    with pytest.raises(TypeError, match=r"data\.dataset: got list; it must be an instance of FederatedDataset"):
        FederatedDataModule([1, 2], IID())
