"""What a bad input gets: at the call that is wrong, on every rank, with cause and cure.

``python tests/test_bad_inputs.py`` prints the table: what was typed, what came back, how soon.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import Raised, run_caught
from torch import nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset

from pardata import all_reduce_mean, init, make_loader, world, wrap_model

TEN = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Broken(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7:
            message = "the file is truncated"
            raise OSError(message)
        return index


def differs(ours, others):
    """Return `ours` on rank 0 and `others` elsewhere."""
    return ours if world().rank == 0 else others


def unknown_strategy():
    wrap_model(nn.Linear(2, 2), "dpp")


def no_module():
    wrap_model([nn.Linear(2, 2)], "ddp")


def class_for_module():
    wrap_model(nn.ReLU, "ddp")


def wrapped_twice():
    wrap_model(wrap_model(nn.Linear(2, 2), "ddp"), "ddp")


def nothing_to_train():
    wrap_model(nn.ReLU(), "ddp")


def unknown_option():
    wrap_model(nn.Linear(2, 2), "ddp", find_unused=True)


def batch_size_zero():
    make_loader(TEN, 0)


def batch_size_fraction():
    make_loader(TEN, 2.5)


def batch_size_zero_on_one_rank():
    make_loader(TEN, differs(4, 0))


def batch_smaller_than_world():
    make_loader(TEN, 1)


def batch_larger_than_data():
    make_loader(TEN, 11, shuffle=True)


def tail_smaller_than_world():
    make_loader(TEN, 3, shuffle=True, drop_last=False)


def no_data_set():
    make_loader(object(), 4)


def shuffled_iterable():
    make_loader(Stream(), 4, shuffle=True)


def sampler_and_shuffle():
    make_loader(TEN, 4, sampler=RandomSampler(TEN), shuffle=True)


def microbatch_size_zero():
    make_loader(TEN, 4, microbatch_size=0)


def microbatch_larger_than_batch():
    make_loader(TEN, 4, microbatch_size=differs(5, 2))


def sharded_data_set_with_indices():
    make_loader(TEN, 4, sharded=True)


def negative_prefetch():
    make_loader(TEN, 4, prefetch=-1)


def microbatch_sizes_differ():
    make_loader(TEN, 4, microbatch_size=differs(1, 2))


def state_of_another_loader():
    state = make_loader(TEN, 4, seed=1).state_dict()
    make_loader(TEN, 4, seed=2).load_state_dict(state)


def draws_from_a_share():
    return list(make_loader(TEN, 4, collate_fn=lambda samples: torch.rand(len(samples))))


def lengths_differ():
    make_loader(TensorDataset(torch.arange(differs(10, 9))), 4)


def seeds_differ():
    make_loader(TEN, 4, shuffle=True, seed=differs(1, 2))


def batch_sizes_differ():
    make_loader(TEN, differs(4, 6))


def models_differ():
    wrap_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, differs(3, 4))), "ddp")


def strategies_differ():
    wrap_model(nn.Linear(2, 2), differs("ddp", "fdsp"))


def structures_differ():
    all_reduce_mean(differs({"loss": 1.0}, {"loss": 1.0, "accuracy": 0.5}))


def shapes_differ():
    all_reduce_mean(torch.zeros(differs(3, 4)))


def leaf_is_no_number():
    all_reduce_mean({"loss": [1.0, 2.0, "3"]})


def leaf_is_no_number_on_one_rank():
    all_reduce_mean({"loss": [1.0, differs(2.0, None)]})


def negative_weight():
    all_reduce_mean(1.0, weight=-1)


def no_weight_at_all():
    all_reduce_mean(1.0, weight=0)


def unreadable_sample():
    return [list(batch) for batch in make_loader(Broken(), 10)]


def distributed_without_launcher():
    make_loader(TEN, 4, distributed=True)


def init_not_called():
    make_loader(TEN, 4)


def bare_init():
    init()


def init_on_a_machine_with_one_gpu():
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.cuda.set_device = lambda _device: None
    torch.cuda.get_device_properties = lambda _device: SimpleNamespace(uuid="the only one")
    init()


def torchrun(rank, size, **changes):
    """Return torchrun's variables for a rank; ``None`` takes one away."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {n: str(v) for n, v in zip(names, (rank, size) * 2, strict=True)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"} | changes
    return {name: value for name, value in env.items() if value is not None}


