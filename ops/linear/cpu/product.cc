// The matrix products of a linear layer, fp32 inside whatever the storage: y = x W^T + b and its gradients.
//
// B is packed once into panels as wide as a register tile, shared by all threads; each task packs its rows of A,
// forms its rows of C in a buffer of its own, then adds the bias and stores. Every element of C is one chain of
// fused multiply-adds in ascending k, so its bits depend neither on the threads nor on the other rows.

#include <algorithm>

#include "gemm.h"
#include "tasks.h"

namespace msz {
namespace {

using Plain = Storage<kFp32>;

constexpr int64_t kDepth = 384;         // of A packed at once: with a panel of B it fits the second-level cache
constexpr int64_t kRows = 96;           // of A in a task, at most
constexpr int64_t kColumns = 512;       // of C in a task, at most
constexpr int64_t kPackedB = 1 << 21;   // floats of B packed at once, at most (but a panel)

// element(i, j) = data[i * row + j * column]; one of the steps is 1.
template <class S>
struct Matrix {
  const typename S::Element *data;
  int64_t row, column;

  const typename S::Element *at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

constexpr int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }

// Columns [column, column + kTileColumns) of B [depth, columns] -> [depth, kTileColumns], zeros behind the last.
template <class S>
MSZ_INLINE void pack_panel(Matrix<S> b, int64_t depth, int64_t columns, int64_t column, float *to) {
  const int64_t count = std::min<int64_t>(kTileColumns, columns - column);
  if (count < kTileColumns) std::fill(to, to + depth * kTileColumns, 0.0f);
  if (b.column == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      const auto *from = b.at(k, column);
      each_vector(0, count, [&](int64_t j, auto lanes) {
        put<Plain>(to + k * kTileColumns + j, get<S>(from + j, lanes), lanes);
      });
    }
    return;
  }
  for (int64_t j = 0; j < count; j += kWidth) {
    const int64_t rows = std::min<int64_t>(kWidth, count - j);
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      transpose_block([&](int r) { return r < rows ? get<S>(b.at(k, column + j + r), All{}) : Floats{}; },
                      to + k * kTileColumns + j, kTileColumns);
    }
    for (; k < depth; ++k) {
      for (int64_t r = 0; r < rows; ++r) to[k * kTileColumns + j + r] = get<S>(b.at(k, column + j + r), First{1})[0];
    }
  }
}

// Rows [row, row + rows) and columns [k, k + depth) of A, contiguous along whichever step is 1.
template <class S>
MSZ_INLINE Operand pack_rows(Matrix<S> a, int64_t row, int64_t rows, int64_t k, int64_t depth, float *to) {
  const bool along_k = a.column == 1;
  const int64_t outer = along_k ? rows : depth, inner = along_k ? depth : rows, step = padded(inner);
  for (int64_t i = 0; i < outer; ++i) {
    const auto *from = along_k ? a.at(row + i, k) : a.at(row, k + i);
    each_vector(0, inner, [&](int64_t j, auto lanes) { put<Plain>(to + i * step + j, get<S>(from + j, lanes), lanes); });
  }
  return along_k ? Operand{to, step, 1} : Operand{to, 1, step};
}

// C [rows, columns] = A [rows, depth] B [depth, columns] (+ bias [columns] to each row, unless null).
template <class S>
struct Product {
  int64_t rows, columns, depth;
  Matrix<S> a, b;
  const typename S::Element *bias;
  typename S::Element *c;

  void operator()(int threads) const {
    if (rows == 0 || columns == 0) return;
    const int64_t fitting = kPackedB / std::max<int64_t>(depth, 1) / kTileColumns * kTileColumns;
    const int64_t width = std::max<int64_t>(kTileColumns, std::min(kColumns, fitting));
    const int64_t panels = (std::min(width, columns) + kTileColumns - 1) / kTileColumns;
    Scratch packed(panels * kTileColumns * depth);
    for (int64_t first = 0; first < columns; first += width) {
      strip(first, std::min(width, columns - first), packed.begin(), threads);
    }
  }

