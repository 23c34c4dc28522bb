// FusedAdamW on a vector core. The arithmetic and its order are those of ops/README.md, one instruction a line.
#ifndef MS_ZERO_FUSED_ADAM_W_H
#define MS_ZERO_FUSED_ADAM_W_H
#include <type_traits>

#include "fused_adam_w_tiling.h"
#include "kernel_operator.h"

struct FusedAdamWAddresses {
    GM_ADDR param, expAvg, expAvgSq, grad, scalars;
    GM_ADDR paramOut, expAvgOut, expAvgSqOut, low, token;
};

// Grad: float, half or bfloat16_t. Low: half or bfloat16_t, or void where no low-precision copy is written.
template <typename Grad, typename Low>
class FusedAdamWKernel {
    static constexpr bool kHasLow = !std::is_void<Low>::value;
    static constexpr bool kWidens = !std::is_same<Grad, float>::value;
    using LowItem = typename std::conditional<kHasLow, Low, half>::type;
    using InPlaceQueue = AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1>;

    static constexpr uint8_t kBuffers = 2;  // one is loaded or stored while the other is computed on
    static constexpr uint32_t kScalars = 16;
    static constexpr uint32_t kTokenItem = kScalars;  // the token is staged behind the scalars
    static constexpr uint32_t kScalarBytes = 96;

  public:
    __aicore__ inline FusedAdamWKernel() {}

