// The schedules by name, and schedules read from files.
#include "parallel/pipeline/schedules.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

namespace {

bool is_path(const std::string& text) { return text.find_first_of("./") != std::string::npos; }

constexpr int kDefaultChunks = 2;

// `chunks` is the number per rank; 0 if configurable.
struct Known {
  std::function<Schedule(int ranks, int microbatches, int chunks)> make;
  int chunks = 1;
};

template <class Generator>
Known of(Generator make, int chunks = 1) {
  return {[make](int ranks, int microbatches, int) { return make(ranks, microbatches); }, chunks};
}

const Known& known(ScheduleKind kind) {
  static const std::array<Known, kScheduleNames.size()> all{of(naive),        of(gpipe),     of(one_f_one_b),
                                                            {interleaved, 0}, of(zb_h1),     of(zb_h2),
                                                            of(zb_v, 2),      of(v_half, 2), of(v_min, 2)};
  return all.at(static_cast<size_t>(kind));
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names(kScheduleNames.begin(), kScheduleNames.end());
  return names;
}

Schedule make_schedule(ScheduleKind kind, int ranks, int microbatches, int chunks) {
  const Known& one = known(kind);
  if (one.chunks != 0 && chunks != 0 && chunks != one.chunks)
    throw Error(fmt::format("[schedule] {} has {} chunk{} per rank, got {}; only interleaved supports other values",
                            name_in(kScheduleNames, kind), one.chunks, one.chunks == 1 ? "" : "s", chunks));
  return one.make(ranks, microbatches, chunks == 0 ? kDefaultChunks : chunks);
}

Schedule schedule_from_file(const std::string& path, int ranks, int microbatches, int chunks) {
  Schedule s = read_schedule(path);
  const auto check = [&](const char* what, int asked, int found) {
    if (asked != found)
      throw Error(fmt::format("[schedule] {} is for {} {}; the plan has {}", path, found, what, asked));
  };
  check("ranks", ranks, s.ranks);
  check("micro-batches", microbatches, s.microbatches);
  if (chunks != 0) check("chunks per rank", chunks, s.chunks());
  return s;
}

NamedSchedule schedule_named(const std::string& name_or_path) {
  if (is_path(name_or_path)) return {.file = name_or_path};
  if (const auto kind = value_named<ScheduleKind>(kScheduleNames, name_or_path)) return {.kind = *kind};
  throw Error(fmt::format("[schedule] unknown schedule '{}'; expected {}, or the path of a file{}", name_or_path,
                          fmt::join(kScheduleNames, ", "), did_you_mean(name_or_path, schedule_names())));
}

Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks) {
  const NamedSchedule named = schedule_named(name_or_path);
  return named.file.empty() ? make_schedule(named.kind, ranks, microbatches, chunks)
                            : schedule_from_file(named.file, ranks, microbatches, chunks);
}

}  // namespace tessera
