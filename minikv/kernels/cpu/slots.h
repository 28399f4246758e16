// Damages of the nodes of trees over slots of 64 neighbouring entries, one slot of one lane at a time with
// all that is made of it in the processor's cache. The formulas are those of trees/gains.py and
// trees/measure.py of the policies, of which this is the compiled form.
//
// Nodes are numbered from the entries up: node 64 + j has the children 2 j and 2 j + 1. Whatever belongs to
// nodes lies node after node, with dimensions or rows (padded to whole vectors) side by side.
#pragma once

namespace MKV_NAMESPACE {

static constexpr int kSlot = 64, kInner = kSlot - 1, kNodes = 2 * kSlot - 1, kTreeLevels = 6;
static constexpr float kLeastAttention = 1e-30f, kPlainWeight = 0.1f, kMostLogit = 40.f;

static inline int parent_of(int node) { return kSlot + node / 2; }

static inline float dot(const float* a, const float* b, int n) {
  F8 sum = f8_zero();
  for (int i = 0; i < n; i += 8) sum = f8_fma(f8_load(a + i), f8_load(b + i), sum);
  return f8_hsum(sum);
}

// Sums over the entries of inner nodes, of `width` numbers of the `stride` that a node has.
static inline void add_up(float* rows, int stride, int width) {
  for (int j = 0; j < kInner; j++) {
    const float *left = rows + (size_t)2 * j * stride, *right = left + stride;
    float* sum = rows + (size_t)(kSlot + j) * stride;
    for (int i = 0; i < width; i += 8) f8_store(sum + i, f8_load(left + i) + f8_load(right + i));
  }
}

// Scratch

enum Fact { kCount, kPosition, kWeight, kFacts = 8 };              // of nodes; positions are times counts
enum Total { kRest, kOwnProduct, kOwnSquare, kProduct, kSquare, kTotals };  // over rows and heads, by lane

struct SlotScratch {
  float *facts, *attention, *chance, *excess, *value_out, *value_mass, *rooted;
  float *keys, *columns, *logits, *centred, *projected, *weighted, *against, *sums, *leaf, *totals, *squares;
  size_t size = 0;

