"""Checks before ranks meet that torchrun or SLURM has started. If they cannot, they would wait without a word."""

import os
import socket
import warnings

from lcfl.distributed.placement import Placement

__all__ = ["check_meeting"]


def check_meeting(placement: Placement) -> None:
    """Checks the environment of ranks that were started elsewhere.

    Raises:
        ValueError: if other machines cannot reach this one.
    """
    if placement.num_nodes > 1:
        _check_address()
    environ = os.environ
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        warnings.warn(
            "torchrun --max-restarts: restarted ranks may look for each other where the lost ones were, and fail. Give "
            "torchrun TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and --rdzv_backend=c10d.",
            stacklevel=2,
        )


def _check_address() -> None:
    """Checks that gloo, which offers the address of the host name, offers one that other machines can reach.

    Debian gives the host name an address of loopback. All ranks would then wait for each other for half an hour.

    Raises:
        ValueError: if it is such an address, unless the environment chooses the network, or all ranks meet on loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or _is_loopback(os.environ.get("MASTER_ADDR", "")):
        return
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    if not address or _is_loopback(address):
        networks = [network for _, network in socket.if_nameindex() if network != "lo"]
        raise ValueError(
            f"the name of this machine, {name}, stands for {address or 'no address'}, and other machines cannot reach "
            "it there. Give the name of its network in the variable GLOO_SOCKET_IFNAME; networks here: "
            f"{', '.join(networks) or 'none'}."
        )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
