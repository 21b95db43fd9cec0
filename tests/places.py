"""Where things are, as the tests see it: the checkout, and the data that may lie beside it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
SHARED_DATA = ROOT.parent / "shared" / "data"
