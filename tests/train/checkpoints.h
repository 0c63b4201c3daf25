// A folder of checkpoints for one test.
#pragma once
#include <algorithm>

#include "tests/data/support.h"
#include "train/checkpoint/directory.h"

namespace tessera {

class Checkpoints : public DataTest {
 protected:
  std::filesystem::path dir() const { return path("checkpoints"); }
  std::optional<Checkpoint> newest() {
    passed_over_.clear();
    return newest_checkpoint(dir(), passed_over_);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& e : std::filesystem::directory_iterator(dir())) out.push_back(e.path().filename().string());
    std::ranges::sort(out);
    return out;
  }
  std::vector<std::string> passed_over_;
};

}  // namespace tessera
