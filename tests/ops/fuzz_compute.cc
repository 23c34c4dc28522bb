// Random sizes and values for the compute kernels, every array of exactly the size that is needed, so that an
// address sanitizer catches every access outside. Checks what holds for any input: each function succeeds and gives
// the same bits with another number of threads.    usage: fuzz_compute SEED ITERATIONS
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "half.h"

extern "C" {
const char *msz_variant();
int msz_gelu(const void *, void *, int, int64_t, int);
int msz_gelu_grad(const void *, const void *, void *, int, int64_t, int);
int msz_swiglu(const void *, const void *, void *, int, int64_t, int);
int msz_swiglu_grad(const void *, const void *, const void *, void *, void *, int, int64_t, int);
int msz_norm(const void *, int, const void *, const void *, int, void *, float *, int64_t, int64_t, float, int);
int msz_norm_grad(const void *, const void *, int, const void *, int, const float *, int, void *, void *, void *,
                  int64_t, int64_t, int);
int msz_rotary(const void *, void *, int, const float *, const float *, int64_t, int64_t, int64_t, int64_t, int64_t,
               int, int);
int msz_cross_entropy(const void *, int, const int32_t *, int32_t, int64_t, int64_t, float *, float *, int);
int msz_cross_entropy_grad(const void *, int, const int32_t *, int32_t, int64_t, int64_t, int64_t, const float *,
                           const float *, int64_t, void *, int);
int msz_softmax_stats(const void *, int, const int32_t *, int64_t, int64_t, int64_t, float *, float *, float *, int);
int msz_attention(const void *, const void *, const void *, int, const int32_t *, void *, float *, int64_t, int64_t,
                  int64_t, int64_t, int64_t, float, int);
int msz_attention_grad(const void *, const void *, const void *, const void *, const void *, int, const int32_t *,
                       const float *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, float,
                       int);
int msz_attention_block(const void *, const void *, const void *, int, const int32_t *, const int32_t *,
                        const int32_t *, float *, float *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float,
                        int);
int msz_attention_block_grad(const void *, const void *, const void *, const void *, const void *, int, const int32_t *,
                             const int32_t *, const int32_t *, const float *, float *, float *, float *, int64_t,
                             int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
int msz_linear(const void *, const void *, const void *, void *, int, int64_t, int64_t, int64_t, int);
int msz_linear_grad_input(const void *, const void *, void *, int, int64_t, int64_t, int64_t, int);
int msz_linear_grad_weight(const void *, const void *, void *, int, int64_t, int64_t, int64_t, int);
int msz_sum_rows(const void *, void *, int, int64_t, int64_t, int);
int msz_rows(const void *, const int32_t *, void *, int, int64_t, int64_t, int);
int msz_sum_by_index(const void *, int, const int32_t *, float *, int64_t, int64_t, int64_t, int);
int msz_cast(const void *, int, void *, int, int64_t, int);
int msz_round_to(const float *, float *, int, int64_t, int);
}

namespace {

std::mt19937_64 engine;

int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }

// Values in memory of exactly their size.
struct Array {
  Array(int64_t count, int dtype) : bytes(count * (dtype == 0 ? 4 : 2)), memory(new char[bytes]) {
    std::normal_distribution<float> normal(0.0f, below(4) ? 1.0f : 50.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float value = below(64) ? normal(engine) : msz::bits_float(static_cast<uint32_t>(engine()));
      const uint16_t half = dtype == 1 ? msz::float_to_fp16(value) : msz::float_to_bf16(value);
      if (dtype == 0) std::memcpy(memory.get() + 4 * i, &value, 4);
      else std::memcpy(memory.get() + 2 * i, &half, 2);
    }
  }
  template <class T = void>
  T *get() const { return reinterpret_cast<T *>(memory.get()); }

  size_t bytes;
  std::unique_ptr<char[]> memory;
};

// Calls function(threads) twice and compares the outputs as bytes.
template <class Function>
void twice(const char *name, const std::vector<const Array *> &outputs, const Function &function) {
  std::vector<std::vector<char>> first;
  const int other = 2 + static_cast<int>(below(3));
  for (int threads : {1, other}) {
    if (function(threads) != 0) std::printf("%s failed\n", name), std::exit(1);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const char *data = outputs[i]->get<char>();
      if (threads == 1) first.emplace_back(data, data + outputs[i]->bytes);
      else if (!std::equal(first[i].begin(), first[i].end(), data)) std::printf("%s: bits differ\n", name), std::exit(1);
    }
  }
}

