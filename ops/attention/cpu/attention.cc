// Causal attention without the matrix of scores: online softmax (Milakov and Gimelshein 2018) over tiles, the
// gradient from recomputed tiles (Dao et al. 2022, FlashAttention).
//
// Layouts: q, out and their gradients [batch, length, heads, dim], k and v [batch, keys, kv_heads, dim], one
// dtype. Query head h reads key/value head h / (heads / kv_heads). A query at position t of its sequence sees
// the keys at positions starts ... t; starts int32 [batch, length] or null for 0. A negative start is 0; a query
// that sees no key gets 0. Queries and keys are the whole sequence, or a block of queries and one of keys that
// say where they lie: then the result is brought up to date with what these keys add to it (the merge of Liu et
// al. 2023, Ring Attention), and gradients are added.
//
// Tiles are kept transposed, [keys, queries]: a vector holds neighbouring queries, so that maxima and sums over
// the keys need no work across lanes, and keys and values enter the products as they lie in memory. Only the
// queries are transposed, once a tile. Everything is fp32 inside.
//
// Tiles lie at fixed positions of the sequence and are joined in ascending order of the keys, so the bits for a
// position depend on its sequence up to it, not on the batch, on later positions or on the number of threads.

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "tasks.h"

namespace msz {
namespace {

using Plain = Storage<kFp32>;

constexpr int64_t kTile = 64;  // queries and keys of a tile
constexpr int64_t kTileSize = kTile * kTile;

// What is as long as the queries, or as the keys.
struct Side {
  int64_t length, heads, dim;

  int64_t tiles() const { return (length + kTile - 1) / kTile; }
  int64_t rows_of_tile(int64_t tile) const { return std::min(kTile, length - tile * kTile); }
  int64_t step() const { return heads * dim; }  // from one row to the next
  int64_t at(int64_t sample, int64_t row, int64_t head) const { return ((sample * length + row) * heads + head) * dim; }
};

struct Shape {
  int64_t batch;
  Side queries, keys;

  int64_t dim() const { return queries.dim; }
  int64_t group() const { return queries.heads / keys.heads; }
  int64_t padded_dim() const { return (dim() + kWidth - 1) / kWidth * kWidth; }
};

// Positions of queries and keys in the sequence, ascending; null: 0, 1, 2, ...
struct Positions {
  const int32_t *queries, *keys;

  int32_t query(int64_t row) const { return queries ? queries[row] : static_cast<int32_t>(row); }
  int32_t key(int64_t row) const { return keys ? keys[row] : static_cast<int32_t>(row); }
};

// rows x dim elements at a step -> fp32 [rows, padded] with zeros behind.
template <class S>
MSZ_INLINE void pack_rows(const typename S::Element *from, int64_t step, int64_t rows, int64_t dim, int64_t padded,
                          float *to) {
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(to + row * padded + padded - kWidth, to + (row + 1) * padded, 0.0f);
    each_vector(0, dim, [&](int64_t i, auto lanes) {
      put<Plain>(to + row * padded + i, get<S>(from + row * step + i, lanes), lanes);
    });
  }
}

// The other way; `add`: to what is there.
template <class S>
MSZ_INLINE void unpack_rows(const float *from, int64_t padded, int64_t rows, int64_t dim, int64_t step,
                            typename S::Element *to, bool add = false) {
  for (int64_t row = 0; row < rows; ++row) {
    each_vector(0, dim, [&](int64_t i, auto lanes) {
      Floats values = get<Plain>(from + row * padded + i, lanes);
      if (add) values += get<S>(to + row * step + i, lanes);
      put<S>(to + row * step + i, values, lanes);
    });
  }
}

// fp32 [rows, padded] -> [padded, kTile], columns beyond `rows` 0.
MSZ_INLINE void transpose(const float *from, int64_t rows, int64_t padded, float *to) {
  if (rows < kTile) std::fill(to, to + padded * kTile, 0.0f);
  for (int64_t row = 0; row < rows; row += kWidth) {
    for (int64_t i = 0; i < padded; i += kWidth) {
      const int64_t count = std::min<int64_t>(kWidth, rows - row);
      transpose_block([&](int r) { return r < count ? load(from + (row + r) * padded + i) : Floats{}; },
                      to + i * kTile + row, kTile);
    }
  }
}

// What the queries of a tile may see.
struct Visible {
  const Positions &positions;
  int32_t queries[kTile];   // position of each
  int32_t starts[kTile];    // first visible position of each
  int32_t first, last;      // of the positions
  int32_t lowest, highest;  // of the starts

