// The state of the virtual GPU: one multiprocessor that runs one program (a block of warps) after another.
//
// machine.c schedules warps and launches; memory.c moves data and knows races; tensor.c has mma, wgmma, mbarriers and
// TMA; alu.c is written by alu.py. Python translates PTX into `Ins`, whose `run` is the handler for the 32 lanes of a
// warp. A register is 32 values in a row; operands are byte offsets from `Warp.regs`, constants lie at negative ones.

#pragma once
#include "cuda.h"
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

enum { LANES = 32, MAX_WARPS = 32, MAX_MBARS = 32, CLOCKS = MAX_WARPS + MAX_MBARS };
enum { SHARED_BASE = 1024 };  // the address of a program's first byte of shared memory
enum { NONE = -1 };           // no operand
enum { KEEPS_LANES = 1, IS_TARGET = 2, STAMPS = 4 };  // flags: d keeps masked lanes; a branch leads here; wgmma uses its registers
enum { NEXT, STOP, JUMPED };  // what a handler returns: go on, let another warp run, go on at w->pc

typedef struct Warp Warp;
typedef struct Ins Ins;

struct Ins {
  int (*run)(Warp *, const Ins *);
  s32 flags, line, guard, negated;  // guard: a predicate or NONE
  s32 d, d_bytes, a, b, c, e;       // operands; d_bytes of the one destination that masked lanes keep
  s32 list, n;                      // n further operands, in Program.pool
  s32 x[4];                         // settings of the handler
  s64 imm, imm2;
  u64 runs, lanes, waves;           // counted: by warps, by lanes, passes over shared memory or 32-byte sectors
};

typedef struct {
  Ins *ins;
  s32 *pool;
  u64 *constants;  // constant k lies at offset -256 * (k + 1)
  s32 (*params)[2];  // offset and bytes
  s32 num_ins, num_constants, num_params, param_bytes, register_bytes, threads;
  char name[104];
} Program;

// Special registers, 128 bytes each, at offset 0 of the registers
enum { TID, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, SPECIALS };

// A vector clock: entry t is the last event of t that is known to have happened. Threads are warps, then mbarriers, on
// whose behalf TMA writes.
typedef struct {
  u32 of[CLOCKS];
} Clock;

typedef struct {
  u32 address;
  int valid;
  s32 count, pending;
  s64 bytes;  // that TMA still has to write
  u32 phase, clock;
  u32 maker, made, used[MAX_WARPS];  // the warp that initialised it, when; each warp's last use
  Clock seen, proxied, next_seen, next_proxied;
} Mbar;

typedef struct {  // cp.async in flight
  u64 source;
  u32 target, bytes, source_bytes, group;
} Copy;

typedef struct {  // wgmma in flight
  const Ins *ins;
  u64 descriptors[2];
  u32 group;
  int keeps, first;  // whether it adds to its accumulators; whether `accumulators` holds them
  u32 a[4][LANES];
  float (*accumulators)[LANES];
} Flight;

struct Warp {
  u8 *regs;
  int id;
  u32 mask, active, live;  // lanes: of the current instruction, of the current path, that haven't returned
  u32 waiting;             // lanes at bar.warp.sync, until all that haven't returned are
  s32 pc, lane_pc[LANES];
  const Ins *ins;
  enum { RUNS, AT_BARRIER, AT_MBARRIER, DONE } state;
  u32 barrier, barrier_threads, parity;
  Mbar *mbar;
  Clock seen, proxied;  // events before now; those of them that a proxy fence made visible to wgmma and TMA
  Copy *copies;
  u32 num_copies, room, copy_group;
  Flight *flights;
  u32 num_flights, wgmma_group;
  u32 *stamps, serial;  // when another instruction used a register of wgmma: the number of such instructions
  s64 fenced;           // at the last wgmma.fence; -1 before the first
};

// Settings, written by Python
extern u64 seed;
extern int races, preempts, fences_operands;

extern u8 *shared_memory, params[65536];
extern u32 shared_bytes, base_clock;
extern Warp warps[MAX_WARPS];
extern int num_warps, trapped;
extern const Program *program;
extern Mbar mbars[MAX_MBARS];

u32 draw(void);
void report(const Warp *, int lane, const char *format, ...);
int inside_argument(u64 address, u64 bytes);

static inline void join(Clock *a, const Clock *b) {
  for (int t = 0; t < CLOCKS; t++)
    if (b->of[t] > a->of[t])
      a->of[t] = b->of[t];
}

// memory.c
typedef enum { READ, WRITE, ASYNC_READ, ASYNC_WRITE, TMA_WRITE, ATOMIC } Access;
u8 *shared_at(Warp *, int lane, u32 address, u32 bytes, u32 align, Access, const u8 *written);
u8 *global_at(Warp *, int lane, u64 address, u32 bytes, u32 align, Access, const u8 *written);
void copied(Warp *, u32 address, u32 bytes, const Mbar *);
void fetched(Warp *, u32 address, u32 bytes);
void undefined(u8 *, u64 bytes);
void begin_launch_memory(void);
void end_launch_memory(void);
void begin_program_memory(void);
void end_program_memory(void);

// tensor.c
int deliver(void);
void begin_program_tensor(void);
int encode_map(CUtensorMap *, u32 bytes, u32 rank, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *, int,
               int);

#define R(T, offset) ((T *)(w->regs + (offset)))
#define EACH for (int l = 0; l < LANES; l++)
#define EACH_ACTIVE EACH if (w->mask >> l & 1)
#define OP(name) int op_##name(Warp *w, const Ins *i)

static inline float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline float from_bf16(u16 h) { return as_float((u32)h << 16); }
static inline u16 to_bf16(float f) {
  u32 x = as_bits(f);
  return f != f ? 0x7fff : (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
static inline float from_f16(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, rest = h & 0x7fff;
  float small = (float)rest * 0x1p-24f;  // a subnormal, exactly
  u32 bits = rest < 0x400 ? as_bits(small) : rest < 0x7c00 ? (rest << 13) + (112u << 23) : (rest << 13) + (224u << 23);
  return as_float(bits | sign);
}
static inline u16 to_f16(float f) {
  u32 x = as_bits(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff, bits;
  if (a >= 0x47800000)  // 65536 and more, infinity, NaN
    bits = a > 0x7f800000 ? 0x7fff : 0x7c00;
  else if (a < 0x38800000)  // a subnormal: adding 0.5 rounds it to a multiple of 2**-24
    bits = as_bits(as_float(a) + 0.5f) - 0x3f000000;
  else
    bits = (a - (112u << 23) + 0xfff + (a >> 13 & 1)) >> 13;
  return (u16)(f != f ? 0x7fff : sign | bits);
}
static inline float to_tf32(u32 x) { return as_float(x & 0xffffe000); }
