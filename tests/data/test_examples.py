"""Batches are the images asked for, normalised as the formula says, and fingerprints see every change."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

from lcfl.data.examples import DatasetExamples, TensorExamples

CPU = torch.device("cpu")
PIXELS = torch.randint(0, 256, (12, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = np.arange(12) % 4


def test_images_are_scaled_and_normalised_per_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    examples = TensorExamples(PIXELS, LABELS, 8, 4, mean, std)
    before = PIXELS.clone()
    inputs, targets = examples.batch(np.array([7, 0, 7]), CPU)
    oracle = v2.functional.normalize(PIXELS[[7, 0, 7]] / 255, list(mean), list(std))
    torch.testing.assert_close(inputs, oracle)
    assert targets.tolist() == [3, 0, 3] and targets.dtype == torch.int64
    assert torch.equal(examples.inputs, before) and examples.inputs.dtype == torch.uint8


def test_bytes_without_normalisation_lie_in_0_to_1():
    inputs, _ = TensorExamples(PIXELS, LABELS, 12, 4).batch(torch.arange(12), CPU)
    torch.testing.assert_close(inputs, PIXELS / 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_types_are_used_as_they_are(dtype):
    values = torch.arange(24).reshape(12, 2).to(dtype)
    examples = TensorExamples(values, torch.from_numpy(LABELS), 12, 4)
    inputs, _ = examples.batch(np.array([3, 1]), CPU)
    assert torch.equal(inputs, values[[3, 1]]) and inputs.dtype == dtype
    inputs.zero_()
    assert torch.equal(examples.inputs, values)


def test_floats_can_be_normalised():
    values = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    inputs, _ = TensorExamples(values, [0, 1], 2, 2, (1, 10), (2, 10)).batch(np.array([1]), CPU)
    assert inputs.tolist() == [[1.0, 2.0]]
    assert values.tolist() == [[1.0, 10.0], [3.0, 30.0]]


def test_a_set_too_large_for_the_device_is_gathered_on_the_host(monkeypatch):
    # The meta device stands in for an accelerator: it has shapes and a place, no memory.
    meta = torch.device("meta")
    small = TensorExamples(PIXELS, LABELS, 8, 4)
    assert small.batch(np.array([1, 2]), meta)[0].shape == (2, 3, 4, 4)
    assert small._place(meta)[0].device == meta
    monkeypatch.setattr("lcfl.data.examples.RESIDENT_BYTES", PIXELS.nbytes - 1)
    large = TensorExamples(PIXELS, LABELS, 8, 4)
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
        TensorExamples(*arguments)


def test_fingerprint_sees_content_and_nothing_else():
    def fingerprint(pixels=PIXELS, labels=LABELS, num_train=8, num_classes=4, mean=(0, 0, 0), std=(1, 1, 1)):
        return TensorExamples(pixels, labels, num_train, num_classes, mean, std).fingerprint()

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


class Rolls(Dataset):
    """Three items that draw from torch's global generator."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.rand(2), index % 2


def test_any_dataset_of_pairs_can_be_used():
    data = torch.arange(10.0).reshape(5, 2)
    train, test = TensorDataset(data, torch.tensor([0, 1, 0, 1, 2])), [(torch.tensor([7.0, 8.0]), 1)]
    examples = DatasetExamples(train, test, 3)
    assert examples.targets.tolist() == [0, 1, 0, 1, 2, 1]
    assert (examples.num_train, len(examples), examples.random) == (5, 6, True)
    inputs, targets = examples.batch(np.array([5, 2]), CPU)
    assert inputs.tolist() == [[7.0, 8.0], [4.0, 5.0]] and targets.tolist() == [1, 0]
    assert targets.dtype == torch.int64


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_labels_are_read_from_an_attribute_unless_they_are_transformed(name):
    dataset = Rolls()
    setattr(dataset, name, [1, 1, 0])
    assert DatasetExamples(dataset, None, 2).targets.tolist() == [1, 1, 0]
    dataset.target_transform = lambda label: label
    assert DatasetExamples(dataset, None, 2).targets.tolist() == [0, 1, 0]
    del dataset.target_transform
    assert DatasetExamples(Subset(dataset, [0, 1]), None, 2).targets.tolist() == [0, 1]


def test_reading_labels_leaves_the_callers_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    DatasetExamples(Rolls(), None, 2)
    assert torch.equal(torch.rand(1), expected)


def test_dataset_labels_are_checked():
    with pytest.raises(ValueError, match="got 0 to 1; correct num_classes"):
        DatasetExamples(Rolls(), None, 1)
    with pytest.raises(ValueError, match="float64"):
        DatasetExamples([(torch.zeros(1), 0.5)], None, 1)


def test_iterable_datasets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

        def __len__(self):
            return 0

    for unusable in (Stream(), iter([])):
        with pytest.raises(ValueError, match=rf"map-style .* got {type(unusable).__name__}"):
            DatasetExamples(unusable, None, 2)


def test_dataset_fingerprint_sees_raw_data_and_labels():
    def fingerprint(value=0.0, label=0, test=None):
        return DatasetExamples(TensorDataset(torch.tensor([[value]]), torch.tensor([label])), test, 2).fingerprint()

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(value=1.0), fingerprint(label=1), fingerprint(test=[(0, 1)])}) == 4
