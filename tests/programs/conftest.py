"""Every test of this folder runs with `pytest -m programs`, but for those of the long run."""


def pytest_itemcollected(item):
    if item.get_closest_marker("soak") is None:
        item.add_marker("programs")
