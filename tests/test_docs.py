"""The site builds without a warning, and its reference has every public name."""

import re
import runpy
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "docs" / "tools"
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PUBLIC = ("tritonpack", "tritonpack.flash_attn", "tritonpack.packing", "tritonpack.parallel", "tritonpack.testing")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(root / "mkdocs.yml"), "-d", str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "mkdocstrings", "griffe"):
        pytest.importorskip(module)
    out = tmp_path_factory.mktemp("site")
    result = build(ROOT, out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.heavy
def test_the_site_builds_without_a_warning(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "packing/" in re.findall(r'href="([^"]+)"', home)
    assert (site / "reference" / "attention" / "index.html").exists()
    assert not list(site.rglob("*.py"))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(site: Path, module: str) -> None:
    entries = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    documented = {entry.split()[0] for entry in entries}
    names = {f"{module}.{name}" for name in import_module(module).__all__} - {"tritonpack.__version__"}
    assert len(names) > 3
    assert sorted(names - documented) == []


def test_every_parameter_of_a_shared_line_has_its_entry(site: Path) -> None:
    page = (site / "reference" / "flash_attn" / "index.html").read_text(encoding="utf-8")
    assert "<code>max_seqlen_q, " not in page
    page = (site / "reference" / "attention" / "index.html").read_text(encoding="utf-8")
    assert page.count("<b><code>chunk_size</code></b>") >= 5
    assert "&gt;&gt;&gt; mask.key_start.tolist()" in page


def test_docstrings_are_prepared() -> None:
    pytest.importorskip("griffe")
    prepared = runpy.run_path(str(TOOLS / "docstrings.py"))["prepared"]
    text = "One.\n\nSee:\n>>> f(1)\n2\n\nArgs:\n    a, b: of both,\n        at once.\n    c: last.\n\n"
    text += "Source: X,\n    Y.\nEnd."
    assert prepared(text) == (
        "One.\n\nSee:\n\n```pycon\n>>> f(1)\n2\n```\n\nArgs:\n    a: of both,\n        at once.\n    b: of both,\n"
        "        at once.\n    c: last.\n\n*Source*: X,\nY.\nEnd."
    )


def test_dots_stand_for_the_parameters_between() -> None:
    pytest.importorskip("griffe")
    prepared = runpy.run_path(str(TOOLS / "docstrings.py"))["prepared"]
    text = prepared("One.\n\nArgs:\n    b, ..., e: see f.", ["a", "b", "c", "d", "e", "f"])
    assert text.endswith("Args:\n    b: see f.\n    c: see f.\n    d: see f.\n    e: see f.")


def test_what_is_broken_fails_the_build(site: Path, tmp_path: Path) -> None:
    """A page with a link and an anchor that lead nowhere, built as the site is."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[a](nowhere.md) [b](#nor-here)\n")
    settings = re.sub(
        r"^(hooks|nav|plugins|extra_javascript|exclude_docs):(.*\n)(^[ -].*\n)*", "", SETTINGS, flags=re.M
    )
    (tmp_path / "mkdocs.yml").write_text(settings)
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert "'nowhere.md'" in result.stderr
    assert "'#nor-here'" in result.stderr


def test_pages_from_the_root_link_within_the_site() -> None:
    pytest.importorskip("mkdocs")
    as_page = runpy.run_path(str(TOOLS / "root_pages.py"))["as_page"]
    text = "[a](docs/packing.md#bins) ![b](docs/images/x.png) [c](CHANGELOG.md) [d](https://x.org/README.md)"
    assert as_page(text) == "[a](packing.md#bins) ![b](images/x.png) [c](changelog.md) [d](https://x.org/README.md)"