  SlotScratch(const Slots& s, float* base) {
    const size_t all = (size_t)s.group * s.lanes, width = s.head_dim;
    const auto take = [&](size_t n) {
      float* at = base ? base + size : nullptr;
      size += (n + 15) / 16 * 16;
      return at;
    };
    facts = take(kNodes * kFacts);
    attention = take(kNodes * all);
    chance = take(kNodes * all);
    excess = take((size_t)kNodes * s.lanes);
    value_out = take((size_t)kNodes * s.lanes);
    value_mass = take((size_t)kInner * s.lanes);
    rooted = take((size_t)kSlot * s.lanes);
    keys = take(kNodes * width);
    columns = take(kSlot * width);
    logits = take((size_t)kSlot * s.queries);
    centred = take(kSlot * width);
    projected = take(kSlot * width);
    weighted = take(kNodes * width);
    against = take(kSlot * kTreeLevels);
    sums = take((size_t)kInner * s.rows * 8);
    leaf = take(kSlot);
    totals = take(kInner * kTotals * 8);
    squares = take(kInner * 8);
  }
};

// What a slot is

static void load_slot(const Slots& s, const SlotScratch& w, int lane, int slot) {
  const int first = slot * kSlot, here = s.entries - first < kSlot ? s.entries - first : kSlot;
  const size_t at = (size_t)lane * s.entries + first, all = (size_t)s.group * s.lanes;
  std::memset(w.facts, 0, sizeof(float) * kNodes * kFacts);
  std::memset(w.attention, 0, sizeof(float) * kSlot * all);
  for (int t = 0; t < here; t++) {
    w.facts[t * kFacts + kCount] = s.counts[at + t];
    w.facts[t * kFacts + kPosition] = s.counts[at + t] * (float)s.positions[at + t];
  }
  for (int h = 0; h < s.group; h++)
    for (int r = 0; r < s.rows; r++) {
      const float* row = s.attention + (((size_t)lane * s.group + h) * s.rows + r) * s.entries + first;
      float* to = w.attention + h * s.lanes + r;
      for (int t = 0; t < here; t++)
        if (s.counts[at + t] > 0) to[t * all] = row[t];
    }
  for (int t = 0; t < kSlot; t++) {
    float* to = w.centred + (size_t)t * s.head_dim;
    if (t >= here || !(s.counts[at + t] > 0)) {
      std::memset(to, 0, sizeof(float) * s.head_dim);
      continue;
    }
    const float* value = s.values + lane * s.value_stride + (size_t)(first + t) * s.head_dim;
    const float* origin = s.origins + (size_t)lane * s.head_dim;
    for (int d = 0; d < s.head_dim; d += 8) f8_store(to + d, f8_load(value + d) - f8_load(origin + d));
  }
}

// Weights of values: attention in units of the slot's mean for a token, and a share for every token.
static void weigh_values(const Slots& s, const SlotScratch& w, float* out) {
  const size_t all = (size_t)s.group * s.lanes;
  float seen[kSlot], total = 0, counts = 0;
  for (int t = 0; t < kSlot; t++) {
    F8 sum = f8_zero();
    for (size_t i = 0; i < all; i += 8)
      sum = f8_fma(f8_load(s.weights + i % s.lanes), f8_load(w.attention + t * all + i), sum);
    seen[t] = f8_hsum(sum);
    total += seen[t];
    counts += w.facts[t * kFacts + kCount];
  }
  const float mean = total / (counts > 1 ? counts : 1.f);
  for (int t = 0; t < kSlot; t++) {
    float* fact = w.facts + t * kFacts;
    out[t] = seen[t] / (mean > kLeastAttention ? mean : kLeastAttention) + kPlainWeight * fact[kCount];
    fact[kWeight] = out[t];
  }
}

// Chances: the attention that one token of a node's prototype gets

// Half-split rotation of a row by cos and sin [head_dim / 2], or by sign = -1 back.
static inline void turn(const float* x, const float* cos, const float* sin, float sign, float factor, float* y,
                        int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 8) {
    const F8 a = f8_load(x + i) * f8_set(factor), b = f8_load(x + half + i) * f8_set(factor);
    const F8 c = f8_load(cos + i), t = f8_load(sin + i) * f8_set(sign);
    f8_store(y + i, a * c - b * t);
    f8_store(y + half + i, f8_fma(a, t, b * c));
  }
}

// Mean keys of inner nodes, as they were before rotation, turned to where they stand: columns [head_dim][kSlot].
static void mean_keys(const Slots& s, const SlotScratch& w, int lane, int slot) {
  const int n = s.head_dim;
  const size_t first = (size_t)slot * kSlot;
  const int64_t* positions = s.positions + (size_t)lane * s.entries + first;
  for (int t = 0; t < kSlot; t++) {
    float* key = w.keys + (size_t)t * n;
    const float count = w.facts[t * kFacts + kCount];
    if (!(count > 0)) {
      std::memset(key, 0, sizeof(float) * n);
      continue;
    }
    const size_t angle = (size_t)positions[t] * s.angle_stride;
    turn(s.keys + lane * s.key_stride + (first + t) * n, s.cos + angle, s.sin + angle, -1.f, count * s.back, key, n);
  }
  add_up(w.keys, n, n);
  for (int j = 0; j < kInner; j++) {
    const float* fact = w.facts + (kSlot + j) * kFacts;
    const float inverse = 1.f / (fact[kCount] > 1 ? fact[kCount] : 1.f);
    // A sum of many large numbers may be rounded past the last position.
    const int position = std::min((int)std::nearbyint(fact[kPosition] * inverse), s.angles - 1);
    const size_t angle = (size_t)position * s.angle_stride;
    float* key = w.keys + (size_t)(kSlot + j) * n;
    turn(key, s.cos + angle, s.sin + angle, 1.f, inverse, key, n);
  }
  for (int d = 0; d < n; d++) {
    float* column = w.columns + (size_t)d * kSlot;
    for (int j = 0; j < kInner; j++) column[j] = w.keys[(size_t)(kSlot + j) * n + d];
    column[kInner] = 0;
  }
}

