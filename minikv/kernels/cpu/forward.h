// Decoder layers over one batch, run by all threads of a team in step.
#pragma once

namespace MKV_NAMESPACE {

// This thread's share [begin, end) of n items.
struct Share {
  int begin, end;
};

static inline Share share_of(int n, int thread, int threads) {
  return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
}

static inline bool quantised(const Matrix& m) { return m.kind == kQ4 || m.kind == kQ8; }

// Codes of the rows [begin, end) of x, if the matrix they meet wants codes.
static void encode(const Matrix& m, const Activations& x, int begin, int end) {
  if (!quantised(m)) return;
  for (int i = begin; i < end; i++)
    quantise_row(x.rows + i * x.stride, x.codes + (size_t)i * m.inputs, x.scales + (size_t)i * (m.inputs / 32),
                 x.sums + (size_t)i * (m.inputs / 32), m.inputs);
}

// Rows [first, last) with the block at `start`, in tiles of six; results go to out[row - first].
template <class KV>
static void rows_with_block(const Lane<KV>& lane, const Queries& queries, int first, int last, int start,
                            float* out, Partial* partial) {
  for (int row = first; row < last;) {
    const float* q[6];
    float* o[6];
    int valid[6], count = 0;
    for (; count < 6 && row + count < last; count++) {
      const int64_t seen = queries.seen(row + count) - start;
      q[count] = queries.query(row + count);
      o[count] = out + (size_t)(row + count - first) * queries.head_dim;
      valid[count] = (int)(seen < kBlock ? seen : kBlock);
    }
    block_any<KV>(lane, start, count, valid, q, o, partial + (row - first), row == first);
    row += count;
  }
}

static inline void finish_row(const Run& run, const Queries& queries, int row, int sequence, int head,
                              Partial sum, const float* out) {
  const F8 inverse = f8_set(1.f / sum.total);
  float* result = queries.result(row);
  for (int d = 0; d < queries.head_dim; d += 8) f8_store(result + d, f8_load(out + d) * inverse);
  if (run.lse) {
    const int64_t token = run.batch->row_starts[sequence] + row / queries.group;
    run.lse[token * run.model->query_heads + head * queries.group + row % queries.group] =
        sum.peak + std::log(sum.total);
  }
}

// Few rows: one block of the lane, its result kept for `merge_task`.
template <class KV>
static void block_task(const Run& run, int layer, const Task& task) {
  const Lane<KV> lane = lane_of<KV>(run, layer, task.sequence, task.head);
  const Queries queries = queries_of(run, layer, task.sequence, task.head);
  int first = 0;
  while (queries.seen(first) <= task.start) first++;  // early rows of a chunk end before this block
  const size_t slot = (size_t)task.scratch + first;
  rows_with_block<KV>(lane, queries, first, task.rows, task.start, run.scratch + slot * run.model->head_dim,
                      run.partials + slot);
}

static void merge_rows(const Run& run, int layer, const Task& task) {
  const Queries queries = queries_of(run, layer, task.sequence, task.head);
  const int n = run.model->head_dim;
  for (int row = 0; row < task.rows; row++) {
    float* sum = run.scratch + (size_t)(task.scratch + row) * n;
    Partial total = run.partials[task.scratch + row];
    for (int64_t start = kBlock, at = task.scratch + task.rows + row; start < queries.seen(row);
         start += kBlock, at += task.rows)
      merge_block(false, total, sum, run.partials[at], run.scratch + (size_t)at * n, n);
    finish_row(run, queries, row, task.sequence, task.head, total, sum);
  }
}

// Many rows: all blocks in order for the rows [task.first, task.first + task.rows).
template <class KV>
static void rows_task(const Run& run, int layer, const Task& task) {
  const Lane<KV> lane = lane_of<KV>(run, layer, task.sequence, task.head);
  const Queries queries = queries_of(run, layer, task.sequence, task.head);
  const int n = run.model->head_dim, last = task.first + task.rows;
  alignas(32) float sums[kTaskRows * kMaxHeadDim], next[kTaskRows * kMaxHeadDim];
  Partial total[kTaskRows], partial[kTaskRows];
  for (int64_t start = 0; start < queries.seen(last - 1); start += kBlock) {
    int first = task.first;
    while (queries.seen(first) <= start) first++;
    rows_with_block<KV>(lane, queries, first, last, (int)start, next, partial);
    for (int row = first; row < last; row++) {
      const int at = row - task.first;
      merge_block(start == 0, total[at], sums + at * n, partial[row - first], next + (row - first) * n, n);
    }
  }
  for (int row = task.first; row < last; row++)
    finish_row(run, queries, row, task.sequence, task.head, total[row - task.first],
               sums + (row - task.first) * n);
}

template <class KV>
static void attend(const Run& run, int layer, int thread, int threads) {
  const std::vector<Task>& tasks = *run.tasks;
  for (size_t i; (i = run.next_task->fetch_add(1)) < tasks.size();)
    if (tasks[i].split) block_task<KV>(run, layer, tasks[i]);
    else rows_task<KV>(run, layer, tasks[i]);
  run.team->barrier();
  for (size_t i = thread; i < run.merges->size(); i += threads) merge_rows(run, layer, (*run.merges)[i]);
}

static float norm_of(const float* x, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
  return (float)std::sqrt(sum);
}

// Keep the rotated queries at `row` of token t, and the norm of its residual stream where there is one.
static void capture(const Run& run, int layer, int t, const float* row) {
  const Model& m = *run.model;
  const Batch& b = *run.batch;
  const size_t place = (size_t)layer * b.captures + b.capture_of[t], width = (size_t)m.query_heads * m.head_dim;
  std::memcpy(b.captured + place * width, row, width * sizeof(float));
  if (run.hidden) b.captured_norms[place] = norm_of(run.hidden + (size_t)t * m.hidden, m.hidden);
}

template <class KV>
static void write_rows(const Run& run, int layer, int begin, int end) {
  const Model& m = *run.model;
  const Batch& b = *run.batch;
  const int width = (m.query_heads + 2 * m.kv_heads) * m.head_dim;
  int sequence = 0;
  for (int t = begin; t < end; t++) {
    while (b.row_starts[sequence + 1] <= t) sequence++;
    float* row = run.qkv + (size_t)t * width;
    const size_t angle = (size_t)(b.angle_rows ? b.angle_rows[t] : t) * m.head_dim;
    const float *cos = b.cos + angle, *sin = b.sin + angle;
    for (int h = 0; h < m.query_heads + m.kv_heads; h++) {
      float* x = row + h * m.head_dim;
      const float* norm = h < m.query_heads ? run.layer->q_norm : run.layer->k_norm;
      if (norm) rms_norm(x, norm, x, m.head_dim, m.eps);
      rotate(x, cos, sin, m.head_dim);
    }
    if (b.capture_of && b.capture_of[t] >= 0) capture(run, layer, t, row);
    for (int h = 0; h < m.kv_heads; h++) {
      const float* key = row + (m.query_heads + h) * m.head_dim;
      const size_t lane = ((size_t)sequence * m.num_layers + layer) * m.kv_heads + h;
      const int64_t entry = b.past_lengths[lane] + t - b.row_starts[sequence];
      const int64_t slot = (int64_t)b.lane_pages[lane * b.max_pages + entry / kPage] * kPage + entry % kPage;
      run.pool->masses[slot] = 0;
      run.pool->positions[slot] = (int32_t)b.positions[t];
      write_entry<KV>(*run.pool, slot, key, key + m.kv_heads * m.head_dim, m.head_dim);
    }
  }
}

static void write_any(const Run& run, int layer, int begin, int end) {
  switch (run.pool->kind) {
    case kKVF32: return write_rows<float>(run, layer, begin, end);
    case kKVF16: return write_rows<Half>(run, layer, begin, end);
    case kKVBF16: return write_rows<BFloat>(run, layer, begin, end);
    default: return write_rows<int8_t>(run, layer, begin, end);
  }
}

static void attend_any(const Run& run, int layer, int thread, int threads) {
  switch (run.pool->kind) {
    case kKVF32: return attend<float>(run, layer, thread, threads);
    case kKVF16: return attend<Half>(run, layer, thread, threads);
    case kKVBF16: return attend<BFloat>(run, layer, thread, threads);
    default: return attend<int8_t>(run, layer, thread, threads);
  }
}

// gate and up for this thread's columns, then silu(gate) * up and its codes: no barrier between.
static void gated(const Run& run, int thread, int threads, const uint8_t* next) {
  const Layer& l = *run.layer;
  const int inner = run.model->inner, rows = run.batch->rows;
  const Share groups32 = share_of(inner / 32, thread, threads);
  // Columns past the last whole 32 (unquantised weights only) go to the last thread.
  const int begin = groups32.begin * 32, end = thread == threads - 1 ? inner : groups32.end * 32;
  multiply(l.gate, run.normed, rows, run.gate, inner, false, begin / 8, (end + 7) / 8, group_at(l.up, begin / 8));
  multiply(l.up, run.normed, rows, run.up, inner, false, begin / 8, (end + 7) / 8, next);
  for (int t = 0; t < rows; t++) {
    const size_t at = (size_t)t * inner + begin;
    silu_multiply(run.gate + at, run.up + at, run.gate + at, end - begin);
    if (quantised(l.down))
      quantise_row(run.gate + at, run.gated.codes + at, run.gated.scales + (size_t)t * (inner / 32) + begin / 32,
                   run.gated.sums + (size_t)t * (inner / 32) + begin / 32, end - begin);
  }
}

static void normalise(const Run& run, const float* weight, const Matrix& next, Share mine) {
  const int n = run.model->hidden;
  for (int t = mine.begin; t < mine.end; t++)
    rms_norm(run.hidden + (size_t)t * n, weight, run.normed.rows + (size_t)t * n, n, run.model->eps);
  encode(next, run.normed, mine.begin, mine.end);
}

static void run_layer(const Run& run, int layer, int thread, int threads) {
  const Model& m = *run.model;
  const Layer& l = *run.layer;
  Team& team = *run.team;
  const int rows = run.batch->rows;
  const Share mine = share_of(rows, thread, threads);
  // Where this thread's share of the next product lies, to be fetched during the one before.
  const auto share_at = [&](const Matrix& w) { return group_at(w, share_of(w.groups, thread, threads).begin); };
  const auto product = [&](const Matrix& w, const Activations& x, float* y, size_t stride, bool add,
                           const uint8_t* next) {
    const Share groups = share_of(w.groups, thread, threads);
    multiply(w, x, rows, y, stride, add, groups.begin, groups.end, next);
    team.barrier();
  };
  normalise(run, l.attention_norm, l.qkv, mine);
  team.barrier();
  product(l.qkv, run.normed, run.qkv, (size_t)(m.query_heads + 2 * m.kv_heads) * m.head_dim, false,
          share_at(l.output));
  write_any(run, layer, mine.begin, mine.end);
  if (thread == 0) {
    run.next_task->store(0);
    run.next_zoom->store(0);
  }
  team.barrier();
  if (run.batch->stage) {
    if (thread == 0) run.batch->stage(layer);
    team.barrier();
  }
  if (run.batch->num_zooms) {
    zoom_any(run, layer, thread);
    team.barrier();
    if (run.batch->fetch) {
      if (thread == 0 && any_to_fetch(run, layer)) run.batch->fetch(layer);
      team.barrier();
    }
  }
  attend_any(run, layer, thread, threads);
  team.barrier();
  encode(l.output, run.attention, mine.begin, mine.end);
  team.barrier();
  const int columns = share_of(m.inner / 32, thread, threads).begin * 32;
  product(l.output, run.attention, run.hidden, m.hidden, true, group_at(l.gate, columns / 8));
  normalise(run, l.mlp_norm, l.gate, mine);
  team.barrier();
  gated(run, thread, threads, share_at(l.down));
  team.barrier();
  product(l.down, run.gated, run.hidden, m.hidden, true,
          layer + 1 < m.num_layers ? share_at((&l + 1)->qkv) : nullptr);
}

extern const Kernels kernels;
const Kernels kernels = {MKV_NAME, run_layer, attend_any, write_any,    zoom_any,  zoom_bytes,   encode,
                         multiply, rms_norm,  largest,    slot_scratch, slot_sums, look_scratch, look};

}  // namespace MKV_NAMESPACE
