"""Metrics of a run in files, written by rank 0."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TextIO
from weakref import finalize

from torch import Tensor

from pardata._validation import check_int, local_path
from pardata.environment._logger import get_logger
from pardata.environment._world import require_world

_log = get_logger(__name__)


class MetricWriter(AbstractContextManager["MetricWriter"]):
    """Writes scalars on rank 0 to ``metrics.jsonl``, and for TensorBoard if it is installed.

    Every rank may call everything; the others write nothing. Not collective: write results of
    `all_reduce_mean`, because a local value is that of rank 0's samples only. It appends each line
    at once, so a run that resumes, and other writers of the directory, share the file. A last line
    that was cut off, when its run was killed, is moved to ``metrics.removed.jsonl``. Usable as a
    context manager.

    Args:
        directory: made if it is not there.
        after: the step after which the run resumes, as restored. The lines of later steps, which
            the run will write again, are moved to ``metrics.removed.jsonl``, and the log says so.
            All stay if not given.

    Raises:
        OSError: the directory cannot be written; on rank 0.
        TypeError: `after` is no integer.

    >>> import tempfile
    >>> with MetricWriter(tempfile.mkdtemp()) as writer:
    ...     writer.write(1, {"train/loss": 0.25})
    """

    def __init__(self, directory: str | os.PathLike[str], *, after: int | None = None) -> None:
        last = math.inf if after is None else check_int("after", after)
        path = local_path("directory", directory)
        self._file: TextIO | None = None
        self._board: Any = None
        if not require_world("MetricWriter", is_collective=False).is_main:
            return
        path.resolve().mkdir(parents=True, exist_ok=True)  # the target of a link
        file = path / "metrics.jsonl"
        if file.exists():
            _truncate_after(file, last)
        self._file = file.open("a", encoding="utf-8")
        finalize(self, self._file.close)  # otherwise Python warns of an unclosed file
        self._board = _tensorboard(path, None if after is None else int(after) + 1)

    def write(self, step: int, values: Mapping[str, float | Tensor]) -> None:
        """Write the `values` of one step. A NaN or infinity is written as text, as ``"nan"``.

        Raises:
            TypeError: the step is no integer, or values have no names. On rank 0, if a value, which
                it names, is not one number.
            ValueError: a value is named ``"step"``. On rank 0, after `close`.
        """
        step = check_int("step", step)
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            msg = f"`values` must map names to numbers, but is {values!r}: pass {{'loss': loss}}"
            raise TypeError(msg)
        if "step" in values:
            msg = '`values` must not have a "step", which each line has already: rename it'
            raise ValueError(msg)
        if self._file is None:
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        shown = {name: n if math.isfinite(n) else str(n) for name, n in numbers.items()}
        self._file.write(json.dumps({"step": step, **shown}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)

    def close(self) -> None:
        """Close the files. Written lines are on disk before that; TensorBoard's part may not be."""
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()  # `_file` stays set, so that a later write raises

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(name: str, value: object) -> float:
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    number = value.item() if hasattr(value, "item") and count == 1 else value  # NumPy's too
    if not isinstance(number, int | float):
        msg = f"`values[{name!r}]` must be one number, but is {value!r} ({type(value).__name__})"
        raise TypeError(msg)
    return number


def _truncate_after(file: Path, after: float) -> None:
    """Move the lines of steps after `after`, and a last line that was cut off, to another file.

    They are appended to the other file first. This one is rewritten in place, so that a link, the
    mode and other writers keep it. If the process is killed then, one kept line may be damaged.
    """
    kept, moved = list[bytes](), list[bytes]()
    with file.open("r+b") as opened:
        for line in (text := opened.read()).splitlines():
            (kept if _is_kept(line, after) else moved).append(line + b"\n")
        if moved:
            removed = file.with_name("metrics.removed.jsonl")
            removed.touch(file.stat().st_mode & 0o777)  # no more may read it
            with removed.open("ab") as others:
                others.writelines(moved)
            message = "moved %d of %d lines of %s to %s: they are of later steps, or cut off"
            _log.warning(message, len(moved), len(moved) + len(kept), file, removed.name)
        if (remaining := b"".join(kept)) != text:
            remaining += opened.read()  # what another writer has appended meanwhile
            opened.seek(0)
            opened.write(remaining)
            opened.truncate()


def _is_kept(line: bytes, after: float) -> bool:
    with suppress(ValueError, LookupError, TypeError):  # the line was cut off, or has no step
        return bool(json.loads(line)["step"] <= after)
    return False


def _tensorboard(path: Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an extra
    except ImportError:
        _log.info("TensorBoard is not installed: metrics go to metrics.jsonl only", once=True)
        return None
    return SummaryWriter(log_dir=str(path), purge_step=purge_step)
