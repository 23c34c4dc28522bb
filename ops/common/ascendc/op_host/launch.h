// What the operators' definitions share: questions to the device, answers to the launcher.
#ifndef MS_ZERO_LAUNCH_H
#define MS_ZERO_LAUNCH_H
#include <algorithm>
#include <cstdint>
#include <vector>

#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"
#include "vector_split.h"

namespace ms_zero {
// CANN 9 renamed SetBlockDim; the overload that the installed version has is taken.
template <class Context>
auto setCores(Context* context, uint32_t cores, int) -> decltype(context->SetSimdNumBlocks(cores), void()) {
    context->SetSimdNumBlocks(cores);
}
template <class Context>
void setCores(Context* context, uint32_t cores, long) {
    context->SetBlockDim(cores);
}

inline uint64_t usableUbBytes(platform_ascendc::PlatformAscendC& platform) {
    uint64_t bytes = 0;
    platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, bytes);
    return std::min(bytes, kUsableUbBytes);
}

// The number of cores, the workspace of the framework, none of our own.
inline ge::graphStatus finishTiling(gert::TilingContext* context, uint32_t cores) {
    auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
    setCores(context, cores, 0);
    size_t* workspace = context->GetWorkspaceSizes(1);
    if (workspace == nullptr) {
        return ge::GRAPH_FAILED;
    }
    workspace[0] = platform.GetLibApiWorkSpaceSize();
    return ge::GRAPH_SUCCESS;
}

// 0 for a dtype that no operator here knows.
inline uint32_t itemBytes(ge::DataType type) {
    if (type == ge::DT_FLOAT) {
        return 4;
    }
    return type == ge::DT_FLOAT16 || type == ge::DT_BF16 ? 2 : 0;
}

// A required tensor of any shape; one dtype for each combination that the operator is built for.
inline void defineTensor(ops::OpParamDef& tensor, const std::vector<ge::DataType>& types) {
    std::vector<ge::Format> formats(types.size(), ge::FORMAT_ND);
    tensor.ParamType(ops::REQUIRED).DataType(types).Format(formats).UnknownShapeFormat(formats);
}
}  // namespace ms_zero
#endif
