// The part of the AscendC vector API that the kernels here use, on top of machine.h.
//
// Found first on the include path, it lets g++ compile an op_kernel source unchanged. Each function checks what
// the documentation demands of its operands; dtypes that an instruction does not know are refused at compile time.
#ifndef MS_ZERO_EMULATOR_KERNEL_OPERATOR_H
#define MS_ZERO_EMULATOR_KERNEL_OPERATOR_H
#include <cmath>
#include <deque>
#include <type_traits>

#include "machine.h"

#define __global__
#define __aicore__
#define __gm__
using GM_ADDR = uint8_t*;
using half = _Float16;

struct bfloat16_t {
    uint16_t bits;
};

namespace emulator {
inline float toFloat(float x) { return x; }
inline float toFloat(half x) { return static_cast<float>(x); }
inline float toFloat(bfloat16_t x) {
    uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
// Rounds |x| to a multiple of the last place of the target format, in the way of `mode`.
enum class Rounding { kNearestEven, kNearestAway, kDown, kUp, kZero };
inline bfloat16_t toBfloat16(float x, Rounding mode) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    bool negative = bits >> 31;
    uint32_t rest = bits & 0xffffu, kept = bits >> 16;
    bool up = false;
    switch (mode) {
        case Rounding::kNearestEven: up = rest > 0x8000u || (rest == 0x8000u && (kept & 1)); break;
        case Rounding::kNearestAway: up = rest >= 0x8000u; break;
        case Rounding::kDown: up = rest && negative; break;
        case Rounding::kUp: up = rest && !negative; break;
        case Rounding::kZero: break;
    }
    return {static_cast<uint16_t>(kept + up)};
}
inline half toHalf(float x, Rounding mode) {
    half nearest = static_cast<half>(x);
    float back = static_cast<float>(nearest);
    if (mode == Rounding::kNearestEven || back == x || std::isnan(x)) return nearest;
    auto step = [&](int direction) {  // the neighbour of `nearest` towards +-infinity
        uint16_t bits;
        std::memcpy(&bits, &nearest, 2);
        bool away = (bits >> 15) == (direction < 0);
        bits = (bits & 0x7fff) == 0 && !away ? static_cast<uint16_t>((bits ^ 0x8000) + 1) : bits + (away ? 1 : -1);
        half value;
        std::memcpy(&value, &bits, 2);
        return value;
    };
    if (mode == Rounding::kDown) return back > x ? step(-1) : nearest;
    if (mode == Rounding::kUp) return back < x ? step(1) : nearest;
    if (mode == Rounding::kZero) return std::fabs(back) > std::fabs(x) ? step(x > 0 ? -1 : 1) : nearest;
    half other = step(back > x ? -1 : 1);
    bool tie = std::fabs(static_cast<double>(back) - x) == std::fabs(static_cast<double>(other) - x);
    return tie && std::fabs(static_cast<float>(other)) > std::fabs(back) ? other : nearest;
}
template <typename T, typename... Allowed> constexpr bool isOneOf = (std::is_same_v<T, Allowed> || ...);
}  // namespace emulator

namespace AscendC {
enum class TPosition { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class HardEvent { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, V_S, S_V, MTE2_S, S_MTE2, MTE3_S, S_MTE3 };
using TEventID = int8_t;

constexpr int sourcePipe(HardEvent event) {
    switch (event) {
        case HardEvent::MTE2_V: case HardEvent::MTE2_MTE3: case HardEvent::MTE2_S: return PIPE_MTE2;
        case HardEvent::MTE3_V: case HardEvent::MTE3_MTE2: case HardEvent::MTE3_S: return PIPE_MTE3;
        case HardEvent::S_V: case HardEvent::S_MTE2: case HardEvent::S_MTE3: return PIPE_S;
        default: return PIPE_V;
    }
}
constexpr int targetPipe(HardEvent event) {
    switch (event) {
        case HardEvent::V_MTE2: case HardEvent::MTE3_MTE2: case HardEvent::S_MTE2: return PIPE_MTE2;
        case HardEvent::V_MTE3: case HardEvent::MTE2_MTE3: case HardEvent::S_MTE3: return PIPE_MTE3;
        case HardEvent::V_S: case HardEvent::MTE2_S: case HardEvent::MTE3_S: return PIPE_S;
        default: return PIPE_V;
    }
}
template <HardEvent event> void SetFlag(TEventID id) { emulator::setFlag(sourcePipe(event), targetPipe(event), id); }
template <HardEvent event> void WaitFlag(TEventID id) { emulator::waitFlag(sourcePipe(event), targetPipe(event), id); }
template <pipe_t pipe> void PipeBarrier() { emulator::barrier(pipe); }
inline int64_t GetBlockIdx() { return emulator::core().index; }
inline int64_t GetBlockNum() { return emulator::machine().cores; }

// ---- tensors --------------------------------------------------------------------------------------------------
enum class BufferState { kFree, kAllocated, kQueued, kTaken, kScratch };
struct Buffer {
    BufferState state = BufferState::kFree;
    uint32_t offset = 0, bytes = 0;
    HardEvent event{};
    int queuedEvent = -1, freeEvent = -1;
};

template <typename T> class GlobalTensor {
  public:
    void SetGlobalBuffer(T* address) { address_ = address; }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor part;
        part.address_ = address_ + offset;
        return part;
    }
    T* address() const { return address_; }

