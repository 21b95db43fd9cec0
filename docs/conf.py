"""How Sphinx builds the site: `sphinx-build -W --keep-going -b html docs docs/_build`."""

import pardata

project = "pardata"
author = "The pardata developers"
project_copyright = author
version = release = pardata.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # each name of the reference links to its source
]
html_theme = "furo"
html_title = f"pardata {version}"

exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links to headings, as on a forge
default_role = "py:obj"  # `init` in a docstring links to its entry, where it has one

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 90  # longer ones have a line for each parameter
autodoc_class_signature = "separated"  # a class that the library makes shows no constructor
napoleon_google_docstring = True
napoleon_numpy_docstring = False
