"""Translates a kernel's PTX into the instructions of machine.h. Whatever has no exact counterpart is refused."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from typing import Any

from tests.virtual_gpu import alu
from tests.virtual_gpu.ptx import Kernel, Unsupported, operands, read, vector

INS = struct.Struct("<Q4i6i2i4i2q3Q")  # Ins of machine.h
SHARED_BASE, NONE = 1024, -1
KEEPS_LANES, IS_TARGET, STAMPS = 1, 2, 4
REGISTER_BYTES = {"pred": 4, "b8": 2, "f32": 4, "f64": 8} | {f"{k}{n}": n // 8 for k in "bus" for n in (16, 32, 64)}
SPECIAL = {
    "%tid.x": 0, "%ctaid.x": 1, "%ctaid.y": 2, "%ctaid.z": 3, "%nctaid.x": 4, "%nctaid.y": 5, "%nctaid.z": 6
}  # fmt: skip
# Opcodes without operands that matter, and their handlers
SIMPLE = {
    "ret": "ret", "exit": "ret", "trap": "trap", "fence.proxy.async": "proxy_fence",
    "fence.proxy.async.shared::cta": "proxy_fence", "fence.mbarrier_init.release.cluster": "nop",
    "setmaxnreg.inc.sync.aligned.u32": "nop", "setmaxnreg.dec.sync.aligned.u32": "nop",
}  # fmt: skip
REDUCTIONS = (
    "add", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32", "min.f32", "max.f32"
)  # fmt: skip
SPACES = {"global": 0, "shared": 1, "shared::cta": 1, "param": 2}

_rules: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def _rule(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The method translates the opcodes that match, with the match's groups and the operands."""

    def register(method: Callable[..., None]) -> Callable[..., None]:
        _rules.append((re.compile(pattern), method))
        return method

    return register


