// From codes to numbers.
#include <algorithm>
#include <array>
#include <cstring>

#include "tensor/cpu/vectorize.h"
#include "tensor/half.h"
#include "tensor/ops/quantize/sections.h"

namespace tessera {
namespace {

constexpr int kLevels = 16;
constexpr int64_t kGrain = 64;  // blocks that are worth a thread

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The bytes of a part, and the numbers in them.
class Decoder {
 public:
  Decoder(const Packing& p, const std::byte* bytes, int64_t elements)
      : p_(p), at_(p, elements), pieces_(p), bytes_(bytes), codes_(bytes + at_.codes), scales_(bytes + at_.scales) {}

  template <class T>
  void operator()(ElementRun run, T* out) const {
    const int64_t together = p_.codec == Codec::nf4 ? p_.block() : p_.group;  // that have one scale
    while (run.count > 0) {
      const int64_t count = std::min(run.count, together - run.here % together);
      std::array<T, kLevels> values;
      if (p_.codec == Codec::nf4)
        fill(values, nf4_scale(run.here / together, run.whole / together));
      else
        fill(values, group(run.here / together));
      for (int64_t i = 0; i < count; ++i) out[i] = values[code(run.here + i)];
      run.here += count, run.whole += count, run.count -= count, out += count;
    }
  }

 private:
  struct Group {
    float scale;
    int zero;
  };
  size_t code(int64_t i) const { return std::to_integer<size_t>(codes_[i / 2] >> (i % 2 * 4)) & 15; }

  // In float64, so that no fused instruction rounds otherwise.
  float nf4_scale(int64_t here, int64_t whole) const {
    const size_t piece = pieces_.of_block(whole);
    const int64_t group = pieces_.first_groups[piece] + (whole - pieces_.first_blocks[piece]) / kScalesOfGroup;
    const double share = dynamic_values()[std::to_integer<size_t>(scales_[here])],
                 most = read<float>(bytes_ + 4 * group),
                 mean = read<float>(bytes_ + 4 * (pieces_.groups + static_cast<int64_t>(piece)));
    return static_cast<float>(share * most + mean);
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
  PieceBounds pieces_;
  const std::byte *bytes_, *codes_, *scales_;
};

void dequantize_on_cpu(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out) {
  const int64_t elements = out.numel(), block = p.block();
  const Decoder decode(p, bytes.address(), elements);
  with_floating(out.dtype(), "dequantize", [&](auto t) {
    using T = decltype(t);
    T* const to = out.data<T>();
    cpu::split((elements + block - 1) / block, kGrain, [&](int64_t first, int64_t last) {
      const int64_t begin = first * block, end = std::min(last * block, elements);
      auto run = std::ranges::upper_bound(runs, begin, {}, &ElementRun::here) - 1;
      for (int64_t at = begin; at < end; ++run) {
        const int64_t skipped = at - run->here, count = std::min(run->count - skipped, end - at);
        decode({at, run->whole + skipped, count}, to + at);
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

void dequantize(const Packing& p, std::span<const std::byte> whole, int64_t begin, std::span<float> to) {
  Decoder(p, whole.data(), p.elements())({begin, begin, std::ssize(to)}, to.data());
}

}  // namespace tessera
