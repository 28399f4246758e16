// Runs every kernel on made-up data, for sanitizers and for emulated processors.
//
//   kernel_driver ISA OUT REPEATS
//
// ISA is the name of an instruction set, or `all`. Each case runs on 1, 2, 3 and 8 threads, which must
// agree to the bit. The first round writes its results to OUT as float32, or nowhere if that is `-`, and
// prints one line per case: its name, the number of results, and the relative error to allow between
// processors.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "common.h"

class Context;
extern "C" {
const char* mkv_isa(int);
Context* mkv_create(int, const char*);
void mkv_destroy(Context*);
int mkv_layers(Context*, const Model*, const Pool*, const Batch*, float*, int, int);
int mkv_write(Context*, const Model*, const Pool*, const Batch*, float*, int);
int mkv_attend(Context*, const Model*, const Pool*, const Batch*, const float*, float*, float*, int);
int mkv_linear(Context*, const Matrix*, const float*, int, float*);
int mkv_logits(Context*, const Matrix*, const float*, const int64_t*, int, const float*, float, float*, int32_t*);
int mkv_slots(Context*, const Slots*);
int mkv_look(Context*, const Looks*);
int mkv_zoom(Context*, const Model*, const Pool*, const Batch*, const float*, int);
void mkv_pack(int, const uint8_t*, int, int, const int32_t*, uint8_t*);
}

using Floats = std::vector<float>;

namespace {

constexpr int kPage = 32, kThreads[] = {1, 2, 3, 8};

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return (int)(next() % (uint64_t)n); }
  float number() { return (float)((int64_t)(next() >> 40) - (1 << 23)) / (float)(1 << 23); }  // [-1, 1)
  Floats numbers(size_t n, float scale = 1, float offset = 0) {
    Floats out(n);
    for (float& x : out) x = number() * scale + offset;
    return out;
  }

 private:
  uint64_t state_;
};

struct Weight {
  Matrix matrix;
  std::vector<uint8_t> data;
  Floats bias;
};

void put_half(uint8_t* p, float x) {
  const uint16_t bits = float_to_half(x);
  std::memcpy(p, &bits, 2);
}

Weight random_weight(Random& random, int kind, int outputs, int inputs, bool with_bias) {
  const int groups = (outputs + 7) / 8;
  const size_t cells = (size_t)groups * (inputs / 32), values = (size_t)groups * 8 * inputs;
  const float scale = 0.5f / std::sqrt((float)inputs);
  Weight w;
  if (kind == kQ4 || kind == kQ8) {
    const size_t cell = kind == kQ4 ? 160 : 272;
    w.data.resize(cells * cell);
    for (uint8_t& byte : w.data) byte = (uint8_t)random.next();
    for (size_t c = 0; c < cells; c++)
      for (int r = 0; r < 8; r++) {
        const float step = scale * (2 + random.number()) / (kind == kQ4 ? 15 : 127);
        put_half(&w.data[c * cell + 2 * r], step);
        if (kind == kQ4) put_half(&w.data[c * cell + 16 + 2 * r], -8 * step);
      }
  } else {
    const Floats numbers = random.numbers(values, 2 * scale);
    w.data.resize(values * (kind == kF32 ? 4 : 2));
    for (size_t i = 0; i < values; i++) {
      const uint16_t bits = kind == kF16 ? float_to_half(numbers[i]) : float_to_bfloat(numbers[i]);
      if (kind == kF32) std::memcpy(&w.data[4 * i], &numbers[i], 4);
      else std::memcpy(&w.data[2 * i], &bits, 2);
    }
  }
  if (with_bias) w.bias = random.numbers(groups * 8);
  w.matrix = {kind, outputs, inputs, groups, w.data.data(), with_bias ? w.bias.data() : nullptr};
  return w;
}

// Where results go, and the contexts they are computed on.
struct Bench {
  std::string isa;
  std::vector<Context*> contexts;
  FILE* out = nullptr;
  bool record = false;

