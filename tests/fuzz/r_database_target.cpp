// R's lazy-load database: zlib streams, and a serialised character vector in each.
#include "data/r_data.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

void parse_r_database(std::string_view bytes) {
  size_t sum = 0;
  const std::vector<std::string> records = unpack_rdb(bytes, kWhat);
  for (const std::string& record : records) sum += record.size();
  require(sum <= 1033 * bytes.size(), "no more is unpacked than deflate can pack");
  for (const std::string& record : records) read_character_vector(record, kWhat);
}

const Target target("r_database", parse_r_database);

}  // namespace
}  // namespace tessera::fuzz
