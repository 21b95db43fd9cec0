"""What is built, what it holds and asks for, and what an installer makes of it.

Builds without isolation, so that nothing is downloaded: needs `build` and `hatchling`.
"""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT
from processes import run

import pardata

VERSION = pardata.__version__
INFO = f"torch_pardata-{VERSION}.dist-info"

pytestmark = pytest.mark.skipif(
    not (find_spec("build") and find_spec("hatchling") and (ROOT / "src").is_dir()),
    reason="builds the distribution: needs a checkout, and `pip install build hatchling`",
)


@pytest.fixture(scope="module", autouse=True)
def _pip_without_settings():
    """Let pip go by no settings but those given."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return built / f"torch_pardata-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return HeaderParser().parsestr(archive.read(f"{INFO}/METADATA").decode())


# ------------------------------------------------------------------------ what is in them


def test_the_wheel_holds_the_sources_the_licence_and_nothing_else(wheel):
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.glob("pardata/**/*.py")}
    about = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {*modules, "pardata/py.typed", *about}
    assert {"pardata/__init__.py", "pardata/testing/__init__.py"} <= modules


def test_the_sdist_holds_what_building_testing_and_documenting_need(built):
    with tarfile.open(built / f"torch_pardata-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        *(".ci", ".github", ".gitignore", "benchmarks", "docs", "examples", "src", "tests"),
        *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"),
        *("PKG-INFO", "hatch_build.py", "pyproject.toml"),
    }
    ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")}
    assert ours <= names
    assert "tests/promises/errors.md" in names  # its rows are tests
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_distribution_asks_for_torch_alone(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.split(r"[<>=~ ]", line)[0] for line in required] == ["torch"]


def test_the_metadata_names_the_distribution_its_licence_and_its_pythons(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("torch-pardata", VERSION)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("BSD-3-Clause", "LICENSE")
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = set(metadata.get_all("Classifier"))
    # No more than the README's status and docs/install.md say.
    assert {"Development Status :: 3 - Alpha", "Typing :: Typed"} <= classifiers
    assert [c for c in classifiers if "System" in c] == ["Operating System :: POSIX :: Linux"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def relative_links(text):
    return re.findall(r"\]\((?!https?:|#)([^)]*)\)", text)


def test_the_readme_has_no_dead_link_or_picture_on_the_index(metadata):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in relative_links(readme)]
    assert len(targets) > 30
    shown, blocks = metadata.get_payload(), re.compile(r"```.*?```", flags=re.DOTALL)
    assert relative_links(shown) == []
    assert blocks.findall(shown) == blocks.findall(readme)
    # What the metadata will hold once [project.urls] has the address.
    build = runpy.run_path(str(ROOT / "hatch_build.py"))["readme_on_index"]
    address = "https://forge.example/pardata"
    published = build(readme, address)
    assert relative_links(published) == []
    led_to = re.findall(rf"\]\({address}/(?:blob|raw)/HEAD/([^)#]*)", published)
    assert led_to == targets
    assert f"]({address}/raw/HEAD/docs/images/hero.svg)" in published


def test_the_version_is_the_same_wherever_it_is_written():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, flags=re.MULTILINE) == [VERSION]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+) - ", changes, flags=re.MULTILINE)[0] == VERSION


def test_the_oldest_of_everything_is_what_the_bounds_allow(metadata):
    # The job "oldest" tests these: a bound that nobody tries is a guess.
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)", condition)  # beside which versions of Python
        if (extra is None or extra[1] in ("examples", "test")) and ">=" in requirement:
            name, _, bound = requirement.partition(">=")
            bounds[name] = bound
    assert pins == bounds


# --------------------------------------------------------------------- what installing does


class Environment:
    """An empty virtual environment."""

    def __init__(self, directory):
        run(sys.executable, "-m", "venv", "--without-pip", directory)
        self.directory = directory
        self.python = directory / ("Scripts" if os.name == "nt" else "bin") / "python"
        bases = {"base": str(directory), "platbase": str(directory)}
        self.site = Path(sysconfig.get_path("purelib", vars=bases))

    def pip(self, *arguments):
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments)

    def lend_packages(self):
        """Let it import what is installed here, torch above all, but for this distribution."""
        lent = self.directory / "lent"
        lent.mkdir()
        for folder in map(Path, dict.fromkeys(sys.path)):
            for path in folder.glob("*") if folder.name.endswith("-packages") else ():
                if "pardata" not in path.name and not (lent / path.name).exists():
                    (lent / path.name).symlink_to(path)
        # Behind its own, and without reading the .pth files there: none of them is in force.
        (self.site / "lent.pth").write_text(f"{lent}\n")

    def run(self, code):
        """Run code in a folder where there is nothing to import; return what it did."""
        nowhere = self.directory / "nowhere"
        nowhere.mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.python, "-c", code],
            env=env, cwd=nowhere, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


RANKS = """
import pardata
from pardata.testing import run

if __name__ == "__main__":
    print(pardata.__file__, run(max, 1, 2, world_size=2))
"""


def test_pip_installs_it_from_an_index_by_its_name_alone(wheel, environment, tmp_path):
    project = tmp_path / "index" / "torch-pardata"  # a folder for each project (PEP 503)
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>')
    environment.lend_packages()
    environment.pip("install", "--index-url", project.parent.as_uri(), "torch-pardata")
    done = environment.run(RANKS)
    where = environment.site / "pardata" / "__init__.py"
    assert (done.stdout, done.stderr) == (f"{where} [2, 2]\n", "")


# --------------------------------------------- the unrelated `pardata` beside it

# The files of its releases 0.3.0 and 0.4.0 that an import comes past, with what they import.
THEIRS = {
    "__init__.py": "from . import dataset, exceptions, loaders, schema\n"
    "from ._high_level import init, load_dataset\n",
    "dataset.py": "from ._dataset import Dataset\n",
    "_dataset.py": "class Dataset: ...\n",
    "_high_level.py": "def init(): ...\ndef load_dataset(): ...\n",
    **{f"{name}.py": "" for name in ("exceptions", "loaders/__init__", "schema")},
}


@pytest.fixture
def theirs(tmp_path):
    """A wheel of the other distribution, as far as it matters here."""
    path = tmp_path / "pardata-0.4.0-py3-none-any.whl"
    info = "pardata-0.4.0.dist-info"
    files = {f"pardata/{name}": text for name, text in THEIRS.items()}
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: pardata\nVersion: 0.4.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


def test_the_other_pardata_elsewhere_on_the_path_is_no_trouble(wheel, theirs, environment):
    environment.pip("install", "--no-deps", "--no-index", wheel)
    environment.pip(
        "install", "--no-deps", "--no-index", "--target", environment.site / "x", theirs
    )
    environment.lend_packages()
    with (environment.site / "lent.pth").open("a") as file:
        file.write(f"{environment.site / 'x'}\n")
    done = environment.run("import pardata, sys; print(pardata.__version__, sys.path[-1])")
    assert (done.stdout, done.stderr) == (f"{VERSION} {environment.site / 'x'}\n", "")
