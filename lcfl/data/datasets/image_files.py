"""Reads images in one folder per class. Shapes: S images of C x H x W."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lcfl.core.memory import check_memory
from lcfl.data.datasets.client_files import PartFiles, refuse
from lcfl.data.datasets.images import NORMALISATIONS
from lcfl.data.datasets.readers import Contents, Reader, refuse_unreadable
from lcfl.data.names import composed

__all__ = ["ImageFiles"]

ORIENTATION, KIND_OF_PAGE = 0x0112, 254  # tags of EXIF and of TIFF
REDUCED_OR_MASK = 0b101  # bits of a page that shows the image once more, smaller or as a mask
# Of Pillow: 8 bits per channel or fewer. Pillow cuts numbers off when it converts others.
EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}


@dataclass(frozen=True)
class ImageFiles(Reader):
    """Images in one folder per class, as torchvision's ``ImageFolder`` has them: ``<class>/<any name>.png``.

    The classes are the sorted names of the class folders of all clients. Images are turned upright, as their EXIF data
    say. They stay uint8 in memory and reach the network as float32 in 0..1.

    Args:
        size: height and width to which every image is resized, whatever its shape; None if all images have the same
            size.
        mode: ``RGB`` for three channels, ``L`` for grey images of one channel.
        normalisation: by which inputs in 0..1 are normalised: ``half`` uses mean 0.5 and standard deviation 0.5,
            ``imagenet`` those of ImageNet, for networks that were trained on it.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        *(".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm"),
        *(".tif", ".tiff", ".webp"),
    )

    size: tuple[int, int] | None = None
    mode: Literal["RGB", "L"] = "RGB"
    normalisation: Literal["none", "half", "imagenet"] = "none"

    def __post_init__(self) -> None:
        if self.size is not None and not (len(self.size) == 2 and 1 <= min(self.size) <= max(self.size) < 2**15):
            raise ValueError(f"ImageFiles: size must be [height, width], each 1 or more; got {list(self.size)}")
        if self.normalisation == "imagenet" and self.mode == "L":
            raise ValueError("ImageFiles: normalisation imagenet is for mode RGB; use half or none for grey images")

    def open(self, parts: Sequence[PartFiles]) -> Contents:
        """Takes the classes from the names of the folders. It reads no image except the first, if it needs its size."""
        folders = [_class_folder(part, name) for part in parts for name in part.files]
        names = {folder: composed(folder) for folder in set(folders)}
        classes = tuple(sorted(set(names.values())))
        place = {name: number for number, name in enumerate(classes)}
        number = {folder: place[name] for folder, name in names.items()}
        targets = np.fromiter(map(number.__getitem__, folders), dtype=np.int64, count=len(folders))
        shape = self._shape(parts[0])
        mean, std = NORMALISATIONS.get(self.normalisation, (None, None))
        return Contents(
            [len(part.files) for part in parts],
            shape,
            torch.float32,
            targets,
            classes,
            partial(self._inputs, parts, shape, parts[0].paths[0]),
            None if mean is None else tuple(mean) * (shape[0] // len(mean)),
            None if std is None else tuple(std) * (shape[0] // len(std)),
            in_files=[1] * len(folders),
        )

    def new_inputs(self, part: PartFiles, first: PartFiles) -> tuple[Tensor, list[int]]:
        """Reads all images, which need not lie in the folders of their classes."""
        return self._inputs([part], self._shape(first), first.paths[0]), [1] * len(part.files)

    def _shape(self, first: PartFiles) -> tuple[int, int, int]:
        """Returns the shape of an image. It reads the first one only if it needs its size."""
        height, width = self.size or _read(first, first.paths[0], self.mode, None, None).shape[:2]
        return 3 if self.mode == "RGB" else 1, height, width

    def _inputs(self, parts: Sequence[PartFiles], shape: tuple[int, int, int], first: str) -> Tensor:
        """Reads all images as uint8 [S, C, H, W]. They must be as large as the first one, unless they are resized."""
        size, number = (shape[2], shape[1]), sum(len(part.files) for part in parts)
        check_memory(
            f"Folders: {number} images of {shape[1]} x {shape[2]} pixels need",
            number * int(np.prod(shape)),
            "Set a smaller size in data.dataset.init_args.reader.init_args.size, or use Datasets, which can read each "
            "image when it is needed.",
        )
        images = torch.empty(number, *shape, dtype=torch.uint8)
        rows = images.permute(0, 2, 3, 1).numpy() if self.mode == "RGB" else images[:, 0].numpy()
        at = 0
        for part in parts:
            for path in part.paths:
                rows[at] = _read(part, path, self.mode, size, None if self.size else first)
                at += 1
        return images


def _class_folder(part: PartFiles, name: str) -> str:
    folder, slash, _ = name.partition("/")
    if not slash:
        refuse(part.client, f"{part.folder}/{name}", "an image must lie in the folder of its class, <class>/<image>")
    return folder


def _pages(image: Any) -> int:
    """Returns the number of images in a file of Pillow: of a TIFF file, its pages without thumbnails and masks."""
    number = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if number > 1:
        kinds = []
        for page in range(number):
            image.seek(page)
            kinds.append(image.tag_v2.get(KIND_OF_PAGE, 0))
        image.seek(0)
        number = sum(not kind & REDUCED_OR_MASK for kind in kinds)
    return number


def _read(part: PartFiles, path: str, mode: str, size: tuple[int, int] | None, first: str | None) -> NDArray[Any]:
    """Reads an image as uint8 [H, W, 3] or [H, W].

    Args:
        part: the part that the image belongs to.
        path: the file.
        mode: ``RGB`` or ``L``.
        size: width and height that the image must have; None for any size.
        first: the image with this size; None to resize the image instead.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            depth, pages = image.mode, _pages(image)
            image.load()
            # Cameras store how they were held.
            upright = ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image
            has = upright.size
            pixels = (upright if depth == mode else upright.convert(mode)) if depth in EIGHT_BITS else upright
    except Exception as error:  # Pillow raises whatever a damaged file makes it stumble over
        refuse_unreadable(part, path, error)
    if depth not in EIGHT_BITS:
        refuse(part.client, path, f"it has more than 8 bits per channel (mode {depth}); convert it", ", or use Arrays")
    if pages > 1:
        refuse(part.client, path, f"it has {pages} pages, and an image has one; save each page as a file")
    if size is not None and has != size:
        if first is not None:
            refuse(
                part.client,
                path,
                f"it has {has[1]} x {has[0]} pixels, but the first image, {first}, has {size[1]} x {size[0]}; "
                "resize it",
                ", or all images with data.dataset.init_args.reader.init_args.size=[height, width]",
            )
        pixels = pixels.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(pixels)
