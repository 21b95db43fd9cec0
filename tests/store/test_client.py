"""The client of the group's store, which may hang, or end."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from common_store import clients
from ctrl_c import ctrl_c
from launched import launched, slurm_variables
from on_ranks import caught
from processes import wait_for

import pardata
from pardata.store import _client
from pardata.store._round import abort_rounds, exchange

LONG = timedelta(seconds=30)


def lose_rank_0(directory):
    # The store lives in rank 0's process, as under SLURM and MPI.
    pardata.init(timeout=LONG)
    pardata.barrier()
    if pardata.world().rank == 0:
        time.sleep(0.2)  # the other is waiting by now
        os._exit(3)
    raised = caught(pardata.barrier)
    (Path(directory) / "outcome").write_text(f"{raised.type} {raised.seconds:.1f} {raised.text}")


def test_a_store_that_dies_with_rank_0_raises_at_once(tmp_path):
    with pytest.raises(RuntimeError, match="the process ended with exit code 3"):
        launched(lose_rank_0, str(tmp_path), size=2, variables=slurm_variables)
    kind, seconds, text = (tmp_path / "outcome").read_text().split(" ", 2)
    assert kind == "RuntimeError"
    assert float(seconds) < LONG.total_seconds() - 5
    assert text.startswith(
        "the process that serves the group's store (rank 0, or torchrun's agent) must stay as "
        "long as any rank, but has ended: see its output; this rank is at "
    )


FROZEN = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process by SIGSTOP")
def test_a_store_that_does_not_answer_is_an_error_and_no_hang(monkeypatch, programs, tmp_path):
    monkeypatch.setattr(_client, "_MARGIN", 0.5)
    server, port = programs.start(FROZEN, output=tmp_path / "port"), tmp_path / "port"
    wait_for(lambda: port.read_text().endswith("\n"), often=0.02)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    store.set("there", "yes")
    os.kill(server.pid, signal.SIGSTOP)
    first, second = clients(2, store, timedelta(seconds=0.5))
    for call in (
        lambda: exchange(first, "somewhere", lambda: "x"),
        lambda: exchange(second, "somewhere", lambda: "x", timeout=timedelta(hours=2)),
        lambda: abort_rounds(first, "it left"),
    ):
        raised = caught(call)
        assert raised.type == "TimeoutError"
        says = r".*'s store .* must answer, but has not for 0:00:00.*test_client\.py:\d+"
        assert re.fullmatch(says, raised.text)
    server.kill()


def test_an_interrupted_wait_holds_up_no_later_request():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, _ = clients(2, dist.TCPStore("127.0.0.1", server.port, is_master=False))
    with ctrl_c(lambda: server.check(["at/0"])):
        exchange(client, "somewhere", lambda: None)
    began = time.monotonic()
    client.request(lambda store: store.set("later", "yes"))
    assert time.monotonic() - began < LONG.total_seconds() / 2  # when the wait would end
    assert server.get("later") == b"yes"


def test_a_request_that_a_signal_interrupts_at_its_start_is_not_made(monkeypatch):
    # PyTorch's handler of SIGCHLD raises a RuntimeError when a worker is killed.
    start, begun = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        raise RuntimeError("a worker is killed")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        client, _ = clients(2, dist.HashStore())
        with pytest.raises(RuntimeError, match="a worker is killed"):
            client.request(lambda _: begun.append(1))
    client.request(lambda _: begun.append(2))
    assert begun == [2]
