// Threads that take one step after another together: one parallel region for many steps, since waking threads up takes
// as long as a short step does.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>
#include <omp.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

// What one thread knows of its team. All threads go through the same steps in the same order.
class Team {
 public:
  static constexpr int64_t kSmall = 1 << 16;  // multiply-adds that are not worth another thread

  // Calls steps(team) in as many threads as `work` multiply-adds are worth.
  template <typename F>
  static void together(int64_t work, F steps) {
    Common common;
    const int64_t most = at::in_parallel_region() ? 1 : at::get_num_threads();
    const int threads = static_cast<int>(std::clamp<int64_t>(work / kSmall, 1, most));
    if (threads == 1) {
      Team alone(common, 1);
      steps(alone);
      return;
    }
#pragma omp parallel num_threads(threads)
    {
      Team team(common, omp_get_num_threads());
      steps(team);
    }
  }

  int64_t threads() const { return threads_; }

  // A step: visit(begin, end) for chunks of `count` items, handed out as threads become free, so that a thread which the
  // machine holds up delays one chunk only. Returns when none are left; `wait` says when all are done.
  template <typename F>
  void share(int64_t count, int64_t chunk, F visit) {
    std::atomic<int64_t>& taken = common_.taken[step_++].of;
    for (int64_t begin; (begin = taken.fetch_add(chunk, std::memory_order_relaxed)) < count;)
      visit(begin, std::min(count, begin + chunk));
  }

  // Until all threads are here: a short spin, then sleep, so that a thread without a core can have this one's. The round is
  // counted up under the lock that sleepers hold while they look at it: `std::atomic::notify_all` may overlook one who
  // falls asleep just then (its look at the waiters is not ordered after the store), and such a team stood still for ever.
  void wait() {
    if (threads_ == 1) return;
    const int round = common_.round.load(std::memory_order_relaxed);
    if (common_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      common_.arrived.store(0, std::memory_order_relaxed);
      {
        const std::lock_guard<std::mutex> lock(common_.mutex);
        common_.round.store(round + 1, std::memory_order_release);
      }
      common_.sleepers.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; ++i) {
      if (common_.round.load(std::memory_order_acquire) != round) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(common_.mutex);
    common_.sleepers.wait(lock, [&] { return common_.round.load(std::memory_order_acquire) != round; });
  }

 private:
  static constexpr int kSteps = 16;    // that a team can share in its life
  static constexpr int kSpins = 2000;  // some 50 us

  struct alignas(64) Count {
    std::atomic<int64_t> of{0};
  };
  struct Common {
    Count taken[kSteps];
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
    std::mutex mutex;
    std::condition_variable sleepers;
  };

  Team(Common& common, int64_t threads) : common_(common), threads_(threads) {}

  static void pause() {
#ifdef __SSE2__
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }

  Common& common_;
  int64_t threads_;
  int step_ = 0;
};
