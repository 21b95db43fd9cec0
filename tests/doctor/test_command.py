"""`python -m pardata env` and `check`, as people, programs and launchers start them."""

import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import re

import pytest
import torch
from forked import python
from launched import launched, reserved_port, slurm_variables, torchrun_variables
from processes import run

from pardata.__main__ import main, report

COMMAND = "import runpy; runpy.run_module('pardata', run_name='__main__', alter_sys=True)"
TRIAL = ["all-reduce", "shared memory", "latency", "bandwidth"]


def statuses(text):
    """Return the status of each line of a printed report, by name."""
    lines = re.findall(r"^(ok|warning|error) +(.*?)  +", text, flags=re.MULTILINE)
    return {name: status for status, name in lines}


# --- alone


def test_alone_env_finds_a_machine_on_which_pardata_works():
    out = run(python(), "-W", "error", "-m", "pardata", "env")
    assert out.startswith("ok       launcher       none: a single process\n")
    assert {"GPUs", "cores", "threads", "open files", "versions"} <= set(statuses(out))
    assert "error" not in statuses(out).values()


def test_alone_check_tries_two_processes(capsys):
    assert report("check", 100) == 0
    out = capsys.readouterr().out
    assert list(statuses(out)) == ["joining", "rank 0", "rank 1", *TRIAL]
    assert "\nok       all-reduce     correct\n" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "torchrun --standalone --nproc-per-node=2 -m pardata check"),
        ([], 2, "the following arguments are required: command"),
        (["look"], 2, "invalid choice: 'look'"),
        (["env", "--timeout", "0"], 2, "a number of seconds above 0, up to a day, but is 0"),
        (["env", "--timeout", "86401"], 2, "up to a day, but is 86401"),
        (["env", "--timeout", "soon"], 2, "invalid float value: 'soon'"),
    ],
)
def test_the_help_has_examples_and_a_wrong_command_line_is_refused(arguments, code, says, capsys):
    with pytest.raises(SystemExit) as ended_with:
        main(arguments)
    assert ended_with.value.code == code
    assert says in "".join(capsys.readouterr())


def test_whatever_hangs_ends_some_time_after_the_timeout(monkeypatch, capsys):
    asked = []
    note = lambda seconds, **options: asked.append((seconds, options))  # noqa: E731  # a short one
    monkeypatch.setattr(faulthandler, "dump_traceback_later", note)
    assert main(["env", "--timeout", "20", "--json"]) == 0
    assert asked == [(55, {"exit": True})]
    assert capsys.readouterr().out.startswith("{")


def test_json_is_one_object_for_programs(monkeypatch, capsys):
    assert report("env", 60, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["launcher"]["status"] == "ok"
    assert told["launcher"]["text"] == "none: a single process"
    monkeypatch.setenv("RANK", "0")
    assert report("env", 60, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["env"]["status"] == "error"


# --- under a launcher


def called(command):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = report(command, 60)
    return status, printed.getvalue()


@pytest.mark.parametrize(
    ("command", "size", "variables", "name"),
    [
        ("env", 3, torchrun_variables, "torchrun"),
        ("check", 2, slurm_variables, "SLURM"),
        ("check", 3, torchrun_variables, "torchrun"),
    ],
)
def test_rank_0_prints(command, size, variables, name):
    (status, text), *others = launched(called, command, size=size, variables=variables)
    assert status == 0
    assert others == [(0, "")] * (size - 1)
    assert "error" not in statuses(text).values()
    if command == "env":
        assert text.startswith(f"ok       launcher       {name}: {size} processes, to meet at ")
        return
    assert list(statuses(text)) == ["joining", *(f"rank {rank}" for rank in range(size)), *TRIAL]
    assert f"joining        {size} ranks met, backend gloo\n" in text
    rows = re.findall(r"rank (\d) +\S+, node 0, local rank (\d), cpu, cores: \d+\n", text)
    assert rows == [(str(rank), str(rank)) for rank in range(size)]


def spoilt_on_rank_1(what):
    if os.environ["RANK"] == "1":
        what()
    return called("check")


def add_wrongly():
    """Be a machine that adds wrongly."""
    right = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        result = right(tensor, *args, **kwargs)
        tensor[...] = torch.where(tensor == 3, 4.0, tensor)
        return result

    torch.distributed.all_reduce = all_reduce


def have_a_long_tmpdir():
    multiprocessing.current_process()._config["tempdir"] = "/" + "x" * 120


TRIALS = [(add_wrongly, "the sum over all ranks must be 3, but is 4 on rank 1: take its host out")]
if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # which opens a socket
    TRIALS.append((have_a_long_tmpdir, "the temporary directory must have a name of at most"))


@pytest.mark.parametrize(("what", "says"), TRIALS)
def test_an_error_on_one_rank_is_said_on_every_rank(what, says):
    for status, text in launched(spoilt_on_rank_1, what, size=2):
        assert status == 1
        assert says in text


# --- where it does not work


def test_variables_that_are_partial_are_explained(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert report("check", 60) == 1
    out = capsys.readouterr().out
    assert out.startswith("error    check          the variables of torchrun must be set together")
    assert "start the script with the launcher itself" in out


def started(programs, folder, *arguments, **env):
    """Start the command, and return what waits for its end: status and output."""
    job = programs.start(COMMAND, *arguments, output=folder, **env)
    return lambda: (job.wait(), folder.read_text())


def test_a_rank_that_does_not_come_is_named_by_the_others_within_the_timeout(programs, tmp_path):
    with reserved_port() as port:
        own = {"TORCHELASTIC_USE_AGENT_STORE": None}
        both = [(tmp_path / str(n), torchrun_variables(n, 3, port, **own)) for n in range(2)]
        ends = [started(programs, file, "check", "--timeout", "5", **env) for file, env in both]
        outcomes = [end() for end in ends]
    for code, out in outcomes:
        assert code == 1
        assert "`init` must be reached by every rank, but rank 2 of 3 did not come within" in out
        assert "look at the output of rank 2" in out
        assert "Traceback" not in out


@pytest.mark.parametrize(
    ("interface", "timeout", "text"),
    [
        ("no-such-one", 100, "no-such-one"),
        ("", 0.01, "all 2 ranks must finish within 0.01 s, but rank "),
    ],
)
def test_two_processes_that_cannot_talk_or_take_too_long_are_an_error(
    interface, timeout, text, monkeypatch, capsys
):
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert report("check", timeout) == 1
    (line,) = capsys.readouterr().out.splitlines()  # no stack of a process
    assert line.startswith("error    check          ")
    assert text in line
