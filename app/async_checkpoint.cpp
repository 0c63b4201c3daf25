// What an asynchronous run saves and picks up again: parameters and optimizer state as whole tensors, like any run;
// the order of all pushes; and of a replay, whose workers are at different steps, what they have pulled for their next.
#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "app/async_run.h"
#include "data/files.h"
#include "data/safetensors.h"
#include "tensor/error.h"
#include "train/check_state.h"
#include "train/saved_tensors.h"

namespace tessera {
namespace {

constexpr const char* kHeld = "pulled";

}  // namespace

void AsyncRun::save() {
  const std::vector<NamedTensor> values = trainer_.values(), state = trainer_.state(), pulled = trainer_.pulled();
  const std::optional<PushLog> order = trainer_.server().order();
  if (!output_) return;
  const int64_t updates = trainer_.server().optimizer()->steps();
  for (const auto& tensors : {values, state})
    for (const NamedTensor& t : tensors) check_finite(t.name, t.tensor, step_);
  const std::unique_ptr<NewCheckpoint> made = run_.directory.begin_checkpoint(step_, o_, run_.dataset);
  write_tensors(values, made->path() / "model.safetensors", {});
  write_tensors(state, made->path() / "optimizer.safetensors", {{"steps", std::to_string(updates)}});
  if (order) write_file(made->path() / "pushes.txt", text_of(*order));
  if (!pulled.empty()) write_tensors(pulled, made->path() / "pulled.safetensors", {});
  const SavedRun saved{
      .steps = step_, .updates = updates, .ranks = world_.size(), .strategy = "ps-async", .losses = losses_};
  made->finish(about(saved, trainer_.model().config, o_, run_.dataset), static_cast<size_t>(o_.keep));
}

bool AsyncRun::resume(std::vector<std::string>& passed_over) {
  const auto from = run_.directory.saved(trainer_.model().config, o_, run_.dataset, passed_over);
  if (!from) return false;
  AsyncServer& server = trainer_.server();
  Communicator& axis = trainer_.axis();
  const std::optional<PushLog> order = saved_order(from->path, axis.size(), static_cast<int>(o_.servers));
  server.go_on(from->steps, order);
  if (server.optimizer()) {
    const SavedTensors model(from->path, kModel), state(from->path, kOptimizer);
    trainer_.read(model.tensors(), state.tensors(), from->updates);
  }
  if (server.holds(axis.rank())) {
    if (!SavedTensors::are_in(from->path, kHeld))
      throw Error(
          fmt::format("--replay: in {} worker {} has pulled parameters that {} does not hold; expected the record that "
                      "was replayed when it was saved",
                      o_.replay.value_or(""), axis.rank(), from->path.string()));
    trainer_.read_pulled(SavedTensors(from->path, kHeld).tensors());
  }
  step_ = shown_ = from->steps;
  if (!order) return true;
  pushes_ = std::ssize(order->servers[0]) - step_ * order->workers;
  losses_ = from->losses;
  return true;
}

}  // namespace tessera
