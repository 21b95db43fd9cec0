"""What is installed: versions and backends."""

import platform

import torch
import torch.distributed as dist

from pardata.doctor._finding import ERROR, OK, Finding
from pardata.ranks._version import __version__


def examine_versions() -> list[Finding]:
    """Return the findings about what is installed."""
    return [_versions(), _backends()]


def _versions() -> Finding:
    toolkit = f" for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    own = __version__
    text = f"pardata {own}, torch {torch.__version__}{toolkit}, Python {platform.python_version()}"
    return Finding("versions", OK, text)


def _backends() -> Finding:
    has = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    text = ", ".join(name if there else f"no {name}" for name, there in has.items())
    cure = "install a torch that has it: the wheels of pytorch.org do"
    if not has["gloo"]:
        return Finding("backends", ERROR, text, cure)
    if torch.cuda.is_available() and not has["NCCL"]:
        return Finding("backends", ERROR, text, f'{cure}; or pass init(backend="gloo"), slowly')
    return Finding("backends", OK, text)
