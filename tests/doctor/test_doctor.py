"""`python -m pardata env` and `check`, as people, pipes and launchers start them."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
import torch
from launched import agent, launched, reserved_port, slurm_variables, torchrun_variables

from pardata.__main__ import parse
from pardata.doctor._examination import examine

COMMAND = [sys.executable, "-W", "error", "-m", "pardata"]


def started(*arguments, **env):
    """Start the command as a process and return it."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Return exit status, output and errors; the process does not outlive this."""
    try:
        out, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, errors


def statuses(text):
    """Return the status of each finding of a printed report."""
    lines = re.findall(r"^(ok|warning|error) +(.*?)  +", text, flags=re.MULTILINE)
    return {name: status for status, name in lines}


# --- alone


def test_alone_both_commands_find_a_machine_on_which_pardata_works():
    people, machines = started("env"), started("check", "--json")
    code, out, errors = ended(people)
    assert (code, errors) == (0, "")
    assert out.startswith("pardata env: one process on ")
    assert "\nok       launcher       none: a single process\n" in out
    assert {"GPUs", "cores", "threads", "versions", "backends"} <= set(statuses(out))
    assert "\033" not in out
    assert max(map(len, out.splitlines())) <= 100
    code, out, errors = ended(machines)
    assert (code, errors) == (0, "")
    report = json.loads(out)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["command"] == "check"
    assert found["sum"]["status"] == found["broadcast"]["status"] == "ok"
    assert 0 < found["latency"]["value"] < 60
    assert found["bandwidth"]["value"] > 0
    # What `env` would have found is said only where it is not as it should be.
    assert not [f for f in report["findings"] if f["name"] == "versions" and f["status"] == "ok"]


def test_the_help_explains_with_examples(capsys):
    with pytest.raises(SystemExit) as ended_with:
        parse(["--help"])
    assert ended_with.value.code == 0
    out = capsys.readouterr().out
    assert "torchrun --standalone --nproc-per-node=2 -m pardata check" in out
    assert "exit status: 0 where all is well" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: command"),
        (["look"], "invalid choice: 'look'"),
        (["env", "--timeout", "0"], "a number of seconds above 0, up to a day, but is '0'"),
        (["env", "--timeout", "86401"], "up to a day, but is '86401'"),
        (["env", "--timeout", "nan"], "up to a day, but is 'nan'"),
        (["env", "--timeout", "soon"], "up to a day, but is 'soon'"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended_with:
        parse(arguments)
    assert ended_with.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_command_line_says_what_to_do_and_for_how_long():
    assert vars(parse(["env"])) == {"command": "env", "json": False, "timeout": 60.0}
    chosen = vars(parse(["check", "--json", "--timeout", "86400"]))
    assert chosen == {"command": "check", "json": True, "timeout": 86400.0}


def test_importing_pardata_imports_nothing_of_the_doctor():
    code = "import sys, pardata; print([m for m in sys.modules if 'pardata._d' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pardata.model._dp" in done.stdout  # of what is imported
    assert "doctor" not in done.stdout


# --- under a launcher


def _examined(command, **options):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = examine(command, timeout=60, as_json=False, **options)
    return status, printed.getvalue()


@pytest.mark.parametrize(
    ("command", "size", "variables", "name"),
    [
        ("env", 1, torchrun_variables, "torchrun"),
        ("env", 3, torchrun_variables, "torchrun"),
        ("check", 2, slurm_variables, "SLURM"),
    ],
)
def test_rank_0_prints_one_table_of_all_ranks(command, size, variables, name):
    outcomes = launched(_examined, command, size=size, variables=variables)
    assert [outcome[0] for outcome in outcomes] == [0] * size
    (_, text), *others = outcomes
    assert [printed for _, printed in others] == [""] * (size - 1)
    assert f"launcher       {name}: {size} process" in text
    assert "error" not in statuses(text).values()
    if size > 1:
        assert text.startswith(f"pardata {command}: {size} ranks on ")
        rows = re.findall(r"^ +(\d+)  \S+ +0 +(\d+)  cpu +\d+$", text, flags=re.MULTILINE)
        assert rows == [(str(rank), str(rank)) for rank in range(size)]
        assert f"joining        {size} ranks on 1 host met at " in text
    if command == "check":
        assert statuses(text)["sum"] == statuses(text)["shared memory"] == "ok"


def _env_with_a_long_tmpdir_on_rank_1():
    if os.environ["RANK"] == "1":
        multiprocessing.current_process()._config["tempdir"] = "/" + "x" * 120
    return _examined("env")


@pytest.mark.skipif(
    torch.multiprocessing.get_sharing_strategy() != "file_descriptor", reason="opens no socket"
)
def test_an_error_on_one_rank_is_the_exit_status_of_every_rank():
    outcomes = launched(_env_with_a_long_tmpdir_on_rank_1, size=2)
    assert [status for status, _ in outcomes] == [1, 1]
    assert "error    sockets        rank 1: the temporary directory" in outcomes[0][1]


def test_torchrun_itself_starts_it(short_tmp):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "pardata", "check", "--json"],
        env={**os.environ, "TMPDIR": short_tmp},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one document, and nothing else
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    assert len({row["pid"] for row in report["ranks"]}) == 2
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["sum"]["ranks"] == [0, 1]
    assert found["latency"]["ranks"] == [0]