  template <class F>
  void check(const std::string& name, float tolerance, F work) {
    const Floats first = work(contexts[0]);
    for (float x : first) require(std::isfinite(x), name + " is finite");
    for (size_t i = 1; i < contexts.size(); i++) {
      const Floats other = work(contexts[i]);
      require(first.empty() || !std::memcmp(first.data(), other.data(), 4 * first.size()),
              name + " on " + std::to_string(kThreads[i]) + " threads");
    }
    if (!record) return;
    std::printf("%s %zu %g\n", name.c_str(), first.size(), tolerance);
    if (out) std::fwrite(first.data(), 4, first.size(), out);
  }
};

// Products

Floats product(Context* context, const Matrix& w, const Floats& x) {
  const int rows = (int)(x.size() / w.inputs);
  Floats y((size_t)rows * w.outputs);
  require(!mkv_linear(context, &w, x.data(), rows, y.data()), "linear");
  return y;
}

void products(Bench& bench) {
  Random random(1);
  for (int kind = 0; kind < 5; kind++)
    for (int outputs : {1, 8, 13, 131})
      for (int inputs : {32, 96, 320})
        for (int rows : {0, 1, 2, 3, 4, 7}) {
          const Weight w = random_weight(random, kind, outputs, inputs, outputs != 8);
          const Floats x = random.numbers((size_t)rows * inputs);
          const std::string name = "product-" + std::to_string(kind) + "-" + std::to_string(outputs) + "x" +
                                   std::to_string(inputs) + "-" + std::to_string(rows);
          bench.check(name, 1e-5f, [&](Context* c) { return product(c, w.matrix, x); });
        }
}

void heads(Bench& bench) {
  Random random(7);
  const Weight w = random_weight(random, kQ8, 131, 96, false);
  const Weight dense = random_weight(random, kBF16, 131, 100, false);
  for (const Matrix& head : {w.matrix, dense.matrix}) {
    const Floats hidden = random.numbers((size_t)9 * head.inputs);
    const Floats norm = random.numbers(head.inputs, 0.1f, 1);
    const std::vector<int64_t> rows = {8, 0, 3};
    bench.check("head-" + std::to_string(head.inputs), 2e-2f, [&](Context* c) {
      Floats out(rows.size() * head.outputs);
      const int count = (int)rows.size();
      std::vector<int32_t> best(count);
      const int status = mkv_logits(c, &head, hidden.data(), rows.data(), count, norm.data(), 1e-5f, out.data(),
                                    best.data());
      require(status == 0, "logits");
      for (int i = 0; i < count; i++) {
        const float* row = out.data() + (size_t)i * head.outputs;
        require(best[i] == std::max_element(row, row + head.outputs) - row, "largest logit");
      }
      return out;
    });
  }
}

void packing(Bench& bench) {
  Random random(2);
  const int outputs = 13, inputs = 96;
  std::vector<int32_t> order(outputs);
  for (int i = 0; i < outputs; i++) order[i] = outputs - 1 - i;
  const Floats x = random.numbers(2 * inputs);
  for (int type = 0; type < 3; type++) {
    const int size = type == 0 ? 18 : type == 1 ? 20 : 34;
    std::vector<uint8_t> blocks((size_t)outputs * inputs / 32 * size);
    for (uint8_t& byte : blocks) byte = (uint8_t)random.next();
    for (size_t at = 0; at < blocks.size(); at += size) {
      put_half(&blocks[at], 0.01f + 0.005f * random.number());
      if (type == 1) put_half(&blocks[at + 2], -0.1f);
    }
    std::vector<uint8_t> packed((size_t)2 * (inputs / 32) * (type == 2 ? 272 : 160));
    mkv_pack(type, blocks.data(), outputs, inputs, order.data(), packed.data());
    const Matrix w{type == 2 ? kQ8 : kQ4, outputs, inputs, 2, packed.data(), nullptr};
    bench.check("pack-" + std::to_string(type), 1e-5f, [&](Context* c) { return product(c, w, x); });
  }
}