  private:
    T* address_ = nullptr;
};

template <typename T> class LocalTensor {
  public:
    LocalTensor() = default;
    LocalTensor(Buffer* buffer, uint32_t offset, uint32_t size) : buffer_(buffer), offset_(offset), size_(size) {}
    LocalTensor operator[](uint32_t start) const {
        if (start > size_) emulator::fatal("LocalTensor[%u] of %u elements", start, size_);
        return {buffer_, offset_ + start * static_cast<uint32_t>(sizeof(T)), size_ - start};
    }
    template <typename U> LocalTensor<U> ReinterpretCast() const {
        return {buffer_, offset_, static_cast<uint32_t>(size_ * sizeof(T) / sizeof(U))};
    }
    T GetValue(uint32_t i) const {
        emulator::Instruction op(PIPE_S, "GetValue");
        op.read(operand("GetValue", i + 1) + i * sizeof(T), sizeof(T));
        return data()[i];
    }
    void SetValue(uint32_t i, T value) const {
        emulator::Instruction op(PIPE_S, "SetValue");
        op.write(operand("SetValue", i + 1) + i * sizeof(T), sizeof(T));
        data()[i] = value;
    }
    uint32_t GetSize() const { return size_; }
    T* data() const { return reinterpret_cast<T*>(emulator::core().ub.data() + offset_); }
    uint32_t offset() const { return offset_; }
    Buffer* buffer() const { return buffer_; }
    // The offset in the unified buffer of an operand of `count` elements, checked.
    uint32_t operand(const char* name, int64_t count) const {
        if (!buffer_) emulator::fatal("%s: LocalTensor without a buffer", name);
        if (buffer_->state == BufferState::kFree) emulator::broken("%s: tensor used after FreeTensor", name);
        if (buffer_->state == BufferState::kQueued) emulator::broken("%s: tensor used while in its queue", name);
        if (offset_ % emulator::kBlock) emulator::broken("%s: operand not 32-byte aligned", name);
        if (count < 0 || count > size_)
            emulator::fatal("%s: %lld elements of a tensor of %u", name, static_cast<long long>(count), size_);
        return offset_;
    }

  private:
    Buffer* buffer_ = nullptr;
    uint32_t offset_ = 0, size_ = 0;
};

// ---- queues and buffers ---------------------------------------------------------------------------------------
constexpr HardEvent queueEvent(TPosition source, TPosition target, bool forward) {
    if (source == TPosition::GM) return forward ? HardEvent::MTE2_V : HardEvent::V_MTE2;
    if (target == TPosition::GM) return forward ? HardEvent::V_MTE3 : HardEvent::MTE3_V;
    return forward ? HardEvent::MTE2_MTE3 : HardEvent::MTE3_MTE2;
}

template <TPosition source, TPosition target, int32_t depth, auto = 0> class TQueBind {
    static_assert(depth >= 1, "queue depth");
    static constexpr HardEvent kForward = queueEvent(source, target, true);
    static constexpr HardEvent kBackward = queueEvent(source, target, false);

  public:
    template <typename T> LocalTensor<T> AllocTensor() {
        for (int tried = 0; tried < count_; ++tried) {
            Buffer& buffer = buffers_[next_++ % count_];
            if (buffer.state != BufferState::kFree) continue;
            waitUntilFree(buffer);
            buffer.state = BufferState::kAllocated;
            std::memset(emulator::core().defined.data() + buffer.offset, 0, buffer.bytes);
            return tensor<T>(buffer);
        }
        emulator::fatal("AllocTensor: all %d buffers of the queue are in use: the core hangs", count_);
    }
    template <typename T> bool EnQue(const LocalTensor<T>& tensor) { return put(tensor.buffer(), kForward); }
    template <TPosition from, TPosition to, typename T> bool EnQue(const LocalTensor<T>& tensor) {
        return put(tensor.buffer(), queueEvent(from, to, true));
    }
    template <typename T> LocalTensor<T> DeQue() { return take<T>(kForward); }
    template <TPosition from, TPosition to, typename T> LocalTensor<T> DeQue() {
        return take<T>(queueEvent(from, to, true));
    }
    template <typename T> void FreeTensor(LocalTensor<T>& tensor) {
        Buffer* buffer = own(tensor.buffer(), "FreeTensor");
        if (buffer->state == BufferState::kFree) return emulator::broken("FreeTensor: already free");
        if (buffer->state == BufferState::kQueued) emulator::broken("FreeTensor: tensor still queued");
        buffer->freeEvent = emulator::allocateEvent(sourcePipe(kBackward), targetPipe(kBackward));
        SetFlag<kBackward>(static_cast<TEventID>(buffer->freeEvent));
        buffer->state = BufferState::kFree;
    }
    void adopt(Buffer* buffers, int count) {
        buffers_ = buffers;
        count_ = count;
    }
    static void waitUntilFree(Buffer& buffer) {
        if (buffer.freeEvent < 0) return;
        WaitFlag<kBackward>(static_cast<TEventID>(buffer.freeEvent));
        emulator::releaseEvent(sourcePipe(kBackward), targetPipe(kBackward), buffer.freeEvent);
        buffer.freeEvent = -1;
    }

  private:
    template <typename T> LocalTensor<T> tensor(Buffer& buffer) {
        return {&buffer, buffer.offset, static_cast<uint32_t>(buffer.bytes / sizeof(T))};
    }
    Buffer* own(Buffer* buffer, const char* name) const {
        if (!buffer || buffer < buffers_ || buffer >= buffers_ + count_) emulator::fatal("%s: foreign tensor", name);
        return buffer;
    }
    bool put(Buffer* candidate, HardEvent event) {
        Buffer* buffer = own(candidate, "EnQue");
        if (buffer->state != BufferState::kAllocated && buffer->state != BufferState::kTaken)
            emulator::broken("EnQue: tensor is free or already queued");
        if (waiting_.size() >= static_cast<size_t>(depth)) emulator::fatal("EnQue: queue depth %d exceeded", depth);
        buffer->state = BufferState::kQueued;
        buffer->event = event;
        buffer->queuedEvent = emulator::allocateEvent(sourcePipe(event), targetPipe(event));
        emulator::setFlag(sourcePipe(event), targetPipe(event), buffer->queuedEvent);
        waiting_.push_back(buffer);
        return true;
    }
    template <typename T> LocalTensor<T> take(HardEvent event) {
        if (waiting_.empty()) emulator::fatal("DeQue: the queue is empty");
        Buffer* buffer = waiting_.front();
        waiting_.pop_front();
        if (buffer->event != event) emulator::broken("DeQue: positions differ from those of EnQue");
        int from = sourcePipe(buffer->event), to = targetPipe(buffer->event);
        emulator::waitFlag(from, to, buffer->queuedEvent);
        emulator::releaseEvent(from, to, buffer->queuedEvent);
        buffer->state = BufferState::kTaken;
        return tensor<T>(*buffer);
    }

    Buffer* buffers_ = nullptr;
    int count_ = 0, next_ = 0;
    std::deque<Buffer*> waiting_;
};

template <TPosition position, int32_t depth, auto mask = 0>
class TQue : public TQueBind<position == TPosition::VECIN ? TPosition::GM : TPosition::VECOUT,
                             position == TPosition::VECIN ? TPosition::VECIN : TPosition::GM, depth, mask> {
    static_assert(position == TPosition::VECIN || position == TPosition::VECOUT, "queue position");
};

template <TPosition position = TPosition::VECCALC> class TBuf {
  public:
    template <typename T> LocalTensor<T> Get() {
        if (!buffer_) emulator::fatal("TBuf used before InitBuffer");
        return {buffer_, buffer_->offset, static_cast<uint32_t>(buffer_->bytes / sizeof(T))};
    }
    void adopt(Buffer* buffer) { buffer_ = buffer; }

  private:
    Buffer* buffer_ = nullptr;
};

class TPipe;
inline TPipe*& currentPipe() {
    static TPipe* pipe = nullptr;
    return pipe;
}

class TPipe {
  public:
    TPipe() { currentPipe() = this; }
    ~TPipe() {
        if (std::uncaught_exceptions()) return;
        for (int i = 0; i < used_; ++i)
            if (buffers_[i].state != BufferState::kFree && buffers_[i].state != BufferState::kScratch)
                emulator::machine().findings.push_back("a queue's tensor was not freed at the end of the kernel");
        checkFlags();
        emulator::machine().bufferPeak = std::max(emulator::machine().bufferPeak, used_);
    }
    template <class Queue> bool InitBuffer(Queue& queue, uint8_t count, uint32_t bytes) {
        if (count == 0) emulator::fatal("InitBuffer: a queue without buffers");
        Buffer* first = claim(count, bytes);
        queue.adopt(first, count);
        return true;
    }
    template <TPosition position> bool InitBuffer(TBuf<position>& scratch, uint32_t bytes) {
        Buffer* buffer = claim(1, bytes);
        buffer->state = BufferState::kScratch;
        scratch.adopt(buffer);
        return true;
    }
    TEventID FetchEventID(HardEvent event) {
        int from = sourcePipe(event), to = targetPipe(event);
        int id = emulator::allocateEvent(from, to);
        emulator::releaseEvent(from, to, id);
        uint8_t& fetched = emulator::core().eventsFetched[from][to];
        fetched = static_cast<uint8_t>(fetched | 1 << id);
        return static_cast<TEventID>(id);
    }

