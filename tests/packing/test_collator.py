import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tritonpack import BlockDiagonalMask, PackingCollator

IGNORED = -100


def documents(lengths, seed=0, vocab=50):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, vocab, (length,), generator=generator)} for length in lengths]


def test_documents_share_a_row():
    features = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [8]},
        {"input_ids": [9, 4]},
    ]
    batch = PackingCollator()(features)
    assert {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 4]],
        "labels": [[IGNORED, 6, 7, IGNORED, IGNORED, 4]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "seq_idx": [[0, 0, 0, 1, 2, 2]],
        "cu_seq_lens_q": [0, 3, 4, 6],
        "cu_seq_lens_k": [0, 3, 4, 6],
        "max_length_q": 3,
        "max_length_k": 3,
    }
    dtypes = {key: value.dtype for key, value in batch.items() if isinstance(value, torch.Tensor)}
    short = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
    assert dtypes == {key: torch.int32 if key in short else torch.int64 for key in dtypes}
    assert type(batch["max_length_q"]) is int


def test_offsets_positions_and_seq_idx_give_the_same_mask():
    batch = PackingCollator(pad_to_multiple_of=16, pad_token_id=0)(documents([3, 1, 17, 5]))
    masks = (
        BlockDiagonalMask.from_cu_seqlens(batch["cu_seq_lens_q"]),
        BlockDiagonalMask.from_position_ids(batch["position_ids"]),
        BlockDiagonalMask.from_segment_ids(batch["seq_idx"] + 1),
    )
    for mask in masks[1:]:
        assert torch.equal(mask.key_start, masks[0].key_start)
        assert torch.equal(mask.key_stop, masks[0].key_stop)


def test_padding_is_one_more_document():
    batch = PackingCollator(pad_to_multiple_of=8, pad_token_id=0)(documents([3, 2]))
    assert batch["input_ids"][0, 5:].tolist() == [0, 0, 0]
    assert batch["labels"][0, 5:].tolist() == [IGNORED] * 3
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
    assert batch["max_length_q"] == 3
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]


def test_longest_document_counts_the_padding():
    batch = PackingCollator(pad_to_multiple_of=64, pad_token_id=0)(documents([3, 2]))
    assert batch["max_length_q"] == batch["max_length_k"] == 59


def test_full_row_gets_no_padding():
    batch = PackingCollator(pad_to_multiple_of=8, pad_token_id=0)(documents([3, 5]))
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8]
    assert batch["attention_mask"].tolist() == [[1] * 8], "the same arguments for every batch make one graph"


def read_only(ids):
    array = np.array(ids)
    array.flags.writeable = False
    return array


CONVERSIONS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "tensor": torch.tensor,
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "uint16 array": lambda ids: np.array(ids, dtype=np.uint16),
    "uint64 array": lambda ids: np.array(ids, dtype=np.uint64),
    "uint16 tensor": lambda ids: torch.tensor(ids, dtype=torch.uint16),
    "big-endian": lambda ids: np.array(ids, dtype=">i4"),
    "read-only": read_only,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_input_types(convert):
    features = [{"input_ids": convert([1, 2, 3]), "labels": convert([1, 2, 3]), "attention_mask": convert([1, 1, 1])}]
    batch = PackingCollator()(features)
    assert batch["input_ids"].tolist() == [[1, 2, 3]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3]]


def test_input_is_unchanged():
    features = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}]
    batch = PackingCollator()(features)
    batch["input_ids"].zero_()
    assert features[0]["labels"].tolist() == [1, 2]
    assert features[0]["input_ids"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "at least one document; got an empty list"),
        ([{"labels": [1]}], r"document 0 must be a mapping with 'input_ids'; got the keys \['labels'\]"),
        ([[1, 2]], "document 0 must be a mapping .* got list"),
        ([{"input_ids": [1]}, {"input_ids": []}], "document 1 is empty"),
        ([{"input_ids": [1, 2], "labels": [1]}], "document 0 has 2 input_ids but 1 labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], r"isn't 1 .*\(length 2, sum 1\).*padding=False"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "attention_mask that isn't 1"),
        (5, r"takes a list of documents.* got int"),
        ({"input_ids": [[1, 2], [3]]}, r"got dict.*dataset\[i\] for i in range.*not as dataset\[:8\]"),
        ([{"input_ids": [1.0]}], "document 0 needs a row of integers as input_ids; got torch.float32"),
        ([{"input_ids": [True]}], "got torch.bool"),
        ([{"input_ids": [[1, 2]]}], r"of shape \(1, 2\)"),
        ([{"input_ids": 5}], r"of shape \(\)"),
        ([{"input_ids": "text"}], "needs a row of integers as input_ids; got 'text'"),
        ([{"input_ids": [1], "labels": None}], "needs a row of integers as labels; got None"),
        (
            [{"input_ids": torch.ones(1, dtype=torch.int64, device="meta")}],
            "document 0 has input_ids on meta; collate in host memory",
        ),
    ],
)
def test_refuses(features, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator()(features)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_to_multiple_of": 8}, "go together.*got pad_to_multiple_of=8 and pad_token_id=None"),
        ({"pad_token_id": 0}, "go together.*got pad_to_multiple_of=None and pad_token_id=0"),
        ({"pad_to_multiple_of": 0, "pad_token_id": 0}, "pad_to_multiple_of must be an integer from 1 to .* got 0"),
        ({"pad_to_multiple_of": 8.0, "pad_token_id": 0}, "got 8.0"),
        ({"pad_to_multiple_of": True, "pad_token_id": 0}, "got True"),
        ({"pad_to_multiple_of": 8, "pad_token_id": -100}, "pad_token_id must be an integer from 0 to .* got -100"),
        (
            {"pad_to_multiple_of": 8, "pad_token_id": 2**70},
            f"pad_token_id must be an integer from 0 to 2147483647; got {2**70}",
        ),
        ({"pad_to_multiple_of": 8, "pad_token_id": "<pad>"}, "got '<pad>'"),
        ({"objective": "mlm"}, "objective must be one of 'causal', 'tokens', 'documents'; got 'mlm'"),
        ({"objective": ["causal"]}, r"got \['causal'\]"),
        ({"max_document_length": 0}, "max_document_length must be an integer from 1 to .* got 0"),
        ({"max_document_length": 8.5}, "got 8.5"),
        ({"per_token": "bbox"}, r"per_token must be a collection of column names, such as \('bbox',\); got 'bbox'"),
        ({"per_token": [1]}, r"got \[1\]"),
        ({"per_token": ["labels"]}, "per_token names 'labels', which PackingCollator knows already"),
        ({"per_token": ["seq_idx"]}, "per_token names 'seq_idx', which"),
    ],
)
def test_refuses_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PackingCollator(**settings)


def test_loss_of_row_equals_loss_of_separate_documents():
    """The mean loss of a packed row is the token-weighted mean over documents, for any logits."""
    features = documents([7, 1, 12, 30])
    batch = PackingCollator(pad_to_multiple_of=16, pad_token_id=0)(features)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch["labels"].shape[1], 50, generator=generator, dtype=torch.float64)
    packed = cross_entropy(logits[:-1], batch["labels"][0, 1:])
    total, count = 0.0, 0
    for feature, start in zip(features, batch["cu_seq_lens_q"].tolist(), strict=False):
        ids = feature["input_ids"]
        rows = logits[start : start + len(ids)]
        total += cross_entropy(rows[:-1], ids[1:], reduction="sum").item()
        count += len(ids) - 1
    assert packed.item() == pytest.approx(total / count, rel=64 * torch.finfo(torch.float64).eps)
