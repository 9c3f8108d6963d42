"""Which files of the newest checkpoint hold which clients, so that the next one writes what has changed."""

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["CheckpointShard", "ShardIndex"]


@dataclass(eq=False)
class CheckpointShard:
    """A file with the states of some clients.

    Attributes:
        name: of the file.
        sha256: of its content.
        stamp: of the file when it was written or read: inode, size and time of change; whoever touches it changes that.
        num_clients: how many it was written with.
        current: those of them whose state is still the one in the file.
    """

    name: str
    sha256: str
    stamp: tuple[int, int, int]
    num_clients: int
    current: set[int] = field(default_factory=set)

    @property
    def is_half_current(self) -> bool:
        """Whether at least half of it is still of use. Shards that are not are written anew: they would pile up."""
        return 2 * len(self.current) >= self.num_clients


class ShardIndex:
    """Every client's state is in one shard, or `unsaved`."""

    def __init__(self) -> None:
        self.unsaved: set[int] = set()
        self._shard_of: dict[int, CheckpointShard] = {}
        self._shards: dict[str, CheckpointShard] = {}

    def __iter__(self) -> Iterator[CheckpointShard]:
        """The shards that are of use, in the order in which they were written."""
        return iter(list(self._shards.values()))

    def changed(self, client: int) -> None:
        """A client has another state now."""
        self.gone(client)
        self.unsaved.add(client)

    def gone(self, client: int) -> None:
        """A client has no state any more."""
        self.unsaved.discard(client)
        shard = self._shard_of.pop(client, None)
        if shard is not None:
            shard.current.discard(client)
            if not shard.current:
                del self._shards[shard.name]

    def saved(self, shard: CheckpointShard) -> None:
        """The states of a shard's `current` clients are in its file."""
        self._shards[shard.name] = shard
        self._shard_of.update(dict.fromkeys(shard.current, shard))
        self.unsaved -= shard.current

    def release(self, shard: CheckpointShard) -> None:
        """The states of a shard's clients are to be written anew."""
        for client in list(shard.current):
            self.changed(client)
