// The C interface that Python calls, and the choice of an instruction set.
#include <unistd.h>

#include <algorithm>

#include "common.h"

namespace generic { extern const Kernels kernels; }
#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#elif defined(MKV_HAVE_NEON)
namespace neon { extern const Kernels kernels; }
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

float half_to_float(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float x;
  if (rest >= 0x7c00) {
    const uint32_t wide = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    std::memcpy(&x, &wide, 4);
    return x;
  }
  // Scaling by 2^112 moves the exponent bias and makes subnormals right too.
  const uint32_t wide = rest << 13;
  std::memcpy(&x, &wide, 4);
  x *= 5.192296858534828e33f;
  return sign ? -x : x;
}

uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {
    // Subnormal: adding 0.5 leaves the rounded mantissa in the low bits.
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return sign | (uint16_t)(bits - 0x3f000000);
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);
  return sign | (uint16_t)(bits >> 13);
}

namespace {

const Kernels* const* supported(int* count) {
  static const Kernels* list[4];
  static int found = [] {
    int n = 0;
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    // Older compilers cannot be asked for f16c.
    unsigned eax, ebx, ecx = 0, edx;
    const bool halves = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && halves;
    if (wide && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
      list[n++] = &avx512::kernels;
    if (wide) list[n++] = &avx2::kernels;
#elif defined(MKV_HAVE_NEON) && defined(__linux__)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_FPHP))
      list[n++] = &neon::kernels;
#elif defined(MKV_HAVE_NEON) && defined(__APPLE__)
    list[n++] = &neon::kernels;
#endif
    list[n++] = &generic::kernels;
    return n;
  }();
  *count = found;
  return list;
}

// Buffers that grow to the largest pass seen and stay.
template <class T>
struct Buffer {
  std::vector<T> data;
  T* need(size_t n) {
    if (data.size() < n) data.resize(n);
    return data.data();
  }
};

// The largest of one thread's share of a row; not whole if a number in it is not finite.
struct Best {
  int at;
  float value;
  bool whole;
};

// Of the shares of all threads, `step` apart; the lowest place of equals.
int best_of(const Best* shares, int step, int threads) {
  float value = -std::numeric_limits<float>::infinity();
  int at = -1;
  for (int t = 0; t < threads; t++) {
    const Best& share = shares[(size_t)t * step];
    if (!share.whole) return -1;
    if (share.value > value) value = share.value, at = share.at;
  }
  return at;
}

struct Rows {
  Buffer<float> values, scales, sums;
  Buffer<int8_t> codes;
  // `own` values, or those of the caller when given.
  Activations need(size_t rows, size_t width, float* given = nullptr) {
    const size_t groups = rows * (width / 32 + 1);
    return {given ? given : values.need(rows * width), width, codes.need(rows * width), scales.need(groups),
            sums.need(groups)};
  }
};

}  // namespace

// One thread team and its buffers: used by one caller at a time.
class Context {
 public:
  Context(int threads, const Kernels* kernels)
      : kernels(kernels), threads_(threads), team_(new Team(threads)), process_(getpid()) {}
  ~Context() { forget_team_of_parent(); }

  // A fork copies the team but none of its threads, so the child starts its own.
  Team& team() {
    forget_team_of_parent();
    if (!team_) {
      team_.reset(new Team(threads_));
      process_ = getpid();
    }
    return *team_;
  }

  const Kernels* const kernels;
  Rows normed, attention, gated, linear;
  Buffer<float> qkv, attended, up, scratch, slots;
  Buffer<Partial> partials;
  Buffer<Best> bests;
  Buffer<char> zoom;
  std::vector<Task> tasks, merges;
  std::atomic<int64_t> next_task{0}, next_zoom{0};

 private:
  void forget_team_of_parent() {
    // Not destroyed: that would wait for its threads.
    if (team_ && process_ != getpid()) (void)team_.release();
  }

