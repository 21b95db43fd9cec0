"""Two hosts on one machine, and a slow link between them: what a cheap network does to a step.

Each host is a network namespace whose only device is a TUN device. A relay, a process of its own,
carries packets from the one to the other, as late and as slowly as it is told: the kernel's own
means for that (netem) are not in every kernel. Needs Linux, root, iproute2 and /dev/net/tun.
"""

import collections
import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.92.0.1", "10.92.0.2")
DEVICE = "slow0"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 9000
_LONGEST_QUEUE = 0.5  # seconds: what does not fit is lost, as in a switch


def missing() -> str | None:
    """Return what this machine lacks for it, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "needs iproute2 and /dev/net/tun"
    return None


@contextmanager
def slow_link(delay_ms: float, rate_mbit: float) -> Iterator[list[str]]:
    """Yield the names of two network namespaces, linked so; nothing of them is left at the end."""
    names = [f"slow-{os.getpid()}-{number}" for number in (1, 2)]
    relay = None
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        command = [sys.executable, __file__, *names, str(delay_ms), str(rate_mbit)]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        if not relay.stdout or relay.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the relay between {names} must start, but ended: see above")
        yield names
    finally:
        if relay:
            relay.kill()
            relay.communicate()
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def on_host(name: str, *command: str) -> list[str]:
    """Return `command` as one that runs on that host."""
    return ["ip", "netns", "exec", name, *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607  # iproute2 of this system


class _Way:
    """The packets on their way to one end, in order, each with the time at which it arrives."""

    def __init__(self, delay: float, rate: float) -> None:
        self._delay, self._rate = delay, rate
        self._packets: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free = 0.0

    def send(self, packet: bytes, now: float) -> None:
        """Queue a packet behind what is sent before it, or lose it where that is too much."""
        begin = max(now, self._free)
        if begin - now < _LONGEST_QUEUE:
            self._free = begin + len(packet) / self._rate
            self._packets.append((self._free + self._delay, packet))

    def due(self) -> float:
        """Return when the next packet arrives."""
        return self._packets[0][0] if self._packets else float("inf")

    def arrived(self, now: float) -> Iterator[bytes]:
        """Yield the packets that arrive by `now`."""
        while self.due() <= now:
            yield self._packets.popleft()[1]


def relay(ends: list[int], delay: float, rate: float) -> None:
    """Carry packets between two TUN devices, for ever."""
    ways = {ends[0]: _Way(delay, rate), ends[1]: _Way(delay, rate)}  # by where they come from
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        wait = min(way.due() for way in ways.values()) - time.monotonic()
        for end in select.select(ends, [], [], min(max(wait, 0.0), 1.0))[0]:
            with suppress(BlockingIOError):
                for _ in range(64):
                    ways[end].send(os.read(end, 65536), time.monotonic())
        for end, way in ways.items():
            for packet in way.arrived(time.monotonic()):
                with suppress(OSError):  # a full device loses it
                    os.write(other[end], packet)


def _tun(namespace: str, address: str) -> int:
    """Make a device in a namespace, and return this process's end of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    _ip("addr", "add", f"{address}/24", "dev", DEVICE)
    _ip("link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "2000", "up")
    return end


if __name__ == "__main__":
    *_namespaces, _delay_ms, _rate_mbit = sys.argv[1:]
    _ends = [_tun(*pair) for pair in zip(_namespaces, ADDRESSES, strict=True)]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: gone with the benchmark
    print("ready", flush=True)
    relay(_ends, float(_delay_ms) / 1e3, float(_rate_mbit) * 1e6 / 8)
