"""How findings are printed: each once, aligned, with its ranks and its cure."""

import pytest

from pardata.doctor._report import Account, Finding, report_text

SHM = Finding("/dev/shm", "24.0 GiB")
SMALL = Finding("/dev/shm", "64 MiB", "enlarge it")
FAST = Finding("latency", "90 microseconds")
FEW = Finding("cores", "4 share 2", "start fewer")
LOST = Finding("trial", "a connection was lost", "look at rank 1", is_error=True)
OLD, NEW = (Finding("versions", f"torch 2.{minor}") for minor in (6, 15))


def account(rank, size, *findings, host="n1"):
    return Account(rank, size, host, list(findings))


def lines_of(*accounts):
    return report_text("env", accounts).splitlines()


def test_several_ranks_print_what_they_share_once():
    places = [Finding("place", f"n{rank}, node 0") for rank in range(3)]
    accounts = [account(rank, 3, SHM, places[rank], host=f"n{rank}") for rank in range(3)]
    assert lines_of(*accounts) == [
        "pardata env: 3 ranks on 3 hosts",
        "",
        "ok       /dev/shm       24.0 GiB",
        "ok       place          rank 0: n0, node 0",
        "ok       place          rank 1: n1, node 0",
        "ok       place          rank 2: n2, node 0",
        "",
        "all is well",
    ]


ONE_RANK = """\
pardata env: one process on n1

ok       /dev/shm       24.0 GiB
warning  cores          4 share 2
                          cure: start fewer
error    trial          a connection was lost
                          cure: look at rank 1

1 error and 1 warning"""
SOME_RANKS = """\
ok       /dev/shm       ranks 0, 2: 24.0 GiB
warning  /dev/shm       rank 1: 64 MiB
                          cure: enlarge it
ok       latency        90 microseconds
error    trial          rank 2: a connection was lost
                          cure: look at rank 1

1 error and 1 warning"""
VERSIONS = """\
warning  versions       rank 0: torch 2.6
                          cure: install the same on every host
warning  versions       rank 1: torch 2.15
                          cure: install the same on every host

2 warnings"""


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([[SHM, FEW, LOST]], ONE_RANK),
        ([[SHM, FAST], [SMALL], [SHM, LOST]], SOME_RANKS),  # a measure is rank 0's, and of all
        ([[OLD], [NEW]], VERSIONS),
        ([[NEW], [NEW]], "\nok       versions       torch 2.15\n\nall is well"),
    ],
    ids=["one process", "some ranks", "versions differ", "versions are the same"],
)
def test_each_finding_is_printed_once_with_the_ranks_that_made_it_and_its_cure(found, text):
    accounts = [account(rank, len(found), *findings) for rank, findings in enumerate(found)]
    assert report_text("env", accounts).endswith(text)


def test_long_texts_are_wrapped_below_themselves_and_words_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "64")
    name = "x" * 90
    lines = lines_of(account(0, 1, Finding("a", f"{'word ' * 20}{name} end")))
    first, *rest = lines[2:-2]
    assert first == "ok       a              word word word word word word word word"
    assert all(line.startswith(" " * 24) for line in rest)
    assert f"{' ' * 24}{name}" in rest


def test_a_rank_whose_others_did_not_come_says_which_it_is():
    assert lines_of(account(3, 4, SHM))[0] == "pardata env: rank 3 of 4 on n1"