// A pool with ragged lanes on shuffled pages. What no lane holds is NaN: nothing of it may be seen.
struct Lanes {
  std::vector<uint8_t> keys, values;
  Floats key_scales, value_scales, masses, cos, sin;
  std::vector<int64_t> row_starts, past, row_positions;
  std::vector<int32_t> pages, positions;
  std::vector<uint8_t> has_mass;
  Pool pool;
  Batch batch;
};

void store(std::vector<uint8_t>& bytes, int kind, size_t index, float x) {
  const uint16_t bits = kind == kKVBF16 ? float_to_bfloat(x) : float_to_half(x);
  if (kind == kKVF32) std::memcpy(&bytes[4 * index], &x, 4);
  else if (kind == kKVInt8) bytes[index] = (uint8_t)(int8_t)(x == x ? x * 127 : 1);
  else std::memcpy(&bytes[2 * index], &bits, 2);
}

Lanes random_lanes(Random& random, const Model& m, int kind, const std::vector<int>& rows,
                   const std::vector<int>& lengths) {
  const int sequences = (int)rows.size(), lanes = sequences * m.num_layers * m.kv_heads;
  const float nan = std::nanf("");
  Lanes l;
  l.row_starts = {0};
  for (int count : rows) l.row_starts.push_back(l.row_starts.back() + count);
  const int total = (int)l.row_starts.back();
  int longest = 1, num_pages = 1;
  for (int i = 0; i < lanes; i++) {
    const int s = i / (m.num_layers * m.kv_heads);
    l.past.push_back(lengths[s] ? lengths[s] - random.below(lengths[s] < 40 ? lengths[s] : 40) : 0);
    const int needed = ((int)l.past[i] + rows[s] + kPage - 1) / kPage;
    longest = needed > longest ? needed : longest;
    num_pages += needed;
  }
  std::vector<int32_t> ids;
  for (int p = 1; p < num_pages; p++) ids.push_back(p);
  for (size_t i = ids.size(); i > 1; i--) std::swap(ids[i - 1], ids[random.below((int)i)]);

  const size_t entries = (size_t)num_pages * kPage, numbers = entries * m.head_dim;
  const size_t width = kind == kKVF32 ? 4 : kind == kKVInt8 ? 1 : 2;
  l.keys.resize(numbers * width);
  l.values.resize(numbers * width);
  for (size_t i = 0; i < numbers; i++) {
    store(l.keys, kind, i, nan);
    store(l.values, kind, i, nan);
  }
  l.key_scales.assign(entries, nan);
  l.value_scales.assign(entries, nan);
  l.masses.assign(entries, nan);
  l.positions.assign(entries, -1);
  l.pages.assign((size_t)lanes * longest, 0);
  size_t taken = 0;
  for (int i = 0; i < lanes; i++) {
    const int s = i / (m.num_layers * m.kv_heads);
    for (int e = 0; e < l.past[i] + rows[s]; e++) {
      int32_t& page = l.pages[(size_t)i * longest + e / kPage];
      if (e % kPage == 0) page = ids[taken++];
      const size_t slot = (size_t)page * kPage + e % kPage;
      if (e >= l.past[i]) continue;
      l.masses[slot] = s % 2 ? 2 + random.number() : 0;
      l.key_scales[slot] = l.value_scales[slot] = 1 / 127.f;
      for (int d = 0; d < m.head_dim; d++) {
        store(l.keys, kind, ((size_t)page * m.head_dim + d) * kPage + e % kPage, random.number());
        store(l.values, kind, slot * m.head_dim + d, random.number());
      }
    }
  }
  for (int s = 0; s < sequences; s++) l.has_mass.push_back((uint8_t)(s % 2));
  l.cos = random.numbers((size_t)total * m.head_dim);
  l.sin = random.numbers((size_t)total * m.head_dim);
  for (int t = 0; t < total; t++) l.row_positions.push_back(t);
  l.pool = {kind, l.keys.data(), l.values.data(), l.key_scales.data(), l.value_scales.data(), l.masses.data(),
            l.positions.data()};
  l.batch = {total, sequences, longest, 0, l.row_starts.data(), l.pages.data(), l.past.data(),
             l.has_mass.data(), l.row_positions.data(), l.cos.data(), l.sin.data(), nullptr, nullptr, nullptr};
  return l;
}

