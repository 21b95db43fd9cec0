"""The site as a reader sees it: built, looked at in a real browser, and searched.

The photographs go to the test's temporary folder. `-m soak` takes all of them: each page, wide and
on a phone, light and dark, down to its end.
"""

import re
import sys
from importlib.util import find_spec

import pytest
from browser import chromium, tab
from places import DOCS
from processes import run

STYLE = DOCS / "_static" / "pardata.css"
soak = pytest.mark.soak
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "furo", "myst_parser", "sphinx_copybutton"))),
    reason="builds the documentation: needs `pip install torch-pardata[docs]`",
)
needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="looks at pages in Chromium, which is not installed"
)

WIDE, WINDOW, PHONE = (1400, 900), (1100, 800), (390, 844)
VIEWS = [(*WIDE, "light"), (*WIDE, "dark"), (*PHONE, "light"), (*PHONE, "dark")]
VIEWS += [(*WINDOW, "light")]
BACKGROUND = {"light": range(200, 256), "dark": range(60)}  # of red, green and blue
LONGEST = 12_000  # pixels: a taller photograph is no use to anybody

# What a page must not have, as the reader's browser sees it.
LOOK = """({
    sideways: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    cut: [...document.querySelectorAll("[role=main] table")]
        .filter(t => t.getBoundingClientRect().right > innerWidth + 1)
        .filter(t => !["auto", "scroll"].includes(getComputedStyle(t.parentElement).overflowX))
        .map(t => t.innerText.slice(0, 40)),
    split: [...document.querySelectorAll("[role=main] :is(code, dt, h1, h2, h3)")].map(word => {
        const texts = document.createTreeWalker(word, NodeFilter.SHOW_TEXT);
        let before = "", above = null;
        for (let text; (text = texts.nextNode()); )
            for (let i = 0; i < text.length; i++) {
                const range = document.createRange();
                range.setStart(text, i);
                range.setEnd(text, i + 1);
                const top = range.getBoundingClientRect().top;
                const pair = before.slice(-1) + text.data[i];
                if (above !== null && top > above + 4 && /[a-z0-9-][a-z0-9]/.test(pair))
                    return before + "|" + text.data.slice(i);
                before += text.data[i];
                above = top;
            }
    }).filter(Boolean),
    background: getComputedStyle(document.body).backgroundColor,
    scrolls: [...document.querySelectorAll("[role=main] .table-wrapper")]
        .filter(w => innerWidth > 1000 && w.scrollWidth > w.clientWidth + 1)
        .map(w => w.innerText.slice(0, 40)),
    mislabelled: [...document.querySelectorAll("[role=main] td > p")].filter(p => {
        const label = getComputedStyle(p, "::before").content.match(/[a-z]+/gi) ?? [];
        const head = p.closest("table").querySelectorAll("th")[p.parentElement.cellIndex];
        return label[0] !== "none" && label.some(word => !head.innerText.includes(word));
    }).map(p => p.innerText),
    height: document.documentElement.scrollHeight,
})"""
TROUBLE = ("Network.loadingFailed", "Runtime.exceptionThrown", "Log.entryAdded")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. A warning of Sphinx is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "--quiet", "-b", "html", "-d", folder / "doctrees"]
    run(sys.executable, "-m", "sphinx", *options, DOCS, folder / "html")
    return folder / "html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def wrong_with(seen, scheme):
    """Say what a reader would complain of."""
    colors = map(int, re.findall(r"\d+", seen["background"])[:3])
    if not all(color in BACKGROUND[scheme] for color in colors):
        yield f"a background of {seen['background']}"
    if seen["sideways"] > 0:
        yield f"it is {seen['sideways']} pixels wider than the window"
    yield from (f"a broken picture: {source}" for source in seen["broken"])
    yield from (f"a table that is cut: {text}" for text in seen["cut"])
    yield from (f"a table that scrolls: {text}" for text in seen["scrolls"])
    yield from (f"a cell whose label is not its column's: {text}" for text in seen["mislabelled"])
    yield from (f"a line that breaks inside a word: {text}" for text in seen["split"])


