// Just enough of CANN's host interface to compile the op_host sources with g++ and to call what they register.
#ifndef MS_ZERO_CANN_STUB_OP_DEF_REGISTRY_H
#define MS_ZERO_CANN_STUB_OP_DEF_REGISTRY_H
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ge {
enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_BF16 = 27, DT_INT32 = 3, DT_UNDEFINED = 28 };
enum Format { FORMAT_ND = 2 };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;
}  // namespace ge

namespace gert {
class Shape {
  public:
    void SetDimNum(size_t count) { dims.resize(count); }
    void SetDim(size_t index, int64_t value) { dims.at(index) = value; }
    int64_t GetShapeSize() const {
        int64_t size = 1;
        for (int64_t dim : dims) size *= dim;
        return size;
    }
    std::vector<int64_t> dims;
};
struct StorageShape {
    const Shape& GetStorageShape() const { return shape; }
    Shape shape;
};
struct CompileTimeTensorDesc {
    ge::DataType GetDataType() const { return type; }
    ge::DataType type;
};
class TilingContext {
  public:
    const StorageShape* GetInputShape(size_t index) const { return &shapes.at(index); }
    const CompileTimeTensorDesc* GetInputDesc(size_t index) const {
        return index < descs.size() ? &descs[index] : nullptr;
    }
    template <typename T> T* GetTilingData() {
        tiling.resize(sizeof(T));
        return reinterpret_cast<T*>(tiling.data());
    }
    void* GetPlatformInfo() const { return nullptr; }
#ifdef MS_ZERO_CANN_9
    void SetSimdNumBlocks(uint32_t value) { blocks = value; }
#else
    void SetBlockDim(uint32_t value) { blocks = value; }
#endif
    size_t* GetWorkspaceSizes(size_t count) {
        workspace.resize(count, 1);
        return workspace.data();
    }
    std::vector<StorageShape> shapes;
    std::vector<CompileTimeTensorDesc> descs;
    std::vector<uint8_t> tiling;
    std::vector<size_t> workspace;
    uint32_t blocks = 0;
};
class InferShapeContext {
  public:
    const Shape* GetInputShape(size_t index) const { return &inputs.at(index); }
    Shape* GetOutputShape(size_t index) { return &outputs.at(index); }
    std::vector<Shape> inputs, outputs;
};
class InferDataTypeContext {
  public:
    ge::DataType GetInputDataType(size_t index) const { return inputs.at(index); }
    void SetOutputDataType(size_t index, ge::DataType type) { outputs.at(index) = type; }
    std::vector<ge::DataType> inputs, outputs;
};
}  // namespace gert

namespace ops {
enum ParamKind { REQUIRED, OPTIONAL };
class OpParamDef {
  public:
    OpParamDef& ParamType(ParamKind value) { kind = value; return *this; }
    OpParamDef& DataType(const std::vector<ge::DataType>& value) { types = value; return *this; }
    OpParamDef& Format(const std::vector<ge::Format>& value) { formats = value; return *this; }
    OpParamDef& UnknownShapeFormat(const std::vector<ge::Format>& value) { unknown = value; return *this; }
    std::string name;
    ParamKind kind = OPTIONAL;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats, unknown;
};
class OpAICoreDef {
  public:
    using Tiling = ge::graphStatus (*)(gert::TilingContext*);
    OpAICoreDef& SetTiling(Tiling value) { tiling = value; return *this; }
    OpAICoreDef& AddConfig(const char* soc) { socs.push_back(soc); return *this; }
    Tiling tiling = nullptr;
    std::vector<std::string> socs;
};
class OpDef {
  public:
    using InferShape = ge::graphStatus (*)(gert::InferShapeContext*);
    using InferType = ge::graphStatus (*)(gert::InferDataTypeContext*);
    explicit OpDef(const char* type) : name(type) { inputs.reserve(16); outputs.reserve(16); }
    OpParamDef& Input(const char* param) { return add(inputs, param); }
    OpParamDef& Output(const char* param) { return add(outputs, param); }
    OpDef& SetInferShape(InferShape value) { inferShape = value; return *this; }
    OpDef& SetInferDataType(InferType value) { inferType = value; return *this; }
    OpAICoreDef& AICore() { return core; }
    std::string name;
    std::vector<OpParamDef> inputs, outputs;
    InferShape inferShape = nullptr;
    InferType inferType = nullptr;
    OpAICoreDef core;

  private:
    static OpParamDef& add(std::vector<OpParamDef>& list, const char* param) {
        list.emplace_back();
        list.back().name = param;
        return list.back();
    }
};
inline std::map<std::string, OpDef>& registered() {
    static std::map<std::string, OpDef> definitions;
    return definitions;
}
}  // namespace ops
#define OP_ADD(Type) static const bool added##Type = ops::registered().emplace(#Type, Type(#Type)).second
#endif
