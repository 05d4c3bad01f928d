"""A part of the sweep with the oldest transformers that pyproject.toml allows, in an environment of its own."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1] + ".0"  # type: ignore[index]
FOLDER = ROOT / ".matrix" / f"transformers-{OLDEST}"

# Windows, chunks, latent attention, mixtures of experts, sinks, images, encoders, dense masks, absolute positions,
# recurrences and convolutions.
EXACT = """
    bert bloom cohere deepseek_v3 exaone4 falcon falcon_h1 gemma gemma3 gpt2 gpt_neox gpt_oss granitemoe jamba lfm2
    llama llama4_text mamba mamba2 minimax mistral mixtral modernbert-decoder olmo2 opt phi3 qwen2 qwen3 qwen3_moe
    qwen3_next recurrent_gemma roberta smollm3 stablelm starcoder2 whisper xlnet
"""
OWN_ROWS = "ctrl roformer"  # packed with the newest transformers; with the oldest their trial must find that they leak


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with the oldest transformers and its requirements; other packages are those installed here."""
    program, done = FOLDER / "bin" / "python", FOLDER / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        here = FOLDER / "here"
        here.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith("kernels"):  # an older transformers can't import it, or downloads with it
                (here / entry.name).symlink_to(entry)
        (own,) = FOLDER.glob("lib/python*/site-packages")
        (own / "here.pth").write_text(f"{here}\n")
        pip = [program, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"transformers=={OLDEST}"]
        subprocess.run(pip, check=True, capture_output=True)
        done.touch()
    return str(program)


def run(python: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_sweep_with_the_oldest_transformers(python: str, tmp_path: Path) -> None:
    assert run(python, "-c", "import transformers; print(transformers.__version__)").strip() == OLDEST
    types = [*EXACT.split(), *OWN_ROWS.split()]
    run(python, "-m", "tests.patches.sweep", "--mapping", "CAUSAL_LM", "--how", "patch", "--types", *types,
        "--out", str(tmp_path))  # fmt: skip
    found = [json.loads(line) for line in (tmp_path / f"{OLDEST}.jsonl").read_text().splitlines()]
    verdicts = {row["key"].partition("/")[2]: (row["verdict"], row.get("reason", "")) for row in found}
    assert verdicts.keys() == set(types)
    assert {name: verdict for name, verdict in verdicts.items() if verdict[0] != "exact"} == {}
    layouts = {row["key"].partition("/")[2]: row.get("layout", "packed") for row in found}
    assert {name for name, layout in layouts.items() if layout != "packed"} == {*OWN_ROWS.split()}
