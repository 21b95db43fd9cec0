"""Kills the processes of a run at moments that hurt, until it has been killed often enough."""

import os
import random
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forked import python
from processes import children, ended, run, start

TRAINING = Path(__file__).parents[1] / "promises" / "faults" / "training.py"

# What a run has on its disk while it does what it is to be killed in.
MOMENTS = {
    "saving": "checkpoints/.unfinished-*",
    "pruning": "checkpoints/.unfinished-*/manifest.json",  # or about to end a save
    "caching": "cache/pardata-building-*",
}


@dataclass(frozen=True)
class Ended:
    """How a run ended: its steps, its weights, and how often the samples were seen."""

    steps: int
    fingerprint: str
    least: int
    most: int

    @classmethod
    def of(cls, printed):
        found = re.search(r"ended (\d+) ([0-9a-f]{64}) (\d+) (\d+)", printed)
        assert found, printed
        return cls(int(found[1]), found[2], int(found[3]), int(found[4]))


@dataclass
class Story:
    """What happened to a run."""

    ended: Ended | None = None
    kills: dict[str, int] = field(default_factory=dict)
    starts: int = 1
    seconds: float = 0.0


def undisturbed(run_dir, steps):
    """Return how the same run ends in one process that nobody touches."""
    return Ended.of(run(python(), TRAINING, "--run-dir", run_dir, "--steps", steps))


def killed(run_dir, kills, sizes, seed, *options):
    """Start a run, kill it `kills` times, and let it end; return its story.

    Where the launcher was killed too, the run is started again, on any of `sizes` processes.
    """
    chance, story, began = random.Random(seed), Story(), time.monotonic()
    log = run_dir / "log.txt"
    agent = None
    while agent is None or agent.returncode:
        with torchrun(log, run_dir, chance.choice(sizes), *options) as agent:
            while sum(story.kills.values()) < kills and agent.poll() is None:
                moment = chance.choice([*MOMENTS, "any time", "any time", "after progress"])
                if not story.kills and not has_cache(run_dir):
                    moment = "caching"  # there is no other time for it
                if wait_for(moment, run_dir, agent, chance) and (who := kill(agent, chance)):
                    name = f"{who}, {moment}"
                    story.kills[name] = story.kills.get(name, 0) + 1
            if sum(story.kills.values()) >= kills:
                (run_dir / "enough").touch()
                agent.wait(timeout=600)
        story.starts += 1
        assert story.starts < 2 * kills + 9, log.read_text()[-5000:]
    story.ended = Ended.of(log.read_text())
    story.seconds = time.monotonic() - began
    return story


def has_cache(run_dir):
    return any((run_dir / "cache").glob("pardata-files-*"))


def wait_for(moment, run_dir, agent, chance):
    """Wait for a moment to kill; return whether it came."""
    if moment == "caching" and has_cache(run_dir):
        return False  # once is enough for a cache
    deadline = time.monotonic() + 60
    before = set(run_dir.glob("checkpoints/attempt-*-step-*"))
    until = time.monotonic() + chance.uniform(0, 8)
    while time.monotonic() < deadline and agent.poll() is None:
        if children(agent.pid):
            if moment == "caching" and has_cache(run_dir):
                return False
            if moment in MOMENTS:
                came = any(run_dir.glob(MOMENTS[moment]))
            elif moment == "after progress":
                came = bool(set(run_dir.glob("checkpoints/attempt-*-step-*")) - before)
            else:
                came = time.monotonic() > until
            if came:
                return True
        time.sleep(0.001)
    return False


def kill(agent, chance):
    """Kill one rank, some, all, or all with their launcher; return which, if any were there."""
    ranks = children(agent.pid)
    if not ranks:
        return None  # they have ended just now
    who = chance.choice(["one rank", "one rank", "some ranks", "all ranks", "all and the launcher"])
    count = {"one rank": 1, "some ranks": chance.randint(1, len(ranks))}.get(who, len(ranks))
    victims = chance.sample(ranks, count)
    if who == "all and the launcher":
        victims.append(agent.pid)
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if agent.pid in victims:
        agent.wait()
    return who


@contextmanager
def torchrun(log, run_dir, size, *options):
    """Start a run under torchrun, printing to `log`; nothing of it is left at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", "--max-restarts=10000", TRAINING]
    command += ["--run-dir", run_dir, *options]
    with (
        log.open("a") as file,
        ended(start(*command, stdout=file, PYTHON_EXEC=str(python()))) as agent,
    ):
        yield agent
