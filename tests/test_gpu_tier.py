"""The tests that need a GPU, without one: they are found, and their models have positions for their documents.

tests/virtual_gpu/test_gpu_tier.py runs their bodies.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.gpu import test_models
from tests.patches import zoo

ROOT = Path(__file__).parents[1]
# Hides every installed package but these and what they need.
ONLY = """
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
import re

needed, todo = set(), ["torch", "triton", "transformers", "pytest"]
while todo:
    name = re.match(r"[\\w.-]+", todo.pop())[0].lower().replace("_", "-")
    if name not in needed:
        needed.add(name)
        try:
            todo += [one for one in requires(name) or [] if "extra ==" not in one]
        except PackageNotFoundError:
            pass  # for another platform
hidden = {module for module, owners in packages_distributions().items()
          if not needed & {owner.lower().replace("_", "-") for owner in owners}} - {"tritonpack"}
assert {"hypothesis", "numba", "accelerate"} & hidden
original = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.split(".")[0] in hidden else original(name, *more)
)
"""


def test_documents_are_within_the_positions_of_models() -> None:
    for name in test_models.KINDS:
        assert max(test_models.LENGTHS) <= zoo.tiny_config(name).max_position_embeddings


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_triton_transformers_and_pytest_suffice(compared: bool, tmp_path: Path) -> None:
    """All tests of the tier are found without any other package, and without importing files that have none."""
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    collect = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-p", "no:cacheprovider", "-m"]
    everything = os.environ | {"PYTHONPATH": str(ROOT)}
    bare = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # The second expression selects the same tests, from all files.
    runs = [
        subprocess.Popen([*collect, which], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for which, env in (("gpu", bare), ("not not gpu", everything))[: 1 + compared]
    ]
    found, *whole = ([line for line in run.communicate()[0].splitlines() if "::" in line] for run in runs)
    assert {run.returncode for run in runs} == {0}, found
    assert whole in ([], [found])
    assert len(found) > 400
    first = [re.sub(r".*::test_(\w+)\[(\w+)-.*", r"\1 \2", line) for line in found[:15]]
    assert {*first[:3]} == {"small_cases causal"}
    assert {*first[3:]} == {"large_cases long", "large_cases ordinary", "large_cases tiny"}