@dataclass
class Case:
    """One bad input: the function that makes it, and what must be said."""

    fn: Callable
    type: str
    says: list[str]
    sizes: tuple[int, ...] = (1, 2)
    env: Callable | None = None  # variables of real processes, for what must not have a group
    port_taken: bool = False
    ranks: tuple[int, ...] | None = field(default=None)  # which raise, if not all


CASES = [
    Case(unknown_strategy, "ValueError", ["`strategy` must be one of", "'dpp'", "'fsdp'"]),
    Case(no_module, "TypeError", ["`model` must be a torch.nn.Module", "a list"]),
    Case(class_for_module, "TypeError", ["must be a torch.nn.Module", "the class ReLU"]),
    Case(wrapped_twice, "ValueError", ["`model` must not be wrapped yet", "unwrap(model)"]),
    Case(nothing_to_train, "ValueError", ["must have a parameter to train", "strategy='none'"]),
    Case(unknown_option, "TypeError", ["'find_unused' is not", "find_unused_parameters"]),
    Case(batch_size_zero, "ValueError", ["`batch_size` must be at least", "is 0"]),
    Case(batch_size_fraction, "TypeError", ["`batch_size` must be an integer, but is 2.5"]),
    Case(batch_size_zero_on_one_rank, "", ["`batch_size` must be at least 2", "is 0"], (2,)),
    Case(batch_smaller_than_world, "ValueError", ["at least 2, one a rank, but is 1"], (2,)),
    Case(batch_larger_than_data, "ValueError", ["at most the 10 samples", "drop_last=False"]),
    Case(tail_smaller_than_world, "ValueError", ["a sample for each of the 2 ranks"], (2,)),
    Case(no_data_set, "TypeError", ["__getitem__ and __len__, or be an IterableDataset"]),
    Case(shuffled_iterable, "ValueError", ["must be left out for an IterableDataset"]),
    Case(sampler_and_shuffle, "ValueError", ["`shuffle` must be False with a `sampler`"]),
    Case(sharded_data_set_with_indices, "ValueError", ["`sharded` must be False", "leave it out"]),
    Case(microbatch_size_zero, "ValueError", ["`microbatch_size` must be at least 1", "is 0"]),
    Case(microbatch_larger_than_batch, "", ["at most the `batch_size` of 4", "but is 5"]),
    Case(negative_prefetch, "ValueError", ["`prefetch` must be an integer from 0 up", "is -1"]),
    Case(microbatch_sizes_differ, "RuntimeError", ["`microbatch_size` differ", "rank 1:"], (2,)),
    Case(state_of_another_loader, "ValueError", ["seed was 1 and is 2"]),
    Case(draws_from_a_share, "RuntimeError", ["`collate_fn` must draw no", "microbatch_size"]),
    Case(lengths_differ, "RuntimeError", ["`the length` differ", "rank 1: the length=9"], (2,)),
    Case(seeds_differ, "RuntimeError", ["`seed` differ", "rank 1: seed=2"], (2,)),
    Case(batch_sizes_differ, "RuntimeError", ["`batch_size` differ", "rank 1:"], (2,)),
    Case(models_differ, "RuntimeError", ["the same model", "`1.weight` (4, 2) float32"], (2,)),
    Case(strategies_differ, "", ["`strategy` must be one of", "'fdsp'"], (2,)),
    Case(structures_differ, "RuntimeError", ["['accuracy']", "rank 1:"], (2,)),
    Case(shapes_differ, "RuntimeError", ["value: 4", "rank 1:"], (2,)),
    Case(leaf_is_no_number, "TypeError", ["`value['loss'][2]` must be a number", "'3'"]),
    Case(leaf_is_no_number_on_one_rank, "", ["`value['loss'][1]` must be a number"], (2,)),
    Case(negative_weight, "ValueError", ["`weight` must be a finite number", "-1"]),
    Case(no_weight_at_all, "ValueError", ["`weight` must be positive on at least one rank"]),
    Case(unreadable_sample, "RuntimeError", ["sample 7 could not be read on rank 0"], (1,)),
    Case(unreadable_sample, "RuntimeError", ["sample 7", "on rank 1"], (2,), ranks=(1,)),
    Case(
        distributed_without_launcher,
        "RuntimeError",
        ["`distributed` must be 'auto' or False without a launcher", "torchrun"],
        (1,),
        lambda _rank, _size: {},
    ),
    Case(
        init_not_called,
        "RuntimeError",
        ["`make_loader` needs the process group", "call it first"],
        (2,),
        torchrun,
    ),
    Case(
        init_on_a_machine_with_one_gpu,
        "RuntimeError",
        ["must be less than the number of visible GPUs, 1, but is 1", "--nproc-per-node=1"],
        (2,),
        torchrun,
    ),
    Case(
        bare_init,
        "ValueError",
        ["`LOCAL_RANK` must still be set", "PARDATA_LAUNCHER=none"],
        env=lambda rank, size: torchrun(rank, size, LOCAL_RANK=None),
    ),
    Case(
        bare_init,
        "ValueError",
        ["the rank must be less than the world size", "contradict"],
        env=lambda rank, size: torchrun(rank + size, size),
    ),
    Case(
        bare_init,
        "ValueError",
        ["`WORLD_SIZE` must be a whole number, but is 'two'"],
        env=lambda rank, size: torchrun(rank, size, WORLD_SIZE="two"),
    ),
    Case(
        bare_init,
        "RuntimeError",
        ["'no-such-host.invalid' does not", "MASTER_ADDR"],
        env=lambda rank, size: torchrun(rank, size, MASTER_ADDR="no-such-host.invalid"),
    ),
    Case(
        bare_init,
        "RuntimeError",
        ["is in use", "set MASTER_PORT to a free port"],
        (1,),
        torchrun,
        port_taken=True,
    ),
]


