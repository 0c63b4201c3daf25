// Character vectors out of R's own files, without R.
//
// A lazy-load database (`Rdata.rdb`) is a sequence of records: four bytes, big-endian, with the unpacked length, then a
// zlib stream. Unpacked, each is R's serialisation in XDR form ("R Internals", section 1.8), version 2 or 3.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// The unpacked records of a lazy-load database, in the order of the file. `what` names it in messages. Throws
// InputError for a record that is truncated, not zlib, or of another length than it says, and for records of more than
// 256 MiB in all. Memory is taken as it is filled, whatever length a record claims.
std::vector<std::string> unpack_rdb(std::string_view file, const std::string& what);

// The strings of one serialised character vector; its attributes are skipped. Throws InputError for another type, a
// missing value (NA), Latin-1, bytes left over, or a stream that ends early.
std::vector<std::string> read_character_vector(std::string_view stream, const std::string& what);

}  // namespace tessera
