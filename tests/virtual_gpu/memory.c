// Global and shared memory: bounds, alignment, what was written, and races by vector clocks (FastTrack, with a clock per
// reader), for every byte. An access is a race if another thread's access of the byte, one of them a write, isn't known
// to have happened before. Writes of the value that is there already aren't reported: redundant warps do it.

#include "machine.h"

enum { IN_FLIGHT = 0xffffff };  // the clock of an asynchronous access that nothing has waited for

// Global memory: the arguments' extents, and regions (their union) with a record per byte
typedef struct {
  u32 writer, write_clock, reader, read_clock;  // program * MAX_WARPS + warp + 1, or 0; this launch's
} Record;
typedef struct {
  u64 start, stop;
  Record *records;
} Region;
enum { MAX_REGIONS = 256, MANY = 0xffffffff };
static Region arguments[MAX_REGIONS], regions[MAX_REGIONS];
static int num_arguments, num_regions, last_argument, last_region;
static u32 program_serial;  // of the program that runs, in its launch

void vg_clear_memory(void) { num_arguments = num_regions = 0; }
int vg_add_argument(u64 start, u64 stop) {
  if (num_arguments == MAX_REGIONS)
    return 0;
  arguments[num_arguments++] = (Region){start, stop, 0};
  return 1;
}
void vg_add_region(u64 start, u64 stop) { regions[num_regions++] = (Region){start, stop, 0}; }

static Region *find(Region *from, int n, int *last, u64 address, u64 bytes) {
  for (int k = 0; k < n; k++) {
    int j = (k + *last) % n;
    if (address >= from[j].start && address + bytes <= from[j].stop) {
      *last = j;
      return &from[j];
    }
  }
  return 0;
}
int inside_argument(u64 address, u64 bytes) {
  return find(arguments, num_arguments, &last_argument, address, bytes) != 0;
}

static void check_global(Warp *w, int lane, u64 address, u32 bytes, int writes, const u8 *written) {
  Region *region = find(regions, num_regions, &last_region, address, bytes);
  u32 me = program_serial * MAX_WARPS + (u32)w->id + 1, now = w->seen.of[w->id];
  for (u32 k = 0; k < bytes; k++) {
    Record *r = &region->records[address - region->start + k];
    u32 others[2] = {r->writer, writes ? r->reader : 0}, clocks[2] = {r->write_clock, r->read_clock};
    for (int j = 0; j < 2; j++) {
      u32 other = others[j];
      if (!other || other == me)
        continue;
      int same_program = other != MANY && (other - 1) / MAX_WARPS == program_serial;
      if (same_program && w->seen.of[(other - 1) % MAX_WARPS] >= clocks[j])
        continue;
      if (written && *(u8 *)(address + k) == written[k])
        continue;
      report(w, lane, "race: global %s at %llx after %s by %s", writes ? "write" : "read",
             (unsigned long long)(address + k), j ? "a read" : "a write",
             same_program ? "another warp, without a barrier between" : "another program of the launch");
      return;
    }
    if (writes) {
      r->writer = me;
      r->write_clock = now;
    } else {
      int foreign = r->reader && (r->reader == MANY || (r->reader - 1) / MAX_WARPS != program_serial);
      r->reader = foreign ? MANY : me;
      r->read_clock = now;
    }
  }
}

u8 *global_at(Warp *w, int lane, u64 address, u32 bytes, u32 align, Access access, const u8 *written) {
  if (address % align) {
    report(w, lane, "global address %llx isn't a multiple of %u", (unsigned long long)address, align);
    return 0;
  }
  if (!inside_argument(address, bytes)) {
    s64 nearest = INT64_MAX;
    int which = NONE;
    for (int k = 0; k < num_arguments; k++) {
      s64 away = address < arguments[k].start ? (s64)(arguments[k].start - address)
                                              : (s64)(address + bytes - arguments[k].stop);
      if (away < nearest)
        nearest = away, which = k;
    }
    if (which == NONE)
      report(w, lane, "global access of %u bytes at %llx, and no argument is a tensor", bytes,
             (unsigned long long)address);
    else
      report(w, lane, "global %s of %u bytes at %llx, %lld bytes %s tensor %d of the arguments (%lld bytes)",
             access == READ ? "read" : "write", bytes, (unsigned long long)address, (long long)nearest,
             address < arguments[which].start ? "before" : "past the end of", which,
             (long long)(arguments[which].stop - arguments[which].start));
    return 0;
  }
  if (races && access != ATOMIC)
    check_global(w, lane, address, bytes, access == WRITE, written);
  return (u8 *)address;
}

