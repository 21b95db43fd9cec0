"""The state of a run: saved so that it survives, restored into any strategy and world size."""

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch.distributed as dist
from typing_extensions import Never

from pardata.checkpoint import _shards as shards
from pardata.checkpoint._checkpoint import CURE, Restored, newest
from pardata.checkpoint._files import Written, write_weights
from pardata.checkpoint._folder import Folder
from pardata.checkpoint._names import Retention, names
from pardata.checkpoint._snapshot import Snapshot
from pardata.collective._agreement import agree, require_same, same
from pardata.collective._rank_zero import rank_zero_call
from pardata.ranks._arguments import check_flag, check_integer, kind_of
from pardata.ranks._logger import get_logger
from pardata.ranks._store import answered
from pardata.ranks._world import World, channel, require_world
from pardata.seeds._generators import generator_states

_log = get_logger(__name__)


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves the state of a run to a directory, and restores the newest complete checkpoint.

    Every rank makes one and calls everything; rank 0 writes, and of sharded parameters (``"fsdp"``)
    each rank its part. Nodes share the disk. A process killed at any moment leaves what was
    complete. Where two runs write to one directory, as when a job is started again while a process
    of the last attempt is still there, the older one gets an error and changes nothing any more.
    Making one is not collective, touches nothing, and is the same in a single process. Usable as a
    context manager, which waits at its end for an asynchronous save.

    Args:
        directory: made by the first `save`.
        keep: how many of the newest to keep; older ones go once a newer one is complete.
        keep_every: also keep those of steps that are multiples of this.
        keep_best: also keep the best by this value, which each `save` is given: "accuracy", or
            "-loss" where less is better.
        asynchronous: let `save` return when the state is copied, and write in the background, one
            at a time. An error there is raised by the next call on every rank, and a process that
            ends before ends with status 1. The interpreter waits for the last one.

    Raises:
        ValueError: for a `keep` or `keep_every` below 1.
        TypeError: for one that is no integer, for a `keep_best` that is no name, and for an
            `asynchronous` that is no bool.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> checkpointer = Checkpointer(tempfile.mkdtemp())
    >>> checkpointer.save(10, model=model, best=0.5)
    >>> checkpointer.restore(model=model)
    Restored(step=10, values={'best': 0.5})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        kept = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
        self._retention = Retention(keep, keep_every, keep_best)
        check_flag("asynchronous", asynchronous)
        self._directory = Path(directory)
        self._asynchronous = asynchronous
        # What must be the same on all ranks, else they would write to different places.
        self._options = {"directory": str(directory), "asynchronous": asynchronous, **kept}
        self._folder = Folder(self._directory, self._retention)
        self._background: Background | None = None
        self._group: Any = None  # for messages in the background

    def save(self, step: int, *unnamed: Never, **objects: Any) -> None:
        """Save the state of `objects`, then remove what is older than `keep` others. Collective.

        Args:
            step: of the run, from 0.
            unnamed: nothing, for each thing is saved under a name.
            objects: by name. Of what has ``state_dict`` and ``load_state_dict`` (a model under any
                strategy, an optimizer, a scheduler, a loader) its state; else the value: tensors,
                numbers, strings, None, and dicts, lists and tuples of them. All that is no tensor
                must be the same on every rank; tensors are rank 0's. Where the default generators
                of every rank are is saved with them.

        Raises:
            TypeError: for what could be loaded only by running code; names it. For a thing without
                a name, a step that is no integer, and the value of `keep_best` where it is no
                number, or not there.
            ValueError: for a step below 0.
            RuntimeError: where ranks differ, and where another run has taken over the directory.
            OSError: on every rank, where it cannot be written; what was there before stands.
        """
        _refuse("save(step, ", unnamed)
        here = require_world("Checkpointer.save")
        self.wait()
        snapshot: Snapshot

        def tell() -> dict[str, object]:
            nonlocal snapshot
            check_integer("step", step, least=0)
            self._retention.check_value(objects)
            snapshot = Snapshot(here, objects, copy=self._asynchronous and here.rank == 0)
            if here.rank > 0:  # not in the turn, which would take them from all to all
                line, key = channel(), f"generators/{here.rank}"
                states: Any = generator_states(here.device)
                answered(line.timeout, partial(line.store.set, key, states))
            options = {"step": step, "objects": list(objects), **self._options}
            return {"options": options, "details": snapshot.texts}

        same(here, "Checkpointer.save", tell, _raise_of_what_differs)
        contents = {"objects": snapshot.trees, "sharded": list(snapshot.parts)}
        if here.is_main:
            contents["generators"] = generators = [generator_states(here.device)]
            if here.size > 1:
                line, keys = channel(), [f"generators/{rank}" for rank in range(1, here.size)]
                generators += answered(line.timeout, partial(line.store.multi_get, keys))
        self._start(here, step, snapshot, contents)

    def restore(self, *unnamed: Never, at: int | None = None, **objects: Any) -> Restored:
        """Give `objects` the state of the newest complete checkpoint. Collective.

        Those that are not are passed over, and logged with the reason. Strategy and number of
        processes may be others than when it was saved. The default generators of each rank are put
        back too, if there are as many ranks as then. What is read is verified, and runs no code.

        Args:
            unnamed: nothing, for each thing is restored under its name.
            at: the step of the checkpoint to take, one of `steps`; the newest if not given.
            objects: under the names by which they were saved. Not all that was saved is needed.

        Returns:
            The step and the values that were saved. Where there is no checkpoint it is false, the
            step 0.

        Raises:
            ValueError: for a name that was not saved, and a step of which there is none. Where the
                directory is one checkpoint itself, or is not there and nearly has the name of one
                next to it that has checkpoints.
            TypeError: for a value: those are returned. For a thing without a name.
            RuntimeError: where there are checkpoints and none is complete, where a state does not
                fit its object, and where ranks differ.
        """
        _refuse("restore(", unnamed)
        here = require_world("Checkpointer.restore")
        self.wait()
        found = newest("Checkpointer.restore", at, objects, self._options)
        if found is not None:
            return found.give(here, objects)
        _log.info("no checkpoint in %s: the run begins anew", self._directory)
        return Restored()

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, in order. Collective."""
        require_world("Checkpointer.steps")
        self.wait()
        return sorted({name.step for name in rank_zero_call(names, self._directory)})

    def export(
        self, path: str | os.PathLike[str], *, name: str = "model", at: int | None = None
    ) -> None:
        """Write the bare weights of the newest complete checkpoint to a file. Collective.

        With the names that the module itself gives its parameters, for `load_weights` and
        ``module.load_state_dict`` alike; as safetensors where the file is named so, else as
        ``torch.save`` writes. The file is there as a whole or not at all.

        Args:
            path: of the file.
            name: under which the model was saved.
            at: the step of the checkpoint to take, as for `restore`.

        Raises:
            FileNotFoundError: where there is no checkpoint.
            ValueError: where nothing was saved under this name, or at this step.
            TypeError: where that is no model.
            ImportError: for safetensors, where they are not installed.
        """
        self.wait()
        found = newest("Checkpointer.export", at, {}, {"name": name, **self._options})
        if found is None:
            raise FileNotFoundError(
                f"there must be a checkpoint in {self._directory} to export, but there is none"
            )

        def write() -> None:
            write_weights(Path(path), found.states_of([name], {}, alone=True)[name])

        rank_zero_call(write)

    def wait(self) -> None:
        """Wait for the last asynchronous save, and raise its error on every rank. Collective."""
        if self._background is None:
            return
        background, self._background = self._background, None
        rank_zero_call(background.join)  # its error first, for another one says no more
        agree(require_world("Checkpointer.wait"), "Checkpointer.wait", background.join)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may be anywhere; the interpreter waits for the thread.
        if kind is None:
            self.wait()

    def _start(self, here: World, step: int, taken: Snapshot, contents: dict[str, Any]) -> None:
        """Write a checkpoint, or begin to in the background. Collective."""
        begun: Path | None = None
        written: Written = dict
        if taken.parts:
            begun = rank_zero_call(self._folder.begin, step)
            if self._asynchronous:
                self._group = self._group or dist.new_group(backend="gloo")
            written = shards.writing(begun, taken.parts, self._group)
        draft = begun, {"step": step, **taken.facts}, contents, written
        if self._asynchronous:
            work = partial(self._folder.finish, *draft) if here.is_main else written
            self._background = Background(work, f"the checkpoint of step {step}")
            return
        if not here.is_main:
            with suppress(OSError):  # it is on all ranks, and rank 0 tells
                written()
        rank_zero_call(self._folder.finish, *draft)


class Background:
    """Runs `work` at once in a thread, for which the interpreter waits at its end.

    An error is raised by `join`; a process that ends before it has asked ends with status 1.

    Args:
        work: what to run.
        what: to say in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what = what
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"pardata: {what}")
        begin = Event()
        # A new thread holds the interpreter for 5 ms, if it has work, and its maker waits for it.
        executor.submit(begin.wait)
        self._future = executor.submit(work)
        executor.shutdown(wait=False)  # it takes no other work
        atexit.register(self._check_at_exit)
        begin.set()

    def join(self) -> None:
        """Wait for the end, and raise what the work has raised."""
        atexit.unregister(self._check_at_exit)
        self._future.result()

    def _check_at_exit(self) -> None:
        # Threads have ended by now.
        error = self._future.exception()
        if error is None:
            return
        _log.error("%s failed: %s", self._what, error, ranks="all")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else can change the exit status here


def _refuse(call: str, unnamed: tuple[object, ...]) -> None:
    """Raise where something has no name, under which it could be saved."""
    if unnamed:
        kind = kind_of(unnamed[0])
        raise TypeError(f"`objects` must be named, but {kind} is not: call {call}model=model)")


def _raise_of_what_differs(told: list[dict[str, Any]]) -> None:
    """Raise where ranks differ in options, or in details, of which each may have its own."""
    for kind in ("options", "details"):
        require_same("Checkpointer.save", [facts[kind] for facts in told], CURE)
