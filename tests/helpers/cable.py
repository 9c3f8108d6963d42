"""Slow and lossy cables: ``python cable.py DELAY LOSS RATE NAME...`` makes one per name, until its input ends.

``tc qdisc add ... netem`` does the same, but many kernels are built without netem. A cable has two ends, the network
devices ``NAME`` and ``NAME-far``. What is sent into one end comes out of the other, later or never.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # from linux/if_tun.h
LONGEST = 2**16  # bytes of a frame
QUEUE = 1.0  # seconds that a packet waits for its turn at most; a full queue drops what comes


def device(name):
    """Makes a network device, whose frames are read from and written to the file that is returned."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def main(delay, loss, rate, *names):
    delay, loss, rate = float(delay), float(loss), float(rate)
    draw, other, free = random.Random(0), {}, {}
    for name in names:
        one, two = device(name), device(f"{name}-far")
        other |= {one: two, two: one}
        free |= {one: 0.0, two: 0.0}  # when an end can begin with the next frame
    print("made", flush=True)
    waiting, number = [], 0  # frames with the time at which they arrive, in this order
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *other], [], [], timeout)
        if sys.stdin in ready:
            return
        now = time.monotonic()
        for end in ready:
            frame = b""
            with suppress(OSError):  # its host may be gone
                frame = os.read(end, LONGEST)
            begin = max(now, free[end])
            if draw.random() >= loss and begin - now <= QUEUE:
                free[end] = begin + (8 * len(frame) / rate if rate else 0.0)
                number += 1
                heapq.heappush(waiting, (free[end] + delay, number, other[end], frame))
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            with suppress(OSError):  # this end may be unplugged
                os.write(end, frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
