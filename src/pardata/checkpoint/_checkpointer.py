"""The state of a run: saved so that it survives, restored into any strategy and world size."""

import atexit
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from textwrap import shorten
from typing import Any, Literal

import torch.distributed as dist

from pardata._validation import FixedArguments, check_bool, check_int, local_path, plain_number
from pardata.checkpoint import _dcp as shards
from pardata.checkpoint._directory import CheckpointDirectory, Retention, checkpoint_names
from pardata.checkpoint._manifest import STATE, Record, save
from pardata.checkpoint._restore import Restored, Templates, load_latest, sharding_templates
from pardata.checkpoint._snapshot import Snapshot, check_stateful
from pardata.collectives._all_gather import gather_to_rank_zero
from pardata.collectives._barrier import rank_zero_call
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.data._loader import Loader
from pardata.environment._device import new_gloo_group
from pardata.environment._logger import flush_output, get_logger
from pardata.environment._world import World, require_world, store_client
from pardata.rng._rng_state import get_rng_state, serialize_rng_state
from pardata.store._round import compare_facts, exchange, raise_if_different, require_equal

_log = get_logger(__name__)

_CURE = (
    "Pass the same on all ranks, and what each has of its own in `per_rank`. An optimizer that "
    "ranks share must gather its `state_dict`. `rank_zero_call` gives all the name of a directory."
)


