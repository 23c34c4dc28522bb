// Launches kernels of a generated table on the emulated cores, behind a C ABI for ctypes.
#ifndef MS_ZERO_EMULATOR_DRIVER_H
#define MS_ZERO_EMULATOR_DRIVER_H
#include "machine.h"

namespace emulator {
struct Kernel {
    const char* name;
    void (*run)(uint8_t** arguments);
};

// Mirrors of the ctypes structures in emulated.py.
struct Tensor {
    uint8_t* address;
    uint64_t bytes;
    int32_t readable, writable;
    uint64_t bytesRead, bytesWritten;  // results
};
struct Report {
    uint32_t ubPeak;
    int32_t eventPeak, bufferPeak;
    uint64_t instructions;
    double busiest, modelled;
    char text[2048];  // the findings, one a line; empty when every rule was kept
};

inline void launch(const Kernel& kernel, Machine& machine, uint8_t** arguments) {
    for (int index = 0; index < machine.cores; ++index) {
        machine.startCore(index);
        kernel.run(arguments);
        machine.finishCore();
    }
}

inline void fillReport(const Machine& machine, Report* report) {
    report->ubPeak = machine.ubPeak;
    report->eventPeak = machine.eventPeak;
    report->bufferPeak = machine.bufferPeak;
    report->instructions = machine.instructions;
    report->busiest = machine.busiest;
    report->modelled = machine.modelled;
    std::string text;
    for (const std::string& finding : machine.findings) text += finding + "\n";
    std::snprintf(report->text, sizeof report->text, "%s", text.c_str());
}

// 0 when the kernel ran to its end, 1 when it was stopped at a broken rule.
inline int launchReported(const Kernel& kernel, int cores, bool strict, Tensor* tensors, int count,
                          uint8_t** arguments, Report* report) {
    Machine machine;
    machine.cores = cores;
    machine.strict = strict;
    for (int i = 0; i < count; ++i) {
        Region region{tensors[i].address, tensors[i].bytes, tensors[i].readable != 0, tensors[i].writable != 0,
                      0, 0, {}, {}, {}};
        region.writer.resize(region.bytes / kBlock + 1);
        region.reader.resize(region.bytes / kBlock + 1);
        region.written.resize(region.bytes);
        machine.regions.push_back(std::move(region));
    }
    current() = &machine;
    int stopped = 0;
    try {
        launch(kernel, machine, arguments);
    } catch (const Failure& failure) {
        machine.findings.push_back(failure.what());
        stopped = 1;
    }
    for (int i = 0; i < count; ++i) {
        tensors[i].bytesRead = machine.regions[i].bytesRead;
        tensors[i].bytesWritten = machine.regions[i].bytesWritten;
    }
    fillReport(machine, report);
    current() = nullptr;
    return stopped;
}
}  // namespace emulator
#endif
