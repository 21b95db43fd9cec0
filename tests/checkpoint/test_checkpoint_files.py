"""A directory of checkpoints: complete or not there, whatever is killed, whoever else writes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import leftovers, whole_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from pardata import Checkpointer
from pardata.checkpoint._folder import Attempt, Name, names

FACTS = {"values": [], "identity": {"processes": 1, "torch": "2", "strategies": {}}}


def write(attempt, step, content="x"):
    name = Name(attempt.number, step)
    (attempt.begin(name) / "state.pt").write_text(content)
    return attempt.commit(name, FACTS)


# --- names


@given(st.integers(1, 10**6), st.integers(0, 10**12))
def test_a_name_is_read_as_it_is_written(attempt, step):
    name = Name(attempt, step)
    assert Name.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["attempt-1-step-1", "attempt-0001-step-000000001.bak", "attempt-00001-step-000000001",
     "attempt-0001-step-0000000001", "attempt-000\u0661-step-000000001", "attempt-0001.json", ""],
)  # fmt: skip
def test_what_is_written_otherwise_is_no_name(text):
    assert Name.parse(text) is None


def test_names_are_sorted_by_number_where_they_outgrow_their_digits(tmp_path):
    all_names = [Name(9999, 10**9 + 1), Name(10000, 5), Name(10000, 10**10)]
    for name in reversed(all_names):
        (tmp_path / str(name)).mkdir()
    (tmp_path / "notes.txt").touch()
    assert names(tmp_path) == all_names


def test_a_directory_that_is_not_there_has_none(tmp_path):
    assert names(tmp_path / "nowhere") == []


# --- one writer


def test_what_is_begun_is_a_checkpoint_once_it_is_committed(tmp_path):
    attempt = Attempt(tmp_path / "a" / "b")
    name = Name(attempt.number, 3)
    (attempt.begin(name) / "state.pt").write_text("four")
    assert whole_steps(tmp_path / "a" / "b") == []
    assert attempt.commit(name, FACTS) == 4
    assert whole_steps(tmp_path / "a" / "b") == [3]
    assert leftovers(tmp_path / "a" / "b") == []


def test_what_is_abandoned_leaves_nothing(tmp_path):
    attempt = Attempt(tmp_path)
    (attempt.begin(Name(1, 3)) / "state.pt").write_text("half")
    attempt.abandon(Name(1, 3))
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(1, None, [12]), (2, None, [10, 12]), (1, 4, [0, 4, 8, 12]), (2, 5, [0, 10, 12]),
     (99, 1, [0, 2, 4, 6, 8, 10, 12])],
)  # fmt: skip
def test_the_newest_are_kept_and_those_of_every_so_many_steps(keep, keep_every, kept, tmp_path):
    attempt = Attempt(tmp_path)
    for step in range(0, 14, 2):
        write(attempt, step)
    attempt.prune(keep, keep_every)
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == (kept, [])


def test_the_newest_is_the_last_one_written_where_steps_go_back(tmp_path):
    write(Attempt(tmp_path), 100)
    later = Attempt(tmp_path)
    write(later, 50)
    later.prune(1, None)
    assert whole_steps(tmp_path) == [50]


def test_a_new_attempt_removes_what_the_last_one_was_killed_over(tmp_path):
    first = Attempt(tmp_path)
    (first.begin(Name(1, 3)) / "sharded").mkdir()
    (tmp_path / ".removed-attempt-0001-step-000000001").mkdir()
    (tmp_path / ".unfinished-attempt-0001-step-000000009").symlink_to(tmp_path.parent)
    (tmp_path / ".unfinished-mine").mkdir()
    Attempt(tmp_path)
    assert leftovers(tmp_path) == [".unfinished-mine"]
    assert [path.name for path in tmp_path.glob("*.json")] == ["attempt-0002.json"]


# --- two writers


def test_the_older_of_two_writers_is_told_who_the_other_one_is_and_changes_nothing(tmp_path):
    older = Attempt(tmp_path)
    write(older, 1)
    (older.begin(Name(1, 2)) / "state.pt").write_text("late")
    newer = Attempt(tmp_path)
    write(newer, 1, "newer")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    (older.unfinished(Name(1, 2))).mkdir()
    for call in (
        older.check,
        lambda: older.begin(Name(1, 3)),
        lambda: older.commit(Name(1, 2), FACTS),
        lambda: older.prune(1, None),
        lambda: Attempt(tmp_path, after=older),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value).startswith(
            f"one run at a time must write to {tmp_path}, but this is attempt 1 and attempt 2 has "
            f"begun (process {os.getpid()} on "
        )
        assert "this run is the older one and must end; give it a directory" in str(raised.value)
    older.abandon(Name(1, 2))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    newer.prune(1, None)
    assert names(tmp_path) == [Name(2, 1)]


def test_the_older_one_stays_the_older_one_also_where_the_directory_was_emptied(tmp_path):
    directory = tmp_path / "run"
    older = Attempt(directory)
    shutil.rmtree(directory)
    newer = Attempt(directory)
    assert newer.number == older.number
    with pytest.raises(RuntimeError, match="this run is the older one"):
        older.check()
    newer.check()


def test_the_only_one_goes_on_where_the_directory_was_emptied(tmp_path):
    attempt = Attempt(tmp_path)
    (tmp_path / "attempt-0001.json").unlink()
    write(attempt, 3)
    assert whole_steps(tmp_path) == [3]
    assert Attempt(tmp_path).number == 2


def test_a_claim_that_cannot_be_read_is_one_all_the_same(tmp_path):
    attempt = Attempt(tmp_path)
    for content in (b"", b"[]", b"\xff", b'{"host": 1}'):
        (tmp_path / "attempt-0007.json").write_bytes(content)
        with pytest.raises(RuntimeError, match=r"attempt 7 has begun \(by another process\)"):
            attempt.check()


def test_a_directory_that_is_gone_is_told(tmp_path):
    attempt = Attempt(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"must stay, but .*run is gone: was it "):
        attempt.begin(Name(1, 1))
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Attempt(tmp_path / "file")


def test_a_claim_that_cannot_be_written_keeps_nobody_from_writing(tmp_path):
    script = f"""if True:
        import resource
        from pathlib import Path
        from pardata.checkpoint._folder import Attempt
        resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))
        try:
            Attempt(Path({str(tmp_path)!r}))
        except OSError as error:
            print(error.strerror)
    """
    own = Attempt(tmp_path)
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert told.stdout == "File too large\n"
    own.check()
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-0001.json"]


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["claim", "again", "begin", "commit", "prune"])),
    max_size=25,
)


class Writer:
    def __init__(self, directory):
        self.directory = directory
        self.attempt = None
        self.begun = None

    def act(self, action, step):
        """Return the name that it has committed, if it has."""
        if action == "claim":
            self.attempt, self.begun = Attempt(self.directory), None
        elif self.attempt is None:
            return None
        elif action == "again":
            self.attempt, self.begun = Attempt(self.directory, after=self.attempt), None
        elif action == "begin":
            self.begun = Name(self.attempt.number, step)
            (self.attempt.begin(self.begun) / "state.pt").write_text(f"{id(self)} {step}")
        elif action == "prune":
            self.attempt.prune(2, None)
        elif self.begun is not None:
            name, self.begun = self.begun, None
            self.attempt.commit(name, FACTS)
            return name
        return None


@settings(max_examples=100)
@given(ACTIONS)
def test_however_several_writers_interleave_the_newest_alone_adds_and_removes(actions):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        writers = [Writer(directory) for _ in range(3)]
        contents = {}
        newest = None
        for step, (number, action) in enumerate(actions):
            before = names(directory)
            newest = number if action == "claim" else newest
            writer = writers[number]
            try:
                committed = writer.act(action, step)
            except (RuntimeError, FileNotFoundError):
                assert number != newest
                assert names(directory) == before
                continue
            assert number == newest or names(directory) == before
            if committed is not None:
                contents[committed] = f"{id(writer)} {committed.step}"
        whole_steps(directory)
        for name in names(directory):
            assert (directory / str(name) / "state.pt").read_text() == contents[name]


CLAIM = """if True:
    import sys
    from pathlib import Path
    from pardata.checkpoint._folder import Attempt
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        attempt = Attempt(Path(sys.argv[1]))
        print("claimed", flush=True)
        sys.stdin.readline()
        attempt.check()
        print("goes on", flush=True)
    except RuntimeError:
        print("older", flush=True)
        print("older", flush=True)
