// A queue and its thread.
#include "parallel/comm/worker.h"

#include <exception>
#include <utility>

namespace tessera {

CommWorker::CommWorker() : thread_([this] { loop(); }) {}

CommWorker::~CommWorker() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::future<void> CommWorker::push(std::function<void()> job) {
  Job queued{std::move(job), {}};
  std::future<void> done = queued.done.get_future();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(queued));
  }
  changed_.notify_all();
  return done;
}

bool CommWorker::idle() {
  const std::lock_guard lock(mutex_);
  return jobs_.empty() && !busy_;
}

// Who waits for a job hears of its end when the worker has let go of its tensors and is idle, or at the next job.
void CommWorker::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      job.run();
    } catch (...) {
      thrown = std::current_exception();
    }
    job.run = nullptr;
    lock.lock();
    busy_ = false;
    if (thrown)
      job.done.set_exception(thrown);
    else
      job.done.set_value();
  }
}

}  // namespace tessera
