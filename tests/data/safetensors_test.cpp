// The safetensors format: round trips, the reference reader, and rejection of malformed files.
#include "data/safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tensor/random.h"
#include "tests/data/support.h"
#include "tests/support/python.h"
#include "tests/support/texts.h"

namespace tessera {
namespace {

// A file with this header and data.
std::string make_file(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

class SafetensorsTest : public DataTest {
 protected:
  std::filesystem::path write(const std::string& bytes) const { return file("x.safetensors", bytes); }
  std::string refusal(const std::string& bytes) const {
    return error_message([&] { const Safetensors opened(write(bytes)); }, Status::input);
  }
  // Five dtypes, a scalar and an empty tensor.
  std::filesystem::path sample() const {
    std::vector<TensorBytes> list;
    for (const Tensor& t : tensors_) list.push_back(as_bytes("t" + std::to_string(list.size()), t));
    write_safetensors(path("sample.safetensors"), list, {{"steps", "12"}});
    return path("sample.safetensors");
  }
  ArenaPtr arena_ = make_arena();
  std::vector<Tensor> tensors_ = {Tensor::of<float>(std::array{1.5f, -2.0f, 3.25f, 0.0f, 5.0f, 6.0f}, {2, 3}, arena_),
                                  Tensor::of<double>(std::array{0.1}, {}, arena_),
                                  Tensor::of<bfloat16>(std::array<bfloat16, 3>{1.0f, -0.5f, 3.0f}, {3, 1}, arena_),
                                  Tensor::of<int32_t>(std::array{7, -8}, {2}, arena_),
                                  Tensor::of<int64_t>(std::array<int64_t, 2>{int64_t{1} << 60, -1}, {1, 2}, arena_),
                                  Tensor::empty({0, 4}, DType::float32, arena_)};
};

TEST_F(SafetensorsTest, RoundTrips) {
  const Safetensors file(sample());
  EXPECT_EQ(file.metadata().at("steps"), "12");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.tensors().size(), tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorBytes &back = file.at("t" + std::to_string(i)), was = as_bytes("", tensors_[i]);
    EXPECT_TRUE(back.dtype == was.dtype && back.shape == was.shape) << i;
    EXPECT_TRUE(std::ranges::equal(back.bytes, was.bytes)) << i;
  }
  EXPECT_THROW(file.at("t9"), InputError);
  EXPECT_THROW(write_safetensors(path("y"), std::array{as_bytes("a", tensors_[0]), as_bytes("a", tensors_[0])}), Error);
  EXPECT_THROW(write_safetensors("/nonexistent/y", {}), OutputError);
}

TEST_F(SafetensorsTest, MatchesReferenceReader) {
  if (const std::string why = test::missing("safetensors, numpy"); !why.empty()) GTEST_SKIP() << why;
  const std::string script =
      "import sys, safetensors; f = safetensors.safe_open(sys.argv[1], 'np'); assert f.metadata()['steps'] == '12'; "
      "assert f.get_tensor('t0').tolist() == [[1.5, -2, 3.25], [0, 5, 6]]; assert f.get_tensor('t1').tolist() == 0.1; "
      "assert f.get_tensor('t3').tolist() == [7, -8]; assert f.get_tensor('t4').tolist() == [[1 << 60, -1]]";
  EXPECT_EQ(std::system((test::python() + " -c \"" + script + "\" " + sample().string()).c_str()), 0);
}

TEST_F(SafetensorsTest, ErrorsNameMalformedFiles) {
  const std::string f32 = R"("dtype":"F32","shape":[1],)";
  const auto one = [&](const std::string& entry) { return "{\"a\":{" + entry + "}}"; };
  const auto expect = [&](const std::string& header, const std::string& data, const std::string& message) {
    expect_has(refusal(make_file(header, data)), message);
  };
  EXPECT_EQ(refusal(make_file(one(f32 + R"("data_offsets":[0,4])"), "1234")), "nothing was thrown");
  expect(one(f32 + R"("data_offsets":[0,4])"), "123", "at most 3");
  expect(one(f32 + R"("data_offsets":[0,4])"), "12345", "1 bytes follow the last tensor");
  expect(one(f32 + R"("data_offsets":[1,5])"), "12345", "tensor 'a' begins at byte 1");
  expect(one(f32 + R"("data_offsets":[4,0])"), "1234", "data_offsets");
  expect(one(f32 + R"("data_offsets":[0,-4])"), "1234", "data_offsets");
  expect(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "1234", "does not fit");
  expect(one(R"("dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,4])"), "1234", "does not fit");
  expect(one(R"("dtype":"F16","shape":[2],"data_offsets":[0,4])"), "1234", "F16");
  expect(one(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), "1234", "shape");
  expect(one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), "1234", "shape");
  expect(one(R"("shape":[1],"data_offsets":[0,4])"), "1234", "expected exactly");
  expect(one(f32 + R"("data_offsets":[0,4],"more":1)"), "1234", "expected exactly");
  const std::string two = R"({"a":{)" + f32 + R"("data_offsets":[0,4]},")", second = "\":{" + f32 + "\"data_offsets\":";
  expect(two + "b" + second + "[2,6]}}", "123456", "'b'");
  expect(two + "a" + second + "[4,8]}}", "12345678", "a");
  expect("[]", "", "not a JSON object");
  expect("{", "", "x.safetensors");
  expect(R"({"__metadata__":{"a":1}})", "", "__metadata__");
  for (const std::string& none : {std::string(), std::string("1234567"), std::string(8, '\xff')})
    expect_has(refusal(none), "not safetensors");
  const std::string half = make_file(R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,2]}})", "12");
  expect_error(Status::input, {"shape (2) of F16 does not fit its 2 bytes"},
               [&] { Safetensors(std::as_bytes(std::span(half)), "h", true); });
}

// A randomly corrupted file is either rejected with an InputError or consistent; nothing outside it is read.
TEST_F(SafetensorsTest, RandomCorruptionIsRejectedOrConsistent) {
  const std::string full = read_file(sample());
  const Philox random(4);
  int refused = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    std::string bytes = full;
    const uint64_t changes = 1 + random.below(3, 10 * i);
    for (uint64_t c = 0; c < changes; ++c) {
      const size_t at = random.below(bytes.size(), 10 * i + 2 * c + 1);
      const auto value = static_cast<char>(random.below(256, 10 * i + 2 * c + 2));
      if (random.below(8, 10 * i + 9) == 0) bytes.resize(at + 1);
      bytes[at] = value;
    }
    try {
      const Safetensors file(write(bytes));
      int64_t sum = 0;
      for (const TensorBytes& t : file.tensors())
        for (const std::byte b : t.bytes) sum += static_cast<int64_t>(b);
      EXPECT_GE(sum, 0);
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 2000);
}

}  // namespace
}  // namespace tessera