// Keys and values of a pass may round to the neighbouring number.
constexpr float kRounding[] = {1e-5f, 2e-3f, 1.6e-2f, 2e-2f};

void append(Floats& to, const Floats& more) { to.insert(to.end(), more.begin(), more.end()); }

Floats attention(Context* context, const Model& m, const Lanes& l, Floats qkv, int layer) {
  require(!mkv_write(context, &m, &l.pool, &l.batch, qkv.data(), layer), "write");
  Floats out((size_t)l.batch.rows * m.query_heads * m.head_dim), lse((size_t)l.batch.rows * m.query_heads);
  require(!mkv_attend(context, &m, &l.pool, &l.batch, qkv.data(), out.data(), lse.data(), layer), "attend");
  append(out, lse);
  return out;
}

void attentions(Bench& bench) {
  Random random(3);
  const struct {
    int kv_heads, group, head_dim;
  } shapes[] = {{2, 1, 16}, {1, 3, 64}, {3, 2, 80}, {1, 4, 128}, {2, 7, 64}, {1, 6, 256}};
  for (const auto& shape : shapes)
    for (int kind = 0; kind < 4; kind++) {
      const Model m{0, 0, shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim, 2, 0, nullptr};
      const Lanes l = random_lanes(random, m, kind, {1, 1, 5, 1, 50, 1}, {0, 33, 255, 600, 300, 257});
      const Floats qkv =
          random.numbers((size_t)l.batch.rows * (m.query_heads + 2 * m.kv_heads) * m.head_dim);
      const std::string name = "attention-" + std::to_string(kind) + "-" + std::to_string(shape.group) + "x" +
                               std::to_string(shape.head_dim);
      bench.check(name, kRounding[kind], [&](Context* c) { return attention(c, m, l, qkv, 1); });
    }
}

// Whole layers

struct Stack {
  std::vector<Weight> weights;
  std::vector<Floats> norms;
  std::vector<Layer> layers;
  Model model;
};

struct Shape {
  const char* name;
  int hidden, inner, qkv, output, gate, down;
  bool extras;  // biases and head norms
  float tolerance;
};

Stack random_stack(Random& random, const Shape& s) {
  const int query_heads = 6, kv_heads = 2, head_dim = 16, num_layers = 2;
  const int attended = query_heads * head_dim, width = attended + 2 * kv_heads * head_dim;
  Stack stack;
  for (int i = 0; i < num_layers; i++) {
    for (int n : {s.hidden, head_dim, head_dim, s.hidden}) stack.norms.push_back(random.numbers(n, 0.1f, 1));
    stack.weights.push_back(random_weight(random, s.qkv, width, s.hidden, s.extras));
    stack.weights.push_back(random_weight(random, s.output, s.hidden, attended, s.extras));
    stack.weights.push_back(random_weight(random, s.gate, s.inner, s.hidden, s.extras));
    stack.weights.push_back(random_weight(random, s.gate, s.inner, s.hidden, s.extras));
    stack.weights.push_back(random_weight(random, s.down, s.hidden, s.inner, s.extras));
  }
  for (int i = 0; i < num_layers; i++) {
    const Floats* n = &stack.norms[4 * i];
    const Weight* w = &stack.weights[5 * i];
    const float *q_norm = s.extras ? n[1].data() : nullptr, *k_norm = s.extras ? n[2].data() : nullptr;
    stack.layers.push_back({n[0].data(), q_norm, k_norm, n[3].data(), w[0].matrix, w[1].matrix, w[2].matrix,
                            w[3].matrix, w[4].matrix});
  }
  stack.model = {s.hidden, s.inner, query_heads, kv_heads, head_dim, num_layers, 1e-5f, stack.layers.data()};
  return stack;
}

