// Threads that take one step after another together: one parallel region for many steps, since waking threads up takes
// as long as a short step does.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include <ATen/Parallel.h>

// What one thread knows of its team. All threads go through the same steps in the same order.
class Team {
 public:
  static constexpr int kSteps = 16;  // that a team can share in its life
  static constexpr int64_t kSmall = 1 << 16;  // multiply-adds that are not worth another thread

  // Calls steps(team) in as many threads as `work` multiply-adds are worth.
  template <typename F>
  static void together(int64_t work, F steps) {
    Count taken[kSteps];
    const int64_t most = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int threads = static_cast<int>(std::clamp<int64_t>(work / kSmall, 1, most));
    if (threads == 1) {
      Team alone(taken, 1);
      steps(alone);
      return;
    }
#pragma omp parallel num_threads(threads)
    {
      Team team(taken, omp_get_num_threads());
      steps(team);
    }
  }

  int64_t threads() const { return threads_; }

  // A step: visit(begin, end) for chunks of `count` items, handed out as threads become free, so that a thread which the
  // machine holds up delays one chunk only. Returns when none are left; `wait` says when all are done.
  template <typename F>
  void share(int64_t count, int64_t chunk, F visit) {
    std::atomic<int64_t>& taken = taken_[step_++].of;
    for (int64_t begin; (begin = taken.fetch_add(chunk, std::memory_order_relaxed)) < count;)
      visit(begin, std::min(count, begin + chunk));
  }

  void wait() const {
    if (threads_ > 1) {
#pragma omp barrier
    }
  }

 private:
  struct alignas(64) Count {
    std::atomic<int64_t> of{0};
  };
  Team(Count* taken, int64_t threads) : taken_(taken), threads_(threads) {}

  Count* taken_;
  int64_t threads_;
  int step_ = 0;
};
