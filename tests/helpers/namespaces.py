"""Hosts on one machine: network namespaces with a name, an address and a hosts file each.

All that runs on a host is killed when the `hosts` context ends, and nothing of it is left.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

# The host name too: by it, agents that meet find out which of them serves the store.
_AS = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
_NET = "10.91.0"


@dataclass(frozen=True)
class Host:
    """One of them."""

    namespace: str
    name: str
    address: str

    def command(self, *command):
        """Return `command` as one that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *_AS, self.name, *map(str, command)]

    def link(self, state):
        """Set its link "down", so that what is sent is lost and nobody is told, or "up"."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    def power_off(self):
        """Kill all that runs here, as when a machine loses its current."""
        deadline = time.monotonic() + 20
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{pids} do not end"
            time.sleep(0.02)

    def _pids(self):
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


def require_namespaces():
    """Skip the test where there can be none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    name = f"launch-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.strip()}")
    _ip("netns", "del", name)


@contextmanager
def hosts(*names, aliases=""):
    """Yield a host of each name; two are joined by a link, one has itself alone.

    `aliases` are more lines for their hosts files.
    """
    # Of each test process its own namespaces; names and addresses are seen inside only.
    made = [
        Host(f"launch-{os.getpid()}-{name}", name, f"{_NET}.{number}")
        for number, name in enumerate(names, start=1)
    ]
    known = "\n".join(["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in made)])
    try:
        for host in made:
            folder = _folder(host)
            folder.mkdir(parents=True)  # `ip netns exec` binds these files over those of /etc
            (folder / "hosts").write_text(f"{known}\n{aliases}\n")
            (folder / "resolv.conf").write_text("")  # an unknown name is so at once
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _join(made)
        yield made
    finally:
        # pytest-xdist interrupts once more after 5 s.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for host in made:
            with suppress(subprocess.CalledProcessError):
                host.power_off()
                _ip("netns", "del", host.namespace)
            shutil.rmtree(_folder(host), ignore_errors=True)
        with suppress(OSError):  # others have theirs there
            Path("/etc/netns").rmdir()
        signal.signal(signal.SIGINT, before)


def _join(made):
    if len(made) == 1:
        _ip("-n", made[0].namespace, "addr", "add", f"{made[0].address}/32", "dev", "lo")
        return
    one, other = made
    pair = ["type", "veth", "peer", "name", "eth0", "netns", other.namespace]
    _ip("-n", one.namespace, "link", "add", "eth0", *pair)
    for host in made:
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.link("up")


def _folder(host):
    return Path("/etc/netns") / host.namespace


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
