"""Runs a Gluon kernel for Hopper on a CPU, to find mistakes in its synchronisation; layouts are ignored.

The kernel's own Python functions run, with other objects behind the names of the language. Partitions of
`warp_specialize` are threads, one of which runs at a time. At every operation on barriers, copies and products a seeded
choice decides which thread goes on, or which copy arrives. The emulator models:

- Shared memory holds NaN when it is allocated, and again from the request of a TMA copy until the copy arrives.
- Barriers count arrivals and bytes and are waited for by parity; too many arrivals are an error.
- A warpgroup's product has a value only after its wait. Operands in shared memory must be the same then as when the
  product was requested, and what ordinary stores wrote there must have been fenced.
- If no thread can go on, the error says which thread waits for which barrier. A copy or product that is never waited
  for is an error, and so is an access outside of a tensor.

It doesn't model the warps of one partition against each other (Triton synchronises them before they arrive), layouts,
swizzling, registers and time.
"""

from __future__ import annotations

import random
import re
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class HazardError(Exception):
    """A mistake that does, or may, give wrong results on the hardware."""


class _StoppedError(BaseException):
    """Ends a partition after another one failed."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes are there."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.missing, self.bytes, self.phases = name, 0, 0, 0, 0

    def __str__(self) -> str:
        return f"{self.name} ({self.phases} phases over, {self.missing} arrivals and {self.bytes} bytes missing)"

    def arrive(self, arrivals: int, expected: int = 0, arrived: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += expected - arrived
        if self.missing < 0:
            raise HazardError(f"too many arrivals: {self}")
        if self.missing == 0 and self.bytes == 0:
            self.phases, self.missing = self.phases + 1, self.count

    def over(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: it is the phase before the present one."""
        return self.phases % 2 != parity


class Shared:
    """A view of shared memory; `buffer` is the buffer that `index` selected."""

    def __init__(self, data: Tensor, buffer: Any = None) -> None:
        self.data, self.buffer, self.dtype = data, buffer if buffer is not None else self, data.dtype

    def index(self, i: int) -> Shared:
        return Shared(self.data[int(i)], (id(self), int(i)))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape), self.buffer)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.buffer)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.buffer)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype, "a store doesn't convert"
        self.data.copy_(value)
        machine().unfenced.add((machine().current, self.buffer))


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, count: int) -> None:
        lines = [frame.line or "" for frame in traceback.extract_stack()]
        names = [found[1] for line in lines if (found := re.match(r"(\w+) = barriers\(", line))]
        self.barriers = [Barrier(f"{names[-1] if names else 'barrier'}[{i}]") for i in range(count)]

    def index(self, i: int) -> Barrier:
        return self.barriers[int(i)]


class Pointer:
    """Addresses within the memory of a tensor."""

    def __init__(self, data: Tensor, offset: Any) -> None:
        self.data, self.offset, self.dtype = data, offset, SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets, and whether each is accessed, in one shape; offsets that aren't accessed are 0."""
        offset = torch.as_tensor(self.offset)
        offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(True if mask is None else mask))
        if (((offset < 0) | (offset >= self.data.numel())) & mask).any():
            raise HazardError("access outside of a tensor")
        return torch.where(mask, offset, 0).long(), mask


class Descriptor:
    """A tensor of which TMA copies blocks, with zeros outside of it."""

    def __init__(self, given: Any) -> None:
        self.rows = torch.as_strided(given.base, given.shape, given.strides)
        self.block_shape, self.dtype, self.layout = given.block_shape, given.base.dtype, given.layout

    def read(self, place: Sequence[int]) -> Tensor:
        block = torch.zeros(*self.block_shape, dtype=self.dtype)
        ends = [min(p + b, s) for p, b, s in zip(place, self.block_shape, self.rows.shape, strict=True)]
        part = self.rows[tuple(slice(p, e) for p, e in zip(place, ends, strict=True))]
        block[tuple(slice(n) for n in part.shape)] = part
        return block


