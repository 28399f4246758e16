// Which tokens of a sequence are zoomed in for the queries of a step: a choice among those of spans by what they
// are expected to draw (estimate.h), and copies of their exact rows.
#pragma once

namespace MKV_NAMESPACE {

enum ZoomFlag : uint8_t { kHeld = 1, kChosen = 2, kListed = 4, kLeaving = 8 };

static inline uint32_t cell_of(uint64_t key) { return ~(uint32_t)key; }

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);  // of positive numbers in their order
  return bits;
}

static constexpr uint32_t kBinShift = 19, kLastBin = 0x7f800000 >> kBinShift;  // of infinity

static inline uint32_t bin_of(float rank) {
  return std::min(bits_of(rank) >> kBinShift, kLastBin);  // a NaN counts as infinity
}

static inline float edge_of(int64_t bin) {
  const uint32_t bits = (uint32_t)bin << kBinShift;
  float edge;
  std::memcpy(&edge, &bits, 4);
  return edge;
}

// A rank below which no cell can be chosen: as many eights as there is room for tokens have one above it.
static float least_rank(const Zoom& z, const ZoomRoom& room, int count) {
  int32_t bins[kLastBin + 1] = {};
  for (int i = 0; i < count; i += 8) bins[bin_of(f8_hmax(f8_load(room.worth + i)))]++;
  const int64_t lowest = bin_of(z.least);
  int64_t bin = kLastBin, eights = bins[kLastBin];
  while (bin > lowest && eights < z.most) eights += bins[--bin];
  return std::max(edge_of(bin), z.least);
}

// The cells of highest rank, `worth`, as long as their tokens have room, by the front of `keys`; how many. Of
// equal ones the first. Tokens are counted in bins of ranks, and only the last bin of which any fit is sorted.
static int choose_cells(const Zoom& z, const ZoomRoom& room, int count) {
  const float least = least_rank(z, room, count);
  int32_t bins[kLastBin + 1] = {};
  for (int i = 0; i < count; i += 8) {
    if (f8_hmax(f8_load(room.worth + i)) < least) continue;
    for (int l = i; l < i + 8; l++) bins[bin_of(room.worth[l])] += (int32_t)room.sizes[l];
  }
  const int64_t lowest = bin_of(least);
  int64_t bin = kLastBin, tokens = 0;
  for (; bin > lowest && tokens + bins[bin] <= z.most; bin--) tokens += bins[bin];
  const float edge = std::max(edge_of(bin), least);
  int chosen = 0, parted = 0;
  uint64_t* end = room.keys + room.count;
  for (int i = 0; i < count; i += 8) {
    if (f8_hmax(f8_load(room.worth + i)) < edge) continue;
    for (int l = i; l < i + 8; l++) {
      if (!(room.worth[l] >= edge) || room.sizes[l] == 0) continue;
      const uint64_t key = (uint64_t)bits_of(room.worth[l]) << 32 | (uint32_t)~l;
      if (key >> (32 + kBinShift) > (uint64_t)bin) room.keys[chosen++] = key;
      else *(end - ++parted) = key;
    }
  }
  std::sort(end - parted, end, [](uint64_t a, uint64_t b) { return a > b; });
  for (const uint64_t* key = end - parted; key < end; key++) {
    tokens += (int64_t)room.sizes[cell_of(*key)];
    if (tokens > z.most) break;
    room.keys[chosen++] = *key;
  }
  return chosen;
}

// The part that has a token, and where in its columns.
static inline const Source* source_of(const Zoom& z, int layer, int head, int64_t token, size_t& row) {
  const Source* s = z.sources + (size_t)layer * z.parts;
  while (token >= s->end) s++;
  row = (size_t)(head * (s->end - s->start) + token - s->start);
  return s;
}

static inline void prefetch_source(const Zoom& z, int layer, int head, int64_t token, size_t bytes) {
  size_t row;
  const Source* s = source_of(z, layer, head, token, row);
  for (size_t at = 0; at <= bytes; at += 64) {
    prefetch(s->keys + row * bytes + at);
    prefetch(s->values + row * bytes + at);
  }
  prefetch(s->positions + row * 4);
}

