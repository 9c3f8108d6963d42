"""Tests that every reader gives new samples to a network as it gave those of the data set, and what is refused."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from lcfl.data.datasets import Arrays, Folders, ImageFiles, Reader, Synthetic, Table
from lcfl.data.datasets.readers import Contents
from tests.helpers.clients_on_disk import write_arrays, write_image, write_pictures, write_table, write_wards


def write_bytes(root):
    draws = np.random.default_rng(0)
    for name in "ab":
        write_arrays(root / f"{name}.npz", x=draws.integers(0, 256, (3, 2, 4), dtype=np.uint8), y=np.arange(3))


def read(data, path):
    """Returns all new inputs at once, and their places."""
    samples, places = data.new_samples(str(path))
    return samples.batch(np.arange(len(samples)), torch.device("cpu"))[0], places


@pytest.mark.parametrize(
    ("write", "reader"),
    [
        (lambda root: write_wards(root, {"a": 5, "b": 3}), Table("outcome")),
        (lambda root: write_wards(root, {"a": 5, "b": 3}), Table(["dose", "age"], ["outcome"], regression=True)),
        (lambda root: write_pictures(root, 6), ImageFiles(normalisation="imagenet")),
        (lambda root: write_pictures(root, 6), ImageFiles(size=(3, 3), mode="L")),
        (write_bytes, Arrays()),
    ],
)
def test_inputs_are_those_of_the_data_set(tmp_path, write, reader):
    write(tmp_path)
    data = Folders(str(tmp_path), reader)
    number = len(data.owners().part)
    inputs, places = read(data, tmp_path)
    expected, _ = data.load().batch(np.arange(number), torch.device("cpu"))
    assert torch.equal(inputs, expected) and inputs.dtype == data.dtype
    assert places == [data.place_of(index) for index in range(number)]


def test_a_table_needs_no_target_and_may_have_other_columns_in_any_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_wards("wards", {"a": 5})
    write_table("new.csv", ("name", "dose", "age"), ["Ann", 1.5, 60], ["Bob", 2.5, 70])
    inputs, places = read(Folders("wards", Table("outcome")), "new.csv")
    assert inputs.tolist() == [[60, 1.5], [70, 2.5]] and places == [("new.csv", 1), ("new.csv", 2)]


def test_images_need_no_folders_of_classes(tmp_path):
    write_image(tmp_path / "pets/a/cat/1.png")
    write_image(tmp_path / "new/1.png", 51)
    write_image(tmp_path / "new/deep/2.png", 255)
    inputs, places = read(Folders(str(tmp_path / "pets"), ImageFiles()), str(tmp_path / "new"))
    assert inputs.shape == (2, 3, 4, 4)
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.tensor([0.2, 1.0]))
    assert places == [(f"{tmp_path}/new/1.png", 1), (f"{tmp_path}/new/deep/2.png", 1)]


def test_arrays_need_no_targets(tmp_path):
    write_arrays(tmp_path / "clients/a.npz", x=np.zeros((2, 3)), y=np.arange(2))
    write_arrays(tmp_path / "new.npz", x=np.ones((4, 3), dtype=np.float32))
    inputs, _ = read(Folders(str(tmp_path / "clients"), Arrays()), str(tmp_path / "new.npz"))
    assert torch.equal(inputs, torch.ones(4, 3))


SEMICOLON = (
    "it has no column 'age' and 'dose', but age;dose; the first file, ROOT/wards/a/train.csv, has age, dose, outcome. "
    "',' must stand between cells"
)


@pytest.mark.parametrize(
    ("name", "write", "problem"),
    [
        ("none.csv", lambda path: None, "there is no such file or folder; relative paths begin at "),
        ("rows.txt", lambda path: path.write_text("1"), "the name of a file with samples must end with .csv or .parq"),
        ("rows", lambda path: path.mkdir(), "it has no samples, which are files with .csv or .parquet"),
        ("rows.csv", lambda path: write_table(path, ("age", "dose")), "it has no samples"),
        (
            "rows.csv",
            lambda path: write_table(path, ("age", "does"), [1, 2]),
            "it has no column 'dose', but age, does; the first file, ROOT/wards/a/train.csv, has age, dose, outcome. "
            "Did you mean 'does'? Change the file",
        ),
        (
            "rows.csv",
            lambda path: write_table(path, ("ages", "dose"), [1, 2]),
            "it has no column 'age', but ages, dose",
        ),
        ("rows.csv", lambda path: write_table(path, ("age;dose",), ["1;2"]), SEMICOLON),
        ("rows.csv", lambda path: write_table(path, ("age", "dose"), [1, "high"]), "row 1: column 'dose' is 'high'"),
        ("rows.csv", lambda path: write_table(path, ("age", "dose"), [1, "nan"]), "row 1: column 'dose' is nan; drop "),
        ("rows.csv", lambda path: write_table(path, ("age", "age", "dose"), [1, 2, 3]), "it has several columns 'age'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path, name, write, problem):
    write_wards(tmp_path / "wards", {"a": 5})
    write(tmp_path / name)
    with pytest.raises(ValueError) as error:
        Folders(str(tmp_path / "wards"), Table("outcome")).new_samples(str(tmp_path / name))
    assert str(error.value).replace(str(tmp_path), "ROOT").startswith(f"Folders: ROOT/{name}: {problem}")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.zeros((2, 3)), "each of its inputs has the shape (3,) of float32, but in the first file, ROOT/clients/a"),
        (np.zeros((2, 4), dtype=np.uint8), "each of its inputs has the shape (4,) of uint8, but in the first file"),
        (np.array(1.0), "the array 'x' is one number; it must have one entry per sample"),
        (np.full((1, 4), np.inf), "x[0, 0] is inf"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, values, problem):
    """Bytes would be scaled to 0..1, and other numbers not."""
    write_arrays(tmp_path / "clients/a.npz", x=np.zeros((2, 4)), y=np.arange(2))
    write_arrays(tmp_path / "new.npz", x=values)
    with pytest.raises(ValueError) as error:
        Folders(str(tmp_path / "clients"), Arrays()).new_samples(str(tmp_path / "new.npz"))
    assert str(error.value).replace(str(tmp_path), "ROOT").startswith(f"Folders: ROOT/new.npz: {problem}")


def test_an_image_of_another_size_is_refused(tmp_path):
    write_image(tmp_path / "pets/a/cat/1.png")
    write_image(tmp_path / "new.png", size=(4, 5))
    with pytest.raises(ValueError, match=r"new\.png: it has 4 x 5 pixels, but the first image, .*/1\.png, has 4 x 4"):
        Folders(str(tmp_path / "pets"), ImageFiles()).new_samples(str(tmp_path / "new.png"))


def test_whole_numbers_that_are_rounded_are_named(tmp_path):
    write_wards(tmp_path / "wards", {"a": 5})
    write_table(tmp_path / "new.csv", ("age", "dose"), [20240101, 1])
    with pytest.warns(
        UserWarning, match=r"rounds whole numbers in 'age' \(.*new\.csv, row 1: 20240101 becomes 20240100"
    ):
        Folders(str(tmp_path / "wards"), Table("outcome")).new_samples(str(tmp_path / "new.csv"))


@dataclass(frozen=True)
class Own(Reader):
    """A reader of one's own that reads no new samples."""

    suffixes: ClassVar[tuple[str, ...]] = (".own",)

    def open(self, parts):
        return Contents([2], (1,), torch.float32, np.arange(2), ("a", "b"), partial(torch.zeros, 2, 1))


