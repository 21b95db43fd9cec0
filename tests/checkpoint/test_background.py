"""Work in a thread: its error comes out, by `join` or at the end of the process."""

import subprocess
import sys
import threading

import pytest

from pardata.checkpoint._background import Background


def test_the_work_runs_at_once_and_join_waits_for_it():
    go, done = threading.Event(), []
    background = Background(lambda: (go.wait(30), done.append(1)), "work")
    assert done == []
    go.set()
    background.join()
    assert done == [1]


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_raised_by_join_once(error):
    def fail():
        raise error

    background = Background(fail, "work")
    with pytest.raises(type(error)):
        background.join()
    background.join()


def ended(code):
    script = f"import sys, time\nfrom pardata.checkpoint._background import Background\n{code}"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    return told.returncode, told.stdout.strip(), told.stderr.strip()


def test_the_interpreter_waits_for_it():
    code = "Background(lambda: (time.sleep(0.3), print('done')), 'work')\nsys.exit(5)"
    assert ended(code) == (5, "done", "")


def test_an_error_that_nobody_asked_for_is_logged_and_gives_status_1():
    code = "print('before')\nBackground(lambda: 1 / 0, 'the work')\n"
    assert ended(code) == (1, "before", "[0/1] the work failed: division by zero")


def test_an_error_that_was_asked_for_gives_no_status():
    code = "b = Background(lambda: 1 / 0, 'work')\ntry: b.join()\nexcept ArithmeticError: print(1)"
    assert ended(code) == (0, "1", "")
