// Streams, events and captures of the emulated GPU.
//
// A GPU may be ahead of the host or behind it, and both are emulated. TESSERA_EMULATED_STREAMS=late: what is queued
// runs when somebody asks for it, which is a query, a synchronisation, or who waits for an event of the stream; a host
// that reads a result without waiting, or writes to pinned memory that is still to be read, so works with wrong
// numbers. "early": at once, on the thread that queues it, unless something before it waits. Two things can wait: a
// collective of NCCL's for other ranks (tests/cuda_emulator/nccl.h), and a stream for an event of another that waits.
// Tasks that stand behind them are kept, and the next call on the stream lets them go on too. Late is the default. No
// thread goes on by itself.
//
// A capture keeps a line of nodes for each stream that takes part: the one that began it, and those that have waited
// for an event recorded in it. A launched graph runs the first line as far as it goes, and a node of another only when
// the first one waits: whatever is not joined in time comes too late, and a test sees other numbers.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/cuda_emulator/cuda_runtime.h"

namespace tessera::emulator {

bool is_deferred();
// Forbids memory that was given back once the tasks queued before are done; called after tasks (shadow.cpp).
void after_task();

using Task = std::function<bool()>;      // asked until it says that it is done
using MakeTask = std::function<Task()>;  // called anew whenever what was queued is run

// Tasks one after another.
class Line {
 public:
  explicit Line(int gpu) : gpu_(gpu) {}
  int gpu() const { return gpu_; }
  void push(Task task);
  void run(const std::function<void()>& work);  // now, where nothing is before it
  bool progress();                              // runs what can be run; true: nothing is left
  uint64_t pushed() const { return pushed_; }   // tasks so far, and those of them that are done
  uint64_t done() const { return done_; }

 private:
  void add(Task task);
  void drop_first();
  void advance();

  const int gpu_;
  std::recursive_mutex mutex_;
  std::deque<Task> tasks_;
  std::atomic<uint64_t> pushed_ = 0, done_ = 0;
  bool running_ = false;
};

// A point in a line.
struct Mark {
  std::atomic<bool> reached = false;
  std::weak_ptr<Line> line;
  bool wait_a_little();  // lets the line go on; true where it has come to the point
};

// The end of what waits on a stream now.
struct Point {
  std::weak_ptr<Line> line;
  uint64_t tasks;
  bool is_reached() const;
};
std::vector<Point> ends_of_lines();  // where something waits

// Work, or an event that is recorded or waited for, of which it has the number.
struct Node {
  enum class Kind : uint8_t { work, record, wait };
  Kind kind = Kind::work;
  MakeTask make = {};
  size_t event = 0;
};
using Lines = std::vector<std::vector<Node>>;

struct Capture {
  Lines lines;
  std::vector<cudaStream_t> streams;  // the stream of each line
  size_t events = 0;
  bool broken = false;  // by a call that cannot be captured
};

// Kernels and products that this thread has asked for.
uint64_t launches();
// Queues it, or keeps it where the stream is captured.
void push(cudaStream_t stream, const MakeTask& make);
// Calls that a capture does not take break it off: on a stream that takes part, or by the thread that has begun one.
cudaError_t not_captured(cudaStream_t stream);
cudaError_t not_while_capturing();
// Runs all that is queued; waits for other ranks.
void finish(cudaStream_t stream);
// Runs on all streams what can be run.
void go_on();

}  // namespace tessera::emulator

struct EmulatedStream {
  std::shared_ptr<tessera::emulator::Line> line;
  std::shared_ptr<tessera::emulator::Capture> capture;  // that it takes part in
  size_t number = 0;                                    // number of its line there
  int gpu = 0;
};
struct EmulatedEvent {
  std::mutex mutex;
  std::shared_ptr<tessera::emulator::Mark> mark;     // left by a record that ran
  bool captured = false;                             // the last record was
  std::weak_ptr<tessera::emulator::Capture> within;  // while it goes on
  size_t number = 0;                                 // there
  int gpu = 0;
};
