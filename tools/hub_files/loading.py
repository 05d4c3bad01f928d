"""load: imports a variant of this repository by its path, as the `kernels` library does."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(repository: Path, backend: str = "cpu") -> ModuleType:
    """Import the variant of a backend ("cpu", "cuda" or "rocm") under the `id` of its metadata.json."""
    variant = Path(repository) / "build" / f"torch-{backend}"
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
