// Work on ranges with several threads.
#pragma once

#include <cstdint>

namespace msz {

// Calls work(context, part) for part = 0 .. parts - 1, each once, on as many threads at the same time, and
// returns when all are done. The floating point state of every thread is the default meanwhile (round to
// nearest, denormals kept), whatever the process has set. Works in a process forked from one that had threads.
void run_parts(int parts, void (*work)(void *context, int part), void *context);

// The number of threads to use: `threads`, or for 0 what OpenMP says (OMP_NUM_THREADS, else all cores).
int thread_count(int threads);

// Calls work(begin, end) for contiguous ranges that cover [0, n), at most `threads` (0: as OpenMP says) of them.
// Ranges begin at multiples of `grain` and, but for the last, hold at least one grain; small work stays on the
// calling thread.
template <class Work>
void parallel_ranges(int64_t n, int64_t grain, int threads, const Work &work) {
  const int64_t grains = (n + grain - 1) / grain;
  int64_t parts = thread_count(threads);
  if (parts > grains) parts = grains;
  struct Job {
    const Work *work;
    int64_t n, grain, grains, parts;
  } job{&work, n, grain, grains, parts};
  run_parts(
      static_cast<int>(parts),
      [](void *context, int part) {
        const Job &j = *static_cast<const Job *>(context);
        const int64_t begin = j.grains * part / j.parts * j.grain;
        const int64_t end = j.grains * (part + 1) / j.parts * j.grain;
        if (begin < end) (*j.work)(begin, end < j.n ? end : j.n);
      },
      &job);
}

}  // namespace msz
