// A libcuda.so.1 that executes what Triton launches: control flow, the schedule of warps, barriers, and launches.

#include "machine.h"

static CUresult run_launch(const CUlaunchConfig *, CUfunction, void **);
#include "libcuda.c"

u64 seed = 1;
int races = 1, preempts = 1;
int fences_operands = 1;  // whether wgmma.fence must follow the last write of A's registers, beside accumulators'
u8 *shared_memory, params[65536] __attribute__((aligned(64)));
u32 shared_bytes;
Warp warps[MAX_WARPS];
int num_warps, trapped;
const Program *program;
static u32 place[3], grid[3];

static u64 state;
u32 draw(void) {  // xorshift
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (u32)(state >> 16);
}

enum { MAX_REPORTS = 100 };
char reports[MAX_REPORTS][512];
int num_reports;
void report(const Warp *w, int lane, const char *format, ...) {
  if (num_reports == MAX_REPORTS) {
    trapped = 1;
    return;
  }
  char *text = reports[num_reports++];
  int n = snprintf(text, 512, "%s, program (%u, %u, %u), ", program->name, place[0], place[1], place[2]);
  if (w)
    n += snprintf(text + n, (size_t)(512 - n), "warp %d, lane %d, PTX line %d: ", w->id, lane, w->ins->line);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + n, (size_t)(512 - n), format, arguments);
  va_end(arguments);
}

// Control flow. Of diverged lanes those with the lowest program counter go first, so paths meet again.
static void choose_path(Warp *w) {
  EACH if (w->active >> l & 1) w->lane_pc[l] = w->pc;
  if (!(w->live & ~w->waiting))
    w->waiting = 0;
  u32 lanes = w->live & ~w->waiting;
  s32 lowest = INT32_MAX;
  EACH if (lanes >> l & 1 && w->lane_pc[l] < lowest) lowest = w->lane_pc[l];
  w->pc = lowest;
  w->active = 0;
  EACH if (lanes >> l & 1 && w->lane_pc[l] == lowest) w->active |= 1u << l;
}
OP(bra) {  // x: where
  EACH if (w->active >> l & 1) w->lane_pc[l] = w->mask >> l & 1 ? i->x[0] : w->pc + 1;
  w->active = 0;
  choose_path(w);
  return JUMPED;
}
OP(brx) {  // a: index; list: where
  EACH_ACTIVE {
    u32 k = R(u32, i->a)[l];
    if (k >= (u32)i->n)
      return report(w, l, "branch %u of %d", k, i->n), trapped = 1, STOP;
    w->lane_pc[l] = program->pool[i->list + (s32)k];
  }
  w->active = 0;
  choose_path(w);
  return JUMPED;
}
OP(ret) {
  EACH if (w->active >> l & 1) w->lane_pc[l] = w->pc + 1;
  w->live &= ~w->mask;
  w->active = 0;
  if (w->live)
    return choose_path(w), JUMPED;
  w->state = DONE;
  return STOP;
}
OP(trap) {
  report(w, 0, "trap");
  trapped = 1;
  return STOP;
}
OP(assertfail) {  // imm: the message
  report(w, __builtin_ctz(w->mask), "device-side assertion: %s", (const char *)i->imm);
  trapped = 1;
  return STOP;
}
OP(nop) { return NEXT; }
OP(warp_barrier) {  // of all lanes
  if (w->mask == w->live)
    return NEXT;
  EACH if (w->active >> l & 1) w->lane_pc[l] = w->pc + 1;
  w->waiting |= w->mask;
  w->active = 0;
  choose_path(w);
  return JUMPED;
}

OP(barrier) {  // a: which, b: threads or NONE
  if (w->mask != w->live)
    report(w, 0, "barrier in divergent code");
  w->barrier = R(u32, i->a)[0];
  w->barrier_threads = i->b == NONE ? (u32)num_warps * LANES : R(u32, i->b)[0];
  w->state = AT_BARRIER;
  return STOP;
}
OP(proxy_fence) {
  join(&w->proxied, &w->seen);
  w->seen.of[w->id]++;
  return NEXT;
}