  Visible(const Shape &shape, const Positions &where, const int32_t *all_starts, int64_t sample, int64_t tile)
      : positions(where) {
    const int64_t rows = shape.queries.rows_of_tile(tile), at = tile * kTile;
    for (int64_t row = 0; row < kTile; ++row) queries[row] = where.query(at + std::min(row, rows - 1));
    std::fill(starts, starts + kTile, 0);
    if (all_starts) std::copy_n(all_starts + sample * shape.queries.length + at, rows, starts);
    first = queries[0];
    last = queries[rows - 1];
    lowest = *std::min_element(starts, starts + rows);
    highest = *std::max_element(starts, starts + rows);
  }

  bool nothing(int64_t keys_begin, int64_t keys_end) const {
    return positions.key(keys_begin) > last || positions.key(keys_end - 1) < lowest;
  }
  bool whole(int64_t keys_begin, int64_t keys_end) const {
    return positions.key(keys_end - 1) <= first && highest <= positions.key(keys_begin);
  }
};

// scores[key, query] = value where the query does not see the key.
MSZ_INLINE void mask(const Visible &visible, int64_t keys_begin, int64_t keys, float *scores, float value) {
  int32_t places[kTile];
  for (int64_t k = 0; k < keys; ++k) places[k] = visible.positions.key(keys_begin + k);
  for (int64_t q = 0; q < kTile; q += kWidth) {
    Ints query, start;
    std::memcpy(&query, visible.queries + q, sizeof query);
    std::memcpy(&start, visible.starts + q, sizeof start);
    for (int64_t k = 0; k < keys; ++k) {
      const int32_t key = places[k];
      float *at = scores + k * kTile + q;
      store(at, (query < key) | (start > key) ? spread(value) : load(at));
    }
  }
}

// ---- forward ----

struct Running {
  float maxima[kTile], sums[kTile];  // by query: largest scaled score so far, sum of exp(score - largest)
};

// scores -> exp(scale * scores - maximum), with the running maxima, sums and out [padded, kTile] brought up to date.
MSZ_INLINE void online_softmax(float *scores, int64_t keys, float scale, Running &running, float *out, int64_t padded) {
  for (int64_t q = 0; q < kTile; q += kWidth) {
    Floats top = spread(-kInfinity);
    for (int64_t k = 0; k < keys; ++k) top = larger(load(scores + k * kTile + q), top);
    const Floats before = load(running.maxima + q), now = larger(top * scale, before);
    // A query that has seen nothing yet has maximum -inf: subtract 0 instead, all its terms are exp(-inf).
    const Floats shift = now > -kInfinity ? now : Floats{};
    const Floats keep = exp(before - shift);
    Floats sum = load(running.sums + q) * keep;
    for (int64_t k = 0; k < keys; ++k) {
      const Floats p = exp(fma(load(scores + k * kTile + q), spread(scale), -shift));
      store(scores + k * kTile + q, p);
      sum += p;
    }
    store(running.maxima + q, now);
    store(running.sums + q, sum);
    for (int64_t d = 0; d < padded; ++d) store(out + d * kTile + q, load(out + d * kTile + q) * keep);
  }
}

// `O`: how the result is stored. `adds`: out and log_sums hold what other keys gave (log_sums +inf: nothing yet).
template <class S, class O>
struct Forward {
  Shape shape;
  Positions positions;
  const typename S::Element *q, *k, *v;
  const int32_t *starts;
  float scale;
  typename O::Element *out;
  float *log_sums;  // [batch, heads, length]
  bool adds;

  int64_t scratch() const { return 5 * kTile * shape.padded_dim() + kTileSize; }

