"""One rank fails, hangs or strays: every other one ends by itself, and says which rank and where.

Real processes with torchrun's variables. With ``-m soak`` it prints the rows of the table in
``reliability.md``, next to this file.
"""

import os
import re
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched import agent, reserved_port, torchrun_variables

SCRIPT = Path(__file__).parent / "one_rank.py"
TIMEOUT = 5.0  # seconds: of the group
NEVER = 100.0  # … that no fault of QUICK waits for, however busy the machine
LATE = 20.0  # seconds that a busy machine may take to notice and to end
# Where the fault can be seen at once, and where only the group's timeout shows it.
SOON, IN_TIME = LATE, TIMEOUT + LATE
UNANSWERED = 20.0  # seconds of two requests to a store that does not answer
SIZE = 3


@dataclass(frozen=True)
class Fault:
    """What one rank does.

    Attributes:
        name: by which the script knows it.
        done: what the table says.
        bound: seconds from the fault until every other rank has ended.
        says: what every other rank must say: <C> is the culprit and <O> another.
        ends: whether the culprit ends by itself too.
        serves: whether the group's store is that of rank 0, as under SLURM, and not torchrun's.
        culprits: who does it.
    """

    name: str
    done: str
    bound: float
    says: str
    ends: bool = True
    serves: bool = False
    culprits: tuple[int, ...] = (0, SIZE - 1)


@dataclass(frozen=True)
class Said:
    """How one rank ended."""

    rank: int
    code: int
    seconds: float
    line: str
    output: str


FAILED_FIRST = r"rank <C> of 3 failed first: OSError: the disk is on fire \(\S*one_rank\.py:\d+\)"
EXITED = r"rank <C> of 3 failed first: SystemExit: 3 \(\S*one_rank\.py:\d+\)"
DID_NOT_COME = (
    r"`backward` must be reached by every rank, but ranks? (<O>, )?<C>(, <O>)? of 3 did not come"
)
# A row of a table: on a line of its own, or in the one line that a rank logs.
ROW = r"(.*\n)*?.*(rank <C>: .*{0}|{0}[^,]* on rank <C>)"
DIFFER = r"every rank must pass the same to `{0}`, but {1} differs?:" + ROW.format("{2}")
STORE_IS_GONE = r"the (process that serves the )?group's store"

FAULTS = [
    Fault("raises", "raises an `OSError`", SOON, FAILED_FIRST),
    Fault("exits", "calls `sys.exit(3)`", SOON, EXITED),
    Fault("sleeps", "sleeps without end", IN_TIME, DID_NOT_COME, ends=False),
    Fault("stopped", "gets SIGSTOP", IN_TIME, DID_NOT_COME, ends=False),
    Fault("killed", "gets SIGKILL", IN_TIME, DID_NOT_COME),
    Fault("dead worker", "loses a DataLoader worker by SIGKILL", IN_TIME,
          r"rank <C> of 3 failed first: (RuntimeError: DataLoader worker .* (is killed by signal|"
          r"exited unexpectedly)"
          r"|ConnectionResetError|EOFError)"),  # the last two while it hands over a batch
    Fault("shorter data", "has a shorter dataset", SOON,
          DIFFER.format("make_loader", "`the length`", "95")),
    Fault("seed", "passes another seed", SOON, DIFFER.format("make_loader", "`seed`", "5")),
    Fault("model", "has another model", SOON,
          DIFFER.format("wrap_model", "`weight`, `bias`", r"weight='0: \(3, 2\) torch.float32")),
    Fault("shorter stream", "has a shorter iterable dataset", SOON,
          "they ended on rank <C> of 3 before the others"),
    Fault("other weights", "changes a weight", IN_TIME,
          r"`weight` differs between ranks \(1 of " + ROW.format("SHA-256 ")),
    Fault("other structure", "reduces another structure", SOON,
          DIFFER.format("all_reduce_mean", "`structure`", "top1")),
    Fault("other order", "gathers before it reduces, the others after", SOON,
          r"the same calls in the same order, but here:" + ROW.format("all_gather")),
    Fault("one more barrier", "waits at a barrier", IN_TIME, DID_NOT_COME),
    Fault("one more save", "saves a checkpoint", IN_TIME, DID_NOT_COME),
    Fault("one more reduce", "reduces once more", IN_TIME, DID_NOT_COME),
    Fault("one more backward", "calls `backward` once more", IN_TIME,
          r"`(check_in_sync|rank_zero_call\(min\))` must be reached by every rank, "
          "but rank <C> of 3 (did not come|has)"),
    Fault("one more rank_zero_call", "calls `rank_zero_call` once more", IN_TIME, DID_NOT_COME),
    Fault("break", "leaves the loop by `break`", IN_TIME, DID_NOT_COME),
    *[
        Fault(name, f"{done}, and serves the store", bound, says, name != "stopped", True, (0,))
        for name, done, bound, says in [
            ("raises", "raises an `OSError`", IN_TIME, f"{FAILED_FIRST}|{STORE_IS_GONE}"),
            ("exits", "calls `sys.exit(3)`", IN_TIME, f"{EXITED}|{STORE_IS_GONE}"),
            ("stopped", "gets SIGSTOP", IN_TIME + UNANSWERED, STORE_IS_GONE),
            ("killed", "gets SIGKILL", IN_TIME, STORE_IS_GONE),
        ]
    ],
]  # fmt: skip
# Those of which the others hear at once, however long the timeout.
QUICK = [("raises", 0), ("killed", 2), ("other structure", 0)]
ROWS = [(fault, culprit) for fault in FAULTS for culprit in fault.culprits]


