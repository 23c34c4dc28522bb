// Sum of squares of a gradient, one partial sum a core. One binary for each dtype (DTYPE_X).
//
// A tile's squares are added as a tree: rows of 64 lanes, then rows of 64 row sums, then what is left. The tile sums
// of a core are added in ascending order. An infinite or NaN element makes the core's sum infinite or NaN.
#include <type_traits>

#include "grad_stats_tiling.h"
#include "kernel_operator.h"

template <typename T>
class GradStatsKernel {
    static constexpr bool kWidens = !std::is_same<T, float>::value;
    static constexpr uint8_t kBuffers = 2;  // one is loaded while the other is computed on
    static constexpr int32_t kLanes = 64;   // floats in one repeat of 256 bytes
    static constexpr int32_t kRows = kGradStatsTile / kLanes;
    static constexpr int32_t kRowSums = kRows / kLanes;
    static constexpr int32_t kRowBlocks = 8;  // 32-byte blocks in a repeat
    static constexpr uint32_t kRowBytes = kGradStatsRowItems * sizeof(float);
    static_assert(kRows <= 255 && kRows % kLanes == 0 && kRowSums <= kLanes, "three levels of the tree");
    // Places in the buffer of sums, 32-byte aligned.
    static constexpr uint32_t kSecondLevel = kRows;
    static constexpr uint32_t kTileSum = kSecondLevel + 8;
    static constexpr uint32_t kSumItems = kTileSum + 8;
    // The row of this core, then zeros for rows without a core.
    static constexpr uint32_t kRowBufferItems = (1 + kGradStatsRows) * kGradStatsRowItems;

  public:
    __aicore__ inline GradStatsKernel() {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR partials, const GradStatsTiling& tiling, AscendC::TPipe* pipe) {
        uint64_t start = tiling.perCore * static_cast<uint64_t>(AscendC::GetBlockIdx());
        uint64_t left = start < tiling.length ? tiling.length - start : 0;
        length_ = left < tiling.perCore ? left : tiling.perCore;
        cores_ = tiling.cores;
        pipe_ = pipe;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x) + start);
        partials_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partials));
        pipe->InitBuffer(queue_, kBuffers, kGradStatsTile * sizeof(T));
        pipe->InitBuffer(squareBuffer_, kGradStatsTile * sizeof(float));
        pipe->InitBuffer(sumBuffer_, kSumItems * sizeof(float));
        pipe->InitBuffer(rowBuffer_, kRowBufferItems * sizeof(float));
    }

    __aicore__ inline void Process() {
        AscendC::LocalTensor<float> row = rowBuffer_.template Get<float>();
        AscendC::Duplicate(row, 0.0f, kRowBufferItems);
        for (uint64_t start = 0; start < length_; start += kGradStatsTile) {
            uint64_t left = length_ - start;
            uint32_t count = left < kGradStatsTile ? static_cast<uint32_t>(left) : kGradStatsTile;
            CopyIn(start, count);
            AddTile(row, count);
        }
        WriteRows(row);
    }

  private:
    __aicore__ inline void CopyIn(uint64_t start, uint32_t count) {
        AscendC::LocalTensor<T> local = queue_.template AllocTensor<T>();
        AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
        // Bytes behind the last element stay undefined: every instruction is given the count.
        AscendC::DataCopyPadExtParams<T> noPadding{false, 0, 0, {}};
        AscendC::DataCopyPad(local, x_[start], shape, noPadding);
        queue_.EnQue(local);
    }

    __aicore__ inline void AddTile(const AscendC::LocalTensor<float>& row, uint32_t count) {
        AscendC::LocalTensor<float> squares = squareBuffer_.template Get<float>();
        if (count < kGradStatsTile) {  // the tree has one shape: a short tile is continued by zeros
            AscendC::Duplicate(squares, 0.0f, kGradStatsTile);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::LocalTensor<T> x = queue_.template DeQue<T>();
        if constexpr (kWidens) {
            AscendC::Cast(squares, x, AscendC::RoundMode::CAST_NONE, count);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Mul(squares, squares, squares, count);
        } else {
            AscendC::Mul(squares, x, x, count);
        }
        queue_.FreeTensor(x);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<float> sums = sumBuffer_.template Get<float>();
        AscendC::WholeReduceSum(sums, squares, kLanes, kRows, 1, 1, kRowBlocks);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::WholeReduceSum(sums[kSecondLevel], sums, kLanes, kRowSums, 1, 1, kRowBlocks);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::WholeReduceSum(sums[kTileSum], sums[kSecondLevel], kRowSums, 1, 1, 1, kRowBlocks);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(row, row, sums[kTileSum], 1);
    }

    // This core's row; the last core also clears the rows that no core owns.
    __aicore__ inline void WriteRows(const AscendC::LocalTensor<float>& row) {
        AscendC::TEventID summed = pipe_->FetchEventID(AscendC::HardEvent::V_MTE3);
        AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(summed);
        AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(summed);
        uint32_t own = static_cast<uint32_t>(AscendC::GetBlockIdx());
        AscendC::DataCopyExtParams shape{1, kRowBytes, 0, 0, 0};
        AscendC::DataCopyPad(partials_[own * kGradStatsRowItems], row, shape);
        if (own + 1 == cores_ && cores_ < kGradStatsRows) {
            AscendC::DataCopyExtParams rest{1, (kGradStatsRows - cores_) * kRowBytes, 0, 0, 0};
            AscendC::DataCopyPad(partials_[cores_ * kGradStatsRowItems], row[kGradStatsRowItems], rest);
        }
    }

    AscendC::GlobalTensor<T> x_;
    AscendC::GlobalTensor<float> partials_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> squareBuffer_, sumBuffer_, rowBuffer_;
    AscendC::TPipe* pipe_ = nullptr;
    uint64_t length_ = 0;
    uint32_t cores_ = 1;
};

extern "C" __global__ __aicore__ void grad_stats(GM_ADDR x, GM_ADDR partials, GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(GradStatsTiling);
    GET_TILING_DATA(data, tiling);
    AscendC::TPipe pipe;
    GradStatsKernel<DTYPE_X> kernel;
    kernel.Init(x, partials, data, &pipe);
    kernel.Process();
}