  void operator()(int64_t task, float *memory) const {
    // The last tiles see most: they go first, so that the threads finish together.
    const int64_t heads = shape.batch * shape.queries.heads, tile = shape.queries.tiles() - 1 - task / heads;
    const int64_t sample = task % heads / shape.queries.heads, head = task % shape.queries.heads;
    const int64_t padded = shape.padded_dim(), rows = shape.queries.rows_of_tile(tile), panel = kTile * padded;
    float *queries = memory, *rows_out = memory, *queries_t = memory + panel, *out_t = memory + 2 * panel;
    float *keys = memory + 3 * panel, *values = memory + 4 * panel, *scores = memory + 5 * panel;
    const int64_t at = shape.queries.at(sample, tile * kTile, head), dim = shape.dim();
    const int64_t row = (sample * shape.queries.heads + head) * shape.queries.length + tile * kTile;
    Running running;
    begin(running, at, row, rows, rows_out, out_t);
    pack_rows<S>(q + at, shape.queries.step(), rows, dim, padded, queries);
    transpose(queries, rows, padded, queries_t);
    const Visible visible(shape, positions, starts, sample, tile);
    for (int64_t other = 0; other < shape.keys.tiles(); ++other) {
      const int64_t count = shape.keys.rows_of_tile(other), first = other * kTile;
      if (visible.nothing(first, first + count)) continue;
      const int64_t from = shape.keys.at(sample, first, head / shape.group());
      pack_rows<S>(k + from, shape.keys.step(), count, dim, padded, keys);
      pack_rows<S>(v + from, shape.keys.step(), count, dim, padded, values);
      small_gemm(count, kTile, dim, {keys, padded, 1}, queries_t, kTile, {scores, kTile, false});
      if (!visible.whole(first, first + count)) mask(visible, first, count, scores, -kInfinity);
      online_softmax(scores, count, scale, running, out_t, padded);
      small_gemm(dim, kTile, count, {values, 1, padded}, scores, kTile, {out_t, kTile, true});
    }
    finish(running, out_t, rows, row, rows_out);
    unpack_rows<O>(rows_out, padded, rows, dim, shape.queries.step(), out + at);
  }

  // Nothing, or the result so far: one term exp(log_sum - log_sum) = 1 with the value `out`.
  void begin(Running &running, int64_t at, int64_t row, int64_t rows, float *rows_out, float *out_t) const {
    const int64_t padded = shape.padded_dim();
    std::fill(running.maxima, running.maxima + kTile, -kInfinity);
    std::fill(running.sums, running.sums + kTile, 0.0f);
    std::fill(out_t, out_t + kTile * padded, 0.0f);
    if (!adds) return;
    pack_rows<O>(out + at, shape.queries.step(), rows, shape.dim(), padded, rows_out);
    transpose(rows_out, rows, padded, out_t);
    for (int64_t i = 0; i < rows; ++i) {
      const bool empty = log_sums[row + i] == kInfinity;
      running.maxima[i] = empty ? -kInfinity : log_sums[row + i];
      running.sums[i] = empty ? 0.0f : 1.0f;
    }
  }

  // Divides by the sums, transposes back and keeps the logarithms.
  void finish(const Running &running, const float *out_t, int64_t rows, int64_t row, float *rows_out) const {
    const int64_t padded = shape.padded_dim();
    for (int64_t i = 0; i < rows; ++i) {
      const float sum = running.sums[i], factor = sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f;
      for (int64_t d = 0; d < shape.dim(); ++d) rows_out[i * padded + d] = out_t[d * kTile + i] * factor;
      // Without anything visible: +inf, so that the gradient's exp(score - log_sum) is 0.
      log_sums[row + i] = factor == 0.0f ? kInfinity : running.maxima[i] + std::log(sum);
    }
  }
};

// ---- gradient ----

// One task: a key/value head of a sample with all its query heads, so that nothing is added up across threads.
// `G`: how gradients are stored. `adds`: they are added to what is there.
template <class S, class G>
struct Backward {
  Shape shape;
  Positions positions;
  const typename S::Element *q, *k, *v, *out, *dout;
  const int32_t *starts;
  const float *log_sums;
  float scale;
  typename G::Element *dq, *dk, *dv;
  bool adds;

  // Of one query head, for all (padded) queries.
  struct Head {
    float *q, *q_t, *dout, *dout_t, *dq;  // rows [length, padded]; *_t tiles [padded, kTile]
    float *log_sums, *products;           // products: sum over dim of out * dout
  };

  int64_t rows() const { return shape.queries.tiles() * kTile; }
  int64_t head_floats() const { return rows() * (5 * shape.padded_dim() + 2); }
  int64_t scratch() const {
    return shape.group() * head_floats() + 4 * kTile * shape.padded_dim() + 2 * kTileSize;
  }

  Head head_at(float *memory) const {
    const int64_t plane = rows() * shape.padded_dim();
    float *end = memory + 5 * plane;
    return {memory, memory + plane, memory + 2 * plane, memory + 3 * plane, memory + 4 * plane, end, end + rows()};
  }

