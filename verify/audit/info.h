// The description of a rank in its recording.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "verify/audit/recording.h"

namespace tessera::audit {

// Throws InputError for fields of other types and for coordinates outside the ranks.
RankInfo parse_info(const std::string& text, const std::string& what, int64_t ranks);

// Throws InputError if ranks have other axes, or the same coordinates: files of two recordings. `what` names a file.
void check_ranks(const std::vector<RankInfo>& ranks, const std::function<std::string(size_t rank)>& what);

}  // namespace tessera::audit
