"""What is installed: versions, backends, and another project of our name."""

import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from pardata.doctor._finding import ERROR, OK, Finding
from pardata.ranks._version import __version__

# In both releases of the unrelated distribution `pardata`, 0.3.0 and 0.4.0, and never in ours.
_THEIRS = "_high_level.py"


def examine_installation() -> Iterator[Finding]:
    """Yield the findings about what is installed."""
    toolkit = f" for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    python = platform.python_version()
    text = f"pardata {__version__}, torch {torch.__version__}{toolkit}, Python {python}"
    yield Finding("versions", OK, text)
    yield from shared_package(Path(__file__).parents[1])
    yield _backends()


def shared_package(package: Path) -> Iterator[Finding]:
    """Find the files of the unrelated distribution `pardata` between ours.

    Its top-level package has our name: in one environment the two share a directory, and whichever
    was installed last has the ``__init__.py``.
    """
    if (package / _THEIRS).exists():
        text = (
            f"`torch-pardata` must not share an environment with the distribution `pardata`, an "
            f"unrelated data-set tool, but the files of both are in {package}"
        )
        cure = (
            "remove both with `python -m pip uninstall --yes pardata torch-pardata`, then run "
            "`python -m pip install torch-pardata`"
        )
        yield Finding("installation", ERROR, text, cure)


def _backends() -> Finding:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    text = f"{'gloo' if gloo else 'no gloo'}, {'NCCL' if nccl else 'no NCCL'}"
    if gloo and (nccl or not torch.cuda.is_available()):
        return Finding("backends", OK, text)
    return Finding(
        "backends", ERROR, text, "install a torch that has both, as pytorch.org's wheels"
    )
