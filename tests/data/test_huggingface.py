"""Tests of data sets of Hugging Face's library, saved to a folder by its own functions."""

import json
import random

import numpy as np
import pytest
import torch

from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import HuggingFace
from lcfl.data.owners import TEST, TRAIN, VAL
from lcfl.data.partition import IID, ByOwner
from lcfl.data.samples import TensorSamples
from tests.helpers.builders import loaded
from tests.helpers.commandline import lcfl
from tests.helpers.hugging import NAMES, Letters, hub, one, rows, saved
from tests.helpers.known_sets import trained

CPU = torch.device("cpu")


def read(dataset):
    samples = dataset.load()
    inputs, targets = samples.batch(range(len(samples)), CPU)
    assert tuple(inputs.shape[1:]) == dataset.shape and inputs.dtype == dataset.dtype
    assert tuple(targets.shape[1:]) == dataset.target_shape and targets.dtype == dataset.target_dtype
    return inputs.numpy(), targets.numpy()


SPLIT = {
    "age": lambda split: np.float32(split["age"][:]),
    "signal": lambda split: np.float32(split["signal"][:]),
    "scan": lambda split: np.float32(split["scan"][:]) / np.float32(255),
    "visits": lambda split: np.int32(split["visits"][:]),
    "photo": lambda split: np.stack([np.moveaxis(np.asarray(each), -1, 0) for each in split["photo"]]) / 255,
    "grey": lambda split: np.stack([np.asarray(each)[None] for each in split["grey"]]) / 255,
}


@pytest.mark.parametrize("column", SPLIT)
def test_columns_come_back_from_a_folder(tmp_path, column):
    split = rows(9)
    split.save_to_disk(tmp_path / "saved")
    dataset = HuggingFace(str(tmp_path / "saved"), column, "ill")
    inputs, targets = read(dataset)
    np.testing.assert_allclose(inputs, SPLIT[column](split), rtol=1e-6)
    assert targets.tolist() == split["ill"][:] and dataset.num_classes == 2
    assert isinstance(dataset.load(), TensorSamples)


def test_several_columns_are_stacked(tmp_path):
    split = rows(9)
    inputs, targets = read(HuggingFace(split, ["age", "weight", "visits"], ["weight", "age"]))
    assert np.array_equal(inputs, np.float32([split["age"][:], split["weight"][:], split["visits"][:]]).T)
    assert np.array_equal(targets, np.float32([split["weight"][:], split["age"][:]]).T)
    flags = one(smokes=[True, False], coughs=[1, 0], tall=[False, True])
    inputs, targets = read(HuggingFace(flags, ["smokes", "coughs"], ["tall", "coughs"]))
    assert inputs.tolist() == [[1, 1], [0, 0]] and targets.tolist() == [[0, 1], [1, 0]]
    assert inputs.dtype == targets.dtype == np.float32
    inputs, targets = read(HuggingFace(flags, "smokes", "tall", num_classes=2))
    assert inputs.tolist() == [1.0, 0.0] and targets.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"columns of train must have one shape .*, got age: \[\], signal: \[6\]"):
        HuggingFace(split, ["age", "signal"], "ill")


def test_targets_are_classes_only_if_somebody_says_so():
    split = rows(40)
    numbers, classes = HuggingFace(split, "age", "visits"), HuggingFace(split, "age", "visits", num_classes=9)
    assert numbers.num_classes is None and numbers.load().labels is None
    assert classes.num_classes == 9 and classes.load().labels.tolist() == split["visits"][:]
    assert numbers.target_dtype == classes.target_dtype == torch.int64
    with pytest.raises(ValueError, match=r"column 'ill' has 2 classes \(no, yes, ...\), but num_classes is 3"):
        HuggingFace(split, "age", "ill", num_classes=3)
    with pytest.raises(ValueError, match=r"target weight of train must be the number of a class, .* got float32"):
        HuggingFace(split, "age", "weight", num_classes=3)
    with pytest.raises(ValueError, match=r"labels must lie in 0 to 4"):
        HuggingFace(split, "age", "visits", num_classes=5).load()


def test_classes_have_names_which_all_splits_number_alike():
    assert HuggingFace(rows(9), "age", "ill").classes == ("no", "yes")
    assert HuggingFace(rows(9), "age", "visits", num_classes=9).classes is None
    parts = hub.DatasetDict(train=one(x=[1.0, 2.0, 3.0], y=[*"abc"]), test=one(x=[1.0, 3.0], y=[*"ac"]))
    alike = parts.cast_column("y", hub.ClassLabel(names=["a", "b", "c"]))
    assert HuggingFace(alike, "x", "y", test="test").load().labels.tolist() == [0, 1, 2, 0, 2]
    apart = parts.class_encode_column("y")
    message = "^HuggingFace: class 1 of column 'y' is 'b' in train, but 'c' in test; number the classes alike in all"
    for role in ("val", "test"):
        with pytest.raises(ValueError, match=message):
            HuggingFace(apart, "x", "y", **{role: "test"})
    few = hub.DatasetDict(train=apart["train"], test=one(x=[1.0], y=[*"a"]).class_encode_column("y"))
    with pytest.raises(ValueError, match="class 1 of column 'y' is 'b' in train, but None in test"):
        HuggingFace(few, "x", "y", test="test")
    aligned = apart.align_labels_with_mapping({"a": 0, "b": 1, "c": 2}, "y")
    assert HuggingFace(aligned, "x", "y", test="test").load().labels.tolist() == [0, 1, 2, 0, 2]


