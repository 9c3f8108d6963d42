"""The messages between the server and the nodes of a fleet, and the form in which they travel.

A message is a text in JSON and arrays of numbers. Reading one runs no code: a message that is not exactly of that form
is refused, in words.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lcfl.core.schema import Number, check_form
from lcfl.fleet.parcel import WIRE_VERSION, MessageError, Parcel

__all__ = ["WIRE_VERSION", "Message", "decode", "encode"]

LONGEST_TEXT = 2**20  # characters; the numbers of a message are in its arrays
MOST_DIMENSIONS = 8
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int32": torch.int32, "int64": torch.int64}
DTYPES |= {"uint8": torch.uint8, "bool": torch.bool}
HEADER = {"wire": int, "kind": str, "fields": dict, "arrays": list}
ARRAY = {"name": str, "dtype": str, "shape": [Number(int, 0, 2**40)]}


@dataclass(frozen=True)
class Message:
    """What the server asks of a node, or what a node answers.

    Attributes:
        kind: what it is about.
        fields: plain values by name: numbers, text, None, and lists and mappings of these.
        arrays: tensors by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


def encode(message: Message) -> Parcel:
    """Returns a message in the form in which it travels.

    Raises:
        MessageError: for a tensor of a type that no message may hold.
    """
    described, contents = [], []
    for name, tensor in message.arrays.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise MessageError(f"{message.kind}: {name} is a tensor of {dtype}; allowed are {', '.join(DTYPES)}.")
        described.append({"name": name, "dtype": dtype, "shape": list(tensor.shape)})
        array = tensor.detach().cpu().contiguous().numpy()
        contents.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    header = {"wire": WIRE_VERSION, "kind": message.kind, "fields": dict(message.fields), "arrays": described}
    return Parcel(json.dumps(header), contents)


def decode(parcel: Parcel, most_bytes: int) -> Message:
    """Returns the message in a parcel.

    Args:
        parcel: what arrived.
        most_bytes: the largest size that is accepted.

    Raises:
        MessageError: if it is too large, of another version, or not of the form above.
    """
    if parcel.num_bytes > most_bytes or len(parcel.text) > LONGEST_TEXT:
        raise MessageError(
            f"a message of {parcel.num_bytes / 2**20:.1f} MiB, {len(parcel.text)} characters of them text; at most "
            f"{most_bytes / 2**20:.1f} MiB and {LONGEST_TEXT} characters are accepted."
        )
    try:
        header = json.loads(parcel.text)
        version = header.get("wire") if isinstance(header, dict) else None
        if version != WIRE_VERSION:
            raise MessageError(f"a message in version {version!r:.20} of the format; this lcfl reads {WIRE_VERSION}.")
        check_form("", header, HEADER, {})
        check_form("arrays", header["arrays"], [ARRAY], {})
        if len(header["arrays"]) != len(parcel.arrays):
            raise ValueError(f"arrays: got {len(parcel.arrays)}; it must be {len(header['arrays'])}")
        arrays = {
            each["name"]: _tensor(content, **each)
            for each, content in zip(header["arrays"], parcel.arrays, strict=True)
        }
    except MessageError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise MessageError(f"a message that cannot be read: {error}.") from None
    return Message(header["kind"], header["fields"], arrays)


def _tensor(content: bytes, name: str, dtype: str, shape: list[int]) -> Tensor:
    """Returns the tensor with these entries.

    Raises:
        ValueError: if there are more or fewer entries than the shape says.
    """
    if dtype not in DTYPES or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{name}: got dtype {dtype!r:.20} and {len(shape)} dimensions")
    size = int(np.prod(shape, dtype=object)) * DTYPES[dtype].itemsize  # of Python's integers, which do not overflow
    if size != len(content):
        raise ValueError(f"{name}: got {len(content)} bytes; {dtype} of shape {shape} has {size}")
    entries = np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))
    if dtype == "bool" and np.any(entries.view(np.uint8) > 1):
        raise ValueError(f"{name}: got bytes other than 0 and 1 as bool")
    return torch.from_numpy(entries.astype(dtype, copy=True)).reshape(shape)
