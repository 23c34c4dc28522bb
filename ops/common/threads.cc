#include "threads.h"

#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace msz {
namespace {

// Sets the default floating point state for its lifetime: other libraries may have asked for flush to zero.
class DefaultFloatState {
 public:
#if defined(__SSE2__)
  DefaultFloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  ~DefaultFloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Part {
  void (*work)(void *, int);
  void *context;
  int part;
};

void *run_part(void *argument) {
  const Part &part = *static_cast<const Part *>(argument);
  DefaultFloatState state;
  part.work(part.context, part.part);
  return nullptr;
}

// Threads made for this call only. A part whose thread cannot be made is done by the caller.
void run_with_new_threads(int parts, void (*work)(void *, int), void *context) {
  std::vector<Part> all(parts);
  std::vector<pthread_t> threads(parts);
  int made = 1;
  for (int i = 0; i < parts; ++i) all[i] = {work, context, i};
  while (made < parts && pthread_create(&threads[made], nullptr, run_part, &all[made]) == 0) ++made;
  run_part(&all[0]);
  for (int i = made; i < parts; ++i) run_part(&all[i]);
  for (int i = 1; i < made; ++i) pthread_join(threads[i], nullptr);
}

// Whether this process came from a fork and has called no exec since: PF_FORKNOEXEC among the flags that Linux
// shows in /proc/self/stat, the 7th number after the name in parentheses.
bool is_forked() {
  std::FILE *file = std::fopen("/proc/self/stat", "re");
  if (file == nullptr) return false;
  char text[1024];
  text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
  std::fclose(file);
  const char *end_of_name = std::strrchr(text, ')');
  unsigned flags = 0;
  const int found = end_of_name ? std::sscanf(end_of_name, ") %*c %*d %*d %*d %*d %*d %u", &flags) : 0;
  return found == 1 && (flags & 0x40u) != 0;
}

// The process that may use OpenMP, -1 for none. A forked child inherits the book-keeping of the threads of its
// parent, whichever library made them, without the threads, and would wait for them for ever.
std::atomic<pid_t> process_with_threads{0};

bool may_use_openmp() {
  const pid_t self = getpid();
  pid_t user = process_with_threads;
  if (user == 0) {
    user = is_forked() ? -1 : self;
    process_with_threads = user;
  }
  return user == self;
}

}  // namespace

void run_parts(int parts, void (*work)(void *, int), void *context) {
  if (parts <= 1) {
    DefaultFloatState state;
    if (parts == 1) work(context, 0);
    return;
  }
  if (!may_use_openmp()) {
    run_with_new_threads(parts, work, context);
    return;
  }
  // OpenMP may give fewer threads than asked for: the parts are shared out among those that came.
#pragma omp parallel num_threads(parts)
  {
    DefaultFloatState state;
    for (int part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) work(context, part);
  }
}

int thread_count(int threads) { return threads > 0 ? threads : omp_get_max_threads(); }

}  // namespace msz

// Which instruction set this library was compiled for: "avx512", "avx2", "neon" or "plain".
MSZ_API const char *msz_variant() { return MSZ_VARIANT; }

// The number of threads that a call with threads = 0 uses.
MSZ_API int msz_max_threads() { return msz::thread_count(0); }