def test_an_image_as_target_is_a_mask_of_whole_numbers():
    split = rows(4)
    _, masks = read(HuggingFace(split, "photo", "grey"))
    assert masks.dtype == np.int64 and np.array_equal(masks, np.stack([np.asarray(each) for each in split["grey"]]))


def test_rows_that_were_selected_or_shuffled_are_those_of_the_library():
    split = rows(20).shuffle(seed=1).select([7, 3, 11, 2])
    inputs, targets = read(HuggingFace(split, "age", "ill"))
    assert np.array_equal(inputs, np.float32(split["age"][:])) and targets.tolist() == split["ill"][:]
    owners = HuggingFace(split, "age", "ill").owners("bed")
    assert [int(owners.names[each]) for each in owners.number] == split["bed"][:]


def test_owners_have_the_names_of_classes():
    split = one(x=[1.0, 2.0, 3.0], y=[0, 1, 0], ward=["west", "east", "west"]).class_encode_column("ward")
    owners = HuggingFace(split, "x", "y").owners("ward")
    assert [owners.names[each] for each in owners.number] == ["west", "east", "west"]


def test_splits_owners_and_their_parts(tmp_path):
    parts = saved(tmp_path / "saved")
    dataset = HuggingFace(str(tmp_path / "saved"), "age", "ill", **NAMES)
    samples, owners = dataset.load(), dataset.owners("ward")
    assert samples.num_train == 39 and len(samples) == 51
    wards = [ward for split in parts.values() for ward in split["ward"]]
    assert owners.names == ("ward 0", "ward 1", "ward 2")
    assert [owners.names[each] for each in owners.number] == wards
    assert owners.part.tolist() == [TRAIN] * 30 + [VAL] * 9 + [TEST] * 12
    assert dataset.owners() is None
    assert dataset.owners("bed").names == tuple(map(str, range(12)))
    data = loaded(FederatedDataModule(dataset, ByOwner(column="ward")))
    population = data.population
    assert population.names == owners.names and data.num_clients == 3
    for ward, name in enumerate(owners.names):
        places = [place for place, each in enumerate(wards) if each == name]
        assert population.train[ward].tolist() == [each for each in places if each < 30]
        assert population.val[ward].tolist() == [each for each in places if 30 <= each < 39]
        assert population.test["own_split"][ward].tolist() == [each for each in places if each >= 39]


def halved(photo):
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1)[:, ::2]


def test_a_transform_reads_items_when_they_are_needed(tmp_path):
    parts = saved(tmp_path / "saved")
    dataset = HuggingFace(str(tmp_path / "saved"), "photo", "ill", transform=halved, **NAMES)
    inputs, targets = read(dataset)
    photos = [photo for split in parts.values() for photo in split["photo"]]
    np.testing.assert_allclose(inputs, np.stack([halved(photo) for photo in photos]) / 255, rtol=1e-6)
    assert targets.tolist() == [each for split in parts.values() for each in split["ill"]]
    samples = dataset.load()
    assert samples.num_train == 39 and samples.is_random(True) and dataset.shape == (3, 2, 5)
    assert samples.fingerprint() == dataset.load().fingerprint()
    other = HuggingFace(parts, "photo", "ill", transform=lambda photo: halved(photo) // 2, **NAMES)
    assert samples.fingerprint() != other.load().fingerprint()


def test_a_transform_of_several_columns_gets_a_dict():
    split = rows(9)
    dataset = HuggingFace(split, ["age", "visits"], "weight", transform=lambda row: [row["age"] * row["visits"]])
    inputs, targets = read(dataset)
    np.testing.assert_allclose(inputs[:, 0], np.multiply(split["age"][:], split["visits"][:]), rtol=1e-6)
    assert np.array_equal(targets, np.float32(split["weight"][:]))


def noisy(age):
    return [age + random.random(), age + np.random.rand(), age + float(torch.rand(()))]


def test_random_transforms_draw_from_the_seeded_generators():
    from lcfl.core import rng

    samples = HuggingFace(rows(9), "age", "ill", transform=noisy).load()

    def drawn(seed):
        with rng.seeded(seed, "test"):
            return samples.batch(range(9), CPU)[0]

    assert torch.equal(drawn(0), drawn(0))
    assert (drawn(0) != drawn(1)).all()


@pytest.mark.parametrize("wrapped", [False, True])
def test_texts_are_cut_and_filled_up(wrapped):
    split, letters = rows(9), Letters()
    tokenizer = (lambda text: {"input_ids": letters(text), "attention_mask": []}) if wrapped else letters
    inputs, _ = read(HuggingFace(split, "note", "ill", tokenizer=tokenizer, max_length=5, padding=7))
    assert inputs.dtype == np.int64
    assert inputs.tolist() == [(letters(note) + [7] * 5)[:5] for note in split["note"]]
    assert len({min(len(note), 5) for note in split["note"]}) > 2, "texts are cut, filled up and empty"


def test_a_tokenizer_of_transformers():
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "fever": 5, "cough": 6}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    split = hub.Dataset.from_dict({"note": ["fever and cough", "cough"], "ill": [0, 1]})
    inputs, _ = read(HuggingFace(split, "note", "ill", num_classes=2, tokenizer=tokenizer, max_length=4))
    assert inputs.tolist() == [[5, 0, 6, 0], [6, 0, 0, 0]]