"""


def test_of_several_that_claim_at_the_same_moment_one_goes_on(tmp_path):
    command = [sys.executable, "-c", CLAIM, tmp_path / "run"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claiming = [subprocess.Popen(command, **pipes) for _ in range(3)]
    told = []
    for _ in range(3):
        told = [process.stdout.readline().strip() for process in claiming]
        for process in claiming:
            with suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.flush()
    for process in claiming:
        process.communicate(timeout=100)
    assert sorted(told) == ["goes on", "older", "older"]
    [path] = (tmp_path / "run").glob("*.json")
    assert json.loads(path.read_text())["process"] == claiming[told.index("goes on")].pid


# --- killed at any moment


SAVE = """if True:
    import sys, torch
    from pardata import Checkpointer
    value = torch.zeros(200_000)
    checkpointer = Checkpointer(sys.argv[1], keep=2, asynchronous=sys.argv[2] == "asynchronous")
    found = checkpointer.restore()
    step = 0 if found is None else found["step"]
    print("saved", step, flush=True)
    while True:
        step += 1
        checkpointer.save(step, value=value.fill_(step))
        checkpointer.wait()
        print("saved", step, flush=True)
"""


def kill_while_it_saves(directory, how, seconds):
    """Return the last step that was reported as saved."""
    command = [sys.executable, "-c", SAVE, directory, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    return int([line for line in lines if line.endswith("\n")][-1].split()[1])


def check_that_kills_lose_nothing(directory, moments):
    reported = 0
    for number, seconds in enumerate(moments):
        how = ("plain", "asynchronous")[number % 2]
        reported = max(reported, kill_while_it_saves(directory, how, seconds))
        steps = whole_steps(directory)
        assert reported <= max(steps) <= reported + 1
        assert 1 <= len(steps) <= 3
    checkpointer = Checkpointer(directory)
    found = checkpointer.restore()
    assert set(found["value"].tolist()) == {found["step"]}
    checkpointer.save(found["step"] + 1)
    assert leftovers(directory) == []


def test_a_kill_at_any_moment_leaves_the_last_one_that_was_reported(tmp_path):
    check_that_kills_lose_nothing(tmp_path, [0.0, 0.011, 0.02])


@pytest.mark.soak
def test_200_kills_leave_the_last_one_that_was_reported(tmp_path):
    check_that_kills_lose_nothing(tmp_path, [0.0005 * k for k in range(200)])
