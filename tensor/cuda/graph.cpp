// Capture, and the launch of what was captured.
#include "tensor/cuda/graph.h"

#include <string>

#include "tensor/cuda/context.h"

namespace tessera::cuda {
namespace {

using Captured = Handle<cudaGraph_t, cudaGraphDestroy>;

// Ends a capture that an exception has left.
class Capture {
 public:
  explicit Capture(Context& context) : context_(context) { context_.begin_capture(); }
  ~Capture() {
    cudaGraph_t unfinished = nullptr;
    context_.end_capture(unfinished);
    const Captured dropped(unfinished);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  Captured end() {
    cudaGraph_t graph = nullptr;
    if (const cudaError_t result = context_.end_capture(graph); result != cudaSuccess)
      throw Error(std::string("[graph] CUDA: ") + cudaGetErrorString(result) + ", found after '" + context_.last_op() +
                      "' was captured: some work before it cannot be; `cuda_graph` off runs without a graph",
                  Status::communication);
    return Captured(graph);
  }

 private:
  Context& context_;
};

}  // namespace

Graph::Graph(ArenaPtr arena, const std::function<void()>& f) : arena_(std::move(arena)), layout_(arena_->layout()) {
  Captured graph;
  {
    const Arena::Fixed fixed(*arena_);
    Capture capture(arena_->local<Context>());
    f();
    graph = capture.end();
  }
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, graph.get(), 0), "graph");
  executable_ =
      std::shared_ptr<void>(executable, [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); });
}

int64_t synchronizations(Arena& arena) { return arena.local<Context>().synchronizations(); }

void Graph::launch() const {
  const Arena::Lent lent(*arena_);
  Context& c = arena_->local<Context>();
  c.queued("captured step", cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_.get()), c.stream()));
}

}  // namespace tessera::cuda
