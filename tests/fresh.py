"""Fresh interpreters, for tests of imports.

A new process spends most of its time on importing torch, which these tests don't test. So one process imports torch and
its parts that transformers needs, and forks for every program.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]

_FORKS = """
import json, os, signal, sys, traceback
import torch, torch._dynamo, torch.distributed.tensor

assert not {"tritonpack", "transformers"} & set(sys.modules)
for line in sys.stdin:
    program = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(600)
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in enumerate(("stdout", "stderr"), 1):
                os.dup2(os.open(program[name], os.O_WRONLY | os.O_CREAT), number)
            sys.path[:0] = program["path"]
            exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # an ordinary exit with torch takes seconds
"""


class FreshInterpreters:
    """Runs programs, each in a process that has imported torch, but neither transformers nor tritonpack."""

    def __enter__(self) -> "FreshInterpreters":
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={"PATH": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, code: str, *path: Path) -> subprocess.CompletedProcess[str]:
        """Run a program.

        Args:
            code: its source.
            path: folders to import from, before the repository.
        """
        with TemporaryDirectory() as folder:
            files = {name: Path(folder) / name for name in ("stdout", "stderr")}
            program = {"code": code, "path": [*map(str, path), str(ROOT)], **{k: str(v) for k, v in files.items()}}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(program) + "\n")
            self._process.stdin.flush()
            returncode = int(self._process.stdout.readline())
            output = {name: file.read_text() for name, file in files.items()}
        return subprocess.CompletedProcess(code, returncode, **output)
