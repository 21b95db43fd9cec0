"""Where in the user's code: the innermost line that is neither pardata's, torch's nor Python's."""

import functools

import pytest
import torch
from on_ranks import caught

from pardata import make_loader
from pardata.store._current_op import call_site, raise_location


def test_what_lies_between_in_python_torch_and_pardata_is_passed_over():
    seen = []
    functools.partial(map, lambda _: seen.append(call_site()), [0])().__next__()
    found = list(make_loader([0], 1, collate_fn=Noting(seen), num_workers=0))
    assert found == [None]
    module = torch.nn.Identity()
    module.register_forward_hook(Noting(seen))
    module(1)
    assert len(seen) >= 3
    assert all("test_caller.py:" in place for place in seen)


class Noting:
    """Called by others: its own line is the user's, too."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, *_):
        self.seen.append(call_site())


@pytest.mark.parametrize("inside", [True, False])
def test_a_path_is_short_below_the_working_directory_and_whole_elsewhere(
    inside, tmp_path, monkeypatch
):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = (folder if inside else tmp_path) / "train.py"
    code = compile("def fail():\n    raise KeyError", str(file), "exec")
    names = {}
    exec(code, names)
    with pytest.raises(KeyError) as caught:
        names["fail"]()
    assert raise_location(caught.value) == ("train.py:2" if inside else f"{file}:2")


def test_a_working_directory_that_is_gone_is_no_error(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert caught(call_site).endswith(f"ranks.py:{caught.__code__.co_firstlineno + 4}")