def test_a_folder_of_tables_is_read_by_load_dataset(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/train.csv").write_text("x,y\n0.5,1\n1.5,0\n")
    inputs, targets = read(HuggingFace(str(tmp_path / "tables"), "x", "y", num_classes=2))
    assert inputs.tolist() == [0.5, 1.5] and targets.tolist() == [1, 0]


TABLE = """
data:
  dataset:
    class_path: HuggingFace
    init_args: {path: saved, inputs: [age, weight, visits], target: ill, train: learn, val: check, test: final}
  partition: {class_path: ByOwner, init_args: {column: ward}}
model:
  network: {class_path: lcfl.models.MLP, init_args: {in_features: 3, hidden: [8], num_classes: 2}}
"""


def test_wards_train_and_resume_to_the_same_bits(here):
    saved(here / "saved")
    (here / "table.yaml").write_text(TABLE)
    run = trained(None, "-c", "table.yaml", "--trainer.clients_per_round=2")
    assert json.loads((run.path / "partition.json").read_text())["names"] == ["ward 0", "ward 1", "ward 2"]
    saved(here / "saved")["learn"].map(lambda row: {"age": row["age"] + 1}).save_to_disk(here / "other")
    with pytest.raises(ValueError, match="data"):
        again = "--data.dataset.init_args.path=other", "--data.dataset.init_args.val=null"
        lcfl("fit", "-c", run.path / "config.yaml", *again, "--data.dataset.init_args.test=null", "--ckpt_path=last")


NOTES = """
data:
  dataset:
    class_path: HuggingFace
    init_args:
      path: saved
      inputs: note
      target: ill
      train: learn
      tokenizer: {class_path: own_tokenizer.Letters, init_args: {alphabet: cba}}
      max_length: 6
  partition: {class_path: ByOwner, init_args: {column: bed}}
model:
  network: {class_path: lcfl.models.CharLSTM, init_args: {num_characters: 4, num_classes: 2, hidden: 8}}
"""
PHOTOS = """
data:
  dataset:
    class_path: HuggingFace
    init_args:
      path: saved
      inputs: photo
      target: ill
      train: learn
      transform:
        class_path: torchvision.transforms.Compose
        init_args:
          transforms:
            - class_path: torchvision.transforms.RandomHorizontalFlip
            - class_path: torchvision.transforms.ToTensor
  partition: IID
  num_clients: 5
model:
  network: {class_path: lcfl.models.MLP, init_args: {in_features: 60, hidden: [8], num_classes: 2}}
"""
OWN = """
class Letters:
    def __init__(self, alphabet: str = "abc"):
        self.alphabet = alphabet

    def __call__(self, text):
        return [1 + self.alphabet.index(letter) for letter in text]
"""


@pytest.mark.parametrize("layer", [NOTES, pytest.param(PHOTOS, marks=pytest.mark.slow)], ids=["notes", "photos"])
def test_tokenizers_and_random_transforms_come_from_yaml(here, layer):
    saved(here / "saved")
    (here / "own_tokenizer.py").write_text(OWN)
    (here / "own.yaml").write_text(layer)
    assert np.isfinite(trained(None, "-c", "own.yaml").metrics["test/own_split/global/loss"])


def test_clients_hold_the_same_rows_in_memory_and_lazily(tmp_path):
    parts = saved(tmp_path / "saved")
    lists = [
        loaded(FederatedDataModule(HuggingFace(parts, "photo", "ill", "learn", transform=each), IID(), 5)).population
        for each in (None, halved)
    ]
    assert lists[0].fingerprint == lists[1].fingerprint