def run(programs, fault, culprit, timeout=TIMEOUT, size=SIZE):
    """Let one rank of `size` do it; return how each ended."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(reserved_port() if fault.serves else agent())
        own = {"TORCHELASTIC_USE_AGENT_STORE": None if fault.serves else "True"}
        ranks = []
        for rank in range(size):
            variables = torchrun_variables(rank, size, port, **own)
            file = directory / f"output-{rank}"
            job = SCRIPT, fault.name, culprit, directory, timeout
            ranks.append(programs.start(*job, output=file, **variables))
            stack.callback(ranks[-1].kill)
        waiting = {rank for rank in range(size) if rank != culprit or fault.ends}
        ended = {}
        deadline = time.monotonic() + 120
        while waiting - ended.keys() and time.monotonic() < deadline:
            for rank in waiting - ended.keys():
                if ranks[rank].poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.02)
        began = float((directory / "fault").read_text())
        said = []
        for rank in sorted(ended):
            output = (directory / f"output-{rank}").read_text()
            code, seconds = ranks[rank].poll(), ended[rank] - began
            said.append(Said(rank, code, seconds, line_of(output), output))
            assert_nothing_is_left_of(ranks[rank].pid)
        assert ended.keys() == waiting, f"{waiting - ended.keys()} did not end: {said}"
        return said


def assert_nothing_is_left_of(pid):
    """Show that the workers of a rank end with it."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.05)
        pytest.fail(f"something that rank {pid} started is still there")


def line_of(output):
    """Return the line in which a rank says why it failed."""
    lines = output.splitlines()
    said = [line for line in lines if re.match(r"\[\d/\d\] failed", line)]
    return (said or lines or [""])[-1]


def check(fault, culprit, said):
    """Show that every other rank ended in time, and said which rank it was and where."""
    for each in said:
        if each.rank == culprit:
            continue
        assert each.code not in (0, None), each
        assert each.seconds < fault.bound, each
        pattern = fault.says.replace("<C>", str(culprit)).replace("<O>", r"\d")
        assert re.search(pattern, untagged(each.output)), each.output
        assert re.search(r"one_rank\.py:\d+", each.line), each.output


def untagged(output):
    """Return a rank's output without what torch puts before each line of a traceback."""
    return re.sub(r"^\[rank\d\]: ?", "", output, flags=re.MULTILINE)


def test_a_fault_of_one_rank_ends_the_others_and_names_it(programs):
    rows = [row for row in ROWS if (row[0].name, row[1]) in QUICK and not row[0].serves]
    assert len(rows) == len(QUICK)
    for row in rows:
        check(*row, run(programs, *row, NEVER))


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "culprit"), ROWS)
def test_every_fault_of_one_rank_ends_the_others_and_names_it(fault, culprit, programs, capsys):
    said = run(programs, fault, culprit)
    with capsys.disabled():
        print(f"\n{table_row(fault, culprit, said)}")
    check(fault, culprit, said)


def table_row(fault, culprit, said):
    """Return a row of the table: what was done, by whom, how long it took, and how all ended."""
    others = [each for each in said if each.rank != culprit]
    codes = {each.rank: str(each.code) for each in said}
    lines = "<br>".join(dict.fromkeys(shown(each.line) for each in others))
    return (
        f"| {fault.done} | {culprit} | {max(each.seconds for each in others):.1f} | "
        f"{', '.join(codes.get(rank, '(stays)') for rank in range(SIZE))} | {lines} |"
    )


def shown(line):
    line = re.sub(r"^\[\d/\d\] ", "", line)
    return re.sub(r"[\w./-]*one_rank\.py", "train.py", line).replace("|", "\\|")
