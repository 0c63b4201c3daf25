// Sizes, cuts and the two tables of values.
#include <algorithm>
#include <array>
#include <string>

#include "tensor/ops/quantize/sections.h"

namespace tessera {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One sign: 2^i fractions between 0.1 and 1, of decade i of seven, at the middles of equal steps. Both signs of them, 0
// and 1 are 256.
std::array<float, 256> make_dynamic_values() {
  std::array<float, 256> out{};
  size_t at = 0;
  double decade = 1e-6;
  for (int i = 0; i < 7; ++i, decade *= 10) {
    const int count = 1 << i;
    for (int k = 0; k < count; ++k) {
      const double fraction = 0.1 + 0.9 * (k + 0.5) / count;
      for (const double sign : {-1.0, 1.0}) out.at(at++) = static_cast<float>(sign * decade * fraction);
    }
  }
  out.at(at++) = 0;
  out.at(at++) = 1;
  std::ranges::sort(out);
  return out;
}

}  // namespace

std::span<const float, 16> nf4_values() {
  static constexpr std::array<float, 16> values{
      -1.0F,         -0.696192801F, -0.525073051F, -0.394917488F, -0.284441382F, -0.184773430F, -0.0910500363F, 0.0F,
      0.0795802996F, 0.160930201F,  0.246112302F,  0.337915242F,  0.440709829F,  0.562617004F,  0.722956836F,   1.0F};
  return values;
}

std::span<const float, 256> dynamic_values() {
  static const std::array<float, 256> values = make_dynamic_values();
  return values;
}

PieceBounds::PieceBounds(const Packing& p) {
  int64_t rows = 0;
  for (const int64_t of_piece : p.pieces) {
    first_blocks.push_back(rows * p.columns / p.block());
    first_groups.push_back(groups);
    groups += ceil_div(ceil_div(of_piece * p.columns, p.block()), kScalesOfGroup);
    rows += of_piece;
  }
}

int64_t Packing::shared_bytes() const {
  return codec == Codec::nf4 ? 4 * (PieceBounds(*this).groups + std::ssize(pieces)) : 0;
}

int64_t Packing::bytes(int64_t elements) const {
  return shared_bytes() + ceil_div(elements, block()) * (block() / 2 + scale_bytes());
}

void check(const Packing& p, const std::string& name) {
  const auto refuse = [&](const std::string& what, int64_t found, int64_t by) {
    throw Error("[quantize] '" + name + "' has " + std::to_string(found) + " " + what + ", which " +
                std::to_string(by) + " does not divide");
  };
  for (const int64_t rows : p.pieces)
    if ((p.pieces.size() > 1 || p.codec == Codec::gptq) && rows * p.columns % p.block() != 0)
      refuse("elements that are quantised for themselves", rows * p.columns, p.block());
  if (p.codec == Codec::gptq && p.columns % p.group != 0) refuse("columns", p.columns, p.group);
}

int64_t splits_block(const Packing& p, std::span<const ElementRun> runs) {
  for (const ElementRun& run : runs)
    for (const int64_t bound : {run.whole, run.whole + run.count})
      if (bound % p.block() != 0 && bound != p.elements()) return bound;
  return 0;
}

void for_each_byte_run(const Packing& p, std::span<const ElementRun> runs,
                       const std::function<void(int64_t here, int64_t whole, int64_t count)>& f) {
  int64_t elements = 0;
  for (const ElementRun& run : runs) elements += run.count;
  const Sections here(p, elements), whole(p, p.elements());
  if (p.shared_bytes() > 0) f(0, 0, p.shared_bytes());
  for (const ElementRun& run : runs)
    f(here.codes + run.here / 2, whole.codes + run.whole / 2, ceil_div(run.count, p.block()) * p.block() / 2);
  for (const ElementRun& run : runs)
    f(here.scales + run.here / p.block() * p.scale_bytes(), whole.scales + run.whole / p.block() * p.scale_bytes(),
      ceil_div(run.count, p.block()) * p.scale_bytes());
}

}  // namespace tessera
