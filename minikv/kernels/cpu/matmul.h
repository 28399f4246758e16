// Products of packed weights with rows of activations.
//
// Weights lie in groups of eight output rows so that a vector holds one partial sum per row and no
// horizontal sums are needed. Per group and 32 inputs:
//   Q4: half scale[8], half minimum[8], uint8 code[4][8][4]; code (j, r, i) holds the input 4 j + i
//       in its low and 16 + 4 j + i in its high four bits; weight = scale * code + minimum
//   Q8: half scale[8], int8 code[8][8][4]; code (j, r, i) is the input 4 j + i
// Dense types: value[inputs][8].
// Each (output, token) pair is summed over the inputs in ascending order, whatever tile it falls in:
// a token's result does not depend on its batch.
#pragma once

namespace MKV_NAMESPACE {

// Below this a row counts as zero: the inverse of its scale would not be finite.
static constexpr float kLeastPeak = 1e-35f;

// int8 codes, scale and scale * sum(codes) per group of 32 inputs of one row; n is a multiple of 32.
// A group with a number that is not finite gets the scale NaN, which its whole row then shows.
static inline void quantise_row(const float* x, int8_t* codes, float* scales, float* sums, int n) {
  for (int g = 0; g < n / 32; g++, x += 32, codes += 32) {
    F8 peak = f8_zero(), check = f8_zero();
    for (int i = 0; i < 32; i += 8) {
      const F8 v = f8_load(x + i);
      peak = f8_max(peak, f8_abs(v));
      check = f8_fma(v, f8_zero(), check);
    }
    const float faulty = f8_hsum(check);
    if (faulty != 0) {
      std::memset(codes, 0, 32);
      scales[g] = sums[g] = faulty;
      continue;
    }
    const float most = f8_hmax(peak);
    const F8 inverse = f8_set(most > kLeastPeak ? 127.f / most : 0.f);
    float rounded[32];
    for (int i = 0; i < 32; i += 8) f8_store(rounded + i, f8_round(f8_load(x + i) * inverse));
    int sum = 0;
    for (int i = 0; i < 32; i++) {
      codes[i] = (int8_t)(int)rounded[i];
      sum += codes[i];
    }
    scales[g] = most / 127.f;
    sums[g] = scales[g] * (float)sum;
  }
}

static constexpr size_t kQ4Group = 160, kQ8Group = 272;

// Bytes ahead at which weights are fetched to the second cache, whose queue of misses is far longer
// than that of the first, and from there to the first.
static constexpr ptrdiff_t kFar = 16384, kNear = 1024;

// The weights that a thread reads: its share of one matrix, then that of the next.
class Stream {
 public:
  // One that fetches nothing.
  Stream() : at_(nullptr), end_(nullptr), jump_(0), wanted_(false) {}
  // `next` is where the next share begins, null if nothing is known of it.
  Stream(const uint8_t* begin, const uint8_t* end, const uint8_t* next)
      : at_((const char*)begin + kFar), end_(next ? (const char*)end : (const char*)UINTPTR_MAX),
        jump_(next ? next - end : 0), wanted_(true) {}

  // To be called as `bytes` are read.
  inline void advance(int bytes) {
    if (!wanted_) return;
    if (at_ >= end_) {
      at_ += jump_;
      end_ = (const char*)UINTPTR_MAX;
    }
    for (int line = 0; line < bytes; line += 64) prefetch_far(at_ + line);
    at_ += bytes;
  }
  bool wanted() const { return wanted_; }

