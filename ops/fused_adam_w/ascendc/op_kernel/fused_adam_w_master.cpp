// FusedAdamW on the master weights alone. One binary for each dtype of the gradient (DTYPE_GRAD).
#include "fused_adam_w.h"

extern "C" __global__ __aicore__ void fused_adam_w_master(GM_ADDR param, GM_ADDR exp_avg, GM_ADDR exp_avg_sq,
                                                          GM_ADDR grad, GM_ADDR scalars, GM_ADDR param_out,
                                                          GM_ADDR exp_avg_out, GM_ADDR exp_avg_sq_out, GM_ADDR token,
                                                          GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(FusedAdamWTiling);
    GET_TILING_DATA(data, tiling);
    AscendC::TPipe pipe;
    FusedAdamWKernel<DTYPE_GRAD, void> kernel;
    kernel.Init({param, exp_avg, exp_avg_sq, grad, scalars, param_out, exp_avg_out, exp_avg_sq_out, nullptr, token},
                data, &pipe);
    kernel.Process();
}
