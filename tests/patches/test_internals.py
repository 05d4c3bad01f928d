"""docs/internals.md lists every undocumented name of transformers that tritonpack uses."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
# Names of torch, of sys and of named tuples, fields of configurations, and substrings of messages and fields.
OTHERS = set("""
    _dynamo _dynamo_marked_constant _available _getframe _name_or_path _out_features _out_indices _replace _token_id
    """.split())  # fmt: skip # noqa: SIM905
# The names, and for each the test that fails if it changes.
ROWS = dict(re.findall(r"^\| `([^`]+)` \|.*\| (\S+) \|$", (ROOT / "docs" / "internals.md").read_text(), re.M))


def library() -> set[str]:
    """The words of transformers' own code outside of its models."""
    home = Path(transformers.__file__).parent
    folders = (home, home / "generation", home / "integrations", home / "utils")
    return {word for folder in folders for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text())}


@cache
def touched() -> set[str]:
    """Imports from transformers' modules, and private attributes of transformers."""
    ours, attributes, imports = set[str](), set[str](), set[str]()
    for path in (ROOT / "tritonpack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # fields
                ours.add(node.target.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                attributes.add(node.attr)
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    ours.add(node.attr)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]+_[a-z_]+", str(node.value)):
                attributes.add(str(node.value))  # names given to getattr
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return ((attributes - ours) & library()) | imports


@pytest.mark.slow
def test_every_name_is_listed() -> None:
    assert touched() - OTHERS - ROWS.keys() == set()


def test_listed_names_and_tests_exist() -> None:
    assert len(ROWS) >= 15
    for name, test in ROWS.items():
        home, _, last = name.rpartition(".")
        if name.startswith("transformers."):
            assert hasattr(importlib.import_module(home), last) or importlib.import_module(name), name
        elif home:
            assert hasattr(getattr(transformers, home), last), name
        assert name in touched() or (home and not name.startswith("transformers.")), name
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text() if function else (ROOT / path).exists(), test
