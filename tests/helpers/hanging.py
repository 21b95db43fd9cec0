"""A process whose workers hang: STARTS HOW.

In HOW "waits" they hang in Python, and the process waits to be killed. In the others they hang in C
code, where no handler of Python runs: the process "ends", "raises", or "breaks" out of its loop.
"""

import multiprocessing
import re
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.utils.data import get_worker_info

from pardata import make_loader


class Hanging:
    """Four samples, and more of which reading one takes for ever."""

    def __init__(self, folder, how):
        self.folder, self.how = folder, how

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index >= 4:
            wait_for(self.folder / "read")  # or it would not even send what it has read
            (self.folder / f"hangs{get_worker_info().id}").touch()
            if self.how != "waits":
                re.match(r"(a+)+$", "a" * 60 + "b")
            time.sleep(1000)
        return float(index)


def wait_for(file):
    """Wait until there is a file."""
    while not file.exists():
        time.sleep(0.01)


def main(starts, how):
    """Begin to read, and return what reads."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        options = {"num_workers": 2, "persistent_workers": False, "prefetch": 0, "device": None}
        options["multiprocessing_context"] = starts
        steps = iter(make_loader(Hanging(folder, how), 4, shuffle=False, **options))
        next(steps)
        (folder / "read").touch()
        wait_for(folder / "hangs0")
        wait_for(folder / "hangs1")
    print("hangs", flush=True)
    if how == "raises":
        raise RuntimeError("the end")
    if how == "waits":
        time.sleep(1000)
    if how == "ends":
        return steps
    del steps
    print(len(multiprocessing.active_children()), "workers")
    return None


if __name__ == "__main__":
    if "thread" in sys.argv[2]:
        thread = threading.Thread(target=main, args=sys.argv[1:])
        thread.start()
        thread.join()
    else:
        kept = main(*sys.argv[1:])
