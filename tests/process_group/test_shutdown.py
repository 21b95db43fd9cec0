"""Who has left the group comes no more: whoever waits for it is told at once."""

import re

from common_launch import run_all
from launched import slurm_variables, torchrun_variables

SCRIPT = """
import sys, pardata

how, bad = sys.argv[1], int(sys.argv[2])
with pardata.init(timeout=200) as here:
    pardata.barrier("all are there")
    if here.rank == bad and how == "exit":
        sys.exit(0)
    if here.rank != bad:
        CALL
"""
# The call of those that wait, which rank has left, and how: at its script's end, or by an exit.
# Only rank 0 ends the third call, for which the others wait for hours. In the last run it serves
# the store, which stays until they have ended.
HAS_LEFT = "rank {} of 3 has left the group: see where its script ends"
# On a busy machine the third rank may see only later that its connection is lost.
NOT_COME = r"(rank {0}|ranks {0}, \d) of 3 did not come"
RUNS = [
    ("barrier('end')", 0, "end", torchrun_variables, HAS_LEFT),
    ("barrier('end')", 2, "exit", torchrun_variables, HAS_LEFT),
    ("rank_zero_call(max)", 0, "exit", torchrun_variables, HAS_LEFT),
    ("all_reduce_sum(1)", 0, "exit", slurm_variables, NOT_COME),
]


def test_ranks_that_wait_for_an_ended_rank_raise_at_once(programs, tmp_path):
    scripts = {}
    for number, (call, bad, how, variables, _) in enumerate(RUNS):
        made = f"pardata.{call.replace('(max)', '(max, 1, 2)')}"
        scripts[str(number)] = SCRIPT.replace("CALL", made), variables, how, bad
    found = run_all(programs, tmp_path, scripts).values()
    for (call, bad, *_, says), ranks in zip(RUNS, found, strict=True):
        for rank, (code, text, _) in enumerate(ranks):
            assert code == int(rank != bad), text
            if rank != bad:
                assert f"`{call.removesuffix('(1)')}`" in text
                assert re.search(says.format(bad), text), text


CAUGHT = """
import logging, sys, torch, pardata

logging.basicConfig(format="%(message)s")
how = sys.argv[1]
if how == "adopted":
    torch.distributed.init_process_group("gloo")
try:
    with pardata.init(timeout=200) as here:
        pardata.barrier("all are there")
        if here.rank == 1:
            raise ValueError("boom")
        pardata.all_reduce_mean(1.0)
except BaseException as error:
    print("caught", type(error).__name__)
    if how == "another":
        raise RuntimeError("the run has failed") from error
    sys.exit(int(how == "exit"))
"""


def test_an_exception_caught_outside_the_block_is_reported_at_once(programs, tmp_path):
    hows = ("made", "adopted", "another", "exit")
    runs = {how: (CAUGHT, torchrun_variables, how) for how in hows}
    found = run_all(programs, tmp_path, runs, size=2)
    first = "failed because rank 1 failed first: ValueError: boom (train.py:12)"
    for how, ranks in found.items():
        for rank, (code, text, _) in enumerate(ranks):
            assert code == int(how in ("another", "exit")), text
            assert f"[{rank}/2] {first if rank != 1 else 'failed: ValueError: boom'}" in text
            assert ("caught RuntimeError" in text) == (rank != 1)
            # Once, also where another exception ends the script.
            assert text.count(f"[{rank}/2] failed") == 1, text
