"""What was removed is refused with what to use in its place."""

import re

import pytest

import tritonpack
from tests.patches.models import tiny_model
from tritonpack.removed import REMOVED


@pytest.mark.parametrize("name", ["tiled_loss", "tiled_mlp"])
def test_removed_options_of_patch(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} of patch\(\) was removed: use "):
        tritonpack.patch(tiny_model("llama"), **{name: False})


def test_an_unknown_option_of_patch() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tiled_los'"):
        tritonpack.patch(tiny_model("llama"), tiled_los=True)


@pytest.mark.parametrize("name", ["RankFailedError", "pack_to_disk", "PackedFolder"])
def test_removed_names(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(REMOVED[name])):
        getattr(tritonpack, name)
