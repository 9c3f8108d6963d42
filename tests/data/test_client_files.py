"""Tests how the files of clients are found: names, parts, order, and what is refused."""

import os
import unicodedata

import pytest

from lcfl.data.datasets.client_files import clients_below
from lcfl.data.owners import TEST, TRAIN, VAL

SUFFIXES = (".csv", ".parquet")


def make(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def found(root):
    return {
        parts[0].client: {part.part: [os.path.relpath(path, root) for path in part.paths] for part in parts}
        for parts in clients_below(str(root), SUFFIXES)
    }


def refused(root, *paths):
    """Returns the message for a folder with these files, without the path of the folder."""
    make(root, *paths)
    with pytest.raises(ValueError) as error:
        clients_below(str(root), SUFFIXES)
    return str(error.value).replace(str(root), "ROOT")


def test_a_client_has_parts_or_only_training_files(tmp_path):
    make(tmp_path, "b/train/x.csv", "b/train/deep/er/y.csv", "b/test/z.csv", "b/val/w.csv")
    make(tmp_path, "a/one.csv", "a/sub/two.parquet", "c/train.csv", "c/test.csv", "d.CSV")
    assert found(tmp_path) == {
        "a": {TRAIN: ["a/one.csv", "a/sub/two.parquet"]},
        "b": {TRAIN: ["b/train/deep/er/y.csv", "b/train/x.csv"], VAL: ["b/val/w.csv"], TEST: ["b/test/z.csv"]},
        "c": {TRAIN: ["c/train.csv"], TEST: ["c/test.csv"]},
        "d": {TRAIN: ["d.CSV"]},
    }


def test_parts_may_be_in_capital_letters(tmp_path):
    make(tmp_path, "a/Train/x.csv", "a/TEST/y.csv", "b/Train.csv", "b/Val.csv")
    assert found(tmp_path) == {
        "a": {TRAIN: ["a/Train/x.csv"], TEST: ["a/TEST/y.csv"]},
        "b": {TRAIN: ["b/Train.csv"], VAL: ["b/Val.csv"]},
    }


def test_parts_in_capital_letters_are_no_clients(tmp_path):
    assert "the order is <client>/train" in refused(tmp_path, "Train/a/x.csv", "Test/a/x.csv")


@pytest.mark.parametrize("path", ["b.csv.gz", "a/test.CSV.zip", "a/train/y.parquet.xz"])
def test_compressed_files_of_samples_are_refused(tmp_path, path):
    said = refused(tmp_path, "a/train/x.csv", "c.csv", path)
    assert f"ROOT/{path}: it is compressed; unpack it" in said


def test_hidden_and_other_files_are_skipped(tmp_path):
    make(tmp_path, ".cache/x.csv", "notes.txt", "a/.hidden.csv", "a/x.csv", "a/README.md", "a/.old/y.csv")
    make(tmp_path, "b/train/x.csv", "b/notes.txt")
    (tmp_path / "a/empty").mkdir()
    (tmp_path / "b/test").mkdir()  # the client has no test samples, so some are held out
    assert found(tmp_path) == {"a": {TRAIN: ["a/x.csv"]}, "b": {TRAIN: ["b/train/x.csv"]}}


def test_clients_are_in_the_order_of_their_names_and_numbers(tmp_path):
    make(tmp_path, *(f"{number}/x.csv" for number in (10, 9, 0, 100)))
    assert list(found(tmp_path)) == ["0", "9", "10", "100"]
    make(tmp_path, "Z/x.csv", "a/x.csv")
    assert list(found(tmp_path)) == ["0", "10", "100", "9", "Z", "a"]


def test_a_name_is_the_same_text_on_every_system(tmp_path):
    make(tmp_path, unicodedata.normalize("NFD", "Zürich") + "/x.csv", "a/x.csv")
    assert list(found(tmp_path)) == ["Zürich", "a"]


def test_the_order_of_files_does_not_depend_on_how_accents_are_stored(tmp_path):
    orders = []
    for form in ("NFC", "NFD"):
        make(tmp_path / form, *(f"a/{unicodedata.normalize(form, name)}" for name in ("e.csv", "é.csv", "f.csv")))
        (files,) = found(tmp_path / form)["a"].values()
        orders.append([unicodedata.normalize("NFC", file) for file in files])
    assert orders[0] == orders[1] == ["a/e.csv", "a/f.csv", "a/é.csv"]


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    make(tmp_path, "b/train/y.csv", "b/train/x.csv", "b/test/q.csv", "a/2.csv", "a/1.csv", "c.csv")
    expected = clients_below(str(tmp_path), SUFFIXES)
    scan = os.scandir

    class Reversed:
        def __init__(self, path):
            self.entries = scan(path)

        def __enter__(self):
            return sorted(self.entries, key=lambda entry: entry.name, reverse=True)

        def __exit__(self, *error):
            self.entries.close()

    monkeypatch.setattr(os, "scandir", Reversed)
    assert clients_below(str(tmp_path), SUFFIXES) == expected


REFUSED = {
    "missing root": (
        [],
        "there are no clients in 'ROOT'; it must hold one folder, or one file (.csv or .parquet), per",
    ),
    "train before clients": (
        ["train/a/x.csv", "test/a/x.csv"],
        "'ROOT' holds test and train instead of clients; the order is <client>/train, not train/<client>.",
    ),
    "equal names": (
        ["north/x.csv", "north.csv"],
        "client 'north': ROOT/north.csv: there is also a client 'north'; names must differ by more than case and "
        "spaces: rename one of them",
    ),
    "case": (["Ward 1/x.csv", "ward 1/x.csv"], "client 'ward 1': ROOT/ward 1: there is also a client 'Ward 1'; names"),
    "spaces": (["a/x.csv", "a /x.csv"], "client 'a ': ROOT/a : there is also a client 'a'; names must differ"),
    "line break": (
        ["a\nb/x.csv"],
        "client 'a\\nb': ROOT/a\nb: a name must be readable text, without line breaks or tabs",
    ),
    "bytes": (["a\udcff/x.csv"], "client 'a\\udcff': ROOT/a\udcff: a name must be readable text"),
    "no training part": (
        ["a/x.csv", "ward_b/test/x.csv"],
        "client 'ward_b': ROOT/ward_b/train: it is missing, beside test; a client needs samples to train on",
    ),
    "no files": (
        ["a/x.csv", "ward_b/train/x.txt"],
        "client 'ward_b': ROOT/ward_b/train: it has no samples, which are files with .csv or .parquet; it has x.txt",
    ),
    "test files of another kind": (
        ["ward_b/train/x.csv", "ward_b/test/x.tsv"],
        "client 'ward_b': ROOT/ward_b/test: it has no samples, which are files with .csv or .parquet; it has x.tsv",
    ),
    "beside the parts": (
        ["ward_b/train/x.csv", "ward_b/valid/x.csv", "ward_b/more.csv"],
        "client 'ward_b': ROOT/ward_b: it holds train, and more.csv, valid beside; a client has only the parts train, "
        "val and test, or none of them",
    ),
    "a part twice": (
        ["ward_b/train/x.csv", "ward_b/train.csv"],
        "client 'ward_b': ROOT/ward_b/train.csv: there is also train; a client has each part once",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unclear_folders_are_refused(tmp_path, case):
    paths, message = REFUSED[case]
    assert refused(tmp_path, *paths).startswith(f"Folders: {message}")


@pytest.mark.parametrize("link", ["c", "c.csv", "b/train/more", "b/train/more.csv"])
def test_a_link_to_nothing_is_refused(tmp_path, link):
    """It is what a share that is not mounted looks like."""
    for path in ("a/train/x.csv", "b/train/x.csv"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "README.md").symlink_to(tmp_path / "nowhere")
    assert len(clients_below(str(tmp_path), SUFFIXES)) == 2
    (tmp_path / link).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"Folders: .*{link}: this link cannot be followed; restore what it leads to"):
        clients_below(str(tmp_path), SUFFIXES)


def test_a_link_to_a_folder_around_itself_is_refused(tmp_path):
    make(tmp_path, "a/x.csv", "b/more/x.csv")
    (tmp_path / "a/copy").symlink_to(tmp_path / "b")
    assert clients_below(str(tmp_path), SUFFIXES)[0][0].files == ("copy/more/x.csv", "x.csv")
    (tmp_path / "b/more/again").symlink_to("..")
    assert "a/copy/more/again: this link leads to a folder around itself; remove it" in refused(tmp_path)


@pytest.mark.parametrize(
    "paths",
    [["train_2023.csv", "test_2023.csv"], ["b_train.csv", "b-valid.csv"], ["Training/x/1.csv", "Testing/x/1.csv"]],
)
def test_names_like_those_of_parts_are_refused(tmp_path, paths):
    """All of them would be training samples."""
    make(tmp_path, "a/blood_test.csv", "a/trains.csv", "a/2023.csv")
    message = refused(tmp_path, *(f"b/{path}" for path in paths))
    assert "client 'b': ROOT/b: " in message and "seem to be parts, whose names must be" in message


def test_parts_in_place_of_clients_are_refused(tmp_path):
    assert "holds Testing and Training instead of clients" in refused(tmp_path, "Training/a.csv", "Testing/a.csv")


def test_files_of_other_kinds_give_one_warning(tmp_path):
    make(
        tmp_path,
        "a/x.csv",
        "a/y.xlsx",
        "b/train/x.csv",
        "b/train/y.xlsx",
        "b/note.txt",
        "b/.hidden",
        "c.xlsx",
        "LICENSE",
    )
    words = r"Folders: files of other kinds below '.*' are skipped \(3 .xlsx, 1 .txt, 1 license\); only"
    with pytest.warns(UserWarning, match=words) as caught:
        assert len(clients_below(str(tmp_path), SUFFIXES)) == 2
    assert len(caught) == 1


def test_an_empty_client_is_refused(tmp_path):
    (tmp_path / "ward_b").mkdir()
    assert refused(tmp_path).endswith("ROOT/ward_b: it has no samples, which are files with .csv or .parquet")


def test_a_missing_root_is_refused(tmp_path):
    assert refused(tmp_path / "nowhere").startswith("Folders: the folder 'ROOT' cannot be read (FileNotFoundError)")


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "a/x.csv", "ward_b/x.csv")
    scan = os.scandir

    def fails(path):
        if str(path).endswith("ward_b"):
            raise PermissionError(13, "no")
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    assert refused(tmp_path) == "Folders: client 'ward_b': ROOT/ward_b: it cannot be read (PermissionError)"
