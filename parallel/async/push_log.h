// In which order the servers of an asynchronous run applied what the workers pushed, and on which version of the
// parameters each push was computed: all that a run depends on beside its seed, so all that a replay needs.
//
//   tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2
//   server 0 pushes 4
//   0 0 0              worker, its clock, and how many pushes the server had applied when the worker pulled
//   1 0 0
//   1 1 2
//   0 1 1
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct Push {
  int worker = 0;
  int64_t clock = 0;    // pushes of this worker before this one
  int64_t version = 0;  // pushes of all workers that the server had applied when the worker pulled
  bool operator==(const Push&) const = default;
};

struct PushLog {
  int workers = 0;
  int64_t staleness = 0;  // the bound, in clocks
  int64_t steps = 0;      // clocks of each worker, at the most
  std::vector<std::vector<Push>> servers;
  bool operator==(const PushLog&) const = default;
};

std::string to_string(const PushLog& log);
// Throws InputError, one line that begins with `name`, for text that is no log, and for a log that no run with its
// bound can have made (then a replay of it could wait for ever).
PushLog parse_push_log(std::string_view text, const std::string& name);

// Writes beside the file and renames. Throws OutputError.
void write_push_log(const std::filesystem::path& file, const PushLog& log);

// Where a replay can be stopped: the numbers of pushes after which every server has applied the same ones, from 0 to
// all, ascending. A worker may then have pulled for its next clock already, from some servers or from all.
std::vector<int64_t> common_places(const PushLog& log);
// The pushes of each worker among the first `pushes` of one server.
std::vector<int64_t> clocks_after(const std::vector<Push>& order, int64_t pushes, int workers);

// The order of one server, as a replay follows it.
class PushOrder {
 public:
  PushOrder(const std::vector<Push>& order, int workers);
  int64_t pushes() const { return static_cast<int64_t>(order_.size()); }
  int64_t clocks(int worker) const { return static_cast<int64_t>(versions_[static_cast<size_t>(worker)].size()); }
  // The version of the pull before that clock.
  int64_t version(int worker, int64_t clock) const {
    return versions_[static_cast<size_t>(worker)][static_cast<size_t>(clock)];
  }
  // Whether these may happen now that `applied` pushes were applied: each pull at the version that was recorded, each
  // push when it is the next and everybody has pulled the version that it ends.
  bool may_pull(int worker, int64_t clock, int64_t applied) const;
  bool may_push(int worker, int64_t clock, int64_t applied) const;
  void pulled(int64_t applied) { --pulls_[static_cast<size_t>(applied)]; }
  // All pulls of versions before this one have been.
  void go_on_at(int64_t applied);

 private:
  std::vector<Push> order_;
  std::vector<std::vector<int64_t>> versions_;  // [worker][clock]
  std::vector<int64_t> pulls_;                  // [version]: that are still to come
};

}  // namespace tessera
