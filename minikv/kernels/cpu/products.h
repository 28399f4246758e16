// Products of small float matrices, row by row.
#pragma once

namespace MKV_NAMESPACE {

#if defined(MKV_AVX512VNNI)
static constexpr int kProductVectors = 4;  // there are 32 registers
#else
static constexpr int kProductVectors = 2;
#endif

// A matrix of floats and how far its rows are apart.
struct Floats {
  const float* at;
  size_t stride;
};

// c [M][8 V of all columns] = a [M][depth] b [depth][8 V of all columns], or `c` plus that.
template <int M, int V, bool Add>
static inline void product_tile(Floats a, int depth, Floats b, float* c, size_t stride) {
  F8 acc[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) acc[m][v] = f8_zero();
  for (int k = 0; k < depth; k++) {
    F8 column[V];
    for (int v = 0; v < V; v++) column[v] = f8_load(b.at + k * b.stride + 8 * v);
    for (int m = 0; m < M; m++) {
      const F8 x = f8_set(a.at[m * a.stride + k]);
      for (int v = 0; v < V; v++) acc[m][v] = f8_fma(x, column[v], acc[m][v]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) {
      float* to = c + m * stride + 8 * v;
      f8_store(to, Add ? f8_load(to) + acc[m][v] : acc[m][v]);
    }
}

template <int M, bool Add>
static inline void product_rows(Floats a, int depth, Floats b, float* c, size_t stride, int width) {
  int n = 0;
  for (; n + 8 * kProductVectors <= width; n += 8 * kProductVectors)
    product_tile<M, kProductVectors, Add>(a, depth, {b.at + n, b.stride}, c + n, stride);
  for (; n + 16 <= width; n += 16) product_tile<M, 2, Add>(a, depth, {b.at + n, b.stride}, c + n, stride);
  for (; n < width; n += 8) product_tile<M, 1, Add>(a, depth, {b.at + n, b.stride}, c + n, stride);
}

// c [rows][width] = a [rows][depth] b [depth][width], or `c` plus that; width is a multiple of 8.
template <bool Add = false>
static void product(Floats a, int rows, int depth, Floats b, float* c, size_t stride, int width) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    product_rows<4, Add>({a.at + r * a.stride, a.stride}, depth, b, c + r * stride, stride, width);
  for (; r < rows; r++)
    product_rows<1, Add>({a.at + r * a.stride, a.stride}, depth, b, c + r * stride, stride, width);
}

// The same of matrices whose rows follow each other.
static void product(const float* a, int rows, int depth, const float* b, float* c, int width) {
  product({a, (size_t)depth}, rows, depth, {b, (size_t)width}, c, (size_t)width, width);
}

// The same where b [depth][depth] has nothing above its diagonal.
static void product_below(const float* a, int rows, int depth, const float* b, float* c) {
  const size_t stride = depth;
  for (int n = 0; n < depth; n += 8 * kProductVectors)
    product({a + n, stride}, rows, depth - n, {b + n * stride + n, stride}, c + n, stride,
            std::min(8 * kProductVectors, depth - n));
}

}  // namespace MKV_NAMESPACE
