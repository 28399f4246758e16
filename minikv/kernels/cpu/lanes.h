// The lane of a sequence and a KV head, and the queries that meet it.
#pragma once

namespace MKV_NAMESPACE {

template <class KV>
static Lane<KV> lane_of(const Run& run, int layer, int sequence, int head) {
  const Model& m = *run.model;
  const Batch& b = *run.batch;
  const size_t index = ((size_t)sequence * m.num_layers + layer) * m.kv_heads + head;
  return {(const KV*)run.pool->keys, (const KV*)run.pool->values, run.pool->key_scales, run.pool->value_scales,
          b.has_mass[sequence] ? run.pool->masses : nullptr, b.lane_pages + index * b.max_pages, m.head_dim,
          1.f / std::sqrt((float)m.head_dim)};
}

// Query rows of one (sequence, KV head) in order of token, then of query head in its group.
struct Queries {
  const float* q;
  float* out;
  size_t q_stride, out_stride;
  int head_dim, group;
  int64_t past;
  const float* query(int row) const { return q + (row / group) * q_stride + (row % group) * head_dim; }
  float* result(int row) const { return out + (row / group) * out_stride + (row % group) * head_dim; }
  int64_t seen(int row) const { return past + row / group + 1; }
};

static Queries queries_of(const Run& run, int layer, int sequence, int head) {
  const Model& m = *run.model;
  const Batch& b = *run.batch;
  const int group = m.query_heads / m.kv_heads, width = (m.query_heads + 2 * m.kv_heads) * m.head_dim;
  const int64_t first = b.row_starts[sequence];
  const size_t lane = ((size_t)sequence * m.num_layers + layer) * m.kv_heads + head;
  const size_t out_width = (size_t)m.query_heads * m.head_dim;
  const size_t column = (size_t)head * group * m.head_dim;
  return {run.qkv + first * width + column, run.attended + first * out_width + column, (size_t)width, out_width,
          m.head_dim, group, b.past_lengths[lane]};
}

}  // namespace MKV_NAMESPACE
