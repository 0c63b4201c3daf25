// One line for each thing that is not built.
#include "train/check_experts.h"

#include <fmt/format.h>

#include <utility>

#include "tensor/field_error.h"
#include "train/names.h"

namespace tessera {
namespace {

template <class... Args>
[[noreturn]] void refuse(const char* field, fmt::format_string<Args...> words, Args&&... args) {
  throw FieldError(field, fmt::format(words, std::forward<Args>(args)...));
}

}  // namespace

void check_experts(const Plan& p, const ModelConfig& m) {
  const int64_t experts = m.experts.count;
  if (experts == 0 && p.ep > 1)
    refuse("ep", "a model without experts has none to share out; expected 1, found {}", p.ep);
  if (experts == 0 || p.ep == 1) return;
  if (const int64_t data = p.dp * p.cp; data % p.ep != 0)
    refuse("ep", "it is cut out of the {} data ranks, which {} does not divide; the nearest that does: {}", data, p.ep,
           divisors_near(data, p.ep));
  if (experts % p.ep != 0)
    refuse("ep", "{} ranks do not divide the {} experts; the nearest that does: {}", p.ep, experts,
           divisors_near(experts, p.ep));
  if (p.shard_ranks % p.ep != 0)
    refuse("shard_ranks",
           "each group has all experts, which {} ranks of `ep` share out; expected a multiple of {}, found {}", p.ep,
           p.ep, p.shard_ranks);
  if (p.dp_mode != DataMode::ddp) refuse("ep", "goes with `dp_mode` ddp, found {}", text_of(p.dp_mode));
  if (p.all_reduce == Algorithm::ring)
    refuse("all_reduce",
           "a ring adds in an order of places, which differ between ranks beside `ep`; expected direct, tree or root");
}

}  // namespace tessera
