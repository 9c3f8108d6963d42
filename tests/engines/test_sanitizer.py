"""The tests of the kernels pass under AddressSanitizer, which ends a process that touches memory it does not own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lcfl.engines import kernels

FOUND = 77  # the exit status of a process that the sanitizer ends
UNCHECKED = """
from lcfl.engines import compiled
from tests.engines.test_pointers import BATCH, engine
compiled._vector = lambda values, length, name: values
unchecked = engine()
unchecked.run_optimizer(unchecked.module.initial_model(0)[:4], [BATCH])
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Provides a folder for kernels with the sanitizer, which take a minute to build."""
    return tmp_path_factory.mktemp("kernels")


def library(name):
    """Returns the path of a library of the compiler; skips the test if there is none."""
    command = [*kernels.compiler_command(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return path


def sanitized(folder, *arguments):
    """Runs Python with kernels that are built into `folder` with the sanitizer."""
    environment = os.environ | {
        "CXX": f"{' '.join(kernels.compiler_command())} -fsanitize=address -fno-omit-frame-pointer",
        "XDG_CACHE_HOME": str(folder),
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",  # Python itself does not free everything
    }
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "part", ["bfloat16", "compiled", "compiled_steps", "dropout", "frozen_layers", "layers", "pointers"]
)
def test_the_kernels_touch_only_their_own_memory(folder, part):
    tests = Path(__file__).with_name(f"test_{part}.py")
    done = sanitized(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_sanitizer_sees_a_read_beyond_a_model(folder):
    done = sanitized(folder, "-c", UNCHECKED)
    assert done.returncode == FOUND, done.stderr[-3000:]
    assert "heap-buffer-overflow" in done.stderr
