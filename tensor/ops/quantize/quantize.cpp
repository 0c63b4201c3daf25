// Encoding and decoding of 4-bit matrices.
#include "tensor/ops/quantize/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/ops/quantize/gptq.h"

namespace tessera {

Int4Matrix::Int4Matrix(int64_t r, int64_t c, int64_t g) : rows(r), columns(c), group(g) {
  if (rows < 1 || columns < 2 || columns % 2 != 0 || group < 1)
    throw Error("[int4] a matrix (" + std::to_string(rows) + ", " + std::to_string(columns) + ") in groups of " +
                std::to_string(group) + "; expected an even number of columns and positive sizes");
  codes.assign(static_cast<size_t>(rows * columns / 2), kZero << 4 | kZero);
  scales.assign(static_cast<size_t>(rows * groups()), Half());
}

void Int4Matrix::decode(int64_t begin, std::span<float> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const int64_t at = begin + static_cast<int64_t>(done), row = at / columns, column = at % columns,
                  g = column / group;
    const int64_t end = std::min({columns, (g + 1) * group, column + static_cast<int64_t>(out.size() - done)});
    const auto s = wide(scale(row, g));
    for (int64_t c = column; c < end; ++c) out[done++] = s * static_cast<float>(code(row, c) - kZero);
  }
}

std::vector<std::byte> Int4Matrix::packed() const {
  if (columns % group != 0 || scales.size() % 2 != 0)
    throw Error("[int4] rows of " + std::to_string(columns) + " columns in groups of " + std::to_string(group) +
                "; expected a group size that divides the row, and an even number of groups in total");
  constexpr size_t kBlock = 2 * sizeof(Half) + 1;  // per two groups: their scales, and both zeros
  std::vector<std::byte> out(codes.size() + scales.size() / 2 * kBlock);
  std::memcpy(out.data(), codes.data(), codes.size());
  std::byte* at = out.data() + codes.size();
  for (size_t g = 0; g < scales.size(); g += 2, at += kBlock) {
    std::memcpy(at, &scales[g], 2 * sizeof(Half));
    at[kBlock - 1] = std::byte{kZero << 4 | kZero};
  }
  return out;
}

void Int4Matrix::append(const Int4Matrix& below) {
  if (below.columns != columns || below.group != group)
    throw Error("[int4] rows of " + std::to_string(below.columns) + " columns in groups of " +
                std::to_string(below.group) + "; expected " + std::to_string(columns) + " in groups of " +
                std::to_string(group));
  rows += below.rows;
  codes.insert(codes.end(), below.codes.begin(), below.codes.end());
  scales.insert(scales.end(), below.scales.begin(), below.scales.end());
}

namespace {

constexpr int64_t kBatch = 1 << 18;  // elements: a multiple of a block
constexpr int kLevels = 16;

// Index of the nearest value in an ascending list: the number of midpoints that x exceeds.
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
  float max_magnitude = 0;
  for (const float v : x) max_magnitude = std::max(max_magnitude, std::abs(v));
  return max_magnitude;
}

float encode_nf4(std::span<const float> x, std::byte* to) {
  static const std::array<float, kLevels - 1> middles = [] {
    std::array<float, kLevels - 1> out{};
    for (size_t i = 0; i < out.size(); ++i) out.at(i) = (nf4_values()[i] + nf4_values()[i + 1]) / 2;
    return out;
  }();
  const float scale = largest(x);
  std::array<uint8_t, 64> codes{};
  for (size_t i = 0; i < x.size(); ++i) {
    const float scaled = scale > 0 ? x[i] / scale : 0;
    int code = 0;
    for (const float middle : middles) code += scaled > middle ? 1 : 0;
    codes.at(i) = static_cast<uint8_t>(code);
  }
  put_codes(to, codes);
  return scale;
}

// Encodes the block scales of one fused matrix in 8 bits each.
void encode_scales(std::span<const float> scales, float* groups, float* mean, std::byte* to) {
  double sum = 0;
  for (const float s : scales) sum += s;
  *mean = static_cast<float>(sum / static_cast<double>(scales.size()));
  for (size_t begin = 0; begin < scales.size(); begin += kScalesOfGroup) {
    const auto group = scales.subspan(begin, std::min<size_t>(kScalesOfGroup, scales.size() - begin));
    float max_magnitude = 0;
    for (const float s : group) max_magnitude = std::max(max_magnitude, std::abs(s - *mean));
    *groups++ = max_magnitude;
    for (const float s : group)
      *to++ = static_cast<std::byte>(nearest(dynamic_values(), max_magnitude > 0 ? (s - *mean) / max_magnitude : 0));
  }
}

