"""Collective calls belong to one thread of a rank."""

from concurrent.futures import ThreadPoolExecutor

import torch
from on_ranks import caught, run
from torch import nn

from pardata import all_reduce_mean, backward, barrier, check_in_sync, init, wrap_model


def in_thread(fn, *args):
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(caught, fn, *args).result()


def from_two_threads():
    """Return what calls of a second thread end in, while the first goes on, and once it has."""
    assert all_reduce_mean(1.0) == 1
    calls = [(all_reduce_mean, 100.0), (barrier,), (check_in_sync, nn.Linear(1, 1))]
    calls += [(wrap_model, nn.Linear(1, 1), "ddp")]
    return [str(in_thread(*call)) for call in calls], all_reduce_mean(2.0)


def test_a_second_thread_raises_on_every_rank_and_the_first_goes_on():
    for size in (2, 3):
        for errors, mean in run(from_two_threads, world_size=size):
            assert mean == 2
            for error, call in zip(
                errors, ("all_reduce_mean", "barrier", "check_in_sync", "wrap_model"), strict=True
            ):
                assert error == (
                    f"RuntimeError: `{call}` must be called in the thread of all collectives, "
                    f"'MainThread', but is in 'other_0': call it there, or train here alone, after "
                    f"`pardata.init()` here"
                )


def trained(joins):
    if joins:
        init()
    model = wrap_model(nn.Linear(2, 1), "ddp")
    return float(backward(model, lambda m, x: m(x).mean(), torch.ones(2, 2)))


def elsewhere():
    """Train in other threads, with and without `init` there, then in this one."""
    init()
    found = ["in the thread of all" in str(in_thread(trained, joins)) for joins in (False, True)]
    return [*found, all_reduce_mean(1.0)]


def test_training_may_run_in_the_thread_of_the_last_init():
    assert run(elsewhere, world_size=2) == [[True, False, 1.0]] * 2


def mixed():
    """Average two numbers in two threads, of which other ones begin on the ranks."""
    rank, names = init().rank, ["loss", "accuracy"]
    return [str(in_thread(all_reduce_mean, 1.0)) for _ in sorted(names, reverse=rank)]


def test_numbers_of_two_threads_are_never_mixed():
    for errors in run(mixed, world_size=2):
        assert all("must be called in the thread of all collectives" in error for error in errors)


def alone():
    return [in_thread(all_reduce_mean, 3.0), all_reduce_mean(1.0), in_thread(all_reduce_mean, 2.0)]


def test_a_single_process_may_call_them_in_every_thread():
    assert alone() == [3.0, 1.0, 2.0]
