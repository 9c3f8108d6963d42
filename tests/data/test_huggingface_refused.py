"""Tests of what is wrong with a data set of Hugging Face's library, said before training."""

import re
import sys
from datetime import datetime, timedelta

import numpy as np
import pytest
from PIL import Image

from lcfl.data.datasets import HuggingFace
from tests.helpers.hugging import Letters, hub, one, rows, saved

SIX = {"ill": [0, 1, 0], "age": [1.0, 2.0, 3.0]}
WRONG = {
    "nan": (one(**SIX, x=[1.0, float("nan"), 2.0]), {}, r"column 'x' of train holds NaN, infinity or null in row 1"),
    "null": (one(**SIX, x=[1.0, 2.0, None]), {}, r"column 'x' of train has no value in row 2"),
    "no whole number": (one(**SIX, x=[1, None, 2]), {}, r"column 'x' of train has no value in row 1"),
    "no list": (one(**SIX, x=[[1], [2], None]), {}, r"column 'x' of train has no value in row 2"),
    "null in a list": (one(**SIX, x=[[1], [None], [3]]), {}, r"column 'x' of train holds NaN, .* or null in row 1"),
    "ragged": (one(**SIX, x=[[1], [2], [3, 4]]), {}, r"has shape \[2\] in row 2, but \[1\] in row 0; .*transform"),
    "text": (one(**SIX, x=["a", "b", "c"]), {}, r"column 'x' of train \(Value\) holds texts, not numbers; use a tok"),
    "struct": (one(**SIX, x=[{"a": 1}] * 3), {}, r"does not hold numbers; use a transform"),
    "time": (one(**SIX, x=[datetime(2020, 1, 1)] * 3), {}, r"column 'x' of train \(Value\) holds datetime64.* not num"),
    "duration": (one(**SIX, x=[timedelta(1)] * 3), {}, r"column 'x' of train \(Value of duration.*\) does not hold"),
    "deep image": (
        hub.Dataset.from_dict(
            {"ill": [0], "x": [Image.fromarray(np.zeros((2, 2), np.uint16))]},
            features=hub.Features({"ill": hub.Value("int8"), "x": hub.Image()}),
        ),
        {},
        r"column 'x' of train has images of uint16, not of bytes; convert them in a transform",
    ),
    "no text": (
        one(**SIX, x=["a", None, "c"]),
        {"tokenizer": Letters(), "max_length": 2},
        r"column 'x' of train, row 1: a tokenizer takes a text, got None",
    ),
    "words": (
        one(**SIX, x=["a", "b", "c"]),
        {"tokenizer": str.split, "max_length": 2},
        r"row 0: the tokenizer must return a list of whole numbers, .*; got <U1 of shape \[1\]",
    ),
    "broken": (
        one(**SIX, x=["a", "b", "c"]),
        {"transform": lambda text: [1 / ("ac".index(text) + 1)]},
        r"item 1 of train cannot be read: ValueError: substring not found",
    ),
    "picture": (
        rows(3).rename_column("photo", "x"),
        {"transform": lambda photo: photo},
        r"what transform makes of row 0 of train: an input must be a tensor.* \(a PIL image\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_unusable_values_are_refused_with_their_column_and_row(case):
    split, options, message = WRONG[case]
    with pytest.raises(ValueError, match=f"^HuggingFace: .*{message}"):
        HuggingFace(split, "x", "ill", num_classes=2, **options).load()


def test_images_of_different_sizes_are_refused():
    sizes = [Image.new("L", (4, 4)), Image.new("L", (4, 5))]
    split = hub.Dataset.from_dict(
        {"x": sizes, "ill": [0, 1]}, hub.Features({"x": hub.Image(), "ill": hub.Value("int8")})
    )
    with pytest.raises(ValueError, match=r"column 'x' of train \(Image\) has shape \[5, 4\] in row 1, but \[4, 4\]"):
        HuggingFace(split, "x", "ill").load()


def test_owners_are_texts_or_numbers_that_are_all_there():
    split = one(**SIX, who=["a", None, "b"])
    dataset = HuggingFace(split, "age", "ill")
    with pytest.raises(ValueError, match=r"column 'who' of train names owners, .* got None in row 1"):
        dataset.owners("who")
    with pytest.raises(ValueError, match=r"HuggingFace: train has no column 'owner'; its columns are ill, age, who"):
        dataset.owners("owner")
    with pytest.raises(ValueError, match="column 'age' of train names owners, so each value must be a text"):
        dataset.owners("age")
    wards = hub.Features({"x": hub.Value("float32"), "y": hub.Value("int8"), "ward": hub.ClassLabel(names=["a", "b"])})
    nowhere = hub.Dataset.from_dict({"x": [1.0, 2.0], "y": [0, 1], "ward": [0, -1]}, wards)
    with pytest.raises(ValueError, match=r"column 'ward' of train .* got -1 in row 1"):
        HuggingFace(nowhere, "x", "y").owners("ward")


def test_splits_and_columns_that_are_missing_are_said(tmp_path):
    parts = saved(tmp_path / "saved")
    wrong = {
        "there is no split 'train' (train); the splits are learn, check, final": (parts, {}),
        "there is no split 'test' (test)": (parts, {"train": "learn", "test": "test"}),
        "one split cannot be two of train, val and test": (parts, {"train": "learn", "test": "learn"}),
        "this data set has no splits, so test cannot be 'final'; leave it out": (parts["learn"], {"test": "final"}),
        "learn has no column 'agee'; its columns are age, weight": (parts, {"train": "learn", "inputs": "agee"}),
        "check has no column 'bed'": (
            hub.DatasetDict(learn=parts["learn"], check=parts["check"].remove_columns("bed")),
            {"train": "learn", "test": "check", "inputs": "bed"},
        ),
        "learn has no samples": (hub.DatasetDict(learn=parts["learn"].select([])), {"train": "learn"}),
        "inputs and target must name at least one column each": (parts, {"train": "learn", "inputs": []}),
        "max_length is only for a tokenizer": (parts, {"train": "learn", "max_length": 4}),
        "a tokenizer needs max_length": (parts, {"train": "learn", "inputs": "note", "tokenizer": Letters()}),
        "a tokenizer reads one column": (parts, {"inputs": ["note", "ward"], "tokenizer": Letters(), "max_length": 2}),
        "path must be a folder or the name of a data set, got 5": (5, {}),
    }
    for message, (path, options) in wrong.items():
        with pytest.raises(ValueError, match=f"^HuggingFace: {re.escape(message)}"):
            HuggingFace(path, **{"inputs": "age", "target": "ill"} | options)


def test_splits_must_be_alike():
    parts = hub.DatasetDict(train=one(x=[[1.0, 2.0]], ill=[0]), test=one(x=[[1.0, 2.0, 3.0]], ill=[0]))
    with pytest.raises(
        ValueError, match=r"inputs of all splits .*, got train: \[2\] of float32, test: \[3\] of float32"
    ):
        HuggingFace(parts, "x", "ill", test="test").load()


def test_streams_are_refused():
    stream = rows(9).to_iterable_dataset()
    for path in (stream, hub.IterableDatasetDict(train=stream)):
        with pytest.raises(ValueError, match=r"HuggingFace: got a streamed data set .*streaming=False"):
            HuggingFace(path, "age", "ill")


def test_a_name_that_leads_nowhere_is_said(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"HuggingFace: '.*nothing' \(data.dataset.init_args.path\) is not"):
        HuggingFace(str(tmp_path / "nothing"), "age", "ill")

    def unreachable(name, subset):
        raise ConnectionError(f"{name} {subset} cannot be reached")

    monkeypatch.setattr(hub, "load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"\(ConnectionError: flowers/all small cannot be reached\)"):
        HuggingFace("flowers/all", "age", "ill", subset="small")


def test_without_the_library_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"HuggingFace: .* pip install 'lcfl\[huggingface\]'"):
        HuggingFace("folder", "age", "ill")
