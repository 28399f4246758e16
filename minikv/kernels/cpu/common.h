// Types shared by all kernel files, and the table through which one instruction set is chosen.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "team.h"

// Before version 16, clang knows the dot product only where all code is compiled for it.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define MKV_HAVE_NEON
#endif

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);
inline float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
// Round to nearest, ties to even; a NaN stays one.
inline uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 64);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

enum MatrixKind : int32_t { kQ4 = 0, kQ8 = 1, kF32 = 2, kBF16 = 3, kF16 = 4 };
enum KVKind : int32_t { kKVF32 = 0, kKVF16 = 1, kKVBF16 = 2, kKVInt8 = 3 };

// W [outputs, inputs], packed in groups of eight outputs (matmul.h); bias has room for whole groups.
struct Matrix {
  int32_t kind, outputs, inputs, groups;
  const void* data;
  const float* bias;
};

// Rows of activations as floats [rows][stride] and, for quantised weights, as codes: int8
// [rows][inputs] with a scale and scale * sum(codes) per group of 32.
struct Activations {
  float* rows;
  size_t stride;
  int8_t* codes;
  float *scales, *sums;
};

// One decoder layer. Norm weights have `hidden` floats, q_norm and k_norm `head_dim` or are null.
struct Layer {
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;
  Matrix qkv, output, gate, up, down;
};

struct Model {
  int32_t hidden, inner, query_heads, kv_heads, head_dim, num_layers;
  float eps;
  const Layer* layers;
};

// The page pool. Keys [pages][head_dim][32], values [pages][32][head_dim]; scales and masses [pages][32].
struct Pool {
  int32_t kind;
  void *keys, *values;
  float *key_scales, *value_scales, *masses;
  int32_t* positions;  // [pages][32]
};

// One forward pass: T rows of S sequences; see the Python batch object for the meaning.
struct Batch {
  int32_t rows, sequences, max_pages, captures;
  const int64_t* row_starts;    // [S + 1]
  const int32_t* lane_pages;    // [S][layers][kv_heads][max_pages]
  const int64_t* past_lengths;  // [S][layers][kv_heads]
  const uint8_t* has_mass;      // [S]
  const int64_t* positions;     // [T]
  const float *cos, *sin;       // [rows][head_dim]
  const int64_t* angle_rows;    // [T]: the row of cos and sin for each row; or null when they are in order
  const int32_t* capture_of;    // [T]: where a row's rotated queries are copied to, -1 for nowhere; or null
  float* captured;              // [layers][captures][query_heads][head_dim]
  float* captured_norms;        // [layers][captures]: of the residual streams that the queries were made from
  // Called by one thread before the attention of each layer in which rows enter that are not at hand; or null.
  void (*fetch)(int layer);
  // Called by one thread before the attention of each layer, to put entries there that it will see; or null.
  void (*stage)(int layer);
  int32_t num_zooms;
  const struct Zoom* zooms;     // [num_zooms], of those sequences that have spans to zoom in
};

// Exact rows of the tokens [start, end) of one layer, lane after lane, not aligned; null for a column of which
// all numbers are alike. Laid out as `SOURCE` in minikv/cache/tiers/reach.py.
struct Source {
  int64_t start, end;
  const char *positions, *masses, *key_scales, *keys, *value_scales, *values;
};

// What a sequence of a batch may zoom in (route.h); see the Python object of that name.
struct Zoom {
  int32_t sequence, off, spans, rows, basis_entries, digits, most, moves, beside, groups, parts;
  float hold, least;
  const int64_t *starts, *sizes, *slots;  // [layers][kv_heads][spans]; no tokens where there is no span
  const int64_t* area;                    // [layers][kv_heads][rows], slots
  const int64_t* basis;                   // [layers][kv_heads][basis_entries], slots
  int64_t* owners;                        // [layers][kv_heads][rows], tokens
  int32_t* cells;                         // [layers][kv_heads][rows], of those tokens
  const float *scale, *bias;              // [layers][query_heads][head_dim / 4], [layers][query_heads]; or null
  const Source* sources;                  // [layers][parts]
  const uint8_t* at_hand;                 // [layers], whether all sources are there
  int32_t* entered;                       // [layers][kv_heads], how many rows came
  int32_t* entered_rows;                  // [layers][kv_heads][rows], which
};

// Attention work of one layer: a block of a lane for all rows, or a run of rows over the whole lane.
struct Task {
  int32_t sequence, head, first, rows, start, split;
  int64_t scratch;  // first row in the scratch of partial results, split tasks only
};

