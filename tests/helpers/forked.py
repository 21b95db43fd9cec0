"""Programs that end as any program does, without the seconds that importing torch takes.

An interpreter that has imported torch forks each one. `Programs.python` is a command that runs them
as ``python`` would: what takes seconds is then not the imports, also under torchrun.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# What the first DDP of a process imports, what the first `fully_shard` does, and torchrun.
_SLOW = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api")
# What else the programs of a test run import; its ranks have it too.
preloaded: list[str] = []

SERVER = """if True:
    import contextlib, gc, importlib, json, os, runpy, select, signal, socket, sys, types, warnings
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1] + ".new")
    listener.listen(99)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    plain = list(warnings.filters)
    import torch, pardata
    of_torch = [entry for entry in warnings.filters if entry not in plain]
    sys.modules["triton"] = None  # it says at the end of each program what it has not freed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what other people's modules do
        for name in sys.argv[3:]:
            importlib.import_module(name)
    del sys.modules["triton"]
    gc.freeze()  # or each program walks all of torch as it ends, which takes a second
    waiting = {}  # who waits for a program, by its pid; may be killed at any moment
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([0, woken, listener, *waiting.values()], [], [])[0]
        if 0 in ready:  # the tests have ended
            os._exit(0)
        for pid, connection in list(waiting.items()):
            if connection in ready:  # who waits was killed: so is the program, with what it started
                waiting.pop(pid).close()
                for kill in (os.killpg, os.kill):  # before its `setsid` it has no group
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(waiting):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with waiting.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                        connection.sendall(b"%d\\n" % os.waitstatus_to_exitcode(status))
        if listener in ready:
            connection, _ = listener.accept()
            _, outputs, _, _ = socket.recv_fds(connection, 1, 3)
            line = connection.makefile().readline()
            pid = os.fork() if line.endswith("\\n") else None  # or who asks was killed
            if pid == 0:
                break
            for number in outputs:
                os.close(number)
            if pid is None:
                connection.close()
                continue
            waiting[pid] = connection
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(b"%d\\n" % pid)
    asked = json.loads(line)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, output in enumerate(outputs):
        os.dup2(output, number)
    for file in (listener, connection, *waiting.values()):
        file.close()
    os.closerange(woken, waker + 1)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if "OMP_NUM_THREADS" in os.environ:  # which is read on import
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = sys.argv[2]
    arguments = asked["argv"]
    warnings.filters[:] = plain
    warnings._processoptions(asked["warnings"])  # as -W, which is read before the imports
    warnings.filters[:0] = of_torch
    warnings.filterwarnings("default", module="none of that name")  # what was shown is forgotten
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    sys.argv = arguments
    kind, code = asked["kind"], asked["code"]
    del asked, arguments, line, outputs
    if kind == "-m":
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(code)
    else:
        sys.path[0] = "" if kind == "-c" else os.path.dirname(os.path.abspath(sys.argv[0]))
        if os.path.exists(sys.argv[0]):  # what is spawned reads it too
            main.__file__ = os.path.abspath(sys.argv[0])
        exec(compile(code, sys.argv[0], "exec"), vars(main))
"""

TORCHRUN = '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n'

# Runs a program as `python` would, and ends as that does.
PYTHON = """#!{executable} -IS
import json, os, signal, socket, sys
arguments, options = sys.argv[1:], []
while arguments and arguments[0] in ("-u", "-W"):
    if arguments.pop(0) == "-W":
        options.append(arguments.pop(0))
kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
code = arguments[0]
if kind == "-c":
    arguments[0] = "-c"
elif not kind:
    code = open(code).read()
