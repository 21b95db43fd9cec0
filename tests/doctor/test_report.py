"""How findings are printed: each once, aligned, with its ranks and its cure."""

from pardata.doctor._account import Account
from pardata.doctor._finding import ERROR, OK, WARNING, Finding
from pardata.doctor._report import errors_text, report_text

SHM = Finding("/dev/shm", OK, "24.0 GiB")
FEW = Finding("cores", WARNING, "4 share 2", "start fewer")
LOST = Finding("trial", ERROR, "a connection was lost", "look at rank 1")


def account(rank, size, *findings, host="n1", device="cpu"):
    return Account(rank, size, host, 0, rank, device, 2, list(findings))


def lines_of(*accounts):
    return report_text("env", accounts).splitlines()


def test_one_process_prints_a_line_for_each_finding_and_the_cure_below_it():
    assert lines_of(account(0, 1, SHM, FEW, LOST)) == [
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
    lines = lines_of(*accounts)
    assert lines[:4] == [
        "pardata env: 11 ranks on 11 hosts",
        "",
        "rank  host    node  local rank  device              cores",
        "0     n0      0     0           cpu                 2",
    ]
    assert lines[13] == "10    node10  0     10          cuda:0 NVIDIA H200  2"
    assert lines[14:] == ["", "ok       /dev/shm       24.0 GiB", "", "all is well"]


def test_a_finding_of_some_ranks_names_them_and_a_measure_of_rank_0_does_not():
    small = Finding("/dev/shm", WARNING, "64 MiB", "enlarge it")
    fast = Finding("latency", OK, "90 microseconds")
    accounts = [account(0, 3, SHM, fast), account(1, 3, small), account(2, 3, SHM, LOST)]
    assert lines_of(*accounts)[7:] == [
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
    cure = "                          cure: install the same on every host"
    assert lines_of(account(0, 2, old), account(1, 2, new))[6:] == [
        "warning  versions       rank 0: torch 2.6",
        cure,
        "warning  versions       rank 1: torch 2.15",
        cure,
        "",
        "2 warnings",
    ]
    assert lines_of(account(0, 2, new), account(1, 2, new))[-1] == "all is well"


def test_long_texts_are_wrapped_below_themselves_and_words_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    name = "x" * 90
    lines = lines_of(account(0, 1, Finding("a", OK, f"{'word ' * 20}{name} end")))
    first, *rest = lines[2:-2]
    assert first == "ok       a              word word word word word word word word"
    assert all(line.startswith(" " * 24) for line in rest)
    assert f"{' ' * 24}{name}" in rest


def test_a_rank_whose_others_did_not_come_says_which_it_is_and_what_went_wrong():
    alone = account(3, 4, SHM, FEW, LOST)
    assert lines_of(alone)[0] == "pardata env: rank 3 of 4 on n1"
    line = "pardata check, rank 3 on n1: trial: a connection was lost: look at rank 1"
    assert errors_text("check", alone) == line
