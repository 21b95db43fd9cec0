"""Two hosts on one machine: network namespaces with a link between them, that can be cut."""

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One of them."""

    name: str
    address: str

    def start(self, command, log, **env):
        """Start a command on this host, printing to `log`."""
        with log.open("a") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **env},
            )

    def cut(self):
        """Take its link away: what is sent is lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def heal(self):
        _ip("-n", self.name, "link", "set", "eth0", "up")


def reason_for_none():
    """Return why there can be no hosts here, or None."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and iproute2"
    name = f"pardata-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, text=True)
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts():
    """Yield two hosts; nothing of them is left at the end."""
    # Of each test process its own names; the addresses are seen within the namespaces only.
    hosts = [Host(f"pardata-{os.getpid()}-{number}", f"10.77.0.{number}") for number in (1, 2)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        one, other = hosts
        pair = ["type", "veth", "peer", "name", "eth0", "netns", other.name]
        _ip("-n", one.name, "link", "add", "eth0", *pair)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.heal()
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", host.name)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
