"""At the end of an interpreter pardata says nothing, however a script ends and whatever is open."""

import re
import signal

import pytest
from launched import agent, reserved_port, slurm_variables, torchrun_variables

# What is open when the script ends: in a global, and in the frame of an exception.
SCRIPT = """
import sys, torch, pardata

ending, folder = sys.argv[1:]

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return float(index)

def begun(steps):
    steps = iter(steps)
    next(steps)
    return steps

def loader(workers):
    starts = "fork" if workers else None
    return pardata.make_loader(Data(), 8, num_workers=workers, multiprocessing_context=starts)

def saving():
    checkpointer = pardata.Checkpointer(folder, asynchronous=True)
    checkpointer.save(1, x=torch.ones(3_000_000))
    return checkpointer

def writing():
    writer = pardata.MetricWriter(folder)
    writer.write(1, {"loss": 1})
    return writer

def main():
    held = [begun(loader(0)), begun(loader(0).epochs(3)), begun(loader(2)), saving(), writing()]
    held += [begun(pardata.progress(range(10))), pardata.StopSignal().__enter__(), held]
    if ending == "exit":
        sys.exit(0)
    if ending == "raise":
        raise ValueError("boom")
    return held

if "ranks" in ending:
    pardata.init(hang_after=30)  # so there is a watchdog
    pardata.barrier()
held = main()
"""
OWN = r"Traceback \(most recent call last\):\n(  .*\n)+ValueError: boom\n"


@pytest.mark.parametrize("ending", ["end", "exit", "raise"])
def test_a_process_says_nothing_of_what_is_open(ending, programs, tmp_path):
    to = {"output": tmp_path / "out", "errors": tmp_path / "err"}
    assert programs.start(SCRIPT, ending, tmp_path, **to).wait(60) == (ending == "raise")
    text = (tmp_path / "err").read_text()
    assert re.fullmatch(OWN, text) if ending == "raise" else text == "", text


def test_nor_do_ranks(programs, tmp_path):
    to = {"output": tmp_path / "out", "errors": tmp_path / "err"}
    with agent() as port:
        each = [torchrun_variables(rank, 2, port) for rank in range(2)]
        ranks = [programs.start(SCRIPT, "end of ranks", tmp_path, **to, **env) for env in each]
        codes = [one.wait(60) for one in ranks]
    assert (codes, (tmp_path / "err").read_text()) == ([0, 0], "")


STOPPED = """
import os, signal, time, pardata
from datetime import timedelta

pardata.store._client._MARGIN = 0.5
pardata.process_group._shutdown._LINGER = timedelta(seconds=0.5)
here = pardata.init(timeout=600)
host = pardata.broadcast(os.getpid())
if here.rank == 0:
    time.sleep(600)
os.kill(host, signal.SIGSTOP)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process by SIGSTOP")
def test_a_rank_ends_though_the_process_of_the_store_is_stopped(programs, tmp_path):
    with reserved_port() as port:
        _stopped, other = (
            programs.start(STOPPED, output=tmp_path / str(rank), **slurm_variables(rank, 2, port))
            for rank in range(2)
        )
        assert other.wait(60) == 0
