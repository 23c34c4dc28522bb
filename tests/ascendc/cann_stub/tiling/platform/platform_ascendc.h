// The device that the stub pretends to find: what a test sets.
#ifndef MS_ZERO_CANN_STUB_PLATFORM_H
#define MS_ZERO_CANN_STUB_PLATFORM_H
#include <cstdint>

namespace platform_ascendc {
enum class CoreMemType { UB };
struct Device {
    uint32_t vectorCores = 48;
    uint64_t ubBytes = 192 * 1024;
    uint32_t systemWorkspace = 16 * 1024 * 1024;
};
inline Device& device() {
    static Device device;
    return device;
}
class PlatformAscendC {
  public:
    explicit PlatformAscendC(void*) {}
    uint32_t GetCoreNumAiv() const { return device().vectorCores; }
    void GetCoreMemSize(CoreMemType, uint64_t& bytes) const { bytes = device().ubBytes; }
    uint32_t GetLibApiWorkSpaceSize() const { return device().systemWorkspace; }
};
}  // namespace platform_ascendc
#endif
