// Matrix products (mma, wgmma), mbarriers, and TMA.

#include "machine.h"

static float half(u32 pair, int high, int is_bf16) {
  u16 h = (u16)(high ? pair >> 16 : pair);
  return is_bf16 ? from_bf16(h) : from_f16(h);
}

// 16 x 16 elements of A from 4 registers: the fragment of mma and wgmma
static void fragment_a(float A[16][16], u32 (*a[4])[LANES], int is_bf16) {
  for (int k = 0; k < 4; k++)
    EACH for (int high = 0; high < 2; high++)
      A[(l >> 2) + (k & 1) * 8][(l & 3) * 2 + (k >> 1) * 8 + high] = half((*a[k])[l], high, is_bf16);
}

// m16n8k16. list: d (4), a (4), b (2), c (4); x: bf16
OP(mma) {
  const s32 *list = program->pool + i->list;
  float A[16][16], B[16][8], C[16][8];
  u32(*a[4])[LANES];
  if (w->mask != ~0u)
    report(w, 0, "mma in divergent code");
  for (int k = 0; k < 4; k++)
    a[k] = (u32(*)[LANES])R(u32, list[4 + k]);
  fragment_a(A, a, i->x[0]);
  for (int k = 0; k < 2; k++)
    EACH for (int high = 0; high < 2; high++)
      B[(l & 3) * 2 + 8 * k + high][l >> 2] = half(R(u32, list[8 + k])[l], high, i->x[0]);
  for (int k = 0; k < 4; k++)
    EACH C[(l >> 2) + (k >> 1) * 8][(l & 3) * 2 + (k & 1)] = R(float, list[10 + k])[l];
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++)
        C[r][n] += A[r][k] * B[k][n];
  for (int k = 0; k < 4; k++)
    EACH R(float, list[k])[l] = C[(l >> 2) + (k >> 1) * 8][(l & 3) * 2 + (k & 1)];
  return NEXT;
}

// m16n8k8 with tf32. list as of mma
OP(mma_tf32) {
  const s32 *list = program->pool + i->list;
  float A[16][8], B[8][8], C[16][8];
  if (w->mask != ~0u)
    report(w, 0, "mma in divergent code");
  for (int k = 0; k < 4; k++)
    EACH A[(l >> 2) + (k & 1) * 8][(l & 3) + (k >> 1) * 4] = to_tf32(R(u32, list[4 + k])[l]);
  for (int k = 0; k < 2; k++)
    EACH B[(l & 3) + 4 * k][l >> 2] = to_tf32(R(u32, list[8 + k])[l]);
  for (int k = 0; k < 4; k++)
    EACH C[(l >> 2) + (k >> 1) * 8][(l & 3) * 2 + (k & 1)] = R(float, list[10 + k])[l];
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 8; k++)
      for (int n = 0; n < 8; n++)
        C[r][n] += A[r][k] * B[k][n];
  for (int k = 0; k < 4; k++)
    EACH R(float, list[k])[l] = C[(l >> 2) + (k >> 1) * 8][(l & 3) * 2 + (k & 1)];
  return NEXT;
}

// wgmma m64nNk16: a warp computes 16 rows. list: accumulators (N / 2), then A's registers (4, if it isn't shared);
// a, b: descriptors, c: whether it adds to the accumulators; x: N, A in registers, bf16, transposed (A 1, B 2);
// imm: whether the product is subtracted. It runs at its wait: accumulators are undefined until then, and nobody may
// change an operand.
enum { SWIZZLE_NONE, SWIZZLE_128, SWIZZLE_64, SWIZZLE_32 };  // a descriptor's
static u32 swizzled(u32 address, u32 bits) { return address ^ (address >> 7 & ((1u << bits) - 1)) << 4; }

