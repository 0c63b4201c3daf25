// Three typical mistakes, or more, for each exercise: what is changed in the product's file, and what the verdict must
// say.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tessera::lab {

struct Mistake {
  using Changes = std::vector<std::pair<std::string, std::string>>;
  Mistake(const char* e, const char* n, const char* b, const char* c, Changes list)
      : exercise(e), name(n), bound(b), cause(c), changes(std::move(list)) {}

  std::string exercise, name;
  std::string bound, cause;  // parts of the verdict's lines
  Changes changes;           // each text stands once in the file
};

const std::vector<Mistake>& mistakes();

}  // namespace tessera::lab
