"""An index of which files of the newest checkpoint hold which clients, so that the next one writes only changes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["CheckpointShard", "CheckpointShardIndex"]


@dataclass(eq=False)
class CheckpointShard:
    """A file with the states of some clients, or with a tensor that seldom changes, which is of no client.

    Attributes:
        name: the name of the file.
        sha256: the hash of its content.
        stamp: inode, size and time of change of the file when it was written or read; any later change of the file
            changes them.
        num_clients: the number of clients that it was written with.
        current: the clients whose state is still the one in the file.
    """

    name: str
    sha256: str
    stamp: tuple[int, int, int]
    num_clients: int
    current: set[int] = field(default_factory=set)

    @property
    def is_half_current(self) -> bool:
        """Whether at least half of its states are still current. Other shards are rewritten, or they would pile up."""
        return 2 * len(self.current) >= self.num_clients


class CheckpointShardIndex:
    """An index of the shards of the newest checkpoint. The state of each client is in one shard, or `unsaved`.

    Attributes:
        unsaved: the clients whose state is in no shard.
        fixed: the file of each tensor that seldom changes, by name, and the tensor's `fixed_hash`.
    """

    def __init__(self) -> None:
        self.unsaved: set[int] = set()
        self.fixed: dict[str, tuple[str, CheckpointShard]] = {}
        self._shard_of: dict[int, CheckpointShard] = {}
        self._shards: dict[str, CheckpointShard] = {}

    def __iter__(self) -> Iterator[CheckpointShard]:
        """Iterates over the shards that are still in use, in the order in which they were written."""
        return iter(list(self._shards.values()))

    def changed(self, client: int) -> None:
        """Records that a client has a new state."""
        self.gone(client)
        self.unsaved.add(client)

    def gone(self, client: int) -> None:
        """Records that a client no longer has a state."""
        self.unsaved.discard(client)
        shard = self._shard_of.pop(client, None)
        if shard is not None:
            shard.current.discard(client)
            if not shard.current:
                del self._shards[shard.name]

    def saved(self, shard: CheckpointShard) -> None:
        """Records that the file of a shard holds the states of its `current` clients."""
        self._shards[shard.name] = shard
        self._shard_of.update(dict.fromkeys(shard.current, shard))
        self.unsaved -= shard.current

    def release(self, shard: CheckpointShard) -> None:
        """Marks the states of a shard's clients as unsaved, so that they are written again."""
        for client in list(shard.current):
            self.changed(client)
