// Three typical mistakes, or more, for each exercise: what is changed in the product's file, and what the verdict must
// say.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tessera::lab {

struct Mistake {
  std::string exercise, name;
  std::vector<std::pair<std::string, std::string>> changes;  // each text stands once in the file
  std::string bound, cause;                                  // parts of the verdict's lines
};

const std::vector<Mistake>& mistakes_of_order();    // exercises in communication and schedules
const std::vector<Mistake>& mistakes_of_tensors();  // the others
std::vector<Mistake> mistakes();                    // all

}  // namespace tessera::lab
