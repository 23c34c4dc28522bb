// A vector core as far as a kernel's author can get it wrong: unified buffer, pipes, events, global memory.
//
// Instructions run one after another on the host, each at the moment the scalar unit would issue it. Order is
// therefore never wrong here by accident; whether the DEVICE would have kept it is decided by vector clocks:
// every instruction must be ordered (event, queue, barrier) after the earlier ones whose bytes it touches.
//
// Written from the public description of the programming model. It knows no device rounding of division and
// root, no saturation mode, no bank conflicts; its clock is a yardstick for overlap, not a prediction.
#ifndef MS_ZERO_EMULATOR_MACHINE_H
#define MS_ZERO_EMULATOR_MACHINE_H
#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

namespace emulator {
constexpr int kPipes = 4;
constexpr int kEvents = 8;
constexpr uint32_t kBlock = 32;
constexpr uint32_t kUbBytes = 192 * 1024;
// 256 bytes belong to the framework and 8 KiB to the compiler.
constexpr uint32_t kUbUsable = kUbBytes - 256 - 8 * 1024;
constexpr uint64_t kInstructionLimit = 20'000'000;
// One core's share of HBM at 48 cores, 1.6 TB/s and 1.85 GHz; two cycles for 256 bytes of vector work.
constexpr double kMteBytesPerCycle = 18.0, kMteStart = 60.0, kVectorBytesPerCycle = 128.0, kVectorStart = 20.0;

inline const char* pipeName(int pipe) {
    static const char* const names[] = {"S", "V", "MTE2", "MTE3", "ALL"};
    return names[pipe];
}

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A tensor in global memory, and who touched each 32 bytes of it last.
struct Region {
    struct Toucher {
        int core = -1;  // -1 nobody, -2 several
        int pipe = 0;
        uint32_t time = 0;
    };
    uint8_t* begin;
    uint64_t bytes;
    bool readable, writable;
    uint64_t bytesRead = 0, bytesWritten = 0;
    std::vector<Toucher> writer, reader;
    std::vector<bool> written;  // a byte is written once per launch
};

using Clock = std::array<uint32_t, kPipes>;

struct Flag {
    bool set = false;
    Clock seen{};
    double time = 0;
};

struct UbBlock {
    int writerPipe = -1;
    uint32_t writeTime = 0;
    Clock readTime{};
};

struct Core {
    int index = 0;
    alignas(64) std::array<uint8_t, kUbBytes> ub;
    std::array<uint8_t, kUbBytes> defined{};  // bytes that hold a value the kernel put there
    std::array<UbBlock, kUbBytes / kBlock> blocks{};
    uint32_t allocated = 0;
    Clock issued{};
    std::array<Clock, kPipes> seen{};  // seen[p][q]: instructions of q that p knows to be complete
    Flag flags[kPipes][kPipes][kEvents];
    uint8_t eventsInUse[kPipes][kPipes] = {};  // by queues
    uint8_t eventsFetched[kPipes][kPipes] = {};  // by the kernel itself
    std::array<double, kPipes> pipeFree{}, pipeReady{}, pipeBusy{};
    Core() { ub.fill(0xA5); }
};

struct Machine {
    std::vector<Region> regions;
    int cores = 1;
    bool strict = true;  // stop at the first broken rule; otherwise collect them
    std::vector<std::string> findings;
    std::unique_ptr<Core> core;
    uint32_t ubPeak = 0;
    int eventPeak = 0, bufferPeak = 0;
    uint64_t instructions = 0;
    double busiest = 0, modelled = 0;  // summed over cores: cycles of the busiest pipe, cycles in all

    void startCore(int index) {
        core = std::make_unique<Core>();
        core->index = index;
    }
    void finishCore() {
        busiest += *std::max_element(core->pipeBusy.begin(), core->pipeBusy.end());
        modelled += *std::max_element(core->pipeFree.begin(), core->pipeFree.end());
    }
};

inline Machine*& current() {
    static Machine* machine = nullptr;
    return machine;
}
inline Machine& machine() { return *current(); }
inline Core& core() { return *machine().core; }

inline std::string format(const char* text, va_list arguments) {
    char buffer[512];
    std::vsnprintf(buffer, sizeof buffer, text, arguments);
    return buffer;
}

// Memory would be damaged: always fatal.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fatal(const char* text, ...) {
    va_list arguments;
    va_start(arguments, text);
    std::string message = format(text, arguments);
    va_end(arguments);
    throw Failure(message);
}

