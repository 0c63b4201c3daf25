// Streams, events and graph capture of the emulated GPU.
//
// A GPU may run ahead of the host or behind it, and both are emulated. TESSERA_EMULATED_STREAMS=late (the default):
// queued work runs when a query, a synchronization or a wait for an event of the stream requires it, so a host that
// reads a result without waiting, or overwrites pinned memory before it is read, computes wrong values. "early":
// immediately, on the thread that queues it, unless an earlier task is blocked. Two kinds of tasks can block: NCCL
// collectives waiting for other ranks (tests/cuda_emulator/nccl.h), and waits for an event of another blocked stream.
// Tasks queued after them are resumed by the next call on the stream; no background thread runs them.
//
// A capture records a line of nodes for each participating stream: the one that began it, and those that waited for an
// event recorded in it. A launched graph runs the first line as far as possible, and a node of another line only when
// the first is blocked, so work that is not joined in time runs too late, and a test observes wrong values.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/cuda_emulator/cuda_runtime.h"

namespace tessera::emulator {

bool is_deferred();
// Poisons released memory once the tasks queued before are done; called after tasks (shadow.cpp).
void after_task();

using Task = std::function<bool()>;      // called until it returns true
using MakeTask = std::function<Task()>;  // called for each execution of queued work

// A sequence of tasks.
class Line {
 public:
  explicit Line(int gpu) : gpu_(gpu) {}
  int gpu() const { return gpu_; }
  void push(Task task);
  void run(const std::function<void()>& work);  // immediately if the line is empty
  bool progress();                              // runs tasks until one blocks; true: none is left
  uint64_t pushed() const { return pushed_; }   // tasks queued so far
  uint64_t done() const { return done_; }       // of these, completed

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

// A position in a line.
struct Mark {
  std::atomic<bool> reached = false;
  std::weak_ptr<Line> line;
  bool wait_a_little();  // lets the line progress; true once the position is reached
};

// The current end of a stream's pending tasks.
struct Point {
  std::weak_ptr<Line> line;
  uint64_t tasks;
  bool is_reached() const;
};
std::vector<Point> ends_of_lines();  // one per line with pending tasks

// A step of a line: work, the recording of an event, or a wait for an event.
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
  bool broken = false;  // invalidated by a call that cannot be captured
};

// Number of kernels and GEMMs launched by this thread.
uint64_t launches();
// Queues the work, or records it if the stream is being captured.
void push(cudaStream_t stream, const MakeTask& make);
// Invalidate a capture in which the stream participates, or that this thread began: for calls that cannot be captured.
cudaError_t not_captured(cudaStream_t stream);
cudaError_t not_while_capturing();
// Runs all queued work; waits for other ranks.
void finish(cudaStream_t stream);
// Runs unblocked tasks on all streams.
void resume();

}  // namespace tessera::emulator

struct EmulatedStream {
  std::shared_ptr<tessera::emulator::Line> line;
  std::shared_ptr<tessera::emulator::Capture> capture;  // the capture in which it participates
  size_t number = 0;                                    // index of the stream's line in the capture
  int gpu = 0;
};
struct EmulatedEvent {
  std::mutex mutex;
  std::shared_ptr<tessera::emulator::Mark> mark;     // set by an executed record
  bool captured = false;                             // whether the last record was captured
  std::weak_ptr<tessera::emulator::Capture> within;  // during the capture
  size_t number = 0;                                 // the event's number in it
  int gpu = 0;
};
