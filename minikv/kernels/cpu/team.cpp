#include "team.h"

namespace {

// Some microseconds of spinning, a few times over; then sleep. Yielding more often would hand whole time
// slices to a busy neighbour, spinning on would burn those of the thread waited for.
constexpr int kSpins = 400, kTurns = 4;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Barrier::wait() {
  const unsigned round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    {
      // Under the lock, so that no thread falls asleep between its last look and this change.
      std::lock_guard<std::mutex> lock(mutex_);
      round_.store(round + 1, std::memory_order_release);
    }
    turned_.notify_all();
    return;
  }
  for (int turn = 0; turn < kTurns; turn++) {
    for (int i = 0; i < kSpins; i++) {
      if (round_.load(std::memory_order_acquire) != round) return;
      relax();
    }
    // The thread waited for may want this very processor, if another process has its own.
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  turned_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != round; });
}

Team::Team(int threads) : size_(threads), barrier_(threads), gate_(threads) {
  threads_.reserve(threads);
  // No thread goes to the gate before all exist: it could never pass.
  std::unique_lock<std::mutex> starting(starting_);
  try {
    for (int t = 1; t < threads; t++) threads_.emplace_back([this, t] { work(t); });
  } catch (...) {
    abandoned_ = true;
    starting.unlock();
    for (auto& thread : threads_) thread.join();
    throw;
  }
}

Team::~Team() {
  if (size_ > 1) {
    closing_ = true;
    gate_.wait();
  }
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*job)(void*, int, int), void* context) {
  if (size_ == 1) return job(context, 0, 1);
  job_ = job;
  context_ = context;
  gate_.wait();
  job(context, 0, size_);
  gate_.wait();
}

void Team::work(int thread) {
  {
    std::lock_guard<std::mutex> started(starting_);
    if (abandoned_) return;
  }
  for (;;) {
    gate_.wait();
    if (closing_) return;
    job_(context_, thread, size_);
    gate_.wait();
  }
}

