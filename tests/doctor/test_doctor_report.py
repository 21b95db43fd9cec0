"""How findings are printed: each once, aligned, with its ranks and its cure; and as JSON."""

import io
import json
import os
import pty

import pytest
from on_ranks import run_caught

from pardata import world
from pardata.doctor._accounts import Account
from pardata.doctor._finding import ERROR, OK, WARNING, Finding, found_error, worst
from pardata.doctor._report import Report, show, show_errors, wants_colour

SHM = Finding("/dev/shm", OK, "24.0 GiB")
FEW = Finding("cores", WARNING, "4 share 2", "start fewer")
LOST = Finding("trial", ERROR, "a connection was lost", "look at rank 1")


def account(rank, size, *findings, host="n1", device="cpu"):
    return Account(rank, size, host, 0, rank, device, 2, 100 + rank, list(findings))


def text_of(*accounts, width=100):
    return Report("env", accounts).as_text(coloured=False, width=width)


def test_one_process_prints_a_line_for_each_finding_and_the_cure_below_it():
    assert text_of(account(0, 1, SHM, FEW, LOST)).splitlines() == [
        "pardata env: one process on n1",
        "",
        "ok       /dev/shm       24.0 GiB",
        "warning  cores          4 share 2",
        "                          cure: start fewer",
        "error    trial          a connection was lost",
        "                          cure: look at rank 1",
        "",
        "1 error and 1 warning",
    ]


def test_several_ranks_print_one_aligned_table_and_what_they_share_once():
    accounts = [account(rank, 11, SHM, host=f"n{rank}") for rank in range(10)]
    accounts.append(account(10, 11, SHM, host="node10", device="cuda:0 NVIDIA H200"))
    lines = text_of(*accounts).splitlines()
    assert lines[:4] == [
        "pardata env: 11 ranks on 11 hosts",
        "",
        "rank  host    node  local rank  device              cores",
        "   0  n0         0           0  cpu                     2",
    ]
    assert lines[13] == "  10  node10     0          10  cuda:0 NVIDIA H200      2"
    assert lines[14:] == ["", "ok       /dev/shm       24.0 GiB", "", "all is well"]


def test_a_finding_of_some_ranks_names_them_and_a_measure_of_rank_0_does_not():
    small = Finding("/dev/shm", WARNING, "64 MiB", "enlarge it")
    fast = Finding("latency", OK, "90 microseconds", value=9e-5)
    lines = text_of(account(0, 3, SHM, fast), account(1, 3, small), account(2, 3, SHM, LOST))
    assert lines.splitlines()[7:] == [
        "ok       /dev/shm       ranks 0, 2: 24.0 GiB",
        "warning  /dev/shm       rank 1: 64 MiB",
        "                          cure: enlarge it",
        "ok       latency        90 microseconds",
        "error    trial          rank 2: a connection was lost",
        "                          cure: look at rank 1",
        "",
        "1 error and 1 warning",
    ]


def test_ranks_of_different_versions_are_warned_of():
    old, new = (Finding("versions", OK, f"torch 2.{minor}") for minor in (6, 15))
    report = Report("env", [account(0, 2, old), account(1, 2, new)])
    assert [shared.finding.status for shared in report.found] == [WARNING, WARNING]
    assert "versions       rank 1: torch 2.15\n" in report.as_text(coloured=False, width=100)
    assert {shared.finding.cure for shared in report.found} == {"install the same on every host"}
    same = Report("env", [account(0, 2, new), account(1, 2, new)])
    assert same.status == OK


def test_a_rank_whose_others_did_not_come_says_which_it_is():
    assert text_of(account(0, 4, LOST)).startswith("pardata env: rank 0 of 4 on n1\n")


def test_long_texts_are_wrapped_below_themselves_and_words_stay_whole():
    name = "x" * 90
    lines = text_of(account(0, 1, Finding("a", OK, f"{'word ' * 20}{name} end")), width=60)
    first, *rest = lines.splitlines()[2:-2]
    assert first == "ok       a              word word word word word word word word"
    assert all(line.startswith(" " * 24) for line in rest)
    assert f"{' ' * 24}{name}" in rest


