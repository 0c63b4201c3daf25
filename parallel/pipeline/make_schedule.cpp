// Schedules by name.
#include <functional>
#include <string>
#include <vector>

#include "parallel/pipeline/schedules.h"
#include "tensor/error.h"

namespace tessera {
namespace {

bool is_path(const std::string& text) { return text.find_first_of("./") != std::string::npos; }

Schedule from_file(const std::string& path, int ranks, int microbatches, int chunks) {
  Schedule s = read_schedule(path);
  const auto check = [&](const char* what, int asked, int found) {
    if (asked != found)
      throw Error("[schedule] " + path + " is for " + std::to_string(found) + " " + what + "; the plan has " +
                  std::to_string(asked));
  };
  check("ranks", ranks, s.ranks);
  check("micro-batches", microbatches, s.microbatches);
  if (chunks != 0) check("chunks per rank", chunks, s.chunks());
  return s;
}

// A schedule that has a name. `chunks` is the number on each rank; 0 where it is a choice.
struct Known {
  std::string name;
  std::function<Schedule(int ranks, int microbatches, int chunks)> make;
  int chunks = 1;
};

template <class Generator>
Known of(const char* name, Generator make, int chunks = 1) {
  return {name, [make](int ranks, int microbatches, int) { return make(ranks, microbatches); }, chunks};
}

// A new schedule is a file with a generator, and its line here.
const std::vector<Known>& known_schedules() {
  static const std::vector<Known> all{
      of("naive", naive), of("gpipe", gpipe), of("1f1b", one_f_one_b), {"interleaved", interleaved, 0},
      of("zb-h1", zb_h1), of("zb-h2", zb_h2), of("zb-v", zb_v, 2)};
  return all;
}

constexpr int kUsualChunks = 2;  // where they are a choice

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const Known& known : known_schedules()) out.push_back(known.name);
    return out;
  }();
  return names;
}

Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks) {
  const std::string& name = name_or_path;
  if (is_path(name)) return from_file(name, ranks, microbatches, chunks);
  std::string all;
  for (const Known& known : known_schedules()) {
    all += known.name + ", ";
    if (known.name != name) continue;
    if (known.chunks != 0 && chunks != 0 && chunks != known.chunks)
      throw Error("[schedule] " + name + " has " + std::to_string(known.chunks) +
                  (known.chunks == 1 ? " chunk" : " chunks") + " per rank, found " + std::to_string(chunks) +
                  "; with interleaved the number is a choice");
    return known.make(ranks, microbatches, chunks == 0 ? kUsualChunks : chunks);
  }
  throw Error("[schedule] there is none named '" + name + "'; expected " + all + "or the path of a file");
}

}  // namespace tessera
