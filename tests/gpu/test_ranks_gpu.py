"""The world, collectives, streams and signals on a GPU, over NCCL and over gloo.

Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import contextlib
import signal
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from common_gpu import nothing_waits
from on_ranks import caught, run
from torch.utils.data import IterableDataset

from pardata import (
    StopSignal,
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    backward,
    barrier,
    broadcast,
    check_in_sync,
    init,
    make_loader,
    rank_zero_call,
    world,
    wrap_model,
)


def facts_of(device):
    with init(device=device) as here:
        bound = dist.group.WORLD.bound_device_id
        return here.size, here.local_rank, here.device.type, is_current(here.device), bound


def backend_for(kind):
    """Return the backend of a kind of GPU, as torch has it, beside that of the CPU."""
    return f"{kind}:{dist.get_default_backend_for_device(kind)},cpu:gloo"


def is_current(device):
    return device.index in (None, torch.get_device_module(device).current_device())


def cannot_use(device):
    return torch.get_device_module(device)._is_in_bad_fork()


def test_a_rank_can_use_a_gpu_although_it_was_forked(gpu):
    # From a server that must not have looked at GPUs: CUDA is then of no use to its children.
    torch.ones(1, device=gpu)
    assert run(cannot_use, gpu, world_size=2, fresh=True) == [False, False]


def test_the_device_of_each_rank_is_current(everywhere, hardware):
    found = everywhere(facts_of)
    for rank, facts in enumerate(found):
        assert facts[:4] == (len(found), rank, hardware, True)
        assert facts[4] in (None, torch.device(hardware, rank))


def device_at_the_start(device):
    """Return which device is current when torch makes the group, and which is this rank's."""
    make, seen = dist.init_process_group, []

    def noted(*args, **options):
        seen.append(torch.get_device_module(device).current_device())
        make(*args, **options)

    dist.init_process_group = noted
    try:
        with init(device=device) as here:
            return seen, here.device.index
    finally:
        dist.init_process_group = make


def test_the_device_is_chosen_before_the_group_is_made(gpu, over_nccl):
    found = over_nccl(device_at_the_start)
    assert found == [([rank], rank) for rank in range(len(found))]


# --- collectives


def collectives(device):
    """Return what each rank got of values on the device, having seen that it came back there."""
    with init(device=device) as here:
        own = torch.arange(3.0, device=here.device) + here.rank
        halves, numbers = own.to(torch.bfloat16), torch.arange(70, device=here.device)
        value = {"own": own, "rank": here.rank, "halves": [halves]}
        mean = all_reduce_mean(value, weight=here.rank + 1)
        total = all_reduce_sum((numbers, own > 1, 1))
        rows = all_gather(own[: here.rank, None].expand(-1, 2))
        assert mean["own"].device == mean["halves"][0].device == here.device
        assert mean["halves"][0].dtype == torch.bfloat16
        assert {part.device for part in (*total[:2], *rows)} == {here.device}
        most, least = all_reduce_max((own, here.rank)), all_reduce_min([numbers + here.rank])
        assert {most[0].device, least[0].device} == {here.device}
        assert (most[0].tolist(), most[1]) == ([n + here.size - 1 for n in range(3)], here.size - 1)
        assert least[0].tolist() == list(range(70))
        # A rank without batches has a number, as others have on the CPU what is on a GPU here.
        some = all_reduce_sum({"loss": own.sum() if here.rank else 0.0, "n": numbers.cpu()})
        assert some["loss"] == sum(3 * rank + 3 for rank in range(1, here.size))
        sent = broadcast([own, halves.cpu(), "text"])
        assert (sent[0].tolist(), sent[1].tolist(), sent[2]) == ([0, 1, 2], [0, 1, 2], "text")
        assert (sent[0].device, sent[1].device.type) == (here.device, "cpu")
        assert all_gather({"rows": own, "names": ["a"] * here.rank})[-1]["names"] == ["a"] * (
            here.size - 1
        )
        different = caught(lambda: all_reduce_sum(own[: here.rank + 1]))
        told = rank_zero_call(lambda: {"a": own, "b": 1})
        assert here.is_main or told["a"].device.type == "cpu"
        barrier()
        return (
            [mean["own"].tolist(), mean["rank"], mean["halves"][0].tolist()],
            [total[0].tolist(), total[1].tolist(), total[2]],
            [row.tolist() for row in rows],
            told["a"].tolist(),
            "differ" in getattr(different, "text", "they need not, for there is one: differ"),
        )


def test_collectives_take_tensors_where_they_are_and_leave_them_there(everywhere):
    found = everywhere(collectives)
    size = len(found)
    whole = sum((rank + 1) * rank for rank in range(size)) / sum(range(1, size + 1))
    mean = [whole, whole + 1, whole + 2]
    rounded = torch.tensor(mean).to(torch.bfloat16).tolist()
    above = [float(sum(rank + place > 1 for rank in range(size))) for place in range(3)]
    for means, totals, rows, told, differed in found:
        assert means == [pytest.approx(mean), pytest.approx(whole), rounded]
        assert totals == [[size * number for number in range(70)], above, size]
        assert rows == [[[float(rank + n)] * 2 for n in range(rank)] for rank in range(size)]
        assert told == [0, 1, 2]
        assert differed


