"""docs/internals.md lists every undocumented name of transformers that tritonpack uses; older versions pack, too."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
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


# A part of the sweep with older versions of transformers, each in an environment of its own

OLDEST = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1] + ".0"  # type: ignore[index]
# Model types whose causal class is packed exactly, and types that leak with this version, so they are refused. With the
# oldest version: windows, chunks, latent attention, mixtures of experts, sinks, images, encoders, dense masks, absolute
# positions, recurrences and convolutions. The sdpa of 5.17 drops softcaps.
VERSIONS = {
    OLDEST: ("""
        bert bloom cohere deepseek_v3 doge exaone4 falcon falcon_h1 gemma gemma2 gemma3 gpt2 gpt_neox gpt_oss
        granitemoe jamba lfm2 llama llama4_text mamba mamba2 minimax mistral mixtral modernbert-decoder olmo2 opt phi3
        qwen2 qwen3 qwen3_moe qwen3_next recurrent_gemma roberta smollm3 stablelm starcoder2 whisper xlnet
        """, "ctrl roformer"),
    "5.17.0": ("doge falcon_h1 gemma2 gpt_oss llama mistral", ""),
}  # fmt: skip


def interpreter(version: str) -> str:
    """Return a Python with a version of transformers and its requirements; other packages are those installed here."""
    folder = ROOT / ".matrix" / f"transformers-{version}"
    program, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        here = folder / "here"
        here.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith("kernels"):  # an older transformers can't import it, or downloads with it
                (here / entry.name).symlink_to(entry)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "here.pth").write_text(f"{here}\n")
        pip = [program, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"transformers=={version}"]
        subprocess.run(pip, check=True, capture_output=True)
        done.touch()
    return str(program)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_sweep_with_an_older_transformers(version: str, tmp_path: Path) -> None:
    exact, refused = map(str.split, VERSIONS[version])
    pattern = f"/({'|'.join([*exact, *refused])}) "
    sweep = ["-m", "tests.patches.sweep", "--only", "CAUSAL_LM", pattern, "--how", "patch", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([interpreter(version), *sweep], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (tmp_path / f"{version}.jsonl").read_text().splitlines())  # named by the version that ran
    verdicts = {row["key"].partition("/")[2]: row["verdict"] for row in rows}
    assert verdicts == {**dict.fromkeys(exact, "exact"), **dict.fromkeys(refused, "refused")}
