// The safetensors format: 8 bytes little-endian length, a JSON header with the dtype, shape and byte range of each
// tensor, and the data.
//
// Reading is strict: no holes, overlaps, trailing bytes or duplicate names, and every range matches its shape. Opening
// reads only the header; tensors are mapped.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "tensor/tensor.h"

namespace tessera {

struct TensorBytes {
  std::string name;
  DType dtype{};
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  bool is_half = false;         // IEEE float16, which Tensor does not support: `dtype` is bfloat16, of equal size
  std::string_view other = {};  // name of another unsupported dtype, such as BOOL: `dtype` is uint8
};
// For messages: "float16".
std::string_view stored_name(const TensorBytes& tensor);

// Bytes of a contiguous host tensor, which must outlive the result.
TensorBytes as_bytes(const std::string& name, const Tensor& tensor);

// For writers of slices.
struct SafetensorsLayout {
  std::string header;
  std::map<std::string, int64_t> begins;
  int64_t size = 0;
};
// Does not access the tensors' bytes. Throws Error for duplicate names.
SafetensorsLayout safetensors_layout(std::span<const TensorBytes> tensors,
                                     const std::map<std::string, std::string>& metadata = {});

// Writes atomically (temporary file and rename), with data aligned to 64 bytes and {"format": "pt"} in the metadata,
// which other readers require. Throws OutputError; Error for duplicate names.
void write_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// `bytes(i)` produces one tensor at a time; tensors[i].bytes is not accessed. Does not remove a partial file: for
// directories that are renamed when complete. Throws OutputError.
void stream_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                        const std::function<std::span<const std::byte>(size_t i)>& bytes,
                        const std::map<std::string, std::string>& metadata = {});

class Safetensors {
 public:
  // Throws InputError naming the file and the tensor. Only `may_be_half` allows float16 and unsupported dtypes, for
  // files of other programs.
  explicit Safetensors(const std::filesystem::path& file, bool may_be_half = false);
  // `bytes` must outlive the object.
  Safetensors(std::span<const std::byte> bytes, const std::string& what, bool may_be_half = false);

  const std::string& what() const { return what_; }
  const std::vector<TensorBytes>& tensors() const { return tensors_; }  // in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.contains(name); }
  // Throws InputError if the name is missing.
  const TensorBytes& at(const std::string& name) const;
  // Throws InputError naming a tensor that is not in `names`.
  void expect_no_others(const std::set<std::string>& names) const;

 private:
  void parse(std::span<const std::byte> all, bool may_be_half);
  void order_and_check(std::span<const std::byte> data);
  std::string what_;
  MappedFile map_;
  std::vector<TensorBytes> tensors_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace tessera
