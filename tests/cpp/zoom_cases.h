// Cases of what is zoomed in, for kernel_driver.cpp: random lanes with an area, spans and exact rows below.
#pragma once

namespace {

struct ZoomShape {
  const char* name;
  int kv_heads, group, head_dim, spans, longest, rows, moves;
  bool router, at_hand;
};

// Of one sequence; the area lies on the lane's first pages, rows first and then the basis.
struct Spans {
  std::vector<int64_t> starts, sizes, slots, area, basis, owners;
  std::vector<int32_t> cells, entered, entered_rows;
  std::vector<std::vector<char>> rows;  // of sources: positions, masses, keys and values with their scales
  std::vector<Source> sources;
  std::vector<uint8_t> at_hand;
  Floats scale, bias;
};

// Lanes whose first entries are an area, and what their sequences may zoom in.
struct Zoomed {
  Lanes lanes;
  std::vector<Spans> spans;
  std::vector<Zoom> zooms;
};

int digits_of(int kind) { return kind == kKVBF16 ? 2 : kind == kKVInt8 ? 1 : 3; }

std::vector<char> bytes_of(const Floats& numbers, int kind) {
  std::vector<uint8_t> bytes(numbers.size() * (kind == kKVF32 ? 4 : kind == kKVInt8 ? 1 : 2));
  for (size_t i = 0; i < numbers.size(); i++) store(bytes, kind, i, numbers[i]);
  return {bytes.begin(), bytes.end()};
}

// Codes in an entry: whole numbers that the type holds.
void write_codes(Random& random, const Model& m, Lanes& l, size_t slot) {
  const int kind = l.pool.kind, most = 1 << (4 * digits_of(kind));
  l.masses[slot] = -1e30f;
  l.key_scales[slot] = l.value_scales[slot] = 1;
  for (int d = 0; d < m.head_dim; d++) {
    // What is stored as int8 is multiplied by 127 on the way.
    const float unit = kind == kKVInt8 ? 127 : 1;
    const float key = (float)(random.below(most) - most / 2), value = (float)(random.below(most) - most / 2);
    store(l.keys, kind, (slot / kPage * m.head_dim + d) * kPage + slot % kPage, key / unit);
    store(l.values, kind, slot * m.head_dim + d, value / unit);
  }
}

void fill(const Model& m, Lanes& l, size_t slot, float number, float mass) {
  l.masses[slot] = mass;
  l.key_scales[slot] = l.value_scales[slot] = number;
  for (int d = 0; d < m.head_dim; d++) {
    store(l.keys, l.pool.kind, (slot / kPage * m.head_dim + d) * kPage + slot % kPage, number);
    store(l.values, l.pool.kind, slot * m.head_dim + d, number);
  }
}

size_t slot_of(const Lanes& l, int lane, int entry) {
  return (size_t)l.pages[(size_t)lane * l.batch.max_pages + entry / kPage] * kPage + entry % kPage;
}

// Exact rows of tokens [start, end) of one layer.
Source random_source(Random& random, const Model& m, int kind, Spans& s, int64_t start, int64_t end) {
  const size_t rows = (size_t)(m.kv_heads * (end - start));
  const auto keep = [&](std::vector<char> column) {
    s.rows.push_back(std::move(column));
    return (const char*)s.rows.back().data();
  };
  std::vector<char> positions(rows * 4);
  for (size_t i = 0; i < rows; i++) {
    const int32_t token = (int32_t)(start + i % (end - start));
    std::memcpy(&positions[4 * i], &token, 4);
  }
  Source source{start, end, keep(positions), nullptr, nullptr, nullptr, nullptr, nullptr};
  if (start) source.masses = keep(bytes_of(random.numbers(rows), kKVF32));
  source.keys = keep(bytes_of(random.numbers(rows * m.head_dim), kind));
  source.values = keep(bytes_of(random.numbers(rows * m.head_dim), kind));
  if (kind != kKVInt8) return source;
  source.key_scales = keep(bytes_of(Floats(rows, 1 / 127.f), kKVF32));
  source.value_scales = keep(bytes_of(Floats(rows, 1 / 127.f), kKVF32));
  return source;
}

Spans random_spans(Random& random, const Model& m, Lanes& l, int sequence, const ZoomShape& shape, int beside) {
  const int lanes = m.num_layers * m.kv_heads, basis = 1 + m.head_dim / 8;
  Spans s;
  int64_t tokens = 4;
  std::vector<int64_t> starts, sizes;
  for (int i = 0; i < shape.spans; i++) {
    starts.push_back(tokens);
    sizes.push_back(2 + random.below(shape.longest - 1));
    tokens += sizes[i] + random.below(3);
  }
  for (int i = 0; i < lanes; i++) {
    const int lane = sequence * lanes + i;
    const float none = -std::numeric_limits<float>::infinity(), nan = std::nanf("");
    for (int e = 0; e < beside; e++) fill(m, l, slot_of(l, lane, e), 0, none);
    for (int e = 0; e < shape.rows; e++) s.area.push_back((int64_t)slot_of(l, lane, e));
    for (int e = beside - basis; e < beside; e++) {
      const size_t slot = slot_of(l, lane, e);
      s.basis.push_back((int64_t)slot);
      l.key_scales[slot] = l.value_scales[slot] = 1 / 127.f;
      for (int d = 0; d < m.head_dim; d++) {
        store(l.keys, l.pool.kind, (slot / kPage * m.head_dim + d) * kPage + slot % kPage, 0.1f * random.number());
        store(l.values, l.pool.kind, slot * m.head_dim + d, 0.1f * random.number());
      }
    }
    int64_t entry = beside;
    for (int j = 0; j < shape.spans; j++, entry += 1 + random.below(2)) {
      const size_t slot = slot_of(l, lane, (int)entry);
      s.slots.push_back((int64_t)slot);
      write_codes(random, m, l, slot);
    }
    // The lane ends here: what is beside the last span was never written.
    for (int64_t e = entry; e < l.past[lane]; e++) fill(m, l, slot_of(l, lane, (int)e), nan, 0);
    l.past[lane] = entry;
    s.starts.insert(s.starts.end(), starts.begin(), starts.end());
    s.sizes.insert(s.sizes.end(), sizes.begin(), sizes.end());
  }
  s.owners.assign(s.area.size(), -1);
  s.cells.assign(s.area.size(), 0);
  s.entered.assign(lanes, 0);
  s.entered_rows.assign(s.area.size(), 0);
  s.rows.reserve((size_t)m.num_layers * 2 * 6);
  for (int layer = 0; layer < m.num_layers; layer++) {
    s.sources.push_back(random_source(random, m, l.pool.kind, s, 0, tokens / 2));
    s.sources.push_back(random_source(random, m, l.pool.kind, s, tokens / 2, tokens));
  }
  s.at_hand.assign(m.num_layers, 1);
  s.at_hand.back() = shape.at_hand;
  if (shape.router) {
    s.scale = random.numbers((size_t)m.num_layers * m.query_heads * m.head_dim / 4, 0.3f, 1);
    s.bias = random.numbers((size_t)m.num_layers * m.query_heads);
  }
  return s;
}

// Three sequences of which the second has nothing to zoom in.
Zoomed random_zoomed(Random& random, const Model& m, int kind, const ZoomShape& shape, std::vector<int> rows) {
  const int basis = 1 + m.head_dim / 8, beside = (shape.rows + basis + kPage - 1) / kPage * kPage;
  const int length = beside + 2 * shape.spans + 40;
  Zoomed z{random_lanes(random, m, kind, rows, {length, 70, length}), {}, {}};
  Lanes& l = z.lanes;
  for (size_t slot = 0; slot < l.masses.size(); slot++)
    if (l.masses[slot] == l.masses[slot]) l.masses[slot] = random.below(5) ? 0.f : 1.5f;
  std::fill(l.has_mass.begin(), l.has_mass.end(), (uint8_t)1);
  for (int sequence : {0, 2}) z.spans.push_back(random_spans(random, m, l, sequence, shape, beside));
  for (int i = 0; i < 2; i++) {
    Spans& s = z.spans[i];
    z.zooms.push_back({2 * i, 0, shape.spans, shape.rows, basis, digits_of(kind), shape.rows, shape.moves, beside,
                       shape.spans, 2, 1.5f, 1e-4f, s.starts.data(), s.sizes.data(), s.slots.data(), s.area.data(),
                       s.basis.data(), s.owners.data(), s.cells.data(), shape.router ? s.scale.data() : nullptr,
                       shape.router ? s.bias.data() : nullptr, s.sources.data(), s.at_hand.data(),
                       s.entered.data(), s.entered_rows.data()});
  }
  l.batch.num_zooms = 2;
  l.batch.zooms = z.zooms.data();
  return z;
}

// Which tokens have which rows, and the masses of these.
Floats zoomed_in(const Zoomed& z) {
  Floats out;
  for (const Spans& s : z.spans)
    for (size_t i = 0; i < s.owners.size(); i++) {
      out.push_back((float)s.owners[i]);
      const float mass = z.lanes.masses[s.area[i]];
      require((s.owners[i] < 0) == std::isinf(mass), "rows without a token are masked");
      out.push_back(s.owners[i] < 0 ? 0 : mass);
    }
  return out;
}

const ZoomShape kZoomShapes[] = {{"plain", 2, 3, 64, 40, 24, 60, 60, false, true},
                                 {"few", 1, 7, 64, 30, 60, 9, 3, true, true},
                                 {"small", 3, 1, 16, 21, 8, 40, 1, false, true},
                                 {"odd", 1, 2, 80, 17, 30, 300, 20, true, true}};

void choices(Bench& bench) {
  uint64_t seed = 20;
  for (const ZoomShape& shape : kZoomShapes)
    for (int kind = 0; kind < 4; kind++, seed++) {
      const Model m{0, 0, shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim, 2, 0, nullptr};
      const std::string name = std::string("zoom-") + shape.name + "-" + std::to_string(kind);
      bench.check(name, 1e-6f, [&](Context* c) {
        Random random(seed);
        Zoomed z = random_zoomed(random, m, kind, shape, {1, 1, 5});
        Floats out;
        for (int step = 0; step < 3; step++) {
          const size_t width = (size_t)(m.query_heads + 2 * m.kv_heads) * m.head_dim;
          Floats qkv = random.numbers(z.lanes.batch.rows * width, 3);
          for (int layer = 0; layer < 2; layer++) {
            require(!mkv_write(c, &m, &z.lanes.pool, &z.lanes.batch, qkv.data(), layer), "write");
            require(!mkv_zoom(c, &m, &z.lanes.pool, &z.lanes.batch, qkv.data(), layer), "zoom");
          }
          append(out, zoomed_in(z));
        }
        require(std::any_of(out.begin(), out.end(), [](float x) { return x > 0; }), "something is zoomed in");
        return out;
      });
    }
}

Zoomed* fetched_for;  // whose rows are fetched; passes do not overlap

// Shows the rows that entered, without their numbers.
void fetch_rows(int layer) {
  for (Spans& s : fetched_for->spans) {
    const size_t lanes = s.entered.size() / s.at_hand.size(), rows = s.area.size() / s.entered.size();
    for (size_t lane = layer * lanes; lane < (layer + 1) * lanes && !s.at_hand[layer]; lane++)
      for (int i = 0; i < s.entered[lane]; i++)
        fetched_for->lanes.masses[s.area[lane * rows + s.entered_rows[lane * rows + i]]] = 0;
  }
}

void zooming_layers(Bench& bench) {
  Random own(30);
  const Stack stack = random_stack(own, {"", 96, 160, kF32, kF32, kF32, kF32, false, 0});
  for (int kind = 0; kind < 4; kind++)
    for (bool at_hand : {true, false}) {
      const ZoomShape shape{"", stack.model.kv_heads, 3, stack.model.head_dim, 40, 30, 50, 10, true, at_hand};
      const std::string name = std::string("zooming-") + (at_hand ? "near-" : "far-") + std::to_string(kind);
      bench.check(name, std::max(kRounding[kind], 1e-4f), [&](Context* c) {
        Random random(40 + kind);
        Zoomed z = random_zoomed(random, stack.model, kind, shape, {1, 3, 1});
        z.lanes.batch.fetch = at_hand ? nullptr : fetch_rows;
        fetched_for = &z;
        Floats out = random.numbers((size_t)z.lanes.batch.rows * 96);
        require(!mkv_layers(c, &stack.model, &z.lanes.pool, &z.lanes.batch, out.data(), 0, 2), "layers");
        append(out, zoomed_in(z));
        return out;
      });
    }
}

}  // namespace
