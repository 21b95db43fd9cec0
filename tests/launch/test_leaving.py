"""Who has left the group comes no more: whoever waits for it is told at once."""

import contextlib
import time

import pytest
from launched import agent, torchrun_variables

SCRIPT = """
import sys, pardata

how, bad = sys.argv[1], int(sys.argv[2])
with pardata.init(timeout=100) as here:
    pardata.barrier("all are there")
    if here.rank == bad and how == "exit":
        sys.exit(0)
    if here.rank != bad:
        CALL
"""
# A turn of all ranks, and one that only rank 0 ends, for which the others wait for hours.
CALLS = {"barrier('end')": [0, 2], "rank_zero_call(max)": [0]}
RUNS = [
    (call, bad, how)
    for number, (call, ranks) in enumerate(CALLS.items())
    for bad in ranks
    for how in ("end", "exit")[number:]
]


@pytest.mark.parametrize(("call", "bad", "how"), RUNS)
def test_who_waits_for_a_rank_that_has_ended_well_is_told_at_once(
    call, bad, how, programs, tmp_path
):
    code = SCRIPT.replace("CALL", f"pardata.{call.replace('(max)', '(max, 1, 2)')}")
    with contextlib.ExitStack() as stack:
        port, began, ranks = stack.enter_context(agent()), time.monotonic(), []
        for rank in range(3):
            env = torchrun_variables(rank, 3, port)
            ranks.append(programs.start(code, how, bad, output=tmp_path / str(rank), **env))
        codes = [each.wait(60) for each in ranks]
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert codes == [int(rank != bad) for rank in range(3)], texts
    assert time.monotonic() < began + 50  # half of the timeout
    for rank in {0, 1, 2} - {bad}:
        assert f"`{call}`" in texts[rank]
        assert f"rank {bad} of 3 has left the group: see where its script ends" in texts[rank]


CAUGHT = """
import logging, sys, torch, pardata

logging.basicConfig(format="%(message)s")
how = sys.argv[1]
if how == "adopted":
    torch.distributed.init_process_group("gloo")
try:
    with pardata.init(timeout=100) as here:
        pardata.barrier("all are there")
        if here.rank == 1:
            raise ValueError("boom")
        pardata.barrier("end") if here.rank else pardata.all_reduce_mean(1.0)
except BaseException as error:
    print("caught", type(error).__name__)
    if how == "another":
        raise RuntimeError("the run has failed") from error
    sys.exit(int(how == "exit"))
"""


@pytest.mark.parametrize("how", ["made", "adopted", "another", "exit"])
def test_an_exception_that_is_caught_outside_of_the_block_is_told_at_once(how, programs, tmp_path):
    with contextlib.ExitStack() as stack:
        port, began, ranks = stack.enter_context(agent()), time.monotonic(), []
        for rank in range(3):
            env = torchrun_variables(rank, 3, port)
            ranks.append(programs.start(CAUGHT, how, output=tmp_path / str(rank), **env))
        codes = [each.wait(60) for each in ranks]
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert codes == [int(how in ("another", "exit"))] * 3, texts
    assert time.monotonic() < began + 50  # half of the timeout
    for rank, text in enumerate(texts):
        first = "failed because rank 1 failed first: ValueError: boom (train.py:12)"
        assert f"[{rank}/3] {first if rank != 1 else 'failed: ValueError: boom'}" in text
        assert ("caught RuntimeError" in text) == (rank != 1)
        said = [line for line in text.splitlines() if line.startswith(f"[{rank}/3] failed")]
        assert len(said) == 1 + (how == "another"), text
