"""What the launchers start, and what it says."""

import re
import sys
from pathlib import Path

from places import ARTICLES

WHO = Path(__file__).parent / "who.py"

# Short: five steps. The same to the last bit on any number of processes.
MNIST = [
    ARTICLES / "mnist.py",
    "--data", "digits", "--epochs", 1, "--strategy", "exact", "--batch-size", 256,
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def fingerprint(printed):
    """Return the fingerprint that `mnist.py` prints at its end."""
    found = re.findall(r"fingerprint of the weights (\w+)", printed)
    assert len(found) == 1, printed
    return found[0]


def joined(printed):
    """Return what `mnist.py` says that it joined, as ``"world size 2, nodes 1, launcher …"``."""
    found = re.search(r"joined: (.*?), backend", printed)
    assert found, printed
    return found[1]
