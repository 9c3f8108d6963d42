"""Tests of the loaders of LEAF's files, on files that are made in its layout."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import FEMNIST, Shakespeare
from lcfl.data.datasets.leaf import CHARACTERS
from lcfl.data.owners import TEST, TRAIN
from lcfl.data.partition import ByOwner
from tests.helpers.builders import loaded
from tests.helpers.commandline import CONFIGS, FEDAVG, lcfl
from tests.helpers.known_sets import images, texts, trained, write_leaf

CPU = torch.device("cpu")


DATA_OF_FEMNIST = ("-c", CONFIGS / "data/femnist.yaml", *FEDAVG)


def change(path, **entries):
    """Changes entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_images_and_writers_come_back(tmp_path):
    one, two, three = images(3, seed=1), images(2, seed=2), images(4, seed=3)
    write_leaf(tmp_path, "train", 0, f0002_45=one)
    write_leaf(tmp_path, "train", 1, f0001_41=two)
    write_leaf(tmp_path, "test", 0, f0002_45=three)
    dataset = FEMNIST(str(tmp_path))
    dataset.prepare()
    samples, owners = dataset.load(), dataset.owners()
    assert samples.inputs.dtype == torch.uint8 and samples.inputs.shape == (9, *dataset.shape)
    assert samples.num_train == 5 and samples.labels.tolist() == one[1] + two[1] + three[1]
    inputs, _ = samples.batch(np.arange(9), CPU)
    np.testing.assert_allclose(inputs.reshape(9, 784), one[0] + two[0] + three[0], atol=1e-6)
    assert owners.names == ("f0001_41", "f0002_45")
    assert owners.number.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert owners.part.tolist() == [TRAIN] * 5 + [TEST] * 4


def test_paper_is_1_unless_images_are_inverted(tmp_path):
    paper = ([[1.0] * 783 + [0.0]], [61])
    write_leaf(tmp_path, "train", a=paper)
    upright, inverted = (FEMNIST(str(tmp_path), invert).load().batch([0], CPU)[0].flatten() for invert in (False, True))
    assert upright.tolist() == paper[0][0] and inverted.tolist() == [0.0] * 783 + [1.0]


def test_pixels_that_are_no_bytes_stay_as_they_are(tmp_path):
    x, y = images(2)
    x[1][7] = 0.12345
    write_leaf(tmp_path, "train", bytes=images(3, seed=1), between=(x, y))
    samples = FEMNIST(str(tmp_path)).load()
    assert samples.inputs.dtype == torch.float32
    expected = torch.tensor(images(3, seed=1)[0] + x)
    assert torch.allclose(samples.batch(range(5), CPU)[0].flatten(1), expected, rtol=0, atol=1e-7)
    assert samples.inputs[4].flatten()[7] == torch.tensor(0.12345)


def test_the_numbers_in_num_samples_are_not_used_and_small_users_are_skipped(tmp_path):
    path = write_leaf(tmp_path, "train", a=images(3), b=images(2))
    content = json.loads(path.read_text())
    # LEAF's split by samples leaves users with a single sample in user_data, without samples.
    content["user_data"]["tiny"] = {"x": [], "y": []}
    change(path, num_samples=[7, 7], hierarchies=["x", "y"], user_data=content["user_data"])
    write_leaf(tmp_path, "test", a=images(1), b=([], []))
    owners = FEMNIST(str(tmp_path)).owners()
    assert owners.names == ("a", "b") and np.bincount(owners.number).tolist() == [4, 2]


@pytest.mark.parametrize("root", ["", "data"])
def test_files_before_the_split_are_training_samples(tmp_path, root):
    write_leaf(tmp_path / root, "all_data", a=images(3))
    samples = FEMNIST(str(tmp_path)).load()
    assert samples.num_train == len(samples) == 3


def population(root, **options):
    data = FederatedDataModule(FEMNIST(str(root)), ByOwner(), **options)
    return loaded(data).population


def test_writers_are_tested_on_their_own_test_samples(tmp_path):
    write_leaf(tmp_path, "train", a=images(8), b=images(10))
    write_leaf(tmp_path, "test", b=images(3), a=images(2))
    both = population(tmp_path, val_fraction=0.25)
    assert both.names == ("a", "b")
    assert [each.tolist() for each in both.test["own_split"]] == [[21, 22], [18, 19, 20]]
    assert both.sizes.tolist() == [6, 8]
    merged = population(tmp_path, pool="all", val_fraction=0)
    assert merged.sizes.tolist() == [8, 10] and [len(each) for each in merged.test["own_split"]] == [2, 3]


