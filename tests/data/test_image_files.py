"""Tests the reader of images: classes, sizes, channels, and what is refused."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

from lcfl.core import memory
from lcfl.data.datasets import Folders, ImageFiles
from tests.helpers.clients_on_disk import write_image, write_pictures

CPU = torch.device("cpu")


def refused(root, reader=None):
    with pytest.raises(ValueError) as error:
        Folders(str(root), reader or ImageFiles()).load()
    return str(error.value).replace(str(root), "ROOT")


def test_images_are_those_of_torchvision(tmp_path):
    write_pictures(tmp_path / "clients", 12)
    data = Folders(str(tmp_path / "clients"), ImageFiles())
    samples, owners = data.load(), data.owners()
    assert (data.shape, data.num_classes, data.classes, data.target_shape) == ((3, 5, 7), 3, ("x", "y", "z"), ())
    assert samples.inputs.dtype == torch.uint8
    for number, name in enumerate(owners.names):
        theirs = list(ImageFolder(str(tmp_path / "clients" / name), PILToTensor()))
        own = np.flatnonzero(owners.number == number)
        assert torch.equal(samples.inputs[own], torch.stack([image for image, _ in theirs]))
        assert samples.labels[own].tolist() == [label for _, label in theirs]
    inputs, _ = samples.batch(np.arange(2), CPU)
    torch.testing.assert_close(inputs, samples.inputs[:2] / 255)


def test_classes_are_those_of_all_clients(tmp_path):
    write_image(tmp_path / "a/train/dog/1.png")
    write_image(tmp_path / "a/test/cat/1.png")
    write_image(tmp_path / "b/cat/1.png")
    write_image(tmp_path / "b/dog/1.JPG")
    (tmp_path / "b/empty").mkdir()
    data = Folders(str(tmp_path), ImageFiles())
    assert data.classes == ("cat", "dog") and data.load().labels.tolist() == [1, 0, 1, 0]
    assert data.owners().number.tolist() == [0, 1, 1, 0] and data.owners().part.tolist() == [0, 0, 0, 2]


def test_size_and_mode(tmp_path):
    write_image(tmp_path / "a/x/1.png", 200, (8, 6))
    write_image(tmp_path / "b/x/1.png", 100, (3, 9))
    data = Folders(str(tmp_path), ImageFiles(size=(2, 5), mode="L"))
    inputs = data.load().inputs
    assert data.shape == (1, 2, 5) == tuple(inputs.shape[1:])
    assert inputs[0].unique().tolist() == [200] and inputs[1].unique().tolist() == [100]


def test_without_a_size_only_names_and_the_first_image_are_read_before_loading(tmp_path):
    write_image(tmp_path / "a/x/1.png")
    (tmp_path / "a/x/2.png").write_bytes(b"no image")
    data = Folders(str(tmp_path), ImageFiles())
    assert len(data.owners().part) == 2
    assert Folders(str(tmp_path), ImageFiles(size=(4, 4))).shape == (3, 4, 4)
    with pytest.raises(ValueError, match=r"client 'a': .*a/x/2.png: it cannot be read \(UnidentifiedImageError"):
        data.load()


@pytest.mark.parametrize(("normalisation", "mean", "std"), [("half", 0.5, 0.5), ("imagenet", 0.485, 0.229)])
def test_normalisation(tmp_path, normalisation, mean, std):
    write_image(tmp_path / "a/x/1.png", 51)
    samples = Folders(str(tmp_path), ImageFiles(normalisation=normalisation)).load()
    inputs, _ = samples.batch(np.array([0]), CPU)
    assert inputs[0, 0] == pytest.approx((51 / 255 - mean) / std, abs=1e-6)
    grey = ImageFiles(mode="L", normalisation="half")
    assert Folders(str(tmp_path), grey).load().batch(np.array([0]), CPU)[0].shape == (1, 1, 4, 4)


def test_images_with_a_palette_or_transparency_are_read(tmp_path):
    for mode in ("P", "RGBA", "LA", "1", "CMYK"):
        write_image(tmp_path / f"a/x/{mode}.{'jpg' if mode == 'CMYK' else 'png'}", None, mode=mode)
    assert Folders(str(tmp_path), ImageFiles()).load().inputs.shape == (5, 3, 4, 4)


def test_another_size_is_refused(tmp_path):
    write_image(tmp_path / "a/x/1.png")
    write_image(tmp_path / "ward_b/x/1.png", size=(5, 4))
    assert refused(tmp_path) == (
        "Folders: client 'ward_b': ROOT/ward_b/x/1.png: it has 5 x 4 pixels, but the first image, ROOT/a/x/1.png, has "
        "4 x 4; resize it, or all images with data.dataset.init_args.reader.init_args.size=[height, width]"
    )


def test_an_image_outside_of_a_class_is_refused(tmp_path):
    write_image(tmp_path / "a/x/1.png")
    write_image(tmp_path / "ward_b/1.png")
    assert refused(tmp_path) == (
        "Folders: client 'ward_b': ROOT/ward_b/1.png: an image must lie in the folder of its class, <class>/<image>"
    )


def test_more_than_8_bits_are_refused(tmp_path):
    (tmp_path / "a/x").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 4000, dtype=np.uint16)).save(tmp_path / "a/x/1.png")
    assert refused(tmp_path) == (
        "Folders: client 'a': ROOT/a/x/1.png: it has more than 8 bits per channel (mode I;16); convert it, or use "
        "Arrays"
    )


def test_images_are_turned_upright(tmp_path):
    """Cameras store a picture as the sensor saw it, and how the camera was held."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    write = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    (tmp_path / "a/x").mkdir(parents=True)
    write.save(tmp_path / "a/x/1.png", exif=exif)
    write.save(tmp_path / "a/x/2.tif", exif=exif)
    write.rotate(-90, expand=True).save(tmp_path / "a/x/3.png")
    turned, tiff, upright = Folders(str(tmp_path), ImageFiles()).load().inputs
    assert upright.shape == (3, 6, 4) and torch.equal(turned, upright) and torch.equal(tiff, upright)


