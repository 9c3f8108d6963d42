"""Writes the files of clients, for tests of `Folders`."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image


def write_table(path, columns, *rows):
    """Writes a CSV file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def write_image(path, value=0, size=(4, 4), mode="RGB"):
    """Writes an image of one colour; ``size`` is (height, width)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size[::-1], value if mode != "RGB" else (value,) * 3).save(path)


def write_pictures(root, number):
    """Writes random images of 5 x 7 pixels, ``<client>/<class>/<number>.png``: clients a and b, classes x, y and z."""
    draws = np.random.default_rng(0)
    for place in range(number):
        path = Path(root, "ab"[place % 2], "xyz"[place % 3], f"{place:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (5, 7, 3), dtype=np.uint8)).save(path)


def write_arrays(path, **arrays):
    """Writes an .npz file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def write_wards(root, sizes, seed=0, columns=("age", "dose", "outcome"), outcomes=(0, 1)):
    """Writes one table per client with random features and two classes in turns."""
    generator = np.random.default_rng(seed)
    for name, size in sizes.items():
        numbers = generator.normal(size=(size, 2)).round(3).tolist()
        write_table(Path(root, name, "train.csv"), columns, *[[*row, outcomes[i % 2]] for i, row in enumerate(numbers)])