// Shared memory: last write of each byte (thread << 24 | clock), and the clock of the last read by each warp
static u32 *last_write, *last_read;
static u32 room_for_shadow;
u32 base_clock;  // clocks up to here belong to earlier programs

static void check_shared(Warp *w, int lane, u32 address, u32 bytes, Access access, const u8 *written) {
  int writes = access == WRITE || access == ASYNC_WRITE || access == TMA_WRITE;
  u32 now = access == ASYNC_READ || access == ASYNC_WRITE ? IN_FLIGHT : w->seen.of[w->id];
  for (u32 k = 0; k < bytes; k++) {
    u32 at = address - SHARED_BASE + k, thread = last_write[at] >> 24, clock = last_write[at] & 0xffffff;
    u32 *reads = last_read + (u64)at * MAX_WARPS;
    int same_value = written && shared_memory[at] == written[k], conflict = 0;
    if (clock > base_clock) {
      if (w->seen.of[thread] < clock && !(conflict = same_value)) {
        report(w, lane, "race: %s of shared byte %u after %s by %s %u that nothing waited for",
               writes ? "write" : "read", at, clock == IN_FLIGHT || thread >= MAX_WARPS ? "a copy" : "a write",
               thread < MAX_WARPS ? "warp" : "TMA for mbarrier", thread < MAX_WARPS ? thread : thread - MAX_WARPS);
        return;
      }
      if ((access == ASYNC_READ || access == TMA_WRITE) && thread < MAX_WARPS && w->proxied.of[thread] < clock) {
        report(w, lane, "%s shared byte %u, which warp %u wrote without a proxy fence since",
               access == ASYNC_READ ? "wgmma reads" : "TMA writes", at, thread);
        return;
      }
    } else if (!writes) {
      report(w, lane, "read of shared byte %u, which the program hasn't written", at);
      return;
    }
    if (!writes) {
      reads[w->id] = now;
      continue;
    }
    for (int other = 0; other < num_warps; other++)
      if (reads[other] > base_clock && w->seen.of[other] < reads[other] && !(conflict |= same_value)) {
        report(w, lane, "race: write of shared byte %u after a read by warp %d that %s", at, other,
               reads[other] == IN_FLIGHT ? "is in flight" : "nothing waited for");
        return;
      }
    if (!conflict)
      last_write[at] = (u32)w->id << 24 | now;
  }
}

// `written`: the bytes that a write will store, if known.
u8 *shared_at(Warp *w, int lane, u32 address, u32 bytes, u32 align, Access access, const u8 *written) {
  if (address < SHARED_BASE || (u64)address + bytes > (u64)SHARED_BASE + shared_bytes) {
    report(w, lane, "shared address %d of %u bytes is outside the program's %u bytes", (s32)(address - SHARED_BASE),
           bytes, shared_bytes);
    return 0;
  }
  if (address % align) {
    report(w, lane, "shared address %u isn't a multiple of %u", address - SHARED_BASE, align);
    return 0;
  }
  if (races && access != ATOMIC)
    check_shared(w, lane, address, bytes, access, written);
  return shared_memory + (address - SHARED_BASE);
}

// TMA writes these bytes on behalf of an mbarrier, at any time until its phase ends.
void copied(Warp *w, u32 address, u32 bytes, const Mbar *mbar) {
  for (u32 k = 0; races && k < bytes; k++)
    last_write[address - SHARED_BASE + k] = (u32)(MAX_WARPS + (mbar - mbars)) << 24 | (mbar->clock + 1);
}

// An asynchronous read of these bytes by the warp has ended.
void fetched(Warp *w, u32 address, u32 bytes) {
  for (u32 k = 0; races && k < bytes; k++)
    last_read[(u64)(address - SHARED_BASE + k) * MAX_WARPS + w->id] = w->seen.of[w->id];
}