// Exchanges between lanes
OP(shuffle) {  // a: value, b: lane, c: clamp and segments; e: whether it came from a lane; x: bfly, up, down, idx
  u32 values[LANES], *d = R(u32, i->d);
  memcpy(values, R(u32, i->a), sizeof values);
  EACH_ACTIVE {
    u32 c = R(u32, i->c)[l], by = R(u32, i->b)[l] & 31, segment = c >> 8 & 31, lane = (u32)l;
    int last = (int)((lane & segment) | (c & 31 & ~segment)), first = (int)(lane & segment);
    int from = i->x[0] == 0 ? l ^ (int)by : i->x[0] == 1 ? l - (int)by : i->x[0] == 2 ? l + (int)by
                                                                                     : (first | (int)(by & ~segment));
    int found = i->x[0] == 1 ? from >= last : from <= last;
    if (!found)
      from = l;
    if (!(w->mask >> from & 1))
      report(w, l, "shuffle from lane %d, which doesn't take part", from);
    d[l] = values[from];
    if (i->e != NONE)
      R(u32, i->e)[l] = (u32)found;
  }
  return NEXT;
}
enum { SUM, MIN_S, MAX_S, MIN_U, MAX_U, ALL, ANY, PARITY, MIN_F, MAX_F };
OP(redux) {
  u32 result = 0;
  int n = 0;
  EACH_ACTIVE {
    u32 a = R(u32, i->a)[l], r = result;
    switch (i->x[0]) {
    case SUM: r += a; break;
    case MIN_S: r = (s32)a < (s32)r ? a : r; break;
    case MAX_S: r = (s32)a > (s32)r ? a : r; break;
    case MIN_U: r = a < r ? a : r; break;
    case MAX_U: r = a > r ? a : r; break;
    case ALL: r &= a; break;
    case ANY: r |= a; break;
    case PARITY: r ^= a; break;
    case MIN_F: r = as_bits(fminf(as_float(r), as_float(a))); break;
    case MAX_F: r = as_bits(fmaxf(as_float(r), as_float(a))); break;
    }
    result = n++ ? r : a;
  }
  EACH_ACTIVE R(u32, i->d)[l] = result;
  return NEXT;
}
OP(vote) {  // x: ballot, any, all; whether the predicate is negated
  u32 votes = 0;
  EACH_ACTIVE votes |= ((R(u32, i->a)[l] ^ (u32)i->x[1]) & 1) << l;
  EACH_ACTIVE R(u32, i->d)[l] = i->x[0] == 0 ? votes : i->x[0] == 1 ? votes != 0 : votes == w->mask;
  return NEXT;
}
OP(elect) {  // e: whether it is the first lane that takes part, whose number d gets
  EACH_ACTIVE {
    R(u32, i->d)[l] = (u32)__builtin_ctz(w->mask);
    R(u32, i->e)[l] = l == __builtin_ctz(w->mask);
  }
  return NEXT;
}

// Registers of several parts; x: bytes of a part; list: parts
OP(pack) {
  EACH_ACTIVE for (int k = 0; k < i->n; k++) {
    u8 *part = w->regs + program->pool[i->list + k] + l * i->x[0];
    memcpy(w->regs + i->d + (l * i->n + k) * i->x[0], part, (size_t)i->x[0]);
  }
  return NEXT;
}
OP(unpack) {
  EACH_ACTIVE for (int k = 0; k < i->n; k++) {
    u8 *part = w->regs + program->pool[i->list + k] + l * i->x[0];
    memcpy(part, w->regs + i->a + (l * i->n + k) * i->x[0], (size_t)i->x[0]);
  }
  return NEXT;
}

