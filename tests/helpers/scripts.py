"""Scripts that call `pardata.testing.run`, in this process.

Its fork server has imported torch already. In a process of its own, each script would start
another server, and wait seconds for its imports.
"""

import contextlib
import importlib
import io
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import on_ranks
import torch
import torch.distributed as dist


def printed_by(script: Path, *arguments) -> str:
    """Call a script's ``main()`` with arguments of a command line; return what it printed."""
    on_ranks.start_server()
    threads, printed = torch.get_num_threads(), io.StringIO()
    with (
        patch.object(tempfile, "tempdir", None),  # a test may have set TMPDIR
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        patch.object(sys, "argv", [script.name, *map(str, arguments)]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # as in a program
        try:
            importlib.import_module(script.stem).main()
        finally:
            torch.set_num_threads(threads)
            sys.modules.pop(script.stem, None)
            assert not dist.is_initialized(), "the script left a process group"
    return printed.getvalue()