// Bits that nothing defined depend on the seed: results that depend on them differ from seed to seed.
void undefined(u8 *bytes, u64 n) {
  u32 word[3] = {0xffffffff, draw(), draw() & 7};
  u32 chosen = word[draw() % 3];
  u64 k = 0;
  for (; k + 4 <= n; k += 4)
    memcpy(bytes + k, &chosen, 4);
  for (; k < n; k++)
    bytes[k] = (u8)chosen;
}

void begin_launch_memory(void) {
  shared_memory = aligned_alloc(1024, ((u64)shared_bytes + 2047) / 1024 * 1024);
  program_serial = 0;
  if (!races)
    return;
  for (int k = 0; k < num_regions; k++) {
    u64 bytes = (regions[k].stop - regions[k].start) * sizeof(Record);
    regions[k].records = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (regions[k].records == MAP_FAILED) {
      fprintf(stderr, "virtual GPU: no memory for the records of %llu bytes\n", (unsigned long long)bytes);
      abort();
    }
  }
  if (room_for_shadow < shared_bytes) {
    free(last_write);
    free(last_read);
    room_for_shadow = shared_bytes;
    last_write = calloc(room_for_shadow, sizeof(u32));
    last_read = calloc((u64)room_for_shadow * MAX_WARPS, sizeof(u32));
  }
}
void end_launch_memory(void) {
  free(shared_memory);
  for (int k = 0; k < num_regions; k++)
    if (regions[k].records) {
      munmap(regions[k].records, (regions[k].stop - regions[k].start) * sizeof(Record));
      regions[k].records = 0;
    }
}
void begin_program_memory(void) {
  program_serial++;
  undefined(shared_memory, shared_bytes);
}
// Events of this program happened before the next one's; what is in flight is forgotten.
void end_program_memory(void) {
  int in_flight = 0;
  for (Warp *w = warps; w < warps + num_warps; w++) {
    in_flight |= w->num_copies || w->num_flights;
    for (int t = 0; t < CLOCKS; t++)
      if (w->seen.of[t] > base_clock)
        base_clock = w->seen.of[t];
  }
  for (int k = 0; k < MAX_MBARS; k++)
    if (mbars[k].clock >= base_clock)
      base_clock = mbars[k].clock + 1;
  if ((in_flight || base_clock > 0x800000) && room_for_shadow) {  // clocks have 24 bits
    memset(last_write, 0, room_for_shadow * sizeof(u32));
    memset(last_read, 0, (u64)room_for_shadow * MAX_WARPS * sizeof(u32));
    base_clock = 0;
  }
}

// Loads and stores. x: bytes of an element, bytes of its registers, space, whether it is signed
enum { GLOBAL, SHARED, PARAM };
static u64 get(const Warp *w, s32 offset, int bytes, int l) {
  return bytes == 2 ? R(u16, offset)[l] : bytes == 8 ? R(u64, offset)[l] : R(u32, offset)[l];
}
static void put(const Warp *w, s32 offset, int bytes, int l, u64 value) {
  if (bytes == 2)
    R(u16, offset)[l] = (u16)value;
  else if (bytes == 8)
    R(u64, offset)[l] = value;
  else
    R(u32, offset)[l] = (u32)value;
}
static u64 address_of(const Warp *w, const Ins *i, int l) {
  return (i->a == NONE ? 0 : get(w, i->a, i->d_bytes, l)) + (u64)i->imm;
}

// Passes over the 32 banks of shared memory: lanes go together as long as they make 128 bytes, equal words count once.
static u32 passes(const u32 *addresses, u32 mask, u32 bytes) {
  u32 together = bytes > 8 ? 8 : bytes > 4 ? 16 : 32, total = 0;
  for (u32 first = 0; first < LANES; first += together) {
    u32 words[256], banks[32] = {0}, n = 0, most = 0;
    for (u32 l = first; l < first + together; l++)
      for (u32 b = 0; mask >> l & 1 && b < bytes; b += 4) {
        u32 word = (addresses[l] + b) / 4, k = 0;
        while (k < n && words[k] != word)
          k++;
        if (k < n)
          continue;
        words[n++] = word;
        if (++banks[word % 32] > most)
          most = banks[word % 32];
      }
    total += most;
  }
  return total;
}
// Sectors of 32 bytes of global memory that the lanes' first bytes lie in.
static u32 sectors(const u64 *addresses, u32 mask) {
  u64 found[LANES];
  u32 n = 0;
  EACH {
    u64 sector = addresses[l] / 32;
    u32 k = 0;
    while (k < n && found[k] != sector)
      k++;
    if (mask >> l & 1 && k == n)
      found[n++] = sector;
  }
  return n;
}
static void count(const Warp *w, const Ins *i, const u64 *addresses, u32 bytes, int space) {
  u32 narrow[LANES];
  EACH narrow[l] = (u32)addresses[l];
  ((Ins *)i)->waves += space == SHARED ? passes(narrow, w->mask, bytes) : sectors(addresses, w->mask);
}

