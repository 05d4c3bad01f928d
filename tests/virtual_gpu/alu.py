"""Instructions that compute each lane's result from its operands: one table for the translator and for the C source."""

from __future__ import annotations

from typing import NamedTuple

C_TYPES = {
    "pred": "u32",
    "f32": "float",
    "f64": "double",
    "bf16": "u16",
    "f16": "u16",
    **{f"{kind}{bits}": f"{'s' if kind == 's' else 'u'}{bits}" for kind in "usb" for bits in (8, 16, 32, 64)},
    **{f"{kind}x2": "u64" if kind == "f32" else "u32" for kind in ("f32", "f16", "bf16")},
}
BYTES = {"float": 4, "double": 8, **{f"{kind}{bits}": bits // 8 for kind in "us" for bits in (8, 16, 32, 64)}}


class Form(NamedTuple):
    """An instruction.

    Attributes:
        result: the type of the result, one of C.
        operands: the types of the operands.
        expression: the result in C, of a, b, c and e.
    """

    result: str
    operands: tuple[str, ...]
    expression: str


INTS = "u16 s16 u32 s32 u64 s64"
BITS = "b16 b32 b64"
FLOATS = "f32 ftz.f32 f64"
# Opcode; types that follow it; types of the result and of the operands: t is the opcode's own, w twice as wide; result.
# Divisions by zero, which PTX leaves open, give -1.
_ROWS = (
    ("add", INTS, "t", "t t", "a + b"),
    ("sub", INTS, "t", "t t", "a - b"),
    ("mul.lo", INTS, "t", "t t", "a * b"),
    ("mul.hi", "u32 s32", "t", "t t", "(T)(((W)a * (W)b) >> 32)"),
    ("mul.hi", "u64", "t", "t t", "(T)(((unsigned __int128)a * b) >> 64)"),
    ("mul.wide", "u16 s16 u32 s32", "w", "t t", "(W)a * (W)b"),
    ("mad.lo", INTS, "t", "t t t", "a * b + c"),
    ("mad.wide", "u16 s16 u32 s32", "w", "t t w", "(W)a * (W)b + c"),
    ("div", "u32 u64", "t", "t t", "b ? a / b : (T)-1"),
    ("div", "s32 s64", "t", "t t", "b == 0 ? -1 : b == -1 ? -a : a / b"),
    ("rem", "u32 u64", "t", "t t", "b ? a % b : a"),
    ("rem", "s32 s64", "t", "t t", "b == 0 ? a : b == -1 ? 0 : a % b"),
    ("min", INTS, "t", "t t", "a < b ? a : b"),
    ("max", INTS, "t", "t t", "a > b ? a : b"),
    ("max.relu", "s32", "t", "t t", "a > b ? (a > 0 ? a : 0) : b > 0 ? b : 0"),
    ("neg", "s16 s32 s64", "t", "t", "-a"),
    ("abs", "s16 s32 s64", "t", "t", "a < 0 ? -a : a"),
    ("and", f"pred {BITS}", "t", "t t", "a & b"),
    ("or", f"pred {BITS}", "t", "t t", "a | b"),
    ("xor", f"pred {BITS}", "t", "t t", "a ^ b"),
    ("not", "pred", "t", "t", "!a"),
    ("not", BITS, "t", "t", "~a"),
    ("shl", BITS, "t", "t u32", "b < 8 * sizeof a ? a << b : 0"),
    ("shr", "b16 b32 b64 u16 u32 u64", "t", "t u32", "b < 8 * sizeof a ? a >> b : 0"),
    ("shr", "s16 s32 s64", "t", "t u32", "a >> (b < 8 * sizeof a ? b : 8 * sizeof a - 1)"),
    ("shf.l.wrap", "b32", "t", "t t u32", "(u32)(((u64)b << 32 | a) << (c & 31) >> 32)"),
    ("shf.r.wrap", "b32", "t", "t t u32", "(u32)(((u64)b << 32 | a) >> (c & 31))"),
    ("bfe", "u32", "t", "t u32 u32", "field(a, b, c, 0)"),
    ("bfe", "s32", "t", "t u32 u32", "(s32)field((u32)a, b, c, 1)"),
    ("prmt", "b32", "t", "t t t", "permuted(a, b, c)"),
    ("lop3", "b32", "t", "t t t u32", "looked_up(a, b, c, e)"),
    ("popc", "b32", "t", "t", "(u32)__builtin_popcount(a)"),
    ("clz", "b32", "t", "t", "a ? (u32)__builtin_clz(a) : 32"),
    ("brev", "b32", "t", "t", "reversed(a)"),
    ("mov", f"pred u16 s16 u32 s32 u64 s64 f32 f64 {BITS}", "t", "t", "a"),
    ("cvta.global", "u64", "t", "t", "a"),
    ("cvta.shared", "u64", "t", "t", "a"),
    ("selp", f"u16 s16 u32 s32 u64 s64 f32 f64 {BITS}", "t", "t t pred", "c ? a : b"),
    *((f"{op}{how}", FLOATS, "t", "t t", f"a {sign} b") for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))
      for how in ("", ".rn")),
    *((f"{op}{how}", "f32x2", "t", "t t", f"pair(low(a) {sign} low(b), high(a) {sign} high(b))")
      for op, sign in (("add", "+"), ("sub", "-"), ("mul", "*")) for how in ("", ".rn")),
    ("mul", "bf16x2", "t", "t t", "both(to_bf16(first(a) * first(b)), to_bf16(second(a) * second(b)))"),
    ("fma.rn", "f32 ftz.f32", "t", "t t t", "__builtin_fmaf(a, b, c)"),
    ("fma.rn", "f64", "t", "t t t", "__builtin_fma(a, b, c)"),
    ("fma.rn", "f32x2", "t", "t t t",
     "pair(__builtin_fmaf(low(a), low(b), low(c)), __builtin_fmaf(high(a), high(b), high(c)))"),
    *((f"div.{how}", "f32 ftz.f32", "t", "t t", "a / b") for how in ("full", "rn", "approx")),
    ("neg", FLOATS, "t", "t", "-a"),
    ("abs", FLOATS, "t", "t", "fabs(a)"),
    ("min", FLOATS, "t", "t t", "a != a ? b : b != b ? a : a < b ? a : b"),
    ("max", FLOATS, "t", "t t", "a != a ? b : b != b ? a : a > b ? a : b"),
    ("min.NaN", "f32", "t", "t t", "a != a ? a : b != b ? b : a < b ? a : b"),
    ("max.NaN", "f32", "t", "t t", "a != a ? a : b != b ? b : a > b ? a : b"),
    ("ex2.approx", "f32 ftz.f32", "t", "t", "power(a)"),
    ("lg2.approx", "f32 ftz.f32", "t", "t", "log2f(a)"),
    ("rcp.approx", "f32 ftz.f32", "t", "t", "1.0f / a"),
    ("rcp.rn", "f32", "t", "t", "1.0f / a"),
    ("sqrt.approx", "f32 ftz.f32", "t", "t", "__builtin_sqrtf(a)"),
    ("sqrt.rn", "f32", "t", "t", "__builtin_sqrtf(a)"),
    ("rsqrt.approx", "f32 ftz.f32", "t", "t", "1.0f / __builtin_sqrtf(a)"),
    ("tanh.approx", "f32", "t", "t", "tanhf(a)"),
    *((f"setp.{name}", types, "pred", "t t", f"a {sign} b")
      for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
      for types in ((f"{INTS} {BITS}",) if sign in ("==", "!=") else (INTS,))),
    *((f"setp.{name}", FLOATS, "pred", "t t", f"a {sign} b")
      for name, sign in (("eq", "=="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("neu", "!="))),
    ("setp.ne", FLOATS, "pred", "t t", "a < b || a > b"),
    *((f"setp.{name}", FLOATS, "pred", "t t", f"!(a {sign} b)")
      for name, sign in (("ltu", ">="), ("leu", ">"), ("gtu", "<="), ("geu", "<"))),
    ("setp.equ", FLOATS, "pred", "t t", "!(a < b || a > b)"),
    ("setp.num", FLOATS, "pred", "t t", "a == a && b == b"),
    ("setp.nan", FLOATS, "pred", "t t", "a != a || b != b"),
)  # fmt: skip
# Conversions: type of the result, of the operand, and the result in C; opcode with its rounding
_CONVERSIONS = (
    *((f"cvt.{to}", to, at, f"({C_TYPES[to]})a") for to in INTS.split() for at in f"{INTS} u8 s8".split()),
    *((f"cvt.rn.{to}", to, at, f"({C_TYPES[to]})a") for to in ("f32", "f64") for at in INTS.split()),
    *((f"cvt.{how}.{to}", to, "f32", f"to_{to}({rounded}(a))") for to in ("s32", "u32", "s64")
      for how, rounded in (("rzi", "truncf"), ("rni", "rintf"), ("rmi", "floorf"), ("rpi", "ceilf"))),
    *((f"cvt.{how}.f32", "f32", "f32", f"{rounded}(a)")
      for how, rounded in (("rzi", "truncf"), ("rni", "rintf"), ("rmi", "floorf"), ("rpi", "ceilf"))),
    ("cvt.f32", "f32", "bf16", "from_bf16(a)"),
    ("cvt.f32", "f32", "f16", "from_f16(a)"),
    ("cvt.rn.bf16", "bf16", "f32", "to_bf16(a)"),
    ("cvt.rn.f16", "f16", "f32", "to_f16(a)"),
    ("cvt.f64", "f64", "f32", "a"),
    ("cvt.rn.f32", "f32", "f64", "(float)a"),
    ("cvt.rna.tf32", "b32", "f32", "(as_bits(a) + 0x1000) & 0xffffe000"),
)  # fmt: skip


def _forms() -> dict[str, Form]:
    """The form of each opcode, in C types."""
    found = {}
    for opcode, types, result, operands, expression in _ROWS:
        for suffix in types.split():
            own = C_TYPES[suffix.rpartition(".")[2]]
            wide = f"{own[0]}{2 * BYTES[own] * 8}"
            names = {"t": own, "w": wide, "u32": "u32", "pred": "u32"}
            text = expression.replace("(T)", f"({own})").replace("(W)", f"({wide})")
            found[f"{opcode}.{suffix}"] = Form(names[result], tuple(names[x] for x in operands.split()), text)
    for opcode, to, at, expression in _CONVERSIONS:
        found[f"{opcode}.{at}"] = Form(C_TYPES[to], (C_TYPES[at],), expression)
    for kind in ("bf16", "f16"):
        found[f"cvt.rn.{kind}x2.f32"] = Form("u32", ("float", "float"), f"both(to_{kind}(b), to_{kind}(a))")
    return found


FORMS = _forms()


def handler(opcode: str) -> str:
    """The name of the C function that executes it, without op_."""
    return opcode.replace(".", "_")


def source() -> str:
    """The C source of all of them."""
    lines = ['#include "alu.h"']
    for opcode, form in FORMS.items():
        types = ", ".join((form.result, *form.operands))
        lines.append(f"ALU{len(form.operands)}({handler(opcode)}, {types}, {form.expression})")
    return "\n".join(lines) + "\n"
