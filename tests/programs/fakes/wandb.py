"""In place of Weights & Biases' client: writes down calls of docs/howto-evaluation.md."""

import json


def _write(*call):
    with open("calls.jsonl", "a") as file:  # noqa: PTH123  # as little as can be
        file.write(json.dumps(call) + "\n")


class _Run:
    def log(self, data, step=None):
        _write("log", data, step)

    def finish(self):
        _write("end")


def init(*, project=None, name=None, id=None, resume=None):  # noqa: A002  # its own names
    _write("start")
    return _Run()
