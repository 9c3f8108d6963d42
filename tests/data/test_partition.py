"""Tests of the properties of every partition: disjoint, in range, sorted and reproducible, or a clear error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lcfl.data.partition
from lcfl.data.partition import (
    IID,
    ByOwner,
    ClassDirichlet,
    ClientDirichlet,
    ClientShares,
    CopyPerGroup,
    FromFile,
    LabelRing,
    LabelSkew,
    OverlappingFractions,
    Partition,
    PartOfPool,
    Pathological,
    Quantity,
    Shards,
    Subsampled,
    write_partition,
)
from tests.data.partitions import DISJOINT_PARTITIONS, OVERLAPPING, OVERLAPPING_PARTITIONS, RULES

LABELS = st.lists(st.integers(0, 6), min_size=20, max_size=120).map(np.array)
PUBLIC = {getattr(lcfl.data.partition, name) for name in lcfl.data.partition.__all__}
CLASSES = {each for each in PUBLIC if isinstance(each, type) and issubclass(each, Partition)} - {Partition}


def test_every_partition_is_covered_by_the_property_tests():
    assert {ByOwner, FromFile, Subsampled, PartOfPool, *RULES, *OVERLAPPING} == CLASSES


def checked(partition, labels, num_clients, seed):
    """Returns checked shares, or None if the partition refuses with its own message and not with one of numpy."""
    try:
        shares = partition(labels, num_clients, np.random.default_rng(seed))
    except ValueError as error:
        assert str(error).startswith(tuple(f"{rule.__name__}: " for rule in CLASSES))
        return None
    assert len(shares.indices) == num_clients
    assert shares.groups is None or (shares.groups.shape == (num_clients,) and shares.groups.dtype == np.int64)
    for share in shares.indices:
        assert share.dtype == np.int64 and len(share) > 0
        assert share[0] >= 0 and share[-1] < len(labels) and (np.diff(share) > 0).all()
    again = partition(labels, num_clients, np.random.default_rng(seed))
    assert all(map(np.array_equal, shares.indices, again.indices))
    return shares


@settings(max_examples=100, deadline=None)
@given(DISJOINT_PARTITIONS, LABELS, st.integers(1, 12), st.integers(0, 2**32))
def test_an_index_belongs_to_at_most_one_client(partition, labels, num_clients, seed):
    shares = checked(partition, labels, num_clients, seed)
    if shares is not None:
        everything = np.concatenate(shares.indices)
        assert len(set(everything.tolist())) == len(everything) and not shares.overlapping


@settings(max_examples=50, deadline=None)
@given(OVERLAPPING_PARTITIONS, LABELS, st.integers(1, 12), st.integers(0, 2**32))
def test_only_overlapping_partitions_share_indices(partition, labels, num_clients, seed):
    shares = checked(partition, labels, num_clients, seed)
    assert shares is None or shares.overlapping


@settings(max_examples=50, deadline=None)
@given(OVERLAPPING[CopyPerGroup], LABELS, st.integers(1, 12), st.integers(0, 2**32))
def test_an_index_belongs_to_at_most_one_client_of_a_group(partition, labels, num_clients, seed):
    shares = checked(partition, labels, num_clients, seed)
    if shares is None:
        return
    for group in range(partition.num_groups):
        members = np.flatnonzero(shares.groups == group)
        everything = np.concatenate([shares.indices[client] for client in members])
        assert len(set(everything.tolist())) == len(everything)
        if partition.samples_per_client is None:
            assert len(everything) == len(labels)


@given(LABELS, st.integers(1, 12), st.integers(0, 1000))
def test_whole_pool_is_dealt_out(labels, num_clients, seed):
    shares = IID()(labels, num_clients, np.random.default_rng(seed))
    sizes = [len(share) for share in shares.indices]
    assert sum(sizes) == len(labels) and max(sizes) - min(sizes) <= 1


def test_another_seed_deals_differently():
    labels = np.arange(200) % 5
    for partition in (
        IID(),
        Quantity(1.0),
        ClassDirichlet(1.0),
        ClientDirichlet(1.0),
        Pathological(2),
        LabelSkew(2),
        LabelRing(2),
        Shards(2),
        Shards(2, by_class=True),
        CopyPerGroup(2),
        OverlappingFractions((0.1, 0.6)),
        Subsampled(IID(), (5, 5)),
        PartOfPool(IID(), 50),
    ):
        first, second = (partition(labels, 4, np.random.default_rng(seed)) for seed in (0, 1))
        assert not all(map(np.array_equal, first.indices, second.indices))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IID(0), "samples_per_client"),
        (lambda: ClassDirichlet(0.0), "alpha"),
        (lambda: ClassDirichlet(float("nan")), "alpha"),
        (lambda: ClassDirichlet(0.1, min_samples=0), "min_samples"),
        (lambda: ClassDirichlet(0.1, max_tries=0), "max_tries"),
        (lambda: ClientDirichlet(-1.0), "alpha"),
        (lambda: ClientDirichlet(0.1, (350, 50)), "low <= high"),
        (lambda: ClientDirichlet(0.1, (0, 5)), "1 <= low"),
        (lambda: ClientDirichlet(0.1, (5, 2**62)), r"high < 2\*\*31, got \(5, 4611686018427387904\)"),
        (lambda: Pathological(0), "classes_per_client"),
        (lambda: Pathological(3, (2, 5)), "3 <= low"),
        (lambda: Pathological(3, (3, 5), balanced=False), "balanced"),
        (lambda: ClassDirichlet(0.1, balance=False, fractions=(0.0, 0.5)), "0 < low <= high <= 1"),
        (lambda: ClassDirichlet(0.1, fractions=(0.1, 0.5)), "balance: false"),
        (lambda: Quantity(0.0), "alpha"),
        (lambda: Quantity(1.0, 0), "min_samples"),
        (lambda: Quantity(1.0, max_tries=0), "max_tries"),
        (lambda: LabelSkew(0), "num_labels"),
        (lambda: LabelSkew(2, "ring"), "got draw='ring'; allowed are cyclic and random"),
        (lambda: LabelSkew(3, sizes=(2, 5)), "3 <= low"),
        (lambda: LabelRing(0), "num_labels"),
        (lambda: LabelRing(2, min_per_label=0), "min_per_label"),
        (lambda: LabelRing(2, log_std=float("inf")), "log_std"),
        (lambda: LabelRing(3, (2, 5)), "3 <= low"),
        (lambda: Shards(0), "shards_per_client"),
        (lambda: Shards(2, sizes=(5, 9)), "by_class: true"),
        (lambda: Shards(3, by_class=True, sizes=(2, 9)), "3 <= low"),
        (lambda: CopyPerGroup(0), "num_groups"),
        (lambda: CopyPerGroup(2, 0), "samples_per_client"),
        (lambda: OverlappingFractions((0.6, 0.1)), "low <= high"),
        (lambda: OverlappingFractions((0.1, 0.6), -1.0), "alpha"),
        (lambda: Subsampled(IID(), (3, 2)), "low <= high"),
        (lambda: Subsampled(IID(), fractions=(0.5, 1.1)), "high <= 1"),
        (lambda: Subsampled(IID()), "either sizes or fractions, got None and None"),
        (lambda: Subsampled(IID(), (2, 3), (0.1, 0.2)), "either sizes or fractions"),
        (lambda: PartOfPool(IID(), 0), "num_samples"),
    ],
)
def test_invalid_parameters_are_refused_at_once(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("labels", "num_clients", "words"),
    [
        (np.array([0, 1, -1]), 1, "label -1"),
        (np.array([], dtype=np.int64), 1, "got no samples to deal out"),
        (np.array([0.0, 1.0]), 1, "float64"),
        (np.array([[0], [1]]), 1, r"shape \(2, 1\)"),
        (np.array([0, 1]), 0, "num_clients must be at least 1, got 0"),
        (np.array([0, 1]), 3, "3 clients cannot share 2 samples"),
    ],
)
def test_errors_name_the_invalid_argument(labels, num_clients, words):
    with pytest.raises(ValueError, match=words):
        IID()(labels, num_clients, np.random.default_rng(0))


class Broken(Partition):
    """Returns the shares that the test gives it."""

    def __init__(self, *indices, groups=None, overlapping=False):
        self.shares = ClientShares([np.array(each, dtype=np.int64) for each in indices], groups, overlapping)

    def split(self, pool, num_clients, generator):
        return self.shares


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (Broken([0, 1], [1, 2]), r"index 1 at client\(s\) 0, 1"),
        (Broken([0, 0], [1, 2]), r"index 0 at client\(s\) 0\)"),
        (Broken([0, 1, 0], [1, 2], overlapping=True), r"1 indices .* at client\(s\) 0\); .* only once in a client"),
        (Broken([0], [4]), "index 4 of client 1 is outside the pool, whose indices are 0 to 3"),
        (Broken([0], [-1]), "index -1"),
        (Broken([0], []), "1 of 2 clients got no samples .the first is client 1"),
        (Broken([0]), "holds 1 clients, but num_clients is 2"),
        (Broken([0], [1], groups=np.array([0])), "1 groups for 2 clients"),
    ],
)
def test_user_defined_partition_is_checked(partition, words):
    with pytest.raises(ValueError, match=words):
        partition(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))


class Returned(Partition):
    """Returns what the test gives it."""

    def __init__(self, returned):
        self.returned = returned

    def split(self, pool, num_clients, generator):
        return self.returned


def dealt(returned):
    return Returned(returned)(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda own: np.array(own, dtype=np.uint8)])
def test_a_users_split_may_return_any_list_of_integers(kind):
    val, test = [kind([2]), kind([])], [kind([0]), kind([])]
    if kind is torch.tensor:
        val[1] = test[1] = torch.tensor([])
    shares = dealt(ClientShares([kind([3, 2]), kind([1])], val=val, test=test))
    for arrays, expected in ((shares.indices, [[2, 3], [1]]), (shares.val, [[2], []]), (shares.test, [[0], []])):
        assert [each.tolist() for each in arrays] == expected and all(each.dtype == np.int64 for each in arrays)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([[0], [1]], r"Returned: split returned list; it must return ClientShares\(indices\)"),
        (ClientShares([0, 1]), r"indices of client 0 has dtype int64 and shape \[\]; it must be a list of integers\.$"),
        (ClientShares([[0], [[1]]]), r"indices of client 1 has dtype int64 and shape \[1, 1\]"),
        (ClientShares([[0], [1.0]]), "indices of client 1 has dtype float64"),
        (ClientShares([[0], np.arange(4) == 1]), r"client 1 has dtype bool .*for a mask, give np\.flatnonzero\(mask\)"),
        (ClientShares([[0], [1]], val=[[0], [True]]), r"ClientShares\.val of client 1 has dtype bool"),
        (ClientShares([[0], [1]], test=[["2"], []]), r"ClientShares\.test of client 0 has dtype <U1"),
    ],
)
def test_what_a_users_split_returns_must_be_integers(returned, words):
    with pytest.raises(ValueError, match=words):
        dealt(returned)


def test_user_defined_partition_may_declare_overlap():
    shares = Broken([0, 1], [1, 2], overlapping=True)(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))
    assert [share.tolist() for share in shares.indices] == [[0, 1], [1, 2]] and shares.overlapping


def test_user_defined_partition_need_not_sort():
    shares = Broken([3, 0], [2])(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))
    assert shares.indices[0].tolist() == [0, 3]


@pytest.mark.parametrize("groups", [None, np.array([0, 0, 1])])
@pytest.mark.parametrize("partition", [IID(), CopyPerGroup(3)])
def test_from_file_restores_a_written_partition(tmp_path: Path, groups, partition):
    labels = np.arange(30) % 3
    drawn = partition(labels, 3, np.random.default_rng(0))
    written = ClientShares(drawn.indices, groups, drawn.overlapping)
    write_partition(tmp_path / "folder" / "p.json", written)
    read = FromFile(str(tmp_path / "folder" / "p.json"))(labels, 3, np.random.default_rng(1))
    assert all(map(np.array_equal, written.indices, read.indices))
    assert read.groups is None if groups is None else np.array_equal(read.groups, groups)
    assert read.overlapping == drawn.overlapping
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 10**5, "cannot be read as JSON"),
        ("[]", "'indices'"),
        (json.dumps({"index": [[0]]}), "'indices'"),
        (json.dumps({"indices": [[0], [0, 1.5]]}), r"indices\[1\] .* a list of integers, got 1\.5"),
        (json.dumps({"indices": [[0], [True]]}), r"indices\[1\] .* a list of integers, got true"),
        (json.dumps({"indices": [[0], None]}), r"indices\[1\] .* a list of integers, got null"),
        (json.dumps({"indices": [[0], ["x" * 99]]}), r"indices\[1\] .* a list of integers, got \.\.\."),
        ('{"indices": [[0], [NaN]]}', r"indices\[1\] .* a list of integers, got NaN"),
        (json.dumps({"indices": [[0], [1]], "groups": [0, "a"]}), 'groups .* a list of integers, got "a"'),
        ("\0", "cannot be read as JSON"),
        (json.dumps({"indices": [[0], [2**70]]}), "64 bits"),
        (json.dumps({"indices": [[0], [0]]}), "more than once"),
        (json.dumps({"indices": [[0], [0]], "overlapping": 1}), "overlapping .* must be true or false, got 1"),
        (json.dumps({"indices": [[0], [7]]}), "index 7 of client 1 is outside"),
        (json.dumps({"indices": [[0], []]}), "got no sample"),
        (json.dumps({"indices": [[0]]}), "num_clients is 2"),
        (
            json.dumps({"indices": [[0], [1]], "own_test": [[7], [0]]}),
            "test sample 0 of client 1 is held by a client",
        ),
        (
            json.dumps({"indices": [[0], [1]], "own_test": [[-1], [7]]}),
            "test sample -1 of client 0 is held by a cl",
        ),
        (json.dumps({"indices": [[0], [1]], "own_test": [[7]]}), "gives test samples for 1 of 2 clients"),
        (json.dumps({"indices": [[0], [1]], "own_val": [[], [0]]}), "sample 0 of client 1 is not one of its samples"),
        (
            json.dumps({"indices": [[0], [0]], "own_val": [[0], []], "overlapping": True}),
            "overlap cannot have val",
        ),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text, words):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        FromFile(str(path))(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "an endless device", "a link to itself", "a zero in the name"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind):
    path = tmp_path / ("p\0.json" if "zero" in kind else "p.json")
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif "zero" not in kind:
        path.symlink_to("/dev/zero" if "device" in kind else path)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        FromFile(str(path))(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))


def test_a_link_to_a_file_is_read(tmp_path: Path):
    (tmp_path / "there.json").write_text('{"indices": [[0, 1], [2, 3]]}')
    (tmp_path / "p.json").symlink_to("there.json")
    assert (
        len(FromFile(str(tmp_path / "p.json"))(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0)).indices) == 2
    )


SPOILED = [None, -1, 0, 7, 2**62, 2**70, 1.5, float("nan"), "x", [], [0], {"x": 0}, True]


def spoiled(value):
    """Yields every copy of a JSON value in which one part is replaced or missing."""
    yield from SPOILED
    for place in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in spoiled(value[place]):
            copy = value.copy()
            copy[place] = other
            yield copy
        copy = value.copy()
        del copy[place]
        yield copy


@pytest.mark.slow
def test_every_damaged_file_is_refused_in_words_or_harmless(tmp_path: Path):
    path, refused = tmp_path / "p.json", 0
    good = {"indices": [[0, 2, 5], [1, 3], [4]], "groups": [0, 1, 1], "overlapping": False}
    text = json.dumps(good)
    draw = np.random.default_rng(0)
    damaged = [json.dumps(each).encode() for each in spoiled(good)]
    damaged += [text[:end].encode() for end in range(len(text))]
    for _ in range(2000):
        raw = bytearray(text.encode())
        raw[draw.integers(len(raw))] = draw.integers(256)
        damaged.append(bytes(raw))
    for content in damaged:
        path.write_bytes(content)
        try:
            shares = FromFile(str(path))(np.zeros(6, dtype=np.int64), 3, np.random.default_rng(0))
            assert len(shares.indices) == 3
        except ValueError as error:
            assert str(error).startswith("FromFile: ") and "\n" not in str(error), content
            refused += 1
        assert path.read_bytes() == content
    assert refused > 2000


def test_error_names_a_missing_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no file .*nothing.json"):
        FromFile(str(tmp_path / "nothing.json"))(np.zeros(4, dtype=np.int64), 2, np.random.default_rng(0))


def test_partitions_import_no_heavy_packages():
    code = "import sys, lcfl.data.partition; print({'torch', 'torchvision', 'lightning'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "set()"