// Plain rounding: GPTQ would need calibration inputs.
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
  for (int64_t begin = 0; begin < p.elements(); begin += kBatch) {
    chunk.resize(static_cast<size_t>(std::min(kBatch, p.elements() - begin)));
    source(begin, chunk);
    for (size_t i = 0; i < chunk.size(); ++i)
      if (!(std::abs(chunk[i]) <= std::numeric_limits<float>::max()))
        throw Error("[quantize] element " + std::to_string(begin + static_cast<int64_t>(i)) + " is not finite");
    const auto blocks = (std::ssize(chunk) + block - 1) / block;
    cpu::split(blocks, 64, [&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        const auto first = static_cast<size_t>(b * block);
        const std::span<const float> x = std::span(chunk).subspan(first, std::min<size_t>(block, chunk.size() - first));
        const int64_t full = begin / block + b;
        scales[static_cast<size_t>(full)] = encode_nf4(x, out.data() + at.codes + full * block / 2);
      }
    });
  }
  const FusedBounds bounds(p);
  std::vector<float> groups(static_cast<size_t>(bounds.groups)), means(p.fused_rows.size());
  for (size_t i = 0; i < p.fused_rows.size(); ++i) {
    const int64_t first = bounds.first_blocks[i],
                  end = i + 1 < p.fused_rows.size() ? bounds.first_blocks[i + 1] : std::ssize(scales);
    encode_scales(std::span(scales).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first)),
                  groups.data() + bounds.first_groups[i], &means[i], out.data() + at.scales + first);
  }
  std::memcpy(out.data(), groups.data(), 4 * groups.size());
  std::memcpy(out.data() + 4 * groups.size(), means.data(), 4 * means.size());
  return out;
}

namespace {

constexpr int64_t kGrain = 64;  // minimum blocks per thread

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

class Decoder {
 public:
  Decoder(const Packing& p, const std::byte* bytes, int64_t elements)
      : p_(p), at_(p, elements), bounds_(p), bytes_(bytes), codes_(bytes + at_.codes), scales_(bytes + at_.scales) {}

  template <class T>
  void operator()(ElementRun run, T* out) const {
    const int64_t together = p_.codec == Codec::nf4 ? p_.block() : p_.group;  // elements that share a scale
    while (run.count > 0) {
      const int64_t count = std::min(run.count, together - run.here % together);
      std::array<T, kLevels> values;
      if (p_.codec == Codec::nf4)
        fill(values, nf4_scale(run.here / together, run.full / together));
      else
        fill(values, group(run.here / together));
      int64_t i = 0;
      if (run.here % 2 != 0) out[i++] = values[code(run.here)];
      for (const std::byte* both = codes_ + (run.here + i) / 2; i + 1 < count; i += 2, ++both) {
        out[i] = values[std::to_integer<size_t>(*both) & 15];
        out[i + 1] = values[std::to_integer<size_t>(*both) >> 4];
      }
      if (i < count) out[i] = values[code(run.here + i)];
      run.here += count, run.full += count, run.count -= count, out += count;
    }
  }

 private:
  struct Group {
    float scale;
    int zero;
  };
  size_t code(int64_t i) const { return std::to_integer<size_t>(codes_[i / 2] >> (i % 2 * 4)) & 15; }

  // In float64, so that a fused multiply-add cannot change the rounding.
  float nf4_scale(int64_t here, int64_t full) const {
    const size_t matrix = bounds_.of_block(full);
    const int64_t group = bounds_.first_groups[matrix] + (full - bounds_.first_blocks[matrix]) / kScalesOfGroup;
    const double scale = dynamic_values()[std::to_integer<size_t>(scales_[here])],
                 max_magnitude = read<float>(bytes_ + 4 * group),
                 mean = read<float>(bytes_ + 4 * (bounds_.groups + static_cast<int64_t>(matrix)));
    return static_cast<float>(scale * max_magnitude + mean);
  }
  Group group(int64_t g) const {
    const std::byte* const at = scales_ + g / 2 * p_.scale_bytes();
    return {wide(Half{read<uint16_t>(at + g % 2 * 2)}), std::to_integer<int>(at[4] >> (g % 2 * 4)) & 15};
  }
  template <class T>
  static void fill(std::array<T, kLevels>& values, float scale) {
    for (size_t i = 0; i < kLevels; ++i) values[i] = converted<T>(nf4_values()[i] * scale);
  }
  template <class T>
  static void fill(std::array<T, kLevels>& values, const Group& group) {
    for (int i = 0; i < kLevels; ++i)
      values[static_cast<size_t>(i)] = converted<T>(group.scale * static_cast<float>(i - group.zero));
  }

