// Ranks that are processes may have been started with other options, in other folders, with other programs. Before they
// work together they compare what must be the same.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "parallel/comm/communicator.h"

namespace tessera {

// What a rank goes by: names and values, in any order.
using Facts = std::vector<std::pair<std::string, std::string>>;

// Every rank of `world` calls it. Throws Error (usage), the same on every rank, that names each fact which is not the
// same everywhere, with its value on rank 0 and on the first rank with another. Cost: one all_gather of 8 bytes where
// all agree.
void require_same(Communicator& world, const Facts& mine);

// A rank's text on every rank.
std::string broadcast_text(Communicator& world, const std::string& text, int root);

}  // namespace tessera
