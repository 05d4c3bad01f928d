"""The house rules: directions of imports, imports of heavy packages, sizes of files, docstrings."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
parse = cache(ast.parse)
PACKAGE = ROOT / "tritonpack"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + [
    path for folder in ("tests", "benchmarks", "examples", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
]

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# Room of the package -> the other rooms that it may import from.
GROUND = {"checks", "errors", "masks", "notices", "options", "removed"}
ALLOWED = {
    "errors": set(),
    "removed": set(),
    "notices": {"errors"},
    "checks": {"errors"},
    "compilation": {"notices"},
    "kernels": {"checks", "errors", "notices"},
    "masks": {"checks", "errors", "kernels", "removed"},
    "options": {"checks", "errors", "masks"},
    "backends": GROUND | {"kernels"},
    "ops": GROUND | {"backends"},
    "attention": GROUND | {"backends", "ops"},
    "flash_attn": GROUND | {"attention", "backends"},
    "packing": GROUND | {"compilation"},
    "parallel": GROUND | {"attention", "backends", "ops", "packing", "patches"},
    "patches": GROUND | {"attention", "backends", "ops", "packing"},
    "testing": GROUND | {"attention", "backends", "patches"},
    "cli": GROUND | {"attention", "backends", "flash_attn", "kernels", "packing", "parallel", "patches", "testing"},
    "integrations": GROUND | {"backends", "packing", "patches"},
    "__main__": {"cli"},
    "__init__": GROUND | {"attention", "flash_attn", "integrations", "kernels", "packing", "parallel", "patches"},
}

# Heavy or optional package -> the rooms that may import it.
GUESTS = {
    "accelerate": {"cli", "parallel"},
    "axolotl": {"integrations"},
    "datasets": {"cli", "packing"},
    "matplotlib": {"cli"},
    "numba": {"compilation"},
    "pyarrow": {"cli", "packing"},
    "pydantic": {"integrations"},
    "rich": {"cli"},
    "torch.distributed": {"cli", "packing", "parallel"},
    "tqdm": {"cli", "compilation"},
    "transformers": {"cli", "integrations", "parallel", "patches", "testing"},
    "triton": {"backends", "kernels"},
    "typer": {"cli"},
}


def imports_of(source: str, module: str) -> set[str]:
    """The dotted names that a module imports, anywhere in it, also by a string such as "tritonpack.masks.forms"."""
    names = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            # `from tritonpack import mask` imports a room, `from tritonpack import patch` imports the room of `patch`.
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^tritonpack(?:\.\w+)+$", node.value))
    return names


def room_of(name: str) -> str:
    """The room of a dotted name of the package; public names belong to the room of their module."""
    from tritonpack import _HOMES

    first = name.split(".")[1] if "." in name else "__init__"
    return _HOMES.get(first, first if first in ALLOWED else "__init__").split(".")[0]


def breaches(source: str, module: str) -> Iterator[str]:
    room = module.split(".")[1] if "." in module else "__init__"
    for name in sorted(imports_of(source, module)):
        if name.split(".")[0] == "tritonpack":
            target = room_of(name)
            if target not in ALLOWED[room] | {room, "__init__"}:
                yield f"{module} imports {name}, but {room} may import from {sorted(ALLOWED[room])} alone"
        for guest, rooms in GUESTS.items():
            if (name + ".").startswith(guest + ".") and room not in rooms:
                yield f"{module} imports {name}, which is for {sorted(rooms)} alone"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class TestImports:
    def test_imports_follow_the_table(self) -> None:
        assert [breach for path in MODULES for breach in breaches(read(path), module_name(path))] == []

    @pytest.mark.parametrize("room", sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")}))
    def test_files_of_a_room_import_one_way(self, room: str) -> None:
        """Also by imports within functions and by those for type checkers."""
        files = {module_name(path).removesuffix(".__init__"): path for path in (PACKAGE / room).rglob("*.py")}
        imported = {}
        for name, path in files.items():
            found = imports_of(read(path), module_name(path))
            imported[name] = {one if one in files else one.rpartition(".")[0] for one in found} & set(files) - {name}
        TopologicalSorter(imported).prepare()  # raises CycleError, which names the files

    def test_tests_import_benchmarks_for_the_benchmarks_alone(self) -> None:
        """The package's tests must run without the benchmarks."""
        for path in SOURCES:
            if "tests" in path.parts and not {"benchmarks", "gpu"} & {*path.relative_to(ROOT).parts}:
                names = imports_of(read(path), module_name(path))
                assert not [name for name in names if name.split(".")[0] == "benchmarks"], path

    @pytest.mark.parametrize(
        ("module", "source"),
        [
            ("tritonpack.masks.block_diagonal", "from ..attention import varlen_attention"),
            ("tritonpack.masks.block_diagonal", "from tritonpack import varlen_attention"),
            ("tritonpack.masks.block_diagonal", "def later():\n    import tritonpack.backends.blocked"),
            ("tritonpack.kernels.forward", "import_module('tritonpack.patches')"),
            ("tritonpack.kernels.forward", "from torch import distributed"),
            ("tritonpack.packing.bins", "import triton.language as tl"),
        ],
    )
    def test_breaches_are_found(self, module: str, source: str) -> None:
        assert list(breaches(source, module))

    def test_every_room_has_a_rule(self) -> None:
        rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES}
        assert rooms == set(ALLOWED)


BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"no module named {{name!r}} here", name=name)

sys.meta_path.insert(0, Absent())
import tritonpack
assert "torch" not in sys.modules, "import tritonpack loads torch"
"""

ATTENTION = """
import torch
from tritonpack import BackendUnavailableError, BlockDiagonalMask, PackingCollator, varlen_attention

batch = PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
mask = BlockDiagonalMask.from_position_ids(batch["position_ids"])
q, k, v = (torch.randn(5, 2, 16, requires_grad=True) for _ in range(3))
for backend in ("auto", "blocked", "reference"):
    varlen_attention(q, k, v, mask, backend=backend).sum().backward()
    assert v.grad.any()
import tritonpack.cli, tritonpack.testing
print(sorted(ABSENT & set(sys.modules)))
try:
    varlen_attention(q, k, v, mask, backend="triton")
except BackendUnavailableError as error:
    print(error)
try:
    tritonpack.patch
except ImportError as error:
    print(error)
"""

PACKING = """
assert "tritonpack.packing" not in sys.modules, "subpackages are attributes that are imported at their first use"
assert tritonpack.packing.plan_epoch([3, 5], 8, 1).num_steps == 1
assert {"packing", "parallel", "testing"} <= set(dir(tritonpack))
tritonpack.parallel, tritonpack.testing.make_inputs
from tritonpack import MultipackDistributedBatchSampler, PackingCollator, pack, pack_stream

lengths = [3, 5, 2, 7]
assert pack(lengths, 8).num_bins == 3
assert list(MultipackDistributedBatchSampler(8, lengths, 1, 0, tail="keep"))
documents = [{"input_ids": list(range(n))} for n in lengths]
assert PackingCollator()(next(iter(pack_stream(documents, 8))))["input_ids"].shape[0] == 1
assert list(pack_stream(documents, 8))
"""


def run_without(absent: set[str], program: str) -> list[str]:
    """The lines that a program prints in a fresh interpreter in which some packages can't be imported."""
    code = BLOCKER.format(absent=absent) + program.replace("ABSENT", repr(absent))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_attention_without_heavy_packages() -> None:
    """Masks, the collator and the backends in torch work; what needs a missing package names it and the remedy."""
    absent = {"accelerate", "matplotlib", "numba", "rich", "tqdm", "transformers", "triton", "typer"}
    imported, triton, transformers = run_without(absent, ATTENTION)
    assert imported == "[]"
    assert triton.startswith("backend='triton' needs Triton 3.6 or later, which can't be imported here (")
    assert triton.endswith("run pip install 'triton>=3.6', or use backend='blocked'.")
    assert transformers == (
        "tritonpack.patch needs transformers, which isn't installed here; run pip install transformers."
    )


