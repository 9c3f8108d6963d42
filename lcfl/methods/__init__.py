"""Methods of federated learning: `Method` and the four parts that it combines.

``local`` defines what a client starts from and minimises, ``exchange`` what crosses the wire, ``clustering`` which
clients belong together, and ``aggregation`` how uploads become the server's models.
"""

from lcfl.methods import aggregation, clustering, exchange, local
from lcfl.methods.aggregation import *  # noqa: F403
from lcfl.methods.clustering import *  # noqa: F403
from lcfl.methods.exchange import *  # noqa: F403
from lcfl.methods.exchange.transforms import GaussianNoise, LowRankCompression, UploadTransform
from lcfl.methods.local import *  # noqa: F403
from lcfl.methods.method import Method

__all__ = ["GaussianNoise", "LowRankCompression", "Method", "UploadTransform"]
__all__ += aggregation.__all__
__all__ += clustering.__all__
__all__ += exchange.__all__
__all__ += local.__all__
