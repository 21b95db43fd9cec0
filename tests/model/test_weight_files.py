"""Files of weights: read without running code."""

import sys
from pathlib import Path

import pytest
import torch

from pardata.model._state_dict import read_weights


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    torch.save({"a": Harm()}, tmp_path / "weights.pt")
    with pytest.raises(RuntimeError, match=r"weights\.pt must be a file of weights.*Weights only"):
        read_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "harm").exists()


def test_safetensors_that_are_not_installed_are_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    path = tmp_path / "x.safetensors"
    with pytest.raises(ImportError, match=r"x\.safetensors needs safetensors, which are not ins"):
        read_weights(path)
    assert list(tmp_path.iterdir()) == []
