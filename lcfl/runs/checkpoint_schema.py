"""What the parts of a checkpoint must contain: keys, types, shapes and ranges, checked before anything is used.

Legend: N clients, K clusters, S = P + Q length of a model's flat vector, B length of the buffers that clients keep,
D length of a code, G sums, F length of what is frozen.
"""

import re
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import torch

from lcfl.core.clients import VECTORS
from lcfl.core.schema import Array, Number, check_form

__all__ = ["FIXED", "Expected", "check_codes", "check_fixed", "check_manifest", "check_shard", "check_state"]

# Tensors of the state that seldom change, each a part of its own.
FIXED = {"frozen": Array(("F",)), "projection": Array(("P", "D"))}
PART = re.compile(rf"state\.pt|({'|'.join(FIXED)}|clients-\d{{6,}})-[0-9a-f]{{16}}\.pt")
MANIFEST = {
    "schema": int,
    "lcfl": str,
    "round": int,
    "created": Number(float, 0, 1e12),
    "identity": dict,
    "sha256": {str: str},
    "bytes": {str: Number(int, 0)},
}
SUMS = {
    "total": Array(("sums", "S"), torch.float64),
    "group": Array(("N",), torch.int64, -1, "sums"),
    # One number for all sums in earlier versions.
    **dict.fromkeys(("error", "largest"), (Array(("sums",), torch.float64), Number(float, 0, inf))),
}
STATE = {
    "initial": Array(("S",)),
    "global_model": Array(("S",)),
    "centres": Array(("K", "S")),
    "assignment": Array(("N",), torch.int64, -1, "K"),
    "participated": Array(("N",), torch.bool),
    "active": Array(("N",), torch.bool),
    "projection": (FIXED["projection"], None),  # a tensor only in earlier versions
    "codes": (Array(("N", "D")), None),
    "round": int,
    "total_bytes": Number(int, 0),
    "should_stop": bool,
    "aggregation": {str: object},
    "callbacks": {str: dict},
    "keeps_model": bool,
    "buffers": (Array(("B",)), None),
    "sums": (SUMS, None),
    "current": {str: Array((None,), torch.int64, 0, "N")},
}


class Expected(NamedTuple):
    """What a run expects of its checkpoint.

    Attributes:
        sizes: N, S, P, if clients keep buffers B, and if something is frozen F.
        keeps_model: whether clients keep a model.
        num_warmup_rounds: the number of rounds before round 0.
    """

    sizes: dict[str, int]
    keeps_model: bool
    num_warmup_rounds: int


def check_manifest(manifest: dict[str, Any]) -> None:
    """Checks the content of ``manifest.json`` without its digest. An older manifest may lack ``bytes``.

    Raises:
        ValueError: for the first entry that is not as it must be.
    """
    check_form("", {"bytes": {}} | manifest, MANIFEST, {})
    names = list(manifest["sha256"])
    kinds = [name.partition("-")[0] for name in names]
    in_order = ["state.pt", *(name for name in FIXED if name in kinds), *["clients"] * kinds.count("clients")]
    if kinds != in_order or not all(map(PART.fullmatch, names)):
        fixed = ", ".join(f"one {name}-<hash>.pt" for name in FIXED)
        raise ValueError(f"sha256: the parts must be state.pt, at most {fixed}, then clients-<number>-<hash>.pt")


def check_state(state: Any, expected: Expected | None) -> dict[str, int]:
    """Checks the content of ``state.pt``; returns the sizes by letter.

    Raises:
        ValueError: for the first entry that is not as it must be.
    """
    sizes = {} if expected is None else dict(expected.sizes)
    check_form("", state, STATE, sizes)
    if sizes["K"] == 0:
        raise ValueError("centres: there must be at least one")
    if expected is not None:
        for name, got, wanted in (
            ("keeps_model", state["keeps_model"], expected.keeps_model),
            ("buffers", state["buffers"] is not None, "B" in expected.sizes),
        ):
            if got is not wanted:
                raise ValueError(f"{name}: got {got}, but this method and network need {wanted}")
        if state["round"] < -expected.num_warmup_rounds:
            raise ValueError(f"round: got {state['round']}; it must be at least {-expected.num_warmup_rounds}")
    return sizes


def check_fixed(part: Any, name: str, sizes: dict[str, int]) -> None:
    """Checks the content of the file with a tensor of `FIXED`. Any numbers are allowed in it.

    Raises:
        ValueError: for the first entry that is not as it must be.
    """
    check_form("", part, {name: FIXED[name]}, sizes)


def check_codes(state: Mapping[str, Any]) -> None:
    """Checks that a state with all its parts has low-rank models only together with the projection.

    Raises:
        ValueError: if not.
    """
    if (state["projection"] is None) is not (state["codes"] is None):
        raise ValueError("projection and codes: there must be both or neither")


def check_shard(shard: Any, sizes: dict[str, int], keeps_model: bool) -> None:
    """Checks the content of a shard of clients' states.

    Raises:
        ValueError: for the first entry that is not as it must be.
    """
    sizes, pair = dict(sizes), {name: tuple for name in VECTORS if isinstance(shard, dict) and name in shard}
    clients = {"clients": Array(("n",), torch.int64, 0, "N"), "consumed": Array(("n",), torch.int64, 0)}
    check_form("", shard, clients | pair, sizes)
    if "buffers" in pair and "B" not in sizes:
        raise ValueError("buffers: the clients of this run keep none")
    if torch.any(shard["clients"].diff() <= 0):
        raise ValueError("clients: the numbers must ascend")
    for name in pair:
        if len(shard[name]) != 2:
            raise ValueError(f"{name}: got {len(shard[name])} values; it must be rows and vectors")
        rows, vectors = shard[name]
        length = {"buffers": "B", "memory": None, "previous": "P"}.get(name, "S")
        check_form(f"{name}[0]", rows, Array((f"rows of {name}",), torch.int64, 0, "n"), sizes)
        check_form(f"{name}[1]", vectors, Array((f"rows of {name}", length)), sizes)
        if torch.any(rows.diff() <= 0):
            raise ValueError(f"{name}[0]: the rows must ascend")
    if keeps_model and ("model" not in shard or len(shard["model"][0]) < sizes["n"]):
        raise ValueError("model: some clients have none")