// The address of 8 elements in a row: `line` along M or N and `step` along K are their first's.
static u32 piece(u64 descriptor, u32 line, u32 step, int transposed) {
  u32 start = (u32)(descriptor & 0x3fff) << 4, leading = (u32)(descriptor >> 16 & 0x3fff) << 4;
  u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4, mode = (u32)(descriptor >> 62);
  u32 span = mode == SWIZZLE_NONE ? 8 : 128u >> mode;  // elements of a swizzled row
  u32 along = transposed ? line : step, across = transposed ? step : line;
  if (mode == SWIZZLE_NONE && transposed)
    return start + across / 8 * leading + along / 8 * stride + across % 8 * 16;
  u32 address = start + across / 8 * stride + across % 8 * span * 2 + along / span * leading + along % span * 2;
  return mode == SWIZZLE_NONE ? address : swizzled(address, 4 - mode);
}

// All pieces of an operand of `lines` x 16 elements; Visit gets the address of each
#define PIECES(descriptor, first_line, lines, transposed, visit)                                                       \
  for (u32 p_ = 0; p_ < (u32)(lines) * 2; p_++) {                                                                      \
    u32 line = (transposed) ? p_ % ((u32)(lines) / 8) * 8 : p_ / 2;                                                    \
    u32 step = (transposed) ? p_ / ((u32)(lines) / 8) : p_ % 2 * 8;                                                    \
    u32 address = piece(descriptor, (u32)(first_line) + line, step, transposed);                                       \
    visit                                                                                                              \
  }

static void gather(u64 descriptor, u32 first_line, u32 lines, int transposed, int is_bf16, float *to /* [lines][16] */) {
  PIECES(descriptor, first_line, lines, transposed, {
    u16 h[8] = {0};
    if (address >= SHARED_BASE && address + 16 <= SHARED_BASE + shared_bytes)
      memcpy(h, shared_memory + address - SHARED_BASE, 16);
    for (u32 k = 0; k < 8; k++)
      to[transposed ? (line + k) * 16 + step : line * 16 + step + k] = is_bf16 ? from_bf16(h[k]) : from_f16(h[k]);
  })
}

static float poison(const Ins *i, int k, int l) { return as_float(0x7fc00000u | (u32)(i->line * 64 + k) << 5 | (u32)l); }

static int same_accumulators(const Flight *f, const Ins *i) { return program->pool[f->ins->list] == program->pool[i->list]; }

// Take the accumulators out of the registers, whose values are undefined until the product's wait.
static void hide(Warp *w, Flight *f) {
  const s32 *list = program->pool + f->ins->list;
  f->first = 1;
  f->accumulators = malloc(sizeof(float[LANES]) * (u64)f->ins->x[0] / 2);
  for (int k = 0; k < f->ins->x[0] / 2; k++) {
    memcpy(f->accumulators[k], R(float, list[k]), sizeof(float[LANES]));
    EACH R(float, list[k])[l] = poison(f->ins, k, l);
  }
}

OP(wgmma) {
  const s32 *list = program->pool + i->list;
  if (w->mask != ~0u)
    report(w, 0, "wgmma in divergent code");
  if (w->num_flights == 512)
    return report(w, 0, "more than 512 wgmma in flight"), trapped = 1, STOP;
  Flight *f = &w->flights[w->num_flights];
  *f = (Flight){.ins = i, .group = w->wgmma_group, .keeps = (int)R(u32, i->c)[0] & 1};
  int chained = 0;
  for (u32 k = 0; k < w->num_flights; k++)
    chained |= same_accumulators(&w->flights[k], i);
  for (int k = 0; k < i->x[0] / 2 + (fences_operands ? 4 * i->x[1] : 0); k++)
    if (!(chained && k < i->x[0] / 2) && w->stamps[list[k] / 64] > w->fenced) {
      report(w, 0, "wgmma uses a register that another instruction used since the last wgmma.fence");
      break;
    }
  if (i->x[1])
    for (int k = 0; k < 4; k++)
      memcpy(f->a[k], R(u32, list[i->x[0] / 2 + k]), sizeof f->a[k]);
  for (int operand = i->x[1]; operand < 2; operand++) {
    u64 descriptor = f->descriptors[operand] = R(u64, operand ? i->b : i->a)[0];
    PIECES(descriptor, operand ? 0 : (w->id & 3) * 16, operand ? i->x[0] : 16, i->x[3] >> operand & 1,
           { shared_at(w, 0, address, 16, 16, ASYNC_READ, 0); })
  }
  if (!chained)
    hide(w, f);
  w->num_flights++;
  return NEXT;
}

