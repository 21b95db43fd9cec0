"""Who has left the group comes no more: whoever waits for it is told at once."""

import contextlib

from launched import agent, reserved_port, slurm_variables, torchrun_variables

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
RUNS = [
    ("barrier('end')", 0, "end", torchrun_variables, HAS_LEFT),
    ("barrier('end')", 2, "exit", torchrun_variables, HAS_LEFT),
    ("rank_zero_call(max)", 0, "exit", torchrun_variables, HAS_LEFT),
    ("all_reduce_sum(1)", 0, "exit", slurm_variables, "rank {} of 3 did not come"),
]


def run_all(programs, folder, runs):
    """Run scripts on three ranks each, all at once; return exit codes and texts for each."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for number, (code, variables, *arguments) in enumerate(runs):
            meeting = agent() if variables is torchrun_variables else reserved_port()
            port = stack.enter_context(meeting)
            for rank in range(3):
                env, output = variables(rank, 3, port), folder / f"{number}-{rank}"
                ranks.append((programs.start(code, *arguments, output=output, **env), output))
        # Half of the groups' timeout.
        ended = [(each.wait(100), output.read_text()) for each, output in ranks]
    return [tuple(zip(*ended[at : at + 3], strict=True)) for at in range(0, len(ended), 3)]


def test_who_waits_for_a_rank_that_has_ended_well_is_told_at_once(programs, tmp_path):
    scripts = []
    for call, bad, how, variables, _ in RUNS:
        made = f"pardata.{call.replace('(max)', '(max, 1, 2)')}"
        scripts.append((SCRIPT.replace("CALL", made), variables, how, bad))
    found = run_all(programs, tmp_path, scripts)
    for (call, bad, *_, says), (codes, texts) in zip(RUNS, found, strict=True):
        assert codes == tuple(int(rank != bad) for rank in range(3)), texts
        for rank in {0, 1, 2} - {bad}:
            assert f"`{call.removesuffix('(1)')}`" in texts[rank]
            assert says.format(bad) in texts[rank]


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
        pardata.barrier("end") if here.rank else pardata.all_reduce_mean(1.0)
except BaseException as error:
    print("caught", type(error).__name__)
    if how == "another":
        raise RuntimeError("the run has failed") from error
    sys.exit(int(how == "exit"))
"""


def test_an_exception_that_is_caught_outside_of_the_block_is_told_at_once(programs, tmp_path):
    hows = ("made", "adopted", "another", "exit")
    found = run_all(programs, tmp_path, [(CAUGHT, torchrun_variables, how) for how in hows])
    first = "failed because rank 1 failed first: ValueError: boom (train.py:12)"
    for how, (codes, texts) in zip(hows, found, strict=True):
        assert codes == (int(how in ("another", "exit")),) * 3, texts
        for rank, text in enumerate(texts):
            assert f"[{rank}/3] {first if rank != 1 else 'failed: ValueError: boom'}" in text
            assert ("caught RuntimeError" in text) == (rank != 1)
            said = [line for line in text.splitlines() if line.startswith(f"[{rank}/3] failed")]
            assert len(said) == 1, text  # also where another exception ends the script


WORKS = """
import time, pardata
from datetime import timedelta

pardata.process_group._shutdown._LINGER = timedelta(seconds=1)
with pardata.init(timeout=200) as here:
    pardata.barrier("the last call of all")
    time.sleep(4 * here.rank)  # rank 0 is gone by now, and the store with it
"""


def test_a_rank_that_works_on_after_rank_0_has_finished_is_no_failure(programs, tmp_path):
    with reserved_port() as port:
        ranks = []
        for rank in range(2):
            env, output = slurm_variables(rank, 2, port), tmp_path / str(rank)
            ranks.append((programs.start(WORKS, output=output, **env), output))
        for each, output in ranks:
            assert each.wait(100) == 0
            assert "/2] " not in output.read_text()  # torch itself warns that the store is gone
