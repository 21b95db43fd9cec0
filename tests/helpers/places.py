"""Where things are, as the tests see it: the checkout, and the data that may lie beside it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ARTICLES = EXAMPLES / "articles"  # with all the options of the articles, which they compare
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
SHARED_DATA = ROOT.parent / "shared" / "data"
