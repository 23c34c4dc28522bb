// C ABI over the operators that the op_host sources register.
#include <cstring>

#include "fused_adam_w.cpp"
#include "grad_stats.cpp"

using ops::OpDef;

static std::string lists(const std::vector<ops::OpParamDef>& params) {
    std::string text;
    for (const auto& param : params) {
        text += param.name + (param.kind == ops::REQUIRED ? ":" : "?:");
        for (ge::DataType type : param.types) text += std::to_string(type) + ",";
        text += param.formats.size() == param.types.size() && param.unknown.size() == param.types.size() ? ";" : "!";
    }
    return text;
}

// "name|inputs|outputs|socs" of every operator, one a line.
extern "C" const char* describe() {
    static std::string text;
    text.clear();
    for (auto& [name, op] : ops::registered()) {
        text += name + "|" + lists(op.inputs) + "|" + lists(op.outputs) + "|";
        for (const std::string& soc : op.core.socs) text += soc + ",";
        text += "\n";
    }
    return text.c_str();
}

// Runs the tiling function; returns its status. `tiling` receives the bytes for the kernel.
extern "C" uint32_t run_tiling(const char* name, int64_t length, const int* types, int count, uint32_t cores,
                               uint64_t ub, uint8_t* tiling, uint32_t* blocks, uint64_t* workspace) {
    platform_ascendc::device().vectorCores = cores;
    platform_ascendc::device().ubBytes = ub;
    gert::TilingContext context;
    for (int i = 0; i < count; ++i) {
        context.shapes.push_back({{{length}}});
        context.descs.push_back({static_cast<ge::DataType>(types[i])});
    }
    uint32_t status = ops::registered().at(name).core.tiling(&context);
    std::memcpy(tiling, context.tiling.data(), context.tiling.size());
    *blocks = context.blocks;
    *workspace = context.workspace.empty() ? 0 : context.workspace[0];
    return status;
}

// Shapes and types of the outputs for inputs of one dimension: "d0,d1:type;" for each output.
extern "C" const char* infer(const char* name, int64_t length, const int* types) {
    static std::string text;
    text.clear();
    const OpDef& op = ops::registered().at(name);
    gert::InferShapeContext shapes;
    gert::InferDataTypeContext kinds;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
        shapes.inputs.push_back({{length}});
        kinds.inputs.push_back(static_cast<ge::DataType>(types[i]));
    }
    shapes.outputs.resize(op.outputs.size());
    kinds.outputs.resize(op.outputs.size(), ge::DT_UNDEFINED);
    if (op.inferShape(&shapes) || op.inferType(&kinds)) return "failed";
    for (size_t i = 0; i < op.outputs.size(); ++i) {
        for (int64_t dim : shapes.outputs[i].dims) text += std::to_string(dim) + ",";
        text += ":" + std::to_string(kinds.outputs[i]) + ";";
    }
    return text.c_str();
}
