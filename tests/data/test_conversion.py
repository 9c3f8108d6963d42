"""Tests of conversion: numbers of any kind become tensors, and errors name the unusable item and the remedy."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from lcfl.data.dataset_samples import DatasetSamples

VALUES = [2.0, 0.5, 300.0]


@pytest.mark.parametrize(
    ("given", "values", "dtype"),
    [
        (torch.tensor(VALUES), VALUES, torch.float32),
        (torch.tensor(VALUES, dtype=torch.float64), VALUES, torch.float32),
        (torch.tensor(VALUES, requires_grad=True), VALUES, torch.float32),
        (np.array(VALUES), VALUES, torch.float32),
        (np.array(VALUES, dtype=np.float16), VALUES, torch.float32),
        (np.array(VALUES)[::-1], VALUES[::-1], torch.float32),
        (VALUES, VALUES, torch.float32),
        (tuple(VALUES), VALUES, torch.float32),
        ([VALUES, VALUES], [VALUES, VALUES], torch.float32),
        (0.5, 0.5, torch.float32),
        (np.float64(0.5), 0.5, torch.float32),
        ([7, 8, 9], [7, 8, 9], torch.int64),
        (np.array([7, 8, 9], dtype=np.int32), [7, 8, 9], torch.int32),
        (torch.tensor([7, 8, 9]), [7, 8, 9], torch.int64),
    ],
    ids=str,
)
def test_numbers_become_tensors_of_the_type_for_the_network(given, values, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs, _ = DatasetSamples([(given, 0), (given, 0)], None, 1).batch(np.array([1, 0]), torch.device("cpu"))
    assert inputs.tolist() == [values, values]
    assert inputs.dtype == dtype and not inputs.requires_grad


PAIR = r"an item must be a pair: return input, target"
LABEL = r"a label must be one integer: return input, int\(label\)"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (torch.zeros(2), rf"item 0 of train is a Tensor; {PAIR}"),
        ({"input": 1, "label": 0}, rf"item 0 of train is a dict; {PAIR}"),
        ((torch.zeros(2), 0, 1), rf"item 0 of train is a tuple of 3; {PAIR}"),
        ((torch.zeros(2), 0.5), rf"item 0 of train has the label 0.5; {LABEL}"),
        ((torch.zeros(2), torch.tensor([1])), rf"item 0 of train has the label tensor\(\[1\]\); {LABEL}"),
        ((torch.zeros(2), "cat"), rf"item 0 of train has the label 'cat'; {LABEL}"),
        ((torch.zeros(2), None), rf"item 0 of train has the label None; {LABEL}"),
        (
            (Image.new("RGB", (4, 4)), 0),
            r"item 0 of train: .* got Image \(a PIL image\); .*transform=torchvision.transforms.ToTensor\(\)",
        ),
        (("text", 0), r"item 0 of train: an input must be a tensor, a numpy array or a list of numbers, got str"),
        (({"x": 1}, 0), "item 0 of train: an input must be .* got dict"),
        (([[1, 2], [3]], 0), "item 0 of train: list cannot become a tensor: .*"),
        ((["a", "b"], 0), "item 0 of train: list cannot become a tensor: it is text; number its values, e.g. with"),
        (((torch.zeros(2), torch.ones(2)), 0), "item 0 of train: an input is a tuple of 2 tensors; it must be one ten"),
        (([np.zeros(2), torch.ones(3)], 0), r"item 0 of train: an input is a list of 2 tensors.*torch.stack\(\[ids"),
        ((torch.zeros(2), (torch.ones(2), torch.ones(2))), "item 0 of train: a target is a tuple of 2 tensors"),
    ],
)
def test_errors_name_the_unusable_item_and_the_remedy(item, words):
    with pytest.raises(ValueError, match=rf"^Datasets: {words}"):
        DatasetSamples([item], None, 2)


def test_iterable_datasets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

        def __len__(self):
            return 0

    for unusable in (Stream(), iter([])):
        with pytest.raises(ValueError, match=rf"map-style .* got {type(unusable).__name__}"):
            DatasetSamples(unusable, None, 2)
