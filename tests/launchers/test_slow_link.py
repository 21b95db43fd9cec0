"""The benchmark of a slow link: it is as slow as it is told, and leaves nothing behind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import require_namespaces
from processes import run

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "slow_link.py"
MEGABITS = 50.6  # of gradients: 1,581,066 parameters


def slow_namespaces():
    """Return the names of those that such a benchmark has made; another run may be killed in it."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return set(re.findall(r"^slow-\S+", listed.stdout, re.MULTILINE))


def test_no_contender_is_faster_than_the_link_and_nothing_is_left_of_it():
    require_namespaces()
    if not Path("/dev/net/tun").exists():
        pytest.skip("the slow link needs /dev/net/tun")
    before = slow_namespaces()
    printed = run(sys.executable, BENCHMARK, "--rounds", 1, "--rate-mbit", 400, "--delay-ms", 2)
    assert "256 samples over 400 Mbit/s, 2 ms each way: 2 ranks on 2 hosts, 1 rounds" in printed
    rows = dict(re.findall(r"^\| (\S.*?) +\| +([\d.,]+) \|", printed, re.MULTILINE))
    milliseconds = {name: float(value.replace(",", "")) for name, value in rows.items()}
    assert len(milliseconds) == 9
    for name, value in milliseconds.items():
        steps = 4 // int((re.search(r"(\d) microbatches", name) or [0, 1])[1])
        sent = MEGABITS / 2 if "hook" in name else MEGABITS
        assert value > 0.95 * steps * sent / 400 * 1000, name
    assert slow_namespaces() <= before
