// End of captures, and graph launches.
#include <algorithm>

#include "tests/cuda_emulator/streams.h"

using namespace tessera::emulator;

struct EmulatedGraph {
  std::shared_ptr<const Lines> lines;
  size_t events;
};
struct EmulatedExecutable : EmulatedGraph {};

namespace {

thread_local std::weak_ptr<Capture> capture_of_thread;  // the capture that this thread began

// Whether all work of the other lines is joined, directly or indirectly, before the end of the first line.
bool all_lines_joined(const Lines& lines) {
  std::vector<size_t> joined(lines.size(), 0);  // number of nodes of each line that precede the end
  const auto reach = [&](size_t line, size_t nodes) { joined[line] = std::max(joined[line], nodes); };
  const auto recorded = [&](size_t event) {
    for (size_t l = 0; l < lines.size(); ++l)
      for (size_t n = 0; n < lines[l].size(); ++n)
        if (lines[l][n].kind == Node::Kind::record && lines[l][n].event == event) reach(l, n);
  };
  reach(0, lines[0].size());
  for (std::vector<size_t> before; before != joined;) {
    before = joined;
    for (size_t l = 0; l < lines.size(); ++l)
      for (size_t n = 0; n < joined[l]; ++n)
        if (lines[l][n].kind == Node::Kind::wait) recorded(lines[l][n].event);
  }
  for (size_t l = 1; l < lines.size(); ++l)
    for (size_t n = joined[l]; n < lines[l].size(); ++n)
      if (lines[l][n].kind == Node::Kind::work) return false;
  return true;
}

// One launch of a graph.
class Run {
 public:
  explicit Run(const EmulatedGraph& graph)
      : lines_(graph.lines), next_(lines_->size(), 0), current_(lines_->size()), reached_(graph.events, false) {}

  // Runs the first line as far as possible; the other lines run as late as possible.
  bool progress() {
    const auto other = [&] {
      for (size_t l = 1; l < lines_->size(); ++l)
        if (step(l)) return true;
      return false;
    };
    do {
      while (step(0)) {
      }
    } while (other());
    for (size_t l = 0; l < lines_->size(); ++l)
      if (next_[l] < (*lines_)[l].size()) return false;
    return true;
  }

 private:
  // Runs the next node of a line; false if there is none or it is blocked.
  bool step(size_t l) {
    if (next_[l] == (*lines_)[l].size()) return false;
    const Node& node = (*lines_)[l][next_[l]];
    if (node.kind == Node::Kind::record) reached_[node.event] = true;
    if (node.kind == Node::Kind::wait && !reached_[node.event]) return false;
    if (node.kind == Node::Kind::work) {
      if (!current_[l]) current_[l] = node.make();
      if (!current_[l]()) return false;
      current_[l] = nullptr;
    }
    ++next_[l];
    return true;
  }

  std::shared_ptr<const Lines> lines_;
  std::vector<size_t> next_;
  std::vector<Task> current_;
  std::vector<bool> reached_;
};

}  // namespace

cudaError_t tessera::emulator::not_while_capturing() {
  const std::shared_ptr<Capture> capture = capture_of_thread.lock();
  if (!capture) return cudaSuccess;
  capture->broken = true;
  return remembered(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (const cudaError_t twice = not_captured(stream); twice != cudaSuccess) return twice;
  capture_of_thread = stream->capture = std::make_shared<Capture>();
  stream->capture->lines.emplace_back();
  stream->capture->streams.push_back(stream);
  stream->number = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture || stream->number != 0) return cudaErrorInvalidValue;
  capture_of_thread.reset();
  for (const cudaStream_t each : capture->streams)
    if (each) each->capture = nullptr;
  if (capture->broken) return tessera::emulator::remembered(cudaErrorStreamCaptureInvalidated);
  if (!all_lines_joined(capture->lines)) return tessera::emulator::remembered(cudaErrorStreamCaptureUnjoined);
  *graph = new EmulatedGraph{std::make_shared<const Lines>(std::move(capture->lines)), capture->events};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new EmulatedExecutable{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (const cudaError_t inside = not_captured(stream); inside != cudaSuccess) return inside;
  const auto run = std::make_shared<Run>(*executable);
  stream->line->push([run] { return run->progress(); });
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
