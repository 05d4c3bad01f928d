"""The checks of a release find what they look for."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release_check
from tools.release_check import ReleaseError, check_files, check_source, check_version, check_wheel

PACKAGE = {"tritonpack/__init__.py", "tritonpack/py.typed"}


def changelog(entry: str) -> str:
    return f"# Changelog\n\n## {entry}\n\n## [0.0.1] - 2026-01-01\n"


def test_version_is_the_first_entry_of_the_changelog() -> None:
    assert check_version(changelog("[1.2.0] - 2026-12-01"), "1.2.0") == "1.2.0 of 2026-12-01"
    with pytest.raises(ReleaseError, match=r"begins with 1\.2\.0, and tritonpack.__version__ is 1\.3\.0"):
        check_version(changelog("[1.2.0] - 2026-12-01"), "1.3.0")
    with pytest.raises(ReleaseError, match="has no date but 'unreleased'"):
        check_version(changelog("[1.2.0] - unreleased"), "1.2.0")


def test_archives_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    wheel, source = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*PACKAGE, "a.dist-info/licenses/LICENSE"):
            archive.writestr(name, "")
    assert check_wheel(wheel, PACKAGE) == "2 files of the package"
    with pytest.raises(ReleaseError, match=r"lacks tritonpack/a\.csv; has nothing in addition"):
        check_wheel(wheel, PACKAGE | {"tritonpack/a.csv"})
    with pytest.raises(ReleaseError, match=r"lacks nothing; has tests/test_a\.py in addition"):
        check_files(PACKAGE | {"tests/test_a.py"}, PACKAGE)
    with tarfile.open(source, "w:gz") as tar:
        for name in (*PACKAGE, "LICENSE", "README.md"):
            (tmp_path / "file").write_text("")
            tar.add(tmp_path / "file", f"tritonpack-1/{name}")
    with pytest.raises(ReleaseError, match=r"lacks pyproject\.toml"):
        check_source(source, PACKAGE)


def test_failed_command_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"ls -d ended with status 2: .*missing"):
        release_check.run("ls", "-d", tmp_path / "missing")
