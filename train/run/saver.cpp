// Writing of shared checkpoint files, in the background.
#include "train/run/saver.h"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <tuple>

#include "data/safetensors.h"
#include "models/language_model.h"

namespace tessera {
namespace {

bool is_ready(const std::future<void>& f) { return f.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

SafetensorsLayout tensor_layout(const std::vector<FullTensor>& tensors,
                                const std::map<std::string, std::string>& about) {
  std::vector<TensorBytes> listed;
  for (const FullTensor& t : tensors) listed.push_back({t.name, t.dtype, {t.shape.begin(), t.shape.end()}, {}});
  return safetensors_layout(listed, about);
}

}  // namespace

Saver::~Saver() {
  for (std::future<void>* f : {&writing_, &finishing_})
    if (f->valid()) f->wait();
}

void Saver::begin() {
  if (!saves_in_background(run_.config)) return save();
  open(true);
  writing_ = std::async(std::launch::async, [this] { write(); });
}

void Saver::poll() {
  if (finishing_.valid() && is_ready(finishing_)) made();
  if (!pending_) return;
  if (writing_.valid() && is_ready(writing_)) writing_.get();
  Communicator& world = train_.groups.world;
  const OpCounts before = world.counts();
  const bool all = world.max(writing_.valid() ? 1 : 0) == 0;
  world.reset_counts(before);
  if (all) all_written();
}

void Saver::finish() {
  if (pending_) {
    if (writing_.valid()) writing_.get();
    Communicator& world = train_.groups.world;
    const OpCounts before = world.counts();
    world.barrier();
    world.reset_counts(before);
    all_written();
  }
  if (finishing_.valid()) made();
}

void Saver::save() {
  if (is_off()) return;
  open(false);
  write();
  finish();
}

void Saver::validated(double loss) {
  if (train_.groups.world.rank() > 0 || is_off()) return;
  judged_ = {train_.steps_done(), loss};
  name_best();
}

void Saver::open(bool copied) {
  finish();
  Communicator& world = train_.groups.world;
  const bool first = world.rank() == 0;
  const std::vector<TensorSlice> values = own_values(train_), state = own_state(train_);
  for (const auto& parts : {values, state})
    for (const TensorSlice& h : parts) check_finite(h.name, h.part, train_.steps_done());
  check_replicas(train_);
  const OpCounts before = world.counts();
  if (first) {
    new_ = run_.directory.begin_checkpoint(train_.steps_done(), run_.toml(), run_.dataset);
    about_ = about({.steps = train_.steps_done(),
                    .updates = train_.optimizer().steps(),
                    .ranks = world.size(),
                    .strategy = train_.strategy().name()},
                   train_.full_model().config, run_.config, run_.dataset);
  }
  const auto layouts = {
      std::tuple("model.safetensors", tensor_layout(list_values(train_), {}), &values),
      std::tuple("optimizer.safetensors",
                 tensor_layout(list_state(train_), {{"steps", std::to_string(train_.optimizer().steps())}}), &state)};
  if (first)
    for (const auto& [name, layout, parts] : layouts)
      SharedFile::create(new_->path() / name, layout.header, layout.size);
  const std::filesystem::path path = broadcast_text(world, first ? new_->path().string() : "", 0);
  world.reset_counts(before);
  for (const auto& [name, layout, parts] : layouts) {
    files_.push_back({SharedFile(path / name), layout.begins, *parts});
    if (copied)
      for (TensorSlice& h : files_.back().parts)
        h.part = h.part.device() == Device::cpu ? h.part.clone() : h.part.on_host();
  }
  pending_ = true;
}

void Saver::write() const {
  for (const File& f : files_) {
    for (const TensorSlice& h : f.parts) {
      const Tensor here = h.part.on_host();
      const int64_t element = element_size(here.dtype()), begin = f.begins.at(h.name);
      for_each_run(*h.parameter, h.begin, h.begin + here.numel(), [&](int64_t local, int64_t offset, int64_t count) {
        f.file.write(begin + offset * element,
                     {here.raw() + (local - h.begin) * element, static_cast<size_t>(count * element)});
      });
    }
    f.file.flush();
  }
}

void Saver::all_written() {
  pending_ = false;
  files_.clear();
  if (!new_) return;
  finishing_ =
      std::async(std::launch::async, [this] { new_->finish(about_, static_cast<size_t>(run_.config.run.keep)); });
}

void Saver::made() {
  finishing_.get();
  saved_ = new_->step();
  new_.reset();
  name_best();
}

void Saver::name_best() {
  if (saved_ != judged_.step) return;
  const std::filesystem::path directory = run_.directory.checkpoints();
  const std::optional<BestCheckpoint> best = best_checkpoint(directory);
  if (!best || judged_.val_loss < best->val_loss) write_best(directory, judged_);
}

}  // namespace tessera
