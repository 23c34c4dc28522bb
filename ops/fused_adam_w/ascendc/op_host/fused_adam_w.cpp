// FusedAdamW and FusedAdamWMaster: definition, shapes and tiling for CANN. The contract is ops/README.md.
#include <vector>

#include "fused_adam_w_split.h"
#include "launch.h"

namespace optiling {
constexpr size_t kParam = 0, kGrad = 3, kLow = 5;

static ge::graphStatus tile(gert::TilingContext* context, uint32_t lowBytes) {
    auto platform = platform_ascendc::PlatformAscendC(context->GetPlatformInfo());
    const auto* shape = context->GetInputShape(kParam);
    const auto* grad = context->GetInputDesc(kGrad);
    auto* tiling = context->GetTilingData<FusedAdamWTiling>();
    if (shape == nullptr || grad == nullptr || tiling == nullptr || ms_zero::itemBytes(grad->GetDataType()) == 0) {
        return ge::GRAPH_FAILED;
    }
    *tiling = ms_zero::computeFusedAdamWTiling(static_cast<uint64_t>(shape->GetStorageShape().GetShapeSize()),
                                               platform.GetCoreNumAiv(), ms_zero::usableUbBytes(platform),
                                               ms_zero::itemBytes(grad->GetDataType()), lowBytes);
    return ms_zero::finishTiling(context, tiling->cores);
}

static ge::graphStatus tileWithLow(gert::TilingContext* context) {
    const auto* low = context->GetInputDesc(kLow);
    return low == nullptr || ms_zero::itemBytes(low->GetDataType()) != 2 ? ge::GRAPH_FAILED : tile(context, 2);
}

static ge::graphStatus tileMaster(gert::TilingContext* context) { return tile(context, 0); }
}  // namespace optiling

namespace ge {
constexpr size_t kLowInput = 5;

// Outputs that are inputs keep their shape; the token behind them has one element.
static graphStatus inferShapes(gert::InferShapeContext* context, const std::vector<size_t>& sources) {
    for (size_t output = 0; output < sources.size(); ++output) {
        *context->GetOutputShape(output) = *context->GetInputShape(sources[output]);
    }
    gert::Shape* token = context->GetOutputShape(sources.size());
    token->SetDimNum(1);
    token->SetDim(0, 1);
    return GRAPH_SUCCESS;
}
static graphStatus inferTypes(gert::InferDataTypeContext* context, const std::vector<size_t>& sources) {
    for (size_t output = 0; output < sources.size(); ++output) {
        context->SetOutputDataType(output, context->GetInputDataType(sources[output]));
    }
    context->SetOutputDataType(sources.size(), DT_FLOAT);
    return GRAPH_SUCCESS;
}
static graphStatus inferShapesWithLow(gert::InferShapeContext* context) {
    return inferShapes(context, {0, 1, 2, kLowInput});
}
static graphStatus inferTypesWithLow(gert::InferDataTypeContext* context) {
    return inferTypes(context, {0, 1, 2, kLowInput});
}
static graphStatus inferShapesMaster(gert::InferShapeContext* context) { return inferShapes(context, {0, 1, 2}); }
static graphStatus inferTypesMaster(gert::InferDataTypeContext* context) { return inferTypes(context, {0, 1, 2}); }
}  // namespace ge

namespace ops {
using ms_zero::defineTensor;

// One entry of each list is one combination of dtypes, and one binary.
static const std::vector<ge::DataType> kGrads = {ge::DT_FLOAT,   ge::DT_FLOAT16, ge::DT_BF16,
                                                 ge::DT_FLOAT,   ge::DT_FLOAT16, ge::DT_BF16};
static const std::vector<ge::DataType> kLows = {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_FLOAT16,
                                                ge::DT_BF16,    ge::DT_BF16,    ge::DT_BF16};
static const std::vector<ge::DataType> kMasterGrads = {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16};

static void defineInputs(OpDef& op, const std::vector<ge::DataType>& grads) {
    std::vector<ge::DataType> floats(grads.size(), ge::DT_FLOAT);
    defineTensor(op.Input("param"), floats);
    defineTensor(op.Input("exp_avg"), floats);
    defineTensor(op.Input("exp_avg_sq"), floats);
    defineTensor(op.Input("grad"), grads);
    defineTensor(op.Input("scalars"), floats);
}

// An output with the name of an input is updated in place.
static void defineOutputs(OpDef& op, size_t combinations) {
    std::vector<ge::DataType> floats(combinations, ge::DT_FLOAT);
    defineTensor(op.Output("param"), floats);
    defineTensor(op.Output("exp_avg"), floats);
    defineTensor(op.Output("exp_avg_sq"), floats);
}

class FusedAdamW : public OpDef {
  public:
    explicit FusedAdamW(const char* name) : OpDef(name) {
        defineInputs(*this, kGrads);
        defineTensor(this->Input("low_precision"), kLows);
        defineOutputs(*this, kGrads.size());
        defineTensor(this->Output("low_precision"), kLows);
        defineTensor(this->Output("token"), std::vector<ge::DataType>(kGrads.size(), ge::DT_FLOAT));
        this->SetInferShape(ge::inferShapesWithLow).SetInferDataType(ge::inferTypesWithLow);
        this->AICore().SetTiling(optiling::tileWithLow).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};

class FusedAdamWMaster : public OpDef {
  public:
    explicit FusedAdamWMaster(const char* name) : OpDef(name) {
        defineInputs(*this, kMasterGrads);
        defineOutputs(*this, kMasterGrads.size());
        defineTensor(this->Output("token"), std::vector<ge::DataType>(kMasterGrads.size(), ge::DT_FLOAT));
        this->SetInferShape(ge::inferShapesMaster).SetInferDataType(ge::inferTypesMaster);
        this->AICore().SetTiling(optiling::tileMaster).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};

OP_ADD(FusedAdamW);
OP_ADD(FusedAdamWMaster);
}  // namespace ops
