// Tensors in a file, in the safetensors format: 8 bytes little-endian length, a JSON object that gives each tensor its
// dtype, shape and span, and the bytes.
//
// The reader is strict: no holes, overlaps, trailing bytes or duplicate names, and every span fits its shape. What it
// refuses it names. Cost of opening: the header; the tensors are mapped, not read.
#pragma once
#include <set>

#include "data/files.h"
#include "tensor/tensor.h"

namespace tessera {

struct TensorBytes {
  std::string name;
  DType dtype{};
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  bool is_half = false;         // IEEE's float16, which no tensor has: `dtype` is bfloat16, of as many bytes
  std::string_view other = {};  // the format's name of a kind that nothing here reads, such as BOOL: `dtype` is uint8
};
// The kind of its numbers in messages: "float16".
std::string_view stored_name(const TensorBytes& tensor);

// Bytes of a contiguous tensor in the host's memory, which must outlive the result.
TensorBytes as_bytes(const std::string& name, const Tensor& tensor);

// A file's header, and where each tensor begins in the file: for those who write it in parts.
struct SafetensorsLayout {
  std::string header;
  std::map<std::string, int64_t> begins;
  int64_t size = 0;  // the file's size
};
// The layout of tensors in this order, whose bytes are not looked at. Throws Error for a name given twice.
SafetensorsLayout safetensors_layout(std::span<const TensorBytes> tensors,
                                     const std::map<std::string, std::string>& metadata = {});

// Writes beside and renames. Data begins at a multiple of 64 bytes. The metadata gets {"format": "pt"}, which other
// readers ask for. Throws OutputError; Error for a name given twice.
void write_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// Writes a file whose tensors are made one at a time: `bytes(i)` of the i-th, whose own are not looked at. For folders
// that get their name when all is in them: what is half-written stays. Throws OutputError.
void stream_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                        const std::function<std::span<const std::byte>(size_t i)>& bytes,
                        const std::map<std::string, std::string>& metadata = {});

class Safetensors {
 public:
  // Throws InputError naming the file and the tensor. float16 and kinds that nothing here reads are refused unless the
  // caller asks for them, as for files of other programs.
  explicit Safetensors(const std::filesystem::path& file, bool may_be_half = false);
  // Reads bytes in memory, which must outlive the object; `what` names them in messages.
  Safetensors(std::span<const std::byte> bytes, const std::string& what, bool may_be_half = false);

  const std::string& what() const { return what_; }                     // the file's name
  const std::vector<TensorBytes>& tensors() const { return tensors_; }  // in order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.contains(name); }
  // Throws InputError when there is none of that name.
  const TensorBytes& at(const std::string& name) const;
  // Throws InputError naming a tensor that is not among `names`.
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