def test_several_pages_are_refused(tmp_path):
    (tmp_path / "a/x").mkdir(parents=True)
    page = Image.new("L", (4, 4))
    page.save(tmp_path / "a/x/1.tif", save_all=True, append_images=[page, page])
    assert "a/x/1.tif: it has 3 pages, and an image has one" in refused(tmp_path)
    small = Image.new("L", (2, 2))
    small.encoderinfo = {"tiffinfo": {254: 1}}  # a thumbnail
    page.save(tmp_path / "a/x/1.tif", save_all=True, append_images=[small])
    assert Image.open(tmp_path / "a/x/1.tif").n_frames == 2
    assert Folders(str(tmp_path), ImageFiles()).load().inputs.shape == (1, 3, 4, 4)


def test_a_cut_image_is_refused(tmp_path):
    write_image(tmp_path / "a/x/1.png", size=(40, 40))
    whole = (tmp_path / "a/x/1.png").read_bytes()
    write_image(tmp_path / "ward_b/x/1.png", size=(40, 40))
    (tmp_path / "ward_b/x/1.png").write_bytes(whole[: len(whole) // 2])
    assert refused(tmp_path).startswith("Folders: client 'ward_b': ROOT/ward_b/x/1.png: it cannot be read (")


def test_a_file_that_vanishes_is_refused(tmp_path):
    write_image(tmp_path / "a/x/1.png")
    write_image(tmp_path / "b/x/1.png")
    data = Folders(str(tmp_path), ImageFiles())
    os.remove(tmp_path / "b/x/1.png")
    with pytest.raises(ValueError, match=r"client 'b': .*b/x/1.png: it cannot be read .FileNotFoundError"):
        data.load()


def test_images_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    write_image(tmp_path / "a/x/1.png")
    write_image(tmp_path / "a/x/2.png")
    monkeypatch.setattr(memory, "_memory", lambda: 2 * 3 * 16 - 1)
    assert refused(tmp_path).startswith("Folders: 2 images of 4 x 4 pixels need at least 0 GiB of memory, but this")
    monkeypatch.setattr(memory, "_memory", lambda: 2 * 3 * 16)
    assert len(Folders(str(tmp_path), ImageFiles()).load()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 4)}, r"size must be \[height, width\], each 1 or more; got \[0, 4\]"),
        ({"mode": "CMYK"}, "got mode='CMYK'; allowed are RGB and L."),
        ({"mode": "L", "normalisation": "imagenet"}, "normalisation imagenet is for mode RGB"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=f"^ImageFiles: {message}"):
        ImageFiles(**options)