 private:
  const char *at_, *end_;
  ptrdiff_t jump_;
  bool wanted_;
};

// Fetches ahead while `size` bytes of each of G groups are read.
template <size_t size, int G>
static inline void fetch(const uint8_t* w, size_t stride, Stream& stream) {
  stream.advance(size * G);
  for (int g = 0; g < G; g++)
    for (size_t line = 0; line < size; line += 64) prefetch(w + g * stride + kNear + line);
}

// G groups of eight outputs x T tokens.
template <int T, int G>
static inline void q4_tile(const uint8_t* w, size_t stride, int blocks, const Activations& x, int first,
                           Stream& stream, F8 (&acc)[G][T]) {
  const int8_t* codes[T];
  const float *scales[T], *sums[T];
  for (int t = 0; t < T; t++) {
    codes[t] = x.codes + (size_t)(first + t) * blocks * 32;
    scales[t] = x.scales + (size_t)(first + t) * blocks;
    sums[t] = x.sums + (size_t)(first + t) * blocks;
    for (int g = 0; g < G; g++) acc[g][t] = f8_zero();
  }
  for (int b = 0; b < blocks; b++, w += kQ4Group) {
    Sum sum[G][T];
    for (int g = 0; g < G; g++)
      for (int t = 0; t < T; t++) sum[g][t] = sum_zero();
    if (stream.wanted()) fetch<kQ4Group, G>(w, stride, stream);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      B32 low[G], high[G];
      for (int g = 0; g < G; g++) {
        const B32 v = b32_load(w + g * stride + 32 + 32 * j);
        low[g] = b32_low(v);
        high[g] = b32_high(v);
      }
      for (int t = 0; t < T; t++) {
        int32_t a, c;
        std::memcpy(&a, codes[t] + b * 32 + 4 * j, 4);
        std::memcpy(&c, codes[t] + b * 32 + 16 + 4 * j, 4);
        for (int g = 0; g < G; g++) {
          add_unsigned(sum[g][t], low[g], a);
          add_unsigned(sum[g][t], high[g], c);
        }
      }
    }
    for (int g = 0; g < G; g++) {
      const F8 scale = f8_load_as((const Half*)(w + g * stride));
      const F8 minimum = f8_load_as((const Half*)(w + g * stride + 16));
      for (int t = 0; t < T; t++) {
        acc[g][t] = f8_fma(unsigned_result(sum[g][t]), scale * f8_set(scales[t][b]), acc[g][t]);
        acc[g][t] = f8_fma(minimum, f8_set(sums[t][b]), acc[g][t]);
      }
    }
  }
}

template <int T, int G>
static inline void q8_tile(const uint8_t* w, size_t stride, int blocks, const Activations& x, int first,
                           Stream& stream, F8 (&acc)[G][T]) {
  const int8_t* codes[T];
  const float* scales[T];
  for (int t = 0; t < T; t++) {
    codes[t] = x.codes + (size_t)(first + t) * blocks * 32;
    scales[t] = x.scales + (size_t)(first + t) * blocks;
    for (int g = 0; g < G; g++) acc[g][t] = f8_zero();
  }
  for (int b = 0; b < blocks; b++, w += kQ8Group) {
    Sum sum[G][T];
    for (int g = 0; g < G; g++)
      for (int t = 0; t < T; t++) sum[g][t] = sum_zero();
    if (stream.wanted()) fetch<kQ8Group, G>(w, stride, stream);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      B32 v[G];
      for (int g = 0; g < G; g++) v[g] = b32_load(w + g * stride + 16 + 32 * j);
      for (int t = 0; t < T; t++) {
        int32_t a;
        std::memcpy(&a, codes[t] + b * 32 + 4 * j, 4);
        for (int g = 0; g < G; g++) add_signed(sum[g][t], v[g], a);
      }
    }
    for (int g = 0; g < G; g++) {
      const F8 scale = f8_load_as((const Half*)(w + g * stride));
      for (int t = 0; t < T; t++)
        acc[g][t] = f8_fma(signed_result(sum[g][t]), scale * f8_set(scales[t][b]), acc[g][t]);
    }
  }
}

template <int T, int G, class W>
static inline void dense_tile(const W* w, size_t stride, int inputs, const Activations& x, int first,
                              Stream& stream, F8 (&acc)[G][T]) {
  const float* rows[T];
  for (int t = 0; t < T; t++) {
    rows[t] = x.rows + (size_t)(first + t) * x.stride;
    for (int g = 0; g < G; g++) acc[g][t] = f8_zero();
  }
  for (int k = 0; k < inputs; k++, w += 8) {
    stream.advance(8 * sizeof(W) * G);
    F8 v[G];
    for (int g = 0; g < G; g++) v[g] = f8_load_as(w + g * stride);
    for (int t = 0; t < T; t++) {
      const F8 a = f8_set(rows[t][k]);
      for (int g = 0; g < G; g++) acc[g][t] = f8_fma(v[g], a, acc[g][t]);
    }
  }
}

