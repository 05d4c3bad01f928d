"""The site builds without a warning, holds together without a network, and its reference has every public name."""

import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PUBLIC = ("tritonpack", "tritonpack.flash_attn", "tritonpack.packing", "tritonpack.parallel", "tritonpack.testing")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of what it is made of."""
    for module in ("zensical", "mkdocstrings", "griffe", "math_core", "typer"):
        pytest.importorskip(module)
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "docs", root / "docs")
    (root / "tritonpack").symlink_to(ROOT / "tritonpack")
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("*.md")):
        shutil.copy(path, root)
    command = [sys.executable, "docs/tools/build_site.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return root / "site"


class Page(HTMLParser):
    """The anchors, links, and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.loaded if tag == "link" else self.links).append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    named = re.findall(r": ([\w/-]+\.md)$", SETTINGS, flags=re.MULTILINE)
    assert sorted(named) == sorted(pages | {"index.md", "contributing.md", "changelog.md"})


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere_within_the_site(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 25
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":  # which a server shows at any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else path
            inside = target.is_relative_to(site.resolve()) and target.exists()
            anchors = pages[target].anchors if target in pages else {""}
            if not inside or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert {"./packing.html", "./installation.html", "./quickstart.html"} <= set(Page(site / "index.html").links)
    assert not list(site.rglob("*.py"))


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Fonts, styles, scripts and pictures are files of the site, so that it works without a network."""
    for path in site.rglob("*.html"):
        assert [link for link in Page(path).loaded if urlsplit(link).netloc] == []
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text(encoding="utf-8"))


def test_formulas_are_mathml_and_code_is_coloured(site: Path) -> None:
    page = (site / "math.html").read_text(encoding="utf-8")
    source = re.sub(r"`[^`]*`", "", (ROOT / "docs" / "math.md").read_text(encoding="utf-8"))
    assert page.count("<math") == len(re.findall(r"\$\$.*?\$\$|\$[^$]+\$", source, re.DOTALL))
    assert '<span class="kn">import</span>' in (site / "quickstart.html").read_text(encoding="utf-8")


def test_command_line_page_has_the_options_of_every_command(site: Path) -> None:
    typer = pytest.importorskip("typer")
    from tritonpack.cli.app import app

    page = (site / "command-line.html").read_text(encoding="utf-8")
    for name, command in typer.main.get_command(app).commands.items():
        assert f"Usage: tritonpack {name} " in page
        assert [option for parameter in command.params for option in parameter.opts if f"{option} " not in page] == []


def test_links_of_markdown_files_are_files_of_the_repository() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in pages:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            assert urlsplit(link).scheme or (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(site: Path, module: str) -> None:
    entries = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    documented = {entry.split()[0] for entry in entries}
    names = {f"{module}.{name}" for name in import_module(module).__all__} - {"tritonpack.__version__"}
    assert len(names) > 3
    assert sorted(names - documented) == []