static void multiply(Warp *w, Flight *f) {
  const Ins *i = f->ins;
  const s32 *list = program->pool + i->list;
  static float A[16][16], B[256][16], C[16][256];
  int N = i->x[0];
  if (f->first)
    for (int k = 0; k < N / 2; k++) {
      EACH if (as_bits(R(float, list[k])[l]) != as_bits(poison(i, k, l))) {
        report(w, l, "an accumulator of the wgmma at line %d was written before its wait", i->line);
        break;
      }
      memcpy(R(float, list[k]), f->accumulators[k], sizeof(float[LANES]));
    }
  free(f->accumulators);
  if (i->x[1]) {
    u32(*a[4])[LANES];
    for (int k = 0; k < 4; k++) {
      if (memcmp(f->a[k], R(u32, list[N / 2 + k]), sizeof f->a[k]))
        report(w, 0, "an operand's register of the wgmma at line %d changed before its wait", i->line);
      a[k] = &f->a[k];
    }
    fragment_a(A, a, i->x[2]);
  } else
    gather(f->descriptors[0], (u32)(w->id & 3) * 16, 16, i->x[3] & 1, i->x[2], A[0]);
  gather(f->descriptors[1], 0, (u32)N, i->x[3] >> 1, i->x[2], B[0]);
  for (int q = 0; q < N / 2; q++)
    EACH C[(l >> 2) + (q >> 1 & 1) * 8][(q >> 2) * 8 + (q & 1) + (l & 3) * 2] = f->keeps ? R(float, list[q])[l] : 0;
  static float T[16][256];
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < N; n++)
      T[k][n] = i->imm ? -B[n][k] : B[n][k];
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < N; n++)
        C[r][n] += A[r][k] * T[k][n];
  for (int q = 0; q < N / 2; q++)
    EACH R(float, list[q])[l] = C[(l >> 2) + (q >> 1 & 1) * 8][(q >> 2) * 8 + (q & 1) + (l & 3) * 2];
  for (int operand = i->x[1]; operand < 2; operand++)
    PIECES(f->descriptors[operand], operand ? 0 : (w->id & 3) * 16, operand ? N : 16, i->x[3] >> operand & 1, {
      if (address >= SHARED_BASE && address + 16 <= SHARED_BASE + shared_bytes)
        fetched(w, address, 16);
    })
}

OP(wgmma_fence) {
  w->fenced = w->serial;
  return NEXT;
}
OP(wgmma_commit) {
  w->wgmma_group++;
  return NEXT;
}
OP(wgmma_wait) {  // x: groups that may stay in flight
  u32 done = 0;
  while (done < w->num_flights && w->flights[done].group + (u32)i->x[0] < w->wgmma_group)
    multiply(w, &w->flights[done++]);
  memmove(w->flights, w->flights + done, sizeof(Flight) * (w->num_flights -= done));
  for (u32 k = 0; k < w->num_flights; k++) {  // a product that goes on from one that is done
    int earlier = 0;
    for (u32 j = 0; j < k; j++)
      earlier |= same_accumulators(&w->flights[j], w->flights[k].ins);
    if (!earlier && !w->flights[k].first)
      hide(w, &w->flights[k]);
  }
  return NEXT;
}

// mbarriers
Mbar mbars[MAX_MBARS];
static int num_mbars;

typedef struct {  // a copy by TMA that hasn't landed
  Mbar *mbar;
  u32 target, bytes, swizzle;
  u8 *data;
} Transfer;
static Transfer transfers[1024];
static int num_transfers;

void begin_program_tensor(void) {
  num_mbars = 0;
  memset(mbars, 0, sizeof mbars);
  while (num_transfers)
    free(transfers[--num_transfers].data);
}