  const Packing& p_;
  Sections at_;
  FusedBounds bounds_;
  const std::byte *bytes_, *codes_, *scales_;
};

void dequantize_on_cpu(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out) {
  const int64_t elements = out.numel(), block = p.block();
  const Decoder decode(p, bytes.address(), elements);
  with_floating(out.dtype(), "dequantize", [&]<class T>(T) {
    T* const to = out.data<T>();
    cpu::split((elements + block - 1) / block, kGrain, [&](int64_t first, int64_t last) {
      const int64_t begin = first * block, end = std::min(last * block, elements);
      auto run = std::ranges::upper_bound(runs, begin, {}, &ElementRun::here) - 1;
      for (int64_t at = begin; at < end; ++run) {
        const int64_t skipped = at - run->here, count = std::min(run->count - skipped, end - at);
        decode({at, run->full + skipped, count}, to + at);
        at += count;
      }
    });
  });
}

}  // namespace

void dequantize(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, Tensor& out) {
  bytes.check_dtype(DType::uint8);
  bytes.check_size(p.bytes(out.numel()));
  on_device(
      out.device(), [&] { dequantize_on_cpu(p, runs, bytes, out); }, [&] { cuda::dequantize(p, runs, bytes, out); });
}

void dequantize(const Packing& p, std::span<const std::byte> full, int64_t begin, std::span<float> to) {
  Decoder(p, full.data(), p.elements())({begin, begin, std::ssize(to)}, to.data());
}

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Per sign: 2^i fractions between 0.1 and 1 in decade i of seven, at the midpoints of equal steps. Both signs, and the
// values 0 and 1, make 256.
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

FusedBounds::FusedBounds(const Packing& p) {
  int64_t rows = 0;
  for (const int64_t matrix_rows : p.fused_rows) {
    first_blocks.push_back(rows * p.columns / p.block());
    first_groups.push_back(groups);
    groups += ceil_div(ceil_div(matrix_rows * p.columns, p.block()), kScalesOfGroup);
    rows += matrix_rows;
  }
}

int64_t Packing::shared_bytes() const {
  return codec == Codec::nf4 ? 4 * (FusedBounds(*this).groups + std::ssize(fused_rows)) : 0;
}

int64_t Packing::bytes(int64_t elements) const {
  return shared_bytes() + ceil_div(elements, block()) * (block() / 2 + scale_bytes());
}

void check(const Packing& p, const std::string& name) {
  const auto refuse = [&](const std::string& what, int64_t found, int64_t by) {
    throw Error("[quantize] '" + name + "' has " + std::to_string(found) + " " + what + ", which " +
                std::to_string(by) + " does not divide");
  };
  for (const int64_t rows : p.fused_rows)
    if ((p.fused_rows.size() > 1 || p.codec == Codec::gptq) && rows * p.columns % p.block() != 0)
      refuse("elements in a separately quantized matrix", rows * p.columns, p.block());
  if (p.codec == Codec::gptq && p.columns % p.group != 0) refuse("columns", p.columns, p.group);
}

int64_t splits_block(const Packing& p, std::span<const ElementRun> runs) {
  for (const ElementRun& run : runs)
    for (const int64_t bound : {run.full, run.full + run.count})
      if (bound % p.block() != 0 && bound != p.elements()) return bound;
  return 0;
}

void for_each_byte_run(const Packing& p, std::span<const ElementRun> runs,
                       const std::function<void(int64_t here, int64_t full, int64_t count)>& f) {
  int64_t elements = 0;
  for (const ElementRun& run : runs) elements += run.count;
  const Sections here(p, elements), full(p, p.elements());
  if (p.shared_bytes() > 0) f(0, 0, p.shared_bytes());
  for (const ElementRun& run : runs)
    f(here.codes + run.here / 2, full.codes + run.full / 2, ceil_div(run.count, p.block()) * p.block() / 2);
  for (const ElementRun& run : runs)
    f(here.scales + run.here / p.block() * p.scale_bytes(), full.scales + run.full / p.block() * p.scale_bytes(),
      ceil_div(run.count, p.block()) * p.scale_bytes());
}

}  // namespace tessera
