// Causal attention without the matrix of scores: online softmax (Milakov and Gimelshein 2018) over tiles, the
// gradient from recomputed tiles (Dao et al. 2022, FlashAttention).
//
// Layouts: q, out and their gradients [batch, length, heads, dim], k and v [batch, length, kv_heads, dim], one
// dtype. Query head h reads key/value head h / (heads / kv_heads). Position t sees positions starts[t] ... t of
// its sequence; starts int32 [batch, length] or null for 0.
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

struct Shape {
  int64_t batch, length, heads, kv_heads, dim;

  int64_t group() const { return heads / kv_heads; }
  int64_t tiles() const { return (length + kTile - 1) / kTile; }
  int64_t padded_dim() const { return (dim + kWidth - 1) / kWidth * kWidth; }
  int64_t rows_of_tile(int64_t tile) const { return std::min(kTile, length - tile * kTile); }
  // First element of position t of a head in a tensor with `count` heads, and the step to the next position.
  int64_t at(int64_t sample, int64_t t, int64_t head, int64_t count) const {
    return ((sample * length + t) * count + head) * dim;
  }
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

template <class S>
MSZ_INLINE void unpack_rows(const float *from, int64_t padded, int64_t rows, int64_t dim, int64_t step,
                            typename S::Element *to) {
  for (int64_t row = 0; row < rows; ++row) {
    each_vector(0, dim, [&](int64_t i, auto lanes) {
      put<S>(to + row * step + i, get<Plain>(from + row * padded + i, lanes), lanes);
    });
  }
}

// fp32 [rows, padded] -> [padded, kTile], columns beyond `rows` 0.
inline void transpose(const float *from, int64_t rows, int64_t padded, float *to) {
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
  int32_t first_query;          // its position
  int32_t last_query;           // position of the last one
  int32_t starts[kTile];        // first visible position of each
  int32_t lowest, highest;      // of the starts

  Visible(const Shape &shape, const int32_t *all_starts, int64_t sample, int64_t tile) {
    const int64_t rows = shape.rows_of_tile(tile);
    first_query = static_cast<int32_t>(tile * kTile);
    last_query = static_cast<int32_t>(tile * kTile + rows - 1);
    std::fill(starts, starts + kTile, 0);
    if (all_starts) std::copy_n(all_starts + sample * shape.length + first_query, rows, starts);
    lowest = *std::min_element(starts, starts + rows);
    highest = *std::max_element(starts, starts + rows);
  }

  int64_t first_tile() const { return lowest / kTile; }
  bool whole(int64_t keys_begin, int64_t keys_end) const {
    return keys_end - 1 <= first_query && highest <= keys_begin;
  }
};

// scores[key, query] = value where the query does not see the key.
inline void mask(const Visible &visible, int64_t keys_begin, int64_t keys, float *scores, float value) {
  Ints lane{};
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  for (int64_t q = 0; q < kTile; q += kWidth) {
    const Ints query = lane + (visible.first_query + static_cast<int32_t>(q));
    Ints start;
    std::memcpy(&start, visible.starts + q, sizeof start);
    for (int64_t k = 0; k < keys; ++k) {
      const int32_t key = static_cast<int32_t>(keys_begin + k);
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
inline void online_softmax(float *scores, int64_t keys, float scale, Running &running, float *out, int64_t padded) {
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

template <class S>
struct Forward {
  Shape shape;
  const typename S::Element *q, *k, *v;
  const int32_t *starts;
  float scale;
  typename S::Element *out;
  float *log_sums;  // [batch, heads, length]

  int64_t scratch() const { return 5 * kTile * shape.padded_dim() + kTileSize; }

  void operator()(int64_t task, float *memory) const {
    // The last tiles see most: they go first, so that the threads finish together.
    const int64_t heads = shape.batch * shape.heads, tile = shape.tiles() - 1 - task / heads;
    const int64_t sample = task % heads / shape.heads, head = task % shape.heads;
    const int64_t padded = shape.padded_dim(), rows = shape.rows_of_tile(tile), panel = kTile * padded;
    float *queries = memory, *rows_out = memory, *queries_t = memory + panel, *out_t = memory + 2 * panel;
    float *keys = memory + 3 * panel, *values = memory + 4 * panel, *scores = memory + 5 * panel;
    const int64_t at = shape.at(sample, tile * kTile, head, shape.heads);
    pack_rows<S>(q + at, shape.heads * shape.dim, rows, shape.dim, padded, queries);
    transpose(queries, rows, padded, queries_t);
    std::fill(out_t, out_t + panel, 0.0f);
    Running running;
    std::fill(running.maxima, running.maxima + kTile, -kInfinity);
    std::fill(running.sums, running.sums + kTile, 0.0f);
    const Visible visible(shape, starts, sample, tile);
    for (int64_t other = visible.first_tile(); other <= tile; ++other) {
      const int64_t count = shape.rows_of_tile(other), first = other * kTile;
      const int64_t from = shape.at(sample, first, head / shape.group(), shape.kv_heads);
      const int64_t step = shape.kv_heads * shape.dim;
      pack_rows<S>(k + from, step, count, shape.dim, padded, keys);
      pack_rows<S>(v + from, step, count, shape.dim, padded, values);
      small_gemm(count, kTile, shape.dim, {keys, padded, 1}, queries_t, kTile, {scores, kTile, false});
      if (!visible.whole(first, first + count)) mask(visible, first, count, scores, -kInfinity);
      online_softmax(scores, count, scale, running, out_t, padded);
      small_gemm(shape.dim, kTile, count, {values, 1, padded}, scores, kTile, {out_t, kTile, true});
    }
    finish(running, out_t, rows, sample, head, tile, rows_out);
    unpack_rows<S>(rows_out, padded, rows, shape.dim, shape.heads * shape.dim, out + at);
  }

  // Divides by the sums, transposes back and keeps the logarithms.
  void finish(const Running &running, const float *out_t, int64_t rows, int64_t sample, int64_t head, int64_t tile,
              float *rows_out) const {
    const int64_t padded = shape.padded_dim();
    for (int64_t row = 0; row < rows; ++row) {
      const float sum = running.sums[row], factor = sum > 0.0f || sum != sum ? 1.0f / sum : 0.0f;
      for (int64_t d = 0; d < shape.dim; ++d) rows_out[row * padded + d] = out_t[d * kTile + row] * factor;
      // Without anything visible: +inf, so that the gradient's exp(score - log_sum) is 0.
      log_sums[(sample * shape.heads + head) * shape.length + tile * kTile + row] =
          factor == 0.0f ? kInfinity : running.maxima[row] + std::log(sum);
    }
  }
};

// ---- gradient ----

// One task: a key/value head of a sample with all its query heads, so that nothing is added up across threads.
template <class S>
struct Backward {
  Shape shape;
  const typename S::Element *q, *k, *v, *out, *dout;
  const int32_t *starts;
  const float *log_sums;
  float scale;
  typename S::Element *dq, *dk, *dv;

  // Of one query head, for the whole (padded) sequence.
  struct Head {
    float *q, *q_t, *dout, *dout_t, *dq;  // rows [length, padded]; *_t tiles [padded, kTile]
    float *log_sums, *products;           // products: sum over dim of out * dout
  };

  int64_t rows() const { return shape.tiles() * kTile; }
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
    const int64_t sample = task / shape.kv_heads, kv_head = task % shape.kv_heads;
    const int64_t group = shape.group(), padded = shape.padded_dim(), panel = kTile * padded;
    float *tiles = memory + group * head_floats();
    for (int64_t g = 0; g < group; ++g) prepare(head_at(memory + g * head_floats()), sample, kv_head * group + g);
    for (int64_t tile = 0; tile < shape.tiles(); ++tile) {
      float *keys = tiles, *values = tiles + panel, *dkeys = tiles + 2 * panel, *dvalues = tiles + 3 * panel;
      const int64_t count = shape.rows_of_tile(tile), step = shape.kv_heads * shape.dim;
      const int64_t at = shape.at(sample, tile * kTile, kv_head, shape.kv_heads);
      pack_rows<S>(k + at, step, count, shape.dim, padded, keys);
      pack_rows<S>(v + at, step, count, shape.dim, padded, values);
      std::fill(dkeys, dkeys + 2 * panel, 0.0f);
      for (int64_t query_tile = tile; query_tile < shape.tiles(); ++query_tile) {
        const Visible visible(shape, starts, sample, query_tile);
        if (tile < visible.first_tile()) continue;
        for (int64_t g = 0; g < group; ++g) {
          add_tile(head_at(memory + g * head_floats()), visible, query_tile, tile, tiles);
        }
      }
      unpack_rows<S>(dkeys, padded, count, shape.dim, step, dk + at);
      unpack_rows<S>(dvalues, padded, count, shape.dim, step, dv + at);
    }
    for (int64_t g = 0; g < group; ++g) {
      const Head head = head_at(memory + g * head_floats());
      unpack_rows<S>(head.dq, padded, shape.length, shape.dim, shape.heads * shape.dim,
                     dq + shape.at(sample, 0, kv_head * group + g, shape.heads));
    }
  }

  void prepare(Head head, int64_t sample, int64_t h) const {
    const int64_t padded = shape.padded_dim(), step = shape.heads * shape.dim, plane = rows() * padded;
    const int64_t at = shape.at(sample, 0, h, shape.heads), length = shape.length;
    pack_rows<S>(q + at, step, length, shape.dim, padded, head.q);
    pack_rows<S>(dout + at, step, length, shape.dim, padded, head.dout);
    // Rows behind the sequence: no gradient, and exp(score - inf) = 0.
    std::fill(head.q + length * padded, head.q + plane, 0.0f);
    std::fill(head.dout + length * padded, head.dout + plane, 0.0f);
    std::fill(head.dq, head.dq + plane, 0.0f);
    std::fill(head.log_sums + length, head.log_sums + rows(), kInfinity);
    std::fill(head.products + length, head.products + rows(), 0.0f);
    std::copy_n(log_sums + (sample * shape.heads + h) * length, length, head.log_sums);
    for (int64_t t = 0; t < length; ++t) {
      Floats sum{};
      each_vector(0, shape.dim, [&](int64_t i, auto lanes) {
        sum = fma(get<S>(out + at + t * step + i, lanes), get<Plain>(head.dout + t * padded + i, lanes), sum);
      });
      head.products[t] = sum_lanes(sum);
    }
    for (int64_t tile = 0; tile < shape.tiles(); ++tile) {
      transpose(head.q + tile * kTile * padded, kTile, padded, head.q_t + tile * kTile * padded);
      transpose(head.dout + tile * kTile * padded, kTile, padded, head.dout_t + tile * kTile * padded);
    }
  }

  // Adds what one tile of queries and one of keys give. `tiles`: keys, values, dkeys, dvalues, then two tiles.
  void add_tile(Head head, const Visible &visible, int64_t query_tile, int64_t key_tile, float *tiles) const {
    const int64_t padded = shape.padded_dim(), panel = kTile * padded, count = shape.rows_of_tile(key_tile);
    const int64_t first = query_tile * kTile, queries = shape.rows_of_tile(query_tile), dim = shape.dim;
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
  const bool positive = s.batch >= 0 && s.length >= 0 && s.heads > 0 && s.kv_heads > 0 && s.dim > 0;
  return positive && s.heads % s.kv_heads == 0 ? kDone : kBadLength;
}

}  // namespace
}  // namespace msz

// out = softmax(scale q k^T, masked) v; log_sums fp32 [batch, heads, length]: log of the sum of exp(scale q k^T).
MSZ_API int msz_attention(const void *q, const void *k, const void *v, int dtype, const int32_t *starts, void *out,
                          float *log_sums, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                          int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, length, heads, kv_heads, dim};
  if (check(shape) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    const Forward<S> forward{shape,  static_cast<const E *>(q), static_cast<const E *>(k), static_cast<const E *>(v),
                             starts, scale, static_cast<E *>(out), log_sums};
    each_task(batch * heads * shape.tiles(), forward.scratch(), threads, forward);
  });
}

// Gradients of msz_attention with respect to q, k and v.
MSZ_API int msz_attention_grad(const void *q, const void *k, const void *v, const void *out, const void *dout,
                               int dtype, const int32_t *starts, const float *log_sums, void *dq, void *dk,
                               void *dv, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads,
                               int64_t dim, float scale, int threads) {
  using namespace msz;
  const Shape shape{batch, length, heads, kv_heads, dim};
  if (check(shape) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    const Backward<S> backward{shape,
                               static_cast<const E *>(q),
                               static_cast<const E *>(k),
                               static_cast<const E *>(v),
                               static_cast<const E *>(out),
                               static_cast<const E *>(dout),
                               starts,
                               log_sums,
                               scale,
                               static_cast<E *>(dq),
                               static_cast<E *>(dk),
                               static_cast<E *>(dv)};
    each_task(batch * kv_heads, backward.scratch(), threads, backward);
  });
}