static Mbar *mbar_at(Warp *w, int lane, u32 address, int make) {
  Mbar *m = 0;
  for (int k = 0; k < num_mbars; k++)
    if (mbars[k].address == address)
      m = &mbars[k];
  if (!make && (!m || !m->valid)) {
    report(w, lane, "the mbarrier at %d isn't initialised", (s32)(address - SHARED_BASE));
    return m;
  }
  if (m && !make) {
    if (w->seen.of[m->maker] < m->made)
      report(w, lane, "the mbarrier at %u was initialised by warp %u, and nothing waited for it",
             address - SHARED_BASE, m->maker);
    m->used[w->id] = w->seen.of[w->id];
  }
  if (m)
    return m;
  if (address % 8 || address < SHARED_BASE || address + 8 > SHARED_BASE + shared_bytes || num_mbars == MAX_MBARS) {
    report(w, lane, "an mbarrier can't be at %d: of %u bytes, 8-byte aligned, at most %d", (s32)(address - SHARED_BASE),
           shared_bytes, MAX_MBARS);
    return 0;
  }
  mbars[num_mbars] = (Mbar){.address = address, .clock = base_clock};
  return &mbars[num_mbars++];
}
static void end_phase(Mbar *m) {
  if (m->pending || m->bytes)
    return;
  m->phase++;
  m->clock++;
  m->pending = m->count;
  m->seen = m->next_seen;
  m->proxied = m->next_proxied;
  m->seen.of[MAX_WARPS + (m - mbars)] = m->clock;
}
static u32 mbar_address(const Warp *w, const Ins *i, int l) { return R(u32, i->a)[l] + (u32)i->imm; }

OP(mbar_init) {  // a: address, b: count
  EACH_ACTIVE {
    Mbar *m = mbar_at(w, l, mbar_address(w, i, l), 1);
    if (!m)
      continue;
    if (m->valid)
      report(w, l, "initialisation of a live mbarrier");
    shared_at(w, l, m->address, 8, 8, WRITE, 0);
    m->valid = 1;
    m->maker = (u32)w->id;
    m->made = w->seen.of[w->id];
    memset(m->used, 0, sizeof m->used);
    m->count = m->pending = (s32)R(u32, i->b)[l];
    m->bytes = 0;
    m->phase = 0;
  }
  return NEXT;
}
OP(mbar_inval) {
  EACH_ACTIVE {
    Mbar *m = mbar_at(w, l, mbar_address(w, i, l), 0);
    if (m && m->bytes)
      report(w, l, "invalidation of an mbarrier with copies in flight");
    for (int k = 0; m && k < num_warps; k++)
      if (w->seen.of[k] < m->used[k]) {
        report(w, l, "invalidation of an mbarrier after a use by warp %d that nothing waited for", k);
        break;
      }
    if (m) {
      shared_at(w, l, m->address, 8, 8, WRITE, 0);
      m->valid = 0;
    }
  }
  return NEXT;
}
OP(mbar_arrive) {  // a: address, b: bytes to expect or NONE, c: number of arrivals or NONE
  EACH_ACTIVE {
    Mbar *m = mbar_at(w, l, mbar_address(w, i, l), 0);
    if (!m)
      continue;
    if (i->b != NONE)
      m->bytes += R(u32, i->b)[l];
    m->pending -= i->c == NONE ? 1 : (s32)R(u32, i->c)[l];
    if (m->pending < 0)
      report(w, l, "more arrivals at the mbarrier at %u than its count of %d", m->address - SHARED_BASE, m->count);
    join(&m->next_seen, &w->seen);
    join(&m->next_proxied, &w->proxied);
    w->seen.of[w->id]++;
    end_phase(m);
  }
  return NEXT;
}
OP(mbar_wait) {  // d: whether the phase is over, a: address, b: its parity
  int first = __builtin_ctz(w->mask);
  u32 address = mbar_address(w, i, first), parity = R(u32, i->b)[first] & 1;
  EACH_ACTIVE if (mbar_address(w, i, l) != address || (R(u32, i->b)[l] & 1) != parity) {
    report(w, l, "lanes wait for different phases or mbarriers");
    break;
  }
  Mbar *m = mbar_at(w, first, address, 0);
  int over = !m || (m->phase & 1) != parity;
  if (over && m) {
    join(&w->seen, &m->seen);
    join(&w->proxied, &m->proxied);
  }
  EACH_ACTIVE R(u32, i->d)[l] = (u32)over;
  if (over)
    return NEXT;
  w->state = AT_MBARRIER;
  w->mbar = m;
  w->parity = parity;
  return STOP;
}

