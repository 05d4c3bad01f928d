"""VisionPackingCollator, also under dataloader, without transformers: what it makes, and what it refuses."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tritonpack import PackingCollator, TreeCollator, VisionPackingCollator, dataloader, pack_dataset

IMAGE, VIDEO = 60, 61


class Model(nn.Module):
    """A model with no more than a configuration, and a weight that must not be kept."""

    def __init__(self, model_type: str, **settings: Any) -> None:
        super().__init__()
        vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "spatial_merge_size": 2}
        vision |= settings.pop("vision", {})
        self.config = SimpleNamespace(
            model_type=model_type, image_token_id=IMAGE, video_token_id=VIDEO, vision_config=SimpleNamespace(**vision),
            **settings,
        )  # fmt: skip
        self.weight = nn.Parameter(torch.zeros(10_000))


class Rotated(Model):
    """A model whose positions count down on the first axis, and are the types on the others."""

    def get_rope_index(
        self, input_ids: Tensor, mm_token_type_ids: Tensor, image_grid_thw: Any = None, video_grid_thw: Any = None
    ) -> tuple[Tensor, None]:
        if (mm_token_type_ids == 2).any() and video_grid_thw is None:
            raise TypeError("'NoneType' object is not an iterator")
        return torch.stack([torch.arange(input_ids.shape[1]).flip(0)[None], *[mm_token_type_ids] * 2]), None


LLAVA = Model("llava", vision_feature_select_strategy="default")
QWEN = Rotated("qwen2_vl")
GEMMA3 = Model("gemma3", mm_tokens_per_image=4)
TIMED = Rotated("qwen2_5_vl")
MISTRAL3 = Model("mistral3", spatial_merge_size=1)
TEXT: dict[str, Any] = {"input_ids": [3, 4, 5]}


def llava(images: int = 1, **more: Any) -> dict[str, Any]:
    ids = [3, *[IMAGE] * 4 * images, 4]
    return {"input_ids": ids, "pixel_values": torch.ones(images, 3, 8, 8)} | more


def qwen(**more: Any) -> dict[str, Any]:
    ids = [3, *[IMAGE] * 2, 4]
    columns = {"pixel_values": torch.ones(8, 96), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    return {"input_ids": ids, "mm_token_type_ids": [0, 1, 1, 0], **columns} | more


def film(**more: Any) -> dict[str, Any]:
    columns = {"pixel_values_videos": torch.ones(8, 96), "video_grid_thw": torch.tensor([[1, 2, 4]])}
    return {"input_ids": [3, VIDEO, VIDEO], "mm_token_type_ids": [0, 2, 2], **columns} | more


def row(height: int) -> dict[str, Any]:
    return {"input_ids": [3, *[IMAGE] * (height // 2)], "pixel_values": torch.ones(1, 3, height, 8)}


def without(example: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values for name, values in example.items() if name not in names}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


def nested(examples: list[dict[str, Any]]) -> Any:
    """A table of what processors return: `input_ids` of shape (1, n), and None where an example lacks a column."""
    names = sorted({name for example in examples for name in example})
    rows = [{name: torch.as_tensor(values).tolist() for name, values in example.items()} for example in examples]
    rows = [dict.fromkeys(names) | row | {"input_ids": [row["input_ids"]]} for row in rows]
    return pytest.importorskip("datasets").Dataset.from_list(rows)


@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_tokens_are_those_of_packing_collator() -> None:
    """Labels leave out images; images are joined in the order of documents."""
    examples = [llava(), TEXT, llava(2)]
    examples[2]["pixel_values"] = torch.stack([torch.full((3, 8, 8), 2.0), torch.full((3, 8, 8), 3.0)])
    row = VisionPackingCollator(LLAVA)(examples)
    text = PackingCollator()([without(example, "pixel_values") for example in examples])
    assert row.pop("pixel_values")[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert row["labels"].tolist() == [[-100] * 5 + [4, -100, 4, 5] + [-100] * 9 + [4]]
    assert_same(row, text | {"labels": row["labels"]})
    masked = llava(input_ids=[3, *[IMAGE] * 4, 4, 5, 6], assistant_masks=[0] * 6 + [1, 1])
    for labels in ({}, {"labels": masked["input_ids"]}):
        assert VisionPackingCollator(LLAVA)([masked | labels])["labels"].tolist() == [[-100] * 6 + [5, 6]]


@pytest.mark.parametrize("text", ["mm_token_type_ids", "attention_mask", "labels", "token_type_ids"])
def test_examples_of_other_forms_make_the_same_batch(text: str) -> None:
    """None and empty columns, as tables have them; the axis of a batch of one; another default device; a pickle."""
    model, examples = Rotated("qwen2_5_vl"), [qwen(), TEXT, film()]
    model.rope_deltas = torch.zeros(10_000)
    model.get_rope_index = lambda *args: None  # type: ignore[method-assign]  # as a patch may put it there
    collate = VisionPackingCollator(model, pad_to_multiple_of=8)
    plain, data = collate(examples), pickle.dumps(collate)
    columns = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    forms = [[{text: None, "second_per_grid_ts": None, **dict.fromkeys(columns, absent)} | example
              for example in examples] for absent in (None, [], torch.ones(0, 96))]  # fmt: skip
    forms += [
        [{name: torch.as_tensor(values)[None] for name, values in example.items()} for example in examples],
        [{name: [*values] if name in columns else values for name, values in one.items()} for one in examples],
        [without(example, "mm_token_type_ids") for example in examples],
    ]
    for form in forms:
        assert_same(collate(form), plain)
    assert len(data) < 10_000, "workers get no weights"
    wrapped = nn.Sequential(nn.ModuleDict({"model": TIMED}))
    for same in (pickle.loads(data), VisionPackingCollator(wrapped, pad_to_multiple_of=8)):
        with torch.device("meta"):
            made = same(examples)
        assert_same(made, plain)


def test_columns_that_only_some_examples_need() -> None:
    for typed in (llava(token_type_ids=[0, 1, 1, 1, 1, 0]), llava()):
        made = VisionPackingCollator(GEMMA3)([TEXT, typed, TEXT | {"token_type_ids": None}])
        assert made["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    glm4v = VisionPackingCollator(Rotated("glm4v"))  # whose frames have the token of images
    assert_same(glm4v([without(qwen(), "mm_token_type_ids")]), glm4v([qwen()]))
    made = VisionPackingCollator(TIMED)([film(second_per_grid_ts=[1.0]), film(second_per_grid_ts=[0.5])])
    assert made["second_per_grid_ts"].tolist() == [1.0, 0.5]
    assert made["second_per_grid_ts"].dtype == torch.float32


def test_images_are_padded_at_their_end() -> None:
    """Of 8 x 4 and 4 x 8 pixels, in a token for each 4 x 4; the model cuts them out by their sizes."""
    sized = [
        {"input_ids": [3, IMAGE, IMAGE], "pixel_values": torch.ones(1, 3, *size), "image_sizes": torch.tensor([size])}
        for size in ([8, 4], [4, 8])
    ]
    pixels = VisionPackingCollator(MISTRAL3)(sized)["pixel_values"]
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels.sum(1).tolist() == [[[3, 3, 3, 3, 0, 0, 0, 0]] * 8, [[3] * 8] * 4 + [[0] * 8] * 4]


def test_positions_of_three_axes_restart_in_each_document() -> None:
    row = VisionPackingCollator(QWEN, pad_to_multiple_of=8)([qwen(), TEXT, film()])
    assert row["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5],
        [3, 2, 1, 0, 2, 1, 0, 2, 1, 0, 0, 1, 2, 3, 4, 5],
        [0, 1, 1, 0, 0, 0, 0, 0, 2, 2, 0, 1, 2, 3, 4, 5],
        [0, 1, 1, 0, 0, 0, 0, 0, 2, 2, 0, 1, 2, 3, 4, 5],
    ]
    assert row["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0]]
    assert row["cu_seq_lens_q"].tolist() == [0, 4, 7, 10, 16]


@pytest.mark.parametrize("make", [list, nested])
@pytest.mark.filterwarnings("ignore::tritonpack.PackingWarning")
def test_loader_counts_tokens_of_images(make: Any) -> None:
    """Also of batches of one row, as processors return them, which collators of text refuse."""
    pytest.importorskip("numba")
    collate, examples = VisionPackingCollator(LLAVA), [TEXT, llava(), TEXT, llava(2), llava()]
    loader = dataloader(make(examples), tokens=20, collate_fn=collate, seed=0)
    assert loader.documents.units.tokens.tolist() == [3, 6, 3, 10, 6]
    assert sum(batch["input_ids"].shape[1] for batch in loader) == 28
    assert sum(len(batch.get("pixel_values", ())) for batch in loader) == 4
    assert "5 documents, 28 tokens (lengths from input_ids)" in str(loader)
    assert "columns of the first document: input_ids" in str(loader)
    cut, row = make([TEXT, TEXT, llava(input_ids=[3, 60, 60, 60])]), r"document [01] needs a row of integers"
    for call, message in (
        (lambda: dataloader(make(examples), 19, collate_fn=collate, lengths=[3] * 4), "4 lengths for a dataset of 5"),
        (lambda: list(dataloader(cut, 19, collate_fn=collate)), "document 2 has 3 tokens of"),
        (lambda: list(dataloader(nested([TEXT, TEXT]), 19)), rf"{row} as input_ids; got .* \(1, 3\)"),
        (lambda: list(dataloader(nested([TEXT, TEXT]), 19, collate_fn=TreeCollator())), row),
        (lambda: pack_dataset(nested([TEXT, TEXT]), 28), row),
        (lambda: dataloader(examples, 19, collate_fn=Measuring()), "measure of a collate_fn was removed: dataloader"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class Measuring(TreeCollator):
    measure = len


class Failing(Rotated):
    def get_rope_index(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        return (torch.zeros(3, 1, 1),) if len(input_ids[0]) == 4 else [input_ids[None].expand(3, 1, -1)]


DINO = Model("llava", vision_feature_select_strategy="full", vision={"model_type": "dino"})
# The model, the examples or the settings of the collator, and what the error says.
REFUSED: list[tuple[Any, Any, str]] = [
    (LLAVA, [TEXT, without(llava(), "pixel_values")],
     r"document 1 has 4 tokens of images \(token 60\) in input_ids, and no pixels of images\. Pass all columns"),
    (LLAVA, [TEXT, llava(input_ids=[3, 60, 60, 60])],
     "document 1 has 3 tokens of images .* take 4. .* don't truncate input_ids"),
    (QWEN, [qwen(image_grid_thw=torch.tensor([[1, 2, 2]]))],
     r"document 0 has 8 rows of pixel_values, but its image_grid_thw \[\[1, 2, 2\]\] have 4 patches"),
    (QWEN, [qwen(image_grid_thw=torch.tensor([[1, 1, 8]]))], "document 0 has 2 tokens of images .* take 0"),
    (QWEN, [without(qwen(), "image_grid_thw")], "document 0 has 'pixel_values' but no 'image_grid_thw'"),
    (QWEN, [qwen(mm_token_type_ids=[0, 1, 0, 0])],
     "document 0 has mm_token_type_ids that aren't 1 for tokens of images, 2 for .* .'images': 60"),
    (LLAVA, [TEXT, llava(image_grid_thw=torch.ones(1, 3), text="hello")],
     "document 1 has 'image_grid_thw', 'text', which VisionPackingCollator can't pack for model type 'llava'"),
    (LLAVA, [{"input_ids": torch.ones(2, 5, dtype=torch.int64)}],
     "document 0 has 2 rows of input_ids; pass examples one by one"),
    (LLAVA, [llava(pixel_values=torch.ones(3, 8, 8))],
     r"document 0 has pixel_values of shape \(3, 8, 8\); it takes \(images, channels, height, width\)"),
    (TIMED, [film(second_per_grid_ts=["a"])], "needs an array .* as second_per_grid_ts"),
    (TIMED, [film(second_per_grid_ts=[1.0]), film()], "document 0 has 'second_per_grid_ts' and another hasn't"),
    (TIMED, [film(second_per_grid_ts=torch.ones(2))],
     r"document 0 has columns of different numbers of videos: .'video_grid_thw': 1, 'second_per_grid_ts': 2.; pass"),
    (QWEN, [qwen(), qwen(image_grid_thw=torch.tensor([[1.0, 2, 4]]))],
     "image_grid_thw is torch.float32 .* one dtype and one size of 3:time,height,width in a call"),
    (LLAVA, [llava(pixel_values=torch.ones(1, 3, 8, 12))],
     r"document 0 has images of \(8, 12\) pixels; this model takes 8 x 8"),
    (LLAVA, [TEXT, 5], "document 1 must be a mapping, as the processor returns it; got int"),
    (Rotated("glm4v"), [qwen(), film(input_ids=[3, IMAGE, IMAGE])],
     "document 0 has images and document 1 has videos; the model type 'glm4v' takes one of them in a call"),
    (Model("idefics3", scale_factor=1), [row(8), row(12)],
     r"pixel_values is .* \(1, 3, 12, 8\) in document 1 .* one size of channels and height and width"),
    (Model("idefics3", scale_factor=1), [row(8) | {"pixel_attention_mask": torch.ones(1, 8, 4)}],
     "columns of different numbers of width: .*: 8, .*: 4"),
    (MISTRAL3, [row(8) | {"image_sizes": [[16, 8]]}], "has image_sizes .* for pixel_values of 8 x 8 pixels"),
    (Rotated("qwen2_vl", audio_token_id=5), [TEXT], "document 0 has tokens of sound"),
    (Failing("qwen2_vl"), [TEXT, qwen()], r"document 1 .* Failing\.get_rope_index .*positions of shape \(3, 1, 1\)"),
    (DINO, {}, "doesn't know llava with the vision tower 'dino', .*; it knows pixtral, clip_.* one example a row"),
    (Model("flamingo"), {}, "doesn't know model type 'flamingo'; it knows gemma3, .* batches of one example a row"),
    (nn.Linear(2, 2), {}, "doesn't know a model without a configuration"),
    ("llava", {}, "model must be the image-text model that gets the batches, a module; got str"),
    (Model("qwen2_vl"), {}, "has no get_rope_index"),
    (LLAVA, {"pad_to_multiple_of": 8, "pad_token_id": 60}, "pad_token_id=60 is the token of images"),
    (LLAVA, {"per_token": ["w"]}, "per_token= of VisionPackingCollator was removed: .*remove_columns"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "given", "message"), REFUSED)
def test_refused(model: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionPackingCollator(model, **given) if isinstance(given, dict) else VisionPackingCollator(model)(given)
