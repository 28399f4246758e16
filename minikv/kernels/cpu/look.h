// What queries see of the entries of a lane, some queries of a head at a time, as many as have their attention
// to all entries in the second nearest cache. The torch form is in trees/probes.py of the policies.
#pragma once

namespace MKV_NAMESPACE {

static constexpr int kLookBlock = 64;           // entries whose keys or values are in the nearest cache at a time
static constexpr size_t kLookFloats = 1 << 17;  // of attention at a time

static inline size_t look_width(const Looks& s) {
  return (size_t)(s.entries + kLookBlock - 1) / kLookBlock * kLookBlock;
}

// Rows of a head that are taken together, and their queries; one row at least.
struct LookPart {
  int row, rows, query, queries;

  static LookPart at(const Looks& s, int row, int query) {
    LookPart part{row, 0, query, 0};
    do part.queries += s.pools[row + part.rows++];
    while (row + part.rows < s.rows &&
           (part.queries + s.pools[row + part.rows]) * look_width(s) <= kLookFloats);
    return part;
  }
};

struct LookScratch {
  float *columns, *bias, *attention, *means, *tops, *inverse, *seen, *rest;
  int* absent;
  size_t size = 0;

  LookScratch(const Looks& s, float* base) {
    int rows = 0, queries = 0, query = 0;
    for (int row = 0; row < s.rows;) {
      const LookPart part = LookPart::at(s, row, query);
      rows = std::max(rows, part.rows), queries = std::max(queries, part.queries);
      row += part.rows, query += part.queries;
    }
    const size_t width = look_width(s);
    const auto take = [&](size_t n) {
      float* at = base ? base + size : nullptr;
      size += (n + 15) / 16 * 16;
      return at;
    };
    columns = take(width * s.head_dim);
    bias = take(width);
    attention = take(queries * width);
    means = take(s.wanted ? 0 : rows * width);
    tops = take((size_t)queries * 8);
    inverse = take(queries);
    seen = take((size_t)std::max(queries, rows) * s.head_dim);
    rest = take((size_t)queries * s.head_dim);
    absent = (int*)take(width);
  }
};

// Keys of a lane, block by block with entries side by side, and the bias of each; returns how many entries
// are not to be summed over, which `absent` lists.
static int load_lane(const Looks& s, const LookScratch& w, int lane) {
  const int n = s.head_dim;
  const float* keys = s.keys + lane * s.key_stride;
  const size_t first = (size_t)lane * s.entries, width = look_width(s);
  for (size_t t = 0; t < width; t += 8) {
    float* columns = w.columns + t / kLookBlock * kLookBlock * n + t % kLookBlock;
    for (int d = 0; d < n; d += 8) {
      F8 x[8];
      for (size_t i = 0; i < 8; i++)
        x[i] = t + i < (size_t)s.entries ? f8_load(keys + (t + i) * n + d) : f8_zero();
      f8_transpose(x);
      for (int i = 0; i < 8; i++) f8_store(columns + (d + i) * kLookBlock, x[i]);
    }
  }
  int absent = 0;
  for (size_t t = 0; t < width; t++) {
    w.bias[t] = t < (size_t)s.entries ? s.bias[first + t] : -INFINITY;
    if (w.bias[t] == -INFINITY || (s.wanted && !s.wanted[first + t])) w.absent[absent++] = (int)t;
  }
  return absent;
}

// For each entry that a query does not see, of those near the end.
template <class Each>
static inline void each_hidden(const Looks& s, int lane, int query, int begin, int end, Each each) {
  if (query >= s.hiding) return;
  const int64_t* positions = s.positions + (size_t)lane * s.entries;
  for (int t = std::max(begin, s.late); t < std::min(end, s.entries); t++)
    if (positions[t] > s.at[query]) each(t);
}

// Logits of a part's queries, and the largest of each by lane of a vector.
static void look_logits(const Looks& s, const LookScratch& w, int lane, const float* queries, LookPart part) {
  const int n = s.head_dim;
  const size_t width = look_width(s);
  for (int q = 0; q < part.queries; q++) f8_store(w.tops + 8 * q, f8_set(-INFINITY));
  for (size_t t = 0; t < width; t += kLookBlock) {
    product({queries, (size_t)n}, part.queries, n, {w.columns + t * n, kLookBlock}, w.attention + t, width,
            kLookBlock);
    for (int q = 0; q < part.queries; q++) {
      float* logits = w.attention + q * width + t;
      for (int i = 0; i < kLookBlock; i += 8) f8_store(logits + i, f8_load(logits + i) + f8_load(w.bias + t + i));
      each_hidden(s, lane, part.query + q, (int)t, (int)t + kLookBlock,
                  [&](int hidden) { logits[hidden - (int)t] = -INFINITY; });
      F8 top = f8_load(w.tops + 8 * q);
      for (int i = 0; i < kLookBlock; i += 8) top = f8_max(f8_load(logits + i), top);
      f8_store(w.tops + 8 * q, top);
    }
  }
}

// Powers of one query in the place of its logits, 0 for what is absent, of which `rest` becomes the sum of
// powers times values; and the query's numbers.
static void look_powers(const Looks& s, const LookScratch& w, int lane, size_t at, int query, int q, int absent) {
  const int n = s.head_dim;
  const size_t width = look_width(s);
  float *row = w.attention + q * width, *rest = w.rest + (size_t)q * n;
  const float top = f8_hmax(f8_load(w.tops + 8 * q));
  std::memset(rest, 0, sizeof(float) * n);
  if (top == -INFINITY) {  // a query that sees nothing
    std::memset(row, 0, sizeof(float) * width);
    w.inverse[q] = 0;
    s.normalisers[at] = INFINITY;
    if (s.wanted) s.sums[at] = 0;
    return;
  }
  float others = 0;
  for (int i = 0; i < absent; i++) {
    const int t = w.absent[i];
    // Past the end a logit is not what it is made of where the query is infinite.
    if (t >= s.entries || row[t] == -INFINITY) continue;
    const float power = std::exp(row[t] - top);
    const float* value = s.values + lane * s.value_stride + (size_t)t * n;
    for (int d = 0; d < n; d += 8) f8_store(rest + d, f8_fma(f8_set(power), f8_load(value + d), f8_load(rest + d)));
    others += power;
  }
  for (size_t t = 0; t < width; t += 8) f8_store(row + t, f8_exp(f8_load(row + t) - f8_set(top)));
  for (int i = 0; i < absent; i++) row[w.absent[i]] = 0;
  each_hidden(s, lane, query, 0, s.entries, [&](int hidden) { row[hidden] = 0; });
  F8 sums[4] = {f8_zero(), f8_zero(), f8_zero(), f8_zero()};
  for (size_t t = 0; t < width; t += 32)
    for (int i = 0; i < 4; i++) sums[i] = sums[i] + f8_load(row + t + 8 * i);
  const float sum = f8_hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  w.inverse[q] = 1 / (sum + others);
  s.normalisers[at] = top + std::log(sum + others);
  if (s.wanted) s.sums[at] = sum * w.inverse[q];
}

// Roots of the mean squares of a row's attention, and without `wanted` its mean.
static void look_pools(const Looks& s, const LookScratch& w, size_t head, LookPart part) {
  const size_t width = look_width(s);
  int q = 0;
  for (int r = 0; r < part.rows; r++) {
    const int pool = s.pools[part.row + r];
    const float *powers = w.attention + q * width, *inverse = w.inverse + q;
    float* out = s.attention + (head * s.rows + part.row + r) * s.entries;
    const F8 share = f8_set(1.f / (float)pool);
    for (int t = 0; t < s.entries; t += 8) {
      F8 mean = f8_zero(), square = f8_zero();
      for (int i = 0; i < pool; i++) {
        const F8 chance = f8_load(powers + i * width + t) * f8_set(inverse[i]);
        mean = mean + chance;
        square = f8_fma(chance, chance, square);
      }
      if (!s.wanted) f8_store(w.means + r * width + t, mean * share);
      float roots[8];
      f8_store(roots, f8_sqrt(square * share));
      std::memcpy(out + t, roots, sizeof(float) * std::min(8, s.entries - t));
    }
    q += pool;
  }
}

// Sums of values: of every query with `wanted`, else of rows; and what rows put out.
static void look_values(const Looks& s, const LookScratch& w, int lane, size_t head, LookPart part) {
  const int n = s.head_dim, rows = s.wanted ? part.queries : part.rows;
  const size_t width = look_width(s);
  const float* values = s.values + lane * s.value_stride;
  const float* attention = s.wanted ? w.attention : w.means;
  std::memset(w.seen, 0, sizeof(float) * rows * n);
  for (int t = 0; t < s.entries; t += kLookBlock)
    product<true>({attention + t, width}, rows, std::min(kLookBlock, s.entries - t),
                  {values + (size_t)t * n, (size_t)n}, w.seen, (size_t)n, n);
  float* out = s.outputs + (head * s.rows + part.row) * n;
  if (!s.wanted) {
    std::memcpy(out, w.seen, sizeof(float) * rows * n);
    return;
  }
  float* means = s.means + (head * s.queries + part.query) * n;
  int q = 0;
  for (int r = 0; r < part.rows; r++, out += n) {
    const int pool = s.pools[part.row + r];
    const F8 share = f8_set(1.f / (float)pool);
    std::memset(out, 0, sizeof(float) * n);
    for (int end = q + pool; q < end; q++)
      for (int d = 0; d < n; d += 8) {
        const F8 inverse = f8_set(w.inverse[q]), seen = f8_load(w.seen + (size_t)q * n + d);
        f8_store(means + (size_t)q * n + d, seen * inverse);
        const F8 all = (seen + f8_load(w.rest + (size_t)q * n + d)) * inverse;
        f8_store(out + d, f8_fma(all, share, f8_load(out + d)));
      }
  }
}

static size_t look_scratch(const Looks& s) { return LookScratch(s, nullptr).size; }

static void look(const Looks& s, float* scratch, int lane) {
  const LookScratch w(s, scratch);
  const int absent = load_lane(s, w, lane);
  for (int h = 0; h < s.group; h++) {
    const size_t head = (size_t)lane * s.group + h;
    for (int row = 0, query = 0; row < s.rows;) {
      const LookPart part = LookPart::at(s, row, query);
      const size_t first = head * s.queries + query;
      look_logits(s, w, lane, s.query_rows + first * s.head_dim, part);
      for (int q = 0; q < part.queries; q++) look_powers(s, w, lane, first + q, query + q, q, absent);
      look_pools(s, w, head, part);
      look_values(s, w, lane, head, part);
      row += part.rows, query += part.queries;
    }
  }
}

}  // namespace MKV_NAMESPACE