void whole_layers(Bench& bench) {
  Random random(4);
  const Shape shapes[] = {{"q4", 96, 160, kQ4, kQ4, kQ4, kQ4, false, 2e-2f},
                          {"q8", 96, 160, kQ8, kQ8, kQ8, kQ8, true, 2e-2f},
                          {"odd", 76, 100, kF32, kF32, kF32, kF32, true, 1e-4f},
                          {"halves", 72, 104, kBF16, kF16, kBF16, kF16, false, 1e-4f},
                          {"mixed", 64, 100, kQ8, kF16, kQ4, kF32, true, 2e-2f}};
  for (const Shape& shape : shapes)
    for (int kind = 0; kind < 4; kind++) {
      const Stack stack = random_stack(random, shape);
      for (const std::vector<int>& rows : {std::vector<int>{1, 1, 1, 1}, {1, 70, 3, 1}}) {
        const Lanes l = random_lanes(random, stack.model, kind, rows, {0, 33, 255, 600});
        const Floats hidden = random.numbers((size_t)l.batch.rows * shape.hidden);
        const float tolerance = kRounding[kind] > shape.tolerance ? kRounding[kind] : shape.tolerance;
        const std::string name = std::string("layers-") + shape.name + "-" + std::to_string(kind) + "-" +
                                 std::to_string(l.batch.rows);
        bench.check(name, tolerance, [&](Context* c) {
          Floats out = hidden;
          require(!mkv_layers(c, &stack.model, &l.pool, &l.batch, out.data(), 0, 2), "layers");
          return out;
        });
      }
    }
}

// Slots

void slots(Bench& bench) {
  Random random(9);
  const struct {
    int kv_heads, group, head_dim, entries, rows, own, pool;
  } shapes[] = {{2, 3, 16, 150, 3, 2, 4}, {1, 1, 64, 64, 12, 8, 5}, {3, 2, 80, 70, 9, 9, 1}, {1, 8, 32, 1, 4, 4, 2}};
  for (const auto& shape : shapes) {
    const int lanes = (shape.rows + 7) / 8 * 8, n = shape.head_dim, angles = 400;
    const size_t kv_heads = shape.kv_heads, heads = kv_heads * shape.group, entries = shape.entries;
    const int places = (shape.entries + 63) / 64, queries = shape.own * shape.pool;
    const Floats keys = random.numbers(kv_heads * entries * n), values = random.numbers(kv_heads * entries * n);
    Floats counts(kv_heads * entries);
    std::vector<int64_t> positions(kv_heads * entries);
    for (size_t i = 0; i < counts.size(); i++) {
      counts[i] = (float)random.below(4);
      positions[i] = (int64_t)(i % entries) * 2 + random.below(2);
    }
    const Floats log_mass = random.numbers(kv_heads * entries), cos = random.numbers((size_t)angles * n);
    const Floats sin = random.numbers((size_t)angles * n);
    const Floats attention = random.numbers(heads * shape.rows * entries, 0.5f, 0.5f);
    Floats weights(lanes, 0.f), own_weights(lanes, 0.f);
    for (int r = 0; r < shape.rows; r++) weights[r] = random.number() + 1.5f;
    std::copy(weights.begin(), weights.begin() + shape.own, own_weights.begin());
    const std::vector<int32_t> pools(shape.own, shape.pool);
    const Floats query_rows = random.numbers(heads * queries * n, 0.3f);
    const Floats normalisers = random.numbers(heads * queries, 1, 2), origins = random.numbers(kv_heads * n);
    Floats roots = random.numbers(heads * n * n, 0.3f);
    for (size_t i = 0; i < roots.size(); i++)
      if ((int)(i % n) > (int)(i / n % n)) roots[i] = 0;
    const Floats outputs = random.numbers(heads * n * lanes);
    const Floats out_squares = random.numbers(heads * lanes, 1, 20);
    const std::string name = "slots-" + std::to_string(n) + "x" + std::to_string(shape.entries);
    bench.check(name, 2e-5f, [&](Context* c) {
      const size_t count = kv_heads * places;
      Floats drop(count * 127), value_weights(count * 64), products(count * 126), squares(count * 126);
      const int64_t stride = (int64_t)entries * n;
      const Slots s{shape.kv_heads, shape.group, n, shape.entries, places, shape.rows, shape.own, lanes, queries,
                    angles, n, stride, stride, 0.9f, keys.data(), values.data(), counts.data(), log_mass.data(),
                    positions.data(), cos.data(), sin.data(), attention.data(), weights.data(),
                    own_weights.data(), pools.data(), query_rows.data(), normalisers.data(), origins.data(),
                    roots.data(), outputs.data(), out_squares.data(), drop.data(), value_weights.data(),
                    products.data(), squares.data()};
      require(!mkv_slots(c, &s), "slots");
      for (const Floats* more : {&value_weights, &products, &squares}) append(drop, *more);
      return drop;
    });
  }
}

