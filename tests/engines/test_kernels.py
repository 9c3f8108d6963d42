"""The kernels are built once, completely or not at all, and a failure never ends a run of engine auto."""

import multiprocessing
import re
import resource
import stat
import sys
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import nn

from lcfl.engines import choose_engine, kernels
from lcfl.models import SplitNetwork
from tests.engines.test_compiled import batches_of, engines
from tests.helpers.builders import blobs, blobs_module

SHARED = kernels.SOURCE.with_name("program.h")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Sets up a new cache folder and a process that has not loaded the kernels yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "load", kernels.load.__wrapped__)
    return tmp_path / "cache" / "lcfl"


def compiler(tmp_path, script):
    """Writes a shell script as a compiler and returns its path, for $CXX."""
    path = tmp_path / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def library():
    """The file of the kernels that other tests use."""
    return kernels.load()._name


def test_builds_once_and_leaves_one_file(library, fresh, tmp_path, monkeypatch):
    copies = f'echo "$@" >> {tmp_path}/calls; for output; do :; done; [ "$1" = --version ] || cp {library} "$output"'
    monkeypatch.setenv("CXX", compiler(tmp_path, copies))
    kernels.load()
    (first,) = fresh.iterdir()
    kernels.load()
    assert [path.name for path in fresh.iterdir()] == [first.name]
    built = [line for line in (tmp_path / "calls").read_text().splitlines() if "--version" not in line]
    assert len(built) == 1


@pytest.mark.parametrize(
    ("script", "why"),
    [("echo the end >&2; exit 1", "the end"), ("exit 0", "cannot be used")],
)
def test_a_failed_build_names_the_reason_and_leaves_no_files(fresh, tmp_path, monkeypatch, script, why):
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(kernels.Unavailable, match=why):
        kernels.load()
    assert list(fresh.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ('c++ "-O2', "which is not a valid command"),
        ("{folder}/data", "cannot be run"),
        ("{folder}/orphan", "cannot be run"),
    ],
)
def test_a_command_that_is_no_compiler_is_named(fresh, tmp_path, monkeypatch, command, why):
    for name, text in {"data": "no program", "orphan": "#!/no/such/shell\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    with pytest.raises(kernels.Unavailable, match=why):
        kernels.load()


def test_a_compiler_may_speak_any_encoding(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path, r"printf 'caf\351 %s' \"$*\"; exit 1"))
    with pytest.raises(kernels.Unavailable, match="failed"):
        kernels.load()


def test_error_for_a_cache_folder_that_cannot_be_searched(fresh, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(kernels.Path, "is_file", refused)  # the superuser may search every folder
    with pytest.raises(kernels.Unavailable, match=r"Permission denied.* set XDG_CACHE_HOME"):
        kernels.load()


def test_without_a_compiler_auto_is_sequential_and_compiled_is_refused(fresh, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_engine("auto", blobs_module(), blobs(), "cpu", "32-true").name == "sequential"
    with pytest.raises(ValueError, match=r"trainer.engine: got compiled, but there is no C\+\+ compiler"):
        choose_engine("compiled", blobs_module(), blobs(), "cpu", "32-true")


def test_error_for_a_cache_folder_that_cannot_be_written(fresh, monkeypatch):
    fresh.parent.mkdir()
    fresh.touch()
    with pytest.raises(kernels.Unavailable, match="set XDG_CACHE_HOME"):
        kernels.load()


def test_error_for_a_user_without_a_home_names_xdg_cache_home(fresh, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(kernels.Path, "home", homeless)
    assert choose_engine("auto", blobs_module(), blobs(), "cpu", "32-true").name == "sequential"
    with pytest.raises(kernels.Unavailable, match=r"no folder to keep its kernels in .* set XDG_CACHE_HOME"):
        kernels.load()


def test_error_for_a_damaged_library(fresh):
    fresh.mkdir(parents=True)
    (fresh / f"kernels-{kernels._fingerprint(kernels.compiler_command())}.so").write_bytes(b"not a library")
    with pytest.raises(kernels.Unavailable, match="delete it"):
        kernels.load()


def test_the_file_name_depends_on_compiler_and_processor(monkeypatch):
    names = {kernels._fingerprint(["c++"]), kernels._fingerprint(["c++", "-O0"])}
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    names.add(kernels._fingerprint(["c++"]))
    assert len(names) == 3


@pytest.mark.parametrize("kind", [kernels.Loss, kernels.Op, kernels.Optimizer, kernels.Value])
def test_fields_are_in_the_order_of_the_source(kind):
    (body,) = re.findall(rf"struct {kind.__name__} \{{(.*?)\n\}};", SHARED.read_text(), re.DOTALL)
    body = re.sub(r"//.*", "", body).replace("const float* ", "pointer ")
    lines = [line for line in body.splitlines() if "(" not in line and ";" in line]
    types = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "double": c_double, "pointer": c_void_p}
    found = [
        (name.strip(), types[line.split()[0]])
        for line in lines
        for name in line.strip().partition(" ")[2].rstrip(";").split(",")
    ]
    assert found == list(kind._fields_)


def test_kinds_are_in_the_order_of_the_source():
    (body,) = re.findall(r"enum Kind : int32_t \{(.*?)\}", SHARED.read_text(), re.DOTALL)
    assert [name.strip().lower() for name in body.rstrip(", \n").split(",")] == list(kernels.KIND)


@contextmanager
def little_memory():
    """Gives this process 32 MB more at most."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def train_with_little_memory():
    def network():  # a sample has a value of 4 MB
        return SplitNetwork(nn.Sequential(nn.Conv2d(1, 256, 1), nn.MaxPool2d(64), nn.Flatten()), nn.Linear(256, 4))

    _, engine = engines(network, (1, 64, 64))
    model, (small, large) = engine.module.initial_model(3), batches_of(4, 32)
    before, scores = engine.gradient(model, small).vector, engine.scorer(model)
    many = torch.zeros(32, 1, 64, 64)
    for compute in (
        lambda: engine.gradient(model, large),
        lambda: engine.run_optimizer(model, [large]),
        lambda: scores(many),
    ):
        with (
            little_memory(),
            pytest.raises(MemoryError, match=r"trainer\.engine: compiled got too little memory for a batch; set a"),
        ):
            compute()
    assert torch.equal(engine.gradient(model, small).vector, before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the memory of a process")
def test_a_batch_that_needs_too_much_memory_is_a_memory_error_and_a_smaller_one_trains():
    """In a process of its own: what earlier tests have freed may be enough memory."""
    process = multiprocessing.get_context("spawn").Process(target=train_with_little_memory)
    process.start()
    process.join()
    assert process.exitcode == 0