    __aicore__ inline void Init(const FusedAdamWAddresses& at, const FusedAdamWTiling& tiling, AscendC::TPipe* pipe) {
        uint64_t start = tiling.perCore * static_cast<uint64_t>(AscendC::GetBlockIdx());
        uint64_t left = start < tiling.length ? tiling.length - start : 0;
        length_ = left < tiling.perCore ? left : tiling.perCore;
        tile_ = tiling.tile;
        pipe_ = pipe;
        param_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.param) + start);
        expAvg_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.expAvg) + start);
        expAvgSq_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.expAvgSq) + start);
        grad_.SetGlobalBuffer(reinterpret_cast<__gm__ Grad*>(at.grad) + start);
        paramOut_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.paramOut) + start);
        expAvgOut_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.expAvgOut) + start);
        expAvgSqOut_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.expAvgSqOut) + start);
        scalars_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.scalars));
        token_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.token));
        pipe->InitBuffer(paramQueue_, kBuffers, tile_ * sizeof(float));
        pipe->InitBuffer(expAvgQueue_, kBuffers, tile_ * sizeof(float));
        pipe->InitBuffer(expAvgSqQueue_, kBuffers, tile_ * sizeof(float));
        pipe->InitBuffer(gradQueue_, kBuffers, tile_ * sizeof(Grad));
        pipe->InitBuffer(workBuffer_, tile_ * sizeof(float));
        pipe->InitBuffer(scalarBuffer_, kScalarBytes);
        if constexpr (kWidens) {
            pipe->InitBuffer(wideGradBuffer_, tile_ * sizeof(float));
        }
        if constexpr (kHasLow) {
            low_.SetGlobalBuffer(reinterpret_cast<__gm__ LowItem*>(at.low) + start);
            // One buffer is enough: the last copy is stored before the parameters of the next tile are ready.
            pipe->InitBuffer(lowQueue_, 1, tile_ * sizeof(LowItem));
        }
    }

    __aicore__ inline void Process() {
        LoadScalars();
        if (AscendC::GetBlockIdx() == 0) {
            WriteToken();
        }
        if (skip_) {
            return;
        }
        for (uint64_t start = 0; start < length_; start += tile_) {
            uint64_t left = length_ - start;
            uint32_t count = left < tile_ ? static_cast<uint32_t>(left) : tile_;
            CopyIn(start, count);
            Compute(count);
            CopyOut(start, count);
        }
    }

  private:
    __aicore__ inline void LoadScalars() {
        AscendC::LocalTensor<float> local = scalarBuffer_.template Get<float>();
        AscendC::DataCopy(local, scalars_, kScalars);
        AscendC::TEventID loaded = pipe_->FetchEventID(AscendC::HardEvent::MTE2_S);
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded);
        keep_ = local.GetValue(0);
        beta1_ = local.GetValue(1);
        oneMinusBeta1_ = local.GetValue(2);
        beta2_ = local.GetValue(3);
        oneMinusBeta2_ = local.GetValue(4);
        inverseRoot_ = local.GetValue(5);
        eps_ = local.GetValue(6);
        stepSize_ = local.GetValue(7);
        gradScale_ = local.GetValue(8);
        skip_ = !(local.GetValue(9) == 0.0f);  // NaN skips as well
    }

    // 1 after an update, 0 after a skipped one.
    __aicore__ inline void WriteToken() {
        AscendC::LocalTensor<float> local = scalarBuffer_.template Get<float>()[kTokenItem];
        local.SetValue(0, skip_ ? 0.0f : 1.0f);
        AscendC::TEventID stored = pipe_->FetchEventID(AscendC::HardEvent::S_MTE3);
        AscendC::SetFlag<AscendC::HardEvent::S_MTE3>(stored);
        AscendC::WaitFlag<AscendC::HardEvent::S_MTE3>(stored);
        AscendC::DataCopyExtParams one{1, sizeof(float), 0, 0, 0};
        AscendC::DataCopyPad(token_, local, one);
    }

    template <typename T>
    __aicore__ inline void ReadTile(const AscendC::LocalTensor<T>& local, const AscendC::GlobalTensor<T>& from,
                                    uint64_t start, uint32_t count) {
        AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
        // Bytes behind the last element stay undefined: every instruction is given the count.
        AscendC::DataCopyPadExtParams<T> noPadding{false, 0, 0, {}};
        AscendC::DataCopyPad(local, from[start], shape, noPadding);
    }

    template <typename T>
    __aicore__ inline void WriteTile(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& local,
                                     uint64_t start, uint32_t count) {
        AscendC::DataCopyExtParams shape{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
        AscendC::DataCopyPad(to[start], local, shape);
    }

    // A queue bound in and out orders only load against store unless told that the vector unit comes between:
    // hence the positions at each EnQue and DeQue.
    __aicore__ inline void LoadInPlace(InPlaceQueue& queue, const AscendC::GlobalTensor<float>& from, uint64_t start,
                                       uint32_t count) {
        AscendC::LocalTensor<float> local = queue.template AllocTensor<float>();
        ReadTile(local, from, start, count);
        queue.template EnQue<AscendC::TPosition::GM, AscendC::TPosition::VECIN, float>(local);
    }
    __aicore__ inline AscendC::LocalTensor<float> Receive(InPlaceQueue& queue) {
        return queue.template DeQue<AscendC::TPosition::GM, AscendC::TPosition::VECIN, float>();
    }
    __aicore__ inline void Release(InPlaceQueue& queue, const AscendC::LocalTensor<float>& local) {
        queue.template EnQue<AscendC::TPosition::VECOUT, AscendC::TPosition::GM, float>(local);
    }
    __aicore__ inline void StoreInPlace(InPlaceQueue& queue, const AscendC::GlobalTensor<float>& to, uint64_t start,
                                        uint32_t count) {
        AscendC::LocalTensor<float> local =
            queue.template DeQue<AscendC::TPosition::VECOUT, AscendC::TPosition::GM, float>();
        WriteTile(to, local, start, count);
        queue.FreeTensor(local);
    }

    __aicore__ inline void CopyIn(uint64_t start, uint32_t count) {
        AscendC::LocalTensor<Grad> grad = gradQueue_.template AllocTensor<Grad>();
        ReadTile(grad, grad_, start, count);
        gradQueue_.EnQue(grad);
        LoadInPlace(expAvgQueue_, expAvg_, start, count);
        LoadInPlace(expAvgSqQueue_, expAvgSq_, start, count);
        LoadInPlace(paramQueue_, param_, start, count);
    }

    __aicore__ inline void CopyOut(uint64_t start, uint32_t count) {
        StoreInPlace(expAvgQueue_, expAvgOut_, start, count);
        StoreInPlace(expAvgSqQueue_, expAvgSqOut_, start, count);
        StoreInPlace(paramQueue_, paramOut_, start, count);
        if constexpr (kHasLow) {
            AscendC::LocalTensor<LowItem> low = lowQueue_.template DeQue<LowItem>();
            WriteTile(low_, low, start, count);
            lowQueue_.FreeTensor(low);
        }
    }

    __aicore__ inline void Compute(uint32_t count) {
        AscendC::LocalTensor<Grad> grad = gradQueue_.template DeQue<Grad>();
        AscendC::LocalTensor<float> m = Receive(expAvgQueue_);
        AscendC::LocalTensor<float> v = Receive(expAvgSqQueue_);
        AscendC::LocalTensor<float> p = Receive(paramQueue_);
        AscendC::LocalTensor<float> work = workBuffer_.template Get<float>();
        if constexpr (kWidens) {
            AscendC::LocalTensor<float> g = wideGradBuffer_.template Get<float>();
            AscendC::Cast(g, grad, AscendC::RoundMode::CAST_NONE, count);
            AscendC::PipeBarrier<PIPE_V>();
            Update(p, m, v, g, work, count);
        } else {
            Update(p, m, v, grad, work, count);
        }
        gradQueue_.FreeTensor(grad);
        Release(expAvgQueue_, m);
        Release(expAvgSqQueue_, v);
        if constexpr (kHasLow) {
            AscendC::LocalTensor<LowItem> low = lowQueue_.template AllocTensor<LowItem>();
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(low, p, AscendC::RoundMode::CAST_RINT, count);
            lowQueue_.EnQue(low);
        }
        Release(paramQueue_, p);
    }

    // Independent instructions stand together between two barriers. g and work are consumed; who uses p next in
    // the vector unit sets the barrier.
    __aicore__ inline void Update(const AscendC::LocalTensor<float>& p, const AscendC::LocalTensor<float>& m,
                                  const AscendC::LocalTensor<float>& v, const AscendC::LocalTensor<float>& g,
                                  const AscendC::LocalTensor<float>& work, uint32_t count) {
        AscendC::Muls(g, g, gradScale_, count);
        AscendC::Muls(m, m, beta1_, count);
        AscendC::Muls(v, v, beta2_, count);
        AscendC::Muls(p, p, keep_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(work, g, oneMinusBeta1_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(m, m, work, count);
        AscendC::Mul(g, g, g, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(g, g, oneMinusBeta2_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(v, v, g, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sqrt(work, v, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(work, work, inverseRoot_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(work, work, eps_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Div(work, m, work, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(work, work, stepSize_, count);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(p, p, work, count);
    }

    AscendC::GlobalTensor<float> param_, expAvg_, expAvgSq_, scalars_, paramOut_, expAvgOut_, expAvgSqOut_, token_;
    AscendC::GlobalTensor<Grad> grad_;
    AscendC::GlobalTensor<LowItem> low_;
    InPlaceQueue paramQueue_, expAvgQueue_, expAvgSqQueue_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> gradQueue_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> lowQueue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> workBuffer_, wideGradBuffer_, scalarBuffer_;
    AscendC::TPipe* pipe_ = nullptr;
    uint64_t length_ = 0;
    uint32_t tile_ = 0;
    float keep_ = 0, beta1_ = 0, oneMinusBeta1_ = 0, beta2_ = 0, oneMinusBeta2_ = 0;
    float inverseRoot_ = 0, eps_ = 0, stepSize_ = 0, gradScale_ = 0;
    bool skip_ = true;
};
#endif
