"""The state of a run: saved so that it survives, restored into any strategy and world size."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from pardata.checkpoint import _state as states
from pardata.checkpoint._comparison import agree_on_options, agree_on_states
from pardata.checkpoint._newest import Found, newest
from pardata.checkpoint._writer import Files, Writer
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.model._weight_file import write_weights
from pardata.ranks._arguments import check_flag
from pardata.ranks._logger import get_logger
from pardata.ranks._version import __version__
from pardata.ranks._world import World, require_world
from pardata.seeds._generators import restore_generators

_log = get_logger(__name__)


class Checkpointer:
    """Saves the state of a run to a directory, and restores the newest checkpoint that is whole.

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
        asynchronous: let `save` return when the state is copied, and write in the background, one
            at a time. An error there is raised by the next call on every rank, and a process that
            ends before ends with status 1. The interpreter waits for the last one.

    Raises:
        ValueError: for a `keep` or `keep_every` that is no positive integer.
        TypeError: for an `asynchronous` that is no bool.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 2)
    >>> checkpointer = Checkpointer(tempfile.mkdtemp())
    >>> checkpointer.save(10, model=model, best=0.5)
    >>> checkpointer.restore(model=model)
    {'step': 10, 'best': 0.5}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        _check_count("keep", keep)
        if keep_every is not None:
            _check_count("keep_every", keep_every)
        self._directory = Path(directory)
        check_flag("asynchronous", asynchronous)
        # What must be the same on all ranks, else they would write to different places.
        self._options = {
            "directory": str(self._directory),
            "keep": keep,
            "keep_every": keep_every,
            "asynchronous": asynchronous,
        }
        files = Files(self._directory, keep=keep, keep_every=keep_every)
        self._writer = Writer(files, asynchronous=asynchronous)

    def save(self, step: int, **objects: Any) -> None:
        """Save the state of `objects`, then remove what is older than `keep` others. Collective.

        Args:
            step: of the run, from 0.
            objects: by name. Of what has ``state_dict`` and ``load_state_dict`` (a model under any
                strategy, an optimizer, a scheduler, a loader) its state; else the value: tensors,
                numbers, strings, None, and dicts, lists and tuples of them. All that is no tensor
                must be the same on every rank; tensors are rank 0's. Where the default generators
                of every rank are is saved beside them.

        Raises:
            TypeError: for what could be loaded only by running code; names it.
            ValueError: for a step that is no whole number from 0.
            RuntimeError: where ranks differ, and where another run has taken over the directory.
            OSError: on every rank, where it cannot be written; what was there before stands.
        """
        here = require_world("Checkpointer.save")
        self.wait()
        tree: dict[str, states.Tree] = {}

        def take() -> dict[str, object]:
            _check_step(step)
            tree.update({name: states.state_of(name, thing) for name, thing in objects.items()})
            return {"step": step, "objects": list(objects), **self._options}

        agree_on_options(here, "Checkpointer.save", take)
        generators = agree_on_states(here, "Checkpointer.save", tree)
        whole, sharded = states.split(tree)
        contents = {"objects": whole, "generators": generators}
        self._writer.write(here, step, contents, sharded, _facts(here, objects))

    def restore(self, **objects: Any) -> dict[str, Any] | None:
        """Give `objects` the state of the newest checkpoint that is whole. Collective.

        Those that are not are passed over, and logged with the reason. Strategy and number of
        processes may be others than when it was saved. The default generators of each rank are put
        back too, if there are as many ranks as then. What is read is verified, and runs no code.

        Args:
            objects: under the names by which they were saved. Not all that was saved is needed.

        Returns:
            The step and the values that were saved, tensors on the CPU, or None where there is no
            checkpoint.

        Raises:
            ValueError: for a name that was not saved.
            TypeError: for a value: those are returned.
            RuntimeError: where there are checkpoints and none is whole, where a state does not fit
                its object, and where ranks differ.
        """
        here = require_world("Checkpointer.restore")
        self.wait()

        def check() -> dict[str, object]:
            _check_stateful(objects)
            return {"objects": list(objects), **self._options}

        agree_on_options(here, "Checkpointer.restore", check)
        found = newest(here, self._directory)
        if found is None:
            return None
        _check_names(objects, found)
        tree = found.states_of(objects)

        def load() -> dict[str, object]:
            for name, thing in objects.items():
                with _naming(name, thing):
                    states.load(thing, tree[name])
            _restore_generators(found.contents["generators"], here)
            return {}

        agree(here, "Checkpointer.restore (loading)", load)
        saved = found.manifest["identity"]
        _log.info(
            "restored step %d of %s, saved by %d process(es)%s with torch %s",
            found.name.step,
            self._directory,
            saved["processes"],
            "".join(f", {name} under {kind!r}" for name, kind in saved["strategies"].items()),
            saved["torch"],
        )
        values = {name: found.contents["objects"][name] for name in found.manifest["values"]}
        return {"step": found.name.step, **values}

    def export(self, path: str | os.PathLike[str], *, name: str = "model") -> None:
        """Write the bare weights of the newest whole checkpoint to a file, for others. Collective.

        With the names that the module itself gives its parameters, for `load_weights` and
        ``module.load_state_dict`` alike; as safetensors where the file is named so, else as
        ``torch.save`` writes. The file is there as a whole or not at all.

        Args:
            path: of the file.
            name: under which the model was saved.

        Raises:
            FileNotFoundError: where there is no checkpoint.
            ValueError: where nothing was saved under this name.
            TypeError: where that is no model.
            ImportError: for safetensors, where they are not installed.
        """
        here = require_world("Checkpointer.export")
        self.wait()
        found = newest(here, self._directory)
        if found is None:
            msg = f"there must be a checkpoint in {self._directory} to export, but there is none"
            raise FileNotFoundError(msg)
        _check_names([name], found)
        tree = found.states_of({name: None})
        rank_zero_call(write_weights, Path(path), tree[name])

    def wait(self) -> None:
        """Wait for the last asynchronous save, and raise its error on every rank. Collective."""
        self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other ranks may be anywhere; the interpreter waits for the thread.
        if kind is None:
            self.wait()


