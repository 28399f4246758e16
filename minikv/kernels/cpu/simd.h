// Eight floats at a time, for the instruction set a kernel file is compiled for.
//
// A kernel file defines MKV_NAMESPACE and one of MKV_AVX2, MKV_AVX512VNNI, MKV_NEON or none
// (plain C++), then includes kernels.h. Every variant computes the same sums in the same order,
// so results do not depend on the processor beyond the rounding of fused multiply-adds.
#pragma once

namespace MKV_NAMESPACE {

#if defined(MKV_AVX2) || defined(MKV_AVX512VNNI)

struct F8 {
  __m256 v;
};
static inline F8 f8_zero() { return {_mm256_setzero_ps()}; }
static inline F8 f8_set(float x) { return {_mm256_set1_ps(x)}; }
static inline F8 f8_load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline void f8_store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
static inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
// a * b + c
static inline F8 f8_fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline F8 f8_max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline F8 f8_min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline F8 f8_sqrt(F8 a) { return {_mm256_sqrt_ps(a.v)}; }
static inline F8 f8_abs(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.f), a.v)}; }
static inline F8 f8_round(F8 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in [-126, 127]
static inline F8 f8_exp2_int(F8 n) {
  return {_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
// n and m with a = 2^n m, m from sqrt(1/2) to sqrt(2), of positive normal numbers
static inline F8 f8_exponent(F8 a, F8& m) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i n = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
  m = {_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23)))};
  return {_mm256_cvtepi32_ps(n)};
}
static inline float f8_hmax(F8 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
// ((0+4) + (2+6)) + ((1+5) + (3+7))
static inline float f8_hsum(F8 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline F8 f8_load_as(const float* p) { return f8_load(p); }
static inline F8 f8_load_as(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
static inline F8 f8_load_as(const BFloat* p) {
  return {_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
static inline F8 f8_load_as(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
// Rows become columns.
static inline void f8_transpose(F8* x) {
  __m256 pair[8], four[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(x[i].v, x[i + 1].v);
    pair[i + 1] = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
      four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    x[i].v = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
    x[i + 4].v = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
  }
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
static inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#elif defined(MKV_NEON)

struct F8 {
  float32x4_t a, b;
};
static inline F8 f8_zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
static inline F8 f8_set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline F8 f8_load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void f8_store(float* p, F8 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
static inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
static inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
static inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
static inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
static inline F8 f8_fma(F8 x, F8 y, F8 z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
// The second where one is a NaN, as on other processors.
static inline F8 f8_max(F8 x, F8 y) {
  return {vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b)};
}
static inline F8 f8_min(F8 x, F8 y) {
  return {vbslq_f32(vcltq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcltq_f32(x.b, y.b), x.b, y.b)};
}
static inline F8 f8_sqrt(F8 x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b)}; }
static inline F8 f8_abs(F8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
static inline F8 f8_round(F8 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
static inline F8 f8_exp2_int(F8 n) {
  const int32x4_t bias = vdupq_n_s32(127);
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.a), bias), 23)),
          vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.b), bias), 23))};
}
static inline float32x4_t f4_exponent(float32x4_t x, float32x4_t& m) {
  const int32x4_t bits = vreinterpretq_s32_f32(x);
  const int32x4_t n = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(0x3f3504f3)), 23);
  m = vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(n, 23)));
  return vcvtq_f32_s32(n);
}
static inline F8 f8_exponent(F8 x, F8& m) { return {f4_exponent(x.a, m.a), f4_exponent(x.b, m.b)}; }
static inline float f8_hmax(F8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
static inline float f8_hsum(F8 x) {
  const float32x4_t s = vaddq_f32(x.a, x.b);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline F8 f8_load_as(const float* p) { return f8_load(p); }
static inline F8 f8_load_as(const Half* p) {
  const float16x8_t h = vld1q_f16((const __fp16*)p);
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
static inline F8 f8_load_as(const BFloat* p) {
  const uint16x8_t h = vld1q_u16((const uint16_t*)p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
static inline F8 f8_load_as(const int8_t* p) {
  const int16x8_t h = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(h)))};
}
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
static inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#else

struct F8 {
  float v[8];
};
#define MKV_EACH(expr)                      \
  F8 r;                                     \
  for (int i = 0; i < 8; i++) r.v[i] = expr; \
  return r
static inline F8 f8_zero() { MKV_EACH(0.f); }
static inline F8 f8_set(float x) { MKV_EACH(x); }
static inline F8 f8_load(const float* p) { MKV_EACH(p[i]); }
static inline void f8_store(float* p, F8 a) {
  for (int i = 0; i < 8; i++) p[i] = a.v[i];
}
static inline F8 operator+(F8 a, F8 b) { MKV_EACH(a.v[i] + b.v[i]); }
static inline F8 operator-(F8 a, F8 b) { MKV_EACH(a.v[i] - b.v[i]); }
static inline F8 operator*(F8 a, F8 b) { MKV_EACH(a.v[i] * b.v[i]); }
static inline F8 operator/(F8 a, F8 b) { MKV_EACH(a.v[i] / b.v[i]); }
static inline F8 f8_fma(F8 a, F8 b, F8 c) { MKV_EACH(a.v[i] * b.v[i] + c.v[i]); }
static inline F8 f8_max(F8 a, F8 b) { MKV_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F8 f8_min(F8 a, F8 b) { MKV_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline F8 f8_sqrt(F8 a) { MKV_EACH(std::sqrt(a.v[i])); }
static inline F8 f8_abs(F8 a) { MKV_EACH(std::fabs(a.v[i])); }
static inline F8 f8_round(F8 a) { MKV_EACH(std::nearbyint(a.v[i])); }
static inline F8 f8_exp2_int(F8 n) { MKV_EACH(std::ldexp(1.f, (int)n.v[i])); }
static inline float f1_exponent(float x, float& m) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t n = (bits - 0x3f3504f3) >> 23;
  bits -= n * (1 << 23);
  std::memcpy(&m, &bits, 4);
  return (float)n;
}
static inline F8 f8_exponent(F8 a, F8& m) { MKV_EACH(f1_exponent(a.v[i], m.v[i])); }
static inline float f8_hmax(F8 a) {
  float m = a.v[0];
  for (int i = 1; i < 8; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
static inline float f8_hsum(F8 a) {
  float s[4];
  for (int i = 0; i < 4; i++) s[i] = a.v[i] + a.v[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline F8 f8_load_as(const float* p) { return f8_load(p); }
static inline F8 f8_load_as(const Half* p) { MKV_EACH(half_to_float(p[i].bits)); }
static inline F8 f8_load_as(const BFloat* p) { MKV_EACH(bfloat_to_float(p[i].bits)); }
static inline F8 f8_load_as(const int8_t* p) { MKV_EACH((float)p[i]); }
static inline void prefetch(const void*) {}
static inline void prefetch_far(const void*) {}
#undef MKV_EACH

#endif

#if !defined(MKV_AVX2) && !defined(MKV_AVX512VNNI)
static inline void f8_transpose(F8* x) {
  float from[8][8], to[8][8];
  for (int i = 0; i < 8; i++) f8_store(from[i], x[i]);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j][i] = from[i][j];
  for (int i = 0; i < 8; i++) x[i] = f8_load(to[i]);
}
#endif

// e^x for x <= 0 and a little above; below -87 it gives about 1e-38, which the caller masks.
static inline F8 f8_exp(F8 x) {
  x = f8_max(f8_set(-87.f), x);  // in this order, because then a NaN stays one
  const F8 n = f8_round(x * f8_set(1.44269504f));
  F8 r = f8_fma(n, f8_set(-0.693359375f), x);
  r = f8_fma(n, f8_set(2.12194440e-4f), r);
  F8 p = f8_set(1.9875691500e-4f);
  p = f8_fma(p, r, f8_set(1.3981999507e-3f));
  p = f8_fma(p, r, f8_set(8.3334519073e-3f));
  p = f8_fma(p, r, f8_set(4.1665795894e-2f));
  p = f8_fma(p, r, f8_set(1.6666665459e-1f));
  p = f8_fma(p, r, f8_set(5.0000001201e-1f));
  p = f8_fma(p, r * r, r + f8_set(1.f));
  return p * f8_exp2_int(n);
}

// Natural logarithm of positive normal numbers.
static inline F8 f8_log(F8 x) {
  F8 m;
  const F8 n = f8_exponent(x, m), z = m - f8_set(1.f), square = z * z;
  F8 p = f8_set(7.0376836292e-2f);
  p = f8_fma(p, z, f8_set(-1.1514610310e-1f));
  p = f8_fma(p, z, f8_set(1.1676998740e-1f));
  p = f8_fma(p, z, f8_set(-1.2420140846e-1f));
  p = f8_fma(p, z, f8_set(1.4249322787e-1f));
  p = f8_fma(p, z, f8_set(-1.6668057665e-1f));
  p = f8_fma(p, z, f8_set(2.0000714765e-1f));
  p = f8_fma(p, z, f8_set(-2.4999993993e-1f));
  p = f8_fma(p, z, f8_set(3.3333331174e-1f));
  p = f8_fma(n, f8_set(-2.12194440e-4f), p * z * square);
  p = f8_fma(square, f8_set(-0.5f), p);
  return f8_fma(n, f8_set(0.693359375f), z + p);
}

}  // namespace MKV_NAMESPACE
