"""The machine that a comparison runs on: what times depend on, except the code."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path


def machine() -> str:
    """Return what times depend on, except the code."""
    versions = f"torch {version('torch')}, Python {platform.python_version()}"
    return f"{usable_cores()} cores ({_processor()}), {_gpus()}, {versions}, {platform.system()}"


def usable_cores() -> int:
    """Return the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    """Return the names of the GPUs, without starting one: that would take some of its memory."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no GPU"
    asked = [program, "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(  # noqa: S603  # NVIDIA's own
        asked, capture_output=True, text=True, check=False
    )
    names = told.stdout.splitlines() if told.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = "" if visible is None else f" (visible: {visible or 'none'})"
    return ", ".join(names) + which if names else "no GPU"


def load() -> float:
    """Return how many processes have wanted to run in the last minute, on average."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return float("nan")
