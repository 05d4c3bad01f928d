"""Every form in which pairs of documents, a source and a target each, reach an encoder with a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from tritonpack.patches.trial.packed_forms import Batch, _offsets, document_numbers, lay_out

SourceOf = Callable[[Tensor], Tensor]
PairForm = Callable[[list[Tensor], SourceOf], Batch]


def _pairs(
    targets: list[Tensor],
    source_of: SourceOf,
    *,
    rows: Iterable[Iterable[int]] | None = None,
    left: bool = False,
    masks: bool = False,
    positions: bool = False,
    numbers: bool = False,
    seq_idx: bool = False,
    **more: Tensor | int | bool,
) -> Batch:
    """Rows of pairs; what tells documents apart is as the flags say.

    Args:
        targets: token ids `[1, n]` of the documents of the decoder.
        source_of: makes the encoder's document `[1, m]` of a target.
        rows: the numbers of the pairs in each row; all in one by default.
        left: pad on the left, on both sides.
        masks: pass masks of 0 and 1 for padding.
        positions: pass position ids, on both sides.
        numbers: pass masks that number documents, 0 for padding.
        seq_idx: number documents by `seq_idx` and `decoder_seq_idx`.
        more: other arguments.
    """
    chosen = [list(row) for row in rows] if rows is not None else [list(range(len(targets)))]
    sources = [source_of(target) for target in targets]
    encoder, decoder = (lay_out(chosen, documents, left=left) for documents in (sources, targets))
    arguments = {"input_ids": encoder.ids}
    for prefix, batch in (("", encoder), ("decoder_", decoder)):
        if masks:
            arguments[f"{prefix}attention_mask"] = batch.arguments["attention_mask"]
        if numbers:
            arguments[f"{prefix}attention_mask"] = document_numbers(batch)
        if seq_idx:
            arguments[f"{prefix}seq_idx"] = document_numbers(batch).int()
        if positions:
            arguments[f"{prefix}position_ids"] = batch.arguments["position_ids"]
    return Batch(decoder.ids, decoder.spans, {**arguments, **more})


def _with_offsets(targets: list[Tensor], source_of: SourceOf) -> Batch:
    sources = [source_of(target) for target in targets]
    return _pairs(targets, source_of, cu_seq_lens_q=_offsets(targets), cu_seq_lens_k=_offsets(sources))


def _one_each(targets: list[Tensor]) -> list[list[int]]:
    return [[i] for i in range(len(targets))]


def _last_apart(targets: list[Tensor]) -> list[list[int]]:
    return [list(range(len(targets) - 1)), [len(targets) - 1]]


PAIR_FORMS: dict[str, PairForm] = {
    "numbered": lambda d, source_of: _pairs(d, source_of, numbers=True),
    "without_cache": lambda d, source_of: _pairs(d, source_of, numbers=True, use_cache=False),
    "with_cache": lambda d, source_of: _pairs(d, source_of, numbers=True, use_cache=True),
    "positions": lambda d, source_of: _pairs(d, source_of, positions=True),
    "numbered_positions": lambda d, source_of: _pairs(d, source_of, numbers=True, positions=True),
    "offsets": _with_offsets,
    "seq_idx": lambda d, source_of: _pairs(d, source_of, seq_idx=True),
    "two_rows": lambda d, source_of: _pairs(d, source_of, rows=_last_apart(d), numbers=True),
    "two_rows_left": lambda d, source_of: _pairs(d, source_of, rows=_last_apart(d), left=True, numbers=True),
    "two_rows_by_positions": lambda d, source_of: _pairs(d, source_of, rows=_last_apart(d), masks=True, positions=True),
    "padded_right": lambda d, source_of: _pairs(d, source_of, rows=_one_each(d), masks=True),
    "padded_left": lambda d, source_of: _pairs(d, source_of, rows=_one_each(d), left=True, masks=True),
}
