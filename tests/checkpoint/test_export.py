"""Bare weights for others: the file is there as a whole or not at all."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_zoo import limited
from torch import nn

from pardata.checkpoint._disk import save
from pardata.checkpoint._export import write_weights
from pardata.model._state_dict import read_weights

needs_safetensors = pytest.mark.skipif(
    find_spec("safetensors") is None, reason="safetensors are not installed"
)
KINDS = ["weights.pt", pytest.param("weights.safetensors", marks=needs_safetensors)]


@pytest.mark.parametrize("file", KINDS)
def test_what_was_written_is_read(file, tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    state = net.state_dict() | {"half": torch.ones(3, dtype=torch.bfloat16)[::2]}
    write_weights(tmp_path / "new" / file, state)
    found = read_weights(tmp_path / "new" / file)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [file]


@pytest.mark.parametrize(
    ("state", "what"),
    [({"a": torch.ones(1), "b": 3}, "has 'b', which is none"), ([torch.ones(1)], "is a list")],
)
def test_what_is_no_state_of_a_module_is_refused(state, what, tmp_path):
    with pytest.raises(TypeError, match=f"must be the weights of a module, .* but it {what}"):
        write_weights(tmp_path / "weights.pt", state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", KINDS)
def test_a_full_disk_leaves_what_was_there(file, tmp_path):
    write_weights(tmp_path / file, {"a": torch.ones(1)})
    end = limited(9000)
    try:
        with pytest.raises(Exception, match="File too large"):
            write_weights(tmp_path / file, {"a": torch.ones(10_000)})
    finally:
        end()
    assert read_weights(tmp_path / file)["a"].tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_full_disk_is_an_os_error_and_other_errors_are_their_own(tmp_path):
    with pytest.raises(OSError, match="No space left on device"):
        save(torch.ones(100_000), Path("/dev/full"))
    with pytest.raises(AttributeError, match=r"local object|pickle"):
        save(lambda: None, tmp_path / "x")

    class Wrong:
        def __reduce__(self):
            message = "not me"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="not me"):
        save(Wrong(), tmp_path / "x")