@pytest.mark.slow
def test_packing_needs_only_torch_numpy_and_numba() -> None:
    """docs/installation.md says so."""
    pytest.importorskip("numba")
    assert run_without({"accelerate", "matplotlib", "rich", "tqdm", "transformers", "triton", "typer"}, PACKING) == []


def test_no_file_grows_past_500_lines() -> None:
    lengths = {module_name(path): len(read(path).splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


# Functions of torch that make a tensor on the default device, and `Generator`.
MAKERS = re.compile(
    r"torch\.(Generator|arange|as_?(array|tensor)|empty(_permuted|_strided)?|eye|full|(lin|log)space|nested_tensor|"
    r"normal|ones|rand(int|n|perm)?|scalar_tensor|sparse_\w+_tensor|tensor|tri[lu]_indices|zeros)"
)


def makers_without_a_device(source: str) -> list[str]:
    """Calls that make a tensor without `device`."""
    calls = [node for node in ast.walk(parse(source)) if isinstance(node, ast.Call)]
    bare = [call for call in calls if "device" not in {k.arg for k in call.keywords}]
    return [ast.unparse(call) for call in bare if MAKERS.fullmatch(ast.unparse(call.func))]


def test_tensors_are_made_on_a_named_device() -> None:
    """`torch.set_default_device` must not move what the package makes for itself."""
    assert makers_without_a_device("x = torch.zeros(3) + torch.arange(3, device=d)") == ["torch.zeros(3)"]
    found = {module_name(path): makers_without_a_device(read(path)) for path in MODULES}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_public_names_are_documented() -> None:
    bare, kinds = [], (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for path in MODULES:
        tree = parse(read(path))
        public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        documented = {node.name for node in public if ast.get_docstring(node)}
        bare += [] if ast.get_docstring(tree) else [module_name(path)]
        bare += [f"{module_name(path)}.{node.name}" for node in public if node.name not in documented]
    assert bare == []


def test_public_names_exist() -> None:
    import tritonpack

    pytest.importorskip("transformers")
    for name in tritonpack.__all__:
        assert getattr(tritonpack, name) is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'flash'; it has .*varlen_attention"):
        tritonpack.flash  # noqa: B018


@pytest.mark.slow
def test_installs_without_a_network(tmp_path: Path) -> None:
    """The line of docs/installation.md, in a copy, because it writes into the folder."""
    pytest.importorskip("setuptools", minversion="77")
    page = read(ROOT / "docs" / "installation.md")
    (line,) = re.findall(r"^pip (install --no-index .*)$", page, re.M)
    shutil.copytree(PACKAGE, tmp_path / "tritonpack", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "pip", *line.split(), "--target", "installed"]
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "installed" / "tritonpack" / "patches" / "exact_classes.csv").exists()


GENERATED = ("models.md", "compile-matrix.md")


def overlong_prose(text: str) -> list[str]:
    """The lines of a Markdown file past 120 columns, but for tables, code and lines that are one link."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    kept = re.compile(r"\s*\||    |\s*!?\[[^\]]*\]\([^)]*\)$")
    return [line for line in prose.splitlines() if len(line) > 120 and not kept.match(line)]


def test_prose_is_wrapped_at_120_columns() -> None:
    long = "word " * 30
    assert overlong_prose(f"{long}\n- {long}\n| {long} |\n```\n{long}\n```\n    {long}\n") == [long, f"- {long}"]
    pages = [path for path in PAGES if path.name not in GENERATED]
    found = {path.name: overlong_prose(read(path)) for path in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}
