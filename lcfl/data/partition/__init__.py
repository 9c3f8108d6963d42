"""Partitions, which turn a pool of samples into one list of sample indices per client.

An index belongs to at most one client unless the name of the partition says otherwise. A user-defined class needs only
``split``. YAML names it by its class path::

    partition:
      class_path: lcfl.data.partition.ClientDirichlet
      init_args: {alpha: 0.1, sizes: [50, 350]}
"""

from lcfl.data.partition.base import ClientShares, Partition
from lcfl.data.partition.by_owner import ByOwner
from lcfl.data.partition.dirichlet import ClassDirichlet, ClientDirichlet
from lcfl.data.partition.from_file import FromFile, write_partition
from lcfl.data.partition.label_skew import LabelRing, LabelSkew
from lcfl.data.partition.overlapping import CopyPerGroup, OverlappingFractions
from lcfl.data.partition.pathological import Pathological
from lcfl.data.partition.pool import Pool
from lcfl.data.partition.shards import Shards
from lcfl.data.partition.uniform import IID, PartOfPool, Quantity, Subsampled

__all__ = [
    "IID",
    "ByOwner",
    "ClassDirichlet",
    "ClientDirichlet",
    "CopyPerGroup",
    "FromFile",
    "LabelRing",
    "LabelSkew",
    "OverlappingFractions",
    "PartOfPool",
    "Partition",
    "Pathological",
    "Pool",
    "Quantity",
    "Shards",
    "ClientShares",
    "Subsampled",
    "write_partition",
]
