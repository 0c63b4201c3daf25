// From numbers to codes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/quantize/gptq.h"
#include "tensor/ops/quantize/sections.h"

namespace tessera {
namespace {

constexpr int64_t kAtOnce = 1 << 18;  // elements: a multiple of a block
constexpr int kLevels = 16;

// Of ascending values, the place of the one nearest to x: the number of middles between neighbours that it is above.
uint8_t nearest(std::span<const float> values, float x) {
  const auto above = std::ranges::lower_bound(values, x);
  const auto i = static_cast<size_t>(above - values.begin());
  if (i == 0 || i == values.size()) return static_cast<uint8_t>(i == 0 ? 0 : i - 1);
  return static_cast<uint8_t>(x > (values[i - 1] + values[i]) / 2 ? i : i - 1);
}

void put_codes(std::byte* to, std::span<const uint8_t> codes) {
  for (size_t i = 0; i < codes.size(); i += 2)
    to[i / 2] = static_cast<std::byte>(codes[i] | (i + 1 < codes.size() ? codes[i + 1] << 4 : 0));
}

float largest(std::span<const float> x) {
  float most = 0;
  for (const float v : x) most = std::max(most, std::abs(v));
  return most;
}

// The codes of a block, and its scale.
float encode_nf4(std::span<const float> x, std::byte* to) {
  static const std::array<float, kLevels - 1> middles = [] {
    std::array<float, kLevels - 1> out{};
    for (size_t i = 0; i < out.size(); ++i) out.at(i) = (nf4_values()[i] + nf4_values()[i + 1]) / 2;
    return out;
  }();
  const float scale = largest(x);
  std::array<uint8_t, 64> codes{};
  for (size_t i = 0; i < x.size(); ++i) {
    const float share = scale > 0 ? x[i] / scale : 0;
    int code = 0;
    for (const float middle : middles) code += share > middle ? 1 : 0;
    codes.at(i) = static_cast<uint8_t>(code);
  }
  put_codes(to, codes);
  return scale;
}

// Scales of the blocks of one piece, in 8 bits each.
void encode_scales(std::span<const float> scales, float* groups, float* mean, std::byte* to) {
  double sum = 0;
  for (const float s : scales) sum += s;
  *mean = static_cast<float>(sum / static_cast<double>(scales.size()));
  for (size_t begin = 0; begin < scales.size(); begin += kScalesOfGroup) {
    const auto group = scales.subspan(begin, std::min<size_t>(kScalesOfGroup, scales.size() - begin));
    float most = 0;
    for (const float s : group) most = std::max(most, std::abs(s - *mean));
    *groups++ = most;
    for (const float s : group)
      *to++ = static_cast<std::byte>(nearest(dynamic_values(), most > 0 ? (s - *mean) / most : 0));
  }
}

// Without GPTQ's algorithm, which wants to see inputs.
std::vector<std::byte> rounded_to_nearest(const Packing& p, const FloatSource& source) {
  const Tensor weight = Tensor::empty({p.rows, p.columns}, DType::float32, make_arena());
  source(0, {weight.data<float>(), static_cast<size_t>(p.elements())});
  return round_to_nearest(weight, p.group).packed();
}

}  // namespace

std::vector<std::byte> quantize(const Packing& p, const FloatSource& source) {
  if (p.codec == Codec::gptq) return rounded_to_nearest(p, source);
  std::vector<std::byte> out(static_cast<size_t>(p.bytes()), std::byte{0});
  const Sections at(p, p.elements());
  const int64_t block = p.block();
  std::vector<float> chunk, scales(static_cast<size_t>((p.elements() + block - 1) / block));
  for (int64_t begin = 0; begin < p.elements(); begin += kAtOnce) {
    chunk.resize(static_cast<size_t>(std::min(kAtOnce, p.elements() - begin)));
    source(begin, chunk);
    for (size_t i = 0; i < chunk.size(); ++i)
      if (!(std::abs(chunk[i]) <= std::numeric_limits<float>::max()))
        throw Error("[quantize] element " + std::to_string(begin + static_cast<int64_t>(i)) + " is no finite number");
    const auto blocks = (std::ssize(chunk) + block - 1) / block;
    cpu::split(blocks, 64, [&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        const auto first = static_cast<size_t>(b * block);
        const std::span<const float> x = std::span(chunk).subspan(first, std::min<size_t>(block, chunk.size() - first));
        const int64_t whole = begin / block + b;
        scales[static_cast<size_t>(whole)] = encode_nf4(x, out.data() + at.codes + whole * block / 2);
      }
    });
  }
  const PieceBounds pieces(p);
  std::vector<float> groups(static_cast<size_t>(pieces.groups)), means(p.pieces.size());
  for (size_t i = 0; i < p.pieces.size(); ++i) {
    const int64_t first = pieces.first_blocks[i],
                  end = i + 1 < p.pieces.size() ? pieces.first_blocks[i + 1] : std::ssize(scales);
    encode_scales(std::span(scales).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first)),
                  groups.data() + pieces.first_groups[i], &means[i], out.data() + at.scales + first);
  }
  std::memcpy(out.data(), groups.data(), 4 * groups.size());
  std::memcpy(out.data() + 4 * groups.size(), means.data(), 4 * means.size());
  return out;
}

}  // namespace tessera
