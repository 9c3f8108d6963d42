"""The population: the samples that each client trains on, validates on and is tested on.

Shapes: N clients, C classes, S samples in all.
"""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lcfl.core.part_words import beyond_repr
from lcfl.core.validation import abbreviated
from lcfl.data.faults import ClientFault, FaultyClients
from lcfl.data.partition.base import Indices
from lcfl.data.protocols import UNTRANSFORMED
from lcfl.data.samples import Samples
from lcfl.data.views import View, seen_labels

__all__ = ["Population", "label_counts"]


@dataclass(frozen=True, eq=False)
class Population:
    """The clients and their samples, as ascending int64 indices into ``Samples``.

    Args:
        train: for each client, the indices it trains on, never empty.
        val: for each client, the indices it validates on; a tiny client may have none.
        test: test protocol -> for each client, the indices it is tested on.
        groups: [N] true group of each client; None if the groups are unknown.
        label_counts: [N, C] number of training samples of each client with each label, as the client sees the labels;
            None if targets are not classes.
        overlapping: whether several clients may hold the same sample. The sample then has the same role for all of
            these clients.
        views: for each client, the views that it sees its samples through; None if clients see the samples unchanged.
        partition_groups: [N] groups of the partition alone. Views may divide these groups further, so this is needed
            only with views.
        newcomers: the clients that are kept out of the federation, in ascending order.
        proxy: the samples of the server's proxy set, possibly none. No client holds them or is tested on them.
        names: the name of each client; None if clients have only numbers.
        own_val: for each client, the validation samples that it brought along; None if no client did.
        own_test: for each client, the test samples that it brought along; None if no client did.
        faulty: the faults of each faulty client. No evaluation measures these clients.
    """

    train: list[Indices]
    val: list[Indices]
    test: dict[str, list[Indices]]
    groups: Indices | None
    label_counts: Indices | None
    overlapping: bool = False
    views: list[tuple[View, ...]] | None = None
    partition_groups: Indices | None = None
    newcomers: tuple[int, ...] = ()
    proxy: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    names: tuple[str, ...] | None = None
    own_val: list[Indices] | None = None
    own_test: list[Indices] | None = None
    faulty: FaultyClients = field(default_factory=dict)

    @property
    def num_clients(self) -> int:
        """The number of clients N."""
        return len(self.train)

    def called(self, client: int) -> str:
        """Returns a client's number, with its name if it has one: ``3`` or ``3 (ward_b)``."""
        return str(client) if self.names is None else f"{client} ({self.names[client]})"

    def listed(self, clients: Iterable[int]) -> str:
        """Returns the first of some clients, as `called` does, for a message."""
        return abbreviated(map(self.called, clients))

    def names_of(self, clients: Sequence[int] | Indices) -> list[str] | None:
        """Returns the names of some clients; None if clients have only numbers."""
        return None if self.names is None else [self.names[client] for client in clients]

    def sets(self, protocols: Iterable[str], stages: Iterable[str] = ("val", "test")) -> dict[str, list[Indices]]:
        """Returns the samples of each client by ``<stage>/<protocol>``, in the order of the stages.

        Validation data are always part of the client's own data.
        """
        sets: dict[str, list[Indices]] = {}
        for stage in stages:
            if stage == "val":
                sets["val/own_split"] = self.val
            else:
                sets |= {f"{stage}/{protocol}": self.test[protocol] for protocol in protocols}
        return sets

    def faults_of(self, client: int, number: int) -> tuple[ClientFault, ...]:
        """Returns the faults that a client has in a round."""
        return tuple(fault for fault in self.faulty.get(client, ()) if fault.happens_in(number))

    def _faults_in_words(self) -> dict[int, list[str]]:
        """Returns the faults of each faulty client as text, without the list of their clients."""
        return {client: list(map(_in_words, own)) for client, own in self.faulty.items()}

    def alone(self, client: int, number: int, num_clients: int) -> "Population":
        """Returns the population as the machine of one client sees it: all other clients have no samples.

        Args:
            client: the client, as a number in this population.
            number: its number in the new population.
            num_clients: the size of the new population.
        """

        def only(lists: list[Indices]) -> list[Indices]:
            return [lists[client] if i == number else lists[client][:0] for i in range(num_clients)]

        counts = None
        if self.label_counts is not None:
            counts = np.zeros((num_clients, self.label_counts.shape[1]), dtype=np.int64)
            counts[number] = self.label_counts[client]
        views = self.views and [self.views[client] if i == number else () for i in range(num_clients)]
        test = {name: only(lists) for name, lists in self.test.items()}
        train, val = only(self.train), only(self.val)
        return Population(train, val, test, None, counts, overlapping=self.overlapping, views=views)

    def behind(self, number: int) -> "Population":
        """Returns the population with so many clients before it, who have no samples here. No client is faulty."""
        none = [self.train[0][:0]] * number
        counts = self.label_counts
        if counts is not None:
            counts = np.concatenate([np.zeros((number, counts.shape[1]), dtype=np.int64), counts])
        views = None if self.views is None else [()] * number + self.views
        names = None if self.names is None else ("",) * number + self.names
        test = {name: none + lists for name, lists in self.test.items()}
        train, val, overlapping = none + self.train, none + self.val, self.overlapping
        return Population(train, val, test, None, counts, overlapping=overlapping, views=views, names=names)

    @property
    def samples_in_use(self) -> Indices:
        """The samples that a client trains on, validates on or is tested on, and the proxy set, in ascending order."""
        lists = [*self.train, *self.val, *chain.from_iterable(self.test.values()), self.proxy]
        # Under some protocols all clients share one list, which is looked at only once.
        distinct = {id(indices): indices for indices in lists if len(indices)}.values()
        is_used = np.zeros(1 + max(int(indices.max()) for indices in distinct), dtype=bool)
        for indices in distinct:  # one by one, because with many clients the lists together are larger than the data
            is_used[indices] = True
        return np.flatnonzero(is_used)

    @property
    def sizes(self) -> Indices:
        """The number of training samples of each client [N]."""
        return np.array([len(each) for each in self.train], dtype=np.int64)

    @property
    def label_entropy(self) -> NDArray[np.float64]:
        """The entropy in bits [N] of the labels of each client's training samples: 0 for one label, at most log2 C."""
        assert self.label_counts is not None, "targets are not classes"
        share = self.label_counts / self.sizes[:, None]
        terms = share * np.log2(share, out=np.zeros_like(share), where=share > 0)
        return np.asarray(0.0 - terms.sum(axis=1), dtype=np.float64)

    def warn_of_lonely_labels(self, classes: Sequence[str] | None) -> None:
        """Warns about labels that no client, or one of several, trains on; a slip of the pen may have made them.

        Args:
            classes: the names of the classes, if they have names.
        """
        if self.label_counts is None or self.num_clients == 1:
            return
        holds_NC = self.label_counts > 0
        unknown = np.flatnonzero(holds_NC.sum(axis=0) == 0).tolist()
        if unknown:
            which = abbreviated(label if classes is None else repr(classes[label]) for label in unknown)
            warnings.warn(
                f"data.dataset: no client trains on {len(unknown)} of {len(holds_NC.T)} classes: {which}. If a class "
                "is misspelt, correct it. Otherwise, no model can predict it.",
                stacklevel=3,
            )
        lonely = np.flatnonzero(holds_NC.sum(axis=0) == 1)
        if len(lonely):
            owners = holds_NC[:, lonely].argmax(axis=0)
            named = [str(label) if classes is None else repr(classes[label]) for label in lonely.tolist()]
            pairs = zip(named, owners.tolist(), strict=True)
            which = abbreviated(f"{name} (client {self.called(owner)})" for name, owner in pairs)
            warnings.warn(
                f"data.dataset: only one client trains on {len(lonely)} of {len(holds_NC.T)} classes: "
                f"{which}. If a class is misspelt, correct it. Otherwise, other clients cannot help to "
                "learn it.",
                stacklevel=3,
            )

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 (hex) of the population.

        Two fingerprints are equal only if all clients have the same samples in every role, and if views, newcomers and
        proxy set are the same.
        """
        digest = hashlib.sha256()
        roles = {"train": self.train, "val": self.val}
        roles |= {f"test/{name}": self.test[name] for name in sorted(self.test)}
        for role, lists in roles.items():
            digest.update(f"{role}:{len(lists)};".encode())
            for indices in lists:
                digest.update(f"{len(indices)};".encode())
                digest.update(np.ascontiguousarray(indices, dtype="<i8").data)
        if self.views is not None:
            digest.update(repr(self.views).encode())
            distinct = {id(view): view for view in chain.from_iterable(self.views)}  # clients may share one
            more = {key: beyond_repr(view) for key, view in distinct.items()}
            digest.update("".join(more[id(view)] for view in chain.from_iterable(self.views)).encode())
        if self.newcomers:
            digest.update(f"newcomers:{self.newcomers}".encode())
        if len(self.proxy):
            digest.update(b"proxy:" + np.ascontiguousarray(self.proxy, dtype="<i8").tobytes())
        if self.names is not None:
            digest.update(f"names:{self.names}".encode())
        if self.faulty:
            digest.update(f"faulty:{self._faults_in_words()}".encode())
        return digest.hexdigest()

    def majority_accuracy(
        self, protocol: str, labels: Indices, clients: Sequence[int] | None = None
    ) -> NDArray[np.float64]:
        """Returns the accuracy of always predicting the client's most frequent training label.

        This is the trivial baseline of classification, see `lcfl.distributed.trivial_baseline` for other tasks.

        Args:
            protocol: the test protocol whose test sets are used. Their labels are as the client sees them, too, unless
                the protocol is a plain one.
            labels: [S] label of every sample in the data set.
            clients: the clients to compute it for; None for all.

        Returns:
            One accuracy for each of these clients, [N] for all; nan for a client without test samples.
        """
        assert self.label_counts is not None, "targets are not classes"
        guesses = self.label_counts.argmax(axis=1)
        views = None if protocol in UNTRANSFORMED else self.views
        accuracies = []
        for client in range(self.num_clients) if clients is None else clients:
            seen = seen_labels(labels[self.test[protocol][client]], () if views is None else views[client])
            accuracies.append((seen == guesses[client]).mean() if len(seen) else np.nan)
        return np.array(accuracies)

    def summary(self) -> str:
        """Returns a small text table.

        It shows the clients' sizes and, if targets are classes, their labels, label entropies in bits and shares of the
        most frequent label.
        """
        sizes = {"train": self.sizes, "val": _lengths(self.val)}
        sizes |= {f"test/{name}": _lengths(lists) for name, lists in self.test.items()}
        rows: list[tuple[str, NDArray[Any]]] = [(f"{name} samples", values) for name, values in sizes.items()]
        if self.label_counts is not None:
            rows.append(("labels", (self.label_counts > 0).sum(axis=1)))
            rows.append(("label entropy", self.label_entropy))
            rows.append(("majority share", self.label_counts.max(axis=1) / self.sizes))
        known = "unknown" if self.groups is None else str(len(np.unique(self.groups)))
        width = max(len(name) for name, _ in rows)
        kept_out = f", {len(self.newcomers)} of them newcomers" if self.newcomers else ""
        kept_out += f", {len(self.faulty)} faulty" if self.faulty else ""
        lines = [f"{self.num_clients} clients{kept_out}, true groups: {known}"]
        lines.append(f"{'per client':<{width}}  {'min':>8}  {'mean':>8}  {'max':>8}")
        for name, values in rows:
            least, most = values.min(), values.max()
            mean = min(max(round(float(values.mean()), 2), least), most)
            numbers = (f"{number:>8.6g}" for number in (least, mean, most))
            lines.append("  ".join([f"{name:<{width}}", *numbers]))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the population as plain lists for JSON.

        ``FromFile`` reads ``indices``, which holds each client's whole share, ``groups``, ``names``, and the parts that
        clients brought along, ``own_val`` and ``own_test``. A test set that all
        clients share, as under the protocol ``global``, is written once.
        """
        groups = self.groups if self.views is None else self.partition_groups
        own = self.test.get("own_split", [np.empty(0, dtype=np.int64)] * self.num_clients)
        shares = [np.sort(np.concatenate(parts)) for parts in zip(self.train, self.val, own, strict=True)]
        if self.own_test is not None:  # they are no part of what the partition dealt out
            shares = [np.setdiff1d(share, test) for share, test in zip(shares, self.own_test, strict=True)]
        return {
            "fingerprint": self.fingerprint,
            "indices": _lists(shares),
            "groups": None if groups is None else groups.tolist(),
            "true_groups": None if self.groups is None else self.groups.tolist(),
            "overlapping": self.overlapping,
            **({} if self.names is None else {"names": list(self.names)}),
            **({} if self.own_val is None else {"own_val": _lists(self.own_val)}),
            **({} if self.own_test is None else {"own_test": _lists(self.own_test)}),
            "newcomers": list(self.newcomers),
            **({"faulty": self._faults_in_words()} if self.faulty else {}),
            "views": None if self.views is None else [list(map(repr, views)) for views in self.views],
            "label_counts": None if self.label_counts is None else self.label_counts.tolist(),
            "train": _lists(self.train),
            "val": _lists(self.val),
            "test": {name: _lists_or_one(lists) for name, lists in self.test.items()},
            "proxy": self.proxy.tolist(),
        }


def _in_words(fault: ClientFault) -> str:
    alone = copy(fault)  # dataclasses.replace would call the constructor, which a subclass may have of its own
    object.__setattr__(alone, "clients", ())
    return repr(alone) + beyond_repr(alone)


def _lengths(lists: list[Indices]) -> Indices:
    return np.array([len(each) for each in lists], dtype=np.int64)


def _lists(arrays: list[Indices]) -> list[list[int]]:
    return [each.tolist() for each in arrays]


def _lists_or_one(arrays: list[Indices]) -> list[list[int]] | list[int]:
    shared = len(arrays) > 1 and all(each is arrays[0] for each in arrays)
    return arrays[0].tolist() if shared else _lists(arrays)


def label_counts(samples: Samples, train: list[Indices], views: Sequence[tuple[View, ...]]) -> NDArray[np.int64] | None:
    """Returns the number of training samples of each client with each label ``[N, C]``; None if there are no labels."""
    if samples.labels is None or samples.num_classes is None:
        return None
    labels = [seen_labels(samples.labels[own], seen) for own, seen in zip(train, views, strict=True)]
    return np.stack([np.bincount(own, minlength=samples.num_classes) for own in labels])
