"""The cost of the kernels in machine instructions, which are counted because seconds depend on the machine.

Large networks spend most of their time in these loops. They become up to twice as slow if the compiler reads factors
again or keeps sums in memory.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lcfl.engines import kernels

# The two sides of each kernel's block of sums, from the template arguments in its name. V is the last one of some.
SIDES = {
    "correlate_block": lambda channels, pixels, v: (channels, pixels * v),
    "weigh_taps": lambda channels, taps: (channels, taps),
    "Product::multiply_block": lambda rows, vectors: (rows, vectors),
    "connect_block": lambda outputs, v: (outputs, v),
}


def has_fma():
    return platform.machine() == "x86_64" and " fma " in Path("/proc/cpuinfo").read_text()


def functions(library):
    """Yields the name of each kernel, its two sides, and its code as a list of address, instruction and operands."""
    text = subprocess.run(["objdump", "-dC", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    for function in text.stdout.split("\n\n"):
        head, _, body = function.partition("\n")
        found = re.search(r"<void lcfl::([\w:]+)<([\d, ]+)>\(.*\)( \[clone [^]]+\])?>:$", head)
        if found and found[1] in SIDES:
            lines = (re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line) for line in body.splitlines())
            code = [(int(line[1], 16), line[2], line[3]) for line in lines if line]
            yield f"{found[1]}<{found[2]}>", SIDES[found[1]](*map(int, found[2].split(","))), code


def innermost_loops(code):
    """Yields the instructions of each loop that has no other loop inside."""
    place = {address: number for number, (address, *_) in enumerate(code)}
    loops = []
    for number, (_, name, operands) in enumerate(code):
        target = re.match(r"[0-9a-f]+", operands) if name.startswith("j") else None
        begin = place.get(int(target[0], 16), number) if target else number
        if begin < number:
            loops.append((begin, number))
    for begin, end in loops:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops):
            yield code[begin : end + 1]


@pytest.mark.skipif(not has_fma() or shutil.which("objdump") is None, reason="reads the code of x86 with FMA")
def test_kernels_read_every_factor_once():
    """A block of A x B products needs A + B reads. A quarter more and two more are for other compilers."""
    seen = set()
    for name, (a, b), code in functions(kernels.load()._name):
        for loop in innermost_loops(code):
            products = sum(each.startswith("vfmadd") for _, each, _ in loop)
            reads = sum("(%" in operands and not each.startswith(("lea", "nop")) for _, each, operands in loop)
            if products >= a * b > 1:
                assert reads <= 1.25 * (a + b) * products / (a * b) + 2, f"{name}: {reads} reads, {products} products"
                seen.add(name)
    assert len(seen) >= 10
