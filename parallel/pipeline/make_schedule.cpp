// Schedules by name.
#include <algorithm>

#include "parallel/pipeline/schedules.h"
#include "tensor/error.h"

namespace tessera {
namespace {

bool is_path(const std::string& text) { return text.find_first_of("./") != std::string::npos; }

// Schedules whose number of chunks is not a choice.
void check_chunks(const std::string& name, int chunks, int has) {
  if (chunks != 0 && chunks != has)
    throw Error("[schedule] " + name + " has " + std::to_string(has) + (has == 1 ? " chunk" : " chunks") +
                " per rank, found " + std::to_string(chunks) + "; with interleaved the number is a choice");
}

Schedule from_file(const std::string& path, int ranks, int microbatches, int chunks) {
  Schedule s = read_schedule(path);
  const auto check = [&](const char* what, int asked, int found) {
    if (asked != found)
      throw Error("[schedule] " + path + " is for " + std::to_string(found) + " " + what + ", found " +
                  std::to_string(asked));
  };
  check("ranks", ranks, s.ranks);
  check("micro-batches", microbatches, s.microbatches);
  if (chunks != 0) check("chunks per rank", chunks, s.chunks());
  return s;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{"naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"};
  return names;
}

Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks) {
  const std::string& name = name_or_path;
  if (is_path(name)) return from_file(name, ranks, microbatches, chunks);
  if (name == "interleaved") return interleaved(ranks, microbatches, chunks == 0 ? 2 : chunks);
  using Generator = Schedule (*)(int ranks, int microbatches);
  constexpr Generator kInOrder[]{naive, gpipe, one_f_one_b, nullptr, zb_h1, zb_h2, zb_v};
  const auto& names = schedule_names();
  const auto known = std::find(names.begin(), names.end(), name);
  if (known == names.end()) {
    std::string all;
    for (const std::string& n : names) all += n + ", ";
    throw Error("[schedule] there is none named '" + name + "'; expected " + all + "or the path of a file");
  }
  check_chunks(name, chunks, name == "zb-v" ? 2 : 1);
  return kInOrder[known - names.begin()](ranks, microbatches);
}

}  // namespace tessera