  private:
    Buffer* claim(int count, uint32_t bytes) {
        if (used_ + count > kMaxBuffers) emulator::fatal("more than %d buffers", kMaxBuffers);
        Buffer* first = &buffers_[used_];
        for (int i = 0; i < count; ++i, ++used_) {
            buffers_[used_].offset = emulator::allocateUb(bytes);
            buffers_[used_].bytes = (bytes + emulator::kBlock - 1) / emulator::kBlock * emulator::kBlock;
        }
        return first;
    }
    // The queues' own "buffer is free" events are consumed by the framework; any other left over is an error.
    void checkFlags() {
        for (int from = 0; from < emulator::kPipes; ++from)
            for (int to = 0; to < emulator::kPipes; ++to)
                for (int id = 0; id < emulator::kEvents; ++id)
                    if (emulator::core().flags[from][to][id].set && !(emulator::core().eventsInUse[from][to] >> id & 1))
                        emulator::machine().findings.push_back("an event was set and never waited for");
    }
    static constexpr int kMaxBuffers = 64;
    std::array<Buffer, kMaxBuffers> buffers_{};
    int used_ = 0;
};
inline TPipe* GetTPipePtr() { return currentPipe(); }

// ---- transfers ------------------------------------------------------------------------------------------------
struct DataCopyExtParams {
    uint16_t blockCount;
    uint32_t blockLen, srcStride, dstStride, rsv;
};
template <typename T> struct DataCopyPadExtParams {
    bool isPad;
    uint8_t leftPadding, rightPadding;
    T paddingValue;
};

inline void checkTransfer(const DataCopyExtParams& shape, size_t itemBytes) {
    if (shape.blockCount < 1 || shape.blockCount > 4095)
        emulator::fatal("DataCopyPad: blockCount %u outside 1..4095", shape.blockCount);
    if (shape.blockLen < 1 || shape.blockLen > 2097151)
        emulator::fatal("DataCopyPad: blockLen %u outside 1..2097151", shape.blockLen);
    if (shape.blockLen % itemBytes) emulator::fatal("DataCopyPad: blockLen %u cuts an element", shape.blockLen);
}
constexpr uint32_t alignedBytes(uint32_t bytes) { return (bytes + emulator::kBlock - 1) / emulator::kBlock * emulator::kBlock; }

template <typename T>
void DataCopyPad(const LocalTensor<T>& target, const GlobalTensor<T>& source, const DataCopyExtParams& shape,
                 const DataCopyPadExtParams<T>& pad) {
    checkTransfer(shape, sizeof(T));
    if (shape.blockCount != 1) emulator::fatal("DataCopyPad: only one block is emulated");
    uint32_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
    if (left > 32 || right > 32) emulator::broken("DataCopyPad: more than 32 bytes of padding");
    uint32_t bytes = alignedBytes(left + shape.blockLen + right);
    uint32_t offset = target.operand("DataCopyPad to UB", bytes / sizeof(T));
    emulator::Instruction op(PIPE_MTE2, "DataCopyPad to UB");
    op.load(source.address(), shape.blockLen);
    op.write(offset, bytes, pad.isPad ? left + shape.blockLen + right : left + shape.blockLen);
    uint8_t* out = emulator::core().ub.data() + offset;
    std::memset(out, 0xA5, bytes);
    if (pad.isPad)
        for (uint32_t i = 0; i < bytes / sizeof(T); ++i) std::memcpy(out + i * sizeof(T), &pad.paddingValue, sizeof(T));
    std::memcpy(out + left, source.address(), shape.blockLen);
    op.transferCost(shape.blockLen);
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& target, const LocalTensor<T>& source, const DataCopyExtParams& shape) {
    checkTransfer(shape, sizeof(T));
    if (shape.blockCount != 1) emulator::fatal("DataCopyPad: only one block is emulated");
    uint32_t offset = source.operand("DataCopyPad to GM", shape.blockLen / sizeof(T));
    emulator::Instruction op(PIPE_MTE3, "DataCopyPad to GM");
    op.read(offset, shape.blockLen);
    op.store(target.address(), shape.blockLen);
    std::memcpy(target.address(), source.data(), shape.blockLen);
    op.transferCost(shape.blockLen);
}
template <typename T> void DataCopy(const LocalTensor<T>& target, const GlobalTensor<T>& source, uint32_t count) {
    if (count * sizeof(T) % 32) emulator::fatal("DataCopy: %zu bytes, not a multiple of 32", count * sizeof(T));
    DataCopyPad(target, source, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0}, {false, 0, 0, T{}});
}
template <typename T> void DataCopy(const GlobalTensor<T>& target, const LocalTensor<T>& source, uint32_t count) {
    if (count * sizeof(T) % 32) emulator::fatal("DataCopy: %zu bytes, not a multiple of 32", count * sizeof(T));
    DataCopyPad(target, source, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0});
}

