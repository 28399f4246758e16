// Attention of query rows over the pages of one lane.
//
// A key page is [head_dim][32], a value page [32][head_dim]. Entries are taken in blocks of 256 by
// their place in the lane; a block gives each query row a maximum, a sum and a weighted value, and
// blocks are merged in order. That makes the result of a row the same bits however the rows were
// grouped into passes and the blocks dealt out to threads.
#pragma once

namespace MKV_NAMESPACE {

static constexpr int kPage = 32, kBlockPages = 8, kBlock = kPage * kBlockPages;

template <class KV>
struct Lane {
  const KV *keys, *values;                     // page pool
  const float *key_scales, *value_scales;      // [pages][32], int8 only
  const float* masses;                         // [pages][32], or null when all are zero
  const int32_t* pages;
  int head_dim;
  float scale;
};

// Pages to fetch while others are read: they lie anywhere in memory, where the hardware does not look
// ahead. Each read of a row fetches one, so that fetching never gets ahead of what memory delivers.
struct Ahead {
  const char *key, *value;  // both null where they are at hand already
};

template <class KV>
static inline void prefetch_row(const char* page, int row) {
  for (size_t line = 0; line < kPage * sizeof(KV); line += 64) prefetch_far(page + row * kPage * sizeof(KV) + line);
}

// Scores of R rows with the 8 * V entries from `start` of one page.
template <class KV, int R, int V>
static inline void score_part(const Lane<KV>& lane, int page, int start, const float* const* q,
                              float (*scores)[kBlock], int at, const Ahead& ahead) {
  const KV* k = lane.keys + (size_t)page * lane.head_dim * kPage + start;
  F8 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = f8_zero();
  for (int d = 0; d < lane.head_dim; d++, k += kPage) {
    if (ahead.key && (V == 4 || start == 0)) prefetch_row<KV>(ahead.key, d);
    if (ahead.key && (V == 4 || start != 0)) prefetch_row<KV>(ahead.value, d);
    F8 key[V];
    for (int v = 0; v < V; v++) key[v] = f8_load_as(k + 8 * v);
    for (int r = 0; r < R; r++) {
      const F8 x = f8_set(q[r][d]);
      for (int v = 0; v < V; v++) acc[r][v] = f8_fma(key[v], x, acc[r][v]);
    }
  }
  const size_t entry = (size_t)page * kPage + start;
  for (int v = 0; v < V; v++) {
    F8 factor = f8_set(lane.scale);
    if (sizeof(KV) == 1) factor = factor * f8_load(lane.key_scales + entry + 8 * v);
    for (int r = 0; r < R; r++) {
      F8 score = acc[r][v] * factor;
      if (lane.masses) score = score + f8_load(lane.masses + entry + 8 * v);
      f8_store(scores[r] + at + 8 * v, score);
    }
  }
}

// exp(score - peak) in place for the first `valid` of `count` scores, zero for the rest.
static inline Partial softmax_row(float* scores, int valid, int count) {
  for (int i = valid; i < count; i++) scores[i] = -1e30f;
  F8 peak = f8_set(-1e30f);
  for (int i = 0; i < count; i += 8) peak = f8_max(peak, f8_load(scores + i));
  const float most = f8_hmax(peak);
  F8 total = f8_zero();
  for (int i = 0; i < count; i += 8) {
    const F8 e = f8_exp(f8_load(scores + i) - f8_set(most));
    f8_store(scores + i, e);
  }
  for (int i = valid; i < count; i++) scores[i] = 0;
  for (int i = 0; i < count; i += 8) total = total + f8_load(scores + i);
  return {most, f8_hsum(total)};
}

// Weighted values of R rows in the 8 * V dimensions from `start`.
template <class KV, int R, int V>
static inline void value_part(const Lane<KV>& lane, const int32_t* pages, int count, int start,
                              const float (*weights)[kBlock], float* const* out) {
  F8 acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = f8_zero();
  for (int first = 0; first < count; first += kPage) {
    const int entries = count - first < kPage ? count - first : kPage;
    const KV* row = lane.values + (size_t)pages[first / kPage] * kPage * lane.head_dim + start;
    for (int e = 0; e < entries; e++, row += lane.head_dim) {
      F8 value[V];
      for (int v = 0; v < V; v++) value[v] = f8_load_as(row + 8 * v);
      for (int r = 0; r < R; r++) {
        const F8 w = f8_set(weights[r][first + e]);
        for (int v = 0; v < V; v++) acc[r][v] = f8_fma(w, value[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) f8_store(out[r] + start + 8 * v, acc[r][v]);
}

// One block for R rows: row r sees the first valid[r] >= 1 entries from entry `start` on. `fresh` when the
// block was not read just before.
template <class KV, int R>
static void block_rows(const Lane<KV>& lane, int start, const int* valid, const float* const* q,
                       float* const* out, Partial* partial, bool fresh) {
  constexpr int kScoreVectors = R <= 2 ? 4 : 2;
  constexpr int kValueVectors = R == 1 ? 8 : R <= 3 ? 4 : 2;
  alignas(32) float scores[R][kBlock];
  const int32_t* pages = lane.pages + start / kPage;
  int most = 0;
  for (int r = 0; r < R; r++) most = valid[r] > most ? valid[r] : most;
  const int used = (most + kPage - 1) / kPage;
  const size_t size = sizeof(KV) * lane.head_dim * kPage;
  for (int p = 0; p < used; p++) {
    Ahead ahead{};
    if (fresh) {
      ahead.key = (const char*)lane.keys + pages[p + 2 < used ? p + 2 : used - 1] * size;
      ahead.value = (const char*)lane.values + pages[p] * size;
    }
    for (int e = 0; e < kPage; e += 8 * kScoreVectors)
      score_part<KV, R, kScoreVectors>(lane, pages[p], e, q, scores, p * kPage + e, ahead);
  }
  for (int r = 0; r < R; r++) {
    partial[r] = softmax_row(scores[r], valid[r], used * kPage);
    if (sizeof(KV) == 1)
      for (int i = 0; i < used * kPage; i += 8)
        f8_store(scores[r] + i, f8_load(scores[r] + i) *
                                    f8_load(lane.value_scales + (size_t)pages[i / kPage] * kPage + i % kPage));
  }
  int d = 0;
  for (; d + 8 * kValueVectors <= lane.head_dim; d += 8 * kValueVectors)
    value_part<KV, R, kValueVectors>(lane, pages, most, d, scores, out);
  for (; d < lane.head_dim; d += 8) value_part<KV, R, 1>(lane, pages, most, d, scores, out);
}

template <class KV>
static void block_any(const Lane<KV>& lane, int start, int rows, const int* valid, const float* const* q,
                      float* const* out, Partial* partial, bool fresh) {
  switch (rows) {
    case 1: return block_rows<KV, 1>(lane, start, valid, q, out, partial, fresh);
    case 2: return block_rows<KV, 2>(lane, start, valid, q, out, partial, fresh);
    case 3: return block_rows<KV, 3>(lane, start, valid, q, out, partial, fresh);
    case 4: return block_rows<KV, 4>(lane, start, valid, q, out, partial, fresh);
    case 5: return block_rows<KV, 5>(lane, start, valid, q, out, partial, fresh);
    default: return block_rows<KV, 6>(lane, start, valid, q, out, partial, fresh);
  }
}

// Fold the next block into what came before; `first` when nothing did.
static inline void merge_block(bool first, Partial& sum, float* out, Partial next, const float* more, int n) {
  if (first) {
    sum = next;
    std::memcpy(out, more, n * sizeof(float));
    return;
  }
  const float peak = sum.peak > next.peak ? sum.peak : next.peak;
  const float a = std::exp(sum.peak - peak), b = std::exp(next.peak - peak);
  sum = {peak, sum.total * a + next.total * b};
  for (int i = 0; i < n; i += 8)
    f8_store(out + i, f8_fma(f8_load(out + i), f8_set(a), f8_load(more + i) * f8_set(b)));
}

}  // namespace MKV_NAMESPACE
