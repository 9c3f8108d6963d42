"""The local updates and exchanges that a node runs besides those of its method: warm-up, extra rounds, onboarding.

A message names them by plain values, and a node runs only what its own method can ask for. Otherwise the server could
ask for an exchange that uploads what the method keeps private, or that skips its noise.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lcfl.fleet.parcel import MessageError
from lcfl.methods.exchange import Exchange, FullModel, ModelKind
from lcfl.methods.local.training import LocalTraining, LocalUpdate
from lcfl.methods.method import Method

__all__ = ["Parts", "described_part", "evaluation_parts", "training_parts"]

Parts = tuple[LocalUpdate | None, Exchange | None]
JSON_SCALARS = (type(None), bool, int, float, str)


def described_part(part: object | None) -> dict[str, Any] | None:
    """Returns the class and the arguments of a part as plain values; None for None.

    Raises:
        MessageError: if the part is no dataclass of plain values.
    """
    if part is None:
        return None
    kind = type(part)
    if not is_dataclass(part):
        raise MessageError(f"{kind.__name__} cannot be named in a message: make it a dataclass.")
    arguments = {each.name: _plain(getattr(part, each.name)) for each in fields(part) if each.init}
    for name, value in arguments.items():
        if not isinstance(value, (*JSON_SCALARS, list)):
            raise MessageError(
                f"{kind.__name__} cannot be named in a message: {name} is a {type(value).__name__}; allowed are "
                "numbers, text, None and lists of these."
            )
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "arguments": arguments}


def training_parts(method: Method, num_clients: int, named: Mapping[str, Any]) -> Parts:
    """Returns the parts of a training request.

    Args:
        method: the node's method.
        num_clients: the number of clients without newcomers, on which warm-up rounds may depend.
        named: the descriptions of ``local_update`` and ``exchange``.

    Raises:
        MessageError: for parts that the method never asks for.
    """
    known: list[Parts] = [(None, None)]
    for clustering in method.clustering:
        warmup = clustering.warmup_rounds(num_clients)
        known += [(extra.local_update, extra.exchange) for extra in warmup]
        known += clustering.extra_parts
        if method.exchange.uploads_whole and not method.exchange.noises:  # a newcomer uploads what founders did
            known += [(extra.local_update, FullModel()) for extra in warmup]
    return _among(known, named)


def evaluation_parts(method: Method, kind: ModelKind, named: Mapping[str, Any]) -> Parts:
    """Returns the parts of a request to measure a kind of model; see `training_parts`.

    A newcomer trains plainly for some epochs, see `lcfl.federation.onboarding`. Only metrics leave the node. A kind
    names a file of the node, so kinds that the method does not have are refused.
    """
    known: list[Parts] = []
    if kind in method.exchange.models:
        known += [(None, None), (method.exchange.evaluation_update(kind, method.local_update), None)]
    if kind == "global":  # what newcomers measure
        known.append((None, FullModel()))
        update = named["local_update"]
        epochs = update.get("arguments", {}).get("epochs") if isinstance(update, Mapping) else None
        if type(epochs) is int and epochs > 0:
            known.append((LocalTraining(epochs=epochs), FullModel()))
    return _among(known, named)


def _among(known: list[Parts], named: Mapping[str, Any]) -> Parts:
    for parts in known:
        if _text(*map(described_part, parts)) == _text(named["local_update"], named["exchange"]):
            return parts
    raise MessageError("the method of this node never asks for this local update and exchange.")


def _text(*described: Any) -> str:
    return json.dumps(described, sort_keys=True)


def _plain(value: Any) -> Any:
    """Returns a value with lists in place of tuples, if all that they hold is plain."""
    if isinstance(value, list | tuple) and all(isinstance(each, JSON_SCALARS) for each in value):
        return list(value)
    return value
