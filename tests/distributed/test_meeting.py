"""What keeps ranks from meeting is said before they wait for each other."""

import socket
import warnings

import pytest

from lcfl.distributed.meeting import check_meeting
from lcfl.distributed.placement import Placement

ONE, TWO = Placement(2, 1, "ddp"), Placement(2, 2, "ddp")


@pytest.fixture
def address(monkeypatch):
    """Provides ``address(text, **environment)``: the host name then stands for this address, or for none."""

    def stand_for(text, **environment):
        def look_up(name, port, **options):
            if not text:
                raise socket.gaierror("on purpose")
            return [(None, None, None, "", (text, 0))]

        for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(socket, "gethostname", lambda: "first")
        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return stand_for


@pytest.mark.parametrize(("text", "named"), [("127.0.1.1", "127.0.1.1"), ("::1", "::1"), ("", "no address")])
def test_an_address_that_other_machines_cannot_reach_is_refused(address, text, named):
    address(text, MASTER_ADDR="first")
    with pytest.raises(ValueError, match=rf"this machine, first, stands for {named}, .* GLOO_SOCKET_IFNAME; networks"):
        check_meeting(TWO)


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("10.9.0.1", {"MASTER_ADDR": "first"}),
        ("127.0.1.1", {"MASTER_ADDR": "first", "GLOO_SOCKET_IFNAME": "eth0"}),
        ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}),
        ("127.0.1.1", {"MASTER_ADDR": "localhost"}),
    ],
)
def test_an_address_is_accepted_if_the_ranks_can_meet(address, text, environment):
    address(text, **environment)
    check_meeting(TWO)


def test_ranks_of_one_machine_need_no_address(address):
    address("127.0.1.1", MASTER_ADDR="first")
    check_meeting(ONE)


@pytest.mark.parametrize(("shared", "restarts"), [("True", "3"), ("True", "0"), ("False", "3"), (None, None)])
def test_restarts_that_may_fail_give_a_warning(monkeypatch, shared, restarts):
    for name, value in (("USE_AGENT_STORE", shared), ("MAX_RESTARTS", restarts)):
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_meeting(ONE)
    expected = 1 if (shared, restarts) == ("True", "3") else 0
    assert len([each for each in caught if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(each.message)]) == expected
