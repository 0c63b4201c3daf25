// The entry point of libFuzzer, which passes the bytes to the only linked target.
#include <cstdint>

#include "tests/fuzz/target.h"

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const tessera::fuzz::Parse parse = tessera::fuzz::targets().begin()->second;
  tessera::fuzz::accepts(parse, {reinterpret_cast<const char*>(data), size});
  return 0;
}
