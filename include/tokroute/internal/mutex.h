// The library's one lock: it spins briefly, then sleeps and looks again; annotated for clang's -Wthread-safety.
//
// Why not absl::Mutex: as packaged it runs deadlock detection (31-63 ns a lock, uncontended) and confuses
// ThreadSanitizer. Why not std::mutex: sections are about a microsecond and parking costs several, so one spins before it
// anyway; and to know whom to wake, its unlock is a locked instruction that waits until every store of the section has its
// cache line. Here unlocking is one plain store. Who waits for a holder that lost its core wakes up to 50 us late.
#ifndef TOKROUTE_INTERNAL_MUTEX_H_
#define TOKROUTE_INTERNAL_MUTEX_H_

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__clang__)
#define TOKROUTE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TOKROUTE_THREAD_ANNOTATION(x)
#endif
#define TOKROUTE_CAPABILITY(x) TOKROUTE_THREAD_ANNOTATION(capability(x))
#define TOKROUTE_SCOPED_CAPABILITY TOKROUTE_THREAD_ANNOTATION(scoped_lockable)
#define TOKROUTE_GUARDED_BY(x) TOKROUTE_THREAD_ANNOTATION(guarded_by(x))
#define TOKROUTE_REQUIRES(...) TOKROUTE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define TOKROUTE_ACQUIRE(...) TOKROUTE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define TOKROUTE_RELEASE(...) TOKROUTE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TOKROUTE_EXCLUDES(...) TOKROUTE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace tokroute::internal {

inline void PauseBriefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class TOKROUTE_CAPABILITY("mutex") Mutex {
 public:
  void lock() noexcept TOKROUTE_ACQUIRE() {
    if (held_.load(std::memory_order_relaxed) || held_.exchange(true, std::memory_order_acquire)) WaitAndLock();
  }
  void unlock() noexcept TOKROUTE_RELEASE() { held_.store(false, std::memory_order_release); }

 private:
  void WaitAndLock() noexcept {
    for (;;) {
      for (int round = 0; round < kSpinRounds; ++round) {
        PauseBriefly();
        // Looks before it takes, so that whoever waits leaves the holder its cache line.
        if (!held_.load(std::memory_order_relaxed) && !held_.exchange(true, std::memory_order_acquire)) return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));  // The holder has lost its core.
    }
  }

  static constexpr int kSpinRounds = 400;
  std::atomic<bool> held_{false};
};

class TOKROUTE_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) noexcept TOKROUTE_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() TOKROUTE_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace tokroute::internal

#endif  // TOKROUTE_INTERNAL_MUTEX_H_
