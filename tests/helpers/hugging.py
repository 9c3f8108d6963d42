"""A small data set of Hugging Face's library. A test module that imports this one is skipped without the library."""

import numpy as np
import pytest
from PIL import Image

hub = pytest.importorskip("datasets")
hub.disable_progress_bars()


def rows(number, seed=0, **more):
    """Returns a split with a column of each kind."""
    draw = np.random.default_rng(seed)
    columns = {
        "age": draw.normal(size=number),
        "weight": draw.normal(size=number),
        "visits": draw.integers(0, 9, number).astype(np.int32),
        "scan": list(draw.integers(0, 256, (number, 3, 4, 5), dtype=np.uint8)),
        "signal": list(draw.normal(size=(number, 6))),
        "photo": [Image.fromarray(each) for each in draw.integers(0, 256, (number, 4, 5, 3), dtype=np.uint8)],
        "grey": [Image.fromarray(each) for each in draw.integers(0, 256, (number, 4, 5), dtype=np.uint8)],
        "note": ["".join(draw.choice(list("abc"), draw.integers(0, 9))) for _ in range(number)],
        "ill": draw.integers(0, 2, number),
        "ward": [f"ward {each}" for each in draw.integers(0, 3, number)],
        "bed": draw.permutation(np.arange(number) % 12),
        **more,
    }
    split = hub.Dataset.from_dict(columns, features=features(list(columns)))
    return split


def features(names):
    numbers = {name: hub.Value("float64") for name in ("age", "weight")} | {"visits": hub.Value("int32")}
    arrays = {"scan": hub.Array3D((3, 4, 5), "uint8"), "signal": hub.Sequence(hub.Value("float32"))}
    images = {"photo": hub.Image(), "grey": hub.Image()}
    texts = {"note": hub.Value("string"), "ward": hub.Value("string"), "bed": hub.Value("int64")}
    known = numbers | arrays | images | texts | {"ill": hub.ClassLabel(names=["no", "yes"])}
    return hub.Features({name: known[name] for name in names})


def saved(folder):
    """Saves three splits and returns them."""
    parts = hub.DatasetDict(learn=rows(30), check=rows(9, 1, ward=WARDS[:9]), final=rows(12, 2, ward=WARDS))
    parts.save_to_disk(folder)
    return parts


WARDS = ["ward 0", "ward 1", "ward 2"] * 4
NAMES = {"train": "learn", "val": "check", "test": "final"}


class Letters:
    """Numbers the letters of a text from 1."""

    def __init__(self, alphabet: str = "abc"):
        self.alphabet = alphabet

    def __call__(self, text):
        return [1 + self.alphabet.index(letter) for letter in text]


def one(**columns):
    return hub.Dataset.from_dict(columns)
