// What the instructions of alu.py compute with.

#include "machine.h"

static inline u32 field(u32 a, u32 b, u32 c, int is_signed) {
  u32 from = b & 255, n = c & 255, sign = is_signed && n ? a >> (from + n - 1 < 31 ? from + n - 1 : 31) & 1 : 0;
  u64 value = from < 32 ? a >> from : 0, mask = n < 32 ? (1ull << n) - 1 : 0xffffffff;
  u32 width = from < 32 ? 32 - from : 0;
  u64 known = n < width ? mask : width < 32 ? (1ull << width) - 1 : 0xffffffff;
  return (u32)((value & known) | (sign ? ~known : 0));
}
static inline u32 permuted(u32 a, u32 b, u32 c) {
  u64 bytes = (u64)b << 32 | a;
  u32 d = 0;
  for (int k = 0; k < 4; k++) {
    u32 pick = c >> 4 * k & 15, byte = (u32)(bytes >> 8 * (pick & 7)) & 255;
    d |= (pick & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
  }
  return d;
}
static inline u32 looked_up(u32 a, u32 b, u32 c, u32 table) {
  u32 d = 0;
  for (int k = 0; k < 8; k++)
    if (table >> k & 1)
      d |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return d;
}
static inline u32 reversed(u32 a) {
  u32 d = 0;
  for (int k = 0; k < 32; k++)
    d |= (a >> k & 1) << (31 - k);
  return d;
}
static inline float low(u64 a) { return as_float((u32)a); }
static inline float high(u64 a) { return as_float((u32)(a >> 32)); }
static inline u64 pair(float a, float b) { return (u64)as_bits(b) << 32 | as_bits(a); }
static inline float first(u32 a) { return from_bf16((u16)a); }
static inline float second(u32 a) { return from_bf16((u16)(a >> 16)); }
static inline u32 both(u16 a, u16 b) { return (u32)b << 16 | a; }
static inline s32 to_s32(float a) {
  return a != a ? 0 : a >= 0x1p31f ? INT32_MAX : a <= -0x1p31f ? INT32_MIN : (s32)a;
}
static inline u32 to_u32(float a) { return !(a > 0) ? 0 : a >= 0x1p32f ? UINT32_MAX : (u32)a; }
static inline s64 to_s64(float a) {
  return a != a || a <= -0x1p63f ? INT64_MIN : a >= 0x1p63f ? INT64_MAX : (s64)a;
}
static inline float power(float x) {  // 2**x to about 1 unit in the last place, in a form that compilers vectorise
  float n = rintf(x);
  n = n < -160 ? -160 : n > 130 ? 130 : n;
  float f = x - n, p = 1.5252734e-5f;
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  s32 k = (s32)n, half = k / 2;
  float r = p * as_float((u32)(half + 127) << 23) * as_float((u32)(k - half + 127) << 23);
  r = x < -126 ? 0 : x >= 128 ? INFINITY : r;
  return x != x ? x : r;
}

// A handler of an instruction of n operands, for all lanes: the type of the result, those of the operands, the result
#define TAKE(T, x) T x = R(T, i->x)[l];
#define ALU(name, D, take, ...)                                                                                        \
  OP(name) {                                                                                                           \
    D *d = R(D, i->d);                                                                                                 \
    _Pragma("GCC ivdep") EACH { take d[l] = __VA_ARGS__; }                                                                               \
    return NEXT;                                                                                                       \
  }
#define ALU1(name, D, A, ...) ALU(name, D, TAKE(A, a), __VA_ARGS__)
#define ALU2(name, D, A, B, ...) ALU(name, D, TAKE(A, a) TAKE(B, b), __VA_ARGS__)
#define ALU3(name, D, A, B, C, ...) ALU(name, D, TAKE(A, a) TAKE(B, b) TAKE(C, c), __VA_ARGS__)
#define ALU4(name, D, A, B, C, E, ...) ALU(name, D, TAKE(A, a) TAKE(B, b) TAKE(C, c) TAKE(E, e), __VA_ARGS__)
