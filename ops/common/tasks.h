// Independent pieces of work of uneven size, handed to whichever thread is free.
#pragma once

#include <algorithm>
#include <atomic>

#include "threads.h"
#include "vmath.h"

namespace msz {

// Calls work(task, memory) for task = 0 ... count - 1, each once, in any order; `memory` is `scratch_floats` floats
// of the calling thread's own, not initialised.
template <class Work>
void each_task(int64_t count, int64_t scratch_floats, int threads, const Work &work) {
  std::atomic<int64_t> next{0};
  struct Job {
    std::atomic<int64_t> *next;
    int64_t count, scratch_floats;
    const Work *work;
  } job{&next, count, scratch_floats, &work};
  run_parts(
      static_cast<int>(std::min<int64_t>(thread_count(threads), count)),
      [](void *context, int) {
        Job &j = *static_cast<Job *>(context);
        Scratch scratch(j.scratch_floats);
        for (int64_t task = (*j.next)++; task < j.count; task = (*j.next)++) (*j.work)(task, scratch.begin());
      },
      &job);
}

}  // namespace msz
