"""Is the unrelated distribution `pardata` installed here too? It has the same top-level package.

The index has a data-set tool of 2021 under the bare name. In one environment the two share a
directory, and the one that was installed last has the ``__init__.py``. Where that is ours, it asks
`require_alone`. Where it is theirs, their first import is of their ``_dataset.py``; a package of
that name, which goes before a file, asks in its place.
"""

from pathlib import Path

_THEIRS = "_high_level.py"  # in both of its releases, 0.3.0 and 0.4.0, and never in ours


def require_alone() -> None:
    """Raise where the files of the other distribution lie between ours.

    One look at the disk, a few microseconds.

    Raises:
        ImportError: says how to part the two.
    """
    package = Path(__file__).parent
    if (package / _THEIRS).exists():
        msg = (
            f"`torch-pardata` must not share an environment with the distribution `pardata`, an "
            f"unrelated data-set tool, but the files of both are in {package}, and whichever came "
            f"last has overwritten the other's `__init__.py`: remove both with `python -m pip "
            f"uninstall --yes pardata torch-pardata`, then run `python -m pip install "
            f"torch-pardata`"
        )
        raise ImportError(msg)
