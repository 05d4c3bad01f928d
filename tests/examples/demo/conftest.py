import multiprocessing
import sysconfig

import pytest


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A standard library of 80 documented functions, and files that don't belong to it."""
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    functions = [f'def function_{i}():\n    """Return {i}."""\n    return {i} + {"1 + " * i}0\n' for i in range(80)]
    (library / "documented.py").write_text("\n".join(functions))
    (library / "undocumented.py").write_text("def bare():\n    return 1\n")
    (library / "broken.py").write_text("def broken(:\n")
    (library / "test" / "test_it.py").write_text('def test_it():\n    """A test."""\n')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    return library


@pytest.fixture
def imported_once(monkeypatch):
    """Fork the processes from one that has the imports, which take longer than the work."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo", "transformers.models.llama.modeling_llama", "tritonpack.patches"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: server)
