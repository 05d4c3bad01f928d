"""The backend "triton": launches the Triton kernels for tensors and a mask."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonpack.backends import has_matrix_products
from tritonpack.backends.dropout import drop_below
from tritonpack.backends.launch import launch
from tritonpack.backends.tile_table import Cut, TileTables, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.errors import BackendUnavailableError
from tritonpack.kernels.backward import dkdv_kernel, dq_kernel
from tritonpack.kernels.forward import forward_kernel
from tritonpack.kernels.primitives import LOG2E
from tritonpack.kernels.tile_shapes import (
    FLOAT32_KIB,
    WITHOUT_TMA,
    Kernel,
    TileShape,
    current_arch,
    heads_per_tile,
    key_gradient_kernels,
    select_tile,
    small_shared_kib,
)
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

INTERPRETED = bool(knobs.runtime.interpret)  # Triton reads the environment at import


def check_device(q: Tensor) -> None:
    """Refuse float64, 16-bit types on old GPUs, and tensors that aren't on a GPU unless the kernels are interpreted."""
    if not q.is_cuda and not INTERPRETED:
        raise BackendUnavailableError(
            f"backend='triton' needs tensors on a GPU; got {q.device}. Use backend='blocked' (or 'auto'), or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter."
        )
    if q.dtype == torch.float64:
        raise BackendUnavailableError(
            "backend='triton' takes bfloat16, float16 and float32; got float64. Use backend='blocked' or 'reference'."
        )
    if q.dtype != torch.float32 and q.is_cuda and not has_matrix_products(q.device):
        raise BackendUnavailableError(
            "backend='triton' takes 16-bit types on NVIDIA GPUs since compute capability 8.0 and on AMD GPUs since "
            f"CDNA and RDNA 3, because Triton has no matrix instructions for older ones; got {q.dtype} on "
            f"{torch.cuda.get_device_name(q.device)}. Use backend='blocked' (or 'auto')."
        )


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """Make the tile tables of all kernels; without `backward` only the table of forward."""
    tile = _tiles("forward", max(_padded(q), _padded(v)), q, mask, options)["forward"]
    cut = _cut("forward", tile, q.shape[1] // k.shape[1], mask, options)
    return plan_cuts(q, k, v, mask, options, cut, backward=backward)


def plan_cuts(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, forward: Cut, *, backward: bool
) -> TileTables:
    """Do the same as `plan_tiles` for a forward kernel with this cut.

    With a mask of trees the field `keys` has a table for each kernel that computes gradients of keys.
    """
    cuts, tree = [forward], mask.is_tree
    if backward:
        tiles, group = _tiles("backward", max(_padded(q), _padded(v)), q, mask, options), q.shape[1] // k.shape[1]
        cuts += [_cut(kernel, tile, group, mask, options) for kernel, tile in tiles.items()]
    blocks = None
    if tree:
        tables, blocks = tree_tables(mask, *cuts)
    else:
        tables = tile_tables(mask, *cuts[:3], whole_documents=options.pack_invariant)
    if not backward:
        return TileTables(tables[0], None, None, blocks)
    keys = tables[2] if not tree else tables[2][None] if len(tables) == 3 else torch.stack(tables[2:])
    return TileTables(tables[0], keys, tables[1], blocks)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D_v) in q's dtype and lse (H, T_q) float32; `tiles` are from `plan_tiles`."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if not q.shape[0] or not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    assert tiles.forward is not None
    q, k, v = aligned(q), aligned(k), aligned(v)
    tile = _tiles("forward", max(_padded(q), _padded(v)), q, mask, options)["forward"]
    arguments, constants, programs = _of_queries(tile, q, k, v, out, lse, mask, options, tiles, tiles.forward)
    with torch.cuda.device_of(q):
        launch(forward_kernel, programs, arguments, constants | {"DEFERRED": tile.deferred})
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockDiagonalMask,
    options: AttentionOptions,
    tiles: TileTables,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v, sinks.

    It allocates 8 more bytes per query row and head and per row of a block, and with sinks 4 bytes per tile and head.
    """
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    (num_queries, heads, _), (num_keys, kv_heads, head_dim_v) = q.shape, v.shape
    if not num_queries or not num_keys:
        dsinks = None if options.sinks is None else torch.zeros_like(options.sinks)
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks
    assert tiles.keys is not None
    assert tiles.queries is not None
    key_gradients = _tiles("backward", max(_padded(q), _padded(v)), q, mask, options)
    dq_tile = key_gradients.pop("dq")
    # dK and dV read blocks of whole rows, so the last one may end past the last row.
    statistics = heads * num_queries + max(tile.block_m for tile in key_gradients.values())
    lse2 = torch.empty(statistics, dtype=torch.float32, device=q.device)
    delta = torch.empty(statistics, dtype=torch.float32, device=q.device)
    shares = None if options.sinks is None else lse.new_zeros(heads, tiles.queries.shape[0])
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    assert lse.is_contiguous(), "the kernel takes no strides of lse"
    assert out.stride(2) == 1 or head_dim_v == 1, "the kernel takes no stride of the columns of out"
    own = {"lse2_ptr": lse2, "delta_ptr": delta, "scale": options.scale}
    with torch.cuda.device_of(q):
        tile = dq_tile
        arguments, constants, programs = _of_queries(tile, q, k, v, out, lse, mask, options, tiles, tiles.queries)
        shared = constants["HEADS"]
        arguments |= own | {
            "dout_desc": descriptor(dout, tile.block_m // shared, heads=shared, by_pointers=tile.by_pointers),
            "dlse_ptr": dlse,
            "dq_ptr": dq,
            "dsinks_ptr": shares,
            "stride_dlh": None if dlse is None else dlse.stride(0),
            "stride_dlt": None if dlse is None else dlse.stride(1),
            "stride_dqt": dq.stride(0),
            "stride_dqh": dq.stride(1),
        }
        launch(dq_kernel, programs, arguments, constants)
        for number, (kernel, tile) in enumerate(key_gradients.items()):
            key_tiles = tiles.keys[number] if mask.is_tree else tiles.keys
            arguments = _common_arguments(tile, 1, q, k, v, mask, options, tiles, key_tiles) | own
            arguments |= {
                "dout_desc": descriptor(dout, tile.block_m, by_pointers=tile.by_pointers),
                "dk_ptr": None if kernel == "dv" else dk,
                "dv_ptr": None if kernel == "dk" else dv,
                "stride_dkt": dk.stride(0),
                "stride_dkh": dk.stride(1),
                "stride_dvt": dv.stride(0),
                "stride_dvh": dv.stride(1),
            }
            if not mask.is_tree:
                arguments |= {"key_start_ptr": None, "key_stop_ptr": None}
            constants = {"HEAD_BLOCKS": kv_heads, "QUERIES_LEFT": tile.queries_left, **_constants(q, v, tile)}
            launch(dkdv_kernel, kv_heads * key_tiles.shape[0], arguments, constants)
    return dq, dk, dv, None if shares is None else shares.sum(1)


def _of_queries(
    tile: TileShape, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockDiagonalMask,
    options: AttentionOptions, tiles: TileTables, table: Tensor,
) -> tuple[dict[str, Any], dict[str, Any], int]:  # fmt: skip
    """The arguments, the constants and the number of programs of a kernel whose tiles, of a table, cut the queries."""
    shared = heads_per_tile(tile, q.shape[1] // k.shape[1])
    head_blocks = q.shape[1] // shared
    arguments = _common_arguments(tile, shared, q, k, v, mask, options, tiles, table) | {
        "out_ptr": out,
        "lse_ptr": lse,
        "sinks_ptr": options.sinks,
        "stride_ot": out.stride(0),
        "stride_oh": out.stride(1),
    }
    constants = {"HEAD_BLOCKS": head_blocks, "HEADS": shared, **_constants(q, v, tile)}
    return arguments, constants, head_blocks * table.shape[0]


def _common_arguments(
    tile: TileShape, shared: int, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions,
    tiles: TileTables, table: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """Return the run-time arguments of all three attention kernels; None for an unused feature.

    Args:
        shared: the number of heads that share a tile of queries.
        table: the tile table of the kernel.
    """
    transposed, slopes, seed = mask.transpose(), options.alibi_slopes, options.dropout_seed
    describe = partial(descriptor, by_pointers=tile.by_pointers)
    slope_strides = (
        (None, None) if slopes is None else (slopes.stride(0) if slopes.shape[0] > 1 else 0, slopes.stride(1))
    )
    return {
        "q_desc": describe(q, tile.block_m // shared, heads=shared),
        "k_desc": describe(k, tile.block_n),
        "v_desc": describe(v, tile.block_n),
        "tiles_ptr": table,
        "blocks_ptr": tiles.blocks,
        "key_start_ptr": mask.key_start,
        "key_stop_ptr": mask.key_stop,
        "query_start_ptr": transposed.key_start,
        "query_stop_ptr": transposed.key_stop,
        "num_queries": q.shape[0],
        "num_keys": k.shape[0] if mask.is_tree else None,
        "diagonal_ptr": None if slopes is None else mask.diagonal,
        "places_ptr": None if slopes is None else mask.key_places,
        "alibi_ptr": slopes,
        "stride_at": slope_strides[0],
        "stride_ah": slope_strides[1],
        "seed_ptr": seed,
        "drop_below": None if seed is None else drop_below(options.dropout_p),
        "keep_scale": None if seed is None else 1.0 / (1.0 - options.dropout_p),
        "scale_log2": options.scale * LOG2E.value,
        "softcap_log2": options.softcap * LOG2E.value if options.softcap else None,
    }


def _constants(q: Tensor, v: Tensor, tile: TileShape) -> dict[str, Any]:
    """Return the compile-time constants of all three kernels; none depends on a token count."""
    return {
        "HEAD_DIM": q.shape[2],
        "HEAD_DIM_V": v.shape[2],
        "BLOCK_D": _padded(q),
        "BLOCK_V": _padded(v),
        "GROUP": q.shape[1] // v.shape[1],
        "UPCAST": q.dtype == torch.bfloat16 and INTERPRETED,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # off by default in Triton 3.10
    }


def _cut(kernel: Kernel, tile: TileShape, group: int, mask: BlockDiagonalMask, options: AttentionOptions) -> Cut:
    if kernel in ("forward", "dq"):
        even = bool(options.dropout_p) and not mask.is_tree  # in a tree blocks begin at multiples of their size
        return Cut(tile.block_m // heads_per_tile(tile, group), tile.block_n, tile.block_m, even=even)
    return Cut(tile.block_n, tile.block_m if mask.is_tree else None, of_keys=True)


def _tiles(
    direction: Literal["forward", "backward"], block_d: int, q: Tensor, mask: BlockDiagonalMask,
    options: AttentionOptions,
) -> dict[Kernel, TileShape]:  # fmt: skip
    """Return the tile of each kernel of a direction, in launch order; `block_d` as in `select_tile`."""
    if q.dtype == torch.float32:
        _check_float32(direction, block_d, q.device)
    arch = current_arch(q.device)
    in_use = {
        "softcap": options.softcap,
        "sinks": options.sinks is not None,
        "alibi": options.alibi_slopes is not None,
        "dropout": options.dropout_p,
        "tree": mask.is_tree,
    }
    features = frozenset(name for name, used in in_use.items() if used)
    kernels: tuple[Kernel, ...] = ("forward",)
    if direction == "backward":
        kernels = ("dq", *key_gradient_kernels(block_d, q.dtype, arch))
    return {kernel: select_tile(kernel, block_d, q.dtype, arch, features) for kernel in kernels}


def _check_float32(direction: Literal["forward", "backward"], block_d: int, device: torch.device) -> None:
    """Refuse a head dimension whose float32 tiles don't fit into the shared memory of the GPU."""
    limit = small_shared_kib(device)
    needed = FLOAT32_KIB[max(block_d, 64)][direction]
    if limit is not None and needed > limit:
        fitting = max(row for row, kib in FLOAT32_KIB.items() if kib[direction] <= limit)
        raise BackendUnavailableError(
            f"backend='triton' in float32 at head dimension {block_d} (rounded up to a power of two) "
            f"needs {needed} KiB of shared memory in {direction}, but this GPU has {limit} KiB, enough for "
            f"head dimensions up to {fitting}. Use backend='blocked', or a 16-bit type."
        )


