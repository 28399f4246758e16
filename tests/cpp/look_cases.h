// Cases of queries that look at a layer's entries, for kernel_driver.cpp.
#pragma once

namespace {

void looks(Bench& bench) {
  Random random(11);
  const struct {
    int kv_heads, group, head_dim, entries;
    std::vector<int32_t> pools;
    bool wanted;
  } shapes[] = {{2, 3, 16, 150, {4, 4, 7}, true}, {1, 1, 64, 64, {5, 2}, false}, {3, 2, 80, 1, {1, 1}, true},
                {1, 2, 32, 5000, {8, 20, 20}, true}, {2, 1, 32, 5000, {30, 9, 9}, false}};
  for (const auto& shape : shapes) {
    const int n = shape.head_dim, rows = (int)shape.pools.size();
    int queries = 0;
    for (const int pool : shape.pools) queries += pool;
    const size_t entries = shape.entries, kv_heads = shape.kv_heads, heads = kv_heads * shape.group;
    const Floats keys = random.numbers(kv_heads * entries * n), values = random.numbers(kv_heads * entries * n);
    const Floats query_rows = random.numbers(heads * queries * n, 0.5f);
    Floats bias = random.numbers(kv_heads * entries);
    std::vector<int64_t> positions(kv_heads * entries), at(queries);
    std::vector<uint8_t> wanted(kv_heads * entries);
    for (size_t i = 0; i < bias.size(); i++) {
      const int which = random.below(10);
      positions[i] = (int64_t)(i % entries);
      wanted[i] = which > 1;
      if (which == 1) bias[i] = -INFINITY;
    }
    // The first query sees nothing, the next ones more and more.
    for (int q = 0; q < queries; q++) at[q] = q ? (int64_t)entries / 2 + q : -1;
    const std::string name = "look-" + std::to_string(n) + "x" + std::to_string(shape.entries);
    bench.check(name, 2e-5f, [&](Context* c) {
      Floats attention(heads * rows * entries), outputs(heads * rows * n), normalisers(heads * queries);
      Floats sums(heads * queries), means(heads * queries * n);
      const int64_t stride = (int64_t)entries * n;
      const Looks s{shape.kv_heads, shape.group, n, shape.entries, queries, rows, 0, shape.pools[0], stride, stride,
                    keys.data(), values.data(), bias.data(), positions.data(), query_rows.data(), at.data(),
                    shape.pools.data(), shape.wanted ? wanted.data() : nullptr, attention.data(), outputs.data(),
                    normalisers.data(), shape.wanted ? sums.data() : nullptr,
                    shape.wanted ? means.data() : nullptr};
      // Nothing is to be read past the end for it, whatever comes out.
      Floats infinite = query_rows;
      infinite[n] = INFINITY;
      Looks far = s;
      far.query_rows = infinite.data();
      require(!mkv_look(c, &far), "look of what is infinite");
      require(!mkv_look(c, &s), "look");
      for (float& x : normalisers) x = std::isinf(x) ? -1.f : x;
      for (const Floats* more : {&outputs, &normalisers, &sums, &means}) append(attention, *more);
      return attention;
    });
  }
}

}  // namespace
