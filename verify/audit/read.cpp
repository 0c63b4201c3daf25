// Elements of recorded tensors, and the ranks that provide them.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "data/safetensors.h"
#include "tensor/dtype.h"
#include "verify/audit/recording.h"
#include "verify/audit/slices.h"

namespace tessera::audit {

namespace {

constexpr double kUnset = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMaxResident = int64_t{16} << 20;  // bytes of mapped files

template <class F>
void with_element(const TensorBytes& t, const F& f) {
  if (t.is_half) return f(Half());
  if (t.dtype == DType::float64) return f(double());
  if (t.dtype == DType::float32) return f(float());
  if (t.dtype == DType::bfloat16) return f(bfloat16());
  if (t.dtype == DType::int32) return f(int32_t());
  return f(int64_t());
}

// Elements from `begin` on of stored bytes. Returns whether all are finite.
bool decode(const TensorBytes& t, int64_t begin, std::span<double> out) {
  double zeros = 0;  // NaN after a value that is not finite
  with_element(t, [&]<class T>(T) {
    const std::byte* const from = t.bytes.data() + begin * static_cast<int64_t>(sizeof(T));
    for (size_t i = 0; i < out.size(); ++i) {
      T x;
      std::memcpy(&x, from + i * sizeof(T), sizeof(T));
      if constexpr (std::is_same_v<T, Half>)
        out[i] = wide(x);
      else if constexpr (std::is_same_v<T, bfloat16>)
        out[i] = static_cast<float>(x);
      else
        out[i] = static_cast<double>(x);
    }
    if constexpr (!std::is_integral_v<T>) {
      constexpr size_t kLanes = 4;
      std::array<double, kLanes> sums{};
      size_t i = 0;
      for (; i + kLanes <= out.size(); i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += out[i + lane] * 0;
      for (; i < out.size(); ++i) zeros += out[i] * 0;
      for (const double sum : sums) zeros += sum;
    }
  });
  return zeros == 0;
}

// Rows of a slice's index: the position of a full tensor's row in the slice, or -1.
class RowIndex {
 public:
  RowIndex(const Slice& slice, const std::vector<int64_t>& shape) : shape_(shape) {
    for (size_t d = 0; d + 1 < shape.size(); ++d) {
      index_.push_back(dim_ranges(slice, shape, d));
      sizes_.push_back(count_indices(index_.back()));
    }
  }
  int64_t find(int64_t row) const {
    int64_t local = 0, scale = 1;
    for (size_t d = index_.size(); d-- > 0; row /= shape_[d]) {
      const int64_t here = local_index(index_[d], row % shape_[d]);
      if (here < 0) return -1;
      local += here * scale;
      scale *= sizes_[d];
    }
    return local;
  }

 private:
  const std::vector<int64_t>& shape_;
  std::vector<std::vector<Range>> index_;
  std::vector<int64_t> sizes_;
};

// Removes the pages of a mapped file from resident memory; later accesses map them again.
void release(const Safetensors& file) {
  if (file.tensors().empty()) return;
  const std::span<const std::byte> first = file.tensors().front().bytes, last = file.tensors().back().bytes;
  if (mapped_file_at(first.data()) == nullptr) return;  // read instead of mapped
  const auto before = reinterpret_cast<uintptr_t>(first.data()) % static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::byte* const begin = first.data() - before;
  ::madvise(const_cast<std::byte*>(begin), static_cast<size_t>(last.data() + last.size() - begin), MADV_DONTNEED);
}

}  // namespace

void Recording::read(const StoredTensor& t, size_t replica, Range rows, std::vector<double>& out) const {
  const int64_t width = t.width(), last = std::min(rows.end, t.rows());
  out.assign(static_cast<size_t>(rows.size() * width), kUnset);
  const std::vector<Slice>& slices = t.replicas[replica];
  const bool sums = std::ranges::any_of(slices, [](const Slice& slice) { return !slice.partial.empty(); });
  std::vector<double> values;
  for (const Slice& slice : slices) {
    const std::vector<Range> columns =
        t.shape.empty() ? std::vector<Range>{{0, 1}} : dim_ranges(slice, t.shape, t.shape.size() - 1);
    const int64_t stored = count_indices(columns);
    const RowIndex index(slice, t.shape);
    const auto refuse = [&](double x, int64_t row, int64_t column) {
      bad_input("{}: tensor '{}': expected finite values, got {} at row {}, column {}",
                files_[static_cast<size_t>(slice.rank)]->what(), slice.bytes->name, x, row, column);
    };
    for (int64_t row = rows.begin; row < last; ++row) {
      const int64_t local = index.find(row);
      if (local < 0) continue;
      resident_ += stored * element_size(slice.bytes->dtype);
      double* const to = out.data() + (row - rows.begin) * width;
      int64_t at = local * stored;
      for (const Range& range : columns) {
        const std::span<double> place(to + range.begin, static_cast<size_t>(range.size()));
        values.resize(sums ? place.size() : 0);
        const std::span<double> from = sums ? std::span(values) : place;
        if (!decode(*slice.bytes, at, from)) {
          const auto bad = std::ranges::find_if(from, [](double x) { return !std::isfinite(x); });
          refuse(*bad, row, range.begin + (bad - from.begin()));
        }
        for (size_t i = 0; i < values.size(); ++i) place[i] = std::isnan(place[i]) ? values[i] : place[i] + values[i];
        at += range.size();
      }
    }
  }
  if (resident_ < kMaxResident) return;
  for (const auto& file : files_) release(*file);
  resident_ = 0;
}

int Recording::owner(const StoredTensor& t, size_t replica, int64_t row, int64_t column) const {
  if (row >= t.rows()) return -1;
  for (const Slice& slice : t.replicas[replica])
    if ((t.shape.empty() || local_index(dim_ranges(slice, t.shape, t.shape.size() - 1), column) >= 0) &&
        RowIndex(slice, t.shape).find(row) >= 0)
      return slice.rank;
  return -1;
}

std::vector<std::string> Recording::differing_axes(const StoredTensor& t, size_t a, size_t b) const {
  std::vector<std::string> out;
  for (const Slice& x : t.replicas[a])
    for (const Slice& y : t.replicas[b]) {
      if (x.partial != y.partial || !overlap(x, y, t.shape)) continue;
      const RankInfo &left = ranks_[static_cast<size_t>(x.rank)], &right = ranks_[static_cast<size_t>(y.rank)];
      std::vector<std::string> differing;
      for (const auto& [axis, place] : left.axes)
        if (const auto found = right.axes.find(axis); found != right.axes.end() && found->second != place)
          differing.push_back(axis);
      if (out.empty() || (!differing.empty() && differing.size() < out.size())) out = differing;
    }
  return out;
}

}  // namespace tessera::audit