// Of own rows, from the squares of what their queries give to mean keys.
static void chances_of_queries(const Slots& s, const SlotScratch& w, int lane) {
  const size_t all = (size_t)s.group * s.lanes;
  for (int h = 0; h < s.group; h++) {
    const size_t head = (size_t)lane * s.group + h;
    product(s.query_rows + head * s.queries * s.head_dim, s.queries, s.head_dim, w.columns, w.logits, kSlot);
    const float *logits = w.logits, *normaliser = s.normalisers + head * s.queries;
    for (int r = 0; r < s.own; logits += (size_t)s.pools[r] * kSlot, normaliser += s.pools[r], r++) {
      float roots[kSlot];
      for (int i = 0; i < kSlot; i += 8) {
        F8 sum = f8_zero();
        for (int q = 0; q < s.pools[r]; q++) {
          const F8 logit = f8_load(logits + (size_t)q * kSlot + i) - f8_set(normaliser[q]);
          sum = sum + f8_exp(f8_min(logit + logit, f8_set(kMostLogit)));
        }
        f8_store(roots + i, f8_sqrt(sum / f8_set((float)s.pools[r])));
      }
      float* to = w.chance + kSlot * all + h * s.lanes + r;
      for (int j = 0; j < kInner; j++) to[j * all] = roots[j];
    }
  }
}

// Of rows that look ahead, from the mean logit of a node's entries; also of own rows that share a vector
// with them, which `chances_of_queries` then gives their own.
static void chances_ahead(const Slots& s, const SlotScratch& w, int lane, int slot) {
  const size_t all = (size_t)s.group * s.lanes;
  const int from = s.own / 8 * 8, first = slot * kSlot;
  for (int h = 0; h < s.group; h++) {
    float* chance = w.chance + h * s.lanes + from;
    const float* attention = w.attention + h * s.lanes + from;
    for (int t = 0; t < kSlot; t++) {
      const float count = w.facts[t * kFacts + kCount];
      const F8 mass = f8_set(count > 0 ? s.log_mass[(size_t)lane * s.entries + first + t] : 0.f);
      for (int i = 0; i < s.lanes - from; i += 8) {
        const F8 logit = f8_log(f8_max(f8_load(attention + t * all + i), f8_set(kLeastAttention))) - mass;
        f8_store(chance + t * all + i, logit * f8_set(count));
      }
    }
    add_up(chance, (int)all, s.lanes - from);
    for (int node = kSlot; node < kNodes; node++) {
      const float count = w.facts[node * kFacts + kCount];
      const F8 inverse = f8_set(1.f / (count > 1 ? count : 1.f));
      for (int i = 0; i < s.lanes - from; i += 8)
        f8_store(chance + node * all + i, f8_exp(f8_load(chance + node * all + i) * inverse));
    }
  }
}

// Forms, of one query head

// Of entries: squared errors without them, added to `leaf`, and what sums over nodes are made of.
static void leaf_forms(const Slots& s, const SlotScratch& w, size_t head, const float* attention) {
  const size_t all = (size_t)s.group * s.lanes;
  const float* out_squares = s.out_squares + head * s.lanes;
  // Products with outputs, which the next lines replace.
  product(w.projected, kSlot, s.head_dim, s.outputs + head * s.head_dim * s.lanes, w.value_out, s.lanes);
  for (int t = 0; t < kSlot; t++) {
    const float* value = w.projected + (size_t)t * s.head_dim;
    const F8 square = f8_set(dot(value, value, s.head_dim)), weight = f8_set(w.facts[t * kFacts + kWeight]);
    F8 error = f8_zero();
    for (int i = 0; i < s.lanes; i += 8) {
      const F8 p = f8_load(attention + t * all + i), out_square = f8_load(out_squares + i);
      const F8 along = f8_load(w.value_out + t * s.lanes + i), row = f8_load(s.weights + i);
      error = f8_fma(row * p * p, square - along + (out_square - along), error);
      f8_store(w.excess + t * s.lanes + i, (out_square - along) * p);
      f8_store(w.value_out + t * s.lanes + i, along * weight);
      f8_store(w.rooted + t * s.lanes + i, p * f8_sqrt(row));
    }
    w.leaf[t] += f8_hsum(error);
  }
  add_up(w.excess, s.lanes, s.lanes);
  add_up(w.value_out, s.lanes, s.lanes);
}

