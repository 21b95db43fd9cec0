"""The rows of the table of torch's private names."""

from typing import NamedTuple

from places import ROOT

TABLE = ROOT / "tests" / "promises" / "private_names.md"


class Row(NamedTuple):
    """A private name, the file that uses it, its use, and the tests that turn red without it."""

    name: str
    file: str
    use: str
    tests: list[str]

    def __str__(self):
        return f"{self.name} of {self.file}"


def _rows():
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(name.strip("`"), file, use, tests.split()) for name, file, use, *_, tests in cells]


ROWS = _rows()
