"""Tests of augmentation: crops and flips of images, which only training steps see, drawn in the client's stream."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torchvision.transforms import v2

from lcfl.core.clients import ClientState
from lcfl.core.messages import Downlink
from lcfl.data.augmentation import Augmentation, CropAndFlip
from lcfl.data.datamodule import FederatedDataModule
from lcfl.data.datasets import RandomLike, Tensors
from lcfl.data.partition import IID
from lcfl.data.samples import TensorSamples
from lcfl.distributed.tasks import TrainingTask
from lcfl.distributed.worker import ScoringTask, Worker
from lcfl.federation.federation import Federation
from lcfl.models import CNN
from lcfl.models.module import FederatedModule
from lcfl.runs.checkpoint import CheckpointError
from tests.federation.test_resume import assert_same_run
from tests.helpers.builders import alone, fedavg

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (64, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 2


def candidates(image, padding, fill):
    """Returns every crop of the padded image and the mirror images of these crops."""
    padded = v2.functional.pad(image, [padding], padding_mode={"zeros": "constant", "reflect": "reflect"}[fill])
    height, width = image.shape[1:]
    crops = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]
    return torch.stack([*crops, *(crop.flip(2) for crop in crops)])


@pytest.mark.parametrize(
    ("padding", "fill", "dtype"),
    [(0, "zeros", torch.uint8), (4, "zeros", torch.float32), (4, "zeros", torch.uint8), (4, "reflect", torch.uint8)],
)
def test_augmented_image_is_a_crop_or_its_mirror_image(padding, fill, dtype):
    torch.manual_seed(0)
    images = IMAGES[:16].to(dtype)
    before = images.clone()
    changed = CropAndFlip(padding, fill)(images)
    assert torch.equal(images, before)
    assert changed.shape == images.shape and changed.dtype == dtype
    for image, result in zip(images, changed, strict=True):
        assert (candidates(image, padding, fill) == result).flatten(1).all(dim=1).any()


def test_all_positions_and_both_orientations_are_equally_frequent():
    torch.manual_seed(0)
    image = torch.arange(1, 10, dtype=torch.float32).reshape(1, 1, 3, 3)
    changed = CropAndFlip(1)(image.expand(9000, -1, -1, -1))
    _, counts = changed.flatten(1).unique(dim=0, return_counts=True)
    # 500 are expected, with a standard deviation of 22.
    assert len(counts) == 18 and counts.min() > 400 and counts.max() < 600


@pytest.mark.parametrize(
    ("arguments", "images", "words"),
    [
        ({"padding": -1}, None, "got padding=-1; it must be at least 0"),
        ({"fill": "white"}, None, "'white'"),
        ({}, torch.zeros(4, 7), r"got inputs of shape \(7,\); it changes images .* Set augmentation to null\."),
        ({"padding": 6, "fill": "reflect"}, IMAGES, r"got padding 6 for images of \d x \d pixels; with fill: reflect"),
    ],
)
def test_invalid_arguments_and_shapes_are_refused(arguments, images, words):
    with pytest.raises(ValueError, match=f"CropAndFlip: .*{words}"):
        CropAndFlip(**arguments)(images)


def test_augmentation_runs_before_normalisation():
    examples = TensorSamples(IMAGES, LABELS, 64, 2, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), CropAndFlip(2))
    torch.manual_seed(3)
    inputs, targets = examples.training_batch(np.arange(64), CPU)
    torch.manual_seed(3)
    raw = CropAndFlip(2)(IMAGES)
    plain = TensorSamples(raw, LABELS, 64, 2, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert torch.equal(inputs, plain.batch(np.arange(64), CPU)[0]) and torch.equal(targets, LABELS)


def test_without_augmentation_nothing_is_drawn():
    examples = TensorSamples(IMAGES, LABELS, 64, 2)
    state = torch.get_rng_state()
    inputs, _ = examples.training_batch(np.arange(9), CPU)
    assert torch.equal(inputs, examples.batch(np.arange(9), CPU)[0])
    assert torch.equal(torch.get_rng_state(), state)


# Augmentation in a federation.

SAME = IMAGES[:1].expand(64, -1, -1, -1)  # one image repeated, so that the order of batches does not matter


class Forbidden(Augmentation):
    def __call__(self, images):
        raise ZeroDivisionError("augmented")


def parts(augmentation=None, images=SAME, num_clients=4):
    network = partial(CNN, 3, 6, 2, [2], 3, 1, [])
    module = FederatedModule(network, partial(torch.optim.SGD, lr=0.5))
    dataset = Tensors((images, torch.zeros(64, dtype=torch.int64)), num_classes=2, augmentation=augmentation)
    return module, FederatedDataModule(dataset, IID(), num_clients, batch_size=4, seed=0)


def worker(augmentation, seed=0):
    module, data = parts(augmentation)
    data.setup()
    return Worker(Fabric(accelerator="cpu", devices=1), module, data, alone(steps=2), seed)


START = parts()[0].initial_model(0)


def task(client=0, number=0):
    return TrainingTask(client, number, ClientState(START), Downlink({}))


def test_draws_depend_only_on_seed_round_and_client():
    one = worker(CropAndFlip(2))
    first = one.train(task()).output.model
    torch.manual_seed(99)
    one.train(task(1, 5))
    before = torch.get_rng_state()
    assert torch.equal(one.train(task()).output.model, first)
    assert torch.equal(torch.get_rng_state(), before)
    others = [one.train(task(client=1)), one.train(task(number=1)), worker(CropAndFlip(2), seed=1).train(task())]
    assert torch.pdist(torch.stack([first, *(other.output.model for other in others)])).min() > 0
    plain = worker(None)
    assert torch.equal(*(plain.train(each).output.model for each in (task(), task(client=1, number=1))))


def test_evaluation_does_not_augment():
    augmented, plain = worker(Forbidden()), worker(None)
    sets = ScoringTask(START, tuple(plain.data.population.val), tuple(range(4)))
    assert augmented.score(sets) == plain.score(sets)
    with pytest.raises(ZeroDivisionError):
        augmented.train(task())


def test_only_the_training_loader_augments():
    _, data = parts(Forbidden())
    data.setup()
    assert [len(list(loader)) > 0 for loader in (data.val_dataloader(), data.test_dataloader())] == [True, True]
    with pytest.raises(ZeroDivisionError):
        next(iter(data.train_dataloader()))


def fitted(root, augmentation, devices=1, rounds=2, ckpt_path=None):
    module, data = parts(augmentation, IMAGES[:, :, :, :6])
    options = {"logger": True, "enable_progress_bar": False, "devices": devices, "accelerator": "cpu"}
    federation = Federation(rounds, 3, evaluate_every=1, default_root_dir=root, **options)
    return federation.fit(module, data, fedavg(steps=3), ckpt_path=ckpt_path)


@pytest.mark.usefixtures("deadline")
def test_result_does_not_depend_on_the_number_of_ranks(tmp_path):
    one, two = (fitted(tmp_path / str(ranks), CropAndFlip(2), ranks).path for ranks in (1, 2))
    assert_same_run(one, two)
    with pytest.raises(AssertionError):
        assert_same_run(one, fitted(tmp_path / "plain", None).path)


def test_run_resumes_only_with_the_same_augmentation(tmp_path):
    fitted(tmp_path, CropAndFlip(2))
    with pytest.raises(CheckpointError, match=re.escape("augmentation.padding: the checkpoint has 2, this run 1")):
        fitted(tmp_path, CropAndFlip(1), rounds=3, ckpt_path="last")
    assert fitted(tmp_path, CropAndFlip(2), rounds=3, ckpt_path="last").state.round == 3


def test_trial_run_augments_too():
    assert RandomLike(parts(CropAndFlip(2))[1].dataset, 8).load().augmentation == CropAndFlip(2)


def test_inputs_that_are_no_images_are_refused():
    with pytest.raises(ValueError, match=r"CropAndFlip: got inputs of shape \(7,\)"):
        CropAndFlip(1)(torch.zeros(4, 7))
