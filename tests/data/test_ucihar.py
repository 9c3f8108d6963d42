"""Tests of the loader of UCI HAR, on files that are made in its layout."""

import re

import numpy as np
import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import UCIHAR
from lcfl.data.owners import TEST, TRAIN
from lcfl.data.partition import ByOwner
from tests.helpers.builders import loaded
from tests.helpers.known_sets import trained

CPU = torch.device("cpu")
SENSORS = ["body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z"]
SENSORS += ["total_acc_x", "total_acc_y", "total_acc_z"]
PEOPLE = {"train": [1] * 8 + [3] * 6 + [11] * 10, "test": [2] * 7 + [10] * 5}


def write_rows(path, rows, end="\n"):
    """Writes numbers as the authors did: each in 16 characters, with an exponent of three digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        "".join(f"{value: .7e}".replace("e-", "e-0").replace("e+", "e+0").rjust(16) for value in row) for row in rows
    ]
    path.write_text("".join(line + end for line in lines))


def write(folder, end="\n"):
    """Writes the whole archive and returns features [S, 561], signals [S, 9, 128] and labels of both parts together."""
    draw, features, signals, labels = np.random.default_rng(0), [], [], []
    for part, people in PEOPLE.items():
        number = len(people)
        features.append(draw.uniform(-1, 1, (number, 561)))
        signals.append(draw.normal(size=(number, 9, 128)))
        labels.append(draw.permutation(np.arange(number) % 6))
        home = folder / part
        write_rows(home / f"X_{part}.txt", features[-1], end)
        for channel, name in enumerate(SENSORS):
            write_rows(home / "Inertial Signals" / f"{name}_{part}.txt", signals[-1][:, channel], end)
        (home / f"y_{part}.txt").write_text("".join(f"{label + 1}{end}" for label in labels[-1]))
        (home / f"subject_{part}.txt").write_text("".join(f"{person}{end}" for person in people))
    return np.concatenate(features), np.concatenate(signals), np.concatenate(labels)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("inner", ["", "UCI HAR Dataset"])
def test_features_and_signals_come_back(tmp_path, end, inner):
    features, signals, labels = write(tmp_path / inner, end)
    for kind, expected in {"features": features, "inertial": signals}.items():
        dataset = UCIHAR(str(tmp_path), kind)
        dataset.prepare()
        samples = dataset.load()
        inputs, targets = samples.batch(range(36), CPU)
        assert inputs.shape == (36, *dataset.shape) and samples.num_train == 24
        np.testing.assert_allclose(inputs, expected, rtol=1e-6, atol=1e-6)
        assert targets.tolist() == labels.tolist()


def test_people_are_owners_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path)
    owners = UCIHAR(str(tmp_path)).owners()
    assert owners.names == ("1", "2", "3", "10", "11")
    assert [owners.names[each] for each in owners.number] == list(map(str, PEOPLE["train"] + PEOPLE["test"]))
    assert owners.part.tolist() == [TRAIN] * 24 + [TEST] * 12


def test_people_of_the_test_part_take_part_with_pool_all(tmp_path):
    write(tmp_path)
    found = {}
    for pool in ("train", "all"):
        data = FederatedDataModule(UCIHAR(str(tmp_path)), ByOwner(), pool=pool)
        found[pool] = loaded(data).population
    assert found["train"].names == ("1", "3", "11") and found["all"].names == ("1", "2", "3", "10", "11")
    assert [len(each) for each in found["all"].test["own_split"]] == [2, 2, 2, 1, 2]


def spoil(path, row, column, value):
    rows = [line.split() for line in path.read_text().splitlines()]
    rows[row][column] = value
    path.write_text("".join(" ".join(each) + "\n" for each in rows))


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "message"),
    [
        ("train/X_train.txt", 8, 560, "NaN", r"holds NaN or infinity in line 9, which is of person 3; replace"),
        ("test/X_test.txt", 11, 0, "inf", r"holds NaN or infinity in line 12, which is of person 10"),
        ("train/X_train.txt", 0, 0, "O.5", r"must hold numbers: .*'O.5'"),
        ("train/X_train.txt", 0, 0, "1.0 1.0", r"has 13465 numbers; it must have 561 per sample, and 24 samples as"),
        ("train/y_train.txt", 4, 0, "7", r"^UCIHAR: line 5 of .* has 7; it must be an activity's number, 1 to 6"),
        ("train/y_train.txt", 4, 0, "1.5", r"has 1.5; it must be an activity's number"),
        ("train/y_train.txt", 4, 0, "", r"y_train.txt' has 23 numbers; it must have 1 per sample, and 24 samples"),
        ("test/subject_test.txt", 0, 0, "0", r"line 1 of .* has 0; it must be a person's number, at least 1"),
    ],
)
def test_unusable_files_are_refused_with_person_and_file(tmp_path, name, row, column, value, message):
    write(tmp_path)
    spoil(tmp_path / name, row, column, value)
    with pytest.raises(ValueError, match=message) as caught:
        UCIHAR(str(tmp_path)).load()
    assert str(caught.value).startswith("UCIHAR: ") and repr(str(tmp_path / name)) in str(caught.value)


def test_files_of_different_lengths_are_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / "test/Inertial Signals/body_gyro_y_test.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=rf"UCIHAR: {re.escape(repr(str(path)))} has 1408 numbers; .* and 12 samples"):
        UCIHAR(str(tmp_path), "inertial").load()
    (tmp_path / "train/subject_train.txt").write_text("")
    with pytest.raises(ValueError, match=r"subject_train.txt' has 0 numbers; it must have 1 per sample"):
        UCIHAR(str(tmp_path)).owners()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("features", "test/X_test.txt"),
        ("features", "train/subject_train.txt"),
        ("inertial", "train/Inertial Signals/total_acc_z_train.txt"),
    ],
)
def test_missing_files_are_said_with_the_way_to_get_them(tmp_path, kind, name):
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"UCIHAR: there is no file '.*{name}'. Download .*UCI HAR Dataset"):
        UCIHAR(str(tmp_path), kind).prepare()
    if "subject" in name:  # with num_clients: null, people are asked for first
        with pytest.raises(FileNotFoundError, match=f"UCIHAR: there is no file '.*{name}'. Download"):
            UCIHAR(str(tmp_path), kind).owners()


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="UCIHAR: got signals='raw'; allowed are features and inertial"):
        UCIHAR(signals="raw")
    with pytest.raises(ValueError, match="UCIHAR: there is no column 'subject'; leave column out, because people are"):
        UCIHAR(str(tmp_path)).owners("subject")


def test_people_train_and_resume_to_the_same_bits(here):
    write(here / "data/UCI HAR Dataset")
    run = trained("ucihar")
    assert run.state.num_clients == 5 and "test/own_split/global/acc" in run.metrics
    inertial = "--data.dataset.init_args.signals=inertial", "--model.network.init_args.in_features=1152"
    assert trained("ucihar", *inertial).state.num_clients == 5