  // Columns [first, first + count) of C.
  void strip(int64_t first, int64_t count, float *packed, int threads) const {
    const int64_t panels = (count + kTileColumns - 1) / kTileColumns, width = panels * kTileColumns;
    each_task(panels, 0, threads, [&](int64_t panel, float *) {
      pack_panel(b, depth, first + count, first + panel * kTileColumns, packed + panel * kTileColumns * depth);
    });
    // Tasks of equal size, a multiple of their number for each thread.
    const int64_t workers = thread_count(threads), rounds = (rows + workers * kRows - 1) / (workers * kRows);
    const int64_t share = (rows + workers * rounds - 1) / (workers * rounds);
    const int64_t height = (share + kTileRows - 1) / kTileRows * kTileRows;
    const int64_t packed_rows = (padded(kDepth) + kWidth) * (height + kWidth);
    each_task((rows + height - 1) / height, height * width + packed_rows, threads, [&](int64_t task, float *memory) {
      const int64_t row = task * height, here = std::min(height, rows - row);
      multiply(row, here, packed, panels, memory, memory + height * width);
      finish(row, here, first, count, memory, width);
    });
  }

  void multiply(int64_t row, int64_t here, const float *packed, int64_t panels, float *out, float *packed_rows) const {
    const int64_t width = panels * kTileColumns;
    if (depth == 0) std::fill(out, out + here * width, 0.0f);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t some = std::min(kDepth, depth - k);
      const Operand left = pack_rows(a, row, here, k, some, packed_rows);
      for (int64_t panel = 0; panel < panels; ++panel) {
        tile_column<kTileVectors>(here, left, packed + (panel * depth + k) * kTileColumns, kTileColumns,
                                  {out + panel * kTileColumns, width, k > 0}, some);
      }
    }
  }

  void finish(int64_t row, int64_t here, int64_t first, int64_t count, const float *out, int64_t width) const {
    for (int64_t i = 0; i < here; ++i) {
      auto *to = c + (row + i) * columns + first;
      each_vector(0, count, [&](int64_t j, auto lanes) {
        const Floats value = get<Plain>(out + i * width + j, lanes);
        put<S>(to + j, bias ? value + get<S>(bias + first + j, lanes) : value, lanes);
      });
    }
  }
};

int check(int64_t rows, int64_t in, int64_t out) { return rows < 0 || in < 0 || out < 0 ? kBadLength : kDone; }

}  // namespace
}  // namespace msz

// y [rows, out] = x [rows, in] weight[out, in]^T + bias [out]; bias may be null. All of one dtype.
MSZ_API int msz_linear(const void *x, const void *weight, const void *bias, void *y, int dtype, int64_t rows,
                       int64_t in, int64_t out, int threads) {
  using namespace msz;
  if (check(rows, in, out) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    Product<S>{rows, out, in, {static_cast<const E *>(x), in, 1}, {static_cast<const E *>(weight), 1, in},
               static_cast<const E *>(bias), static_cast<E *>(y)}(threads);
  });
}

// dx [rows, in] = dy [rows, out] weight [out, in]
MSZ_API int msz_linear_grad_input(const void *dy, const void *weight, void *dx, int dtype, int64_t rows, int64_t in,
                                  int64_t out, int threads) {
  using namespace msz;
  if (check(rows, in, out) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    Product<S>{rows, in, out, {static_cast<const E *>(dy), out, 1}, {static_cast<const E *>(weight), in, 1},
               nullptr, static_cast<E *>(dx)}(threads);
  });
}

// dweight [out, in] = dy [rows, out]^T x [rows, in]
MSZ_API int msz_linear_grad_weight(const void *dy, const void *x, void *dweight, int dtype, int64_t rows, int64_t in,
                                   int64_t out, int threads) {
  using namespace msz;
  if (check(rows, in, out) != kDone) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    using E = typename S::Element;
    Product<S>{out, in, rows, {static_cast<const E *>(dy), 1, out}, {static_cast<const E *>(x), in, 1},
               nullptr, static_cast<E *>(dweight)}(threads);
  });
}
