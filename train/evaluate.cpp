// Validation and generation.
#include "train/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/placement.h"
#include "train/batches.h"

namespace tessera {

// In the last round a group without windows computes unused results, because a forward pass may require every rank.
std::optional<double> mean_loss(const Evaluation& e, Communicator& world, const Rows& split) {
  const NoGrad no_grad;
  constexpr double kInvalid = -std::numeric_limits<double>::infinity();  // sum of a rank with an invalid token
  std::optional<int32_t> invalid;
  const auto check = [&](const Tensor& tokens, int32_t allowed) {
    for (int32_t& id : std::span(tokens.data<int32_t>(), static_cast<size_t>(tokens.numel())))
      if ((id < 0 || id >= e.vocab) && id != allowed) invalid = std::exchange(id, 0);
  };
  double sum = 0;
  for (int64_t round = 0; round < split.count(); round += e.at_once * e.turns) {
    const int64_t first = std::min(round + e.at_once * e.turn, split.count());
    const int64_t found = std::min(e.at_once, split.count() - first);
    std::vector<int64_t> lengths;
    for (int64_t r = 0; split.is_padded() && r < std::max<int64_t>(found, 1); ++r)
      lengths.push_back(r < found ? split.length(first + r) : 1);
    const Shape shape{std::max<int64_t>(found, 1), split.context()};
    const ArenaPtr host = e.arena->host();
    Tensor ids = Tensor::zeros(shape, DType::int32, host), targets = Tensor::empty(shape, DType::int32, host);
    targets.fill(Rows::kIgnored);
    if (found > 0) split.load(first, found, ids.data<int32_t>(), targets.data<int32_t>());
    check(ids, 0);
    check(targets, Rows::kIgnored);
    const double state = e.stop ? world.max(invalid ? 2 : e.stop() ? 1 : 0) : 0;
    if (state == 1) return std::nullopt;
    if (state == 2) break;
    Tensor starts;
    if (split.has_starts()) {
      starts = Tensor::zeros(shape, DType::int32, host);
      if (found > 0) split.starts(first, found, starts.data<int32_t>());
    }
    const int64_t tokens = padded_tokens(*e.job, lengths);
    const auto some = [&](const Tensor& all) { return all.narrow(1, 0, tokens).contiguous(); };
    sum += e.forward(some(ids), some(targets), padded_starts(starts, lengths, tokens, host));
  }
  const double loss = world.sum(invalid ? kInvalid : sum) / static_cast<double>(split.targets());
  if (loss == kInvalid)
    reject("mean_loss", fmt::format("tokens of the vocabulary, 0 to {}", e.vocab - 1),
           fmt::format("{}", world.max(invalid.value_or(std::numeric_limits<int32_t>::min()))));
  if (!std::isfinite(loss))
    throw Error(fmt::format("the validation loss is {}; expected a finite number", number_text(loss)),
                Status::not_finite);
  return loss;
}

struct Generator::Writing {
  size_t prompt;
  DecodingState text;
  bool is_read = false, ended = false;
  int32_t last = 0;
};

Generator::Generator(TrainState& train) : train_(train) {
  if (train.job.plan.cp > 1)
    throw FieldError("cp", "generation processes single tokens, which cannot be sharded; expected 1, got " +
                               std::to_string(train.job.plan.cp));
}

bool Generator::own(size_t prompt) const {
  Mesh& mesh = train_.groups.mesh;
  return static_cast<int>(prompt % static_cast<size_t>(mesh.size("dp"))) == mesh.coordinate("dp");
}

// Next-token logits of texts with the same number of pending tokens (not yet in the KV cache); undefined except on
// ranks of the last stage.
Tensor Generator::pass(const std::vector<Writing*>& texts) {
  LanguageModel& model = train_.model();
  Communicator &pp = train_.groups.mesh["pp"], &tp = train_.groups.mesh["tp"];
  const Schedule& schedule = train_.part().runtime().schedule();
  std::vector<int32_t> tokens;
  std::vector<TextCache*> caches;
  for (Writing* w : texts) {
    const std::span<const int32_t> unread = w->text.unread();
    tokens.insert(tokens.end(), unread.begin(), unread.end());
    caches.push_back(&w->text.cache());
  }
  const int64_t rows = std::ssize(texts), each = std::ssize(tokens) / rows;
  const ArenaPtr& arena = train_.arena;
  model.set_step(model.decode_step(each, caches, arena));
  Tensor x;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != pp.rank()) continue;
    if (stage == 0) {
      x = model.decode_first(Tensor::of<int32_t>(tokens, {rows, each}, arena), caches);
    } else if (schedule.crosses(stage - 1)) {
      x = Tensor::empty({rows, each, model.config.channels}, train_.job.optim.dtype, arena, Category::activations);
      pp.recv(x, schedule.rank_of_stage[static_cast<size_t>(stage) - 1], stage);
    }
    const Range layers = train_.part().layers()[static_cast<size_t>(stage)];
    for (int64_t i = layers.begin; i < layers.end; ++i) x = model.decode_layer(i, x, caches);
    if (stage + 1 < schedule.stages && schedule.crosses(stage))
      pp.send(x, schedule.rank_of_stage[static_cast<size_t>(stage) + 1], stage + 1);
  }
  model.set_step({});
  if (schedule.rank_of_stage.back() != pp.rank()) return {};
  return redistribute(model.decode_last(x), tp, S(1, model.config.vocab), R);
}

