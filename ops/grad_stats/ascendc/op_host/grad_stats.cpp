// GradStats and GradStatsTotal: definition, shapes and tiling for CANN. The contract is ops/README.md.
#include <vector>

#include "grad_stats_split.h"
#include "launch.h"

namespace optiling {
static ge::graphStatus tileGradStats(gert::TilingContext* context) {
    auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
    const auto* shape = context->GetInputShape(0);
    auto* tiling = context->GetTilingData<GradStatsTiling>();
    if (shape == nullptr || tiling == nullptr) {
        return ge::GRAPH_FAILED;
    }
    *tiling = ms_zero::computeGradStatsTiling(static_cast<uint64_t>(shape->GetStorageShape().GetShapeSize()),
                                              platform.GetCoreNumAiv());
    return ms_zero::finishTiling(context, tiling->cores);
}

static ge::graphStatus tileGradStatsTotal(gert::TilingContext* context) { return ms_zero::finishTiling(context, 1); }
}  // namespace optiling

namespace ge {
static graphStatus inferPartials(gert::InferShapeContext* context) {
    gert::Shape* partials = context->GetOutputShape(0);
    partials->SetDimNum(2);
    partials->SetDim(0, kGradStatsRows);
    partials->SetDim(1, kGradStatsRowItems);
    return GRAPH_SUCCESS;
}
static graphStatus inferTotal(gert::InferShapeContext* context) {
    gert::Shape* total = context->GetOutputShape(0);
    total->SetDimNum(1);
    total->SetDim(0, 1);
    return GRAPH_SUCCESS;
}
static graphStatus inferFloat(gert::InferDataTypeContext* context) {
    context->SetOutputDataType(0, DT_FLOAT);
    return GRAPH_SUCCESS;
}
}  // namespace ge

namespace ops {
using ms_zero::defineTensor;

class GradStats : public OpDef {
  public:
    explicit GradStats(const char* name) : OpDef(name) {
        defineTensor(this->Input("x"), {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16});
        defineTensor(this->Output("partials"), {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT});
        this->SetInferShape(ge::inferPartials).SetInferDataType(ge::inferFloat);
        this->AICore().SetTiling(optiling::tileGradStats).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};

class GradStatsTotal : public OpDef {
  public:
    explicit GradStatsTotal(const char* name) : OpDef(name) {
        defineTensor(this->Input("partials"), {ge::DT_FLOAT});
        defineTensor(this->Output("total"), {ge::DT_FLOAT});
        this->SetInferShape(ge::inferTotal).SetInferDataType(ge::inferFloat);
        this->AICore().SetTiling(optiling::tileGradStatsTotal).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};

OP_ADD(GradStats);
OP_ADD(GradStatsTotal);
}  // namespace ops