  void operator()(int64_t task, float *memory) const {
    const int64_t sample = task / shape.keys.heads, kv_head = task % shape.keys.heads, step = shape.keys.step();
    const int64_t group = shape.group(), padded = shape.padded_dim(), panel = kTile * padded, dim = shape.dim();
    float *tiles = memory + group * head_floats();
    for (int64_t g = 0; g < group; ++g) prepare(head_at(memory + g * head_floats()), sample, kv_head * group + g);
    for (int64_t tile = 0; tile < shape.keys.tiles(); ++tile) {
      float *keys = tiles, *values = tiles + panel, *dkeys = tiles + 2 * panel, *dvalues = tiles + 3 * panel;
      const int64_t count = shape.keys.rows_of_tile(tile), at = shape.keys.at(sample, tile * kTile, kv_head);
      pack_rows<S>(k + at, step, count, dim, padded, keys);
      pack_rows<S>(v + at, step, count, dim, padded, values);
      std::fill(dkeys, dkeys + 2 * panel, 0.0f);
      for (int64_t query_tile = 0; query_tile < shape.queries.tiles(); ++query_tile) {
        const Visible visible(shape, positions, starts, sample, query_tile);
        if (visible.nothing(tile * kTile, tile * kTile + count)) continue;
        for (int64_t g = 0; g < group; ++g) {
          add_tile(head_at(memory + g * head_floats()), visible, query_tile, tile, tiles);
        }
      }
      unpack_rows<G>(dkeys, padded, count, dim, step, dk + at, adds);
      unpack_rows<G>(dvalues, padded, count, dim, step, dv + at, adds);
    }
    for (int64_t g = 0; g < group; ++g) {
      const Head head = head_at(memory + g * head_floats());
      unpack_rows<G>(head.dq, padded, shape.queries.length, dim, shape.queries.step(),
                     dq + shape.queries.at(sample, 0, kv_head * group + g), adds);
    }
  }

  void prepare(Head head, int64_t sample, int64_t h) const {
    const int64_t padded = shape.padded_dim(), step = shape.queries.step(), plane = rows() * padded;
    const int64_t at = shape.queries.at(sample, 0, h), length = shape.queries.length, dim = shape.dim();
    pack_rows<S>(q + at, step, length, dim, padded, head.q);
    pack_rows<S>(dout + at, step, length, dim, padded, head.dout);
    // Rows behind the queries: no gradient, and exp(score - inf) = 0.
    std::fill(head.q + length * padded, head.q + plane, 0.0f);
    std::fill(head.dout + length * padded, head.dout + plane, 0.0f);
    std::fill(head.dq, head.dq + plane, 0.0f);
    std::fill(head.log_sums + length, head.log_sums + rows(), kInfinity);
    std::fill(head.products + length, head.products + rows(), 0.0f);
    std::copy_n(log_sums + (sample * shape.queries.heads + h) * length, length, head.log_sums);
    for (int64_t t = 0; t < length; ++t) {
      Floats sum{};
      each_vector(0, dim, [&](int64_t i, auto lanes) {
        sum = fma(get<S>(out + at + t * step + i, lanes), get<Plain>(head.dout + t * padded + i, lanes), sum);
      });
      head.products[t] = sum_lanes(sum);
    }
    for (int64_t tile = 0; tile < shape.queries.tiles(); ++tile) {
      transpose(head.q + tile * kTile * padded, kTile, padded, head.q_t + tile * kTile * padded);
      transpose(head.dout + tile * kTile * padded, kTile, padded, head.dout_t + tile * kTile * padded);
    }
  }

