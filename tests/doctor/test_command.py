"""`python -m pardata env` and `check`, as people, pipes and launchers start them."""

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
from launched import agent, launched, reserved_port, slurm_variables, torchrun_variables
from processes import run

from pardata.__main__ import main
from pardata.doctor._examination import examine, trial_of_two

COMMAND = "import runpy; runpy.run_module('pardata', run_name='__main__', alter_sys=True)"


def started(programs, folder, *arguments, **env):
    """Start the command, and return what waits for its end: status, output and errors."""
    folder.mkdir()
    out, errors = folder / "out", folder / "errors"
    job = programs.start(COMMAND, *arguments, output=out, errors=errors, **env)
    return lambda: (job.wait(), out.read_text(), errors.read_text())


def statuses(text):
    """Return the status of each finding of a printed report."""
    lines = re.findall(r"^(ok|warning|error) +(.*?)  +", text, flags=re.MULTILINE)
    return {name: status for status, name in lines}


def names(text):
    """Return the names in a report, without those that depend on the machine."""
    return [name for name, status in statuses(text).items() if status != "warning"]


# --- alone


def test_alone_env_finds_a_machine_on_which_pardata_works():
    out = run(python(), "-W", "error", "-m", "pardata", "env")
    assert out.startswith("pardata env: one process on ")
    assert "\nok       launcher       none: a single process\n" in out
    assert {"GPUs", "cores", "threads", "open files", "versions"} <= set(statuses(out))
    assert max(map(len, out.splitlines())) <= 100


def test_alone_check_tries_two_processes_and_tells_of_the_rest_only_what_is_not_well(capsys):
    assert examine("check", timeout=100) == 0
    out = capsys.readouterr().out
    assert names(out) == ["launcher", "two processes", *TRIAL]
    assert out.count("\nok       all-reduce     correct\nok       latency        ") == 1


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


def test_whatever_hangs_ends_some_time_after_the_timeout(monkeypatch):
    asked = []
    note = lambda seconds, **options: asked.append((seconds, options))  # noqa: E731  # a short one
    monkeypatch.setattr(faulthandler, "dump_traceback_later", note)
    monkeypatch.setattr("pardata.__main__.examine", lambda _, timeout, as_json: (timeout, as_json))
    assert main(["env", "--timeout", "20"]) == (20, False)
    assert main(["env", "--json"]) == (60, True)
    assert asked == [(55, {"exit": True}), (135, {"exit": True})]


def _examined_as_json():
    return _examined("env", as_json=True)


@pytest.mark.parametrize("size", [1, 3])
def test_rank_0_prints_one_document_of_json_for_programs(size):
    (status, text), *others = launched(_examined_as_json, size=size)
    assert (status, others) == (0, [(0, "")] * (size - 1))
    told = json.loads(text)
    assert (told["command"], len(told["ranks"])) == ("env", size)
    for rank, account in enumerate(told["ranks"]):
        assert (account["rank"], account["size"]) == (rank, size)
        found = {finding["name"]: finding for finding in account["findings"]}
        assert {"launcher", "cores", "versions"} <= set(found)
        assert found["launcher"]["status"] == "ok"
        assert set(found["launcher"]) == {"name", "text", "cure", "is_error", "status"}


