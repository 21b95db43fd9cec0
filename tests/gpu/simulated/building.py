"""Builds the simulated accelerator, once for each version of torch, Python and the sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "sources"
NAME = "simulated_c"
FLAGS = "-std=c++20 -O0 -fPIC -shared -fvisibility=hidden -w -DUSE_DISTRIBUTED -DUSE_C10D_GLOO"
ENTRY = "[torch.backends]\nsim = simulated:register\n"  # torch calls it when it is imported


def why_not():
    """Return why it cannot be built on this machine, or None."""
    if shutil.which(_compiler()) is None:
        return f"needs a C++ compiler, and there is no {_compiler()}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else f"needs the headers of Python, and there is no {header}"


def built():
    """Return the folder of the built module, and build it if it is not there."""
    from torch.utils.cpp_extension import get_default_build_root  # half a second

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()  # torch's own places
    folder = Path(root) / f"pardata-{_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may want to build it now
        if not module.exists():
            info = folder / "simulated_accelerator-0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "entry_points.txt").write_text(ENTRY)
            unfinished = module.with_suffix(".unfinished")
            _compile(unfinished)
            unfinished.rename(module)
    return folder


def main():
    """Build it, and print where it is, or why it cannot be."""
    print(why_not() or built())


def _compiler():
    return os.environ.get("CXX", "c++")


def _key():
    told = hashlib.sha256(f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode())
    for part in (*sorted(SOURCES.iterdir()), Path(__file__)):
        told.update(part.read_bytes())
    return told.hexdigest()[:16]


def _compile(target):
    from torch.utils.cpp_extension import include_paths, library_paths

    command = [_compiler(), *FLAGS.split(), f"-DTORCH_EXTENSION_NAME={NAME}"]
    command += [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    command += [SOURCES / "module.cpp", "-o", target]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the simulated accelerator must compile with torch {torch.__version__}, but does not: "
            f"mend {SOURCES}\n{done.stderr[-5000:]}"
        )


if __name__ == "__main__":
    main()
