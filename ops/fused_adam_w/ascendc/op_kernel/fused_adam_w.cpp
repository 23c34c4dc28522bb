// FusedAdamW with a low-precision copy of the parameter. One binary for each pair of dtypes: the operator compiler
// defines DTYPE_GRAD and DTYPE_LOW_PRECISION.
#include "fused_adam_w.h"

extern "C" __global__ __aicore__ void fused_adam_w(GM_ADDR param, GM_ADDR exp_avg, GM_ADDR exp_avg_sq, GM_ADDR grad,
                                                   GM_ADDR scalars, GM_ADDR low_precision, GM_ADDR param_out,
                                                   GM_ADDR exp_avg_out, GM_ADDR exp_avg_sq_out,
                                                   GM_ADDR low_precision_out, GM_ADDR token, GM_ADDR workspace,
                                                   GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(FusedAdamWTiling);
    GET_TILING_DATA(data, tiling);
    AscendC::TPipe pipe;
    FusedAdamWKernel<DTYPE_GRAD, DTYPE_LOW_PRECISION> kernel;
    kernel.Init({param, exp_avg, exp_avg_sq, grad, scalars, param_out, exp_avg_out, exp_avg_sq_out, low_precision_out,
                 token},
                data, &pipe);
    kernel.Process();
}
