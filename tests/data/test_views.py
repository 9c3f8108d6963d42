"""Tests of views against numpy, and of their independence of the batch in which a sample is read."""

import numpy as np
import pytest
import torch

from lcfl.core import rng
from lcfl.data.augmentation import Augmentation, CropAndFlip
from lcfl.data.dataset_samples import DatasetSamples
from lcfl.data.samples import TensorSamples
from lcfl.data.views import Noise, QuarterTurns, Relabelling, View, ViewedSamples, standard_normal

CPU = torch.device("cpu")
IMAGES = torch.arange(5 * 2 * 3 * 3, dtype=torch.float32).reshape(5, 2, 3, 3)
LABELS = torch.tensor([0, 1, 2, 1, 0])
NUMBERS = torch.arange(5)


def test_base_view_changes_nothing():
    assert View() == View() != QuarterTurns(0)
    assert View().inputs(IMAGES, NUMBERS) is IMAGES and View().targets(LABELS) is LABELS


@pytest.mark.parametrize("number", range(4))
def test_quarter_turns_equal_those_of_numpy(number):
    turned = QuarterTurns(number).inputs(IMAGES, NUMBERS)
    assert np.array_equal(turned, np.rot90(IMAGES.numpy(), number, axes=(2, 3))) and turned.is_contiguous()
    assert torch.equal(QuarterTurns(number).targets(LABELS), LABELS)


def test_a_quarter_turn_is_counter_clockwise():
    image = torch.tensor([[[[1, 2], [3, 4]]]])
    assert QuarterTurns(1).inputs(image, NUMBERS[:1]).tolist() == [[[[2, 4], [1, 3]]]]


def test_relabelling_looks_labels_up():
    assert Relabelling((2, 0, 1)).targets(LABELS).tolist() == [2, 0, 1, 0, 2]
    assert Relabelling((2, 0, 1)).inputs(IMAGES, NUMBERS) is IMAGES


def test_noise_is_proportional_to_sigma():
    small, large = (Noise(sigma, key=5).inputs(IMAGES, NUMBERS) - IMAGES for sigma in (0.5, 1.0))
    torch.testing.assert_close(2 * small, large, atol=1e-4, rtol=0)
    assert Noise(0.0, key=5).inputs(IMAGES, NUMBERS) is IMAGES
    assert IMAGES[0, 0, 0, 1] == 1, "the pixels of the data set do not change"
    assert Noise(1.0, 5).inputs(IMAGES.double(), NUMBERS).dtype == torch.float64


@pytest.mark.parametrize("num_values", [1, 7, 64, 3072])
def test_noise_of_a_sample_is_the_same_in_every_batch(num_values):
    numbers = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:19]
    together = standard_normal(7, numbers, num_values)
    assert together.shape == (19, num_values)
    for place, number in enumerate(numbers):
        assert torch.equal(standard_normal(7, number.reshape(1), num_values)[0], together[place])
    assert torch.equal(standard_normal(7, numbers.flip(0), num_values), together.flip(0))


@pytest.mark.parametrize("key", [0, 12345, 2**63 - 1])
def test_numbers_are_normal(key):
    values = standard_normal(key, torch.arange(500), 401).double()
    count = values.numel()
    # Each row holds a power, the mean of this power of a normal number, and its variance.
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(values.pow(power).mean() - moment) < 4.5 * (spread / count) ** 0.5
    below = (values.flatten().sort().values[:, None] <= torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).double().mean(0)
    assert below.tolist() == pytest.approx([0.02275, 0.15866, 0.5, 0.84134, 0.97725], abs=4e-3)


def test_numbers_of_samples_pixels_and_keys_are_independent():
    values = standard_normal(3, torch.arange(400), 50).double()
    other = standard_normal(4, torch.arange(400), 50).double()
    flat = values.flatten()
    limit = 4.5 / flat.numel() ** 0.5
    assert abs((values * other).mean()) < limit
    for lag in (1, 2, 25, 49, 50, 51, 100):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 1.1 * limit
    assert len(flat.unique()) > 0.99 * flat.numel()


