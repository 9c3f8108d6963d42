"""A SuperLink, SuperNodes and runs of Flower on loopback, with certificates and keys that are made for the test."""

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
SECONDS = 900  # a process that takes longer hangs, also on a busy machine
ACTIVATED = "SuperNode ID:"  # what a SuperNode prints when it is let in
MARK = "LCFL_TEST_PROCESS"  # in the environment of a program and of all that it starts, in whatever session


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def certificates(folder):
    """Writes ``ca.crt``, ``server.pem`` and ``server.key`` for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def certificate(subject, key, issuer, issuer_key, *extensions):
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(name(issuer), name(subject), key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(issuer_key, hashes.SHA256())

    ca, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(*[flag in (0, 5, 6) for flag in range(9)])
    root = certificate("test CA", ca, "test CA", ca, (x509.BasicConstraints(True, None), True), (usage, True))
    address = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
    leaf = certificate("127.0.0.1", server, "test CA", ca, (address, False), (identifier, False))
    pem = serialization.Encoding.PEM
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(root.public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.public_bytes(pem))
    plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "server.key").write_bytes(server.private_bytes(pem, *plain))


def node_key(path):
    """Writes the private key of a node, and its public key as ``<path>.pub``."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *openssh))
    path.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


class Federation:
    """The processes of a federation. All of them end with the block.

    Args:
        folder: a new folder for their files.
        secure: whether they use TLS, and nodes have keys; without it a node has another number each time it starts.
    """

    def __init__(self, folder, secure=True):
        self.folder, self.secure = Path(folder), secure
        self.port, self.processes, self.ports = free_port(), {}, {}
        self.home = self.folder / "flwr"
        self.home.mkdir(parents=True)
        place = f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{self.port}"\n'
        if secure:
            certificates(self.folder / "certificates")
            place += f'root-certificates = "{self.folder}/certificates/ca.crt"\n'
        else:
            place += "insecure = true\n"
        (self.home / "config.toml").write_text(place)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for name in reversed(list(self.processes)):
            self.kill(name)

    def environment(self, name, home=None):
        threads = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(home or self.home)}
        often = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", MARK: self.mark(name)}
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"  # SuperLink and SuperNodes start programs of Flower
        return os.environ | threads | often | {"PATH": path}

    def mark(self, name):
        return f"{self.folder}:{name}"

    def start(self, name, program, *words, home=None):
        """Starts a program in a session of its own, so that all of it can be killed."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [PROGRAMS / program, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment(name, home),
                start_new_session=True,
            )
        return self.processes[name]

    def kill(self, name, program=b""):
        """Kills a program and everything that it started, with SIGKILL; with `program`, only processes of that name."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = f"{MARK}={self.mark(name)}".encode() in (process / "environ").read_bytes().split(b"\0")
                if is_ours and program in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        if not program:
            self.processes.pop(name).wait()

    def restart_node(self, name, **config):
        """Starts a killed SuperNode again. Its key is refused until the SuperLink has noticed that it was away."""
        end, before = time.monotonic() + SECONDS, self.log(name).count(ACTIVATED)
        while time.monotonic() < end:
            self.node(name, **config)
            while self.processes[name].poll() is None:
                if self.log(name).count(ACTIVATED) > before:
                    return
                time.sleep(0.1)
            self.kill(name)
            time.sleep(5)
        raise AssertionError(f"{name} was not let in again\n" + self.logs())

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def superlink(self, database=True):
        """Starts the SuperLink and waits until it listens. Without a database, it forgets all when it ends."""
        words = ["--port", self.port, "--disable-runtime-dependency-installation"]
        words += ["--database", self.folder / "state.db"] if database else []
        if self.secure:
            place = self.folder / "certificates"
            words += ["--ssl-ca-certfile", place / "ca.crt", "--ssl-certfile", place / "server.pem"]
            words += ["--ssl-keyfile", place / "server.key", "--enable-supernode-auth"]
        else:
            words += ["--insecure"]
        self.start("superlink", "flower-superlink", *words)
        self.wait(lambda: self._listens(self.port), "the SuperLink")

    def node(self, name, **config):
        """Starts a SuperNode. A new one is registered first, if nodes have keys."""
        self.ports.setdefault(name, free_port())
        words = ["--superlink", f"127.0.0.1:{self.port}", "--port", self.ports[name]]
        if self.secure:
            key = self.folder / f"{name}.key"
            if not key.exists():
                node_key(key)
                self.flwr("supernode", "register", key.with_suffix(".pub"), "local")
            words += ["--root-certificates", self.folder / "certificates" / "ca.crt"]
            words += ["--auth-supernode-private-key", key]
        else:
            words += ["--insecure"]
        told = " ".join(
            f'{key}="{value}"' if isinstance(value, str | Path) else f"{key}={value}" for key, value in config.items()
        )
        home = self.folder / f"home-{name}"
        self.start(name, "flower-supernode", *words, "--node-config", told, home=home)

    def flwr(self, *words):
        """Runs ``flwr`` and returns what it printed."""
        done = subprocess.run(
            [PROGRAMS / "flwr", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment("flwr"),
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run_to_its_end(self, app, **config):
        """Starts a run, waits for its end and returns its log."""
        process = self.run(app, **config)
        self.wait(lambda: process.poll() is not None, "the run")
        return self.log("run")

    def run(self, app, **config):
        """Starts a run and returns the process that shows its log: ``run.log``."""
        told = " ".join(
            f"{key}='{value}'" if isinstance(value, str | Path) else f"{key}={value}" for key, value in config.items()
        )
        words = ["run", app, "local", "--stream"]
        return self.start("run", "flwr", *words, *(["--run-config", told] if told else []))

    def wait(self, condition, what, seconds=SECONDS):
        """Waits until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} took more than {seconds} s\n" + self.logs()
            time.sleep(0.1)

    def logs(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )

    @staticmethod
    def _listens(port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0
