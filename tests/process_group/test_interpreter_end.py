"""At the end of an interpreter pardata says nothing, however a script ends and whatever is open."""

import re

import pytest
from launched import agent, torchrun_variables

# What is open when the script ends: in a global, and in the frame of an exception.
SCRIPT = """
import sys, time, torch, pardata

what, ending, folder = sys.argv[1:]

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

def watching():
    here = pardata.init(hang_after=30)
    pardata.barrier()
    return here

OPEN = {
    "epoch": lambda: begun(loader(0)),
    "epochs": lambda: begun(loader(0).epochs(3)),
    "workers": lambda: begun(loader(2)),
    "save": saving,
    "bar": lambda: begun(pardata.progress(range(10))),
    "writer": writing,
    "stop": lambda: pardata.StopSignal().__enter__(),
    "watch": watching,
}

def main():
    held = [OPEN[name]() for name in what.split("+")]
    held.append(held)
    if ending == "exit":
        sys.exit(0)
    if ending == "raise":
        raise ValueError("boom")
    return held

held = main()
"""
ALONE = ["epoch+epochs+bar", "workers", "save+writer+stop"]
TOGETHER = ["watch", "watch+epoch+workers+save+bar+writer+stop"]
OWN = r"Traceback \(most recent call last\):\n(  .*\n)+ValueError: boom\n"


@pytest.mark.parametrize("ending", ["end", "exit", "raise"])
@pytest.mark.parametrize("what", ALONE)
def test_a_process_says_nothing_of_what_is_open(what, ending, programs, tmp_path):
    to = {"output": tmp_path / "out", "errors": tmp_path / "err"}
    assert programs.start(SCRIPT, what, ending, tmp_path, **to).wait(60) == (ending == "raise")
    text = (tmp_path / "err").read_text()
    assert re.fullmatch(OWN, text) if ending == "raise" else text == "", text


@pytest.mark.parametrize("ending", ["end", "exit"])
@pytest.mark.parametrize("what", TOGETHER)
def test_nor_do_ranks(what, ending, programs, tmp_path):
    with agent() as port:
        ranks = [
            programs.start(
                SCRIPT, what, ending, tmp_path, output=tmp_path / "out",
                errors=tmp_path / "err", **torchrun_variables(rank, 2, port),
            )
            for rank in range(2)
        ]  # fmt: skip
        codes = [each.wait(60) for each in ranks]
    assert (codes, (tmp_path / "err").read_text()) == ([0, 0], "")