class Translator:
    """One kernel's translation, by `run`.

    Args:
        text: the PTX of a module.
        find: the address of a handler of the library by its name; None if there is none.
        params: the address of the parameters.
    """

    def __init__(self, text: str, find: Callable[[str], int | None], params: int) -> None:
        self.kernel: Kernel = read(text)
        self.instructions: list[list[int]] = []
        self.pool: list[int] = []
        self.constants: dict[tuple[int, int], int] = {}
        self.register_bytes = 7 * 128  # special registers
        self.kept: list[object] = []  # strings that instructions point to
        self._find, self._params_address = find, params
        self._registers: dict[str, tuple[int, int]] = {}  # offset and bytes
        self._prefixes: dict[str, int] = {}
        self._scopes: list[dict[str, str]] = [{}]
        self._labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        self._branches: list[tuple[int, list[str]]] = []
        self._offsets = {name: offset for name, offset, _ in self.kernel.params}
        self._message = b"?"
        self._used: list[set[int]] = []  # registers, by each instruction but wgmma
        self._wgmma: set[int] = set()  # registers that wgmma uses
        self._line, self._guard, self._negated, self._unique, self._last_label = 0, NONE, 0, 0, ""

    def run(self) -> Translator:
        """Translate.

        Raises:
            Unsupported: a statement without a counterpart.
        """
        for line, statement in self.kernel.statements:
            self._line, self._guard, self._negated = line, NONE, 0
            try:
                self._statement(statement)
            except Unsupported as error:
                raise Unsupported(f"{self.kernel.name}, PTX line {self._line}: {statement[:200]}: {error}") from None
        self._guard = NONE
        self._emit("ret")
        self._resolve()
        return self

    def _resolve(self) -> None:
        for index, names in self._branches:
            targets = [self._labels[name] for name in names]
            if len(names) == 1:
                self.instructions[index][13] = targets[0]
            start = self.instructions[index][11]
            self.pool[start : start + len(names)] = targets
            for target in targets:
                self.instructions[target][1] |= IS_TARGET
        for ins, used in zip(self.instructions, self._used, strict=True):
            if self._wgmma.intersection(used):
                ins[1] |= STAMPS

    # Registers and constants

    def _allocate(self, size: int) -> int:
        offset = self.register_bytes
        self.register_bytes += size * 32
        return offset

    def _constant(self, value: int, size: int) -> int:
        key = value % (1 << 8 * size), size
        return -256 * (self.constants.setdefault(key, len(self.constants)) + 1)

    def _register(self, name: str) -> tuple[int, int]:
        """Its offset and bytes."""
        name = name.strip()
        for scope in reversed(self._scopes):
            name = scope.get(name, name)
        if name not in self._registers:
            size = self._prefixes.get(name.rstrip("0123456789"))
            if size is None:
                raise Unsupported(f"the register {name} isn't declared")
            self._registers[name] = self._allocate(size), size
        return self._registers[name]

    def _source(self, text: str, size: int) -> int:
        """The offset of an operand of `size` bytes: a register, of which it may be the lower part, or a constant."""
        if text in SPECIAL and size == 4:
            return SPECIAL[text] * 128
        if text in ("%tid.y", "%tid.z"):
            return self._constant(0, size)
        if text == "global_smem":
            return self._constant(SHARED_BASE, size)
        if text in self._offsets:
            return self._constant(self._offsets[text], size)
        if text in self.kernel.strings:
            return self._constant(self._string(self.kernel.strings[text]), size)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return self._constant(int(text.rstrip("U"), 0), size)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return self._constant(int(text[2:], 16), size)
        offset, own = self._register(text)
        if own < size:
            raise Unsupported(f"{text} has {own} bytes, and the instruction reads {size}")
        if own > size:
            part = self._allocate(size)
            self._emit(f"cvt.u{8 * size}.u{8 * own}", d=part, d_bytes=size, flags=KEEPS_LANES, a=offset)
            return part
        return offset

    def _sources(self, texts: list[str], size: int) -> list[int]:
        return [self._source(text, size) for text in texts]

    def _target(self, text: str, size: int) -> int:
        if text == "_":
            return self._allocate(size)
        offset, own = self._register(text)
        if own != size:
            raise Unsupported(f"{text} has {own} bytes, and the instruction writes {size}")
        return offset

    def _string(self, value: bytes) -> int:
        buffer = ctypes.create_string_buffer(value)
        self.kept.append(buffer)
        return ctypes.addressof(buffer)

    def _address(self, text: str) -> tuple[int, int, int]:
        """Of "[%rd1+16]": the offset of a register or constant, its bytes, and the displacement."""
        base, _, displacement = text.strip("[] ").partition("+")
        base, moved = base.strip(), int(displacement.strip() or "0", 0)
        if base.startswith("%"):
            return *self._register(base), moved
        return self._source(base, 4), 4, moved

    def _shared_address(self, text: str) -> tuple[int, int]:
        offset, size, moved = self._address(text)
        return offset if size == 4 else self._source(text.strip("[] ").partition("+")[0].strip(), 4), moved

    def _emit(
        self, opcode: str, *, flags: int = 0, d: int = NONE, d_bytes: int = 0, a: int = NONE, b: int = NONE,
        c: int = NONE, e: int = NONE, more: list[int] | tuple[int, ...] = (), x: tuple[int, ...] = (), imm: int = 0,
        imm2: int = 0,
    ) -> None:  # fmt: skip
        run = self._find("op_" + alu.handler(opcode))
        if run is None:
            raise Unsupported(f"no handler of {opcode}")
        start = len(self.pool)
        self.pool.extend(more)
        x = (*x, *[0] * (4 - len(x)))
        guard = (self._guard, self._negated)
        operands = (d, d_bytes, a, b, c, e)
        self.instructions.append([run, flags, self._line, *guard, *operands, start, len(more), *x, imm, imm2, 0, 0, 0])
        self._used.append({d, a, b, c, e, *more} if opcode != "wgmma" else set())

    # Statements

    def _statement(self, text: str) -> None:
        if text == "{":
            self._scopes.append({})
        elif text == "}":
            self._scopes.pop()
        elif text.endswith(":"):
            self._last_label = text[:-1]
            self._labels[self._declare(self._last_label)] = len(self.instructions)
        elif text.startswith(".branchtargets"):
            self._tables[self._last_label] = [part.strip() for part in text.split(None, 1)[1].split(",")]
        elif found := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
            self._declare_registers(REGISTER_BYTES[found[1]], found[2])
        elif not text or text.startswith((".pragma", ".param")):
            pass
        else:
            if found := re.fullmatch(r"@(!?)(\S+) (.*)", text):
                self._guard, self._negated = self._register(found[2])[0], int(found[1] == "!")
                text = found[3]
            self._instruction(*text.partition(" ")[::2])

    def _declare(self, name: str) -> str:
        """A name of its own for what a scope within braces declares."""
        if len(self._scopes) == 1:
            return name
        self._unique += 1
        return self._scopes[-1].setdefault(name, f"{name}@{self._unique}")

    def _declare_registers(self, size: int, names: str) -> None:
        for name in (part.strip() for part in names.split(",")):
            if found := re.fullmatch(r"(%[a-zA-Z_]+)<\d+>", name):
                self._prefixes[found[1]] = size
            else:
                self._registers[self._declare(name)] = self._allocate(size), size

    def _instruction(self, opcode: str, rest: str) -> None:
        given = operands(rest)
        form = alu.FORMS.get(opcode)
        if form and len(given) == 1 + len(form.operands) and not any(x.startswith("{") for x in given):
            sizes = [alu.BYTES[kind] for kind in form.operands]
            sources: dict[str, Any] = dict(zip("abce", map(self._source, given[1:], sizes), strict=False))
            size = alu.BYTES[form.result]
            self._emit(opcode, flags=KEEPS_LANES, d=self._target(given[0], size), d_bytes=size, **sources)
            if opcode.startswith("mov") and given[1].startswith("assertMessage"):
                self._message = self.kernel.strings[given[1]]
            return None
        if opcode in SIMPLE:
            return self._emit(SIMPLE[opcode])
        for pattern, method in _rules:
            if found := pattern.fullmatch(opcode):
                return method(self, given, *found.groups())
        raise Unsupported("an instruction, or a form of one, that the virtual GPU doesn't model")

    @_rule(r"((?:min|max)(?:\.NaN)?\.f32)")
    def _of_three(self, given: list[str], opcode: str) -> None:
        part = self._allocate(4)
        a, b, c = self._sources(given[1:], 4)
        self._emit(opcode, flags=KEEPS_LANES, d=part, d_bytes=4, a=a, b=b)
        self._emit(opcode, flags=KEEPS_LANES, d=self._target(given[0], 4), d_bytes=4, a=part, b=c)

    @_rule(r"cvta\.param\.u64")
    def _param_address(self, given: list[str]) -> None:
        a, b = self._source(given[1], 8), self._constant(self._params_address, 8)
        self._emit("add.u64", flags=KEEPS_LANES, d=self._target(given[0], 8), d_bytes=8, a=a, b=b)

    @_rule(r"mov\.b(32|64)")
    def _pack(self, given: list[str], bits: str) -> None:
        target, source, size = given[0], given[1], int(bits) // 8
        parts = vector(target if target.startswith("{") else source)
        width = size // len(parts)
        if target.startswith("{"):
            into = [self._target(part, width) for part in parts]
            self._emit("unpack", a=self._source(source, size), more=into, x=(width,))
        else:
            self._emit("pack", d=self._target(target, size), more=self._sources(parts, width), x=(width,))

    # Memory

    @_rule(r"ld\.(global|shared|shared::cta|param)(?:\.v[248])?\.([busf])(8|16|32|64)")
    def _load(self, given: list[str], space: str, kind: str, bits: str) -> None:
        element, width = int(bits) // 8, self._register(vector(given[0])[0])[1]
        into = [self._target(part, width) for part in vector(given[0])]
        if width < element:
            raise Unsupported("a register that is narrower than its value")
        a, size, moved = self._address(given[1])
        x = (element, width, SPACES[space], int(kind == "s"))
        self._emit("load", d_bytes=size, a=a, more=into, x=x, imm=moved)

    @_rule(r"st\.(global|shared|shared::cta)(?:\.v[248])?\.[busf](8|16|32|64)")
    def _store(self, given: list[str], space: str, bits: str) -> None:
        element, values = int(bits) // 8, vector(given[1])
        width = max((self._register(x)[1] for x in values if x.startswith("%")), default=max(element, 2))
        a, size, moved = self._address(given[0])
        x = (element, width, SPACES[space])
        self._emit("store", d_bytes=size, a=a, more=self._sources(values, width), x=x, imm=moved)

    @_rule(r"st\.param\.\w+")
    def _argument(self, given: list[str]) -> None:
        pass  # of __assertfail, whose message is known

    @_rule(r"atom\.(?:relaxed\.)?(?:sys\.)?(global|shared)\.(?:relaxed\.)?(?:gpu\.)?(add|cas|exch|or|and)\.[bu](32|64)")
    def _atomic(self, given: list[str], space: str, operation: str, bits: str) -> None:
        size = int(bits) // 8
        a, address_size, moved = self._address(given[1])
        others: dict[str, Any] = dict(zip("bc", self._sources(given[2:], size), strict=False))
        x = (size, ("add", "cas", "exch", "or", "and").index(operation), SPACES[space])
        into = NONE if given[0] == "_" else self._target(given[0], size)
        self._emit("atomic", d=into, d_bytes=address_size, a=a, x=x, imm=moved, **others)

    @_rule(r"cp\.async\.c[ag]\.shared\.global")
    def _copy(self, given: list[str]) -> None:
        d, moved = self._shared_address(given[0])
        a, _, moved_source = self._address(given[1])
        b = self._source(given[3], 4) if len(given) > 3 else NONE
        self._emit("cp_async", d=d, imm=moved, a=a, imm2=moved_source, b=b, x=(int(given[2], 0),))

    @_rule(r"cp\.async\.(commit|wait)_group")
    def _copy_group(self, given: list[str], what: str) -> None:
        self._emit(f"cp_async_{what}", x=(int(given[0]),) if given else ())

    @_rule(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")
    def _matrix(self, given: list[str], way: str, transposed: str | None) -> None:
        address, registers = given if way == "st" else given[::-1]
        a, moved = self._shared_address(address)
        into = [self._target(part, 4) for part in vector(registers)]
        self._emit(f"{way}matrix", a=a, imm=moved, more=into, x=(int(bool(transposed)),))

    # Matrix products

    @_rule(r"mma\.sync\.aligned\.(?:m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1|m16n8k8\.row\.col\.f32\.tf32\.tf32)\.f32")
    def _mma(self, given: list[str], kind: str | None) -> None:
        into = [self._target(part, 4) for part in vector(given[0])]
        registers = [*into, *(self._source(part, 4) for text in given[1:] for part in vector(text))]
        self._emit("mma" if kind else "mma_tf32", more=registers, x=(int(kind == "bf16"),))

    @_rule(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2")
    def _wgmma_product(self, given: list[str], n: str, kind: str) -> None:
        registers = [self._target(part, 4) for part in vector(given[0])]
        in_registers = given[1].startswith("{")
        if in_registers:
            registers += self._sources(vector(given[1]), 4)
        self._wgmma.update(registers)
        scales, transposed = [int(x) for x in given[4:6]], [int(x) for x in given[6:]]
        flags = 2 * transposed[-1] + (0 if in_registers else transposed[0])
        self._emit(
            "wgmma",
            a=NONE if in_registers else self._source(given[1], 8),
            b=self._source(given[2], 8),
            c=self._source(given[3], 4),
            more=registers,
            x=(int(n), int(in_registers), int(kind == "bf16"), flags),
            imm=int(scales[0] != scales[1]),
        )

    @_rule(r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned")
    def _wgmma_order(self, given: list[str], what: str) -> None:
        self._emit("wgmma_" + what.removesuffix("_group"), x=(int(given[0]),) if given else ())

    @_rule(r"cp\.async\.bulk\.tensor\.[123]d\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes")
    def _tma(self, given: list[str]) -> None:
        d, moved = self._shared_address(given[0])
        descriptor, coordinates = operands(given[1].strip("[] "))
        b, moved_barrier = self._shared_address(given[2])
        at = self._sources(vector(coordinates), 4)
        self._emit("tma_load", d=d, imm=moved, a=self._source(descriptor, 8), b=b, imm2=moved_barrier, more=at)

    # Order

    @_rule(r"mbarrier\.(init|inval|arrive|arrive\.expect_tx|try_wait\.parity)\.shared(?:::cta)?\.b64")
    def _mbarrier(self, given: list[str], what: str) -> None:
        returns = what.startswith(("arrive", "try_wait"))
        a, moved = self._shared_address(given[int(returns)])
        number = self._source(given[-1], 4) if len(given) > 1 + returns else NONE
        if what == "try_wait.parity":
            self._emit("mbar_wait", d=self._target(given[0], 4), a=a, imm=moved, b=number)
        elif what == "arrive":
            self._emit("mbar_arrive", a=a, imm=moved, c=number)
        else:
            self._emit("mbar_" + what.partition(".")[0], a=a, imm=moved, b=number)

    @_rule(r"(?:bar|barrier)\.sync(?:\.aligned)?")
    def _barrier(self, given: list[str]) -> None:
        others: dict[str, Any] = dict(zip("ab", self._sources(given, 4), strict=False))
        self._emit("barrier", **others)

    @_rule(r"bar\.warp\.sync")
    def _warp_barrier(self, given: list[str]) -> None:
        if given != ["-1"]:
            raise Unsupported(f"the lanes {given[0]}")
        self._emit("warp_barrier")

    # Lanes

    @_rule(r"shfl\.sync\.(bfly|up|down|idx)\.b32")
    def _shuffle(self, given: list[str], how: str) -> None:
        into, _, found = given[0].partition("|")
        a, b, c = self._sources(given[1:4], 4)
        e = self._target(found, 4) if found else NONE
        kind = ("bfly", "up", "down", "idx").index(how)
        self._emit("shuffle", d=self._target(into, 4), a=a, b=b, c=c, e=e, x=(kind,))

    @_rule(rf"redux\.sync\.(add\.[su]32|{'|'.join(map(re.escape, REDUCTIONS))})")
    def _reduce(self, given: list[str], what: str) -> None:
        kind = REDUCTIONS.index("add" if what.startswith("add") else what)
        self._emit("redux", d=self._target(given[0], 4), a=self._source(given[1], 4), x=(kind,))

    @_rule(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred)")
    def _vote(self, given: list[str], what: str) -> None:
        kind = ("ballot.b32", "any.pred", "all.pred").index(what)
        a = self._source(given[1].lstrip("!"), 4)
        self._emit("vote", d=self._target(given[0], 4), a=a, x=(kind, int(given[1].startswith("!"))))

    @_rule(r"elect\.sync")
    def _elect(self, given: list[str]) -> None:
        into, _, leads = given[0].partition("|")
        self._emit("elect", d=self._target(into, 4), e=self._target(leads.strip(), 4))

    # Control

    @_rule(r"bra(?:\.uni)?")
    def _branch(self, given: list[str]) -> None:
        name = given[0]
        for scope in reversed(self._scopes):
            name = scope.get(name, name)
        self._branches.append((len(self.instructions), [name]))
        self._emit("bra", more=[0])

    @_rule(r"brx\.idx")
    def _branch_table(self, given: list[str]) -> None:
        a, names = self._source(given[0], 4), self._tables[given[1]]
        self._branches.append((len(self.instructions), names))
        self._emit("brx", a=a, more=[0] * len(names))

    @_rule(r"call\.uni")
    def _call(self, given: list[str]) -> None:
        if given[0] != "__assertfail":
            raise Unsupported("a call")
        self._emit("assertfail", imm=self._string(self._message))