# --- where it does not work


def test_variables_that_are_partial_are_explained_to_whoever_looks():
    code, out, errors = ended(started("check", RANK="1"))
    assert (code, errors) == (1, "")
    assert statuses(out) == {"launcher": "error", "variables": "ok"} | {
        name: status for name, status in statuses(out).items() if status == "warning"
    }
    assert "the variables of torchrun must be set together" in out
    assert "cure: start the script with the launcher itself" in out
    assert out.endswith("1 error\n") or "1 error and" in out


def test_a_rank_that_does_not_come_is_named_by_the_others_within_the_timeout():
    with reserved_port() as port:
        ranks = [started("env", "--timeout", "12", **torchrun_variables(
            rank, 3, port, TORCHELASTIC_USE_AGENT_STORE=None)) for rank in (0, 1)]  # fmt: skip
        (code, out, errors), (other_code, other_out, other_errors) = map(ended, ranks)
    assert (code, errors, other_code, other_out) == (1, "", 1, "")
    assert out.startswith("pardata env: rank 0 of 3 on ")
    assert "`init` must be reached by every rank, but rank 2 of 3 did not come within" in out
    assert "cure: look at the output of rank 2" in out
    assert re.search(r"rank 1 on \S+: joining: .* rank 2 of 3 did not come", other_errors)
    assert "Traceback" not in other_errors


@pytest.mark.parametrize(
    ("changes", "problem", "cure"),
    [
        (
            {"MASTER_ADDR": "no-such-host.invalid"},
            "rank 1 must reach no-such-host.invalid:",
            "set MASTER_ADDR to a name or an address",
        ),
        ({}, "rank 1 must reach 127.0.0.1:", "nobody listens there: see whether rank 0"),
    ],
)
def test_a_store_that_cannot_be_reached_is_told_in_one_line(changes, problem, cure):
    with reserved_port() as port:
        env = torchrun_variables(1, 2, port, TORCHELASTIC_USE_AGENT_STORE=None) | changes
        code, out, errors = ended(started("check", "--timeout", "1", **env))
    assert (code, out) == (1, "")
    (line,) = errors.splitlines()
    assert re.match(r"pardata check, rank 1 on \S+: joining: ", line)
    assert problem in line
    assert cure in line


STOPS = """
import os, sys, time, pardata
pardata.init(tune_cpu=False)
print("joined", flush=True)
time.sleep(float(sys.argv[1]))
os._exit(1)
"""


@pytest.mark.parametrize("seconds", [0, 90])
def test_a_rank_that_dies_or_hangs_after_joining_is_an_error_and_no_hang(seconds):
    with agent() as port:
        other = subprocess.Popen(
            [sys.executable, "-c", STOPS, str(seconds)],
            env={**os.environ, **torchrun_variables(1, 2, port)},
            stdout=subprocess.DEVNULL,
        )
        try:
            env = torchrun_variables(0, 2, port)
            code, out, _ = ended(started("check", "--timeout", "12", **env))
        finally:
            other.kill()
            other.wait()
    assert code == 1
    assert statuses(out)["joining"] == "ok"
    assert statuses(out)["trial"] == "error"
    assert "all_reduce_sum" in out
    assert "Traceback" not in out
