"""Tests of samples: batches hold the requested samples, normalised, and fingerprints detect every change."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision.transforms import v2

from lcfl.data.dataset_samples import DatasetSamples
from lcfl.data.samples import TensorSamples

CPU = torch.device("cpu")
PIXELS = torch.randint(0, 256, (12, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = np.arange(12) % 4


def test_images_are_scaled_and_normalised_per_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    examples = TensorSamples(PIXELS, LABELS, 8, 4, mean, std)
    before = PIXELS.clone()
    inputs, targets = examples.batch(np.array([7, 0, 7]), CPU)
    oracle = v2.functional.normalize(PIXELS[[7, 0, 7]] / 255, list(mean), list(std))
    torch.testing.assert_close(inputs, oracle)
    assert targets.tolist() == [3, 0, 3] and targets.dtype == torch.int64
    assert torch.equal(examples.inputs, before) and examples.inputs.dtype == torch.uint8


def test_uint8_inputs_are_scaled_to_0_to_1_without_normalisation():
    inputs, _ = TensorSamples(PIXELS, LABELS, 12, 4).batch(torch.arange(12), CPU)
    torch.testing.assert_close(inputs, PIXELS / 255)


@pytest.mark.parametrize("indices", [np.array([1, 4, 9, 11]), torch.tensor([1, 4, 9, 11])])
def test_unused_samples_are_freed_and_nothing_else_changes(indices):
    whole = TensorSamples(PIXELS, LABELS, 8, 4, (0.1, 0.2, 0.3), (0.5, 0.25, 2.0))
    kept = whole.subset(np.array([1, 4, 9, 11]))
    assert len(kept.inputs) == 4 and len(kept) == 12 and kept.fingerprint() == whole.fingerprint()
    for found, expected in zip(kept.batch(indices, CPU), whole.batch(indices, CPU), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(IndexError, match="sample 0 is not in memory: no client trains"):
        kept.batch(np.array([1, 0]), CPU)


def test_all_samples_stay_if_most_are_in_use():
    examples = TensorSamples(PIXELS, LABELS, 8, 4)
    examples.batch(np.arange(3), CPU)
    assert examples.subset(np.arange(10)) is examples and len(examples.inputs) == 12
    torch.testing.assert_close(examples.batch(np.array([11]), CPU)[0], PIXELS[11:] / 255)


@pytest.mark.parametrize(
    ("dtype", "used"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.int64),
        (torch.int32, torch.int32),
    ],
)
def test_floats_become_float32_and_integers_keep_their_type(dtype, used):
    values = torch.arange(24).reshape(12, 2).to(dtype)
    examples = TensorSamples(values, torch.from_numpy(LABELS), 12, 4)
    inputs, _ = examples.batch(np.array([3, 1]), CPU)
    assert torch.equal(inputs, values[[3, 1]].to(used)) and inputs.dtype == used
    inputs.zero_()
    assert torch.equal(examples.inputs, values.to(used))


def test_floats_can_be_normalised():
    values = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    inputs, _ = TensorSamples(values, [0, 1], 2, 2, (1, 10), (2, 10)).batch(np.array([1]), CPU)
    assert inputs.tolist() == [[1.0, 2.0]]
    assert values.tolist() == [[1.0, 10.0], [3.0, 30.0]]


def test_data_too_large_for_the_device_are_gathered_on_the_host(monkeypatch):
    # The meta device stands in for an accelerator, because its tensors have a shape and a device but no memory.
    meta = torch.device("meta")
    small = TensorSamples(PIXELS, LABELS, 8, 4)
    assert small.batch(np.array([1, 2]), meta)[0].shape == (2, 3, 4, 4)
    assert small._place(meta)[0].device == meta
    monkeypatch.setattr("lcfl.data.samples.RESIDENT_BYTES", PIXELS.nbytes - 1)
    large = TensorSamples(PIXELS, LABELS, 8, 4)
    inputs, targets = large.batch(np.array([1, 2]), meta)
    assert large._place(meta)[0].device == CPU
    assert inputs.device == targets.device == meta


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((PIXELS, LABELS, 8, 3), "labels must lie in 0 to 2 .* got 0 to 3"),
        ((PIXELS, LABELS - 1, 8, 4), "got -1 to 2"),
        ((PIXELS, LABELS.astype(float), 8, 4), "float64"),
        ((PIXELS, LABELS[:, None], 8, 4), r"shape \(12, 1\)"),
        ((PIXELS, LABELS[:9], 8, 4), "equal length, got 12 and 9"),
        ((PIXELS, LABELS, 0, 4), "num_train 0"),
        ((PIXELS, LABELS, 13, 4), "num_train 13"),
        ((PIXELS, LABELS, 8, 4, (0.5,), (0.5,)), "3 numbers"),
        ((PIXELS, LABELS, 8, 4, (0.5, 0.5, 0.5)), "3 numbers"),
        ((PIXELS, LABELS, 8, 4, (0.5, 0.5, 0.5), (0.5, 0.5, 0.0)), "std > 0"),
        ((PIXELS.int(), LABELS, 8, 4, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), "int32"),
    ],
)
def test_unusable_data_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        TensorSamples(*arguments)


def test_fingerprint_depends_only_on_content():
    def fingerprint(pixels=PIXELS, labels=LABELS, num_train=8, num_classes=4, mean=(0, 0, 0), std=(1, 1, 1)):
        return TensorSamples(pixels, labels, num_train, num_classes, mean, std).fingerprint()

    changed = PIXELS.clone()
    changed[11, 2, 3, 3] ^= 1
    prints = {
        fingerprint(),
        fingerprint(pixels=changed),
        fingerprint(pixels=PIXELS.reshape(12, 3, 2, 8)),
        fingerprint(labels=LABELS[::-1]),
        fingerprint(num_train=9),
        fingerprint(num_classes=5),
        fingerprint(mean=(0, 0, 0.1)),
        fingerprint(std=(1, 1, 2)),
    }
    assert len(prints) == 8
    strided = PIXELS.to(memory_format=torch.channels_last)
    assert fingerprint(pixels=strided, labels=LABELS.astype(np.uint8)) == fingerprint()


class Items(Dataset):
    """Items of vectors with labels 0 and 1 that record which items are read.

    There are twice as many items as lcfl inspects, and item 32 is not inspected.
    """

    def __init__(self, make=lambda index: (torch.full((2,), float(index)), index % 2), number=64):
        self.make, self.number, self.read = make, number, []

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.read.append(index)
        return self.make(index)


def rolled(index):
    return torch.rand(2), index % 2


def test_any_data_set_of_pairs_can_be_used():
    data = torch.arange(10.0).reshape(5, 2)
    train, test = TensorDataset(data, torch.tensor([0, 1, 0, 1, 2])), [(torch.tensor([7.0, 8.0]), 1)]
    examples = DatasetSamples(train, test, 3)
    assert examples.labels.tolist() == [0, 1, 0, 1, 2, 1]
    assert (examples.num_train, len(examples)) == (5, 6)
    inputs, targets = examples.batch(np.array([5, 2]), CPU)
    assert inputs.tolist() == [[7.0, 8.0], [4.0, 5.0]] and targets.tolist() == [1, 0]
    assert targets.dtype == torch.int64


@pytest.mark.parametrize("as_item", [torch.Tensor.clone, torch.Tensor.numpy], ids=["tensor", "array"])
def test_uint8_items_are_scaled_like_uint8_tensors(as_item):
    items = DatasetSamples([(as_item(image), int(label)) for image, label in zip(PIXELS, LABELS, strict=True)], None, 4)
    whole = TensorSamples(PIXELS, LABELS, 12, 4)
    for one, other in zip(items.batch(np.arange(12), CPU), whole.batch(np.arange(12), CPU), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert PIXELS.dtype == torch.uint8


def test_errors_name_inputs_of_another_shape_or_type():
    for odd in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        good = (torch.zeros(2), 0)
        with pytest.raises(
            ValueError, match=r"item 1 of train has an input of shape .*item 0 of train has shape \(2,\)"
        ):
            DatasetSamples([good, (odd, 0)], None, 1)
        with pytest.raises(
            ValueError, match=r"item 0 of test has an input of .*all inputs must have the same shape and type: resize"
        ):
            DatasetSamples([good], [(odd, 0)], 1)


def test_item_that_was_not_inspected_is_checked_when_it_is_read():
    items = Items(lambda index: (torch.zeros(3 if index == 32 else 2), 0))
    items.targets = [0] * 64
    examples = DatasetSamples(items, None, 1)
    assert 32 not in items.read
    with pytest.raises(ValueError, match=r"item 32 of train has an input of shape \(3,\)"):
        examples.batch(np.array([32]), CPU)
    del items.targets
    with pytest.raises(ValueError, match=r"item 32 of train"):
        DatasetSamples(items, None, 1)


def test_empty_training_set_is_refused_but_an_empty_test_set_is_not():
    with pytest.raises(ValueError, match=r"Datasets: train has no items; give at least one training sample"):
        DatasetSamples([], None, 2)
    assert len(DatasetSamples([(torch.zeros(2), 0)], [], 2)) == 1


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_labels_are_read_from_an_attribute_that_agrees_with_the_items(name):
    items = Items()
    setattr(items, name, [index % 2 for index in range(64)])
    assert DatasetSamples(items, None, 2).labels.tolist() == getattr(items, name)
    assert 0 in items.read and 63 in items.read and len(set(items.read)) == 32


@pytest.mark.parametrize(
    "attribute", [[0] * 64, [0, 1], ["even", "odd"] * 32, [0.0, 1.0] * 32, [[0], [1, 2]] * 32, None, lambda: [0, 1]]
)
def test_attribute_that_holds_no_labels_is_ignored(attribute):
    items = Items()
    items.targets = attribute
    assert DatasetSamples(items, None, 2).labels.tolist() == [0, 1] * 32
    assert set(items.read) == set(range(64))


def test_transformed_labels_are_read_from_the_items():
    items = Items(lambda index: (torch.zeros(2), int(index == 32)))
    items.targets, items.target_transform = [0] * 64, object()
    assert DatasetSamples(items, None, 2).labels.tolist() == [int(index == 32) for index in range(64)]
    assert DatasetSamples(Subset(items, [0, 32]), None, 2).labels.tolist() == [0, 1]


def test_reading_items_does_not_advance_global_generators():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    DatasetSamples(Items(rolled), None, 2).fingerprint()
    assert torch.equal(torch.rand(1), expected)


def test_dataset_labels_are_checked():
    with pytest.raises(ValueError, match=r"got 0 to 1 \(32 outside; the first is that of sample 1\); correct num_c"):
        DatasetSamples(Items(), None, 1)


def test_dataset_fingerprint_depends_on_raw_data_and_labels():
    def fingerprint(value=0.0, label=0, test=None):
        return DatasetSamples(TensorDataset(torch.tensor([[value]]), torch.tensor([label])), test, 2).fingerprint()

    assert fingerprint() == fingerprint()
    test = [(torch.zeros(1), 1)]
    assert len({fingerprint(), fingerprint(value=1.0), fingerprint(label=1), fingerprint(test=test)}) == 4


RAW = {
    "texts": lambda last: np.array([f"text {n}" for n in (0, last)], dtype=object),
    "mixed": lambda last: np.array([[b"a", None], [1.5, last]], dtype=object),
    "times": lambda last: np.array(["2020-01-01", f"2020-01-0{last}"], dtype="datetime64[D]"),
    "bfloat16": lambda last: torch.tensor([0, last]).bfloat16(),
}


@pytest.mark.parametrize("raw", RAW)
def test_dataset_fingerprint_depends_on_the_content_of_raw_data_of_any_kind(raw):
    def fingerprint(last):
        items = Items()
        items.targets, items.data = [0, 1] * 32, RAW[raw](last)
        kept.append(items)  # so that no memory is used again
        return DatasetSamples(items, None, 2).fingerprint()

    kept = []
    assert fingerprint(2) == fingerprint(2) != fingerprint(3)


@pytest.mark.parametrize(
    "raw",
    [
        {"data": np.array([object(), "a"])},
        {"data": np.zeros(2, dtype=[("a", int), ("b", object)])},
        {"data": torch.eye(3).to_sparse()},
        {"tensors": None},
    ],
)
def test_raw_data_without_bytes_in_order_do_not_count(raw):
    def fingerprint(**attributes):
        items = Items()
        vars(items).update(attributes)
        return DatasetSamples(items, None, 2).fingerprint()

    assert fingerprint(**raw) == fingerprint(**copy.deepcopy(raw))


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand,
        lambda number: torch.from_numpy(np.random.rand(number)),
        lambda number: random.random() * torch.ones(number),
    ],
    ids=["torch", "numpy", "random"],
)
def test_dataset_fingerprint_depends_on_items_under_random_transforms(draw):
    def fingerprint(scale=1.0, shift=0.0, changed=0):
        def make(index):
            return scale * draw(2) + shift * (index == changed), index % 2

        items = Items(make)
        items.targets = [0, 1] * 32
        return DatasetSamples(items, None, 2).fingerprint()

    torch.manual_seed(1)
    first = fingerprint()
    torch.manual_seed(2)
    assert fingerprint() == first
    assert len({first, fingerprint(scale=2.0), fingerprint(shift=1.0), fingerprint(shift=1.0, changed=63)}) == 4


def test_items_from_a_private_generator_are_left_out_with_a_warning():
    own = np.random.default_rng()
    noisy = DatasetSamples(Items(lambda index: (own.normal(size=2), index % 2)), None, 2)
    with pytest.warns(UserWarning, match=r"items of train differ from one reading to the next.*global generator"):
        first = noisy.fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert noisy.fingerprint() == first
    again = DatasetSamples(Items(lambda index: (own.normal(size=2), index % 2)), None, 2)
    with pytest.warns(UserWarning, match="differ"):
        assert again.fingerprint() == first


def test_warning_counts_inputs_with_nan_or_infinity_and_names_the_first():
    inputs = torch.zeros(9, 3)
    inputs[4, 1], inputs[7, 0] = torch.nan, torch.inf
    with pytest.warns(UserWarning, match=r"2 of 9 inputs hold NaN or infinity \(the first is number 4\)"):
        TensorSamples(inputs, [0] * 9, 9, 2)
    pairs = [(row, 0) for row in inputs.repeat(10, 1)]
    with pytest.warns(UserWarning, match=r"20 of 90 inspected items of train hold NaN .* is number 4\)"):
        DatasetSamples(pairs, None, 2)  # every item is read, since there is no attribute with labels
    pairs = Items(lambda index: (torch.tensor([0.0 if index != 63 else torch.nan]), 0))
    pairs.targets = [0] * 64
    with pytest.warns(UserWarning, match=r"1 of 32 inspected items of train hold NaN .* is number 63\)"):
        DatasetSamples(pairs, None, 2)