// Products of nodes' weighted values with the sums that attention makes of their entries', entry by entry
// with each node above it.
static void value_masses(const Slots& s, const SlotScratch& w, const float* attention) {
  const size_t all = (size_t)s.group * s.lanes;
  const int n = s.head_dim;
  for (int t = 0; t < kSlot; t++) {
    const F8 weight = f8_set(w.facts[t * kFacts + kWeight]);
    for (int d = 0; d < n; d += 8)
      f8_store(w.weighted + (size_t)t * n + d, f8_load(w.projected + (size_t)t * n + d) * weight);
  }
  add_up(w.weighted, n, n);
  std::memset(w.value_mass, 0, sizeof(float) * kInner * s.lanes);
  for (int t = 0; t < kSlot; t++) {
    int nodes[kTreeLevels];
    F8 sums[kTreeLevels];
    for (int level = 0, node = t; level < kTreeLevels; level++) {
      nodes[level] = node = parent_of(node);
      sums[level] = f8_zero();
    }
    for (int d = 0; d < n; d += 8) {
      const F8 value = f8_load(w.projected + (size_t)t * n + d);
      for (int level = 0; level < kTreeLevels; level++)
        sums[level] = f8_fma(value, f8_load(w.weighted + (size_t)nodes[level] * n + d), sums[level]);
    }
    for (int level = 0; level < kTreeLevels; level++) {
      const F8 along = f8_set(f8_hsum(sums[level]));
      float* to = w.value_mass + (size_t)(nodes[level] - kSlot) * s.lanes;
      for (int i = 0; i < s.lanes; i += 8)
        f8_store(to + i, f8_fma(f8_load(attention + t * all + i), along, f8_load(to + i)));
    }
  }
}

