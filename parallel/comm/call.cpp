// Names of communications.
#include "parallel/comm/call.h"

#include <fmt/format.h>

#include <array>

namespace tessera {

std::string_view name_of(Op op) {
  constexpr std::array<std::string_view, kOps> names = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                        "reduce",     "gather",         "scatter",    "all_to_all",
                                                        "send",       "recv",           "barrier"};
  return names.at(static_cast<size_t>(op));
}

std::string describe(const Call& call) {
  std::string text(name_of(call.op));
  if (call.op == Op::barrier) return text;
  text += " of " + std::to_string(call.bytes()) + " bytes (" + std::string(name_of(call.dtype));
  if (call.reduction == Reduction::max) text += ", max";
  if (call.op == Op::broadcast || call.op == Op::reduce || call.op == Op::gather || call.op == Op::scatter)
    text += ", root " + std::to_string(call.root);
  if (call.pieces) text += ", uneven pieces";
  if (call.gpu) text += ", on a GPU";
  return text + ")";
}

std::string seconds_text(double seconds) { return fmt::format("{:.3g} s", seconds); }

}  // namespace tessera
