"""`python -m pardata env` and `check`, as people, programs and launchers start them."""

import contextlib
import faulthandler
import io
import json
import os
import re

import pytest
import torch
from forked import python
from launched import launched, reserved_port, torchrun_variables
from processes import run

from pardata.__main__ import main, report

COMMAND = "import runpy; runpy.run_module('pardata', run_name='__main__', alter_sys=True)"
TRIAL = ["all-reduce", "latency", "bandwidth"]


def statuses(text):
    """Return the status of each line of a printed report, by name."""
    lines = re.findall(r"^(ok|warning|error) +(.*?)  +", text, flags=re.MULTILINE)
    return {name: status for status, name in lines}


# --- alone


def test_alone_env_finds_a_machine_on_which_pardata_works():
    out = run(python(), "-W", "error", "-m", "pardata", "env")
    assert out.startswith("ok       launcher       none: a single process\n")
    assert {"GPUs", "cores", "open files", "versions"} <= set(statuses(out))
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
        (["look"], 2, "invalid choice: 'look'"),
    ],
)
def test_the_help_has_examples_and_a_wrong_command_line_is_refused(arguments, code, says, capsys):
    with pytest.raises(SystemExit) as ended_with:
        main(arguments)
    assert ended_with.value.code == code
    assert says in "".join(capsys.readouterr())


def test_whatever_hangs_ends_some_time_after_the_timeout(monkeypatch):
    asked = []
    note = lambda seconds, **options: asked.append((seconds, options))  # noqa: E731  # a short one
    monkeypatch.setattr(faulthandler, "dump_traceback_later", note)
    assert main(["env", "--timeout", "20"]) == 0
    assert asked == [(55, {"exit": True})]


# --- under a launcher


def called(command):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = report(command, 60)
    return status, printed.getvalue()


# Of SLURM: tests/launchers/test_slurm.py.
@pytest.mark.parametrize("command", ["env", "check"])
def test_rank_0_prints(command):
    (status, text), *others = launched(called, command, size=3)
    assert (status, others) == (0, [(0, "")] * 2)
    assert "error" not in statuses(text).values()
    if command == "env":
        assert text.startswith("ok       launcher       torchrun: world size 3, to meet at ")
        return
    assert list(statuses(text)) == ["joining", *(f"rank {rank}" for rank in range(3)), *TRIAL]
    assert "joining        3 ranks met, backend gloo\n" in text
    rows = re.findall(r"rank (\d) +\S+, node 0, local rank (\d), cpu, cores: \d+\n", text)
    assert rows == [(rank, rank) for rank in "012"]


def add_wrongly_on_rank_1():
    """Be a machine that adds wrongly."""
    right = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        result = right(tensor, *args, **kwargs)
        tensor[...] = torch.where(tensor == 3, 4.0, tensor)
        return result

    if os.environ["RANK"] == "1":
        torch.distributed.all_reduce = all_reduce
    return called("check")


def test_an_error_on_one_rank_is_said_on_every_rank():
    for status, text in launched(add_wrongly_on_rank_1, size=2):
        assert status == 1
        assert "the sum must be 3, but is 4 on rank 1: test its host" in text


# --- where it does not work


def test_check_names_an_absent_rank_within_the_timeout(programs, tmp_path):
    files, jobs = [tmp_path / str(rank) for rank in range(2)], []
    with reserved_port() as port:
        for rank, file in enumerate(files):
            env = torchrun_variables(rank, 3, port, TORCHELASTIC_USE_AGENT_STORE=None)
            jobs.append(programs.start(COMMAND, "check", "--timeout", "5", output=file, **env))
        assert [job.wait() for job in jobs] == [1, 1]
    for file in files:
        out = file.read_text()
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


def test_json_is_one_object_for_programs(monkeypatch, capsys):
    assert report("env", 60, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["launcher"] == {"status": "ok", "text": "none: a single process", "cure": ""}
    monkeypatch.setenv("RANK", "0")
    assert report("env", 60, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["env"]["status"] == "error"