// ---- vector instructions, the form with a count ---------------------------------------------------------------
template <typename D, typename S>
void checkOverlap(const char* name, const LocalTensor<D>& target, const LocalTensor<S>& source, int64_t count) {
    int64_t distance = static_cast<int64_t>(target.offset()) - source.offset();
    int64_t reach = count * static_cast<int64_t>(distance > 0 ? sizeof(S) : sizeof(D));
    if (distance && std::abs(distance) < reach) emulator::broken("%s: target and source overlap in part", name);
}
template <typename D, typename S, typename F>
void unary(const char* name, const LocalTensor<D>& target, const LocalTensor<S>& source, int64_t count, F function) {
    if (count <= 0) emulator::fatal("%s: count %lld", name, static_cast<long long>(count));
    emulator::Instruction op(PIPE_V, name);
    op.read(source.operand(name, count), count * sizeof(S));
    op.write(target.operand(name, count), count * sizeof(D));
    checkOverlap(name, target, source, count);
    D* out = target.data();
    const S* in = source.data();
    if (sizeof(D) > sizeof(S)) for (int64_t i = count; i-- > 0;) out[i] = function(in[i]);
    else for (int64_t i = 0; i < count; ++i) out[i] = function(in[i]);
    op.vectorCost(count * std::max(sizeof(D), sizeof(S)));
}
template <typename T, typename F>
void binary(const char* name, const LocalTensor<T>& target, const LocalTensor<T>& a, const LocalTensor<T>& b,
            int64_t count, F function) {
    if (count <= 0) emulator::fatal("%s: count %lld", name, static_cast<long long>(count));
    uint32_t bytes = count * sizeof(T);
    emulator::Instruction op(PIPE_V, name);
    op.read(a.operand(name, count), bytes);
    op.read(b.operand(name, count), bytes);
    op.write(target.operand(name, count), bytes);
    checkOverlap(name, target, a, count);
    checkOverlap(name, target, b, count);
    T* out = target.data();
    const T *x = a.data(), *y = b.data();
    for (int64_t i = 0; i < count; ++i) out[i] = function(x[i], y[i]);
    op.vectorCost(bytes);
}