  // Adds what one tile of queries and one of keys give. `tiles`: keys, values, dkeys, dvalues, then two tiles.
  void add_tile(Head head, const Visible &visible, int64_t query_tile, int64_t key_tile, float *tiles) const {
    const int64_t padded = shape.padded_dim(), panel = kTile * padded, count = shape.keys.rows_of_tile(key_tile);
    const int64_t first = query_tile * kTile, queries = shape.queries.rows_of_tile(query_tile), dim = shape.dim();
    float *keys = tiles, *values = tiles + panel, *dkeys = tiles + 2 * panel, *dvalues = tiles + 3 * panel;
    float *p = tiles + 4 * panel, *ds = p + kTileSize;
    small_gemm(count, kTile, dim, {keys, padded, 1}, head.q_t + first * padded, kTile, {p, kTile, false});
    small_gemm(count, kTile, dim, {values, padded, 1}, head.dout_t + first * padded, kTile, {ds, kTile, false});
    const int64_t keys_begin = key_tile * kTile;
    if (!visible.whole(keys_begin, keys_begin + count)) mask(visible, keys_begin, count, p, -kInfinity);
    for (int64_t q0 = 0; q0 < kTile; q0 += kWidth) {
      const Floats log_sum = load(head.log_sums + first + q0), product = load(head.products + first + q0);
      for (int64_t i = 0; i < count; ++i) {
        float *at = p + i * kTile + q0, *ds_at = ds + i * kTile + q0;
        const Floats weight = exp(fma(load(at), spread(scale), -log_sum));
        store(at, weight);
        store(ds_at, weight * (load(ds_at) - product) * scale);
      }
    }
    small_gemm(count, padded, queries, {p, kTile, 1}, head.dout + first * padded, padded, {dvalues, padded, true});
    small_gemm(count, padded, queries, {ds, kTile, 1}, head.q + first * padded, padded, {dkeys, padded, true});
    small_gemm(queries, padded, count, {ds, 1, kTile}, keys, padded, {head.dq + first * padded, padded, true});
  }
};

int check(const Shape &s) {
  const bool positive = s.batch >= 0 && s.queries.length >= 0 && s.keys.length >= 0 && s.queries.heads > 0 &&
                        s.keys.heads > 0 && s.dim() > 0;
  return positive && s.queries.heads % s.keys.heads == 0 ? kDone : kBadLength;
}

template <class S, class O>
void run(const Forward<S, O> &forward, int threads) {
  const Shape &shape = forward.shape;
  each_task(shape.batch * shape.queries.heads * shape.queries.tiles(), forward.scratch(), threads, forward);
}

template <class S, class G>
void run(const Backward<S, G> &backward, int threads) {
  const Shape &shape = backward.shape;
  each_task(shape.batch * shape.keys.heads, backward.scratch(), threads, backward);
}

template <class E>
const E *as(const void *pointer) {
  return static_cast<const E *>(pointer);
}

template <class E>
E *as(void *pointer) {
  return static_cast<E *>(pointer);
}

}  // namespace
}  // namespace msz

// out = softmax(scale q k^T, masked) v; log_sums fp32 [batch, heads, length]: log of the sum of exp(scale q k^T).
MSZ_API int msz_attention(const void *q, const void *k, const void *v, int dtype, const int32_t *starts, void *out,
                          float *log_sums, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                          int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, {length, heads, dim}, {length, kv_heads, dim}};
  if (check(shape) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    run(Forward<S, S>{shape, {}, as<E>(q), as<E>(k), as<E>(v), starts, scale, as<E>(out), log_sums, false}, threads);
  });
}

// Gradients of msz_attention with respect to q, k and v.
MSZ_API int msz_attention_grad(const void *q, const void *k, const void *v, const void *out, const void *dout,
                               int dtype, const int32_t *starts, const float *log_sums, void *dq, void *dk,
                               void *dv, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                               int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, {length, heads, dim}, {length, kv_heads, dim}};
  if (check(shape) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    run(Backward<S, S>{shape, {}, as<E>(q), as<E>(k), as<E>(v), as<E>(out), as<E>(dout), starts, log_sums, scale,
                       as<E>(dq), as<E>(dk), as<E>(dv), false},
        threads);
  });
}

// Brings out (fp32) and log_sums up to date with a block of keys; log_sums +inf: no key was seen yet.
// Positions int32 [queries] and [keys], ascending.
MSZ_API int msz_attention_block(const void *q, const void *k, const void *v, int dtype,
                                const int32_t *query_positions, const int32_t *key_positions, const int32_t *starts,
                                float *out, float *log_sums, int64_t batch, int64_t queries, int64_t keys,
                                int64_t heads, int64_t kv_heads, int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, {queries, heads, dim}, {keys, kv_heads, dim}};
  if (check(shape) != kDone) return kBadLength;
  const Positions positions{query_positions, key_positions};
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    run(Forward<S, Plain>{shape, positions, as<E>(q), as<E>(k), as<E>(v), starts, scale, out, log_sums, true},
        threads);
  });
}

// Adds what a block of keys gives to dq, and what the queries give to its dk and dv (all fp32); out and log_sums
// are those over all keys.
MSZ_API int msz_attention_block_grad(const void *q, const void *k, const void *v, const void *out, const void *dout,
                                     int dtype, const int32_t *query_positions, const int32_t *key_positions,
                                     const int32_t *starts, const float *log_sums, float *dq, float *dk, float *dv,
                                     int64_t batch, int64_t queries, int64_t keys, int64_t heads, int64_t kv_heads,
                                     int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, {queries, heads, dim}, {keys, kv_heads, dim}};
  if (check(shape) != kDone) return kBadLength;
  const Positions positions{query_positions, key_positions};
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    run(Backward<S, Plain>{shape, positions, as<E>(q), as<E>(k), as<E>(v), as<E>(out), as<E>(dout), starts, log_sums,
                           scale, dq, dk, dv, true},
        threads);
  });
}