asked = dict(argv=arguments, kind=kind, code=code, warnings=options)
asked |= dict(folder=os.getcwd(), env=dict(os.environ))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    socket.send_fds(connection, [b" "], [0, 1, 2])
    connection.sendall(json.dumps(asked).encode() + b"\\n")
    said = connection.makefile()
    pid = 0
    def forward(number, _):
        os.kill(pid, number)
    pid = int(said.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    status = int(said.read())
if status < 0:
    if status != -signal.SIGKILL:  # which nobody can handle
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def threads_of(pid):
    """Return where the threads of a process are, the main one last, if a debugger is here."""
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 15"]
    if not shutil.which(command[0]):
        return ""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout[-8000:]
    return "the debugger did not answer"


class Program:
    """One program, in a process group of its own."""

    def __init__(self, connection, output):
        self._connection, self._output, self._code = connection, Path(output), None
        self.pid = int(self._number())

    def _number(self):
        said = b""
        while not said.endswith(b"\n"):
            said += self._connection.recv(1) or b"the server has ended\n"
        return said

    def poll(self):
        """Return the exit status, or None as long as it runs."""
        if self._code is None:
            self._connection.settimeout(0)
            with suppress(BlockingIOError):
                self._connection.recv(1, socket.MSG_PEEK)
                self._connection.settimeout(None)
                self._code = int(self._number())
                self._connection.close()
        return self._code

    def wait(self, seconds=100):
        """Return the exit status, once it has ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                text = self._output.read_text(errors="replace")
                text += f"\n{threads_of(self.pid)}"
                raise AssertionError(f"{self.pid} did not end within {seconds} s, but said: {text}")
            time.sleep(0.005)
        return self._code

    def kill(self):
        """Kill what is left of it, and of what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Programs:
    """Starts programs, from several threads too, by the server that listens in a folder."""

    def __init__(self, folder):
        self.folder, self.python = folder, folder / "python"
        self._lock, self._started = threading.Lock(), []

    def start(self, code, *argv, output, errors=None, folder=".", **env):
        """Start a program: its code, or the file that holds it; what it prints goes to a file."""
        argv = ["train.py", *argv]
        if isinstance(code, Path):
            argv[0], code = code, code.read_text()
        asked = {
            "argv": list(map(str, argv)), "kind": "", "code": code, "warnings": ["error"],
            "folder": str(Path(folder).resolve()),
            "env": {"OMP_NUM_THREADS": "1", **os.environ, **env},  # as torchrun has it
        }  # fmt: skip
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.folder / "socket"))
        flags = os.O_CREAT | os.O_APPEND | os.O_RDWR
        files = [os.open(name, flags) for name in (os.devnull, output, errors or output)]
        socket.send_fds(connection, [b" "], files)
        for file in files:
            os.close(file)
        connection.sendall(json.dumps(asked).encode() + b"\n")
        program = Program(connection, errors or output)
        with self._lock:
            self._started.append(program)
        return program

    def end(self):
        for program in self._started:
            if program.poll() is None:
                program.kill()


def use_folder(folder):
    """Start programs by the server of another process, which listens in `folder`."""
    _begun.append(Programs(Path(folder)))
    _ending.callback(_begun[0].end)


def the_programs():
    """Return what starts the programs of most tests. Its interpreter starts when first asked."""
    if not _begun:
        _begun.append(_ending.enter_context(forking(*preloaded)))
    return _begun[0]


def python():
    """Return the path of what runs programs as ``python``, without the time that torch takes."""
    return the_programs().python


def end_all():
    """End what the tests have started."""
    _begun.clear()
    _ending.close()


_begun, _ending = [], ExitStack()


@contextmanager
def forking(*modules):
    """Yield what starts programs, with these modules imported; none of them is left at the end."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="pardata-forks-") as folder:
        programs, address = Programs(Path(folder)), Path(folder, "socket")
        programs.python.write_text(PYTHON.format(executable=sys.executable, address=str(address)))
        (programs.folder / "torchrun").write_text(TORCHRUN)
        for command in (programs.python, programs.folder / "torchrun"):
            command.chmod(0o700)
        command = [sys.executable, "-c", SERVER, address, programs.python]
        command += [*_SLOW, *modules]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as server:
            while not address.exists() and server.poll() is None:
                time.sleep(0.005)
            try:
                yield programs
            finally:
                programs.end()
                server.kill()  # what was forked here may still hold its input open
