"""Programs that end as any does, without the seconds that importing torch takes.

An interpreter that has imported torch forks each one, which falls through to the end of its code.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# With DDP older versions of torch import `torch.distributed.nn.jit.instantiator`, which makes a
# temporary directory and leaves it to the end of the process.
_LEFT_BY_TORCH = ["-W", "ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning"]
_WARNINGS = ["-W", "error", *(_LEFT_BY_TORCH if torch.__version__ < "2.8" else [])]

SERVER = """if True:
    import gc, importlib, json, os, sys, warnings
    import torch, pardata
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what other people's modules do
        for name in sys.argv[1:]:
            importlib.import_module(name)
    gc.freeze()  # or each program walks all of torch as it ends, which takes a second
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            ended, status = os.waitpid(asked, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            break
        print(pid, flush=True)
    else:
        os._exit(0)
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for number, name in enumerate([os.devnull, asked["output"], asked["errors"]]):
        os.dup2(os.open(name, os.O_CREAT | os.O_APPEND | os.O_RDWR), number)
    sys.argv = asked["argv"]
    exec(compile(asked["code"], sys.argv[0], "exec"))
"""


class Program:
    """One program, in a process group of its own."""

    def __init__(self, pid, ask):
        self.pid, self._ask, self._code = pid, ask, None

    def poll(self):
        """Return the exit status, or None as long as it runs."""
        if self._code is None:
            self._code = self._ask(self.pid)
        return self._code

    def wait(self, seconds=100):
        """Return the exit status, once it has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.pid} did not end within {seconds} s"
            time.sleep(0.005)
        return self._code

    def kill(self):
        """Kill what is left of it, and of what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Programs:
    """Starts programs, from several threads too."""

    def __init__(self, server):
        self._server, self._lock, self._started = server, threading.Lock(), []

    def start(self, code, *argv, output, errors=None, folder=".", **env):
        """Start a program: its code, or the file that holds it; what it prints goes to a file."""
        argv = ["train.py", *argv]
        if isinstance(code, Path):
            argv[0], code = code, code.read_text()
        for file in (output, errors or output):
            Path(file).touch()
        asked = {
            "code": code, "argv": list(map(str, argv)), "folder": str(Path(folder).resolve()),
            "output": str(output), "errors": str(errors or output), "env": {**os.environ, **env},
        }  # fmt: skip
        program = Program(self._ask(asked), self._ask)
        self._started.append(program)
        return program

    def _ask(self, asked):
        with self._lock:
            print(json.dumps(asked), file=self._server.stdin, flush=True)
            return json.loads(self._server.stdout.readline())

    def end(self):
        for program in self._started:
            if program.poll() is None:
                program.kill()


@contextmanager
def forking(*modules):
    """Yield what starts programs, with these modules imported; none of them is left at the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *_WARNINGS, "-c", SERVER, *modules]
    with subprocess.Popen(command, env=env, **pipes) as server:
        programs = Programs(server)
        try:
            yield programs
        finally:
            programs.end()
            server.stdin.close()