def test_writers_with_test_samples_only_take_part_with_pool_all(tmp_path):
    write_leaf(tmp_path, "train", a=images(8), b=images(8))
    write_leaf(tmp_path, "test", c=images(4))
    assert population(tmp_path).names == ("a", "b")
    assert population(tmp_path, pool="all").names == ("a", "b", "c")


def test_files_are_read_once_for_owners_and_samples(tmp_path):
    path = write_leaf(tmp_path, "train", a=images(3))
    dataset = FEMNIST(str(tmp_path))
    assert dataset.owners().names == ("a",)
    first = dataset.load() if path.unlink() is None else None
    assert len(first) == 3 and dataset.owners().names == ("a",)
    with pytest.raises(FileNotFoundError):
        dataset.load()


def test_texts_become_numbers_of_characters(tmp_path):
    (x, y), more = texts(3, CHARACTERS), texts(2, CHARACTERS, seed=1)
    write_leaf(tmp_path, "train", ALL_S_WELL_HELENA=(x, y))
    write_leaf(tmp_path, "test", ALL_S_WELL_HELENA=more)
    samples = Shakespeare(str(tmp_path)).load()
    inputs, labels = samples.batch(range(5), CPU)
    assert inputs.dtype == labels.dtype == torch.int64 and inputs.shape == (5, 80)
    assert ["".join(CHARACTERS[each] for each in row) for row in inputs] == x + more[0]
    assert [CHARACTERS[each] for each in labels] == y + more[1]


def test_the_alphabet_is_leafs():
    assert len(CHARACTERS) == 80 and all(one < two for one, two in pairwise(CHARACTERS))
    assert Shakespeare().num_classes == 80 and CHARACTERS.startswith("\n !\"&'(),-.0") and CHARACTERS[-1] == "}"


def test_other_characters_are_refused_or_one_more_class(tmp_path):
    x, y = texts(2, CHARACTERS)
    path = write_leaf(tmp_path, "train", HAMLET=([x[0], x[1][:-1] + "\u2019"], [y[0], "\U0001f600"]))
    expected = rf"Shakespeare: x of user 'HAMLET' in {re.escape(repr(str(path)))} holds the character '\u2019', .*class"
    with pytest.raises(ValueError, match=expected):
        Shakespeare(str(tmp_path)).load()
    dataset = Shakespeare(str(tmp_path), unknown="class")
    samples = dataset.load()
    assert dataset.num_classes == samples.num_classes == 81
    assert samples.labels[1] == samples.inputs[1, 79] == 80 and samples.labels[0] < 80
    with pytest.raises(ValueError, match="Shakespeare: got unknown='skip'; allowed are refuse and class"):
        Shakespeare(unknown="skip")


X, Y = images(2)
IMAGE = X[0]
WRONG = {
    "uneven": (FEMNIST, ([IMAGE, IMAGE[:-1]], Y), r"x of user 'bob' in .* must be lists of 784 numbers"),
    "short": (FEMNIST, ([IMAGE[:-1]] * 2, Y), r"must be lists of 784 numbers, got shape \[783\]"),
    "text": (FEMNIST, (["a", "b"], Y), r"must be lists of 784 numbers, got something else"),
    "nan": (FEMNIST, ([IMAGE, [*IMAGE[:-1], float("nan")]], Y), r"x of user 'bob' in .* holds NaN .* sample 1"),
    "bytes": (FEMNIST, ([IMAGE, [255] * 784], Y), r"must lie in 0 to 1, got 0 to 255; divide pixels by 255"),
    "label": (FEMNIST, (X, [3, 62]), r"y of user 'bob' in .* must be whole numbers from 0 to 61, got 62"),
    "half": (FEMNIST, (X, [3, 0.5]), r"must be whole numbers from 0 to 61, got 0.5"),
    "fewer": (FEMNIST, (X, [3]), r"x and y of user 'bob' in .* must be of equal length, got 2 and 1"),
    "none": (FEMNIST, ([], []), r"there are no samples of user 'bob' in .*json'; remove the user"),
    "no list": (FEMNIST, (X, "34"), r"the data of user 'bob' in .* must have a list 'x' and a list 'y', got x, y"),
    "long": (Shakespeare, (["a" * 81], ["b"]), r"x of user 'bob' .* texts of 80 .*, got 81 characters in sample 0"),
    "number": (Shakespeare, ([5], ["b"]), r"must be texts of 80 characters, got int in sample 0"),
    "word": (Shakespeare, (["a" * 80], ["bc"]), r"y of user 'bob' .* must be single characters, got 'bc'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unusable_samples_are_refused_with_user_and_file(tmp_path, case):
    dataset_class, samples, message = WRONG[case]
    good = images(1) if dataset_class is FEMNIST else texts(1, "ab")
    write_leaf(tmp_path, "train", alice=good, bob=samples)
    with pytest.raises(ValueError, match=f"^{dataset_class.__name__}: .*{message}") as caught:
        dataset_class(str(tmp_path)).load()
    assert "all_data_0_niid_0_keep_0_train_9.json" in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"users": ["a", "b"]}, r"has user 'b' in 'users', but not in 'user_data'"),
        ({"users": ["a", "a"]}, r"has user 'a' in 'users', but not in 'user_data' \(or twice in 'users'\)"),
        ({"users": []}, r"has user 'a' in 'user_data', but not in 'users'"),
        ({"users": ["a", ""]}, r"has a user without a name in 'users'"),
        ({"users": None}, r"must hold an object with a list 'users' and an object 'user_data'"),
        ({"user_data": {"a": [1]}}, r"the data of user 'a' in .* must have a list 'x' and a list 'y', got list"),
        ({"user_data": {"a": {"x": [], "label": []}}}, r"must have a list 'x' and a list 'y', got x, label"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, entries, message):
    path = write_leaf(tmp_path, "train", a=images(2))
    change(path, **entries)
    with pytest.raises(ValueError, match=f"FEMNIST: .*{message}"):
        FEMNIST(str(tmp_path)).load()