@dataclass(frozen=True)
class New(Own):
    """One that returns the same new inputs whatever the files hold."""

    inputs: object = None
    counts: tuple[int, ...] = (2,)

    def new_inputs(self, part, first):
        return self.inputs, self.counts


@pytest.fixture
def own(tmp_path):
    """Returns a function that reads a file with a reader."""
    (tmp_path / "a.own").write_text("")
    return lambda reader: read(Folders(str(tmp_path), reader), tmp_path / "a.own")


def test_a_reader_of_ones_own_gives_inputs_as_for_training(own):
    inputs, places = own(New(torch.tensor([[1.0], [2.0]], dtype=torch.float64)))
    assert inputs.dtype == torch.float32 and inputs.tolist() == [[1], [2]]
    assert [row for _, row in places] == [1, 2]


@pytest.mark.parametrize(
    ("reader", "problem"),
    [
        (New(torch.zeros(2, 1), (3,)), r"New\.new_inputs: got 2 inputs, and the numbers 3 for the 1 files"),
        (New(torch.zeros(2, 1), (1, 1)), r"New\.new_inputs: got 2 inputs, and the numbers 1, 1 for the 1 files"),
        (New(torch.zeros(2, 3)), r"got inputs of the shape \(3,\) and float32; those of the data set are of the shape"),
        (New(torch.zeros(2, 1, dtype=torch.int64)), r"got inputs of the shape \(1,\) and int64; those of the data set"),
        (Own(), "^Own has no method new_inputs, which reads inputs without targets"),
    ],
)
def test_what_a_reader_of_ones_own_must_return_is_said(own, reader, problem):
    with pytest.raises(ValueError, match=problem):
        own(reader)


def test_a_data_set_without_files_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"^Synthetic has no method new_samples, which reads samples that are not part"
    ):
        Synthetic().new_samples("new.csv")
