"""Every test of this folder runs with `pytest -m programs`, but for those of the long run."""

import pytest

# What these build or run at their start is for all of their tests: with `--dist loadgroup` they
# stay in one process.
TOGETHER = ("test_compare.py", "test_packaging.py")


def pytest_itemcollected(item):
    if item.get_closest_marker("soak") is None:
        item.add_marker("programs")
    if item.path.name in TOGETHER:
        item.add_marker(pytest.mark.xdist_group(item.path.name))
