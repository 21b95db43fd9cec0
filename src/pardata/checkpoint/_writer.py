"""Writing checkpoints: what rank 0 does, what all do, now or in the background."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pardata.checkpoint import _shards as shards
from pardata.checkpoint import _state as states
from pardata.checkpoint._background import Background
from pardata.checkpoint._folder import Attempt, Name
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.model._weight_file import save
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, world

_log = get_logger(__name__)

STATE = "state.pt"


class Writer:
    """Writes the checkpoints of one directory. Every rank has one and calls everything."""

    def __init__(self, files: "Files", *, asynchronous: bool) -> None:
        self._files = files
        self._asynchronous = asynchronous
        self._background: Background | None = None
        self._kept: states.Tree = None
        self._group: Any = None  # for messages in the background

    def write(
        self,
        here: World,
        step: int,
        contents: states.Tree,
        sharded: dict[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, or begin to. Collective.

        Args:
            here: the world.
            step: of the run.
            contents: what rank 0 writes.
            sharded: tensors of which each rank writes its part, by name.
            facts: of the manifest.
        """
        if self._asynchronous:
            self._start_writing(here, step, contents, sharded, facts)
        elif sharded:
            folder = rank_zero_call(self._files.begin, step) / shards.FOLDER
            try:
                shards.write(folder, sharded)
            except OSError:  # on all ranks
                rank_zero_call(self._files.fail)
                raise
            rank_zero_call(self._files.finish, step, contents, facts)
        else:
            rank_zero_call(self._files.write, step, contents, facts)

    def wait(self) -> None:
        """Wait for what is written in the background, and raise its error. Collective."""
        if self._background is None:
            return
        background, self._background, self._kept = self._background, None, None
        try:
            rank_zero_call(background.join)  # however long it takes
        except BaseException:
            with suppress(Exception):  # this rank's own, which says no more
                background.join()
            raise

        def join() -> dict[str, object]:
            background.join()
            return {}

        agree(world(), "Checkpointer.wait", join)

    def _start_writing(
        self,
        here: World,
        step: int,
        contents: states.Tree,
        sharded: dict[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        own: list[states.Tree] = []
        rank_zero_call(lambda: own.append(states.copied(contents)))  # or all fail
        write: Callable[[], None]
        if not sharded:

            def write() -> None:
                if here.is_main:
                    self._files.write(step, own[0], facts)
        else:
            folder = rank_zero_call(self._files.begin, step) / shards.FOLDER
            self._group = self._group or dist.new_group(backend="gloo")
            parts = shards.start_writing(folder, sharded, self._group)

            def write() -> None:
                try:
                    with shards.failures_as_errors():
                        parts.result()
                except OSError:
                    if here.is_main:
                        self._files.fail()
                    raise
                if here.is_main:
                    self._files.finish(step, own[0], facts)

        # Else `save` would free its tensors as it returns, and with each give way to the thread
        # that writes, which may hold the interpreter for 30 ms.
        self._kept = contents
        self._background = Background(write, f"the checkpoint of step {step}")


class Files:
    """What rank 0 does in the directory."""

    def __init__(self, directory: Path, *, keep: int, keep_every: int | None) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._attempt: Attempt | None = None
        self._name: Name | None = None
        self._began = 0.0

    def write(self, step: int, contents: states.Tree, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint that rank 0 has all of."""
        self.begin(step)
        self.finish(step, contents, facts)

    def begin(self, step: int) -> Path:
        """Return the folder where a checkpoint is to be written before it has its name."""
        self._began = time.perf_counter()
        with self._saying_which(step):
            if self._attempt is None or (self._name is not None and step <= self._name.step):
                # A step that comes again is newer than the first one all the same.
                self._attempt = Attempt(self._directory, after=self._attempt)
            self._name = Name(self._attempt.number, step)
            return self._attempt.begin(self._name)

    def finish(self, step: int, contents: states.Tree, facts: Mapping[str, Any]) -> None:
        """Write rank 0's part, and make it a checkpoint."""
        attempt, name = self._attempt, self._name
        assert attempt is not None  # noqa: S101  # `begin` was called
        assert name is not None  # noqa: S101  # likewise
        with self._saying_which(step):
            save(contents, attempt.unfinished(name) / STATE)
            size = attempt.commit(name, facts)
            attempt.prune(self._keep, self._keep_every)
        seconds = time.perf_counter() - self._began
        _log.info(
            "saved step %d to %s, %.1f MB in %.2f s", step, self._directory, size / 1e6, seconds
        )

    def fail(self) -> None:
        """Remove what was begun, and raise where another run has taken over or all is gone."""
        self._abandon()
        if self._attempt is not None:
            self._attempt.check()

    def _abandon(self) -> None:
        if self._attempt is not None and self._name is not None:
            self._attempt.abandon(self._name)

    @contextmanager
    def _saying_which(self, step: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, FileNotFoundError):
                self.fail()  # it may know why
            self._abandon()
            if not isinstance(error, OSError) or error.errno is None:
                raise
            msg = (
                f"{error.strerror}, while saving step {step}: the checkpoints before it stand in "
                f"{self._directory}"
            )
            raise OSError(error.errno, msg, error.filename) from error