static u64 fuel;  // instructions that the program may still run
static void run_warp(Warp *w, u32 budget) {
  u8 kept[8 * LANES];
  while (1) {
    Ins *i = &program->ins[w->pc];
    w->ins = i;
    if (i->flags & IS_TARGET && w->active != w->live)
      choose_path(w), w->ins = i = &program->ins[w->pc];
    if (!budget--)
      return;
    if (!fuel--) {
      report(w, 0, "the program doesn't end within 2**25 instructions");
      trapped = 1;
      return;
    }
    w->mask = w->active;
    if (i->guard != NONE) {
      u32 guard = 0;
      EACH guard |= (R(u32, i->guard)[l] & 1) << l;
      w->mask &= i->negated ? ~guard : guard;
    }
    i->runs++;
    if (!w->mask) {
      w->pc++;
      continue;
    }
    i->lanes += (u64)__builtin_popcount(w->mask);
    int masked = w->mask != ~0u && i->flags & KEEPS_LANES;
    u8 *d = w->regs + i->d;
    if (masked)
      memcpy(kept, d, (size_t)i->d_bytes * LANES);
    int then = i->run(w, i);
    if (masked)
      EACH if (!(w->mask >> l & 1)) memcpy(d + l * i->d_bytes, kept + l * i->d_bytes, (size_t)i->d_bytes);
    if (i->flags & STAMPS) {
      s32 used[] = {i->d, i->a, i->b, i->c, i->e};
      w->serial++;
      for (int k = 0; k < 5 + i->n; k++) {
        s32 offset = k < 5 ? used[k] : program->pool[i->list + k - 5];
        if (offset >= 0)  // not NONE, nor a constant
          w->stamps[offset / 64] = w->serial;
      }
    }
    if (then != JUMPED)
      w->pc++;
    if (then == STOP || trapped)
      return;
  }
}

static void begin_warp(int k) {
  Warp *w = &warps[k], kept = *w;
  memset(w, 0, sizeof *w);
  w->regs = kept.regs, w->stamps = kept.stamps, w->flights = kept.flights, w->copies = kept.copies, w->room = kept.room;
  w->id = k;
  w->active = w->live = ~0u;
  for (int t = 0; t < CLOCKS; t++)
    w->seen.of[t] = w->proxied.of[t] = base_clock;
  w->seen.of[k]++;
  w->fenced = -1;
  memset(w->stamps, 0, sizeof(u32) * (size_t)program->register_bytes / 64);
  undefined(w->regs, (u64)program->register_bytes);
  EACH {
    R(u32, TID * 128)[l] = (u32)(k * LANES + l);
    for (int axis = 0; axis < 3; axis++) {
      R(u32, (CTAID_X + axis) * 128)[l] = place[axis];
      R(u32, (NCTAID_X + axis) * 128)[l] = grid[axis];
    }
  }
}

static void pass_barriers(void) {
  for (u32 b = 0; b < 16; b++) {
    u32 arrived = 0, threads = 0;
    Clock seen = {0}, proxied = {0};
    for (Warp *w = warps; w < warps + num_warps; w++)
      if (w->state == AT_BARRIER && w->barrier == b) {
        if (arrived && threads != w->barrier_threads)
          report(w, 0, "warps wait at barrier %u for different numbers of threads", b);
        threads = w->barrier_threads;
        arrived += LANES;
        join(&seen, &w->seen);
        join(&proxied, &w->proxied);
      }
    if (!arrived || arrived < threads)
      continue;
    for (Warp *w = warps; w < warps + num_warps; w++)
      if (w->state == AT_BARRIER && w->barrier == b) {
        join(&w->seen, &seen);
        join(&w->proxied, &proxied);
        w->seen.of[w->id]++;
        w->state = RUNS;
      }
  }
}

