"""The steps of the first day, the most valuable first, which fit half an hour by their own estimates."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.first_day.runner import Step

PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
HERE = "--one-process"  # so that compute-sanitizer sees the tests
GPU, HOPPER = "tests/gpu/test_gpu.py", "tests/gpu/test_hopper.py"

SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
MEMORY = (*SANITIZER, "memcheck")
RACES = (*SANITIZER, "racecheck", "--kernel-name", "kns=hopper_")  # not those of the reference, which take long
# compute-sanitizer sees every allocation only if torch doesn't serve them from its own pool.
UNPOOLED = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)

# Fails if the device doesn't answer.
PROBE = ("python3", "-c", "import torch; assert (torch.ones(9, device='cuda') + 1).sum().item() == 18")


# Of the kernels that the steps before "compile-rest" launch.
FIRST_KERNELS = (
    "causal-bf16", "large-*-bf16", "gluon-*-bf16", "shape-", "offsets", "ids", "transpose", "parents", "ends", "tables",
    "dense", "bits",
)  # fmt: skip
AHEAD = ("python3", "-m", "benchmarks.gpu.compile_ahead", "--minutes", "{minutes}")
# The others beside which the kernels are timed: without those that are slow and no target.
COMPARE = ("python3", "-m", "benchmarks.gpu", "--out", "{out}", "--minutes", "{minutes}")
WITHOUT = ("--without", "xformers", "sdpa, dense mask")


def steps(commit: str) -> list[Step]:
    """The steps, the most valuable first; `commit` names the code in the rows that they write."""
    seen, known = ("machine", "launch"), ("--commit", commit)
    first, *others = [*first_steps(seen, known), *correctness(), *measurements(seen, known)]
    return [replace(first, serves=tuple(step.name for step in others if not step.serves)), *others]


def first_steps(seen: tuple[str, ...], known: tuple[str, ...]) -> list[Step]:
    """The steps of the first quarter of an hour: that kernels run, the figures of the targets, faster tiles."""
    return [
        Step(
            "machine",
            "the device and the versions",
            ("python3", "-m", "benchmarks.gpu.machine"),
            limit=90,
            expected=20,
        ),
        Step(
            "compile",
            "the kernels of the next steps compile, on all cores, before any runs",
            (*AHEAD, "--only", *FIRST_KERNELS),
            limit=240,
            after=("machine",),
            continues=True,
            serves=("launch", "quick", "gluon", "targets"),
        ),
        Step(
            "launch",
            "one small case, forward and backward",
            (*PYTEST, f"{GPU}::test_small_cases[causal-bf16]"),
            limit=90,
            expected=30,
            after=("machine",),
        ),
        Step(
            "quick",
            "cases of models' sizes in bfloat16; documents stay apart",
            (*PYTEST, GPU, "-k", "test_large_cases and bf16 or a_change_in_a_document or a_patched_model"),
            limit=120,
            expected=60,
            after=("launch",),
        ),
        Step(
            "gluon",
            "one small and some large cases of the kernels for Hopper",
            (*PYTEST, "-x", HOPPER, "-k", "bf16 and (test_large_cases or (test_small_cases and causal and 128))"),
            limit=90,
            expected=45,
            after=("launch",),
        ),
        Step(
            "ceilings",
            "the rates of a copy and of a matrix product on this GPU",
            ("python3", "-m", "benchmarks.gpu.machine", "ceilings"),
            limit=60,
            expected=20,
            after=("machine",),
        ),
        Step(
            "targets",
            "ours beside the others on the shapes of the targets, each after a check of its results",
            (*COMPARE, "--first", "3", *known, *WITHOUT),
            limit=330,
            expected=240,
            after=seen,
            continues=True,
        ),
        Step(
            "tune",
            "the fastest tiles at head dimension 128, each tried in a process of its own",
            ("python3", "-m", "benchmarks.tune", "--out", "{out}/tiles.json", "--minutes", "{minutes}", "--head-dims",
             "128", "--most", "10", *known),
            limit=240,
            expected=120,
            after=seen,
            continues=True,
        ),
    ]  # fmt: skip


def correctness() -> list[Step]:
    """All tests that need a GPU."""
    return [
        Step(
            "compile-rest",
            "all other kernels compile",
            AHEAD,
            limit=300,
            expected=150,
            after=("machine",),
            continues=True,
            serves=("small", "rest", "repeats", "gluon-tests", "large", "graphs", "memory", "gluon-races",
                    "gluon-memory"),
        ),
        Step(
            "small",
            "small cases in three dtypes",
            (*PYTEST, GPU, "-k", "test_small_cases"),
            limit=240,
            expected=90,
            after=("launch",),
        ),
        Step(
            "rest",
            "memory, waiting, offsets beyond 2**31, pack_invariant, FlashAttention's functions",
            (*PYTEST, GPU, "tests/gpu/test_flash_attn.py", "tests/gpu/test_benchmark.py", "-k",
             "not test_small_cases and not test_large_cases and not test_repeats and not graph"),
            limit=240,
            expected=90,
            after=("launch",),
        ),
        Step(
            "models",
            "documents of patched models stay apart",
            (*PYTEST, "tests/gpu/test_models.py"),
            limit=240,
            expected=90,
            after=("launch",),
        ),
        Step(
            "repeats",
            "200 equal results of the same call",
            (*PYTEST, GPU, "-k", "test_repeats"),
            limit=150,
            after=("launch",),
        ),
        Step(
            "gluon-tests",
            "results, gradients and 200 equal repeats of the kernels for Hopper",
            (*PYTEST, HOPPER),
            limit=240,
            expected=75,
            after=("gluon",),
        ),
        Step(
            "large",
            "cases of models' sizes in float16",
            (*PYTEST, GPU, "-k", "test_large_cases and fp16"),
            limit=120,
            expected=45,
            after=("launch",),
        ),
        Step(
            "graphs",
            "one CUDA graph serves other documents, too",
            (*PYTEST, GPU, "tests/gpu/test_flash_attn.py", "-k", "graph"),
            limit=120,
            expected=30,
            after=("launch",),
        ),
        Step(
            "memory",
            "no access outside of memory, in small cases",
            (*MEMORY, *PYTEST, HERE, GPU, "-k", "test_small_cases and bf16 and (slack or tree-forest)"),
            limit=240,
            expected=75,
            after=("launch",),
            environment=UNPOOLED,
        ),
        Step(
            "gluon-races",
            "no race in shared memory, in the kernels for Hopper",
            (*RACES, *PYTEST, HERE, HOPPER, "-k", "test_small_cases and bf16 and 128 and (slack or multi-query)"),
            limit=180,
            expected=45,
            after=("gluon",),
        ),
        Step(
            "gluon-memory",
            "no access outside of memory, with the kernels for Hopper",
            (*MEMORY, *PYTEST, HERE, HOPPER, "-k", "test_small_cases and bf16 and 128 and (slack or multi-query)"),
            limit=180,
            expected=45,
            after=("gluon",),
            environment=UNPOOLED,
        ),
    ]  # fmt: skip


def measurements(seen: tuple[str, ...], known: tuple[str, ...]) -> list[Step]:
    """Figures of more shapes, of training and of masks."""
    return [
        Step(
            "compare",
            "ours beside the others on the first shapes, each after a check of its results",
            (*COMPARE, "--first", "6", *known, *WITHOUT),
            limit=300,
            expected=150,
            after=seen,
            continues=True,
        ),
        Step(
            "training",
            "steps of a model on padded and packed batches",
            ("python3", "-m", "benchmarks.training", "--model", "llama-2-7b", "--layers", "2", "--steps", "12",
             "--lengths", "flan", "--out", "{out}", *known),
            limit=300,
            expected=75,
            after=seen,
        ),
        Step(
            "masks",
            "how long masks take to build and to write out",
            ("python3", "-m", "benchmarks.gpu.masks", "--out", "{out}", *known),
            limit=120,
            expected=45,
            after=seen,
        ),
    ]  # fmt: skip


def dry_steps(commit: str) -> list[Step]:
    """The steps with commands that need no GPU: tests are collected, programs run on the CPU or print their help."""
    on_cpu = {
        "machine": ("--device", "cpu"),
        "compile": ("--without-gpu", "sm_90"),
        "compile-rest": ("--without-gpu", "sm_90"),
        "targets": ("--device", "cpu"),
        "compare": ("--device", "cpu"),
        "masks": ("--device", "cpu", "--tokens", "2048", "--dense-tokens", "512"),
        "training": ("--model", "tiny", "--steps", "3", "--documents", "2", "--lengths", "flan"),
    }
    found = []
    for step in steps(commit):
        command = step.command[step.command.index("python3") :]  # without compute-sanitizer
        tests = command[: len(PYTEST)] == PYTEST
        more = ("--collect-only",) if tests else on_cpu.get(step.name, ("--help",))
        # --without comes last
        command = (*command[:3], *more, *command[3:]) if "--without" in command else (*command, *more)
        found.append(replace(step, command=command, limit=3600, expected=5))
    return found
