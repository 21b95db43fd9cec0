"""The tests start programs however the command that waits for one is killed."""

import socket
import subprocess

import pytest


@pytest.mark.parametrize("sent", [b"", b' {"argv": [', b" not one\n"])
def test_a_command_that_is_killed_ends_none_of_the_others(sent, programs, tmp_path):
    with (tmp_path / "out").open("wb") as output, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(programs.folder / "socket"))
        if sent:
            socket.send_fds(connection, [sent[:1]], [0, output.fileno(), output.fileno()])
            connection.sendall(sent[1:])
    command = [programs.python, "-c", "print('here')"]
    assert subprocess.check_output(command, text=True) == "here\n"