OP(load) {
  const s32 *list = program->pool + i->list;
  int element = i->x[0], registers = i->x[1], space = i->x[2];
  u32 bytes = (u32)(element * i->n);
  u64 addresses[LANES] = {0};
  EACH_ACTIVE {
    u64 address = addresses[l] = address_of(w, i, l);
    u8 *from = 0;
    if (space == GLOBAL)
      from = global_at(w, l, address, bytes, bytes, READ, 0);
    else if (space == SHARED)
      from = shared_at(w, l, (u32)address, bytes, bytes, READ, 0);
    else if (address + bytes <= (u64)program->param_bytes)
      from = params + address;
    else
      report(w, l, "parameter at %llu is out of range", (unsigned long long)address);
    for (int k = 0; k < i->n; k++) {
      u64 value = 0xdeadbeefdeadbeefull;
      if (from) {
        value = 0;
        memcpy(&value, from + k * element, (u64)element);
        if (i->x[3] && element < 8)
          value = (u64)((s64)(value << (64 - 8 * element)) >> (64 - 8 * element));
      }
      put(w, list[k], registers, l, value);
    }
  }
  if (space != PARAM)
    count(w, i, addresses, bytes, space);
  return NEXT;
}

OP(store) {
  const s32 *list = program->pool + i->list;
  int element = i->x[0], registers = i->x[1], space = i->x[2];
  u32 bytes = (u32)(element * i->n);
  u64 addresses[LANES] = {0};
  EACH_ACTIVE {
    u8 values[64];
    for (int k = 0; k < i->n; k++) {
      u64 value = get(w, list[k], registers, l);
      memcpy(values + k * element, &value, (u64)element);
    }
    u64 address = addresses[l] = address_of(w, i, l);
    u8 *to = space == GLOBAL ? global_at(w, l, address, bytes, bytes, WRITE, values)
                             : shared_at(w, l, (u32)address, bytes, bytes, WRITE, values);
    for (int other = 0; to && other < l; other++)
      if (w->mask >> other & 1 && addresses[other] == address && memcmp(to, values, bytes)) {
        report(w, l, "lanes %d and %d store different values to one address", other, l);
        break;
      }
    if (to)
      memcpy(to, values, bytes);
  }
  count(w, i, addresses, bytes, space);
  return NEXT;
}

// a: address, b and c: operands; x: bytes, operation, space
enum { ADD, CAS, EXCH, OR, AND };
OP(atomic) {
  EACH_ACTIVE {
    u64 address = address_of(w, i, l);
    u32 bytes = (u32)i->x[0];
    u8 *at = i->x[2] == GLOBAL ? global_at(w, l, address, bytes, bytes, ATOMIC, 0)
                               : shared_at(w, l, (u32)address, bytes, bytes, ATOMIC, 0);
    if (!at)
      continue;
    u64 old = 0, b = get(w, i->b, i->x[0], l), value = b;
    memcpy(&old, at, bytes);
    switch (i->x[1]) {
    case ADD: value = old + b; break;
    case CAS: value = old == b ? get(w, i->c, i->x[0], l) : old; break;
    case OR: value = old | b; break;
    case AND: value = old & b; break;
    }
    memcpy(at, &value, bytes);
    if (i->d != NONE)
      put(w, i->d, i->x[0], l, old);
  }
  return NEXT;
}