def test_machines_get_everything_as_json():
    fast = Finding("latency", OK, "90 microseconds", value=9e-5)
    report = Report("check", [account(0, 2, fast, FEW), account(1, 2, FEW)])
    assert json.loads(report.as_json()) == {
        "command": "check",
        "status": "warning",
        "world_size": 2,
        "ranks": [
            {
                "rank": rank, "host": "n1", "node": 0, "local_rank": rank, "device": "cpu",
                "cores": 2, "pid": 100 + rank,
            }
            for rank in (0, 1)
        ],
        "findings": [
            {
                "name": "latency", "status": "ok", "text": "90 microseconds", "cure": "",
                "value": 9e-5, "ranks": [0],
            },
            {
                "name": "cores", "status": "warning", "text": "4 share 2", "cure": "start fewer",
                "ranks": [0, 1],
            },
        ],
    }  # fmt: skip


def test_a_rank_without_a_table_says_only_what_went_wrong():
    stream = io.StringIO()
    show_errors(Report("check", [account(3, 4, SHM, FEW, LOST)]), stream=stream)
    expected = "pardata check, rank 3 on n1: trial: a connection was lost: look at rank 1\n"
    assert stream.getvalue() == expected


def printed(**options):
    """Return what a terminal gets."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        show(Report("env", [account(0, 1, SHM, FEW, LOST)]), stream=stream, **options)
        text = os.read(ours, 10_000).decode()
    os.close(ours)
    return text


def test_a_terminal_shows_the_status_in_colour_and_nothing_else(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured = printed(as_json=False)
    assert "\033[32mok       \033[0m/dev/shm " in coloured
    assert "\033[33mwarning  \033[0mcores " in coloured
    assert "\033[31merror    \033[0mtrial " in coloured
    assert coloured.count("\033") == 6
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed(as_json=False)


def test_json_and_pipes_are_plain(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033" not in printed(as_json=True)
    stream = io.StringIO()
    show(Report("env", [account(0, 1, LOST)]), as_json=False, stream=stream)
    assert "\033" not in stream.getvalue()


@pytest.mark.parametrize(
    ("env", "colour"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "0"}, False), ({"TERM": "dumb"}, False)],
)
def test_colour_is_refused_as_no_color_org_says(env, colour):
    assert wants_colour(env) is colour


def test_a_terminal_of_another_alphabet_gets_the_rest():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(Report("env", [account(0, 1, Finding("x", OK, "Größe"))]), as_json=False, stream=stream)
    assert b"x              Gr??e\n" in raw.getvalue()


def test_a_reader_that_left_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    stream = os.fdopen(theirs, "w")
    show(Report("env", [account(0, 1, LOST)]), as_json=False, stream=stream)
    stream.close()  # and nothing is left to be written to the pipe


@pytest.mark.parametrize(
    ("message", "text", "cure"),
    [
        ("`a` must be 1, but is 2: set a to 1", "`a` must be 1, but is 2", "set a to 1"),
        ("`a` must be 1, but is 2", "`a` must be 1, but is 2", "the default"),
        (
            "rank 1 failed in `init`: `a` must be 1, but is 2: set it\n(seen on rank 0)",
            "rank 1 failed in `init`: `a` must be 1, but is 2",
            "set it",
        ),
        (
            "every rank must pass the same, but `a` differ:\n  rank 0: a=1\n  rank 1: a=2\nSame!",
            "every rank must pass the same, but `a` differ\n  rank 0: a=1\n  rank 1: a=2",
            "Same!",
        ),
        (
            "[/pair.cc:1] Connection closed by peer: x. This is typically\nframe 0",
            "Connection closed by peer: x",
            "the default",
        ),
        (
            "all must come within 1 s, but 1 did not\n\nrank 1 was here:\nFile x",
            "all must come within 1 s, but 1 did not",
            "the default",
        ),
        ("", "ValueError", "the default"),
    ],
)  # fmt: skip
def test_an_error_is_parted_into_what_is_wrong_and_what_to_do(message, text, cure):
    finding = found_error("n", ValueError(message), "the default")
    assert finding == Finding("n", ERROR, text, cure)


def test_the_worst_of_nothing_is_ok():
    assert worst([]) == OK
    assert worst([SHM, FEW]) == WARNING
    assert worst([LOST, FEW, SHM]) == ERROR


def _account_text():
    own = Account.of(world(), [FEW])
    assert Account.from_json(own.to_json()) == own
    return own.rank, own.size, own.device, own.findings


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_account_says_who_a_rank_is_and_travels_as_text(size):
    expected = [(rank, size, "cpu", [FEW]) for rank in range(size)]
    assert run_caught(_account_text, world_size=size) == expected