void rows_case(int dtype, int64_t rows, int64_t size) {
  const int64_t n = rows * size;
  const int weight_dtype = static_cast<int>(below(3)), to = static_cast<int>(below(3));
  const Array x(n, dtype), up(n, dtype), dy(n, dtype), y(n, dtype), dx(n, dtype), other(n, to);
  const Array weight(size, weight_dtype), bias(size, weight_dtype), moments(2 * rows, 0);
  const Array dweight(size, weight_dtype), dbias(size, weight_dtype), sums(size, dtype);
  twice("gelu", {&y}, [&](int t) { return msz_gelu(x.get(), y.get(), dtype, n, t); });
  twice("gelu_grad", {&dx}, [&](int t) { return msz_gelu_grad(x.get(), dy.get(), dx.get(), dtype, n, t); });
  twice("swiglu", {&y}, [&](int t) { return msz_swiglu(x.get(), up.get(), y.get(), dtype, n, t); });
  twice("swiglu_grad", {&y, &dx}, [&](int t) {
    return msz_swiglu_grad(x.get(), up.get(), dy.get(), y.get(), dx.get(), dtype, n, t);
  });
  twice("cast", {&other}, [&](int t) { return msz_cast(x.get(), dtype, other.get(), to, n, t); });
  twice("sum_rows", {&sums}, [&](int t) { return msz_sum_rows(x.get(), sums.get(), dtype, rows, size, t); });
  for (const void *shift : {static_cast<const void *>(bias.get()), static_cast<const void *>(nullptr)}) {
    twice("norm", {&y, &moments}, [&](int t) {
      return msz_norm(x.get(), dtype, weight.get(), shift, weight_dtype, y.get(), moments.get<float>(), rows, size,
                      1e-5f, t);
    });
    twice("norm_grad", {&dx, &dweight, &dbias}, [&](int t) {
      return msz_norm_grad(x.get(), dy.get(), dtype, weight.get(), weight_dtype, moments.get<float>(),
                           shift != nullptr, dx.get(), dweight.get(), shift ? dbias.get() : nullptr, rows, size, t);
    });
  }
}

void embedding_case(int dtype, int64_t n, int64_t num_rows, int64_t size) {
  const Array table(num_rows * size, dtype), out(n * size, dtype), sums(num_rows * size, 0);
  std::vector<int32_t> indices(n);
  for (int32_t &index : indices) index = static_cast<int32_t>(below(num_rows));
  twice("rows", {&out}, [&](int t) {
    return msz_rows(table.get(), indices.data(), out.get(), dtype, n, size, t);
  });
  twice("sum_by_index", {&sums}, [&](int t) {
    return msz_sum_by_index(out.get(), dtype, indices.data(), sums.get<float>(), n, num_rows, size, t);
  });
}

void loss_case(int dtype, int64_t rows, int64_t size) {
  const Array x(rows * size, dtype), dx(rows * size, dtype), logs(rows, 0), loss(1, 0), grad(rows, 0);
  const Array maxima(rows, 0), sums(rows, 0), picked(rows, 0);
  std::vector<int32_t> labels(rows);
  for (int32_t &label : labels) label = static_cast<int32_t>(below(size + 1)) - 1;
  twice("cross_entropy", {&logs, &loss}, [&](int t) {
    return msz_cross_entropy(x.get(), dtype, labels.data(), -1, rows, size, logs.get<float>(), loss.get<float>(), t);
  });
  const int64_t stride = below(2), first = below(size);
  twice("cross_entropy_grad", {&dx}, [&](int t) {
    return msz_cross_entropy_grad(x.get(), dtype, labels.data(), -1, first, rows, size, logs.get<float>(),
                                  stride ? grad.get<float>() : loss.get<float>(), stride, dx.get(), t);
  });
  twice("softmax_stats", {&maxima, &sums, &picked}, [&](int t) {
    return msz_softmax_stats(x.get(), dtype, labels.data(), first, rows, size, maxima.get<float>(),
                             sums.get<float>(), picked.get<float>(), t);
  });
}

void linear_case(int dtype, int64_t rows, int64_t in, int64_t out) {
  const Array x(rows * in, dtype), weight(out * in, dtype), bias(out, dtype), y(rows * out, dtype);
  const Array dx(rows * in, dtype), dweight(out * in, dtype);
  twice("linear", {&y}, [&](int t) {
    return msz_linear(x.get(), weight.get(), bias.get(), y.get(), dtype, rows, in, out, t);
  });
  twice("linear_grad_input", {&dx}, [&](int t) {
    return msz_linear_grad_input(y.get(), weight.get(), dx.get(), dtype, rows, in, out, t);
  });
  twice("linear_grad_weight", {&dweight}, [&](int t) {
    return msz_linear_grad_weight(y.get(), x.get(), dweight.get(), dtype, rows, in, out, t);
  });
}

