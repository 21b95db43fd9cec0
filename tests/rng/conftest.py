"""What the tests of random numbers leave: NumPy's generator as it was."""

import numpy as np
import pytest

# ruff: noqa: NPY002  # NumPy's default generator is the one that users draw from


@pytest.fixture(autouse=True)
def _numpy_as_before():
    state = np.random.get_state()
    yield
    np.random.set_state(state)
