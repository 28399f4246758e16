// Integer dot products of packed weights with quantised activations, eight output rows at a time.
//
// A step multiplies 8 rows x 4 weights by the same 4 activations. The sums are whole numbers, so
// every instruction set gives the same bits.
#pragma once

namespace MKV_NAMESPACE {

#if defined(MKV_AVX2) || defined(MKV_AVX512VNNI)

typedef __m256i B32;
static inline B32 b32_load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline B32 b32_low(B32 v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
static inline B32 b32_high(B32 v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
static inline F8 to_f8(__m256i v) { return {_mm256_cvtepi32_ps(v)}; }

struct Sum {
  __m256i v;
};
static inline Sum sum_zero() { return {_mm256_setzero_si256()}; }

#if defined(MKV_AVX512VNNI)
static inline void add_unsigned(Sum& s, B32 w, int32_t x) {
  s.v = _mm256_dpbusd_epi32(s.v, w, _mm256_set1_epi32(x));
}
static inline F8 unsigned_result(Sum s) { return to_f8(s.v); }
static inline void add_signed(Sum& s, B32 w, int32_t x) {
  s.v = _mm256_dpbusd_epi32(s.v, _mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(x), w));
}
#else
// Sixteen-bit sums: 8 steps of at most 2 * 15 * 127 stay below 32,768.
static inline void add_unsigned(Sum& s, B32 w, int32_t x) {
  s.v = _mm256_add_epi16(s.v, _mm256_maddubs_epi16(w, _mm256_set1_epi32(x)));
}
static inline F8 unsigned_result(Sum s) { return to_f8(_mm256_madd_epi16(s.v, _mm256_set1_epi16(1))); }
static inline void add_signed(Sum& s, B32 w, int32_t x) {
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(x), w));
  s.v = _mm256_add_epi32(s.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
static inline F8 signed_result(Sum s) { return to_f8(s.v); }

#elif defined(MKV_NEON)

struct B32 {
  int8x16_t a, b;
};
static inline B32 b32_load(const uint8_t* p) { return {vld1q_s8((const int8_t*)p), vld1q_s8((const int8_t*)p + 16)}; }
static inline B32 b32_low(B32 v) {
  const int8x16_t mask = vdupq_n_s8(15);
  return {vandq_s8(v.a, mask), vandq_s8(v.b, mask)};
}
static inline B32 b32_high(B32 v) {
  return {vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v.a), 4)),
          vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v.b), 4))};
}
struct Sum {
  int32x4_t a, b;
};
static inline Sum sum_zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
static inline void add_signed(Sum& s, B32 w, int32_t x) {
  const int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(x));
  s.a = vdotq_s32(s.a, w.a, xs);
  s.b = vdotq_s32(s.b, w.b, xs);
}
static inline F8 signed_result(Sum s) { return {vcvtq_f32_s32(s.a), vcvtq_f32_s32(s.b)}; }
static inline void add_unsigned(Sum& s, B32 w, int32_t x) { add_signed(s, w, x); }
static inline F8 unsigned_result(Sum s) { return signed_result(s); }

#else

struct B32 {
  int8_t v[32];
};
static inline B32 b32_load(const uint8_t* p) {
  B32 r;
  std::memcpy(r.v, p, 32);
  return r;
}
static inline B32 b32_low(B32 v) {
  for (auto& x : v.v) x = (int8_t)(x & 15);
  return v;
}
static inline B32 b32_high(B32 v) {
  for (auto& x : v.v) x = (int8_t)((uint8_t)x >> 4);
  return v;
}
struct Sum {
  int32_t v[8];
};
static inline Sum sum_zero() { return {{0, 0, 0, 0, 0, 0, 0, 0}}; }
static inline void add_signed(Sum& s, B32 w, int32_t x) {
  int8_t xs[4];
  std::memcpy(xs, &x, 4);
  for (int r = 0; r < 8; r++)
    for (int i = 0; i < 4; i++) s.v[r] += (int32_t)w.v[4 * r + i] * xs[i];
}
static inline F8 signed_result(Sum s) {
  F8 r;
  for (int i = 0; i < 8; i++) r.v[i] = (float)s.v[i];
  return r;
}
static inline void add_unsigned(Sum& s, B32 w, int32_t x) { add_signed(s, w, x); }
static inline F8 unsigned_result(Sum s) { return signed_result(s); }

#endif

}  // namespace MKV_NAMESPACE