class Checkpointer(FixedArguments, AbstractContextManager["Checkpointer"]):
    """Saves the state of a run to a directory, and restores the newest complete checkpoint.

    Every rank makes one and calls every method. Rank 0 writes, except for sharded parameters
    (``"fsdp"``), of which each rank writes its part. All nodes share the disk. If a process is
    killed or a machine loses power at any moment, complete checkpoints stay as they were. A save
    writes new files, waits until they are on the disk, and then renames them. If two starts write
    to one directory, for example after a requeue, the older one raises an error and changes nothing
    more. It is the older one if it was created, or last restored, before the first save of the
    newer one. Two objects in one process count as two starts. To create a `Checkpointer` is not
    collective and changes nothing. As a context manager it waits at its end for an asynchronous
    save.

    Args:
        directory: a folder on a disk that all nodes share. The first `save` makes it, or the target
            of a link. A relative path is below the current working directory.
        keep: how many of the newest to keep. The oldest is removed once a newer one is complete.
        keep_best: also keep the one checkpoint with the highest value of this name. Give each
            `save` that value: ``save(step, model=model, accuracy=0.9)``. Write "accuracy", or
            "-loss" if less is better.
        asynchronous: let `save` return when the state is copied, and write in the background, one
            at a time. If that fails, the next call of a method raises its error on every rank. If
            the program ends before such a call, its exit status is 1. Before Python exits, it waits
            for the last save.

    Raises:
        ValueError: `keep` is below 1, or `directory` is a URL.
        TypeError: `keep` is no integer, `keep_best` no name, or `asynchronous` no bool.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> checkpointer = Checkpointer(tempfile.mkdtemp())
    >>> checkpointer.save(10, model=model, best=0.5)
    >>> checkpointer.restore(model=model)
    Restored(step=10, values={'best': 0.5})
    """

    _arguments = frozenset({"directory", "keep", "keep_best", "asynchronous"})

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        check_bool("asynchronous", asynchronous)
        self._directory = local_path("directory", directory)
        self._asynchronous = asynchronous
        # Compared between the ranks, which could otherwise write to different directories.
        self._options = {"directory": str(self._directory), "asynchronous": asynchronous}
        self._options |= {"keep": plain_number(keep), "keep_best": keep_best}
        self._folder = CheckpointDirectory(self._directory, Retention(keep, keep_best))
        self._background: BackgroundTask | None = None
        self._group: Any = None  # a gloo group for the collectives of asynchronous saves

    def save(self, step: int, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> None:
        """Save the state of `objects`, then remove all but the newest `keep`. Collective.

        It also saves the states of the default random generators of every rank.

        Args:
            step: of the run, from 0.
            per_rank: objects that differ between ranks, by name: the hidden state of an RNN, a
                replay buffer, environments. Each rank saves them in a separate file.
            objects: by name. `save` takes the state of an object with ``state_dict`` and
                ``load_state_dict``: a model under any strategy, an optimizer, a scheduler, a
                loader. Other objects are saved as values: tensors, numbers, strings, None, and
                dicts, lists and tuples of them. All must be the same on every rank. `save` compares
                all except buffers and sharded tensors, and the names of an optimizer's parameters
                in the order of its state. If the state is distributed over the ranks, its
                ``state_dict`` must gather it. `save` warns of gradients of `backward` that no
                optimizer has used, because a checkpoint has no gradients.

        Raises:
            TypeError: an object, which the error names, could be loaded only by running code. Or
                `per_rank` is no dict of other names, or `step` is no integer. Or the value of
                `keep_best` is missing or no number.
            ValueError: `step` is below 0.
            RuntimeError: ranks differ, or another run has taken over the directory.
            OSError: the checkpoint cannot be written. Every rank raises it, and what was there
                before stays.
        """
        world = require_world("Checkpointer.save")
        self.wait()
        step, local = plain_number(step), per_rank or {}
        objects = {name: plain_number(thing) for name, thing in objects.items()}
        snapshot: Snapshot

        def describe() -> dict[str, object]:
            nonlocal snapshot
            check_int("step", step, least=0)
            self._folder.retention.check_value(objects)
            if not isinstance(local, Mapping) or local.keys() & objects.keys():
                msg = "`per_rank` must be a dict of things by names that no other thing has, but is"
                msg += f" {shorten(repr(local), 100)}: pass per_rank={{'buffer': buffer}}"
                raise TypeError(msg)
            snapshot = Snapshot(world, objects, local, copy=self._asynchronous)
            options = {"step": step, "objects": list(objects), "per_rank": list(local)}
            return {"options": {**options, **self._options}, "details": snapshot.compared}

        require_equal(store_client(), "Checkpointer.save", describe, _raise_of_what_differs)
        with explain_comm_errors("Checkpointer.save"):  # a round would send the states to all ranks
            states = serialize_rng_state(get_rng_state(world.device)), _state_at_start(objects)
            generators = gather_to_rank_zero(world, states)
        contents = {"objects": snapshot.trees, "sharded": list(snapshot.parts)}
        contents |= {"generators": generators, "parameters": snapshot.parameters}
        self._start(world, step, snapshot, contents)

    def restore(self, *, at: int | Literal["best"] | None = None, **objects: Any) -> Restored:
        """Restore `objects` from the newest complete checkpoint. Collective.

        The strategy and the number of processes may differ from those of the save. `restore` skips
        checkpoints that are not complete, and logs the reason. It verifies what it reads, and runs
        no code from it.

        If a loader is among `objects`, the run resumes. `restore` then also restores the seed of
        `seed_everything` and, if there are as many ranks as then, the default random generators of
        each rank. Without a loader it is a new run from old weights, and `restore` does not change
        the seed and the generators. A loader is one of `make_loader`, or a ``DataLoader``, such as
        torchdata's ``StatefulDataLoader``.

        Args:
            at: the step of the checkpoint to take, one of `steps`, of which it takes the newest. Or
                "best", the one that `keep_best` keeps. The newest of all if not given.
            objects: under the names by which they were saved, `per_rank` or not. You need not
                restore all that was saved.

        Returns:
            The step and the values that were saved. If there is no checkpoint, the result is false,
            with step 0. What was saved `per_rank` comes back only on as many ranks as saved it.
            Otherwise a warning names it: its values are missing, and its objects stay as they are.

        Raises:
            ValueError: a name was not saved, or there is no checkpoint of step `at`. Or `at` is
                "best" without `keep_best`, or the directory is one checkpoint itself.
            TypeError: an object is a value; `restore` returns those.
            RuntimeError: there are checkpoints and none is complete, or ranks differ. Or a state
                does not fit its object, which the error names. Some objects may have their new
                state then, so make all of them anew.
            NotADirectoryError: the directory is a file.
        """
        world = require_world("Checkpointer.restore")
        self.wait()
        at, templates = plain_number(at), Templates()

        def describe() -> dict[str, object]:
            if at not in (None, "best"):
                check_int("at", at, least=0)
            check_stateful(objects)
            templates.update(sharding_templates(objects))
            return {**self._options, "at": at, "objects": list(objects)}

        compare_facts(store_client(), "Checkpointer.restore", describe, _CURE)
        if (found := load_latest(world, self._folder, at)) is not None:
            return found.apply(world, objects, templates)
        _log.info("there is no checkpoint in %s: the run starts from step 0", self._directory)
        return Restored()

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, in order. Collective."""
        require_world("Checkpointer.steps")
        self.wait()
        return sorted({name.step for name in rank_zero_call(checkpoint_names, self._directory)})

    def wait(self) -> None:
        """Wait for the last asynchronous save, and raise its error on every rank. Collective."""
        if (background := self._background) is None:
            return
        rank_zero_call(background.join)  # if this is interrupted, the next call waits again
        self._background = None
        rank_zero_call(background.check)  # rank 0's error first: the others follow from it
        exchange(store_client(), "Checkpointer.wait", background.check)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not after an error: the other ranks may be in other calls. The interpreter waits for the
        # thread.
        if kind is None:
            self.wait()

    def _start(self, world: World, step: int, snapshot: Snapshot, contents: dict[str, Any]) -> None:
        """Write a checkpoint, or start to write it in the background. Collective."""
        path = rank_zero_call(self._folder.begin, step)
        is_shared = snapshot.parts or snapshot.per_rank
        if is_shared and self._asynchronous and self._group is None and dist.is_initialized():
            self._group = new_gloo_group()

        def write() -> dict[str, Record]:
            records: dict[str, Record] = {}
            if is_shared:
                parts = snapshot.parts, snapshot.per_rank
                metadata, records = shards.write(world, path, *parts, self._group)
                contents["metadata"] = metadata
            if world.is_main:
                records[STATE] = save(contents, path / STATE)
            return records

        work = partial(self._folder.finish, {"step": step, **snapshot.facts}, write)
        if self._asynchronous:
            what = f"the checkpoint of step {step}"
            self._background = BackgroundTask(work if world.is_main else write, what)
            return
        if not world.is_main:
            with suppress(OSError):  # all ranks know of it, and rank 0 raises it
                write()
        rank_zero_call(work)


def _state_at_start(objects: Mapping[str, Any]) -> bytes | None:
    """Return the generators' states at the start of the body in which a loader is, if one is."""
    loaders = (one for one in objects.values() if isinstance(one, Loader))
    found = filter(None, (loader.cursor.state_at_start for loader in loaders))
    return next(map(serialize_rng_state, found), None)


def _raise_of_what_differs(all_facts: list[dict[str, Any]]) -> None:
    """Raise if ranks differ in options or details; a rank may lack some details."""
    for kind in ("options", "details"):
        raise_if_different("Checkpointer.save", [facts[kind] for facts in all_facts], _CURE)


class BackgroundTask:
    """Runs `work` in a thread. The interpreter waits for it at exit.

    `check` raises its error. If the process exits before `check`, its exit status is 1. A forked
    child has no such thread, and does not wait.

    Args:
        work: the function to run.
        what: its name in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what, self._pid = what, os.getpid()
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"pardata: {what}")
        self._future = executor.submit(work)
        executor.shutdown(wait=False)  # the thread ends after `work`
        atexit.register(self._check_at_exit)

    def join(self) -> None:
        """Wait until `work` has ended."""
        if os.getpid() == self._pid:
            wait([self._future])

    def check(self) -> None:
        """Wait until `work` has ended, and raise its error."""
        self.join()
        atexit.unregister(self._check_at_exit)
        if self._future.done():
            self._future.result()

    def _check_at_exit(self) -> None:
        # The interpreter has joined its threads by now.
        if not self._future.done() or (error := self._future.exception()) is None:
            return
        _log.error("%s failed: %s", self._what, error, ranks="all")
        flush_output()
        os._exit(1)  # nothing else can change the exit status here
