// What an asynchronous run saves and picks up again: parameters and optimizer state as whole tensors, like any run;
// the order of all pushes; and of a replay, whose workers are at different steps, what they have pulled for their next.
#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "app/async_run.h"
#include "app/whole_state.h"
#include "data/files.h"
#include "data/safetensors.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kHeld = "pulled.safetensors";

std::string of_worker(int worker) { return fmt::format("worker.{}.", worker); }

}  // namespace

std::vector<std::string> AsyncRun::state_kinds() const {
  std::vector<std::string> kinds = {"m", "v"};
  if (o_.optimizer == "sgd") kinds.assign(o_.momentum != 0 ? 1 : 0, "momentum");
  if (o_.dtype == "bf16") kinds.emplace_back("master");
  return kinds;
}

// Whole tensors, on rank 0, of what each server has a part of.
void AsyncRun::gather(const std::string& suffix, const std::function<Tensor(size_t unit)>& shard,
                      std::vector<NamedTensor>& out) {
  const std::vector<Module::Unit> layout = model_.layout();
  for (size_t u = 0; u < layout.size(); ++u) {
    Tensor whole = server_.gather(u, server_.optimizer() ? shard(u) : Tensor());
    if (world_.rank() != 0) continue;
    whole = whole.on_host();
    for (const Slot& slot : layout[u].slots)
      out.push_back({slot.name + suffix, whole.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape)});
  }
}

// What workers have pulled, of all of them on rank 0.
std::vector<NamedTensor> AsyncRun::held() {
  const std::vector<FlatUnit>& units = server_.units();
  std::vector<NamedTensor> out;
  for (int w = 0; w < axis_->size(); ++w)
    for (size_t u = 0; server_.holds(w) && u < units.size(); ++u) {
      Tensor whole = server_.gather_held(u, w);
      if (world_.rank() != 0) continue;
      whole = whole.on_host();
      for (const Slot& slot : units[u].slots)
        out.push_back({of_worker(w) + slot.name, whole.narrow(0, slot.begin, slot.shape.numel()).reshape(slot.shape)});
    }
  return out;
}

void AsyncRun::save() {
  RunDirectory::Whole whole{.steps = step_, .ranks = world_.size(), .strategy = "ps-async", .losses = losses_};
  gather(
      "", [&](size_t u) { return server_.shards()[u].values; }, whole.values);
  for (const std::string& kind : state_kinds())
    gather(
        "." + kind,
        [&](size_t u) {
          for (const NamedTensor& t : server_.optimizer()->state())
            if (t.name == server_.shards()[u].name + "." + kind) return t.tensor;
          return Tensor();
        },
        whole.state);
  const std::vector<NamedTensor> pulled = held();
  const std::optional<PushLog> order = server_.order();
  if (!output_) return;
  whole.updates = server_.optimizer()->steps();
  if (order)
    whole.more.push_back({"pushes.txt", [&](const std::filesystem::path& file) { write_file(file, text_of(*order)); }});
  if (!pulled.empty())
    whole.more.push_back({kHeld, [&](const std::filesystem::path& file) { write_tensors(pulled, file, {}); }});
  run_.directory.save(whole, model_.config, o_, run_.dataset);
}

void AsyncRun::resume(std::vector<std::string>& passed_over) {
  const auto from = run_.directory.saved(model_.config, o_, run_.dataset, passed_over);
  if (!from) return;
  const std::optional<PushLog> order = saved_order(from->path, axis_->size(), static_cast<int>(o_.servers));
  server_.go_on(from->steps, order);
  if (Optimizer* const optimizer = server_.optimizer()) {
    const Safetensors model(from->path / "model.safetensors"), state(from->path / "optimizer.safetensors");
    read_values(server_.shards(), tensors_of(model));
    read_state(*optimizer, tensors_of(state));
    optimizer->set_steps(from->updates);
  }
  if (server_.holds(axis_->rank())) {
    std::error_code error;
    if (!std::filesystem::exists(from->path / kHeld, error))
      throw Error(
          fmt::format("--replay: in {} worker {} has pulled parameters that {} does not hold; expected the record that "
                      "was replayed when it was saved",
                      o_.replay.value_or(""), axis_->rank(), from->path.string()));
    const Safetensors pulled(from->path / kHeld);
    const WholeTensors all = tensors_of(pulled);
    read_values(server_.units(), [&](const std::string& name, DType dtype, const Shape& shape) {
      return all(of_worker(axis_->rank()) + name, dtype, shape);
    });
  }
  step_ = shown_ = from->steps;
  if (!order) return;
  pushes_ = static_cast<int64_t>(order->servers[0].size()) - step_ * order->workers;
  losses_ = from->losses;
}

}  // namespace tessera
