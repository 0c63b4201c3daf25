// Modes of the data axis, groups of shards, ranks that train alone, and optimizers that need whole matrices.
#include "train/check_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "data/files.h"
#include "settings/setting.h"
#include "tensor/error.h"
#include "train/names.h"

namespace tessera {

namespace {

void check_diloco(const Plan& p) {
  if (p.dp_mode != DataMode::diloco) return;
  if (p.sync_fragments > p.sync_every)
    throw FieldError("sync_fragments",
                     fmt::format("each fragment makes its outer steps in other steps, of which there are {} "
                                 "(`sync_every`); expected at most {}, found {}",
                                 p.sync_every, p.sync_every, p.sync_fragments));
  if (p.zero != ZeroStage::none)
    throw FieldError(
        "zero",
        fmt::format("ranks of `dp_mode` diloco have nothing to share out between two sums; expected 0, found {}",
                    static_cast<int>(p.zero)));
  const bool in_any_order = p.all_reduce == Algorithm::ring || p.all_reduce == Algorithm::native;
  if (in_any_order && (p.pp > 1 || p.tie_copies || p.tp > 1))
    throw FieldError("all_reduce",
                     fmt::format("{} may add what pipeline ranks or tensor ranks have copies of in several orders, and "
                                 "in `dp_mode` diloco nothing makes them equal again; expected direct, tree or root{}",
                                 p.all_reduce == Algorithm::ring ? "a ring" : "a library",
                                 uses_nccl(p) ? ", and `backend` threads or mpi" : ""));
  if (!(p.outer_lr > 0) || !std::isfinite(p.outer_lr))
    throw FieldError("outer_lr", fmt::format("expected a number above 0, found {}", p.outer_lr));
  if (!(p.outer_momentum >= 0 && p.outer_momentum < 1))
    throw FieldError("outer_momentum", fmt::format("expected a number in [0, 1), found {}", p.outer_momentum));
}

void check_offload(const Plan& p) {
  if (p.offload != Offload::parameters) return;
  if (p.zero != ZeroStage::three)
    throw FieldError("offload",
                     fmt::format("parameters moves the shards of `zero` 3; expected `zero` 3 beside it, found {}",
                                 static_cast<int>(p.zero)));
  if (p.device == Device::cpu)
    throw FieldError(
        "offload",
        "parameters moves them to the host's memory. With `device` cpu they lie there already, and a mapped "
        "file would save nothing, since every pass reads them; expected `device` cuda beside it, found cpu");
}

void check_muon(const Job& s) {
  if (s.optim.optimizer != OptimizerKind::muon) return;
  const DataMode mode = s.plan.dp_mode;
  if (mode == DataMode::ps_sync || mode == DataMode::ps_async)
    throw FieldError(
        "optimizer",
        fmt::format("muon needs whole matrices, which the servers of {} have not; expected another, or `dp_mode` ddp",
                    text_of(mode)));
  if (s.model.lora.rank > 0)
    throw FieldError("optimizer", "muon is for matrices of layers, which are frozen beside adapters; expected adamw");
  if (s.optim.state_dtype == DType::bfloat16)
    throw FieldError("state_dtype", "muon keeps its momentum in fp32; expected fp32, found bf16");
}

void check_fragments(const Job& s) {
  if (s.plan.sync_fragments > s.model.layers)
    throw FieldError("sync_fragments",
                     fmt::format("a fragment has at least one of the {} layers; expected at most {}, found {}",
                                 s.model.layers, s.model.layers, s.plan.sync_fragments));
}

}  // namespace

void check_data(const Plan& p) {
  if (p.all_reduce == Algorithm::native && !uses_nccl(p) && p.backend != Backend::mpi)
    throw FieldError("all_reduce",
                     fmt::format("{} ranks have no library of their own; expected direct, ring, tree or root",
                                 p.backend == Backend::tcp ? "TCP" : "thread"));
  if (p.shard_ranks > 0 && p.zero == ZeroStage::none)
    throw FieldError("shard_ranks", "goes with `zero` 1, 2 or 3, found 0");
  if (p.shard_ranks > 0 && (p.dp * p.cp) % p.shard_ranks != 0)
    throw FieldError(
        "shard_ranks",
        fmt::format("groups of {} ranks do not divide the {} that share the batch; the nearest that do: {}",
                    p.shard_ranks, p.dp * p.cp, divisors_near(p.dp * p.cp, p.shard_ranks)));
  if (p.dp_mode == DataMode::ddp || p.dp_mode == DataMode::diloco) return;
  if (p.servers > p.dp)
    throw FieldError("servers", fmt::format("expected at most the {} ranks, found {}", p.dp, p.servers));
  const std::string_view mode = text_of(p.dp_mode);
  if (uses_nccl(p))
    throw FieldError("backend",
                     fmt::format("{} adds at one rank, in rank order, and nccl does not; expected threads or mpi "
                                 "beside `dp_mode` {}, found nccl",
                                 mode, mode));
  if (p.all_reduce != Algorithm::direct)
    throw FieldError("all_reduce", fmt::format("{} adds at one rank, in rank order; expected direct, found {}", mode,
                                               text_of(p.all_reduce)));
  if (p.zero != ZeroStage::none)
    throw FieldError("zero", fmt::format("{} goes with `dp_mode` ddp, found {}", static_cast<int>(p.zero), mode));
  if (p.ranks() > p.dp)
    throw FieldError("dp_mode",
                     fmt::format("{} is for data-parallel ranks alone; expected ddp beside `tp`, `pp` and `cp`", mode));
}

void check_modes(const Plan& p) {
  Plan given = p, usual;
  check_read(settings_of(given), settings_of(usual));  // settings that only one mode reads
  check_diloco(p);
  check_offload(p);
  if (p.dp_mode == DataMode::ps_async && p.tie_copies)
    throw FieldError("tie_copies", "ps-async has no steps in common; expected another `dp_mode`");
  if (p.dp_mode == DataMode::dataparallel && has_processes(p))
    throw FieldError("dp_mode", "dataparallel is one process by definition; expected ddp or ps-sync for several");
}

void check_updates(const Job& s) {
  check_muon(s);
  check_fragments(s);
}

// Hashes of what ranks hold, side by side.

namespace {

// Exponents of all ones are infinities and NaNs. The first loop has no exit, so it is made of vector instructions.
template <class Word>
int64_t first_with(std::span<const std::byte> elements, Word exponent) {
  constexpr int64_t kTogether = 1024;
  const int64_t count = std::ssize(elements) / static_cast<int64_t>(sizeof(Word));
  const auto is_none = [&](int64_t i) {
    Word word;  // an element of a file, where it may begin anywhere
    std::memcpy(&word, elements.data() + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    return (word & exponent) == exponent;
  };
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t end = std::min(begin + kTogether, count);
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= is_none(i);
    for (int64_t i = begin; any && i < end; ++i)
      if (is_none(i)) return i;
  }
  return -1;
}

// Returns a hash of a part's place, which several ranks may hold: which elements of which tensor.
uint64_t place_of(const HeldPart& h) {
  std::string text = h.name;
  const auto add = [&](int64_t n) { text.append(reinterpret_cast<const char*>(&n), sizeof n); };
  for_each_run(*h.parameter, h.begin, h.begin + h.part.numel(),
               [&](int64_t, int64_t whole, int64_t count) { add(whole), add(count); });
  return checksum(text);
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

// The ranks that hold each value: the most ranks first, of as many those with the lowest rank.
[[noreturn]] void refuse(const HeldPart& h, int64_t step, const std::map<int64_t, std::vector<int>>& by_value) {
  std::vector<std::vector<int>> groups;
  for (const auto& [value, ranks] : by_value) groups.push_back(ranks);
  std::ranges::sort(groups,
                    [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  std::vector<std::string> others;
  for (size_t g = 1; g < groups.size(); ++g) others.push_back(ranks_text(groups[g]));
  const bool majority = groups[0].size() > groups[1].size();
  throw Error(fmt::format("step {}: copies of {} differ between ranks: {}", step, h.name,
                          majority ? fmt::format("{} {} not hold what {} hold", fmt::join(others, " and "),
                                                 groups.size() == 2 && groups[1].size() == 1 ? "does" : "do",
                                                 ranks_text(groups[0]))
                                   : fmt::format("{} and {}", ranks_text(groups[0]), fmt::join(others, " and "))),
              Status::communication);
}

}  // namespace

int64_t first_not_finite(DType dtype, std::span<const std::byte> elements) {
  if (dtype == DType::float64) return first_with<uint64_t>(elements, 0x7ff0000000000000u);
  if (dtype == DType::float32) return first_with<uint32_t>(elements, 0x7f800000u);
  if (dtype == DType::bfloat16) return first_with<uint16_t>(elements, 0x7f80u);
  return -1;
}

void check_finite(const std::string& name, const Tensor& x, int64_t step) {
  const Tensor here = x.on_host();
  if (first_not_finite(here.dtype(), {here.raw(), static_cast<size_t>(here.nbytes())}) >= 0)
    throw Error(fmt::format("step {}: {} holds inf or nan after the update; expected finite numbers. Nothing of this "
                            "step is saved; a smaller `lr` may help",
                            step, name),
                Status::not_finite);
}

void check_replicas(Trainer& trainer) {
  Communicator& world = trainer.world();
  if (world.size() == 1) return;
  const OpCounts before = world.counts();
  const std::vector<HeldPart> held = held_between_steps(trainer);
  const auto most = static_cast<int64_t>(world.max(static_cast<double>(held.size())));
  std::vector<int64_t> mine;  // place and content of each part
  for (const HeldPart& h : held) {
    const Tensor here = h.part.on_host();
    mine.push_back(static_cast<int64_t>(place_of(h)));
    mine.push_back(static_cast<int64_t>(
        checksum({reinterpret_cast<const char*>(here.raw()), static_cast<size_t>(here.nbytes())})));
  }
  mine.resize(static_cast<size_t>(2 * most));
  const ArenaPtr host = trainer.arena()->host();
  const Tensor all = Tensor::empty({2 * most * world.size()}, DType::int64, host);
  world.all_gather(Tensor::of<int64_t>(mine, {2 * most}, host), all);
  world.reset_counts(before);
  std::map<int64_t, std::map<int64_t, std::vector<int>>> by_place;  // then by content: the ranks
  const int64_t* const found = all.data<int64_t>();
  for (int r = 0; r < world.size(); ++r)
    for (int64_t i = 0; i < most; ++i) {
      const int64_t* const part = found + 2 * (r * most + i);
      by_place[part[0]][part[1]].push_back(r);
    }
  for (size_t i = 0; i < held.size(); ++i)
    if (const auto& by_value = by_place.at(mine[2 * i]); by_value.size() > 1)
      refuse(held[i], trainer.steps_done(), by_value);
}

}  // namespace tessera