// Bytes of a group of eight outputs, and where one lies.
static inline size_t group_bytes(const Matrix& m) {
  switch (m.kind) {
    case kQ4: return (size_t)m.inputs / 32 * kQ4Group;
    case kQ8: return (size_t)m.inputs / 32 * kQ8Group;
    case kF32: return (size_t)m.inputs * 32;
    default: return (size_t)m.inputs * 16;
  }
}

static inline const uint8_t* group_at(const Matrix& m, int group) {
  return (const uint8_t*)m.data + group * group_bytes(m);
}

template <int T, int G>
static inline void tile(const Matrix& m, int group, const Activations& x, int first, Stream& stream,
                        F8 (&acc)[G][T]) {
  const size_t blocks = (size_t)m.inputs / 32, size = group_bytes(m);
  const uint8_t* w = (const uint8_t*)m.data + group * size;
  switch (m.kind) {
    case kQ4: return q4_tile<T, G>(w, size, blocks, x, first, stream, acc);
    case kQ8: return q8_tile<T, G>(w, size, blocks, x, first, stream, acc);
    case kF32: return dense_tile<T, G>((const float*)w, size / 4, m.inputs, x, first, stream, acc);
    case kBF16: return dense_tile<T, G>((const BFloat*)w, size / 2, m.inputs, x, first, stream, acc);
    default: return dense_tile<T, G>((const Half*)w, size / 2, m.inputs, x, first, stream, acc);
  }
}

template <int T, int G>
static inline void store_tile(const Matrix& m, int group, const Activations& x, int first, float* y,
                              size_t y_stride, bool add, Stream& stream) {
  F8 acc[G][T];
  tile<T, G>(m, group, x, first, stream, acc);
  for (int g = 0; g < G; g++) {
    const int column = 8 * (group + g);
    for (int t = 0; t < T; t++) {
      float* out = y + (size_t)(first + t) * y_stride + column;
      if (m.bias) acc[g][t] = acc[g][t] + f8_load(m.bias + column);
      if (column + 8 <= m.outputs) {
        f8_store(out, add ? f8_load(out) + acc[g][t] : acc[g][t]);
      } else {
        float last[8];
        f8_store(last, acc[g][t]);
        for (int i = 0; column + i < m.outputs; i++) out[i] = add ? out[i] + last[i] : last[i];
      }
    }
  }
}

template <int G>
static inline void group_rows(const Matrix& m, int group, const Activations& x, int rows, float* y,
                              size_t y_stride, bool add, Stream& stream) {
  int t = 0;
  // The first tile reads the weights from memory, the others from the first cache.
  Stream none, *fetching = &stream;
  for (; t + 4 <= rows; t += 4, fetching = &none) store_tile<4, G>(m, group, x, t, y, y_stride, add, *fetching);
  switch (rows - t) {
    case 3: return store_tile<3, G>(m, group, x, t, y, y_stride, add, *fetching);
    case 2: return store_tile<2, G>(m, group, x, t, y, y_stride, add, *fetching);
    case 1: return store_tile<1, G>(m, group, x, t, y, y_stride, add, *fetching);
  }
}

// y[rows][outputs] (+)= x W^T + bias for the output groups [begin, end). `next` is where the weights lie
// that this thread reads afterwards, or null.
static void multiply(const Matrix& m, const Activations& x, int rows, float* y, size_t y_stride, bool add,
                     int begin, int end, const uint8_t* next) {
  Stream stream(group_at(m, begin), group_at(m, end), next);
  int group = begin;
  for (; group + 2 <= end; group += 2) group_rows<2>(m, group, x, rows, y, y_stride, add, stream);
  if (group < end) group_rows<1>(m, group, x, rows, y, y_stride, add, stream);
}

}  // namespace MKV_NAMESPACE
