"""What a local update is pulled to.

Legend: P parameters, of which P_phi belong to the embedding; Q buffer entries.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["NO_PULLS", "Pulls"]


class Pulls(NamedTuple):
    """What a local update is pulled to, and what its gradients are corrected by.

    Attributes:
        centre: Omega ``[P]`` or ``[P + Q]``, whose buffers do not pull, the centre of the client's cluster; None for no
            cluster pull.
        embedding: Phi ``[P_phi]``, the global embedding; None for no global pull.
        correction: a vector ``[P]`` that is added to every gradient (SCAFFOLD, FedDyn); None for none.
    """

    centre: Tensor | None = None
    embedding: Tensor | None = None
    correction: Tensor | None = None


NO_PULLS = Pulls()
