// A team of threads that run one function together and meet at barriers.
//
// Threads wait for a short, bounded time by spinning and then sleep: on a box with as many busy
// neighbours as cores, an endless spin would burn the time slice of the thread it waits for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>


class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait();

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
  std::mutex mutex_;
  std::condition_variable turned_;
};

class Team {
 public:
  // Throws when the system refuses a thread; none is left running then.
  explicit Team(int threads);
  ~Team();
  int size() const { return size_; }
  // Runs job(context, thread, size) on every thread of the team, the caller as thread 0.
  void run(void (*job)(void*, int, int), void* context);
  void barrier() {
    if (size_ > 1) barrier_.wait();
  }

 private:
  void work(int thread);

  const int size_;
  Barrier barrier_, gate_;
  std::mutex starting_;
  void (*job_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
  bool abandoned_ = false, closing_ = false;
  std::vector<std::thread> threads_;
};