// TMA, with descriptors of our own layout
typedef struct {
  u64 magic, cleared;  // Triton's driver clears a bit of the second word
  u64 address, sizes[3], strides[3];
  u32 rank, bytes, swizzle;
  u16 box[3];
} Map;
_Static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a descriptor has 128 bytes");
static const u64 MAGIC = 0x70616d726f736e65ull;

int encode_map(CUtensorMap *map, u32 bytes, u32 rank, void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
               const cuuint32_t *box, int swizzle, int fill) {
  if (rank > 3 || fill)
    return 0;
  Map m = {.magic = MAGIC, .address = (u64)address, .rank = rank, .bytes = bytes, .swizzle = (u32)swizzle};
  for (u32 k = 0; k < rank; k++) {
    m.sizes[k] = sizes[k];
    m.strides[k] = k ? strides[k - 1] : bytes;
    m.box[k] = (u16)box[k];
  }
  memcpy(map, &m, sizeof m);
  return 1;
}

OP(tma_load) {  // d: shared address + imm, a: descriptor, b: mbarrier's address + imm2, list: coordinates
  EACH_ACTIVE {
    const Map *t = (const Map *)R(u64, i->a)[l];
    u32 target = R(u32, i->d)[l] + (u32)i->imm, total;
    if ((u8 *)t < params || (u8 *)t + sizeof *t > params + sizeof params || (u64)t % 64 || t->magic != MAGIC ||
        t->rank != (u32)i->n) {
      report(w, l, "no descriptor of %d dimensions at the address that a copy by TMA has", i->n);
      continue;
    }
    total = t->bytes;
    for (int k = 0; k < i->n; k++)
      total *= t->box[k];
    Mbar *m = mbar_at(w, l, R(u32, i->b)[l] + (u32)i->imm2, 0);
    u8 *to = shared_at(w, l, target, total, t->swizzle ? 128u << t->swizzle : 128, TMA_WRITE, 0);
    if (!m || !to)
      continue;
    if (num_transfers == 1024)
      return report(w, l, "more than 1024 copies by TMA in flight"), trapped = 1, STOP;
    u8 *data = calloc(total, 1);
    for (u32 e = 0, outside = 0; e < total / t->bytes; e++) {
      u64 at = t->address;
      u32 rest = e;
      int inside = 1;
      for (int k = 0; k < i->n; k++, rest /= t->box[k - 1]) {
        s64 x = (s64)(s32)R(u32, program->pool[i->list + k])[l] + rest % t->box[k];
        inside &= x >= 0 && (u64)x < t->sizes[k];
        at += (u64)x * t->strides[k];
      }
      if (inside && !inside_argument(at, t->bytes)) {
        if (!outside++)
          report(w, l, "an element of a descriptor, at %llx, lies outside of all tensors", (unsigned long long)at);
      } else if (inside)
        memcpy(data + e * t->bytes, (void *)at, t->bytes);
    }
    undefined(to, total);
    copied(w, target, total, m);
    transfers[num_transfers++] = (Transfer){m, target, total, t->swizzle, data};
    ((Ins *)i)->waves += total / 32;
  }
  return NEXT;
}

// Land one of the copies in flight, if there is any.
int deliver(void) {
  if (!num_transfers)
    return 0;
  int k = (int)(draw() % (u32)num_transfers);
  Transfer t = transfers[k];
  transfers[k] = transfers[--num_transfers];
  for (u32 o = 0; o < t.bytes; o += 16)
    memcpy(shared_memory + swizzled(t.target + o, t.swizzle) - SHARED_BASE, t.data + o, 16);
  free(t.data);
  t.mbar->bytes -= t.bytes;
  end_phase(t.mbar);
  return 1;
}
