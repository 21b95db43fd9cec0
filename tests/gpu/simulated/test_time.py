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
    torch.sim.set_pace()


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


def test_a_stream_keeps_its_order(sim):
    total = torch.zeros((), device="sim")
    for number in range(100):
        total.mul_(2).add_(number).remainder_(1009)
    expected = 0
    for number in range(100):
        expected = (2 * expected + number) % 1009
    assert total.item() == expected


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_that_takes_long_is_late_for_other_streams(sim, waits):
    value, aside = torch.zeros((), device="sim"), sim.Stream()
    aside.wait_stream(sim.current_stream())
    with sim.stream(aside):
        sim._sleep(10_000_000)
        value.add_(1)
    if waits:
        sim.current_stream().wait_stream(aside)
    assert value.item() == waits


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


def test_other_memory_is_read_at_once(sim):
    source = torch.ones(COUNT)
    copy = source.to("sim", non_blocking=True)
    source.zero_()
    assert copy.sum().item() == COUNT


def test_events_tell_the_simulated_time(sim):
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    start.record()
    sim._sleep(2_000_000)  # of 2 GHz
    end.record()
    assert (start.query(), end.query()) == (True, False)
    end.synchronize()
    assert end.query()
    assert 1 <= start.elapsed_time(end) < 1.01


def test_what_goes_from_one_device_to_another_waits_for_both(sim):
    here, there = torch.ones(COUNT, device="sim:0"), torch.zeros(COUNT, device="sim:1")
    with sim.device(1):
        sim._sleep(10_000_000)
        there.fill_(2)
    there.copy_(here)
    assert there.sum().item() == COUNT


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
    "an index of the CPU": lambda sim, x: x[torch.tensor([0])],
    "equal": lambda sim, x: torch.equal(x, x),
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


def test_training_waits_for_nothing(sim):
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)]
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(144, 3)).to("sim")
    optimizer = torch.optim.Adam(net.parameters())
    images = torch.ones(5, 1, 8, 8).pin_memory()
    before = sum(sim.waits().values())
    sim.set_sync_debug_mode("error")
    for _ in range(2):
        optimizer.zero_grad()
        rows = images.to("sim", non_blocking=True)
        with torch.autocast("sim", dtype=torch.bfloat16):
            loss = net(rows).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert sum(sim.waits().values()) == before
