"""Hosts on one machine: each has its own network, processes and name, and a cable to a common switch.

They are namespaces of Linux, made by the commands ``unshare``, ``nsenter`` and ``ip``. They share the files. Nothing of
the machine itself changes, and everything is gone when the process that made it ends, however it ends.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

NAMES = ("first", "second", "third", "fourth")
TOOLS = ("unshare", "nsenter", "mount", "ip", "hostname")
USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
CABLE = Path(__file__).with_name("cable.py")
TUN = "/dev/net/tun"


def why_not():
    """Returns why hosts cannot be made here; an empty text if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here: install util-linux, mount, iproute2 and hostname"
    words = ["unshare", *USER, "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
    words += ["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    tried = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"namespaces or their networks may not be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Hosts ``first``, ``second`` and so on, which know each other by name.

    Args:
        number: of hosts.
        delay: seconds that a packet spends in a cable, in each direction.
        loss: the fraction of packets that a cable loses, in each direction.
        rate: bits per second that a cable carries in each direction; 0 for no limit.
    """

    def __init__(self, number, delay=0.0, loss=0.0, rate=0.0):
        self.names = NAMES[:number]
        self._cable = (delay, loss, rate) if delay or loss or rate else None
        self._started = []
        self._init = {}  # the first process of each host, which ends all others of the host when it ends
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def start(self, host, *words, **options):
        """Starts a command on a host, in the working directory of this process. `options` are those of Popen."""
        inside = ("--net", "--uts", "--mount", "--pid", "env", f"--chdir={os.getcwd()}")
        return self._start([*_enter(self._init[host]), *inside, *map(str, words)], **options)

    def kill(self, host):
        """Kills everything on a host at once."""
        os.kill(self._init[host], signal.SIGKILL)

    def unplug(self, host):
        """Takes the cable of a host out of the switch. Nobody is told, as with real cables in a network."""
        self._at_switch("ip", "link", "set", host, "down")

    def plug(self, host):
        """Puts the cable back."""
        self._at_switch("ip", "link", "set", host, "up")

    def transferred(self, host):
        """Returns how many bytes a host has received, and how many it has sent."""
        (link,) = json.loads(self._at_switch("ip", "-json", "-statistics", "link", "show", host))
        return link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]

    def close(self):
        """Kills everything on the hosts and removes them."""
        for pid in self._init.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in reversed(self._started):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _make(self):
        addresses = {name: f"10.9.0.{1 + place}" for place, name in enumerate(self.names)}
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("127.0.0.1 localhost\n" + "".join(f"{each} {name}\n" for name, each in addresses.items()))
            file.flush()
            script = f'mount --bind "{file.name}" /etc/hosts; ip link add switch type bridge; ip link set switch up'
            self._switch = self._namespaces(["unshare", *USER, "--net", "--mount"], script).pid
        new = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        for name in self.names:
            words = [*_enter(self._switch), "--net", "--mount", *new]
            outer = self._namespaces(words, f"hostname {name}; ip link set lo up").pid
            (self._init[name],) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())
        self._lay_cables()
        for name in self.names:
            self._at_switch("ip", "link", "set", name, "master", "switch", "up")
            self._at_switch("ip", "link", "set", f"{name}-far", "netns", self._init[name], "name", "eth0")
            for words in (("address", "add", f"{addresses[name]}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                assert self.start(name, "ip", *words).wait() == 0, f"ip {' '.join(words)} failed on {name}"

    def _lay_cables(self):
        """Makes the two ends of every cable, at the switch."""
        if self._cable is not None:
            words = [*_enter(self._switch), "--net", sys.executable, CABLE, *self._cable, *self.names]
            self._wait_for(self._start(list(map(str, words)), stdin=subprocess.PIPE))
            return
        for name in self.names:
            self._at_switch("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-far")

    def _namespaces(self, words, script):
        """Starts a process that keeps namespaces alive. It ends when this process does, because its input then ends."""
        words = [*words, "sh", "-ec", f"{script}; echo made; exec cat"]
        return self._wait_for(self._start(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))

    def _wait_for(self, process):
        assert process.stdout.readline() == "made\n", f"{process.args} ended"
        return process

    def _start(self, words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options):
        process = subprocess.Popen(words, stdin=stdin, stdout=stdout, text=True, **options)
        self._started.append(process)
        return process

    def _at_switch(self, *words):
        """Runs a command where the switch is, and returns what it prints."""
        words = [*_enter(self._switch), "--net", *map(str, words)]
        return subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout


def _enter(pid):
    return ["nsenter", f"--target={pid}", *(("--user", "--preserve-credentials") if USER else ())]


@pytest.fixture
def hosts():
    """Provides ``hosts(number, ...)``, which makes `Hosts` that are removed when the test ends."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = []

    def make(number, **cable):
        if cable and not os.access(TUN, os.R_OK | os.W_OK):
            pytest.skip(f"a slow cable needs {TUN}, which this user may not open")
        made.append(Hosts(number, **cable))
        return made[-1]

    yield make
    for each in made:
        each.close()
