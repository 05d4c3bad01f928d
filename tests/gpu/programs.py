"""Programs in processes of their own, for tests of what ends all work on the GPU, such as a device-side assertion."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def goes_on(program: str) -> bool:
    """Run a program; whether the device still answers at its end. The reason why it doesn't is printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport torch\ntorch.cuda.synchronize()\nprint('went on')"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    print(done.stderr)
    return "went on" in done.stdout
