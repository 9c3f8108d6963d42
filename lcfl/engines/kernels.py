"""The kernels in ``cpp/``. They are built once per machine and bound by ctypes."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["KIND", "Loss", "Op", "OpenProgram", "Optimizer", "Unavailable", "Value", "compiler_command", "load"]

LOGGER = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("cpp") / "kernels.cpp"  # includes the other files in that folder
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
KEYS = ("model name", "flags", "Features", "CPU part")  # of /proc/cpuinfo that a library depends on
BAD_LABEL, NO_MEMORY = -1e300, -2e300  # what a kernel returns in place of a loss, as in cpp/program.h

_LAYERS = (
    "conv",
    "depthwise",
    "linear",
    "max_pool",
    "avg_pool",
    "group_norm",
    "layer_norm",
    "batch_norm",
    "add",
    "multiply",
    "concatenate",
    "part",
    "shuffle",
    "dropout",
)
_ACTIVATIONS = (
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "tanh",
    "sigmoid",
    "hardsigmoid",
    "gelu",
    "silu",
    "hardswish",
    "affine",
)
KIND = {name: number for number, name in enumerate((*_LAYERS, *_ACTIVATIONS))}


class Unavailable(RuntimeError):
    """Raised if the kernels cannot be built here; the message is the reason."""


class Value(Structure):
    """The shape of one sample: channels, height and width."""

    _fields_ = (("channels", c_int32), ("height", c_int32), ("width", c_int32))

    @property
    def size(self) -> int:
        """The number of its entries."""
        return int(self.channels * self.height * self.width)


class Op(Structure):
    """An operation on numbered values. -1 stands for what it lacks. The fields are those in ``cpp/program.h``."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "input", "other", "output")),
        *((name, c_int32) for name in ("kernel_h", "kernel_w", "stride_h", "stride_w", "padding_h", "padding_w")),
        ("dilation", c_int32),
        ("groups", c_int32),
        ("place", c_int32),
        ("is_frozen", c_int32),
        ("eps", c_float),
        ("momentum", c_float),
        *((name, c_int64) for name in ("weight", "bias", "mean", "var", "tracked")),
    )


class Loss(Structure):
    """The settings of a loss. The fields are those in ``cpp/program.h``."""

    _fields_ = (("kind", c_int32), ("smoothing", c_float), ("threshold", c_float), ("weights", c_void_p))


class Optimizer(Structure):
    """The settings of an optimizer and the weights of the two pulls. The fields are those in ``cpp/program.h``."""

    _fields_ = (
        *((name, c_int32) for name in ("is_adam", "nesterov", "decoupled", "step")),
        *((name, c_float) for name in ("rate", "weight_decay", "momentum", "dampening")),
        *((name, c_double) for name in ("beta1", "beta2", "eps")),
        ("cluster_weight", c_float),
        ("global_weight", c_float),
        ("num_embedding", c_int64),
        ("begin", c_int64),
        ("end", c_int64),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the kernels. Builds them first if this machine does not have them yet, which takes seconds.

    They are kept in ``$XDG_CACHE_HOME/lcfl`` (``~/.cache/lcfl``) under a name that depends on source, compiler and
    processor.

    Raises:
        Unavailable: if there is no C++ compiler, if it fails, or if the folder cannot be read and written.
    """
    compiler = compiler_command()
    path = _folder() / f"kernels-{_fingerprint(compiler)}.so"
    try:
        if not path.is_file():
            _build(compiler, path)
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be used ({error}); set XDG_CACHE_HOME to another folder") from None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error}); delete it to have it built again") from None
    pointer, program = c_void_p, [POINTER(Op), c_int32, POINTER(Value), c_int32, c_int32, c_int32]
    for name, result, arguments in (
        ("open", pointer, [*program, POINTER(Loss), c_int32, pointer]),
        ("is_in_bfloat16", c_int32, [pointer]),
        ("close", None, [pointer]),
        ("gradient", c_double, [*[pointer] * 6, c_int64, pointer]),
        ("scores", c_double, [pointer, pointer, pointer, pointer, c_int64, pointer]),
        ("step", c_double, [*[pointer] * 6, c_int64, POINTER(Optimizer), *[pointer] * 5]),
    ):
        function = getattr(library, f"lcfl_{name}")
        function.restype, function.argtypes, function.errcheck = result, arguments, _checked
    return library


def _checked(result: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns what a kernel returns, or raises a MemoryError."""
    if result == NO_MEMORY or (function.restype is c_void_p and result is None):
        raise MemoryError("trainer.engine: compiled got too little memory for a batch; set a smaller data.batch_size.")
    return result


class OpenProgram:
    """A program that the kernels can run.

    Args:
        arguments: `lcfl.engines.tracing.Program.arguments`.
        bfloat16: whether wide layers may round their factors to bfloat16.
        loss: what a step differentiates; the weights in it are copied. The plain cross-entropy if not given.
        frozen: the values of frozen layers ``[F]``; none if not given.

    Attributes:
        address: what the kernels take for it, as long as this object lives.
        is_in_bfloat16: whether any layer does, because this processor has the instructions.

    Raises:
        Unavailable: if there are no kernels.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        bfloat16: bool = False,
        loss: Loss | None = None,
        frozen: Tensor | None = None,
    ) -> None:
        library = load()
        self._frozen = frozen  # which the kernels read
        address = None if frozen is None else frozen.data_ptr()
        self.address: int = library.lcfl_open(*arguments, loss or Loss(), bfloat16, address)
        self.is_in_bfloat16 = bool(library.lcfl_is_in_bfloat16(self.address))
        weakref.finalize(self, library.lcfl_close, self.address)


def compiler_command() -> list[str]:
    """Returns the command in ``$CXX``, or the first compiler that is installed.

    Raises:
        Unavailable: if there is no compiler.
    """
    given = os.environ.get("CXX", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise Unavailable(f"$CXX is {given!r}, which is not a valid command ({error}); change it") from None
    command = command or [name for name in COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        raise Unavailable(f"there is no C++ compiler ({' or '.join(command[:1] or COMPILERS)}; set $CXX to another)")
    return command


def _folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lcfl"
    except RuntimeError as error:  # a user without a home
        raise Unavailable(f"there is no folder to keep its kernels in ({error}); set XDG_CACHE_HOME to one") from None


def _fingerprint(compiler: list[str]) -> str:
    """Returns a digest of what determines the library: source, compiler command, its version and the processor."""
    version = _run([*compiler, "--version"]).stdout
    sources = (path for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update("\n".join([*compiler, *FLAGS, version, _processor()]).encode())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be run ({error}); set $CXX to another C++ compiler") from None


def _processor() -> str:
    """Returns what the processor supports if the system reports it, else the kind of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(KEYS)}))


def _build(compiler: list[str], path: Path) -> None:
    """Compiles into a file of another name and renames it, because two processes may build at the same time."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    begin = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        command = [*compiler, *FLAGS, native, str(SOURCE), "-o", str(library)]
        done = _run(command)
        if done.returncode != 0:
            raise Unavailable(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
        library.replace(path)
    LOGGER.info("Built the kernels of engine compiled for this machine in %.1f s.", time.perf_counter() - begin)