def unwaited(device):
    """Reduce with what is on the device, where to wait for it is an error; return what came."""
    with init(device=device) as here:
        loss, count = torch.tensor(0.5, device=here.device), torch.ones(3, device=here.device).int()
        value = {"loss": loss, "rate": 0.25, "many": torch.ones(100, device=here.device)}
        calls = [lambda: all_reduce_mean(value, weight=2)]
        calls += [lambda f=f: f((loss, count, 3)) for f in (all_reduce_sum, all_reduce_max)]
        for call in calls:
            call()  # connects
        # gloo takes from the CPU.
        with contextlib.nullcontext() if here.backend == "gloo" else nothing_waits(here.device):
            mean, total, most = (call() for call in calls)
        assert {x.device for x in (mean["loss"], mean["many"], *total[:2], *most[:2])} == {
            here.device
        }
        assert (mean["rate"], total[2], most[2]) == (0.25, 3 * here.size, 3)
        return mean["loss"].item(), (total[1] / here.size).tolist(), most[1].tolist()


def test_no_reduction_waits_for_a_gpu(everywhere):
    assert set(map(repr, everywhere(unwaited))) == {"(0.5, [1.0, 1.0, 1.0], [1, 1, 1])"}


def beside_gradients(device):
    """Train, and tell numbers while gradients are on their way; return how both went, and when."""
    ways, all_reduce = set(), dist.all_reduce

    def noted(tensor, *args, group=None, **options):
        is_default = group in (None, dist.group.WORLD)
        ways.add((tensor.device.type, "default" if is_default else "another"))
        return all_reduce(tensor, *args, group=group, **options)

    with init(device=device) as here, StopSignal(signal.SIGUSR2) as stop:
        model = wrap_model(torch.nn.Linear(200, 200), "ddp")
        rows, heard = torch.ones(2, 200, device=here.device), []
        dist.all_reduce = noted
        try:
            for step in range(6):
                if step == 3 and here.rank == here.size - 1:
                    signal.raise_signal(signal.SIGUSR2)
                backward(model, lambda model, batch: model(batch).mean(), rows)
                heard.append(stop.agreed())
                told = all_reduce_mean({"step": step, "rank": here.rank})
                assert told == {"step": step, "rank": (here.size - 1) / 2}
        finally:
            dist.all_reduce = all_reduce
        check_in_sync(model)
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        assert all(torch.allclose(gradient, torch.tensor(6 / 200)) for gradient in gradients)
        return ways, heard.index(True), here.backend


def test_small_numbers_travel_beside_gradients_in_another_way(everywhere, hardware):
    for ways, stopped_at, backend in everywhere(beside_gradients):
        if stopped_at == 3:  # one rank, which tells nobody
            continue
        numbers = ("cpu", "another" if backend == "gloo" else "default")
        assert ways == {(hardware, "default"), numbers}
        assert stopped_at == 4


# --- streams


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.full((2,), float(number)) for number in range(11))


def streamed(device):
    with init(device=device) as here:
        loader = make_loader(Stream(), 4, seed=0, drop_last=False, prefetch=2)
        batches = [batch for _ in range(2) for batch in loader]
        assert {batch.device for batch in batches} == {here.device}
        return [batch[:, 0].tolist() for batch in batches]


def test_each_sample_of_a_stream_reaches_one_rank(everywhere):
    found = everywhere(streamed)
    steps = [sorted(chain(*shares)) for shares in zip(*found, strict=True)]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] * 2


# --- a group that somebody else made


def adopted(device):
    """Adopt the gloo group of `run`, whose device is asked for."""
    here = init(device=device)
    assert world() == here
    return str(here.device), is_current(here.device)


def test_the_device_of_an_adopted_group_is_current(device):
    assert run(adopted, device, world_size=2) == [(device, True)] * 2


def bound(kind):
    """Leave the gloo group of `run`, and adopt one that is bound to a GPU, as others make it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    own, backend = None, "gloo"
    if kind != "cpu":
        own, backend = torch.device(kind, rank), backend_for(kind)
    dist.init_process_group(
        backend, store=dist.PrefixStore("gpu", store), rank=rank, world_size=size, device_id=own
    )
    device, has_it = adopted(None)
    return device == str(own or "cpu"), has_it, sorted(world().backend.split(","))


@pytest.mark.parametrize("size", [1, 2])
def test_the_device_that_an_adopted_group_is_bound_to_is_made_current(size, hardware, request):
    if size == 2:
        request.getfixturevalue("needs_two")
    backend = ["gloo"] if hardware == "cpu" else sorted(backend_for(hardware).split(","))
    assert run(bound, hardware, world_size=size, fresh=True) == [(True, True, backend)] * size
