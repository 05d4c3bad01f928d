"""The steps of the first day, in safe order: correct first, then fast, then the figures beside what was predicted."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.first_day.runner import Step

PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
GPU, HOPPER = "tests/gpu/test_gpu.py", "tests/gpu/test_hopper.py"

SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
MEMORY = (*SANITIZER, "memcheck")
RACES = (*SANITIZER, "racecheck", "--kernel-name", "kns=hopper_")  # not those of the reference, which take long
# compute-sanitizer sees every allocation only if torch doesn't serve them from its own pool.
UNPOOLED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)

# Fails if the device doesn't answer.
PROBE = ("python3", "-c", "import torch; assert (torch.ones(9, device='cuda') + 1).sum().item() == 18")


def steps(commit: str) -> list[Step]:
    """The steps; `commit` names the code in the rows that they write."""
    seen = ("machine", "launch")
    known = ("--commit", commit)
    first, *others = [
        Step(
            "machine",
            "the device and the versions",
            ("python3", "-m", "benchmarks.gpu.machine"),
            limit=90,
            expected=30,
        ),
        Step(
            "compile",
            "all kernels compile, on all cores, before any runs",
            ("python3", "-m", "benchmarks.gpu.compile_ahead", "--minutes", "{minutes}"),
            limit=480,
            after=("machine",),
            continues=True,
            serves=("launch", "memory", "small", "large", "repeats", "graphs", "rest", "gluon-memory",
                    "gluon-races", "gluon-tests"),
        ),
        Step(
            "launch",
            "one small case, forward and backward",
            (*PYTEST, f"{GPU}::test_small_cases[causal-bf16]"),
            limit=120,
            after=("machine",),
        ),
        Step(
            "memory",
            "no access outside of memory, in small cases",
            (*MEMORY, *PYTEST, GPU, "-k", "test_small_cases and bf16 and (slack or tree-forest or sinks)"),
            limit=300,
            expected=120,
            after=("launch",),
            environment=UNPOOLED,
        ),
        Step(
            "small",
            "small cases in three dtypes",
            (*PYTEST, GPU, "-k", "test_small_cases"),
            limit=360,
            expected=120,
            after=("launch",),
        ),
        Step(
            "large",
            "cases of models' sizes in both 16-bit dtypes",
            (*PYTEST, GPU, "-k", "test_large_cases"),
            limit=240,
            after=("launch",),
        ),
        Step(
            "repeats",
            "200 equal results of the same call",
            (*PYTEST, GPU, "-k", "test_repeats"),
            limit=300,
            after=("launch",),
        ),
        Step(
            "graphs",
            "one CUDA graph serves other documents, too",
            (*PYTEST, GPU, "tests/gpu/test_flash_attn.py", "-k", "graph"),
            limit=180,
            after=("launch",),
        ),
        Step(
            "rest",
            "memory, waiting, offsets beyond 2**31, pack_invariant, FlashAttention's functions",
            (*PYTEST, GPU, "tests/gpu/test_flash_attn.py", "tests/gpu/test_benchmark.py", "-k",
             "not test_small_cases and not test_large_cases and not test_repeats and not graph"),
            limit=360,
            expected=120,
            after=("launch",),
        ),
        Step(
            "gluon",
            "one small case of the kernels for Hopper",
            (*PYTEST, f"{HOPPER}::test_small_cases[causal-128-bf16]"),
            limit=90,
            after=("launch",),
        ),
        Step(
            "gluon-memory",
            "no access outside of memory, with the kernels for Hopper",
            (*MEMORY, *PYTEST, HOPPER, "-k", "test_small_cases and bf16 and (slack or multi-query)"),
            limit=240,
            expected=90,
            after=("gluon",),
            environment=UNPOOLED,
        ),
        Step(
            "gluon-races",
            "no race in shared memory, in the kernels for Hopper",
            (*RACES, *PYTEST, HOPPER, "-k", "test_small_cases and bf16 and (slack or multi-query)"),
            limit=240,
            expected=90,
            after=("gluon",),
        ),
        Step(
            "gluon-tests",
            "results, gradients and 200 equal repeats of the kernels for Hopper",
            (*PYTEST, HOPPER),
            limit=300,
            expected=90,
            after=("gluon",),
        ),
        Step(
            "models",
            "documents of patched models stay apart",
            (*PYTEST, "tests/gpu/test_models.py"),
            limit=300,
            expected=90,
            after=("launch",),
        ),
        Step(
            "ceilings",
            "the rates of a copy and of a matrix product on this GPU",
            ("python3", "-m", "benchmarks.gpu.machine", "ceilings"),
            limit=90,
            expected=30,
            after=("machine",),
        ),
        Step(
            "others",
            "which other implementations are there",
            ("python3", "-m", "benchmarks.gpu.machine", "others"),
            limit=90,
            expected=30,
            after=("machine",),
            peers=True,
        ),
        Step(
            "compare",
            "ours beside the others on the first shapes, each after a check of its results",
            ("python3", "-m", "benchmarks.gpu", "--out", "{out}", "--minutes", "{minutes}", "--first", "9", "--without",
             "xformers", "sdpa, dense mask", *known),
            limit=720,
            after=seen,
            continues=True,
            peers=True,
        ),
        Step(
            "masks",
            "how long masks take to build and to write out",
            ("python3", "-m", "benchmarks.gpu.masks", "--out", "{out}", *known),
            limit=180,
            after=seen,
        ),
        Step(
            "tune",
            "the fastest tiles, each tried in a process of its own",
            ("python3", "-m", "benchmarks.tune", "--out", "{out}/tiles.json", "--minutes", "{minutes}", "--most", "32",
             *known),
            limit=600,
            after=seen,
            continues=True,
        ),
        Step(
            "training",
            "steps of a model on padded and packed batches",
            ("python3", "-m", "benchmarks.training", "--model", "llama-2-7b", "--layers", "2", "--steps", "12",
             "--lengths", "flan", "orcamath", "--out", "{out}", *known),
            limit=420,
            expected=180,
            after=seen,
        ),
        Step(
            "predict",
            "what a model of the machine code predicts for these kernels",
            ("python3", "-m", "benchmarks.instruction_model", "--kernels", "forward", "dq", "dkdv", "--gluon",
             "--head-dims", "64", "128", "--jobs", "8", "--csv", "{out}/predicted.csv"),
            limit=180,
            after=("machine",),
        ),
    ]  # fmt: skip
    return [replace(first, serves=tuple(step.name for step in others if not step.serves)), *others]


def dry_steps(commit: str) -> list[Step]:
    """The steps with commands that need no GPU: tests are collected, programs run on the CPU or print their help."""
    on_cpu = {
        "machine": ("--device", "cpu"),
        "others": ("--device", "cpu"),
        "compile": ("--without-gpu", "sm_90"),
        "compare": ("--device", "cpu"),
        "masks": ("--device", "cpu", "--tokens", "2048", "--dense-tokens", "512"),
        "training": ("--model", "tiny", "--steps", "3", "--documents", "2", "--lengths", "flan"),
        "predict": ("--jobs", "2"),
    }
    found = []
    for step in steps(commit):
        command = step.command[step.command.index("python3") :]  # without compute-sanitizer
        tests = command[: len(PYTEST)] == PYTEST
        command += ("--collect-only",) if tests else on_cpu.get(step.name, ("--help",))
        found.append(replace(step, command=command, limit=3600, expected=5))
    return found
