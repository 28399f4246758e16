// What attention single tokens of spans are expected to draw from the queries of a step, from codes in the lanes.
//
// Codes are read eight neighbouring entries at a time, in cells of a token each or of a few. A cell's number
// says its place in [groups of entries][cells of an entry][8]. One thread does one (sequence, KV head).
#pragma once

namespace MKV_NAMESPACE {

static constexpr int kLevels = 16, kCells = 8, kZoomTile = 8;
static constexpr float kMuted = -1e29f;  // log masses below this are of entries that attention does not see

// What a thread works in. `count` cells in all, for `rows` query rows.
struct ZoomRoom {
  int count, rows;
  float *scores, *worth, *sizes;  // [kZoomTile][count], [count], [count]
  float *numbers, *digits;        // [2 * head_dim][8], [digits][head_dim / 4][8]
  float *basis;                   // [2 * basis_entries][head_dim]
  float *weights, *constants, *others;  // [rows][head_dim / 4], [rows], [rows]
  uint64_t* keys;                 // [count]
  int64_t* entries;               // [groups], slots of the first of eight entries
  int32_t* span_at;               // [groups][8]
  uint8_t* flags;                 // [count]
};

// Deals out memory in order; from null it counts bytes.
struct Carver {
  uintptr_t at;
  template <class T>
  T* take(size_t n) {
    T* found = (T*)at;
    at += (n * sizeof(T) + 63) / 64 * 64;
    return found;
  }
};

static size_t carve(const Model& m, const Batch& b, const Zoom& z, char* from, ZoomRoom& room) {
  Carver carver{(uintptr_t)from};
  const size_t count = (size_t)z.groups * kCells * z.digits * 8, components = m.head_dim / 4;
  const size_t tokens = b.row_starts[z.sequence + 1] - b.row_starts[z.sequence];
  const size_t rows = tokens * (m.query_heads / m.kv_heads);
  room.count = (int)count;
  room.rows = (int)rows;
  room.scores = carver.take<float>(kZoomTile * count);
  room.worth = carver.take<float>(count);
  room.sizes = carver.take<float>(count);
  room.numbers = carver.take<float>(16 * m.head_dim);
  room.digits = carver.take<float>(8 * components * z.digits);
  room.weights = carver.take<float>(rows * components);
  room.constants = carver.take<float>(rows);
  room.others = carver.take<float>(rows);
  room.keys = carver.take<uint64_t>(count);
  room.entries = carver.take<int64_t>(z.groups);
  room.span_at = carver.take<int32_t>((size_t)z.groups * 8);
  room.flags = carver.take<uint8_t>(count);
  return carver.at - (uintptr_t)from;
}

static size_t zoom_bytes(const Model& m, const Batch& b) {
  size_t most = 0;
  ZoomRoom room;
  for (int i = 0; i < b.num_zooms; i++) most = std::max(most, carve(m, b, b.zooms[i], nullptr, room));
  return most;
}

// A query with the value of an entry.
template <class KV>
static inline float value_score(const Pool& pool, const KV* values, int64_t slot, const float* q, int n) {
  const KV* row = values + (size_t)slot * n;
  F8 sum = f8_zero();
  for (int d = 0; d < n; d += 8) sum = f8_fma(f8_load_as(row + d), f8_load(q + d), sum);
  return f8_hsum(sum) * (sizeof(KV) == 1 ? pool.value_scales[slot] : 1.f);
}

// What a level of each code adds to the score of each query row, and what no code does.
template <class KV>
static void weigh_codes(const Run& run, int layer, const Zoom& z, int head, const Queries& queries,
                        const ZoomRoom& room) {
  const Model& m = *run.model;
  const Pool& pool = *run.pool;
  const int n = m.head_dim, components = n / 4;
  const int64_t* slots = z.basis + ((size_t)layer * m.kv_heads + head) * z.basis_entries;
  Lane<KV> lane = lane_of<KV>(run, layer, z.sequence, head);
  lane.masses = nullptr;
  for (int row = 0; row < room.rows; row++) {
    const float* q = queries.query(row);
    const size_t asking = (size_t)layer * m.query_heads + head * queries.group + row % queries.group;
    float* weights = room.weights + (size_t)row * components;
    float keys[1][kBlock], sum = 0, constant = 0;
    int64_t read = -1;
    for (int i = 0; i <= components; i++) {
      const int64_t slot = slots[i / 2];
      // The first of all is the mean; keys and values follow each other.
      if (i % 2 == 0 && read != slot / 8) {
        read = slot / 8;
        score_part<KV, 1, 1>(lane, (int)(slot / kPage), (int)(slot % kPage / 8 * 8), &q, keys, 0, Ahead{});
      }
      const float score = i % 2 ? value_score(pool, (const KV*)pool.values, slot, q, n) * lane.scale : keys[0][slot % 8];
      if (i == 0) {
        constant = score + (z.bias ? z.bias[asking] * lane.scale : 0.f);
        continue;
      }
      weights[i - 1] = score * (z.scale ? z.scale[asking * components + i - 1] : 1.f);
      sum += weights[i - 1];
    }
    room.constants[row] = constant - sum * ((kLevels - 1) / 2.f);
  }
}

// The log-sum-exp over what the lane holds beside the area and spans, for each query row; all see all new rows.
template <class KV, int R>
static void other_mass(const Lane<KV>& lane, int64_t from, int64_t to, const float* const* q, float* out) {
  alignas(32) float scores[R][kBlock];
  Partial sum[R];
  for (int r = 0; r < R; r++) sum[r] = {-1e30f, 0.f};
  int count = 0, last = 0;
  for (int64_t entry = from; entry < to; entry += 8) {
    const int page = lane.pages[entry / kPage], place = (int)(entry % kPage);
    if (f8_hmax(f8_load(lane.masses + (size_t)page * kPage + place)) > kMuted) {
      score_part<KV, R, 1>(lane, page, place, q, scores, count, Ahead{});
      last = (int)std::min<int64_t>(8, to - entry);
      count += 8;
    }
    if (!count || (count < kBlock && entry + 8 < to)) continue;
    for (int r = 0; r < R; r++) {
      const Partial next = softmax_row(scores[r], count - 8 + last, count);
      const float peak = std::max(sum[r].peak, next.peak);
      sum[r] = {peak, sum[r].total * std::exp(sum[r].peak - peak) + next.total * std::exp(next.peak - peak)};
    }
    count = 0;
  }
  for (int r = 0; r < R; r++) out[r] = sum[r].peak + std::log(sum[r].total);
}

template <class KV>
static void other_masses(const Run& run, int layer, const Zoom& z, int head, const Queries& queries,
                         const ZoomRoom& room) {
  Lane<KV> lane = lane_of<KV>(run, layer, z.sequence, head);
  lane.masses = run.pool->masses;
  const int64_t to = queries.past + room.rows / queries.group;
  for (int row = 0; row < room.rows;) {
    const float* q[4];
    int count = 0;
    for (; count < 4 && row + count < room.rows; count++) q[count] = queries.query(row + count);
    float* out = room.others + row;
    if (count == 4) other_mass<KV, 4>(lane, z.beside, to, q, out);
    else if (count == 3) other_mass<KV, 3>(lane, z.beside, to, q, out);
    else if (count == 2) other_mass<KV, 2>(lane, z.beside, to, q, out);
    else other_mass<KV, 1>(lane, z.beside, to, q, out);
    row += count;
  }
}

// Which spans lie in each group of eight neighbouring entries; how many groups there are.
static int group_spans(const Zoom& z, size_t lane, const ZoomRoom& room) {
  const int64_t *sizes = z.sizes + lane * z.spans, *slots = z.slots + lane * z.spans;
  int groups = 0;
  for (int i = 0; i < z.spans; i++) {
    if (!sizes[i]) continue;
    const int64_t first = slots[i] / 8 * 8;
    if (!groups || room.entries[groups - 1] != first) {
      for (int l = 0; l < 8; l++) room.span_at[groups * 8 + l] = -1;
      room.entries[groups++] = first;
    }
    room.span_at[(groups - 1) * 8 + slots[i] % 8] = i;
  }
  return groups;
}

// The place in a span of so many tokens where a cell begins that is used.
static inline int64_t first_of(int64_t cell, int64_t tokens, int cells) {
  return cell * tokens / std::min<int64_t>(tokens, cells);
}

// How many tokens each cell has.
static void fill_sizes(const Zoom& z, size_t lane, int groups, const ZoomRoom& room) {
  const int cells = kCells * z.digits;
  for (int g = 0; g < groups; g++) {
    alignas(32) float tokens[8];
    for (int l = 0; l < 8; l++) {
      const int span = room.span_at[g * 8 + l];
      tokens[l] = span < 0 ? 0 : (float)z.sizes[lane * z.spans + span];
    }
    float* out = room.sizes + (size_t)g * cells * 8;
    for (int k = 0; k < cells; k++)
      f8_store(out + k * 8, f8_min(f8_max(f8_load(tokens) - f8_set((float)k), f8_zero()), f8_set(1.f)));
    for (int l = 0; l < 8; l++) {
      if (tokens[l] <= cells) continue;
      // A cell begins at cell * tokens / cells, rounded down.
      const int each = (int)tokens[l] / cells, left = (int)tokens[l] % cells;
      for (int k = 0, over = 0; k < cells; k++) {
        over += left;
        out[k * 8 + l] = (float)(each + (over >= cells));
        over -= over >= cells ? cells : 0;
      }
    }
  }
}

// The numbers of eight neighbouring entries, keys before values, raised so that none is negative.
template <class KV>
static void read_numbers(const Pool& pool, int64_t first, int n, float raise, float* out) {
  const KV* key = (const KV*)pool.keys + (size_t)(first / kPage) * n * kPage + first % kPage;
  const KV* value = (const KV*)pool.values + (size_t)first * n;
  const F8 up = f8_set(raise);
  for (int d = 0; d < n; d++) {
    F8 x = f8_load_as(key + (size_t)d * kPage);
    if (sizeof(KV) == 1) x = f8_round(x * f8_load(pool.key_scales + first));
    f8_store(out + d * 8, x + up);
  }
  out += 8 * n;
  for (int d = 0; d < n; d += 8) {
    F8 rows[8];
    for (int l = 0; l < 8; l++) {
      F8 x = f8_load_as(value + (size_t)l * n + d);
      if (sizeof(KV) == 1) x = f8_round(x * f8_set(pool.value_scales[first + l]));
      rows[l] = x + up;
    }
    f8_transpose(rows);
    for (int e = 0; e < 8; e++) f8_store(out + (d + e) * 8, rows[e]);
  }
}

// The codes [D][components][8] that so many numbers hold.
template <int D>
static inline void split_digits(const float* numbers, int components, float* digits) {
  for (int j = 0; j < components; j++) {
    F8 rest = f8_load(numbers + j * 8);
    for (int d = D - 1; d > 0; d--) {
      const float unit = d == 2 ? kLevels * kLevels : kLevels;
      // Whole numbers: half a unit less, and a half, leave no ties to rounding.
      const F8 high = f8_round((rest - f8_set((unit - 1) / 2)) * f8_set(1 / unit));
      rest = f8_fma(high, f8_set(-unit), rest);
      f8_store(digits + (d * components + j) * 8, high);
    }
    f8_store(digits + j * 8, rest);
  }
}

// Scores of R query rows with the cells of D digits, not below `peaks`, which rise; -1e30 where there is no cell.
template <int D, int R>
static inline void score_cells(const float* digits, int components, const float* weights, const float* constants,
                               const float* sizes, float* scores, size_t stride, F8* peaks) {
  F8 sum[D][R];
  for (int d = 0; d < D; d++)
    for (int r = 0; r < R; r++) sum[d][r] = f8_set(constants[r]);
  for (int j = 0; j < components; j++) {
    F8 w[R];
    for (int r = 0; r < R; r++) w[r] = f8_set(weights[(size_t)r * components + j]);
    for (int d = 0; d < D; d++) {
      const F8 code = f8_load(digits + (d * components + j) * 8);
      for (int r = 0; r < R; r++) sum[d][r] = f8_fma(code, w[r], sum[d][r]);
    }
  }
  for (int d = 0; d < D; d++) {
    const size_t at = (size_t)d * kCells * 8;
    const F8 cap = f8_fma(f8_load(sizes + at), f8_set(2e30f), f8_set(-1e30f));
    for (int r = 0; r < R; r++) {
      const F8 score = f8_min(sum[d][r], cap);
      f8_store(scores + r * stride + at, score);
      peaks[r] = f8_max(peaks[r], score);
    }
  }
}

template <int D>
static void score_rows(const ZoomRoom& room, int components, int first, int rows, size_t at, F8* peaks) {
  for (int r = 0; r < rows;) {
    const float* weights = room.weights + (size_t)(first + r) * components;
    const float *constants = room.constants + first + r, *sizes = room.sizes + at;
    float* scores = room.scores + (size_t)r * room.count + at;
    const auto score = [&](auto count) {
      score_cells<D, decltype(count)::value>(room.digits, components, weights, constants, sizes, scores,
                                             room.count, peaks + r);
    };
    const int left = rows - r;
    if (left >= 4) score(std::integral_constant<int, 4>());
    else if (left == 3) score(std::integral_constant<int, 3>());
    else if (left == 2) score(std::integral_constant<int, 2>());
    else score(std::integral_constant<int, 1>());
    r += left < 4 ? left : 4;
  }
}

// Scores of query rows [first, first + rows) with all cells.
template <class KV, int D>
static void score_tile(const Run& run, const ZoomRoom& room, int groups, int first, int rows, F8* peaks) {
  const int n = run.model->head_dim, components = n / 4;
  const float raise = D == 3 ? 2048.f : D == 2 ? 128.f : 8.f;
  for (int r = 0; r < rows; r++) peaks[r] = f8_set(-1e30f);
  for (int g = 0; g < groups; g++) {
    read_numbers<KV>(*run.pool, room.entries[g], n, raise, room.numbers);
    for (int c = 0; c < kCells; c++) {
      split_digits<D>(room.numbers + (size_t)c * components * 8, components, room.digits);
      score_rows<D>(room, components, first, rows, ((size_t)g * D * kCells + c) * 8, peaks);
    }
  }
}

// Adds to the worth of cells the mean attention mass of one token, over all query rows, of which these are some.
static void add_worth(const ZoomRoom& room, int count, int first, int rows, const F8* peaks) {
  float factors[kZoomTile];
  for (int r = 0; r < rows; r++) {
    float* scores = room.scores + (size_t)r * room.count;
    const float peak = f8_hmax(peaks[r]), other = room.others[first + r];
    F8 total = f8_zero();
    for (int i = 0; i < count; i += 8) {
      const F8 e = f8_exp(f8_load(scores + i) - f8_set(peak));
      f8_store(scores + i, e);
      total = f8_fma(e, f8_load(room.sizes + i), total);
    }
    const float most = std::max(peak, other);
    factors[r] = std::exp(peak - most) /
                 ((f8_hsum(total) * std::exp(peak - most) + std::exp(other - most)) * (float)room.rows);
  }
  for (int i = 0; i < count; i += 8) {
    F8 sum = first ? f8_load(room.worth + i) : f8_zero();
    for (int r = 0; r < rows; r++)
      sum = f8_fma(f8_load(room.scores + (size_t)r * room.count + i), f8_set(factors[r]), sum);
    f8_store(room.worth + i, sum);
  }
}

template <class KV>
static void estimate(const Run& run, const Zoom& z, const ZoomRoom& room, int groups) {
  const int count = groups * kCells * z.digits * 8;
  F8 peaks[kZoomTile];
  for (int first = 0; first < room.rows; first += kZoomTile) {
    const int rows = std::min(kZoomTile, room.rows - first);
    if (z.digits == 3) score_tile<KV, 3>(run, room, groups, first, rows, peaks);
    else if (z.digits == 2) score_tile<KV, 2>(run, room, groups, first, rows, peaks);
    else score_tile<KV, 1>(run, room, groups, first, rows, peaks);
    add_worth(room, count, first, rows, peaks);
  }
}

}  // namespace MKV_NAMESPACE