template <class KV>
static void copy_row(const Run& run, const Zoom& z, int layer, int head, int64_t token, int64_t slot) {
  const Pool& pool = *run.pool;
  const int n = run.model->head_dim;
  size_t row;
  const Source* s = source_of(z, layer, head, token, row);
  KV* key = (KV*)pool.keys + (size_t)(slot / kPage) * n * kPage + slot % kPage;
  const char* from = s->keys + row * n * sizeof(KV);
  for (int d = 0; d < n; d++) std::memcpy(key + (size_t)d * kPage, from + d * sizeof(KV), sizeof(KV));
  std::memcpy((KV*)pool.values + (size_t)slot * n, s->values + row * n * sizeof(KV), n * sizeof(KV));
  if (sizeof(KV) == 1) {
    std::memcpy(pool.key_scales + slot, s->key_scales + row * 4, 4);
    std::memcpy(pool.value_scales + slot, s->value_scales + row * 4, 4);
  }
  std::memcpy(pool.positions + slot, s->positions + row * 4, 4);
  if (s->masses) std::memcpy(pool.masses + slot, s->masses + row * 4, 4);
  else pool.masses[slot] = 0;
}

// How many cells of highest rank have at most so many tokens, but for the first, by the front of `keys`; `tokens`
// says how many these have. Every cell has one at least, so no more than `most` are sorted.
static int best_that_fit(const ZoomRoom& room, uint64_t* keys, int count, int64_t most, int64_t& tokens) {
  tokens = 0;
  for (int i = 0; i < count; i++) tokens += (int64_t)room.sizes[cell_of(keys[i])];
  if (count == 1 || tokens <= most) return count;
  const int sorted = (int)std::max<int64_t>(1, std::min<int64_t>(count, most));
  std::partial_sort(keys, keys + sorted, keys + count, std::greater<uint64_t>());
  int fit = 0;
  for (tokens = 0; fit < sorted; fit++) {
    const int64_t more = (int64_t)room.sizes[cell_of(keys[fit])];
    if (fit && tokens + more > most) break;
    tokens += more;
  }
  return fit;
}

// Frees at least so many rows, of cells that are not chosen, those of the lowest rank first. keys: room for them.
static void free_rows(const Run& run, const Zoom& z, const ZoomRoom& room, size_t lane, uint64_t* keys, int64_t needed) {
  const int64_t* area = z.area + lane * z.rows;
  int64_t* owners = z.owners + lane * z.rows;
  const int32_t* owned = z.cells + lane * z.rows;
  int count = 0;
  for (int row = 0; row < z.rows; row++) {
    if (owners[row] < 0) continue;
    uint8_t& flags = room.flags[owned[row]];
    if (flags & (kChosen | kListed)) continue;
    flags |= kListed;
    keys[count++] = (uint64_t)bits_of(room.worth[owned[row]]) << 32 | ~(uint32_t)owned[row];
  }
  const int sorted = (int)std::min<int64_t>(count, needed);
  std::partial_sort(keys, keys + sorted, keys + count);
  for (int i = 0; i < sorted && needed > 0; i++) {
    const uint32_t cell = cell_of(keys[i]);
    room.flags[cell] |= kLeaving;
    needed -= (int64_t)room.sizes[cell];
  }
  for (int row = 0; row < z.rows; row++) {
    if (owners[row] < 0 || !(room.flags[owned[row]] & kLeaving)) continue;
    run.pool->masses[area[row]] = -std::numeric_limits<float>::infinity();
    owners[row] = -1;
  }
}

