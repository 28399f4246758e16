// Row operators: normalisation, rotation, gating, and writing keys and values to their slots.
#pragma once

namespace MKV_NAMESPACE {

// Sums eight lanes in steps of eight; head dims and hidden sizes that are no multiple end in a tail.
static inline void rms_norm(const float* x, const float* weight, float* y, int n, float eps) {
  F8 squares = f8_zero();
  int i = 0;
  for (; i + 8 <= n; i += 8) squares = f8_fma(f8_load(x + i), f8_load(x + i), squares);
  float sum = f8_hsum(squares);
  for (; i < n; i++) sum += x[i] * x[i];
  const float factor = 1.f / std::sqrt(sum / (float)n + eps);
  const F8 f = f8_set(factor);
  for (i = 0; i + 8 <= n; i += 8) f8_store(y + i, f8_load(x + i) * f * f8_load(weight + i));
  for (; i < n; i++) y[i] = x[i] * factor * weight[i];
}

// Half-split rotation of one head by cos, sin [head_dim].
static inline void rotate(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  int i = 0;
  for (; i + 8 <= half; i += 8) {
    const F8 a = f8_load(x + i), b = f8_load(x + half + i);
    const F8 c = f8_load(cos + i), s = f8_load(sin + i);
    f8_store(x + i, a * c - b * s);
    f8_store(x + half + i, f8_fma(a, s, b * c));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// y = gate / (1 + e^-gate) * up
static inline void silu_multiply(const float* gate, const float* up, float* y, int n) {
  int i = 0;
  const F8 one = f8_set(1.f);
  for (; i + 8 <= n; i += 8) {
    const F8 g = f8_load(gate + i);
    // e^-|g| does not overflow: sigmoid(g) is 1 / (1 + e^-g) or e^g / (1 + e^g).
    const F8 e = f8_exp(f8_zero() - f8_abs(g));
    const F8 positive = f8_max(g, f8_zero()), negative = f8_zero() - f8_max(f8_zero() - g, f8_zero());
    f8_store(y + i, f8_fma(negative, e, positive) / (one + e) * f8_load(up + i));
  }
  for (; i < n; i++) y[i] = gate[i] / (1.f + std::exp(-gate[i])) * up[i];
}

// The place of the largest of n numbers, the lowest of equals; -1 if one is not finite.
static int largest(const float* x, int n, float* value) {
  constexpr int kBlock = 64;
  F8 check = f8_zero();
  float best = -std::numeric_limits<float>::infinity();
  int at = -1, i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    F8 peak = f8_load(x + i);
    for (int j = 0; j < kBlock; j += 8) {
      const F8 v = f8_load(x + i + j);
      peak = f8_max(peak, v);
      check = f8_fma(v, f8_zero(), check);
    }
    if (f8_hmax(peak) <= best) continue;
    for (int j = i; j < i + kBlock; j++)
      if (x[j] > best) best = x[at = j];
  }
  float faulty = f8_hsum(check);
  for (; i < n; i++) {
    faulty += x[i] * 0.f;
    if (x[i] > best) best = x[at = i];
  }
  *value = best;
  return faulty == 0 ? at : -1;
}

static inline void store_value(float* p, float x) { *p = x; }
static inline void store_value(Half* p, float x) { p->bits = float_to_half(x); }
static inline void store_value(BFloat* p, float x) { p->bits = float_to_bfloat(x); }

template <class KV>
static inline void write_entry(const Pool& pool, int64_t slot, const float* key, const float* value, int n) {
  const int64_t page = slot / kPage, place = slot % kPage;
  KV* k = (KV*)pool.keys + (size_t)page * n * kPage + place;
  KV* v = (KV*)pool.values + (size_t)(page * kPage + place) * n;
  for (int d = 0; d < n; d++) store_value(k + (size_t)d * kPage, key[d]);
  for (int d = 0; d < n; d++) store_value(v + d, value[d]);
}

// int8 with one scale per row and head: 127 stands for the largest magnitude. A row with a number
// that is not finite gets the scale NaN.
static inline float int8_row(const float* x, int8_t* out, size_t step, int n) {
  float most = 0, faulty = 0;
  for (int d = 0; d < n; d++) {
    most = std::fabs(x[d]) > most ? std::fabs(x[d]) : most;
    faulty += x[d] * 0.f;
  }
  if (faulty != 0) {
    for (int d = 0; d < n; d++) out[d * step] = 0;
    return faulty;
  }
  const float inverse = most > kLeastPeak ? 127.f / most : 0.f;
  for (int d = 0; d < n; d++) out[d * step] = (int8_t)(int)std::nearbyint(x[d] * inverse);
  return most / 127.f;
}

template <>
inline void write_entry<int8_t>(const Pool& pool, int64_t slot, const float* key, const float* value, int n) {
  const int64_t page = slot / kPage, place = slot % kPage;
  int8_t* k = (int8_t*)pool.keys + (size_t)page * n * kPage + place;
  int8_t* v = (int8_t*)pool.values + (size_t)slot * n;
  pool.key_scales[slot] = int8_row(key, k, kPage, n);
  pool.value_scales[slot] = int8_row(value, v, 1, n);
}

}  // namespace MKV_NAMESPACE