// Teams

void short_lived_teams(Bench& bench) {
  Random random(5);
  const Weight w = random_weight(random, kQ8, 40, 64, true);
  const Floats x = random.numbers(3 * 64), expected = product(bench.contexts[0], w.matrix, x);
  for (int i = 0; i < 24; i++) {
    Context* context = mkv_create(1 + i % 8, bench.isa.c_str());
    if (i % 3) require(product(context, w.matrix, x) == expected, "a short-lived team");
    mkv_destroy(context);
  }
}

void two_callers(Bench& bench) {
  Random random(6);
  const Model m{0, 0, 6, 2, 64, 1, 0, nullptr};
  const Weight w = random_weight(random, kQ4, 131, 96, false);
  const Floats x = random.numbers(5 * 96), expected = product(bench.contexts[0], w.matrix, x);
  const auto caller = [&](uint64_t seed) {
    Random own(seed);
    Context* context = mkv_create(2, bench.isa.c_str());
    const Lanes l = random_lanes(own, m, kKVF16, {1, 9}, {300, 40});
    const Floats qkv = own.numbers((size_t)10 * 10 * 64), first = attention(context, m, l, qkv, 0);
    for (int i = 0; i < 10; i++) {
      require(product(context, w.matrix, x) == expected, "one of two callers");
      require(attention(context, m, l, qkv, 0) == first, "one of two callers");
    }
    mkv_destroy(context);
  };
  std::thread other(caller, 7);
  caller(8);
  other.join();
}

}  // namespace

#include "look_cases.h"
#include "zoom_cases.h"

int main(int count, char** arguments) {
  require(count == 4, "three arguments");
  const std::string wanted = arguments[1], path = arguments[2];
  const int repeats = std::atoi(arguments[3]);
  FILE* out = path == "-" ? nullptr : std::fopen(path.c_str(), "wb");
  int found = 0;
  for (int i = 0; const char* isa = mkv_isa(i); i++) {
    if (wanted != "all" && wanted != isa) continue;
    found++;
    Bench bench{isa, {}, out};
    for (int threads : kThreads) bench.contexts.push_back(mkv_create(threads, isa));
    for (int round = 0; round < repeats; round++) {
      bench.record = round == 0;
      products(bench);
      heads(bench);
      packing(bench);
      attentions(bench);
      whole_layers(bench);
      slots(bench);
      looks(bench);
      choices(bench);
      zooming_layers(bench);
      short_lived_teams(bench);
      two_callers(bench);
    }
    for (Context* context : bench.contexts) mkv_destroy(context);
  }
  require(found > 0, "the processor has " + wanted);
  if (out) std::fclose(out);
  return 0;
}
