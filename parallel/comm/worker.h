// The thread of a communicator that runs what was started in the background, in the order in which it was started.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace tessera {

class CommWorker {
 public:
  CommWorker();
  ~CommWorker();  // runs what is still queued
  CommWorker(const CommWorker&) = delete;
  CommWorker& operator=(const CommWorker&) = delete;

  std::future<void> push(std::function<void()> job);
  bool idle();  // nothing queued and nothing running

 private:
  struct Job {
    std::function<void()> run;
    std::promise<void> done;
  };
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false, closing_ = false;
  std::thread thread_;
};

}  // namespace tessera