// Stores the sums that rows give and returns `square` plus their squares, in several sums that need not
// wait for each other.
template <class Sum>
static inline F8 plus_squares(F8 square, int rows, float* out, Sum sum_of) {
  constexpr int kParts = 4;
  F8 parts[kParts] = {square, f8_zero(), f8_zero(), f8_zero()};
  int first = 0;
  for (; first + kParts <= rows; first += kParts)
    for (int part = 0; part < kParts; part++) {
      const F8 sum = sum_of(first + part);
      f8_store(out + 8 * (first + part), sum);
      parts[part] = f8_fma(sum, sum, parts[part]);
    }
  for (int r = first; r < rows; r++) {
    const F8 sum = sum_of(r);
    f8_store(out + 8 * r, sum);
    parts[0] = f8_fma(sum, sum, parts[0]);
  }
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// |sum p v|^2 of inner nodes, added to `squares` by lane, with p from `rooted`, in which rows have their
// weight. Eight dimensions at a time.
static void add_squares(const Slots& s, const SlotScratch& w) {
  const int rows = s.rows, n = s.head_dim;
  const size_t step = (size_t)rows * 8;
  for (int d = 0; d < n; d += 8)
    for (int j = 0; j < kInner; j++) {
      float *out = w.sums + j * step, *square = w.squares + 8 * j;
      if (j < kSlot / 2) {
        const float *left = w.rooted + (size_t)2 * j * s.lanes, *right = left + s.lanes;
        const float* values = w.projected + (size_t)2 * j * n + d;
        const F8 a = f8_load(values), b = f8_load(values + n);
        const auto sum = [&](int r) { return f8_fma(b, f8_set(right[r]), a * f8_set(left[r])); };
        f8_store(square, plus_squares(f8_load(square), rows, out, sum));
      } else {
        const float *left = w.sums + (2 * j - kSlot) * step, *right = left + step;
        const auto sum = [&](int r) { return f8_load(left + 8 * r) + f8_load(right + 8 * r); };
        f8_store(square, plus_squares(f8_load(square), rows, out, sum));
      }
    }
}

// What errors with and without prototypes are made of, added over rows to `totals` by lane.
static void add_totals(const Slots& s, const SlotScratch& w, size_t head, const float* attention,
                       const float* chances) {
  const size_t all = (size_t)s.group * s.lanes;
  for (int j = 0; j < kInner; j++) {
    const int node = kSlot + j;
    const float weight = w.facts[node * kFacts + kWeight];
    const float* value = w.weighted + (size_t)node * s.head_dim;
    const F8 inverse = f8_set(1.f / (weight > kPlainWeight ? weight : kPlainWeight));
    const F8 value_square = f8_set(dot(value, value, s.head_dim)) * inverse * inverse;
    float* total = w.totals + j * kTotals * 8;
    const auto add = [&](Total which, F8 row, F8 x) {
      f8_store(total + 8 * which, f8_fma(row, x, f8_load(total + 8 * which)));
    };
    for (int i = 0; i < s.lanes; i += 8) {
      const F8 mass = f8_load(attention + node * all + i), chance = f8_load(chances + node * all + i);
      const F8 excess = f8_load(w.excess + (size_t)node * s.lanes + i);
      const F8 out = f8_load(w.value_out + (size_t)node * s.lanes + i);
      const F8 out_square = f8_load(s.out_squares + head * s.lanes + i);
      const F8 inner = mass * out - f8_load(w.value_mass + (size_t)j * s.lanes + i);
      const F8 product = (excess - inner * inverse) * chance;
      const F8 along = out * inverse;
      const F8 square = f8_max(out_square - along + (value_square - along), f8_zero()) * (chance * chance);
      const F8 row = f8_load(s.weights + i), own = f8_load(s.own_weights + i);
      add(kRest, row, mass * (excess + excess - mass * out_square));
      add(kOwnProduct, own, product);
      add(kOwnSquare, own, square);
      add(kProduct, row, product);
      add(kSquare, row, square);
    }
  }
}

static void store_slot(const Slots& s, const SlotScratch& w, int lane, int slot) {
  const auto positive = [](float x) { return x > 0 ? x : 0.f; };
  float* drop = s.drop + ((size_t)lane * s.slots + slot) * kNodes;
  for (int t = 0; t < kSlot; t++) drop[t] = positive(w.leaf[t]);
  float* out[2] = {s.products, s.squares};
  for (int j = 0; j < kInner; j++) {
    const float* total = w.totals + j * kTotals * 8;
    const auto sum = [&](int which) { return f8_hsum(f8_load(total + 8 * which)); };
    drop[kSlot + j] = positive(sum(kRest) + f8_hsum(f8_load(w.squares + 8 * j)));
    for (int all = 0; all < 2; all++)
      for (int square = 0; square < 2; square++)
        out[square][(((size_t)lane * 2 + all) * s.slots + slot) * kInner + j] = sum(kOwnProduct + 2 * all + square);
  }
}

static size_t slot_scratch(const Slots& s) { return SlotScratch(s, nullptr).size; }

// The slot `item` of all lanes, counted lane after lane.
static void slot_sums(const Slots& s, float* scratch, int item) {
  const int lane = item / s.slots, slot = item % s.slots;
  const SlotScratch w(s, scratch);
  load_slot(s, w, lane, slot);
  weigh_values(s, w, s.value_weights + (size_t)item * kSlot);
  add_up(w.facts, kFacts, kFacts);
  mean_keys(s, w, lane, slot);
  chances_ahead(s, w, lane, slot);
  chances_of_queries(s, w, lane);
  const int all = s.group * s.lanes;
  add_up(w.attention, all, all);
  std::memset(w.leaf, 0, sizeof(float) * kSlot);
  std::memset(w.totals, 0, sizeof(float) * kInner * kTotals * 8);
  std::memset(w.squares, 0, sizeof(float) * kInner * 8);
  for (int h = 0; h < s.group; h++) {
    const size_t head = (size_t)lane * s.group + h;
    const float* attention = w.attention + h * s.lanes;
    product_below(w.centred, kSlot, s.head_dim, s.roots + head * s.head_dim * s.head_dim, w.projected);
    leaf_forms(s, w, head, attention);
    value_masses(s, w, attention);
    add_squares(s, w);
    add_totals(s, w, head, attention, w.chance + h * s.lanes);
  }
  store_slot(s, w, lane, slot);
}

}  // namespace MKV_NAMESPACE
