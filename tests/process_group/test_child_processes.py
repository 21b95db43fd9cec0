"""Traps of starting processes, each one started for real."""

import os
import subprocess
import sys

import pytest
from common_launch import torchrun
from processes import without_gloo

CHILD = r"""
import os, pardata
try:
    world = pardata.init()
    # One write: lines of two ranks may be glued together.
    print(f"joined {world.rank} {world.size} {world.launcher}\n", end="", flush=True)
except RuntimeError as error:
    print("refused:", error)
"""

PARENT = r"""
import os, subprocess, sys
import pardata, torch
from pardata import all_reduce_sum, make_loader
from torch.utils.data import Dataset

class Seen(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        here = pardata.world()
        return [here.rank, here.size, here.launcher == "single", all_reduce_sum(1)]

with pardata.init() as world:
    if world.rank == 0:
        child = [sys.executable, "-c", os.environ["CHILD"]]
        out = {**os.environ, "PARDATA_LAUNCHER": "none"}
        again = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node=2", os.environ["SCRIPT"]]
        how = {"subprocess": (child, None), "opted out": (child, out), "launched": (again, None)}
        begun = {name: subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
                 for name, (command, env) in how.items()}
        for name, process in begun.items():
            print(name, process.communicate()[0])
    pardata.barrier("children are done")
    if (pid := os.fork()) == 0:
        alone = pardata.world().size, pardata.init().size, all_reduce_sum(1)
        print(f"forked {alone}\n", end="", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    batch = next(iter(make_loader(Seen(), 4, num_workers=1)))
    print(f"worker {[column.tolist() for column in batch]}\n", end="", flush=True)
    pardata.barrier("end")
"""


def test_children_of_a_rank_never_take_its_place(tmp_path, short_tmp):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    script = str(tmp_path / "child.py")
    done = torchrun(tmp_path / "parent.py", 2, short_tmp, CHILD=CHILD, SCRIPT=script)
    assert done.returncode == 0, done.stderr
    printed = without_gloo(done.stdout)
    assert "subprocess refused: this process inherited the variables of rank 0" in printed
    assert "set PARDATA_LAUNCHER=none for it, or put the script under" in printed
    assert "opted out joined 0 1 single" in printed
    assert "joined 0 2 torchrun" in printed.split("launched")[1]
    assert "joined 1 2 torchrun" in printed.split("launched")[1]
    assert printed.count("forked (1, 1, 1)") == 2
    # Each rank's worker saw itself alone: rank 0 of 1, and its own 1 as the sum.
    assert printed.count("worker [[0, 0], [1, 1], [True, True], [1, 1]]") == 2


UNGUARDED = """
import torch, pardata
pardata.init()
data = torch.utils.data.TensorDataset(torch.arange(4))
loader = pardata.make_loader(data, 4, num_workers=1, multiprocessing_context="spawn",
                             collate_fn=torch.utils.data.default_collate)
next(iter(loader))
"""


def test_a_script_without_a_main_guard_raises_in_spawned_workers(tmp_path, short_tmp):
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = torchrun(tmp_path / "train.py", 2, short_tmp)
    assert done.returncode == 1
    assert "or put the script under `if __name__ == '__main__':`" in done.stderr


ALONE = """
import sys, torch.multiprocessing as mp
from pardata import init

def main(rank=0):
    with init() as world:
        print(f"size {world.size}\\n", end="", flush=True)

if __name__ == "__main__":
    mp.spawn(main, nprocs=2) if sys.argv[1:] else main()
"""


@pytest.mark.parametrize(
    ("arguments", "env", "sign"),
    [
        (["spawn"], {}, "multiprocessing started it"),
        ([], {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR is set"),
        ([], {"PALS_RANKID": "1"}, "PALS_RANKID is set"),
        (["spawn"], {"PARDATA_LAUNCHER": "none"}, ""),
        ([], {}, ""),
    ],
)
def test_a_process_meant_to_join_others_is_warned_to_be_alone(tmp_path, arguments, env, sign):
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, "alone.py", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    number = 2 if arguments else 1
    assert done.stdout.count("size 1") == number
    assert done.stderr.count("this process is alone") == (number if sign else 0)
    assert sign in done.stderr
