"""docs/internals.md lists every undocumented name of transformers that tritonpack uses."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tritonpack"
# Names that transformers exports from its top level are documented.
DOCUMENTED = "transformers"


def rows() -> dict[str, str]:
    """The names, and for each the test that fails if it changes."""
    text = (ROOT / "docs" / "internals.md").read_text()
    return dict(re.findall(r"^\| `([^`]+)` \|.*\| (\S+) \|$", text, re.M))


@cache
def library() -> set[str]:
    """The words of transformers' own code outside of its models."""
    home = Path(transformers.__file__).parent
    folders = (home, home / "generation", home / "integrations", home / "utils")
    return {word for folder in folders for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text())}


@cache
def touched() -> set[str]:
    """Imports from transformers' modules, and private attributes of transformers."""
    ours: set[str] = set()
    attributes: set[str] = set()
    imports: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # fields
                ours.add(node.target.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                attributes.add(node.attr)
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    ours.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"_[a-z]+_[a-z_]+", node.value):  # names given to getattr
                    attributes.add(node.value)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{DOCUMENTED}."):
                imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return ((attributes - ours) & library()) | imports


OTHERS = {
    "_dynamo", "_dynamo_marked_constant",  # of torch
    "_available",  # a substring of messages
    "_getframe",  # of sys
    "_name_or_path", "_out_features", "_out_indices",  # fields of configurations, as text
    "_replace",  # of named tuples
    "_token_id",  # ends of names of fields
}  # fmt: skip


@pytest.mark.slow
def test_every_name_is_listed() -> None:
    assert touched() - OTHERS - set(rows()) == set()
    assert len(rows()) >= 15


@pytest.mark.parametrize("name", rows())
def test_a_listed_name_exists(name: str) -> None:
    if name.startswith(f"{DOCUMENTED}."):
        assert name in touched()
        home, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(home), last) or importlib.import_module(name)
    elif "." in name:
        home, last = name.split(".")
        assert hasattr(getattr(transformers, home), last)
    else:
        assert name in touched()


@pytest.mark.parametrize("test", sorted(set(rows().values())))
def test_a_listed_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert not name or f"def {name}(" in (ROOT / path).read_text()
    assert (ROOT / path).exists()
