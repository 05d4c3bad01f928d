"""Short documents on a CPU, by loops that numba compiles (short_kernels.py), on as many threads as torch has.

A document has at most `LONGEST` queries and keys, and any interval of its keys may be hidden from any query. Torch's
fused kernel would take a call for each of them, or copies of all of them; these loops read their rows where they are.
A document's results don't depend on other documents, nor on the number of threads.

Without numba, and for options that the loops lack, short documents are computed like long ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tritonpack
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

LONGEST = 512  # tokens, so that the keys and values of a head fit the second-level cache
FEWEST_NUMBERS = 2**20  # of products that a further thread is worth
PARTS = 4  # for each thread, so that a thread that starts late takes fewer


def serves(q: Tensor, mask: BlockDiagonalMask, options: AttentionOptions) -> bool:
    """Whether the loops compute attention of queries like q with this mask and these options."""
    plain = not options.softcap and options.alibi_slopes is None and not options.dropout_p
    return q.device.type == "cpu" and plain and not mask.is_tree and _kernels() is not None


@cache
def _kernels() -> ModuleType | None:
    """The compiled loops; None without a numba that compiles."""
    try:
        import numba

        from tritonpack.backends import short_kernels
    except (ImportError, SystemError):  # SystemError: numba was built for another numpy
        return None
    return None if numba.config.DISABLE_JIT else short_kernels


def _functions(dtype: Any) -> Any:
    kernels = _kernels()
    assert kernels is not None
    return kernels.functions(dtype)


class Documents:
    """The short documents of a mask. No two have a key in common, because bounds ascend, so threads write apart.

    Args:
        rows: (documents, 4) int64 on the host: row, row_end, key, key_end, in the order of their rows.
        mask: their mask.
    """

    def __init__(self, rows: Tensor, mask: BlockDiagonalMask) -> None:
        self.rows = rows.contiguous().numpy()
        self.start, self.stop = (x.contiguous().numpy() for x in (mask.key_start, mask.key_stop))
        row, row_end, key, key_end = self.rows.T
        self.work = (row_end - row) * (key_end - key)
        self._of_heads: dict[int, tuple[Any, Any]] = {}

    def of_heads(self, heads: int) -> tuple[Any, Any]:
        """Each document with each of the key heads, (documents * heads, 5), and the running sum of their work."""
        if heads not in self._of_heads:
            head = np.tile(np.arange(heads), len(self.rows))[:, None]
            tasks = np.concatenate([np.repeat(self.rows, heads, 0), head], 1)
            self._of_heads[heads] = tasks, np.cumsum(np.repeat(self.work, heads))
        return self._of_heads[heads]

    def each(self, heads: int, threads: int, compute: Callable[[Any], None]) -> None:
        """Call `compute` with rows of `of_heads`, in parts that up to `threads` threads take one after the other."""
        number = threads * PARTS if threads > 1 else 1
        tasks, work = self.of_heads(heads)
        shares = work[-1] * np.arange(1, number) / number
        parts = iter([part for part in np.split(tasks, np.searchsorted(work, shares) + 1) if len(part)])
        errors: list[BaseException] = []

        def take(_: Any = None) -> None:
            try:
                for part in parts:
                    compute(part)
            except BaseException as error:
                errors.append(error)

        if threads > 1:
            start = _openmp()
            assert start is not None
            start(take, threads)
        else:
            take()
        if errors:
            raise errors[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor, lse: Tensor) -> None:
        """Write their rows of out (T_q, H, D_v) and lse (T_q, H), given tensors of one dtype, contiguous."""
        arrays = _arrays(q, k, v)
        forward, _ = _functions(arrays[0].dtype)
        sinks = _arrays(q.new_empty(0) if options.sinks is None else options.sinks.to(q.dtype).contiguous())
        scale, results = arrays[0].dtype.type(options.scale), _arrays(out, lse)

        def compute(documents: Any) -> None:
            forward(*arrays, documents, self.start, self.stop, *sinks, scale, *results)

        self.each(k.shape[1], self._threads(q), compute)

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: AttentionOptions,
        gradients: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write their rows of dq, dk and dv, given tensors as in `forward`."""
        dlse = q.new_empty(0, 0) if dlse is None else dlse.T.to(q.dtype).contiguous()
        arrays, results = _arrays(dout, dlse, q, k, v, out, lse), _arrays(*gradients)
        scale = arrays[0].dtype.type(options.scale)
        _, backward = _functions(arrays[0].dtype)

        def compute(documents: Any) -> None:
            backward(*arrays, documents, self.start, self.stop, scale, *results)

        self.each(k.shape[1], self._threads(q), compute)

    def _threads(self, q: Tensor) -> int:
        if os.getpid() != tritonpack._imported_by or not _openmp():
            return 1  # A process that was forked has one thread, and OpenMP would wait for the others forever.
        numbers = int(self.work.sum()) * q.shape[1] * q.shape[2]
        return max(min(torch.get_num_threads(), numbers // FEWEST_NUMBERS), 1)


def _arrays(*tensors: Tensor) -> list[Any]:
    return [x.detach().numpy() for x in tensors]


_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Callable[[Callable[[Any], None], int], None] | None:
    """A function that calls another one on several threads of OpenMP, as torch's operators do; None without OpenMP.

    After each operator these threads wait for the next one in a loop, for milliseconds. Threads of our own would share
    the processors with them until then.
    """
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is None:
        return None
    parallel.argtypes, parallel.restype = [_WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return lambda work, threads: parallel(_WORK(work), None, threads, 0)
