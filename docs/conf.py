"""How Sphinx builds the site: `sphinx-build -W --keep-going -b html docs docs/_build`."""

import re
from functools import partial
from html import unescape
from importlib.metadata import metadata
from itertools import chain

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx

import pardata

project = "pardata"
author = "The pardata developers"
project_copyright = author
version = release = pardata.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # the table of names at the top of the reference
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # each name of the reference links to its source
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"pardata {version}"
html_static_path = ["_static"]
html_css_files = ["pardata.css"]

# Once pyproject.toml has the address of the repository, each page links to its source there.
links = dict(line.split(", ", 1) for line in metadata("torch-pardata").get_all("Project-URL", []))
if "Source" in links:
    html_theme_options = {
        "source_repository": links["Source"],
        "source_branch": "main",
        "source_directory": "docs/",
    }
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # the button copies commands without these
copybutton_prompt_is_regexp = True

exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links to headings, as on a forge
smartquotes = False  # the quotes and the "--" of an error or a command stay what they are
default_role = "py:obj"  # `init` in a docstring links to its entry, where it has one

autosummary_generate = False  # the reference has all entries on one page
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 60  # longer ones have a line for each parameter
python_display_short_literal_types = True
autodoc_class_signature = "separated"  # a class that the library makes shows no constructor
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# The reference links to these. Sphinx's intersphinx would need the network at each build.
TORCH = "https://docs.pytorch.org/docs/stable"
PYTHON = "https://docs.python.org/3/library"
OUTSIDE = {
    "torch.Tensor": f"{TORCH}/tensors.html#torch.Tensor",
    "torch.device": f"{TORCH}/tensor_attributes.html#torch.device",
    "torch.nn.modules.module.Module": f"{TORCH}/generated/torch.nn.Module.html",
    "torch.nn.DataParallel": f"{TORCH}/generated/torch.nn.DataParallel.html",
    "torch.nn.parallel.DistributedDataParallel": (
        f"{TORCH}/generated/torch.nn.parallel.DistributedDataParallel.html"
    ),
    "torch.utils.data.dataset.Dataset": f"{TORCH}/data.html#torch.utils.data.Dataset",
    "torch.utils.data.sampler.Sampler": f"{TORCH}/data.html#torch.utils.data.Sampler",
    "torch.amp.grad_scaler.GradScaler": f"{TORCH}/amp.html#torch.amp.GradScaler",
    "collections.abc.Callable": f"{PYTHON}/collections.abc.html#collections.abc.Callable",
    "collections.abc.Iterable": f"{PYTHON}/collections.abc.html#collections.abc.Iterable",
    "collections.abc.Iterator": f"{PYTHON}/collections.abc.html#collections.abc.Iterator",
    "collections.abc.Mapping": f"{PYTHON}/collections.abc.html#collections.abc.Mapping",
    "collections.abc.Sequence": f"{PYTHON}/collections.abc.html#collections.abc.Sequence",
    "datetime.timedelta": f"{PYTHON}/datetime.html#datetime.timedelta",
    "timedelta": f"{PYTHON}/datetime.html#datetime.timedelta",
    "multiprocessing.context.BaseContext": (
        f"{PYTHON}/multiprocessing.html#contexts-and-start-methods"
    ),
    "os.PathLike": f"{PYTHON}/os.html#os.PathLike",
}


def link_outside(
    _app: Sphinx, _env: object, node: pending_xref, shown: nodes.Element
) -> nodes.reference | None:
    """Return the link to a name of PyTorch or Python."""
    address = OUTSIDE.get(node["reftarget"])
    if address is None:
        return None
    link = nodes.reference(refuri=address, internal=False)
    link += shown
    return link


def valid_signature(*described: object) -> tuple[object, object] | None:
    """Return a signature that Sphinx can parse: of ``*args: P.args`` it makes ``~typing.~_P``."""
    signature, returned = described[-2:]
    return (signature.replace("~typing.~_", "_"), returned) if isinstance(signature, str) else None


