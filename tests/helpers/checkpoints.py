"""States with a value in every field, and ways to spoil their checkpoints."""

import hashlib
import json
import os

import torch

from lcfl.core.clients import ClientState
from lcfl.core.state import FederationState
from lcfl.runs import checkpoint

SIZE = 6
IDENTITY = {"seed": 1, "method": {"mu": 0.1, "parts": ["a", None, True]}}


def model(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def full_state(number=3, clients=(0, 1, 4), keeps_model=True):
    """Returns the state of five clients after `number` rounds in which only `clients` took part."""
    state = FederationState.create(model(0), 5, keeps_model)
    state.round = number
    state.global_model = model(1)
    state.centres = torch.stack([model(2), model(3)])
    state.assignment = torch.tensor([0, 1, 1, 0, 1])
    state.participated[list(clients)] = True
    state.projection, state.codes = torch.stack([model(4), model(5)], dim=1), model(6).repeat(2)[:10].view(5, 2)
    state.total_bytes = 2**40 + 1
    state.aggregation = {"velocity": model(7), "steps": 3}
    state.should_stop = True
    state.callbacks = {"Stop": {"best": 0.1, "wait": 3, "names": ["x"], "none": None}, "Rank#2": {"offset": model(9)}}
    for client in clients:
        state.clients[client] = ClientState(model(100 + client) if keeps_model else None, consumed=client * 7)
    return state


def shards(path):
    return sorted(path.glob("clients-*.pt"))


def flip_a_bit(file, position=None):
    """Flips a bit in the byte at `position`, by default in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)


def rewrite(path, **changes):
    """Changes the manifest and updates its digest, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["digest"]
    manifest["digest"] = checkpoint._digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def replace_part(path, name, content):
    """Replaces the content of a part, and its hash and size in the manifest, as an attacker would."""
    (path / name).unlink()  # checkpoints share the file
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    digests = manifest["sha256"] | {name: hashlib.sha256(content).hexdigest()}
    rewrite(path, sha256=digests, bytes=manifest["bytes"] | {name: len(content)})


class Malicious:
    """An object whose pickle makes a folder at `path` when it is read without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