// Gives rows of the area to the best of the chosen cells that have none: rows that are free, and at most `moves` of
// others for each row of queries.
template <class KV>
static void change_rows(const Run& run, const Zoom& z, const ZoomRoom& room, int layer, int head, int chosen) {
  const size_t lane = (size_t)layer * run.model->kv_heads + head;
  const int64_t *area = z.area + lane * z.rows, *starts = z.starts + lane * z.spans;
  int64_t* owners = z.owners + lane * z.rows;
  int32_t *owned = z.cells + lane * z.rows, *entered = z.entered_rows + lane * z.rows;
  int entering = 0;
  for (int i = 0; i < chosen; i++) {
    uint8_t& flags = room.flags[cell_of(room.keys[i])];
    if (!(flags & kHeld)) room.keys[entering++] = room.keys[i];
    flags |= kChosen;
  }
  if (!entering) return;
  const int64_t free = z.most - std::count_if(owners, owners + z.rows, [](int64_t token) { return token >= 0; });
  const int64_t rows = room.rows / (run.model->query_heads / run.model->kv_heads);
  int64_t tokens;
  entering = best_that_fit(room, room.keys, entering, free + z.moves * rows, tokens);
  if (tokens > free) free_rows(run, z, room, lane, room.keys + entering, tokens - free);
  std::sort(room.keys, room.keys + entering, [](uint64_t a, uint64_t b) { return cell_of(a) < cell_of(b); });
  const int cells = kCells * z.digits;
  int row = 0, count = 0;
  for (int i = 0; i < entering; i++) {
    const int at = (int)cell_of(room.keys[i]), span = room.span_at[at / (8 * cells) * 8 + at % 8];
    const int64_t first = starts[span] + first_of(at / 8 % cells, z.sizes[lane * z.spans + span], cells);
    for (int64_t token = first; token < first + (int64_t)room.sizes[at]; token++) {
      while (owners[row] >= 0) row++;
      owners[row] = token;
      owned[row] = at;
      entered[count++] = row;
    }
  }
  z.entered[lane] = count;
  if (!z.at_hand[layer]) return;
  constexpr int kAhead = 6;  // rows come from anywhere in memory
  for (int i = 0; i < count; i++) {
    if (i + kAhead < count)
      prefetch_source(z, layer, head, owners[entered[i + kAhead]], run.model->head_dim * sizeof(KV));
    copy_row<KV>(run, z, layer, head, owners[entered[i]], area[entered[i]]);
  }
}

template <class KV>
static void zoom_head(const Run& run, int layer, const Zoom& z, int head, char* memory) {
  const size_t lane = (size_t)layer * run.model->kv_heads + head;
  z.entered[lane] = 0;
  if (z.off) return;
  ZoomRoom room;
  carve(*run.model, *run.batch, z, memory, room);
  const int groups = group_spans(z, lane, room);
  if (!groups) return;
  const int count = groups * kCells * z.digits * 8;
  const Queries queries = queries_of(run, layer, z.sequence, head);
  weigh_codes<KV>(run, layer, z, head, queries, room);
  other_masses<KV>(run, layer, z, head, queries, room);
  fill_sizes(z, lane, groups, room);
  estimate<KV>(run, z, room, groups);
  std::memset(room.flags, 0, count);
  for (int row = 0; row < z.rows; row++) {
    if (z.owners[lane * z.rows + row] < 0) continue;
    const int cell = z.cells[lane * z.rows + row];
    if (!room.flags[cell] && room.worth[cell] >= z.least) room.worth[cell] *= z.hold;
    room.flags[cell] = kHeld;
  }
  change_rows<KV>(run, z, room, layer, head, choose_cells(z, room, count));
}

static void zoom_any(const Run& run, int layer, int thread) {
  const int heads = run.model->kv_heads, tasks = run.batch->num_zooms * heads;
  char* memory = run.zoom_room + run.zoom_bytes * thread;
  for (int i; (i = (int)run.next_zoom->fetch_add(1)) < tasks;) {
    const Zoom& z = run.batch->zooms[i / heads];
    switch (run.pool->kind) {
      case kKVF32: zoom_head<float>(run, layer, z, i % heads, memory); break;
      case kKVF16: zoom_head<Half>(run, layer, z, i % heads, memory); break;
      case kKVBF16: zoom_head<BFloat>(run, layer, z, i % heads, memory); break;
      default: zoom_head<int8_t>(run, layer, z, i % heads, memory);
    }
  }
}

// Whether rows entered in a layer that are still to be fetched.
static bool any_to_fetch(const Run& run, int layer) {
  const int heads = run.model->kv_heads;
  for (int i = 0; i < run.batch->num_zooms; i++) {
    const Zoom& z = run.batch->zooms[i];
    for (int h = 0; h < heads && !z.at_hand[layer]; h++)
      if (z.entered[(size_t)layer * heads + h]) return true;
  }
  return false;
}

}  // namespace MKV_NAMESPACE