def types_beside_names(
    _app: Sphinx, _kind: str, _name: str, _named: object, _options: object, lines: list[str]
) -> None:
    """Show an attribute's type behind its name, as a property's; napoleon puts it at the end."""
    named = 0
    for number, line in enumerate(lines):
        if line.startswith(".. attribute::"):
            named = number
        elif line.startswith("   :type:"):
            lines.insert(named + 1, lines.pop(number))


def public_type_variables(_app: Sphinx, page: nodes.document) -> None:
    """Show a type variable as ``T``, which is ``_T`` in the source because it is not exported."""
    for signature in page.findall(desc_signature):
        for text in list(signature.findall(nodes.Text)):
            if re.fullmatch(r"_[A-Z][A-Za-z]*", text):
                text.parent.replace(text, nodes.Text(text.lstrip("_")))


def readable_fields(_app: Sphinx, page: nodes.document) -> None:
    """Write the dash after a parameter, as smart quotes would, and ``T`` for ``pardata.…._T``."""
    for field in page.findall(nodes.field):
        for text in list(field.findall(nodes.Text)):
            shown = re.sub(r"pardata\.[a-z_.]*\._(?=[A-Z])", "", text)
            if shown == " -- ":
                shown = " \N{EN DASH} "
            if shown != text:
                text.parent.replace(text, nodes.Text(shown))


# Where a narrow column may break code: after "a.", "=", "(" and ",", and in names if they are long.
BREAKS = re.compile(r"(?<=[a-zA-Z)\]]\.)(?=[a-zA-Z_])|(?<=[=(,])(?=[^=),])")
IN_NAMES = re.compile(r"(?<=[a-zA-Z0-9]_)(?=[a-zA-Z0-9])|(?<=[a-z]{4})(?=[A-Z][a-z]{3})")
WORD = re.compile(r'<span class="pre">([^<]*)</span>')  # in HTML
NAME = '<span class="sig-name'  # begins a new line if it has no room behind its module
UNIT = re.compile(r"(?<=\d) (?=±|%[\s,.;:)<])|(?<=±) ")  # the spaces of "11.0 ± 1.6" and "90 %"
COLUMN, LINE = 16, 31  # letters of code that a narrow column has room for, and a line on a phone


def whole(text: str) -> str:
    """Return a word of code that is not broken after its hyphens: ``--nproc-per-node``."""
    return f'<span class="whole">{text}</span>' if "-" in text and len(text) <= LINE else text


def breakable(width: int, code: re.Match[str]) -> str:
    """Return a word of code that breaks between its parts, if it is wider than `width` letters."""
    parts = [code[1]]
    for places in (BREAKS, IN_NAMES):
        split = (places.split(part) if len(unescape(part)) > width else [part] for part in parts)
        parts = list(chain.from_iterable(split))
    return f'<span class="pre">{"<wbr>".join(map(whole, parts))}</span>'


def readable_on_a_phone(
    _app: Sphinx, _page: str, _template: str, context: dict[str, str], _doctree: object
) -> None:
    """Say where code may break, and link a picture of several panels to itself in full size.

    A number is on one line with its uncertainty or "%".
    """
    if "body" not in context:
        return
    body = UNIT.sub("&nbsp;", context["body"]).replace(NAME, f"<wbr>{NAME}")
    parts = re.split(r"(<table.*?</table>)", body, flags=re.DOTALL)
    for number, part in enumerate(parts):
        width = COLUMN if part.startswith("<table") else LINE
        parts[number] = WORD.sub(partial(breakable, width), part)
    picture = r'<p>(<img [^>]*src="(_images/[^"]*\.png)"[^>]*>)\s*</p>'
    context["body"] = re.sub(picture, r'<p><a class="picture" href="\2">\1</a></p>', "".join(parts))


def setup(app: Sphinx) -> None:
    """Connect what is above; Sphinx calls this."""
    app.connect("missing-reference", link_outside)
    app.connect("autodoc-process-signature", valid_signature)
    app.connect("autodoc-process-docstring", types_beside_names, priority=600)  # after napoleon
    app.connect("doctree-read", public_type_variables)
    app.connect("doctree-read", readable_fields)
    app.connect("html-page-context", readable_on_a_phone)