constexpr int kTaskRows = 96, kMaxHeadDim = 256;

// Everything the threads of one forward pass share.
struct Run {
  const Model* model;
  const Batch* batch;
  const Pool* pool;
  const Layer* layer;
  Team* team;
  float *hidden, *qkv, *attended, *gate, *up, *lse;
  Activations normed, attention, gated;
  float* scratch;
  struct Partial* partials;
  const std::vector<Task>*tasks, *merges;
  std::atomic<int64_t>*next_task, *next_zoom;
  char* zoom_room;        // one part of zoom_bytes for each thread
  size_t zoom_bytes;
};

// What one block of entries, or several merged, give a query row beside its weighted value.
struct Partial {
  float peak, total;
};

// One layer of one sequence in slots of 64 neighbouring entries (slots.h). `rows` of a query head are padded
// with zeros to `lanes`, a multiple of 8, where they lie side by side; the first `own` are made of `queries`.
struct Slots {
  int32_t kv_heads, group, head_dim, entries, slots, rows, own, lanes, queries;
  int32_t angles, angle_stride;
  int64_t key_stride, value_stride;    // floats from lane to lane
  float back;                          // what turning keys back has to make good
  const float *keys, *values;          // [kv_heads][entries][head_dim]
  const float *counts, *log_mass;      // [kv_heads][entries]; no tokens where an entry belongs to no node
  const int64_t* positions;            // [kv_heads][entries]
  const float *cos, *sin;              // [angles][angle_stride], by position; half of head_dim used
  const float* attention;              // [query_heads][rows][entries]
  const float *weights, *own_weights;  // [lanes], of squared errors; 0 but for own rows
  const int32_t* pools;                // [own], how many queries a row is made of
  const float* query_rows;             // [query_heads][queries][head_dim]
  const float* normalisers;            // [query_heads][queries]
  const float* origins;                // [kv_heads][head_dim], from where values are measured
  const float* roots;                  // [query_heads][head_dim][head_dim], lower triangles
  const float* outputs;                // [query_heads][head_dim][lanes], projected
  const float* out_squares;            // [query_heads][lanes]
  float* drop;                         // [kv_heads][slots][127]
  float* value_weights;                // [kv_heads][slots][64]
  float *products, *squares;           // [kv_heads][2][slots][63]
};

// What queries see of a layer's entries (look.h). Of a head's `queries`, the first `hiding` see entries up to
// their position; entries before `late` are seen by all. `rows` of a head are made of some queries each.
struct Looks {
  int32_t kv_heads, group, head_dim, entries, queries, rows, late, hiding;
  int64_t key_stride, value_stride;  // floats from lane to lane
  const float *keys, *values;        // [kv_heads][entries][head_dim]
  const float* bias;                 // [kv_heads][entries], -inf where there is none
  const int64_t* positions;          // [kv_heads][entries]
  const float* query_rows;           // [query_heads][queries][head_dim], scaled
  const int64_t* at;                 // [queries], positions
  const int32_t* pools;              // [rows], how many queries a row is made of
  const uint8_t* wanted;             // [kv_heads][entries], what to sum over; null: no sums are wanted
  float* attention;                  // [query_heads][rows][entries]
  float* outputs;                    // [query_heads][rows][head_dim]
  float* normalisers;                // [query_heads][queries]
  float* sums;                       // [query_heads][queries], of attention to what is wanted
  float* means;                      // [query_heads][queries][head_dim], and of it times values
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  void (*layer)(const Run&, int layer, int thread, int threads);
  void (*attention)(const Run&, int layer, int thread, int threads);
  void (*write)(const Run&, int layer, int begin, int end);
  void (*zoom)(const Run&, int layer, int thread);
  size_t (*zoom_bytes)(const Model&, const Batch&);  // that a thread needs
  void (*encode)(const Matrix&, const Activations&, int begin, int end);
  void (*multiply)(const Matrix&, const Activations&, int rows, float* y, size_t stride, bool add, int begin,
                   int end, const uint8_t* next);
  void (*rms_norm)(const float* x, const float* weight, float* y, int n, float eps);
  int (*largest)(const float* x, int n, float* value);
  size_t (*slot_scratch)(const Slots&);  // floats that a thread needs
  void (*slot_sums)(const Slots&, float* scratch, int item);
  size_t (*look_scratch)(const Looks&);
  void (*look)(const Looks&, float* scratch, int lane);
};
