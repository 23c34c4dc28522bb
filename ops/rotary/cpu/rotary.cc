// Rotary position embedding in the half-rotation form (Su et al. 2021).

#include "threads.h"
#include "vmath.h"

// y = x * cos + [-x2, x1] * sin with x = [x1, x2] the halves of the last dim; inverse: the transposed map, which
// is the gradient. x and y [batch, length, heads, dim] of one dtype, dim even; cos and sin fp32
// [table_batch, length, dim] with table_batch 1 or batch. y must not overlap x.
MSZ_API int msz_rotary(const void *x, void *y, int dtype, const float *cos, const float *sin, int64_t table_batch,
                       int64_t batch, int64_t length, int64_t heads, int64_t dim, int inverse, int threads) {
  using namespace msz;
  using Plain = Storage<kFp32>;
  if (batch < 0 || length < 0 || heads < 0 || dim < 0 || dim % 2) return kBadLength;
  const int64_t half = dim / 2;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    auto *out = static_cast<typename S::Element *>(y);
    parallel_ranges(batch * length, 16, threads, [&](int64_t begin, int64_t end) {
      for (int64_t position = begin; position < end; ++position) {
        const int64_t table = (table_batch == 1 ? position % length : position) * dim;
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t row = (position * heads + head) * dim;
          each_vector(0, half, [&](int64_t i, auto lanes) {
            const Floats first = get<S>(in + row + i, lanes), second = get<S>(in + row + half + i, lanes);
            const Floats cos1 = get<Plain>(cos + table + i, lanes), cos2 = get<Plain>(cos + table + half + i, lanes);
            const Floats sin1 = get<Plain>(sin + table + i, lanes), sin2 = get<Plain>(sin + table + half + i, lanes);
            const Floats turned1 = inverse ? second * sin2 : -(second * sin1);
            const Floats turned2 = inverse ? -(first * sin1) : first * sin2;
            put<S>(out + row + i, fma(first, cos1, turned1), lanes);
            put<S>(out + row + half + i, fma(second, cos2, turned2), lanes);
          });
        }
      }
    });
  });
}
