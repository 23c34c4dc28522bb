// Adds the partial sums of GradStats in ascending order of the core, on one core.
#include "grad_stats_tiling.h"
#include "kernel_operator.h"

class GradStatsTotalKernel {
    static constexpr uint32_t kItems = kGradStatsRows * kGradStatsRowItems;

  public:
    __aicore__ inline GradStatsTotalKernel() {}

    __aicore__ inline void Init(GM_ADDR partials, GM_ADDR total, AscendC::TPipe* pipe) {
        pipe_ = pipe;
        partials_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partials));
        total_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(total));
        pipe->InitBuffer(buffer_, (kItems + kGradStatsRowItems) * sizeof(float));
    }

    __aicore__ inline void Process() {
        AscendC::LocalTensor<float> rows = buffer_.Get<float>();
        AscendC::DataCopy(rows, partials_, kItems);
        AscendC::TEventID loaded = pipe_->FetchEventID(AscendC::HardEvent::MTE2_S);
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded);
        float total = 0.0f;
        for (uint32_t row = 0; row < kGradStatsRows; ++row) {
            total += rows.GetValue(row * kGradStatsRowItems);
        }
        AscendC::LocalTensor<float> result = rows[kItems];
        result.SetValue(0, total);
        AscendC::TEventID ready = pipe_->FetchEventID(AscendC::HardEvent::S_MTE3);
        AscendC::SetFlag<AscendC::HardEvent::S_MTE3>(ready);
        AscendC::WaitFlag<AscendC::HardEvent::S_MTE3>(ready);
        AscendC::DataCopyExtParams one{1, sizeof(float), 0, 0, 0};
        AscendC::DataCopyPad(total_, result, one);
    }

  private:
    AscendC::GlobalTensor<float> partials_, total_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    AscendC::TPipe* pipe_ = nullptr;
};

extern "C" __global__ __aicore__ void grad_stats_total(GM_ADDR partials, GM_ADDR total, GM_ADDR workspace,
                                                       GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    GradStatsTotalKernel kernel;
    kernel.Init(partials, total, &pipe);
    kernel.Process();
}
