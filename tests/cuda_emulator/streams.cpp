// Task lines and events.
#include "tests/cuda_emulator/streams.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "tests/cuda_emulator/reach.h"

namespace tessera::emulator {

bool is_deferred() {
  static const bool late = [] {
    const char* const setting = std::getenv("TESSERA_EMULATED_STREAMS");
    const std::string_view asked = setting ? setting : "late";
    if (asked != "late" && asked != "early") {
      std::fprintf(stderr, "TESSERA_EMULATED_STREAMS: expected late or early, got '%s'\n", setting);
      std::abort();
    }
    return asked == "late";
  }();
  return late;
}

namespace {

struct AllLines {
  std::mutex mutex;
  std::vector<std::weak_ptr<Line>> lines;
  std::vector<std::shared_ptr<Line>> without_stream;  // lines of destroyed streams with pending work

  void tidy() {
    std::erase_if(without_stream, [](const std::shared_ptr<Line>& line) { return line->done() == line->pushed(); });
    std::erase_if(lines, [](const std::weak_ptr<Line>& line) { return line.expired(); });
  }
};
AllLines& all_lines() {
  static AllLines all;
  return all;
}

std::vector<std::shared_ptr<Line>> lines_now() {
  const std::lock_guard lock(all_lines().mutex);
  std::vector<std::shared_ptr<Line>> lines;
  for (const std::weak_ptr<Line>& each : all_lines().lines)
    if (std::shared_ptr<Line> line = each.lock()) lines.push_back(std::move(line));
  return lines;
}

}  // namespace

std::vector<Point> ends_of_lines() {
  std::vector<Point> ends;
  for (const std::shared_ptr<Line>& line : lines_now())
    if (const uint64_t pushed = line->pushed(); line->done() < pushed) ends.push_back({line, pushed});
  return ends;
}
void resume() {
  for (const std::shared_ptr<Line>& line : lines_now()) line->progress();
}
bool Point::is_reached() const {
  const std::shared_ptr<Line> of = line.lock();
  return !of || of->done() >= tasks;
}

// Requires the mutex. A task that throws is not retried.
void Line::advance() {
  if (running_) return;
  running_ = true;
  try {
    while (!tasks_.empty() && tasks_.front()()) drop_first();
  } catch (...) {
    drop_first();
    running_ = false;
    throw;
  }
  running_ = false;
}

void Line::add(Task task) {
  tasks_.push_back(std::move(task));
  ++pushed_;
}
void Line::drop_first() {
  tasks_.pop_front();
  ++done_;
  after_task();
}

void Line::push(Task task) {
  const std::lock_guard lock(mutex_);
  add(std::move(task));
  if (!is_deferred()) advance();
}

void Line::run(const std::function<void()>& work) {
  const std::lock_guard lock(mutex_);
  if (!is_deferred()) advance();
  if (!is_deferred() && tasks_.empty()) return work();
  add([work] {
    work();
    return true;
  });
}

// No-op if another thread is running the line, or the caller is a task of this line.
bool Line::progress() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || running_) return false;
  advance();
  return tasks_.empty();
}

bool Mark::wait_a_little() {
  if (reached) return true;
  const std::shared_ptr<Line> of = line.lock();
  if (!of) return true;
  of->progress();
  return reached;
}

cudaError_t not_captured(cudaStream_t stream) {
  if (!stream->capture) return cudaSuccess;
  stream->capture->broken = true;
  return remembered(cudaErrorStreamCaptureUnsupported);
}

void queue(cudaStream_t stream, const std::function<void()>& work) {
  const auto as_kernel = [work] {
    const Acting as(Side::kernel);
    work();
  };
  if (!stream) return as_kernel();
  if (!stream->capture) return stream->line->run(as_kernel);
  push(stream, [as_kernel] {
    return [as_kernel] {
      as_kernel();
      return true;
    };
  });
}

void push(cudaStream_t stream, const MakeTask& make) {
  if (stream->capture)
    stream->capture->lines[stream->number].push_back({.make = make});
  else
    stream->line->push(make());
}

void finish(cudaStream_t stream) {
  while (!stream->line->progress()) std::this_thread::yield();
}

namespace {

// The stream waits for an event of the capture and thereby joins it.
cudaError_t join(cudaStream_t stream, const std::shared_ptr<Capture>& capture, size_t event) {
  if (stream->capture && stream->capture != capture) {
    capture->broken = true;
    return not_captured(stream);
  }
  if (!stream->capture) {
    stream->capture = capture;
    stream->number = capture->lines.size();
    capture->lines.emplace_back();
    capture->streams.push_back(stream);
  }
  capture->lines[stream->number].push_back({.kind = Node::Kind::wait, .event = event});
  return cudaSuccess;
}

}  // namespace
}  // namespace tessera::emulator

using namespace tessera::emulator;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream;
  cudaGetDevice(&(*stream)->gpu);
  (*stream)->line = std::make_shared<Line>((*stream)->gpu);
  const std::lock_guard lock(all_lines().mutex);
  all_lines().tidy();
  all_lines().lines.push_back((*stream)->line);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t refused = not_while_capturing(); refused != cudaSuccess) return refused;
  int gpu = 0;
  cudaGetDevice(&gpu);
  for (const std::shared_ptr<Line>& line : lines_now())
    while (line->gpu() == gpu && !line->progress()) std::this_thread::yield();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream->capture) {
    stream->capture->broken = true;
    std::replace(stream->capture->streams.begin(), stream->capture->streams.end(), stream, cudaStream_t{});
  }
  if (!stream->line->progress()) {
    const std::lock_guard lock(all_lines().mutex);
    all_lines().tidy();
    all_lines().without_stream.push_back(stream->line);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t refused = not_captured(stream); refused != cudaSuccess) return refused;
  return stream->line->progress() ? cudaSuccess : tessera::emulator::remembered(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t refused = not_captured(stream); refused != cudaSuccess) return refused;
  finish(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent;
  cudaGetDevice(&(*event)->gpu);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event->gpu != stream->gpu) return cudaErrorInvalidResourceHandle;
  std::shared_ptr<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    event->captured = stream->capture != nullptr;
    event->within = stream->capture;
    if (Capture* const capture = stream->capture.get()) {
      event->number = capture->events++;
      capture->lines[stream->number].push_back({.kind = Node::Kind::record, .event = event->number});
      return cudaSuccess;
    }
    mark = event->mark = std::make_shared<Mark>();
    mark->line = stream->line;
  }
  stream->line->push([mark] {
    mark->reached = true;
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::shared_ptr<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    if (event->captured) {
      const std::shared_ptr<Capture> within = event->within.lock();
      return within ? join(stream, within, event->number) : cudaErrorCapturedEvent;
    }
    mark = event->mark;
  }
  if (const cudaError_t refused = not_captured(stream); refused != cudaSuccess) return refused;
  if (mark) stream->line->push([mark] { return mark->wait_a_little(); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::shared_ptr<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    if (event->captured) return cudaErrorCapturedEvent;
    mark = event->mark;
  }
  while (mark && !mark->wait_a_little()) std::this_thread::yield();
  return cudaSuccess;
}
