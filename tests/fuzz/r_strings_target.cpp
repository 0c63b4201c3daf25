// R's serialisation of a character vector.
#include "data/r_data.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

void parse_r_strings(std::string_view bytes) {
  size_t sum = 0;
  for (const std::string& s : read_character_vector(bytes, kWhat)) sum += s.size() + 8;
  require(sum < bytes.size(), "the strings come from the stream");
}

const Target target("r_strings", parse_r_strings);

}  // namespace
}  // namespace tessera::fuzz