def test_what_is_wrong_is_told_in_json_too(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert examine("env", timeout=10, as_json=True) == 1
    ((account,),) = [json.loads(capsys.readouterr().out)["ranks"]]
    assert account["findings"][0]["status"] == "error"


# --- under a launcher


TRIAL = ["all-reduce", "latency", "bandwidth", "shared memory"]


def _examined(command, *, as_json=False):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = examine(command, timeout=60, as_json=as_json)
    return status, printed.getvalue()


@pytest.mark.parametrize(
    ("command", "size", "variables", "name"),
    [
        ("env", 1, torchrun_variables, "torchrun"),
        ("env", 3, torchrun_variables, "torchrun"),
        ("check", 2, slurm_variables, "SLURM"),
    ],
)
def test_rank_0_prints_one_report_of_all_ranks(command, size, variables, name):
    (status, text), *others = launched(_examined, command, size=size, variables=variables)
    assert status == 0
    assert others == [(0, "")] * (size - 1)
    assert f"launcher       {name}: {size} process" in text
    assert "error" not in statuses(text).values()
    if size > 1:
        assert text.startswith(f"pardata {command}: {size} ranks on ")
        rows = re.findall(
            r"place +rank (\d+): \S+, node 0, local rank (\d+), cpu, cores: \d+\n", text
        )
        assert rows == [(str(rank), str(rank)) for rank in range(size)]
        assert f"joining        {size} ranks met in " in text
    if command == "check":
        assert names(text) == ["launcher", "joining", "place", *TRIAL]


def test_torchrun_itself_starts_it(short_tmp):
    launcher = [str(python()), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run(*launcher, "-m", "pardata", "check", TMPDIR=short_tmp)
    assert printed.count("pardata check: 2 ranks on ") == 1
    assert printed.count("all-reduce     correct") == 1


def _spoilt_on_rank_1(what):
    if os.environ["RANK"] == "1":
        what()
    return _examined("check")


def _wrong_sums():
    """Be a machine that adds wrongly."""
    right = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        result = right(tensor, *args, **kwargs)
        tensor[...] = torch.where(tensor == 3, 4.0, tensor)
        return result

    torch.distributed.all_reduce = all_reduce


def _long_tmpdir():
    multiprocessing.current_process()._config["tempdir"] = "/" + "x" * 120


SUMS = "error all-reduce rank 1: the sum over all ranks must be 3, but is 4 cure: take this host"
NAME = "error shared memory rank 1: the temporary directory must have a name of at most"
TRIALS = [(_wrong_sums, SUMS)]
if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # which opens a socket
    TRIALS.append((_long_tmpdir, NAME))


@pytest.mark.parametrize(("what", "says"), TRIALS)
def test_an_error_on_one_rank_is_the_exit_status_of_every_rank(what, says):
    outcomes = launched(_spoilt_on_rank_1, what, size=2)
    assert [status for status, _ in outcomes] == [1, 1]
    # Lines are as long as the terminal is wide.
    assert says in " ".join(outcomes[0][1].split())


# --- where it does not work


def test_variables_that_are_partial_are_explained_to_whoever_looks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert examine("check", timeout=60) == 1
    out = capsys.readouterr().out
    assert names(out) == ["launcher", "variables"]
    assert "error    launcher       the variables of torchrun must be set together" in out
    assert "start the script with the launcher itself" in " ".join(out.split())
    assert out.endswith("1 error\n") or "1 error and" in out


def test_a_rank_that_does_not_come_is_named_by_the_others_within_the_timeout(programs, tmp_path):
    with reserved_port() as port:
        own = {"TORCHELASTIC_USE_AGENT_STORE": None}
        both = [(tmp_path / str(n), torchrun_variables(n, 3, port, **own)) for n in range(2)]
        ends = [started(programs, folder, "env", "--timeout", "5", **env) for folder, env in both]
        (code, out, errors), (other_code, other_out, other_errors) = (end() for end in ends)
    assert (code, errors, other_code, other_out) == (1, "", 1, "")
    assert out.startswith("pardata env: rank 0 of 3 on ")
    printed = " ".join(out.split())
    assert "`init` must be reached by every rank, but rank 2 of 3 did not come within" in printed
    assert "look at the output of rank 2" in printed
    assert re.search(r"rank 1 on \S+: joining: .* rank 2 of 3 did not come", other_errors)
    assert "Traceback" not in other_errors


STOPS = """
import os, sys, time, pardata
pardata.init(tune_cpu=False)
print("joined", flush=True)
time.sleep(float(sys.argv[1]))
os._exit(1)
"""


@pytest.mark.parametrize("seconds", [pytest.param(0, marks=pytest.mark.soak), 90])
def test_a_rank_that_dies_or_hangs_after_joining_is_an_error_and_no_hang(
    seconds, programs, tmp_path
):
    with agent() as port:
        env = torchrun_variables(1, 2, port)
        other = programs.start(STOPS, seconds, output=tmp_path / "other", **env)
        env = torchrun_variables(0, 2, port)
        end = started(programs, tmp_path / "own", "check", "--timeout", "5", **env)
        code, out, errors = end()
        other.kill()
    assert code == 1
    found = statuses(out)
    assert (found["joining"], found["trial"], found["reports"]) == ("ok", "error", "error")
    assert "all_reduce_sum" in out
    assert "Timeout (0:" not in errors  # nothing had to end it


@pytest.mark.parametrize(
    ("interface", "timeout", "text", "cure"),
    [
        ("no-such-one", 100, "no-such-one", "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs)"),
        ("", 0.01, "all 2 ranks must finish within 0.01 s, but rank ", "is every port open"),
    ],
)
def test_two_processes_that_cannot_talk_or_take_too_long_are_an_error(
    interface, timeout, text, cure, monkeypatch
):
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    (finding,) = trial_of_two(timeout)
    assert (finding.name, finding.status) == ("two processes", "error")
    assert text in finding.text
    assert cure in finding.cure
    assert "\n" not in finding.text  # no stack of a process