@needs_chromium
@pytest.mark.parametrize(
    "views", [pytest.param(VIEWS, marks=soak, id="all"), pytest.param(VIEWS[::3], id="two")]
)
def test_every_page_is_readable_in_all_sizes_and_color_schemes(views, site, browser, tmp_path):
    complaints, pages = [], sorted(site.glob("*.html"))
    assert len(pages) >= len(list(DOCS.glob("*.md")))
    for page in pages:
        browser.open(page.as_uri())
        events = browser.events("Network.requestWillBeSent", *TROUBLE)
        asked = [event["request"]["url"] for event in events if "request" in event]
        complaints += [(page.name, event) for event in events if "request" not in event]
        complaints += [(page.name, url) for url in asked if not url.startswith(("file:", "data:"))]
        for width, height, scheme in views:
            browser.show(width, height, scheme)
            seen = browser.ask(LOOK)
            view = f"{page.stem}-{width}-{scheme}"
            complaints += [(view, complaint) for complaint in wrong_with(seen, scheme)]
            if len(views) == len(VIEWS):
                browser.photograph(tmp_path / f"{view}.png", min(seen["height"], LONGEST))
    assert complaints == []


@needs_chromium
def test_a_bad_page_is_found(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<style>p::before { content: 'old: ' }</style>"
        "<body style='background: #777'><img src=none.png><div role=main><div class=table-wrapper>"
        "<table style='width: 1500px'><th>new<tr><td><p>wide</p><td>"
        "<code style='display: block; width: 3ch; word-break: break-all'>asyn</code>"
    )
    browser.open(page.as_uri())
    assert len(browser.events(*TROUBLE)) >= 1
    browser.show(*PHONE, "dark")
    complaints = "; ".join(wrong_with(browser.ask(LOOK), "dark"))
    assert re.fullmatch(
        "a background of .*; it is .* wider.*; a broken picture: .*none.png; "
        r"a table that is cut: new.*; a cell whose label .*: wide; a line .*: asy\|n",
        complaints,
        re.DOTALL,
    )
    browser.show(*WIDE, "dark")
    assert "a table that scrolls: new" in "; ".join(wrong_with(browser.ask(LOOK), "dark"))


@needs_chromium
def test_the_readmes_table_is_a_list_on_a_phone(site, browser):
    browser.open((site / "index.html").as_uri())
    browser.show(*PHONE, "light")
    cells = "[...document.querySelectorAll('#compared table td')]"
    edges = browser.ask(f"{cells}.map(cell => cell.getBoundingClientRect().right)")
    assert len(edges) == 6 * 5
    assert max(edges) <= PHONE[0]


# -------------------------------------------------------------------------------- search

# What people look for, and a page that must be among the first results.
SOUGHT = {
    "exact": "exact",
    "HSDP": "comparison",
    "Windows": "comparison",
    "wandb": "howto-evaluation",
    "MLflow": "howto-evaluation",
    "torchft": "comparison",
}
FIRST = 5


@needs_chromium
@pytest.mark.parametrize(("word", "page"), SOUGHT.items())
def test_the_search_lists_it_among_the_first(word, page, site, browser):
    browser.open(f"{(site / 'search.html').as_uri()}?q={word}")
    links = """new Promise(done => {
        const look = () => {
            const said = document.querySelector(".search-summary")?.innerText;
            if (!/found|did not match/.test(said)) return setTimeout(look, 20);
            done([...document.querySelectorAll("#search-results li a")].map(link => link.href));
        };
        look();
    })"""
    found = [address.rpartition("/")[2].partition(".html")[0] for address in browser.ask(links)]
    assert page in list(dict.fromkeys(found))[:FIRST]


@pytest.mark.parametrize("pair", ["()", "{}"])
def test_each_bracket_of_the_style_sheet_is_closed(pair):
    first, last = map(STYLE.read_text(encoding="utf-8").count, pair)
    assert first == last


def test_every_section_in_the_style_sheet_is_on_a_page(site):
    style = STYLE.read_text(encoding="utf-8")
    named = set(re.findall(r"#([a-z][\w-]*-[\w-]+|[a-z]{3,})(?=[\s,):])", style))
    assert len(named) > 10
    there = "".join(page.read_text(encoding="utf-8") for page in site.glob("*.html"))
    assert {name for name in named if f'<section id="{name}"' not in there} == set()