static void run_program(void) {
  begin_program_memory();
  begin_program_tensor();
  for (int k = 0; k < num_warps; k++)
    begin_warp(k);
  trapped = 0;
  fuel = 1u << 25;
  while (!trapped) {
    int start = (int)(draw() % (u32)num_warps), done = 0;
    Warp *next = 0;
    pass_barriers();
    for (int k = 0; k < num_warps && !next; k++) {
      Warp *w = &warps[(start + k) % num_warps];
      if (w->state == AT_MBARRIER && (w->mbar->phase & 1) != w->parity)
        w->state = RUNS;
      if (w->state == RUNS)
        next = w;
      done += w->state == DONE;
    }
    if (next)
      run_warp(next, preempts ? 1 + draw() % 200 : UINT32_MAX);
    else if (done == num_warps)
      return;
    else if (!deliver()) {
      for (Warp *w = warps; w < warps + num_warps; w++)
        if (w->state == AT_BARRIER)
          report(w, 0, "deadlock: waits at barrier %u for %u threads", w->barrier, w->barrier_threads);
        else if (w->state == AT_MBARRIER)
          report(w, 0, "deadlock: waits for the mbarrier at %u", w->mbar->address - SHARED_BASE);
      trapped = 1;
    }
  }
}

static struct {
  CUfunction function;
  const Program *program;
} loaded[1024];
static int num_loaded;
void vg_unload(void) { num_loaded = 0; }
void vg_load(CUfunction function, const Program *p) {
  if (num_loaded == 1024)
    abort();
  loaded[num_loaded].function = function;
  loaded[num_loaded++].program = p;
}

static void permute(u32 *order, u32 n) {
  for (u32 k = 0; k < n; k++) {
    u32 j = draw() % (k + 1);
    order[k] = order[j];
    order[j] = k;
  }
}

static CUresult run_launch(const CUlaunchConfig *config, CUfunction function, void **arguments) {
  program = 0;
  for (int k = 0; k < num_loaded; k++)
    if (loaded[k].function == function)
      program = loaded[k].program;
  if (!program)
    return CUDA_SUCCESS;
  state = 88172645463325252ull ^ seed * 0x9E3779B97F4A7C15ull;
  draw();
  num_warps = (int)config->blockDimX / LANES;
  shared_bytes = config->sharedMemBytes;
  u32 sizes[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  memcpy(grid, sizes, sizeof grid);
  if ((u32)program->threads != config->blockDimX)
    return refuse("another number of threads than the kernel was compiled for");
  if ((u64)grid[0] * grid[1] * grid[2] > 1u << 24)
    return refuse("more programs than the virtual GPU takes: 2**24");
  size_t constants = (size_t)program->num_constants * 256;
  for (Warp *w = warps; w < warps + num_warps; w++) {
    u8 *room = aligned_alloc(64, constants + ((size_t)program->register_bytes + 255) / 256 * 256);
    w->regs = room + constants;
    for (int k = 0; k < program->num_constants; k++)
      for (int l = 0; l < LANES; l++)  // read as 2, 4 or 8 bytes: see Translator.constant
        memcpy(w->regs - 256 * (k + 1) + l * (int)(program->constants[2 * k + 1]), &program->constants[2 * k],
               program->constants[2 * k + 1]);
    w->stamps = malloc(sizeof(u32) * ((size_t)program->register_bytes / 64 + 1));
    w->flights = malloc(512 * sizeof(Flight));
  }
  memset(params, 0xff, sizeof params);
  for (int k = 0; k < program->num_params; k++)
    memcpy(params + program->params[k][0], arguments[k], (size_t)program->params[k][1]);
  begin_launch_memory();
  u32 n = grid[0] * grid[1] * grid[2], *order = malloc(sizeof(u32) * n);
  permute(order, n);
  for (u32 k = 0; k < n && num_reports < MAX_REPORTS; k++) {
    place[0] = order[k] % grid[0], place[1] = order[k] / grid[0] % grid[1], place[2] = order[k] / grid[0] / grid[1];
    run_program();
    end_program_memory();
    if (trapped)
      break;
  }
  free(order);
  end_launch_memory();
  for (Warp *w = warps; w < warps + num_warps; w++) {
    free(w->regs - constants);
    free(w->stamps);
    free(w->flights);
    free(w->copies);
    memset(w, 0, sizeof *w);
  }
  return trapped ? refuse("the kernel stopped: see the reports of the virtual GPU") : CUDA_SUCCESS;
}