  const int threads_;
  std::unique_ptr<Team> team_;
  pid_t process_;
};

namespace {

// Rows up to which a lane is cut into blocks, so that few rows still occupy all threads.
constexpr int kSplitRows = 48, kBlockEntries = 256;

void build_tasks(Context& c, const Model& m, const Batch& b, int layer) {
  c.tasks.clear();
  c.merges.clear();
  const int group = m.query_heads / m.kv_heads;
  int64_t scratch = 0;
  for (int s = 0; s < b.sequences; s++) {
    const int rows = (int)(b.row_starts[s + 1] - b.row_starts[s]) * group;
    for (int h = 0; h < m.kv_heads; h++) {
      const size_t lane = ((size_t)s * m.num_layers + layer) * m.kv_heads + h;
      const int64_t entries = b.past_lengths[lane] + rows / group;
      if (rows > kSplitRows) {
        for (int first = 0; first < rows; first += kTaskRows)
          c.tasks.push_back({s, h, first, std::min(kTaskRows, rows - first), 0, 0, 0});
        continue;
      }
      c.merges.push_back({s, h, 0, rows, 0, 1, scratch});
      for (int64_t start = 0; start < entries; start += kBlockEntries, scratch += rows)
        c.tasks.push_back({s, h, 0, rows, (int32_t)start, 1, scratch});
    }
  }
  c.scratch.need(scratch * m.head_dim);
  c.partials.need(scratch);
}

Run make_run(Context& c, const Model* m, const Pool* p, const Batch* b) {
  Run run{};
  run.model = m;
  run.batch = b;
  run.pool = p;
  run.team = &c.team();
  run.tasks = &c.tasks;
  run.merges = &c.merges;
  run.next_task = &c.next_task;
  run.next_zoom = &c.next_zoom;
  return run;
}

void point_to_scratch(Context& c, Run& run) {
  run.scratch = c.scratch.data.data();
  run.partials = c.partials.data.data();
}

// Room for every thread to choose what is zoomed in, each from the start of a cache line.
void make_zoom_room(Context& c, Run& run) {
  if (!run.batch->num_zooms) return;
  run.zoom_bytes = (c.kernels->zoom_bytes(*run.model, *run.batch) + 63) / 64 * 64;
  const uintptr_t room = (uintptr_t)c.zoom.need(run.zoom_bytes * c.team().size() + 64);
  run.zoom_room = (char*)((room + 63) / 64 * 64);
}

template <class F>
void on_team(Context& c, F work) {
  c.team().run([](void* f, int thread, int threads) { (*(F*)f)(thread, threads); }, &work);
}

// Items in any order, each thread with so many floats of its own.
template <class F>
void for_each(Context& c, int items, size_t floats, F work) {
  // From the start of a cache line: half of all vectors would lie across two.
  const uintptr_t room = (uintptr_t)c.slots.need(floats * c.team().size() + 16);
  float* scratch = (float*)((room + 63) / 64 * 64);
  c.next_task = 0;
  on_team(c, [&](int thread, int) {
    for (int64_t item; (item = c.next_task.fetch_add(1)) < items;) work(scratch + floats * thread, (int)item);
  });
}

// The status of a call: an exception must not reach a caller that is not C++. All memory is allocated
// before the team runs, so none is thrown among its threads.
enum Status { kDone = 0, kOutOfMemory = 1 };

template <class F>
int status_of(F work) {
  try {
    work();
    return kDone;
  } catch (...) {
    return kOutOfMemory;
  }
}

void run_layers(Context& c, const Model* m, const Pool* p, const Batch* b, float* hidden, int first, int last) {
  Run run = make_run(c, m, p, b);
  const size_t rows = b->rows;
  run.hidden = hidden;
  run.normed = c.normed.need(rows, m->hidden);
  run.qkv = c.qkv.need(rows * (m->query_heads + 2 * m->kv_heads) * m->head_dim);
  run.attended = c.attended.need(rows * m->query_heads * m->head_dim);
  run.attention = c.attention.need(rows, (size_t)m->query_heads * m->head_dim, run.attended);
  run.gated = c.gated.need(rows, m->inner);
  run.gate = run.gated.rows;
  run.up = c.up.need(rows * m->inner);
  make_zoom_room(c, run);
  // Once for every layer ahead of the team, so that all have the room that the largest needs.
  for (int layer = first; layer < last; layer++) build_tasks(c, *m, *b, layer);
  on_team(c, [&](int thread, int threads) {
    for (int layer = first; layer < last; layer++) {
      if (thread == 0) {
        run.layer = m->layers + layer;
        build_tasks(c, *m, *b, layer);
        point_to_scratch(c, run);
      }
      run.team->barrier();
      c.kernels->layer(run, layer, thread, threads);
    }
  });
}

}  // namespace

#define MKV_API extern "C" __attribute__((visibility("default")))

// Changes with every change of a structure or signature here.
MKV_API int mkv_version() { return 11; }

// Name of the i-th supported instruction set, best first; null past the end.
MKV_API const char* mkv_isa(int i) {
  int count;
  const Kernels* const* list = supported(&count);
  return i < count ? list[i]->name : nullptr;
}

// Null if the instruction set is not supported or the system refuses so many threads.
MKV_API Context* mkv_create(int threads, const char* isa) {
  int count;
  const Kernels* const* list = supported(&count);
  Context* made = nullptr;
  for (int i = 0; i < count && !made; i++)
    if (!isa || !std::strcmp(isa, list[i]->name))
      if (status_of([&] { made = new Context(threads, list[i]); }) != kDone) return nullptr;
  return made;
}

MKV_API void mkv_destroy(Context* c) { delete c; }

// The functions below return a `Status`.

// Layers [first, last) over hidden [T][hidden], in place.
MKV_API int mkv_layers(Context* c, const Model* m, const Pool* p, const Batch* b, float* hidden, int first,
                       int last) {
  return status_of([&] { run_layers(*c, m, p, b, hidden, first, last); });
}

// Rotates qkv [T][query_heads + 2 kv_heads][head_dim] in place (after the head norms of `layer`, if
// any) and writes keys and values to their slots.
MKV_API int mkv_write(Context* c, const Model* m, const Pool* p, const Batch* b, float* qkv, int layer) {
  return status_of([&] {
    Run run = make_run(*c, m, p, b);
    static const Layer none{};
    run.layer = m->layers ? m->layers + layer : &none;
    run.qkv = qkv;
    on_team(*c, [&](int thread, int threads) {
      const int64_t n = b->rows;
      c->kernels->write(run, layer, (int)(n * thread / threads), (int)(n * (thread + 1) / threads));
    });
  });
}

// Attention of the queries in qkv over their lanes; out [T][query_heads][head_dim], lse [T][query_heads].
MKV_API int mkv_attend(Context* c, const Model* m, const Pool* p, const Batch* b, const float* qkv, float* out,
                       float* lse, int layer) {
  return status_of([&] {
    Run run = make_run(*c, m, p, b);
    run.qkv = const_cast<float*>(qkv);
    run.attended = out;
    run.lse = lse;
    build_tasks(*c, *m, *b, layer);
    point_to_scratch(*c, run);
    c->next_task = 0;
    on_team(*c, [&](int thread, int threads) { c->kernels->attention(run, layer, thread, threads); });
  });
}

// Zooms in and out for the rotated queries in qkv in the sequences of the batch that have spans; what is not at
// hand is left to the caller.
MKV_API int mkv_zoom(Context* c, const Model* m, const Pool* p, const Batch* b, const float* qkv, int layer) {
  return status_of([&] {
    Run run = make_run(*c, m, p, b);
    run.qkv = const_cast<float*>(qkv);
    make_zoom_room(*c, run);
    c->next_zoom = 0;
    on_team(*c, [&](int thread, int) { c->kernels->zoom(run, layer, thread); });
  });
}

// GGUF blocks of 32 inputs, [outputs][inputs / 32], into groups of eight outputs (matmul.h). `order`
// gives the stored row of each output, or is null. type: 0 = Q4_0, 1 = Q4_1, 2 = Q8_0.
MKV_API void mkv_pack(int type, const uint8_t* blocks, int outputs, int inputs, const int32_t* order, uint8_t* out) {
  const int per_row = inputs / 32, size = type == 0 ? 18 : type == 1 ? 20 : 34;
  const int header = type == 1 ? 4 : 2, words = type == 2 ? 8 : 4;
  for (int first = 0; first < outputs; first += 8) {
    for (int b = 0; b < per_row; b++) {
      uint8_t* scales = out;
      uint8_t* codes = out + (type == 2 ? 16 : 32);
      std::memset(out, 0, (type == 2 ? 16 : 32) + 32 * words);
      for (int r = 0; r < 8 && first + r < outputs; r++) {
        const size_t row = order ? order[first + r] : first + r;
        const uint8_t* block = blocks + (row * per_row + b) * size;
        std::memcpy(scales + 2 * r, block, 2);
        if (type == 1) std::memcpy(scales + 16 + 2 * r, block + 2, 2);
        if (type == 0) {
          // Q4_0 codes stand for code - 8: a minimum of -8 scale, which is exact in half precision.
          uint16_t bits;
          std::memcpy(&bits, block, 2);
          bits = float_to_half(-8.f * half_to_float(bits));
          std::memcpy(scales + 16 + 2 * r, &bits, 2);
        }
        for (int j = 0; j < words; j++) std::memcpy(codes + 32 * j + 4 * r, block + header + 4 * j, 4);
      }
      out = codes + 32 * words;
    }
  }
}

// y [rows][outputs] = x [rows][inputs] W^T + bias
MKV_API int mkv_linear(Context* c, const Matrix* w, const float* x, int rows, float* y) {
  return status_of([&] {
    const Activations in = c->linear.need(rows, w->inputs, const_cast<float*>(x));
    Team& team = c->team();
    on_team(*c, [&](int thread, int threads) {
      const auto share = [&](int64_t n, int i) { return (int)(n * i / threads); };
      c->kernels->encode(*w, in, share(rows, thread), share(rows, thread + 1));
      team.barrier();
      c->kernels->multiply(*w, in, rows, y, w->outputs, false, share(w->groups, thread),
                           share(w->groups, thread + 1), nullptr);
    });
  });
}

// out [count][head outputs]: the rows `rows` of hidden, normalised, times the head. best [count]: the
// likeliest output of each row, -1 if one of its numbers is not finite.
MKV_API int mkv_logits(Context* c, const Matrix* head, const float* hidden, const int64_t* rows, int count,
                       const float* norm, float eps, float* out, int32_t* best) {
  return status_of([&] {
    const int width = head->inputs;
    Best* bests = c->bests.need((size_t)count * c->team().size());
    const Activations in = c->linear.need(count, width);
    Team& team = c->team();
    on_team(*c, [&](int thread, int threads) {
      const auto share = [&](int64_t n, int i) { return (int)(n * i / threads); };
      const int begin = share(count, thread), end = share(count, thread + 1);
      for (int i = begin; i < end; i++)
        c->kernels->rms_norm(hidden + rows[i] * width, norm, in.rows + (size_t)i * width, width, eps);
      c->kernels->encode(*head, in, begin, end);
      team.barrier();
      const int first = share(head->groups, thread), last = share(head->groups, thread + 1);
      c->kernels->multiply(*head, in, count, out, head->outputs, false, first, last, nullptr);
      const int from = 8 * first, to = std::min(8 * last, head->outputs);
      for (int i = 0; i < count; i++) {
        Best& own = bests[thread * count + i];
        own.at = c->kernels->largest(out + (size_t)i * head->outputs + from, to - from, &own.value);
        own.whole = own.at >= 0 || from >= to;
        own.at += from;
      }
      team.barrier();
      for (int i = begin; i < end; i++) best[i] = best_of(bests + i, count, threads);
    });
  });
}

// Sums over the nodes of all slots of a layer.
MKV_API int mkv_slots(Context* c, const Slots* s) {
  return status_of([&] {
    for_each(*c, s->kv_heads * s->slots, c->kernels->slot_scratch(*s),
             [&](float* scratch, int item) { c->kernels->slot_sums(*s, scratch, item); });
  });
}

// What queries see of all lanes of a layer.
MKV_API int mkv_look(Context* c, const Looks* s) {
  return status_of([&] {
    for_each(*c, s->kv_heads, c->kernels->look_scratch(*s),
             [&](float* scratch, int lane) { c->kernels->look(*s, scratch, lane); });
  });
}