def test_two_clients_of_one_name_are_refused(tmp_path):
    path = write_leaf(tmp_path, "train", 0, a=images(2))
    other = write_leaf(tmp_path, "train", 1, a=images(2))
    both = re.escape(f"user 'a' is in {str(path)!r} and in {str(other)!r}; two clients cannot have one name")
    with pytest.raises(ValueError, match=f"FEMNIST: {both}"):
        FEMNIST(str(tmp_path)).load()
    other.write_text('{"users": ["b"], "user_data": {"b": {"x": [], "y": []}, "b": {"x": [], "y": []}}}')
    with pytest.raises(ValueError, match="cannot be read as JSON: 'b' is in it twice; two clients cannot have one"):
        FEMNIST(str(tmp_path)).load()


def test_damaged_files_are_refused(tmp_path):
    path = write_leaf(tmp_path, "train", a=images(2))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=f"FEMNIST: {re.escape(repr(str(path)))} cannot be read as JSON: "):
        FEMNIST(str(tmp_path)).load()
    path.write_text('{"users": [], "user_data": {}}')
    with pytest.raises(ValueError, match=r"FEMNIST: the files under .* have no users with training samples"):
        FEMNIST(str(tmp_path)).load()


def test_missing_files_are_said_with_the_way_to_get_them(here):
    for dataset_class, name in {FEMNIST: "femnist", Shakespeare: "shakespeare"}.items():
        with pytest.raises(FileNotFoundError, match=f"{dataset_class.__name__}: .*'nowhere'.*data/{name}/preprocess"):
            dataset_class("nowhere").prepare()
    with pytest.raises(FileNotFoundError, match="FEMNIST: there is no file train"):
        lcfl("fit", *DATA_OF_FEMNIST)
    write_leaf(here / "data/femnist", "train", a=images(2))
    message = "data.dataset: FEMNIST: there is no column 'writer'; leave column out, because users are the owners"
    with pytest.raises(ValueError, match=message):
        lcfl("fit", *DATA_OF_FEMNIST, "--data.partition.column=writer")


def test_writers_train_and_resume_to_the_same_bits(here):
    folder = here / "data/femnist"
    for part, number in {"train": 9, "test": 3}.items():
        write_leaf(folder, part, **{f"f{each:04}": images(number, seed=each) for each in range(5)})
    small = ["--model.network.init_args.channels=[4]", "--model.network.init_args.hidden=[]"]
    run = trained("femnist", *small)
    assert run.state.num_clients == 5 and "test/own_split/global/acc" in run.metrics
    content = json.loads((run.path / "partition.json").read_text())
    assert content["names"] == [f"f{each:04}" for each in range(5)]
    assert content["test"]["own_split"][1] == [48, 49, 50]


def test_roles_train_and_resume_to_the_same_bits(here):
    for part, number in {"train": 9, "test": 3}.items():
        roles = {f"HAMLET_{each}": texts(number, CHARACTERS, seed=each) for each in range(5)}
        write_leaf(here / "data/shakespeare/data", part, **roles)
    run = trained("shakespeare", "--model.network.init_args.hidden=8")
    assert run.state.num_clients == 5 and np.isfinite(run.metrics["test/own_split/global/loss"])