// A rule of the programming model is broken.
__attribute__((format(printf, 1, 2))) inline void broken(const char* text, ...) {
    va_list arguments;
    va_start(arguments, text);
    std::string message = format(text, arguments);
    va_end(arguments);
    if (machine().strict && std::uncaught_exceptions() == 0) throw Failure(message);
    auto& findings = machine().findings;
    if (std::find(findings.begin(), findings.end(), message) == findings.end()) findings.push_back(message);
}

// One instruction on a pipe and the memory it touches.
class Instruction {
  public:
    Instruction(int pipe, const char* name) : pipe_(pipe), name_(name), time_(++core().issued[pipe]) {
        if (++machine().instructions > kInstructionLimit) fatal("runaway kernel: %s", name);
    }

    void read(uint32_t offset, uint32_t bytes) {
        checkUb(offset, bytes);
        Core& c = core();
        if (bytes && std::memchr(c.defined.data() + offset, 0, bytes)) broken("%s reads bytes never written", name_);
        for (uint32_t b = offset / kBlock; b * kBlock < offset + bytes; ++b) {
            UbBlock& block = c.blocks[b];
            orderAfterWrite(block, "read-after-write");
            block.readTime[pipe_] = time_;
        }
    }

    // `bytes` change; only the first `meaningful` of them get a value.
    void write(uint32_t offset, uint32_t bytes, uint32_t meaningful) {
        checkUb(offset, bytes);
        Core& c = core();
        for (uint32_t b = offset / kBlock; b * kBlock < offset + bytes; ++b) {
            UbBlock& block = c.blocks[b];
            orderAfterWrite(block, "write-after-write");
            for (int q = PIPE_V; q < kPipes; ++q)  // the scalar unit's own reads are complete when it goes on
                if (block.readTime[q] && !ordered(q, block.readTime[q])) hazard("write-after-read", q);
            block = UbBlock{pipe_, time_, {}};
        }
        std::memset(c.defined.data() + offset, 1, meaningful);
        std::memset(c.defined.data() + offset + meaningful, 0, bytes - meaningful);
    }
    void write(uint32_t offset, uint32_t bytes) { write(offset, bytes, bytes); }

    void load(const void* address, uint64_t bytes) {
        Region& region = find(address, bytes);
        if (!region.readable) broken("%s reads an output that holds no value", name_);
        region.bytesRead += bytes;
        forBlocks(region, address, bytes, [&](uint64_t b) {
            Region::Toucher& writer = region.writer[b];
            if (writer.core >= 0 && writer.core != core().index) broken("%s races with another core's write", name_);
            else if (writer.core >= 0 && !ordered(writer.pipe, writer.time)) globalHazard(writer.pipe);
            Region::Toucher& reader = region.reader[b];
            bool shared = reader.core == -2 || (reader.core >= 0 && reader.core != core().index);
            reader = {shared ? -2 : core().index, pipe_, time_};
        });
    }

    void store(const void* address, uint64_t bytes) {
        Region& region = find(address, bytes);
        if (!region.writable) broken("%s writes a read-only tensor", name_);
        region.bytesWritten += bytes;
        uint64_t first = static_cast<const uint8_t*>(address) - region.begin;
        for (uint64_t i = first; i < first + bytes; ++i) {
            if (region.written[i]) broken("%s writes a byte of global memory twice", name_);
            region.written[i] = true;
        }
        forBlocks(region, address, bytes, [&](uint64_t b) {
            for (Region::Toucher* other : {&region.writer[b], &region.reader[b]}) {
                if (other->core == -1) continue;
                if (other->core != core().index) broken("%s races with another core", name_);
                else if (!ordered(other->pipe, other->time)) globalHazard(other->pipe);
            }
            region.writer[b] = {core().index, pipe_, time_};
        });
    }

    void transferCost(uint64_t bytes) { cost(kMteStart + bytes / kMteBytesPerCycle); }
    void vectorCost(uint64_t bytes) { cost(kVectorStart + bytes / kVectorBytesPerCycle); }