def _facts(here: World, objects: Mapping[str, object]) -> dict[str, Any]:
    """Return what the manifest says of this run."""
    strategies = {name: states.strategy_of(thing) for name, thing in objects.items()}
    return {
        "values": [name for name, thing in objects.items() if not states.is_stateful(thing)],
        "identity": {
            "pardata": __version__,
            "torch": str(torch.__version__),
            "processes": here.size,
            "threads": torch.get_num_threads(),
            "strategies": {name: kind for name, kind in strategies.items() if kind is not None},
        },
    }


@contextmanager
def _naming(name: str, thing: object) -> Iterator[None]:
    """Say which state does not fit, where the thing itself only stumbles over it."""
    try:
        yield
    except (LookupError, AttributeError, TypeError) as error:
        msg = (
            f"what is restored must be like what was saved, but the state of `{name}` is not that "
            f"of a {type(thing).__name__} ({type(error).__name__}: {error})"
        )
        raise RuntimeError(msg) from error


def _restore_generators(saved: list[dict[str, Any]], here: World) -> None:
    if len(saved) == here.size:
        restore_generators(saved[here.rank], here.device)
    else:
        _log.info(
            "the default generators are left as they are: they were those of %d ranks", len(saved)
        )


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        msg = f"`step` must be a whole number from 0, but is {step!r}"
        raise ValueError(msg)


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        msg = f"`{name}` must be a positive integer, but is {count!r}"
        raise ValueError(msg)


def _check_stateful(objects: Mapping[str, object]) -> None:
    for name, thing in objects.items():
        if not states.is_stateful(thing):
            msg = (
                f"`restore` must be given what has state_dict and load_state_dict, but `{name}` "
                f"is a {type(thing).__name__}: values are in what it returns"
            )
            raise TypeError(msg)


def _check_names(wanted: Iterable[str], found: Found) -> None:
    saved = [name for name in found.contents["objects"] if name not in found.manifest["values"]]
    missing = [name for name in wanted if name not in saved]
    if missing:
        msg = (
            f"what is asked for must have been saved as something with a state, but "
            f"{', '.join(map(repr, missing))} not; the checkpoint {found.path} has "
            f"{', '.join(map(repr, saved)) or 'none'}"
        )
        raise ValueError(msg)