// cp.async. d: shared address + imm, a: global address + imm2, b: bytes of the source or NONE; x: bytes, or the group's
// number that may stay in flight. Copies land at their wait: until then nobody may touch their destination.
OP(cp_async) {
  u64 addresses[LANES] = {0};
  EACH_ACTIVE {
    u32 bytes = (u32)i->x[0], given = i->b == NONE ? bytes : R(u32, i->b)[l];
    u32 target = R(u32, i->d)[l] + (u32)i->imm;
    u64 source = addresses[l] = R(u64, i->a)[l] + (u64)i->imm2;
    if (given > bytes) {
      report(w, l, "cp.async of %u bytes has a source of %u", bytes, given);
      continue;
    }
    u8 *to = shared_at(w, l, target, bytes, bytes, ASYNC_WRITE, 0);
    if (!to)
      continue;
    if (source % bytes)
      report(w, l, "global address %llx isn't a multiple of %u", (unsigned long long)source, bytes);
    if (given && !global_at(w, l, source, given, 1, READ, 0))
      given = 0;
    undefined(to, bytes);
    if (w->num_copies == w->room)
      w->copies = realloc(w->copies, sizeof(Copy) * (w->room = w->room ? 2 * w->room : 1024));
    w->copies[w->num_copies++] = (Copy){source, target, bytes, given, w->copy_group};
  }
  count(w, i, addresses, (u32)i->x[0], GLOBAL);
  return NEXT;
}
OP(cp_async_commit) {
  w->copy_group++;
  return NEXT;
}
OP(cp_async_wait) {
  u32 kept = 0;
  for (u32 k = 0; k < w->num_copies; k++) {
    Copy c = w->copies[k];
    if (c.group + (u32)i->x[0] >= w->copy_group) {
      w->copies[kept++] = c;
      continue;
    }
    u32 at = c.target - SHARED_BASE;
    memcpy(shared_memory + at, (void *)c.source, c.source_bytes);
    memset(shared_memory + at + c.source_bytes, 0, c.bytes - c.source_bytes);
    for (u32 b = 0; races && b < c.bytes; b++)
      last_write[at + b] = (u32)w->id << 24 | w->seen.of[w->id];
  }
  w->num_copies = kept;
  return NEXT;
}

// n matrices of 8 x 8 16-bit elements, one row from each lane's address; x: whether they are transposed
static void matrix(u16 t[8][8], u32 *registers, int transposed, int to_registers) {
  EACH for (int half = 0; half < 2; half++) {
    u16 *element = transposed ? &t[(l & 3) * 2 + half][l >> 2] : &t[l >> 2][(l & 3) * 2 + half];
    u16 *part = (u16 *)&registers[l] + half;
    if (to_registers)
      *part = *element;
    else
      *element = *part;
  }
}
OP(ldmatrix) {
  if (w->mask != ~0u)
    report(w, 0, "ldmatrix in divergent code");
  u32 addresses[LANES];
  EACH addresses[l] = R(u32, i->a)[l] + (u32)i->imm;
  for (int k = 0; k < i->n; k++) {
    u16 t[8][8];
    for (int r = 0; r < 8; r++) {
      u8 *from = shared_at(w, k * 8 + r, addresses[k * 8 + r], 16, 16, READ, 0);
      if (from)
        memcpy(t[r], from, 16);
    }
    matrix(t, R(u32, program->pool[i->list + k]), i->x[0], 1);
    ((Ins *)i)->waves += passes(addresses + k * 8, 0xff, 16);
  }
  return NEXT;
}
OP(stmatrix) {
  if (w->mask != ~0u)
    report(w, 0, "stmatrix in divergent code");
  u32 addresses[LANES];
  EACH addresses[l] = R(u32, i->a)[l] + (u32)i->imm;
  for (int k = 0; k < i->n; k++) {
    u16 t[8][8];
    matrix(t, R(u32, program->pool[i->list + k]), i->x[0], 0);
    for (int r = 0; r < 8; r++) {
      u8 *to = shared_at(w, k * 8 + r, addresses[k * 8 + r], 16, 16, WRITE, (u8 *)t[r]);
      if (to)
        memcpy(to, t[r], 16);
    }
    ((Ins *)i)->waves += passes(addresses + k * 8, 0xff, 16);
  }
  return NEXT;
}
