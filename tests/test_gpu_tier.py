"""The tests that need a GPU, tried without one: their bodies run on the CPU, with the kernels in Triton's interpreter.

So a test that calls a function wrongly, or that would end all work on the GPU, is found before a GPU is at hand.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.gpu import graphs, test_gpu, test_models
from tests.gpu.cases import why_too_large
from tests.patches import zoo
from tritonpack.masks.bounds import Bounds
from tritonpack.testing import CASES, Case

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
BY_NAME = {case.name: case for case in CASES}
SMALL = Case("ordinary", (40, 13, 0, 90, 3, 1, 30), slack=7)


class OnCpu(TorchFunctionMode):
    """Lets calls that name "cuda" make tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(x) for name, x in (kwargs or {}).items()})


def _on_cpu(x: Any) -> Any:
    named = isinstance(x, (str, torch.device)) and str(x) == "cuda"
    return torch.device("cpu") if named else x


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with OnCpu():
        yield


class DeviceLostError(RuntimeError):
    """A device-side assertion failed, which on a GPU ends all work of the process."""


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("body", [test_gpu.test_validate_finds_bad_bounds_on_the_device], ids=lambda b: b.__name__)
def test_no_assertion_fails_in_the_process_of_the_tests(
    body: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Bounds.__post_init__

    def post_init(self: Bounds, trusted: bool) -> None:
        try:
            original(self, trusted)
        except ValueError as error:  # which only a CPU raises
            raise DeviceLostError from error

    monkeypatch.setattr(Bounds, "__post_init__", post_init)
    body()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("stop", "sound"), [([1, 2, 3], True), ([1, 2, 9], False)], ids=["sound", "unsound"])
def test_programs_of_assertions_make_masks(stop: list[int], sound: bool) -> None:
    """The same program with the same error on the CPU, where the constructor raises it."""
    program = test_gpu.BOUNDS.format(stop=stop)
    if sound:
        exec(program, {})
        return
    with pytest.raises(ValueError, match="row 2"):
        exec(program, {})


def test_warm_up_of_a_graph_waits_for_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it may read offsets that aren't written yet, and fail an assertion on the device."""
    seen: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            seen.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    fakes = {
        "Stream": Stream,
        "current_stream": lambda: Stream("main"),
        "stream": lambda stream: stream,
        "graph": lambda graph: Stream("capture"),
        "CUDAGraph": SimpleNamespace,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs.capture(lambda: seen.append("step") or ())
    assert seen == ["side waits for main", *["step"] * 3, "main waits for side", "step"]


class TestShared:
    wide, narrow = BY_NAME["head-dim-512"], BY_NAME["head-dim-256"]

    @pytest.mark.parametrize("kib", [99, 163, 227])
    def test_float32_at_512_needs_a_large_gpu(self, kib: int) -> None:
        assert bool(why_too_large(self.wide, torch.float32, kib * 1024)) is (kib == 99)
        assert bool(why_too_large(BY_NAME["head-dim-64-512"], torch.float32, kib * 1024)) is (kib == 99)
        assert not why_too_large(self.wide, torch.bfloat16, kib * 1024)
        assert not why_too_large(self.narrow, torch.float32, kib * 1024)

    def test_reason_is_that_of_the_skipped_test(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(test_gpu, "shared_bytes", lambda: 99 * 1024)
        with pytest.raises(pytest.skip.Exception, match="this GPU has 99"):
            test_gpu.test_small_cases(self.wide, torch.float32)


@pytest.mark.usefixtures("on_cpu")
def test_body_of_waiting() -> None:
    test_gpu.test_nothing_waits_for_the_host()


@pytest.mark.parametrize("name", test_models.KINDS)
def test_documents_are_within_the_positions_of_models(name: str) -> None:
    assert max(test_models.LENGTHS) <= zoo.tiny_config(name).max_position_embeddings


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", test_models.KINDS)
def test_bodies_of_models(name: str, dtype: torch.dtype) -> None:
    test_models.test_documents_stay_apart(name, dtype)


INTERPRETED: dict[str, Callable[[], None]] = {
    "small": lambda: test_gpu.test_small_cases(BY_NAME["tree-forest"], torch.bfloat16),
    "large": lambda: test_gpu.test_large_cases(SMALL, torch.float16),
}


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", INTERPRETED)
def test_bodies_of_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu, "shared_bytes", lambda: 227 * 1024)
    INTERPRETED[name]()


@pytest.mark.slow
def test_torch_triton_transformers_and_pytest_suffice(tmp_path: Path) -> None:
    """All tests of the tier are found without any other package, and without importing files that have none."""
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    collect = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-p", "no:cacheprovider", "-m"]
    everything = os.environ | {"PYTHONPATH": str(ROOT)}
    bare = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # The second expression selects the same tests, from all files.
    runs = [
        subprocess.Popen([*collect, which], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for which, env in (("gpu", bare), ("not not gpu", everything))
    ]
    found, whole = ([line for line in run.communicate()[0].splitlines() if "::" in line] for run in runs)
    assert [run.returncode for run in runs] == [0, 0], found
    assert found == whole
    assert len(found) > 400
    first = [re.sub(r".*::test_(\w+)\[(\w+)-.*", r"\1 \2", line) for line in found[:15]]
    assert {*first[:3]} == {"small_cases causal"}
    assert {*first[3:]} == {"large_cases long", "large_cases ordinary", "large_cases tiny"}