def seen(*views):
    return ViewedSamples(TensorSamples(IMAGES, LABELS, 4, 3), views)


def test_viewed_samples_apply_views_in_order_and_by_index():
    first, second = Noise(1.0, 9), QuarterTurns(1)
    inputs, targets = seen(first, second, Relabelling((1, 2, 0))).batch(np.array([4, 1]), CPU)
    noise = standard_normal(9, torch.tensor([4, 1]), 18).reshape(2, 2, 3, 3)
    assert torch.equal(inputs, torch.rot90(IMAGES[[4, 1]] + noise, dims=(2, 3)))
    assert targets.tolist() == [1, 2]
    assert not torch.equal(inputs, seen(second, first).batch(np.array([4, 1]), CPU)[0])


def test_training_batches_are_augmented_before_views():
    class Negative(Augmentation):
        def __call__(self, images):
            return -images

    examples = TensorSamples(IMAGES, LABELS, 5, 3, augmentation=Negative())
    seen = ViewedSamples(examples, (QuarterTurns(1), Noise(0.5, key=3), Relabelling((2, 0, 1))))
    inputs, targets = seen.training_batch(NUMBERS, CPU)
    plain, same = seen.batch(NUMBERS, CPU)
    noise = plain - QuarterTurns(1).inputs(IMAGES, NUMBERS)
    torch.testing.assert_close(inputs, noise - QuarterTurns(1).inputs(IMAGES, NUMBERS))
    assert torch.equal(targets, same)


@pytest.mark.parametrize("augmentation", [None, CropAndFlip()])
def test_batches_of_several_steps_are_those_of_each(augmentation):
    examples = TensorSamples(IMAGES, LABELS, 5, 3, augmentation=augmentation)
    viewed = ViewedSamples(examples, (QuarterTurns(1), Noise(0.5, key=3), Relabelling((2, 0, 1))))
    steps = [np.array(each) for each in ([4], [1, 2, 3], [0, 0], [3, 2, 1, 0], [2])]
    for known in (examples, viewed):
        assert known.most_at_once > sum(map(len, steps))
        for most in (known.most_at_once, 4, 0):
            known.most_at_once = most
            with rng.seeded(0, "augmentation"):
                together = list(known.training_batches(iter(steps), CPU))
            with rng.seeded(0, "augmentation"):
                apart = [known.training_batch(each, CPU) for each in steps]
            for (inputs, targets), (own, labels) in zip(together, apart, strict=True):
                assert torch.equal(inputs, own)
                assert torch.equal(targets, labels)


def test_several_steps_are_gathered_at_once_unless_something_is_drawn():
    for augmentation, left in ((None, 0), (CropAndFlip(), 2)):
        steps = iter(np.array([each]) for each in range(4))
        next(TensorSamples(IMAGES, LABELS, 5, 3, augmentation=augmentation).training_batches(steps, CPU))
        assert len(list(steps)) == left


def test_viewed_samples_behave_like_samples():
    examples = seen(Relabelling((1, 2, 0)))
    assert examples.labels.tolist() == [1, 2, 0, 2, 1]
    assert (len(examples), examples.num_train, examples.num_classes) == (5, 4, 3)
    prints = {each.fingerprint() for each in (examples, seen(), seen(QuarterTurns(1)), seen(QuarterTurns(2)))}
    assert len(prints) == 4
    items = DatasetSamples(list(zip(IMAGES, LABELS.tolist(), strict=True)), None, 3)
    turned = ViewedSamples(items, (QuarterTurns(1),)).batch(np.array([4, 1]), CPU)
    assert all(map(torch.equal, turned, seen(QuarterTurns(1)).batch(np.array([4, 1]), CPU)))
