// Small matrix products on one thread: C[M, N] (+)= A[M, K] B[K, N] in fp32, rows of B and C contiguous.
//
// A tile of C is held in registers over the whole of K, so each element is one chain of fused multiply-adds in
// ascending k, whatever M and N are.
#pragma once

#include "vmath.h"

namespace msz {

MSZ_INLINE Floats shuffled(Floats a, Floats b, Ints lanes) {
#if defined(__clang__)
  Floats out;
  for (int i = 0; i < kWidth; ++i) out[i] = lanes[i] < kWidth ? a[lanes[i]] : b[lanes[i] - kWidth];
  return out;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Swaps the off-diagonal blocks of size `half` in a square of vectors, then those within, down to lanes.
template <int half>
MSZ_INLINE void transpose_blocks(Floats *rows) {
  Ints upper, lower;
  for (int lane = 0; lane < kWidth; ++lane) {
    upper[lane] = lane & half ? kWidth + lane - half : lane;
    lower[lane] = lane & half ? kWidth + lane : lane + half;
  }
  for (int i = 0; i < kWidth; ++i) {
    if (i & half) continue;
    const Floats above = rows[i], below = rows[i + half];
    rows[i] = shuffled(above, below, upper);
    rows[i + half] = shuffled(above, below, lower);
  }
  if constexpr (half > 1) transpose_blocks<half / 2>(rows);
}

// to[column * step + row] = row(row)[column] for a square of kWidth rows.
template <class Row>
MSZ_INLINE void transpose_block(const Row &row, float *to, int64_t step) {
  Floats rows[kWidth];
  for (int i = 0; i < kWidth; ++i) rows[i] = row(i);
  transpose_blocks<kWidth / 2>(rows);
  for (int i = 0; i < kWidth; ++i) store(to + i * step, rows[i]);
}

// a(i, k) = data[i * row + k * column]
struct Operand {
  const float *data;
  int64_t row, column;
};

struct Target {
  float *data;
  int64_t row;
  bool add;  // C += rather than C =
};

#if MSZ_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kTileRows = 6, kTileVectors = 4;  // of 32 vector registers
#else
constexpr int kTileRows = 6, kTileVectors = 2;  // of 16
#endif
constexpr int kTileColumns = kTileVectors * kWidth;

template <int M, int V>
MSZ_INLINE void tile(Operand a, const float *b, int64_t b_row, Target c, int64_t depth) {
  Floats sums[M][V];
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < V; ++j) sums[i][j] = c.add ? load(c.data + i * c.row + j * kWidth) : Floats{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[V];
    for (int j = 0; j < V; ++j) right[j] = load(b + k * b_row + j * kWidth);
    for (int i = 0; i < M; ++i) {
      const Floats left = spread(a.data[i * a.row + k * a.column]);
      for (int j = 0; j < V; ++j) sums[i][j] = fma(left, right[j], sums[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < V; ++j) store(c.data + i * c.row + j * kWidth, sums[i][j]);
  }
}

// The rows left over, fewer than M + 1.
template <int M, int V>
MSZ_INLINE void last_rows(int64_t rows, Operand a, const float *b, int64_t b_row, Target c, int64_t depth) {
  if (rows == M) {
    tile<M, V>(a, b, b_row, c, depth);
  } else if constexpr (M > 1) {
    last_rows<M - 1, V>(rows, a, b, b_row, c, depth);
  }
}

template <int V>
void tile_column(int64_t rows, Operand a, const float *b, int64_t b_row, Target c, int64_t depth) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    tile<kTileRows, V>({a.data + i * a.row, a.row, a.column}, b, b_row, {c.data + i * c.row, c.row, c.add}, depth);
  }
  if (i < rows) {
    last_rows<kTileRows - 1, V>(rows - i, {a.data + i * a.row, a.row, a.column}, b, b_row,
                                {c.data + i * c.row, c.row, c.add}, depth);
  }
}

template <int V>
MSZ_INLINE void last_columns(int64_t vectors, int64_t rows, Operand a, const float *b, int64_t b_row, Target c,
                             int64_t depth) {
  if (vectors == V) {
    tile_column<V>(rows, a, b, b_row, c, depth);
  } else if constexpr (V > 1) {
    last_columns<V - 1>(vectors, rows, a, b, b_row, c, depth);
  }
}

// `columns` is a multiple of kWidth.
inline void small_gemm(int64_t rows, int64_t columns, int64_t depth, Operand a, const float *b, int64_t b_row,
                       Target c) {
  int64_t j = 0;
  for (; j + kTileColumns <= columns; j += kTileColumns) {
    tile_column<kTileVectors>(rows, a, b + j, b_row, {c.data + j, c.row, c.add}, depth);
  }
  if (j < columns) {
    last_columns<kTileVectors>((columns - j) / kWidth, rows, a, b + j, b_row, {c.data + j, c.row, c.add}, depth);
  }
}

}  // namespace msz