def _padded(x: Tensor) -> int:
    return max(1 << (x.shape[2] - 1).bit_length(), 16)


def descriptor(
    x: Tensor, rows: int, *, heads: int = 1, by_pointers: bool = False
) -> TensorDescriptor | tuple[Tensor, int, int, int]:
    """Describe a tensor (T, H, D) from `aligned` as blocks of `rows` rows and `heads` heads, with zeros outside.

    On GPUs without TMA, and with `by_pointers`, return its pointer, 16 T, and the bytes between heads and between rows.
    All three numbers are multiples of 16. So Triton compiles one kernel for all of them, and knows that rows are
    aligned to 16 bytes.
    """
    (tokens, all_heads, width), (stride_t, stride_h, _) = x.shape, x.stride()
    if by_pointers or current_arch(x.device) in WITHOUT_TMA:
        return x, 16 * tokens, stride_h * x.element_size(), stride_t * x.element_size()
    return _Descriptor(x, [all_heads, tokens, width], [stride_h, stride_t, 1], [heads, rows, _padded(x)])


class _Descriptor(TensorDescriptor):
    """A descriptor without Triton's checks, which take most of its time. `aligned` and the tiles make them
    unnecessary."""

    def __post_init__(self) -> None:
        pass


def aligned(x: Tensor) -> Tensor:
    """Return a tensor (T, H, D) in the form of descriptors; it may be a copy, so call this once per tensor.

    Its address and its strides are multiples of 16 bytes, no stride is 0, and the last one is a single element. The
    stride of a dimension of size 1 may have any value, also in contiguous tensors, so it is replaced.
    """
    unit = 16 // x.element_size()
    (tokens, heads, width), (stride_t, stride_h, stride_d) = x.shape, x.stride()
    room = -(-width // unit) * unit
    strides = (room if tokens == 1 else stride_t, room if heads == 1 else stride_h, 1 if width == 1 else stride_d)
    if x.data_ptr() % 16 or strides[0] % unit or strides[1] % unit or strides[2] != 1 or 0 in strides:
        return x.new_empty(tokens, heads, room)[..., :width].copy_(x)
    return x if strides == (stride_t, stride_h, stride_d) else x.as_strided(x.shape, strides)
