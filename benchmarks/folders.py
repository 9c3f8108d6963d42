"""Compares reading the images of many clients by ``Folders`` with reading one folder of them by ``ImageFolder``.

    python benchmarks/folders.py
    python benchmarks/folders.py --num_clients 100 --json folders.json

The files of all clients are links to those of one folder, so that both read the same bytes. Both end with all images
in memory as one uint8 tensor, and both list the folders anew each time. They take turns.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from contest import machine

CLASSES = 10


def make(root: Path, num_clients: int, per_client: int, size: int) -> None:
    """Writes random PNG files to ``root/one/<class>``, and links them to ``root/clients/<client>/<class>``."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for client in range(num_clients):
        for number in range(per_client):
            name = f"{client:05}_{number:05}.png"
            label = str((client + number) % CLASSES)
            one, own = root / "one" / label, root / "clients" / f"client_{client:05}" / label
            one.mkdir(parents=True, exist_ok=True)
            own.mkdir(parents=True, exist_ok=True)
            # Blocks of 4 x 4 pixels: like photographs, such files are neither empty nor noise.
            pixels = generator.integers(0, 256, (size // 4, size // 4), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
            Image.fromarray(pixels).save(one / name)
            os.link(one / name, own / name)


def by_folders(root: Path) -> torch.Tensor:
    """Returns all images of all clients [S, 3, H, W]."""
    from lcfl.data.datasets import Folders, ImageFiles

    dataset = Folders(str(root / "clients"), ImageFiles())
    return dataset.load().inputs  # type: ignore[attr-defined]


def by_torchvision(root: Path) -> torch.Tensor:
    """Returns all images of one folder [S, 3, H, W]."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    dataset = ImageFolder(str(root / "one"), PILToTensor())
    return torch.stack([image for image, _ in dataset])


def main(args: Sequence[str] | None = None) -> dict[str, object]:
    """Prints the seconds of both, and their ratio."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--num_clients", type=int, default=1000)
    options.add_argument("--per_client", type=int, default=20, help="images of each client")
    options.add_argument("--size", type=int, default=28, help="pixels of a side")
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--json", type=Path, help="file for the results")
    chosen = options.parse_args(args)
    torch.set_num_threads(1)
    readers: dict[str, Callable[[Path], torch.Tensor]] = {"Folders": by_folders, "ImageFolder": by_torchvision}
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root, chosen.num_clients, chosen.per_client, chosen.size)
        sums = {name: int(read(root).sum()) for name, read in readers.items()}  # also fills the system's cache
        if len(set(sums.values())) > 1:
            raise RuntimeError(f"the readers disagree: {sums}")
        for _ in range(chosen.turns):
            for name, read in readers.items():
                begin = time.perf_counter()
                read(root)
                seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = medians["Folders"] / medians["ImageFolder"]
    print(f"{chosen.num_clients} clients with {chosen.per_client} images of {chosen.size} x {chosen.size} each")
    for name, each in seconds.items():
        print(f"{name:12} median {medians[name]:.3f} s ({min(each):.3f} to {max(each):.3f})")
    print(f"ratio {ratio:.2f}")
    result = {"seconds": seconds, "medians": medians, "ratio": ratio, "machine": machine()}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