#define EMULATE_BINARY(Name, expression)                                                                     \
    template <typename T>                                                                                    \
    void Name(const LocalTensor<T>& target, const LocalTensor<T>& a, const LocalTensor<T>& b, int32_t count) { \
        static_assert(emulator::isOneOf<T, half, float>, #Name ": dtype");                                   \
        binary(#Name, target, a, b, count, [](T x, T y) { return static_cast<T>(expression); });             \
    }
EMULATE_BINARY(Add, x + y)
EMULATE_BINARY(Sub, x - y)
EMULATE_BINARY(Mul, x * y)
EMULATE_BINARY(Div, x / y)
EMULATE_BINARY(Max, x > y ? x : y)
EMULATE_BINARY(Min, x < y ? x : y)

#define EMULATE_SCALAR(Name, expression, ...)                                                          \
    template <typename T>                                                                              \
    void Name(const LocalTensor<T>& target, const LocalTensor<T>& source, const T& y, int32_t count) { \
        static_assert(emulator::isOneOf<T, __VA_ARGS__>, #Name ": dtype");                             \
        unary(#Name, target, source, count, [y](T x) { return static_cast<T>(expression); });          \
    }
EMULATE_SCALAR(Adds, x + y, half, float)
EMULATE_SCALAR(Muls, x * y, half, float)
EMULATE_SCALAR(ShiftLeft, x << y, uint16_t, uint32_t)
EMULATE_SCALAR(ShiftRight, x >> y, uint16_t, uint32_t)

template <typename T> void Sqrt(const LocalTensor<T>& target, const LocalTensor<T>& source, int32_t count) {
    static_assert(emulator::isOneOf<T, half, float>, "Sqrt: dtype");
    unary("Sqrt", target, source, count, [](T x) { return static_cast<T>(std::sqrt(static_cast<float>(x))); });
}
template <typename T> void Duplicate(const LocalTensor<T>& target, const T& value, int32_t count) {
    static_assert(emulator::isOneOf<T, half, float, uint16_t, uint32_t>, "Duplicate: dtype");
    if (count <= 0) emulator::fatal("Duplicate: count %d", count);
    emulator::Instruction op(PIPE_V, "Duplicate");
    op.write(target.operand("Duplicate", count), count * sizeof(T));
    std::fill(target.data(), target.data() + count, value);
    op.vectorCost(count * sizeof(T));
}

inline emulator::Rounding rounding(RoundMode mode) {
    switch (mode) {
        case RoundMode::CAST_FLOOR: return emulator::Rounding::kDown;
        case RoundMode::CAST_CEIL: return emulator::Rounding::kUp;
        case RoundMode::CAST_ROUND: return emulator::Rounding::kNearestAway;
        case RoundMode::CAST_TRUNC: return emulator::Rounding::kZero;
        default: return emulator::Rounding::kNearestEven;
    }
}
template <typename D, typename S>
void Cast(const LocalTensor<D>& target, const LocalTensor<S>& source, RoundMode mode, uint32_t count) {
    constexpr bool widens = std::is_same_v<D, float> && emulator::isOneOf<S, half, bfloat16_t>;
    constexpr bool narrows = std::is_same_v<S, float> && emulator::isOneOf<D, half, bfloat16_t>;
    constexpr bool fromByte = std::is_same_v<D, half> && std::is_same_v<S, uint8_t>;
    static_assert(widens || narrows || fromByte, "Cast: this pair has no instruction here");
    if (!narrows && mode != RoundMode::CAST_NONE) emulator::broken("Cast: widening takes CAST_NONE");
    if (std::is_same_v<D, bfloat16_t> && mode == RoundMode::CAST_NONE) emulator::broken("Cast: bf16 needs a rounding");
    emulator::Rounding how = rounding(mode);
    unary("Cast", target, source, count, [how](S x) {
        if constexpr (widens) return emulator::toFloat(x);
        else if constexpr (std::is_same_v<D, bfloat16_t>) return emulator::toBfloat16(x, how);
        else if constexpr (narrows) return emulator::toHalf(x, how);
        else return static_cast<half>(x);
    });
}

template <typename T> bool compare(T x, T y, CMPMODE mode) {
    switch (mode) {
        case CMPMODE::LT: return x < y;
        case CMPMODE::GT: return x > y;
        case CMPMODE::EQ: return x == y;
        case CMPMODE::LE: return x <= y;
        case CMPMODE::GE: return x >= y;
        default: return x != y;
    }
}
template <typename T>
void Compare(const LocalTensor<uint8_t>& target, const LocalTensor<T>& a, const LocalTensor<T>& b, CMPMODE mode,
             uint32_t count) {
    static_assert(emulator::isOneOf<T, half, float>, "Compare: dtype");
    if (count * sizeof(T) % 256) emulator::broken("Compare: count x sizeof not a multiple of 256 bytes");
    emulator::Instruction op(PIPE_V, "Compare");
    op.read(a.operand("Compare", count), count * sizeof(T));
    op.read(b.operand("Compare", count), count * sizeof(T));
    op.write(target.operand("Compare", count / 8), count / 8);
    std::memset(target.data(), 0, count / 8);
    for (uint32_t i = 0; i < count; ++i)
        if (compare(a.data()[i], b.data()[i], mode)) target.data()[i / 8] |= static_cast<uint8_t>(1u << i % 8);
    op.vectorCost(count * sizeof(T));
}

// Adds `mask` neighbours of each of `repeat` rows as a binary tree; row r starts at r * rowBlocks * 32 bytes and its
// sum goes to element r * stride of the target.
template <typename T>
void WholeReduceSum(const LocalTensor<T>& target, const LocalTensor<T>& source, int32_t mask, int32_t repeat,
                    int32_t stride, int32_t blockStride, int32_t rowBlocks) {
    static_assert(emulator::isOneOf<T, half, float>, "WholeReduceSum: dtype");
    constexpr int32_t kLanes = 256 / sizeof(T), kPerBlock = 32 / sizeof(T);
    if (mask < 1 || mask > kLanes || repeat < 1 || repeat > 255 || blockStride != 1)
        emulator::fatal("WholeReduceSum: mask %d, repeat %d", mask, repeat);
    emulator::Instruction op(PIPE_V, "WholeReduceSum");
    std::vector<T> sums;
    for (int32_t row = 0; row < repeat; ++row) {
        uint32_t start = row * rowBlocks * kPerBlock;
        op.read(source.operand("WholeReduceSum", start + mask) + start * sizeof(T), mask * sizeof(T));
        std::array<T, kLanes> lanes{};
        std::copy_n(source.data() + start, mask, lanes.begin());
        for (int32_t width = kLanes / 2; width; width /= 2)
            for (int32_t i = 0; i < width; ++i) lanes[i] = static_cast<T>(lanes[2 * i] + lanes[2 * i + 1]);
        sums.push_back(lanes[0]);
    }
    uint32_t offset = target.operand("WholeReduceSum", (repeat - 1) * stride + 1);
    for (int32_t row = 0; row < repeat; ++row) {
        op.write(offset + row * stride * sizeof(T), sizeof(T));
        target.data()[row * stride] = sums[row];
    }
    op.vectorCost(static_cast<uint64_t>(repeat) * 256);
}
}  // namespace AscendC

// What the operator compiler generates or predefines.
#define KERNEL_TYPE_AIV_ONLY 0
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(type)
#define REGISTER_TILING_DEFAULT(Type) using RegisteredTiling = Type
#define GET_TILING_DATA(name, address) \
    RegisteredTiling name;             \
    std::memcpy(&name, address, sizeof name)

inline void pipe_barrier(pipe_t pipe) { emulator::barrier(pipe); }
inline int64_t get_block_idx() { return AscendC::GetBlockIdx(); }
inline int64_t get_block_num() { return AscendC::GetBlockNum(); }
#endif
