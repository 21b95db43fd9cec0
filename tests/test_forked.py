"""The tests start programs however the command that waits for one is killed."""

import shutil
import socket
import subprocess

import forked
import pytest
from processes import wait_for


@pytest.mark.parametrize("sent", [b"", b" ", b' {"argv": [', b" not one\n"])
def test_a_command_that_is_killed_ends_none_of_the_others(sent, programs, tmp_path):
    with (tmp_path / "out").open("wb") as output, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(programs.folder / "socket"))
        if sent:
            socket.send_fds(connection, [sent[:1]], [0, output.fileno(), output.fileno()])
            connection.sendall(sent[1:])
    command = [programs.python, "-c", "print('here')"]
    assert subprocess.check_output(command, text=True) == "here\n"


def test_a_wait_in_vain_says_what_the_program_has_said(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "threads_of", str)  # a debugger takes ten seconds
    program = programs.start("import time; print('here'); time.sleep(600)", output=tmp_path / "out")
    wait_for((tmp_path / "out").read_text, often=0.02)
    with pytest.raises(AssertionError, match=r"did not end within 0 s, but said: here\n"):
        program.wait(0)
    program.kill()


@pytest.mark.skipif(not shutil.which("gdb"), reason="needs gdb")
def test_a_wait_in_vain_says_where_the_threads_are():
    with subprocess.Popen(["sleep", "600"]) as program:
        text = forked.threads_of(program.pid)
        program.kill()
    assert "nanosleep" in text
