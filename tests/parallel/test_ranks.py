"""The cases of tests/parallel/*_cases.py, on groups of 2 and 4 processes."""

import re
from pathlib import Path

import pytest

from tests.parallel.attention_cases import EXCHANGES
from tests.parallel.pool import Pool, cases_of

CASES = [
    f"{name}_cases"
    for name in (
        *("all_gather_with_grad", "attention", "agreement", "lifecycle", "refusal", "composition", "trainer"),
        "failing",
    )
]


def each_case(size, *modules):
    found = [(module, name) for module in modules for name in cases_of(module, size) if name[:5] != "only:"]
    ids = [f"{module.removesuffix('_cases')}: {name}" for module, name in found]
    return pytest.mark.parametrize(("module", "name"), found, ids=ids)


@each_case(2, *CASES)
@pytest.mark.fast(
    "all_gather_with_grad: gathers dim 0, uneven True",
    "all_gather_with_grad: sum, strided_loss",
    "attention: all_gather, windows",
    "attention: group_cast, windows",
    "attention: ring, documents",
    "attention: ring, trees, windows",
    "attention: ulysses, contiguous",
    "attention: auto, documents, softcap",
    "agreement: all_gather, padded",
    "agreement: group_cast, gpt_oss",
    "agreement: ulysses, contiguous",
    "agreement: loss by total",
    "agreement: documents stay apart, group_cast",
    "lifecycle: a model in two contexts",
    "refusal: the model and autocast",
    "composition: DDP, two batches per step",
    "composition: DDP, first call",
    "composition: FSDP2, first call",
    "composition: FSDP, two batches per step",
    "trainer: own loader",
    "failing: error in forward",
    "refusal: other lengths",
    "composition: DDP, both, patch first",
    "agreement: recurrent, mamba2, ring stripe",
    "agreement: recurrent, a long document",
    "agreement: experts, mixtral, three_tokens",
)
def test_two_ranks_agree_with_one_process(run_on, module, name):
    if name.startswith("TRL"):
        pytest.importorskip("trl")
    run_on(2, module, name)


@pytest.mark.slow
@each_case(2, "library_cases", "compiled_cases")
def test_two_ranks_agree_with_other_libraries(run_on, module, name):
    run_on(2, module, name)


@pytest.mark.slow
@each_case(4, *CASES, "compiled_cases")
def test_four_ranks_agree_with_one_process(run_on, module, name):
    if name.startswith("TRL"):
        pytest.importorskip("trl")
    run_on(4, module, name)


@pytest.mark.slow
def test_readme_counts_the_types_that_ranks_can_share(run_on):
    printed = run_on(2, "every_type", "every type")
    exact, refused = map(int, re.search(r"\{'exact': (\d+), 'refused:': (\d+)\}", printed).groups())
    said = f"Of the {exact + refused} types packed exactly {exact} can be shared, {refused} are refused."
    readme = Path(__file__).parents[2] / "README.md"
    assert said in " ".join(readme.read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_a_rank_raises_if_the_process_of_another_one_ends():
    with pytest.raises(AssertionError, match=r"(?is)rank 0 of 2.*RuntimeError:.*connection (closed|reset).*died"):
        Pool(2).run("failing_cases", "only: a process ends")


@pytest.mark.interpreter
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.fast("ring")
def test_ranks_agree_with_the_kernels(run_on, exchange):
    """Which get strided heads and small blocks of keys from the exchanges."""
    run_on(2, "attention_cases", f"only: triton, {exchange}")