class Product:
    """A product that was requested; its value exists once it has been waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.then = [self.now(x) for x in self.operands]
        self.value: Tensor | None = None
        for x in self.operands:
            if isinstance(x, Shared) and any(buffer == x.buffer for _, buffer in machine().unfenced):
                raise HazardError("a product reads what an ordinary store wrote, without a fence")

    @staticmethod
    def now(x: Any) -> Tensor:
        return x.data.clone() if isinstance(x, Shared) else x

    def finish(self) -> None:
        for x, then in zip(self.operands, self.then, strict=True):
            if not torch.equal(self.now(x).nan_to_num(1e4), then.nan_to_num(1e4)):
                raise HazardError("a product's operand was overwritten before the product was waited for")
        a, b = self.then
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc  # one product may follow another
        assert acc is not None, "an accumulator that was not waited for"
        self.value = a.float() @ b.float() + (acc if self.use_acc else 0.0)


class Machine:
    """One program: its partitions, the one that runs, and the copies under way."""

    def __init__(self, seed: int, program: int, programs: int) -> None:
        self.choice, self.program, self.programs = random.Random(seed), program, programs
        self.current = ""
        self.baton: dict[str, threading.Semaphore] = {"": threading.Semaphore(0)}
        self.waiting: dict[str, tuple[Barrier, int]] = {}
        self.copies: list[tuple[Descriptor, list[int], Barrier, Shared]] = []
        self.products: dict[str, list[Product]] = {}
        self.unfenced: set[tuple[str, Any]] = set()
        self.failure: BaseException | None = None

    def pause(self) -> None:
        """Let the other partitions go on for a while."""
        if self.current:
            me = self.current
            self.baton[""].release()
            self.baton[me].acquire()
            if self.failure:
                raise _StoppedError

    def wait(self, barrier: Barrier, parity: int) -> None:
        if self.current:
            self.waiting[self.current] = (barrier, parity)
        self.pause()
        assert barrier.over(parity)

    def copy(self, source: Descriptor, place: Any, barrier: Barrier, target: Shared) -> None:
        target.data.fill_(float("nan"))
        self.copies.append((source, [int(x) for x in place], barrier, target))
        self.pause()

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        """Run all partitions to their ends."""
        threads = {name: threading.Thread(target=self._partition, args=(name, partitions[name])) for name in partitions}
        self.baton |= {name: threading.Semaphore(0) for name in partitions}
        # Each program has other slow partitions, because mistakes show when one partition is far ahead of another.
        speeds = {name: 100 ** self.choice.random() for name in self.baton}
        for thread in threads.values():
            thread.start()
        while not self.failure and any(thread.is_alive() for thread in threads.values()):
            alive = [name for name in threads if name in self.baton]
            ready: list[Any] = [name for name in alive if self._ready(name)]
            ready += range(len(self.copies))
            if not ready:
                if alive:
                    waits = "; ".join(f"{name} for {self.waiting[name][0]}" for name in alive)
                    self.failure = HazardError(f"nobody can go on: {waits}")
                break
            self._go_on(self.choice.choices(ready, [speeds["" if isinstance(x, int) else x] for x in ready])[0])
        if not self.failure and self.copies:
            self.failure = HazardError("a copy that nobody waited for")
        for name in [*self.baton]:
            self.baton[name].release()
        for thread in threads.values():
            thread.join()
        if self.failure:
            raise self.failure

    def _ready(self, name: str) -> bool:
        return name not in self.waiting or self.waiting[name][0].over(self.waiting[name][1])

    def _go_on(self, who: Any) -> None:
        if isinstance(who, int):
            source, place, barrier, target = self.copies.pop(who)
            target.data.copy_(source.read(place))
            barrier.arrive(0, arrived=target.data.numel() * target.data.element_size())
        else:
            self.waiting.pop(who, None)
            self.current = who
            self.baton[who].release()
            self.baton[""].acquire()

    def _partition(self, name: str, body: Callable[[], None]) -> None:
        self.baton[name].acquire()
        _here.machine = self
        try:
            if not self.failure:
                body()
                if self.products.get(name):
                    raise HazardError("a product that nobody waited for")
        except _StoppedError:
            pass
        except BaseException as error:
            self.failure = error
        del self.baton[name]
        self.baton[""].release()


_here = threading.local()


def machine() -> Machine:
    return _here.machine


def _request(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    machine().products.setdefault(machine().current, []).append(product)
    machine().pause()
    return product


def _wait_for_products(outstanding: int, deps: Sequence[Any]) -> Any:
    machine().pause()
    pending = machine().products.get(machine().current, [])
    while len(pending) > outstanding:
        pending.pop(0).finish()
    values = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _fence() -> None:
    machine().unfenced = {(who, buffer) for who, buffer in machine().unfenced if who != machine().current}


def _specialize(partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    machine().run({function.__name__: (lambda f=function, a=args: f(*a)) for function, args in partitions})


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset, mask = pointer.places(mask)
    return torch.where(mask, pointer.data[offset], torch.as_tensor(other, dtype=pointer.data.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, mask = pointer.places(mask)
    assert value.dtype == pointer.data.dtype, "a store doesn't convert"
    pointer.data[offset[mask]] = value.broadcast_to(offset.shape)[mask]


def _arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
    machine().pause()


def _expect(barrier: Barrier, size: int) -> None:
    barrier.arrive(1, expected=size)
    machine().pause()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    return Barriers(shape[0]) if dtype == torch.int64 else Shared(torch.full(tuple(shape), float("nan"), dtype=dtype))


def _layout(*args: Any) -> None:
    return None


LANGUAGE = SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float32=torch.float32, constexpr=None,
    BlockedLayout=_layout, SliceLayout=_layout, DotOperandLayout=_layout, SwizzledSharedLayout=_layout,
    arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
    zeros=lambda shape, dtype, layout: torch.zeros(*shape, dtype=dtype),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    where=torch.where, exp2=torch.exp2, log2=torch.log2,
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
    maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    cdiv=lambda a, b: -(-a // b), static_range=range, convert_layout=lambda x, layout: x,
    inline_asm_elementwise=lambda asm, constraints, args, *rest, **options: args[0],
    program_id=lambda axis: torch.tensor(machine().program, dtype=torch.int32),
    num_programs=lambda axis: torch.tensor(machine().programs, dtype=torch.int32),
    load=_load, store=_store, allocate_shared_memory=_allocate, warp_specialize=_specialize,
)  # fmt: skip
STAND_INS: dict[str, Any] = {
    "gl": LANGUAGE, "tl": LANGUAGE, "warpgroup_mma": _request, "warpgroup_mma_wait": _wait_for_products,
    "warpgroup_mma_init": lambda value: value,
    "fence_async_shared": _fence, "copy_block": lambda *copy: machine().copy(*copy),
    "mbarrier": SimpleNamespace(
        MBarrierLayout=_layout, init=_init, arrive=_arrive, expect=_expect,
        wait=lambda barrier, parity: machine().wait(barrier, int(parity)),
    ),
}  # fmt: skip


def plain(kernel: Any, known: dict[int, dict[str, Any]] | None = None) -> FunctionType:
    """A kernel, and all functions that it calls, as Python functions on the objects of this module."""
    known = {} if known is None else known
    function = kernel.fn
    names = known.get(id(function.__globals__))
    if names is None:
        names = known[id(function.__globals__)] = {"__builtins__": __builtins__}
        for name, value in function.__globals__.items():
            if name in STAND_INS:
                names[name] = STAND_INS[name]
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
            elif isinstance(getattr(value, "fn", None), FunctionType) and "ConstexprFunction" not in str(type(value)):
                names[name] = plain(value, known)
            elif not isinstance(value, ModuleType):
                names.setdefault(name, value)
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


class Emulated:
    """Has the kernel's launch syntax; programs run one after the other, each with its own order of events."""

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.kernel, self.seed = kernel, seed

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            given = {name: _argument(value) for name, value in arguments.items() if name in self.kernel.arg_names}
            function = plain(self.kernel)
            for number in range(grid[0]):
                _here.machine = Machine(self.seed * 1000003 + number, number, grid[0])
                function(**given)

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return Pointer(memory, value.storage_offset())
    return Descriptor(value) if hasattr(value, "block_shape") else value
