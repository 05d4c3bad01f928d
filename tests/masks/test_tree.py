"""Masks of trees: what each token sees, the same mask in every form, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad

from tests.masks.forests import forests, visible
from tritonpack import BlockDiagonalMask
from tritonpack.masks.tree import SLACK

Parents = tuple[int, ...]
REACHES = st.sampled_from(
    [{}, {"window": (3, -1)}, {"window": (0, 0)}, {"chunk_size": 4}, {"window": (2, 0), "chunk_size": 5}]
)


def dense(parents: Parents, reach: dict[str, Any]) -> torch.Tensor:
    left = reach.get("window", (-1, 0))[0]
    return visible(parents, None if left < 0 else left, reach.get("chunk_size"))


class TestWhatIsSeen:
    @given(forests(), REACHES)
    def test_a_token_sees_itself_and_its_ancestors(self, parents: Parents, reach: dict[str, Any]) -> None:
        mask = BlockDiagonalMask.from_tree(parents, **reach).validate()
        expected = dense(parents, reach)
        assert torch.equal(mask.to_dense(), expected)
        assert torch.equal(mask.key_start < mask.key_stop, expected.any(1))
        assert torch.equal(mask.query_start < mask.query_stop, expected.any(0))

    @given(forests())
    def test_ends_give_the_same_mask(self, parents: Parents) -> None:
        seen = visible(parents)
        ends = [int(column.nonzero().max()) + 1 if column.any() else token for token, column in enumerate(seen.T)]
        assert torch.equal(BlockDiagonalMask.from_tree_ends(ends).to_dense(), seen)

    @given(forests(), forests(), REACHES)
    def test_rows_of_a_batch_are_apart(self, one: Parents, other: Parents, reach: dict[str, Any]) -> None:
        length = max(len(one), len(other))
        rows = [parents + (SLACK,) * (length - len(parents)) for parents in (one, other)]
        mask = BlockDiagonalMask.from_tree(torch.tensor(rows), **reach)
        assert torch.equal(mask.to_dense(), torch.block_diag(*(dense(row, reach) for row in rows)).bool())

    def test_a_tree_without_branches_is_a_document(self) -> None:
        parents = [-1, 0, 1, 2, -1, -1, 5]
        tree, documents = BlockDiagonalMask.from_tree(parents), BlockDiagonalMask.from_seqlens([4, 1, 2])
        assert torch.equal(tree.to_dense(), documents.to_dense())
        assert tree.document is not None
        assert documents.document is not None
        assert torch.equal(tree.document, documents.document)

    def test_depths_are_position_ids(self) -> None:
        assert BlockDiagonalMask.from_tree([-1, 0, 1, 1, 3, -1, 5, -2]).diagonal.tolist() == [0, 1, 2, 2, 3, 0, 1, 0]


class TestForms:
    @given(forests(), REACHES, st.data())
    def test_restricted_and_transposed(self, parents: Parents, reach: dict[str, Any], data: st.DataObject) -> None:
        mask, expected = BlockDiagonalMask.from_tree(parents, **reach), dense(parents, reach)
        indices = st.lists(st.integers(0, len(parents) - 1), unique=True).map(
            lambda x: torch.tensor(sorted(x), dtype=torch.int64)
        )
        rows, keys = data.draw(indices), data.draw(indices)
        part = mask.restrict(rows, keys).validate()
        assert torch.equal(part.to_dense(), expected[rows][:, keys])
        assert torch.equal(part.transpose().validate().to_dense(), expected[rows][:, keys].T)
        assert torch.equal(mask.transpose().transpose().to_dense(), expected)
        assert torch.equal(mask.restrict(rows).restrict(None, keys).to_dense(), part.to_dense())

    @given(forests(), REACHES)
    def test_bits_and_additive(self, parents: Parents, reach: dict[str, Any]) -> None:
        mask, expected = BlockDiagonalMask.from_tree(parents, **reach), dense(parents, reach)
        bits = (mask.to_bits()[:, :, None] >> torch.arange(32)) & 1
        assert torch.equal(bits.flatten(1)[:, : len(parents)].bool(), expected)
        additive = mask.to_dense(torch.float16, additive=True)
        assert torch.equal(additive == 0, expected)
        assert torch.equal(additive == torch.finfo(torch.float16).min, ~expected)

    @given(forests(), REACHES, st.sampled_from([1, 7, (8, 16), 128]))
    def test_block_mask_holds_every_visible_pair(self, parents: Parents, reach: dict[str, Any], size: Any) -> None:
        mask, expected = BlockDiagonalMask.from_tree(parents, **reach), dense(parents, reach)
        block_mask = mask.to_block_mask(size)
        rows, keys = block_mask.BLOCK_SIZE
        blocks = (
            pad(expected, (0, -len(parents) % keys, 0, -len(parents) % rows))
            .unflatten(0, (-1, rows))
            .unflatten(2, (-1, keys))
        )
        listed = block_mask.to_dense()[0, 0].bool()
        assert bool((listed | ~blocks.any(3).any(1)).all())
        full = torch.zeros_like(listed)
        for row, number in enumerate(block_mask.full_kv_num_blocks[0, 0].tolist()):
            full[row, block_mask.full_kv_indices[0, 0, row, :number].long()] = True
        assert torch.equal(full, blocks.all(3).all(1))
        q, k = torch.meshgrid(torch.arange(len(parents)), torch.arange(len(parents)), indexing="ij")
        zero = torch.zeros_like(q)
        assert torch.equal(block_mask.mask_mod(zero, zero, q, k), expected)

    @given(forests(slack=False))
    def test_block_mask_equals_create_block_mask(self, parents: Parents) -> None:
        """Without windows and padding."""
        mask = BlockDiagonalMask.from_tree(parents)
        ours = mask.to_block_mask(8)
        theirs = create_block_mask(ours.mask_mod, None, None, len(parents), len(parents), device="cpu", BLOCK_SIZE=8)
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)

    def test_all_rows_and_keys_keep_the_distances(self) -> None:
        mask = BlockDiagonalMask.from_tree([-1, 0, 0])
        assert torch.equal(mask.restrict().distances(), mask.distances())
        with pytest.raises(ValueError, match="this mask has no distances"):
            mask.transpose().distances()

    def test_moved_and_shown(self) -> None:
        mask = BlockDiagonalMask.from_tree([-1, 0, 0, -2])
        moved = mask.to("meta")
        assert (moved.query_stop.device.type, moved.is_tree, moved.document.shape) == ("meta", True, (4,))
        assert repr(mask) == "BlockDiagonalMask(num_queries=4, num_keys=4, tree, device=cpu)"
        assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())


class TestRefusals:
    @pytest.mark.parametrize(
        ("parents", "message"),
        [
            ([-1, 1], r"parents\[1\] is 1: a parent is the place of an earlier token"),
            ([-1, 0, 5], r"parents\[2\] is 5: a parent is the place of an earlier token"),
            ([-3], r"parents\[0\] is -3: .* -2 for a token outside every tree"),
            ([-1, 0, 1, 0, 2], r"parents\[4\] is 2: the subtree of this parent has ended"),
            ([-1, 0, -1, 1], r"parents\[3\] is 1: the subtree of this parent has ended"),
            ([-1, -2, 0], r"parents\[2\] is 0: the subtree of this parent has ended"),
            ([-1, -2, 1], r"parents\[2\] is 1: the subtree of this parent has ended"),
            (torch.tensor([[-1, 0], [-1, 1]]), r"parents\[1, 1\] is 1: a parent"),
            (torch.tensor([[-1, 0], [0, 0]]), r"parents\[1, 0\] is 0: a parent"),
            ([-1, 0.0], "parents must hold integers"),
            (torch.tensor([-1.0]), "parents must be an integer tensor"),
            ([[-1, 0], [-1, 0]], r"parents of several rows must be a \(B, T\) tensor"),
            ([-2, 0], r"parents\[1\] is 0: .* or the parent is outside every tree"),
            (torch.zeros(1, 1, 1, dtype=torch.int64), "parents must be an integer tensor of shape"),
        ],
    )
    def test_parents(self, parents: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BlockDiagonalMask.from_tree(parents)

    @pytest.mark.parametrize(
        ("ends", "message"),
        [
            ([2, 0], r"ends\[1\] is 0: a subtree ends after its own token"),
            ([3, 2], r"ends\[0\] is 3: a subtree ends after its own token and within its row"),
            ([2, 3, 3], r"ends\[1\] is 3: a subtree that begins within another one ends after it"),
            ([5, 3, 4, 4, 5], r"ends\[2\] is 4: a subtree that begins within"),
            (torch.tensor([[2, 2], [2, 3]]), r"ends\[1, 1\] is 3: a subtree ends"),
            ("5", "ends must hold integers"),
        ],
    )
    def test_ends(self, ends: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BlockDiagonalMask.from_tree_ends(ends)

    @given(st.lists(st.integers(-2, 9), max_size=10))
    def test_whatever_is_accepted_is_a_forest(self, parents: list[int]) -> None:
        try:
            mask = BlockDiagonalMask.from_tree(parents)
        except ValueError:
            return
        assert torch.equal(mask.to_dense(), visible(tuple(parents)))

    @settings(max_examples=300)
    @given(st.lists(st.integers(0, 7), min_size=1, max_size=7))
    def test_whatever_ends_are_accepted_lie_within_each_other(self, ends: list[int]) -> None:
        crossing = any(i < j < ends[i] < ends[j] for j in range(len(ends)) for i in range(j))
        outside = any(not place <= end <= len(ends) for place, end in enumerate(ends))
        if crossing or outside:
            with pytest.raises(ValueError, match="a subtree"):
                BlockDiagonalMask.from_tree_ends(ends)
        else:
            BlockDiagonalMask.from_tree_ends(ends)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"query_stop": None}, "query_stop must be a one-dimensional int32 tensor; got NoneType"),
            ({"query_start": torch.zeros(2)}, "query_start must be a one-dimensional int32"),
            ({"query_stop": torch.zeros(3, dtype=torch.int32)}, "query_stop must hold a number for each of the 2 keys"),
            ({"key_places": torch.zeros(2)}, "key_places must be a one-dimensional int32"),
            ({"key_places": torch.zeros(3, dtype=torch.int32)}, "key_places must hold a number for each of the 2 keys"),
            ({"query_stop": torch.tensor([1, 5], dtype=torch.int32)},
             r"key 1 of the mask has queries \[0, 5\), which reaches outside the 2"),
        ],
    )  # fmt: skip
    def test_bounds_of_keys(self, changed: dict[str, Any], message: str) -> None:
        bounds = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
        sides = dict(zip(("query_start", "query_stop"), bounds, strict=True)) | changed
        with pytest.raises(ValueError, match=message):
            BlockDiagonalMask(*bounds, 2, **sides)