  private:
    void cost(double cycles) {
        Core& c = core();
        c.pipeFree[pipe_] = std::max(c.pipeFree[pipe_], c.pipeReady[pipe_]) + cycles;
        c.pipeBusy[pipe_] += cycles;
    }
    bool ordered(int other, uint32_t time) const {
        if (other == pipe_ && (pipe_ == PIPE_S || time == time_)) return true;
        return core().seen[pipe_][other] >= time;
    }
    void orderAfterWrite(const UbBlock& block, const char* kind) const {
        if (block.writerPipe >= 0 && !ordered(block.writerPipe, block.writeTime)) hazard(kind, block.writerPipe);
    }
    void hazard(const char* kind, int other) const {
        broken("%s on pipe %s: %s hazard against pipe %s: %s missing", name_, pipeName(pipe_), kind, pipeName(other),
               other == pipe_ ? "PipeBarrier" : "event or queue");
    }
    void globalHazard(int other) const {
        broken("%s on pipe %s: global memory not ordered after pipe %s", name_, pipeName(pipe_), pipeName(other));
    }
    void checkUb(uint32_t offset, uint64_t bytes) const {
        if (offset + bytes > kUbBytes) fatal("%s: unified buffer exceeded", name_);
    }
    Region& find(const void* address, uint64_t bytes) const {
        auto* p = static_cast<const uint8_t*>(address);
        for (Region& region : machine().regions)
            if (p >= region.begin && p + bytes <= region.begin + region.bytes) return region;
        fatal("%s: %llu bytes of global memory outside every tensor", name_, static_cast<unsigned long long>(bytes));
    }
    template <typename F>
    static void forBlocks(const Region& region, const void* address, uint64_t bytes, F visit) {
        uint64_t first = static_cast<const uint8_t*>(address) - region.begin;
        for (uint64_t b = first / kBlock; b * kBlock < first + bytes; ++b) visit(b);
    }

    int pipe_;
    const char* name_;
    uint32_t time_;
};

inline void checkEvent(int id) {
    if (id < 0 || id >= kEvents) fatal("event id %d outside 0..7", id);
}

inline void setFlag(int from, int to, int id) {
    checkEvent(id);
    Core& c = core();
    if (!((c.eventsInUse[from][to] | c.eventsFetched[from][to]) >> id & 1))
        broken("event %s->%s %d was never asked for", pipeName(from), pipeName(to), id);
    Flag& flag = c.flags[from][to][id];
    if (flag.set) broken("event %s->%s %d set twice", pipeName(from), pipeName(to), id);
    flag = {true, c.seen[from], std::max(c.pipeFree[from], c.pipeReady[from])};
    flag.seen[from] = c.issued[from];
}

inline void waitFlag(int from, int to, int id) {
    checkEvent(id);
    Core& c = core();
    Flag& flag = c.flags[from][to][id];
    if (!flag.set) fatal("wait for event %s->%s %d that nobody set: the core hangs", pipeName(from), pipeName(to), id);
    flag.set = false;
    for (int q = 0; q < kPipes; ++q) c.seen[to][q] = std::max(c.seen[to][q], flag.seen[q]);
    c.pipeReady[to] = std::max(c.pipeReady[to], flag.time);
}

inline void barrier(int pipe) {
    Core& c = core();
    if (pipe == PIPE_S) {
        broken("PipeBarrier<PIPE_S> is not supported");
    } else if (pipe != PIPE_ALL) {
        c.seen[pipe][pipe] = c.issued[pipe];
    } else {
        c.seen.fill(c.issued);
        double latest = *std::max_element(c.pipeFree.begin(), c.pipeFree.end());
        for (int p = 0; p < kPipes; ++p) c.pipeReady[p] = std::max(c.pipeReady[p], latest);
    }
}

inline int allocateEvent(int from, int to) {
    uint8_t& used = core().eventsInUse[from][to];
    for (int id = 0; id < kEvents; ++id) {
        if (used >> id & 1) continue;
        used = static_cast<uint8_t>(used | 1 << id);
        machine().eventPeak = std::max(machine().eventPeak, __builtin_popcount(used));
        return id;
    }
    fatal("more than 8 events alive from %s to %s", pipeName(from), pipeName(to));
}

inline void releaseEvent(int from, int to, int id) {
    uint8_t& used = core().eventsInUse[from][to];
    used = static_cast<uint8_t>(used & ~(1 << id));
}

inline uint32_t allocateUb(uint64_t bytes) {
    Core& c = core();
    if (bytes == 0) fatal("a buffer of 0 bytes");
    bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    if (c.allocated + bytes > kUbUsable) {
        fatal("unified buffer: %llu bytes asked for, %u usable", static_cast<unsigned long long>(c.allocated + bytes),
              kUbUsable);
    }
    uint32_t offset = c.allocated;
    c.allocated += static_cast<uint32_t>(bytes);
    machine().ubPeak = std::max(machine().ubPeak, c.allocated);
    return offset;
}
}  // namespace emulator
#endif
