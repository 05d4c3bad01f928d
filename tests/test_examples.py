"""The examples run, and training lowers their losses."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tritonpack

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_every_example_is_tested():
    tested = {"pack_with_spark", "train_packed", "train_with_trainer", "train_sequence_parallel"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("name", ["train_packed", "train_with_trainer"])
def test_training_lowers_the_loss(name):
    if name == "train_with_trainer":
        pytest.importorskip("accelerate")
    losses = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps=10)
    assert len(losses) == 10
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_spark_makes_the_rows_of_pack_to_disk(tmp_path, monkeypatch):
    """In any number of files; bad documents are named."""
    pytest.importorskip("pyspark")
    datasets = pytest.importorskip("datasets")
    from tests.packing.offline.tables import random_documents, write_files

    python_path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])  # of the workers
    monkeypatch.setenv("PYTHONPATH", python_path)
    source = write_files(tmp_path / "in", "parquet", random_documents(300, 60))
    tritonpack.pack_to_disk(source, 50, tmp_path / "rows", overlong="split")
    expected = list(datasets.load_from_disk(str(tmp_path / "rows")))
    main = runpy.run_path(str(EXAMPLES / "pack_with_spark.py"))["main"]
    for files in (1, 3):
        out = tmp_path / f"spark-{files}"
        assert main(str(source), str(out), 50, overlong="split", files=files, master="local[2]") == len(expected)
        written = sorted(map(str, out.glob("*.parquet")))
        assert len(written) == files
        assert list(datasets.Dataset.from_parquet(written, cache_dir=str(tmp_path / "cache" / str(files)))) == expected

    bad = write_files(tmp_path / "bad", "parquet", [{"input_ids": [1]}, {"input_ids": [2]}, {"input_ids": []}])
    with pytest.raises(Exception, match=r"document 0 of file 2 of .*, in the order of names: input_ids is empty"):
        main(str(bad), str(tmp_path / "never"), 50, master="local[2]")


def torchrun(*options: str) -> dict[int, float]:
    """The printed losses by step of two ranks that share every batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "train_sequence_parallel.py"), "--sp", "2", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): .*loss (.*)", result.stdout)}


@pytest.mark.slow
def test_sequence_parallel_equals_one_process_and_resumes_exactly(tmp_path, monkeypatch):
    options = ("--steps", "8", "--save-every", "4", "--checkpoint", str(tmp_path))
    losses = torchrun(*options)
    shutil.rmtree(tmp_path / "step-000008")  # as after an interruption before this step
    resumed = torchrun(*options, "--resume")
    assert resumed == {step: losses[step] for step in (5, 6, 7, 8)}

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    main = runpy.run_path(str(EXAMPLES / "train_sequence_parallel.py"))["main"]
    alone = main(steps=8)
    assert list(losses.values()) == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] / 2
    shutil.rmtree(tmp_path / "step-000008")
    assert main(steps=8, checkpoint=tmp_path, resume=True) == pytest.approx(alone[4:], abs=1e-4)
