"""Streams and events: what nobody waits for is late, every time, and a host wait is seen."""

import pytest
import torch

COUNT = 1000


@pytest.fixture
def sim():
    """Start with nothing queued, and leave no setting behind."""
    torch.sim.synchronize()
    yield torch.sim
    torch.sim.set_sync_debug_mode("default")


def copied_aside(sim, waits):
    """Copy onto the device on a side stream; return what the main stream reads of it."""
    source, target = torch.ones(COUNT).pin_memory(), torch.zeros(COUNT, device="sim")
    sim.synchronize()
    done, aside = sim.Event(), sim.Stream()
    with sim.stream(aside):
        target.copy_(source, non_blocking=True)
        done.record()
    if waits == "for the event":
        sim.current_stream().wait_event(done)
    if waits == "for the stream":
        sim.current_stream().wait_stream(aside)
    if waits == "as the host":
        done.synchronize()
    total = target.sum().item()
    sim.synchronize()
    return total


@pytest.mark.parametrize("waits", ["for the event", "for the stream", "as the host"])
def test_what_was_waited_for_is_there(sim, waits):
    assert [copied_aside(sim, waits) for _ in range(5)] == [COUNT] * 5


def test_what_was_not_waited_for_is_stale(sim):
    assert [copied_aside(sim, "") for _ in range(5)] == [0] * 5


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_finds_a_copy_only_if_it_waits(sim, waits):
    source, target = torch.ones(COUNT, device="sim"), torch.zeros(COUNT).pin_memory()
    target.copy_(source, non_blocking=True)
    if waits:
        sim.current_stream().synchronize()
    assert target.sum() == COUNT * waits


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_is_read_late(sim, waits):
    source = torch.ones(COUNT).pin_memory()
    copy = source.to("sim", non_blocking=True)
    if waits:
        sim.current_stream().synchronize()
    source.zero_()
    assert copy.sum().item() == COUNT * waits


# --- host waits


def wait_for_an_event(sim):
    sim._sleep(10**6)
    sim.current_stream().record_event().synchronize()


WAITS = {
    "item": lambda sim, x: x.sum().item(),
    "a blocking copy onto it": lambda sim, x: torch.ones(2).to("sim"),
    "a blocking copy off it": lambda sim, x: x.cpu(),
    "a copy onto it that is not pinned": lambda sim, x: torch.ones(2).to("sim", non_blocking=True),
    "a copy off it that is not pinned": lambda sim, x: torch.empty(COUNT).copy_(x, True),
    "nonzero": lambda sim, x: x.nonzero(),
    "a mask": lambda sim, x: x[x > 0],
    "a stream": lambda sim, x: sim.current_stream().synchronize(),
    "the device": lambda sim, x: sim.synchronize(),
    "an event": lambda sim, x: wait_for_an_event(sim),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_host_wait_is_seen(sim, what):
    values = torch.ones(COUNT, device="sim")
    before = sum(sim.waits().values())
    WAITS[what](sim, values)
    assert sum(sim.waits().values()) > before
    sim.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing operation"):
        WAITS[what](sim, values)
    sim.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing operation"):
        WAITS[what](sim, values)