void attention_case(int dtype) {
  const int64_t batch = 1 + below(2), length = 1 + below(150), kv_heads = 1 + below(2);
  const int64_t heads = kv_heads * (1 + below(2)), dim = 2 * (1 + below(40));
  const int64_t queries = batch * length * heads * dim, keys = batch * length * kv_heads * dim;
  const Array q(queries, dtype), k(keys, dtype), v(keys, dtype), out(queries, dtype), dout(queries, dtype);
  const Array dq(queries, dtype), dk(keys, dtype), dv(keys, dtype), logs(batch * heads * length, 0);
  const Array cos(length * dim, 0), sin(length * dim, 0);
  std::vector<int32_t> starts(batch * length);
  // Now and then a start is senseless: behind its position, where nothing is visible, or negative, which is 0.
  const bool wild = below(8) == 0;
  for (int64_t i = 0; i < batch * length; ++i) {
    starts[i] = static_cast<int32_t>(wild ? engine() : static_cast<uint64_t>(below(i % length + 1)));
  }
  const int32_t *given = below(2) ? starts.data() : nullptr;
  twice("attention", {&out, &logs}, [&](int t) {
    return msz_attention(q.get(), k.get(), v.get(), dtype, given, out.get(), logs.get<float>(), batch, length, heads,
                         kv_heads, dim, 0.3f, t);
  });
  twice("attention_grad", {&dq, &dk, &dv}, [&](int t) {
    return msz_attention_grad(q.get(), k.get(), v.get(), out.get(), dout.get(), dtype, given, logs.get<float>(),
                              dq.get(), dk.get(), dv.get(), batch, length, heads, kv_heads, dim, 0.3f, t);
  });
  const int inverse = static_cast<int>(below(2));
  twice("rotary", {&out}, [&](int t) {
    return msz_rotary(q.get(), out.get(), dtype, cos.get<float>(), sin.get<float>(), 1, batch, length, heads, dim,
                      inverse, t);
  });
}

std::vector<int32_t> ascending(int64_t count) {
  std::vector<int32_t> places(count);
  int32_t place = static_cast<int32_t>(below(100));
  for (int32_t &each : places) each = place += 1 + static_cast<int32_t>(below(3));
  return places;
}

// Two blocks of keys, one after the other; what is added to starts anew in every run.
void attention_block_case(int dtype) {
  const int64_t batch = 1 + below(2), length = below(150), count = below(150), kv_heads = 1 + below(2);
  const int64_t heads = kv_heads * (1 + below(2)), dim = 2 * (1 + below(40)), sums = batch * heads * length;
  const int64_t queries = sums * dim, keys = batch * count * kv_heads * dim;
  const Array q(queries, dtype), k(keys, dtype), v(keys, dtype), half(queries, dtype), dout(queries, dtype);
  const Array out(queries, 0), logs(sums, 0), dq(queries, 0), dk(keys, 0), dv(keys, 0);
  const std::vector<int32_t> places = ascending(length), first = ascending(count), second = ascending(count);
  std::vector<int32_t> starts(batch * length);
  for (int32_t &start : starts) start = static_cast<int32_t>(below(300));
  const int32_t *given = below(2) ? starts.data() : nullptr;
  twice("attention_block", {&out, &logs}, [&](int t) {
    std::fill_n(out.get<float>(), queries, 0.0f);
    std::fill_n(logs.get<float>(), sums, INFINITY);
    int status = 0;
    for (const std::vector<int32_t> *at : {&first, &second}) {
      status |= msz_attention_block(q.get(), k.get(), v.get(), dtype, places.data(), at->data(), given,
                                    out.get<float>(), logs.get<float>(), batch, length, count, heads, kv_heads, dim,
                                    0.3f, t);
    }
    return status;
  });
  twice("attention_block_grad", {&dq, &dk, &dv}, [&](int t) {
    std::fill_n(dq.get<float>(), queries, 0.0f);
    for (const Array *grad : {&dk, &dv}) std::fill_n(grad->get<float>(), keys, 0.0f);
    int status = 0;
    for (const std::vector<int32_t> *at : {&first, &second}) {
      status |= msz_attention_block_grad(q.get(), k.get(), v.get(), half.get(), dout.get(), dtype, places.data(),
                                         at->data(), given, logs.get<float>(), dq.get<float>(), dk.get<float>(),
                                         dv.get<float>(), batch, length, count, heads, kv_heads, dim, 0.3f, t);
    }
    return status;
  });
}

}  // namespace

int main(int, char **arguments) {
  engine.seed(std::strtoull(arguments[1], nullptr, 10));
  const int iterations = std::atoi(arguments[2]);
  for (int i = 0; i < iterations; ++i) {
    const int dtype = static_cast<int>(below(3));
    rows_case(dtype, below(70), 1 + below(200));
    loss_case(dtype, below(70), 1 + below(200));
    embedding_case(dtype, below(70), 1 + below(40), 1 + below(200));
    linear_case(dtype, below(130), below(90), below(150));
    attention_case(dtype);
    attention_block_case(dtype);
    const int64_t n = below(300);
    const Array in(n, 0), out(n, 0);
    twice("round_to", {&out}, [&](int t) { return msz_round_to(in.get<float>(), out.get<float>(), 1 + dtype % 2, n, t); });
  }
  std::printf("%s: %d cases\n", msz_variant(), iterations);
}
