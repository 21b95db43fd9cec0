"""A SLURM cluster for the length of a test: real daemons, two virtual nodes, one namespace.

It has a network of its own, so its ports are nobody else's; its nodes' names resolve there alone;
its key and its socket for munge are its own; and killing what runs there ends all of it.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from namespaces import Host, hosts
from processes import run, start

NODES = ("n1", "n2")

SETTINGS = Path(__file__).parent / "slurm.conf"  # of which a cluster fills in what is in {}


@dataclass(frozen=True)
class Cluster:
    """The cluster that runs."""

    host: Host
    folder: Path

    def run(self, *command, **options):
        """Run a client command (srun, sbatch, …) to its end; return what it printed."""
        return run(*self.host.command(*command), **self._env(), **options)

    def start(self, *command, stdout, **options):
        """Start a client command."""
        return start(*self.host.command(*command), stdout=stdout, **self._env(), **options)

    def state(self, job):
        """Return a job's state, as ``"RUNNING"``; the cluster remembers those that ended."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return shown.partition("JobState=")[2].split()[0]

    def _env(self):
        # Batch scripts say `python`, and get what this environment has.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}


@contextmanager
def cluster(folder):
    """Yield a cluster of two nodes that are idle; its files are in `folder`."""
    hostname = socket.gethostname().partition(".")[0]
    aliases = [f"127.0.0.{number} {name}" for number, name in enumerate(NODES, start=1)]
    with hosts("cluster", aliases="\n".join([f"127.0.0.1 {hostname}", *aliases])) as (alone,):
        # All daemons run under the machine's own name, which their configuration knows.
        host = Host(alone.namespace, hostname, alone.address)
        _write_settings(folder, hostname)
        made = Cluster(host, folder)
        daemons = [_munge(made)]
        try:
            daemons.append(made.start("slurmctld", "-D", stdout=subprocess.DEVNULL))
            for name in NODES:
                (folder / f"spool-{name}").mkdir()
                daemons.append(made.start("slurmd", "-D", "-N", name, stdout=subprocess.DEVNULL))
            _wait_until_idle(made)
            yield made
        finally:
            host.power_off()
            for daemon in daemons:
                daemon.wait()


def _write_settings(folder, hostname):
    folder.chmod(0o755)
    (folder / "state").mkdir()
    settings = SETTINGS.read_text().format(hostname=hostname, folder=folder)
    (folder / "slurm.conf").write_text(settings)
    # Unused, but what is looked for otherwise is not mounted in a namespace.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _munge(made):
    key = made.folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    paths = [
        f"--{option}={made.folder / name}"
        for option, name in [
            ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"),
            ("log-file", "munge.log"), ("seed-file", "munge.seed"),
        ]
    ]  # fmt: skip
    return made.start("munged", "--foreground", "--force", *paths, stdout=subprocess.DEVNULL)


def _wait_until_idle(made):
    """Wait for the daemons, which answer with errors while they start."""
    deadline = time.monotonic() + 60
    shown = ""
    while shown.split() != ["idle"] * len(NODES):
        logs = "\n".join(file.read_text()[-1000:] for file in made.folder.glob("*.log"))
        assert time.monotonic() < deadline, f"{shown}\n{logs}"
        done = subprocess.run(
            made.host.command("sinfo", "-h", "-N", "-p", "low", "-o", "%T"),
            env={**os.environ, **made._env()}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        shown = done.stdout
        time.sleep(0.1)
