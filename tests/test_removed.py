"""What was removed is refused with what to use in its place."""

import re
from collections.abc import Callable
from functools import partial

import pytest

import tritonpack
from tests.patches.models import tiny_model
from tritonpack.cli import main
from tritonpack.integrations.trainer_setup import TrainerSetup
from tritonpack.packing.planning.statistics import plan_statistics
from tritonpack.parallel import Layout, attend, make_layout
from tritonpack.parallel.layouts import check_layout_name
from tritonpack.removed import ATTRIBUTES, COMMANDS, NAMES, OPTIONS

DOCUMENTS = [{"input_ids": [1] * 8}] * 8
# A call, and words of the refusal
REFUSED: list[tuple[Callable[[], object], str]] = [
    *((partial(tritonpack.patch, tiny_model("llama"), **{name: False}), rf"{name} of patch\(\) was removed: use ")
      for name in ("tiled_loss", "tiled_mlp")),
    (lambda: tritonpack.SequenceParallel(None, heads_k_stride=1), "was removed: .*about four steps of heads"),
    (lambda: tritonpack.SequenceParallel(None, grad_reduce="sum"), "was removed: .*divide the loss by the number of"),
    (lambda: tritonpack.AllGatherWithGrad(backward="slice"), "was removed: .*divide the loss by the number of ranks"),
    (lambda: check_layout_name("balanced"), "was removed: .*layout='documents' is as even"),
    *((partial(call, **{name: 1}), rf"{name} of \w+\(\) was removed: {re.escape(OPTIONS[name])}")
      for name in ("lookahead", "steps_together", "order", "budgets", "resources", "cost_model")
      for call in (partial(tritonpack.dataloader, DOCUMENTS, 8), partial(tritonpack.packing.plan_epoch, [8] * 8, 8, 1),
                   partial(tritonpack.MultipackDistributedBatchSampler, 8, [8] * 8))),
    *((partial(call, **{name: 1}), rf"{name} of \w+(\(\))? was removed: {re.escape(instead)}")
      for call, name, instead in (
          (partial(make_layout, "zigzag", None, 2), "chunk", OPTIONS["chunk of make_layout()"]),
          (partial(attend, *[None] * 5), "return_lse", OPTIONS["return_lse of attend()"]),
          (partial(attend, *[None] * 5), "heads_k_stride", OPTIONS["heads_k_stride"]),
          (partial(plan_statistics, None, []), "cost", OPTIONS["cost of plan_statistics()"]),
          (partial(plan_statistics, None, []), "total_tokens", OPTIONS["total_tokens of plan_statistics()"]),
          (partial(tritonpack.packing.plan_epoch, [8] * 8, 8, 1), "verify_ranks", OPTIONS["verify_ranks"]),
          (partial(tritonpack.VisionPackingCollator, None), "measure", OPTIONS["measure"]))),
    *((call, re.escape(OPTIONS["objective='documents'"]))
      for call in (partial(tritonpack.dataloader, DOCUMENTS, 8, labels="documents"),
                   partial(tritonpack.PackingCollator, objective="documents"))),
    (lambda: tritonpack.pack([1], 1, algorithm="first_fit"), re.escape(OPTIONS["first_fit"])),
    (lambda: tritonpack.pack([1], 1, algorithm="windowed"), re.escape(OPTIONS["windowed"])),
    *((partial(tritonpack.MultipackBatchSampler, [0], 1, 8, [8], **{name: 1}),
       re.escape(OPTIONS[f"{name} of MultipackBatchSampler()"]))
      for name in ("seed", "overlong")),
    (lambda: tritonpack.packing.plan_epoch([1], 1, 1, objective="cost"), re.escape(OPTIONS["cost_model"])),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_removed_options(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unknown_option_of_patch() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tiled_los'"):
        tritonpack.patch(tiny_model("llama"), tiled_los=True)


@pytest.mark.parametrize("removed", COMMANDS)
def test_removed_commands_and_their_options(removed: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *option = removed.split()
    with pytest.raises(SystemExit):
        main([command, "a.txt", "--capacity", "9", "=".join([*option, "2"])])
    assert f"tritonpack {removed} was removed: {COMMANDS[removed]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_removed_names(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(NAMES[name])):
        exec(f"from tritonpack import {name}")
    with pytest.raises(ImportError, match=re.escape(f"tritonpack.packing.{name} was removed: {NAMES[name]}")):
        exec(f"from tritonpack.packing import {name}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_removed_attributes(name: str) -> None:
    kind, _, own = name.partition(".")
    owner = {"Layout": Layout, "TrainerSetup": TrainerSetup}.get(kind) or getattr(tritonpack, kind)
    for holder in (owner, owner.__new__(owner)):
        with pytest.raises(AttributeError, match=re.escape(f"{name} was removed: {ATTRIBUTES[name]}")):
            getattr(holder, own)
        assert not hasattr(holder, own)


def test_options_are_no_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'backward'"):
        tritonpack.backward  # noqa: B018
    with pytest.raises(AttributeError, match=r"'tritonpack\.packing' has no attribute 'backward'"):
        tritonpack.packing.backward  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'capacity'"):
        tritonpack.MultipackBatchSampler([0], 1, 8, [8], capacity=8)
