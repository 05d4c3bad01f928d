"""What was removed is refused with what to use in its place."""

import re
from collections.abc import Callable

import pytest

import tritonpack
from tests.patches.models import tiny_model
from tritonpack.cli import main
from tritonpack.parallel.layouts import check_layout_name
from tritonpack.removed import COMMANDS, NAMES, OPTIONS


@pytest.mark.parametrize("name", ["tiled_loss", "tiled_mlp"])
def test_removed_options_of_patch(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} of patch\(\) was removed: use "):
        tritonpack.patch(tiny_model("llama"), **{name: False})


def test_an_unknown_option_of_patch() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tiled_los'"):
        tritonpack.patch(tiny_model("llama"), tiled_los=True)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: tritonpack.SequenceParallel(None, heads_k_stride=1), "about four steps of heads"),
        (lambda: tritonpack.AllGatherWithGrad(backward="slice"), "divide the loss by the number of ranks"),
        (lambda: check_layout_name("balanced"), "layout='documents' is as even"),
    ],
)
def test_removed_options_of_ranks(call: Callable[[], object], remedy: str) -> None:
    with pytest.raises(ValueError, match=f"was removed: .*{remedy}"):
        call()


@pytest.mark.parametrize("removed", COMMANDS)
def test_removed_commands_and_their_options(removed: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *option = removed.split()
    with pytest.raises(SystemExit):
        main([command, "a.txt", "--capacity", "9", *(f"{one}=2" for one in option)])
    assert f"tritonpack {removed} was removed: {COMMANDS[removed]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_removed_names(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(NAMES[name])):
        exec(f"from tritonpack import {name}")


def test_options_are_no_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'backward'"):
        tritonpack.backward  # noqa: B018


@pytest.mark.parametrize("name", ["lookahead", "steps_together", "budgets", "resources", "cost_model"])
def test_removed_options_of_packing(name: str) -> None:
    documents = [{"input_ids": [1] * 8}] * 8
    for call in (
        lambda **given: tritonpack.dataloader(documents, 8, **given),
        lambda **given: tritonpack.MultipackDistributedBatchSampler(8, [8] * 8, **given),
        lambda **given: tritonpack.packing.plan_epoch([8] * 8, 8, 1, **given),
    ):
        with pytest.raises(ValueError, match=rf"{name} of \w+\(\) was removed: {re.escape(OPTIONS[name])}"):
            call(**{name: 1})


def test_removed_values_of_packing() -> None:
    for call, name in (
        (lambda: tritonpack.pack([1], 1, algorithm="first_fit"), "first_fit"),
        (lambda: tritonpack.packing.plan_epoch([1], 1, 1, objective="cost"), "cost_model"),
    ):
        with pytest.raises(ValueError, match=re.escape(OPTIONS[name])):
            call()