def outcomes(case, size):
    """Make the bad input on `size` ranks; return what each raised, or its result."""
    if case.env is None:
        return run_caught(case.fn, world_size=size, timeout=60)
    return in_processes(case, size)


def in_processes(case, size):
    """Run a case in real processes that have a launcher's variables and no group."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        if case.port_taken:
            taken.listen()
        else:
            taken.close()
        started = time.monotonic()
        code = f"import test_bad_inputs as t; t.report(t.{case.fn.__name__})"
        environments = [
            {**os.environ, **{k: v.format(port=port) for k, v in case.env(rank, size).items()}}
            for rank in range(size)
        ]
        processes = [start(code, env) for env in environments]
        try:
            texts = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    seconds = time.monotonic() - started
    return [Raised(*text.split(": ", 1), "", seconds) if text else None for text in texts]


def start(code, env):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )


def report(fn):
    """Print what `fn` raises: the child's side of `in_processes`."""
    try:
        fn()
    except Exception as error:  # noqa: BLE001  # any of them is the answer
        print(f"{type(error).__name__}: {error}", end="", flush=True)
        os._exit(1)  # at once, as a launcher would end the ranks of a failed run


def names(case):
    return f"{case.fn.__name__}-{case.says[0][:20]}"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_bad_input_is_an_error_on_every_rank(case, size):
    if size not in case.sizes:
        pytest.skip(f"this input is wrong at {case.sizes} processes only")
    for rank, outcome in enumerate(outcomes(case, size)):
        if case.ranks is not None and rank not in case.ranks:
            assert not isinstance(outcome, Raised)
            continue
        assert isinstance(outcome, Raised), outcome
        assert case.type in outcome.type
        for fragment in case.says:
            assert fragment in outcome.text
        assert outcome.seconds < 30


def print_table():
    print("| what was typed | processes | what came back | on ranks | after |")
    print("| --- | --- | --- | --- | --- |")
    for case in CASES:
        for size in case.sizes:
            got = outcomes(case, size)
            raised = {rank: o for rank, o in enumerate(got) if isinstance(o, Raised)}
            first = next(iter(raised.values()))
            text = first.text.replace("\n", " / ").replace("|", "\\|")
            print(
                f"| `{case.fn.__name__}` | {size} | {first.type}: {text} "
                f"| {', '.join(map(str, raised))} of {size} | {first.seconds:.2f} s |"
            )


if __name__ == "__main__":
    print_table()