void Generator::advance(const std::vector<Writing*>& texts, const SampleOptions& options) {
  Communicator& pp = train_.groups.mesh["pp"];
  const Tensor logits = pass(texts);
  const Tensor sampled = Tensor::zeros({std::ssize(texts)}, DType::int32, train_.arena->host());
  int32_t* const next = sampled.data<int32_t>();
  for (size_t i = 0; logits.defined() && i < texts.size(); ++i)
    next[i] = texts[i]->text.grow(logits.select(0, static_cast<int64_t>(i)), options);
  if (pp.size() > 1) pp.broadcast(sampled, train_.part().runtime().schedule().rank_of_stage.back());
  for (size_t i = 0; i < texts.size(); ++i) {
    if (!logits.defined()) texts[i]->text.grow(next[i]);
    texts[i]->last = next[i];
    texts[i]->is_read = true;
  }
}

// Every rank runs as many passes as the busiest one, because ZeRO-3 gathers weights from all ranks.
void Generator::write(const std::vector<std::vector<int32_t>>& prompts, int64_t tokens, const SampleOptions& options,
                      const std::function<bool(size_t, int32_t)>& on_token) {
  const NoGrad no_grad;
  const LanguageModel& model = train_.model();
  const bool together = train_.job.plan.zero == ZeroStage::three;
  std::vector<Writing> texts;
  for (size_t p = 0; p < prompts.size(); ++p)
    if (own(p)) texts.push_back({p, DecodingState(model, prompts[p], tokens, p)});
  const auto tell = [&](const std::vector<Writing*>& grown) {
    for (Writing* w : grown) w->ended = !on_token(w->prompt, w->last) || w->text.written() >= tokens;
  };
  for (;;) {
    std::vector<Writing*> now;  // the next prompt, or all texts that continue
    for (Writing& w : texts)
      if (!w.ended && !w.is_read && now.empty()) now.push_back(&w);
    for (Writing& w : texts)
      if (!w.ended && w.is_read && (now.empty() || now.front()->is_read)) now.push_back(&w);
    // If a text fills the context, half of it is reread in a separate pass.
    const auto long_one = std::ranges::find_if(now, [](Writing* w) { return w->text.unread().size() > 1; });
    if (long_one != now.end()) now = {*long_one};
    const bool more = train_.groups.world.size() > 1 ? train_.groups.world.max(now.empty() ? 0 : 1) > 0 : !now.empty();
    if (!more) return;
    if (!now.empty()) {
      advance(now, options);
      tell(now);
    } else if (together) {
      Writing idle{0, DecodingState(model, {0}, 1)};
      pass({&idle});
    }
  }
}

}  // namespace tessera
