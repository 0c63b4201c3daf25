// Several datasets that are trained on together, each with a weight: its share of the sequences.
//
//   data = "books=0.7,code=0.3"     or the name of a file, .json or .toml, whose names are relative to it:
//
//   {"books": 0.7, "code/texts.txt": 0.3}        books = 0.7
//                                                code = 0.3
//
// Weights are in proportion: 7 and 3 mean the same. Which sequence comes from which dataset: data/mixture_order.h.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"

namespace tessera {

struct Weighted {
  std::string name;  // as it is written
  double weight = 0;
  std::string spec = name;  // what `data` would say to name the dataset alone
};

// "A=0.7,B=0.3". `what` names it in messages. Throws Error (usage): a name that is empty or comes twice, a weight that
// is no positive finite number, fewer than two, more than 256.
std::vector<Weighted> parse_weights(std::string_view text, const std::string& what);
// The same of a file that `what` names, JSON or TOML by the end of that name. Throws InputError; of TOML that cannot be
// read, Error (usage).
std::vector<Weighted> parse_weights_file(std::string_view bytes, const std::string& what);

// The mixture that `data` names; nothing where it names one dataset: where it has no '=', or is itself the name of a
// file or folder that is no such file.
std::optional<std::vector<Weighted>> mixture_in(const std::string& data);

// One dataset of all of them, opened in the order of the weights. Throws Error (usage) where the tokenizers differ, or
// where some are examples and some are not.
Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets);

}  // namespace tessera
