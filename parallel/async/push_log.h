// The order in which the servers of an asynchronous run applied the workers' pushes, and the parameter version of each
// push: with the seed, all that a replay needs.
//
//   tessera-pushes version 1 workers 2 servers 1 staleness 1 steps 2
//   server 0 pushes 4
//   0 0 0              worker, its clock, and the number of pushes that the server had applied at the worker's pull
//   1 0 0
//   1 1 2
//   0 1 1
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct Push {
  int worker = 0;
  int64_t clock = 0;
  int64_t version = 0;  // pushes that the server had applied at the pull
  bool operator==(const Push&) const = default;
};

struct PushLog {
  int workers = 0;
  int64_t staleness = 0;  // the bound, in clocks
  int64_t steps = 0;
  std::vector<std::vector<Push>> servers;
  bool operator==(const PushLog&) const = default;
};

std::string to_string(const PushLog& log);
// Throws InputError, one line that begins with `name`, if the text is not a log, or no run with its staleness bound can
// produce it (its replay could deadlock).
PushLog parse_push_log(std::string_view text, const std::string& name);

// Writes a temporary file and renames it. Throws OutputError.
void write_push_log(const std::filesystem::path& file, const PushLog& log);

// Valid stop points of a replay: the push counts, ascending from 0, after which every server has applied the same
// pushes. A worker may already have pulled for its next clock, from some or all servers.
std::vector<int64_t> stop_points(const PushLog& log);
// Each worker's number of pushes among the first `pushes` of one server.
std::vector<int64_t> clocks_after(const std::vector<Push>& order, int64_t pushes, int workers);

class PushOrder {
 public:
  PushOrder(const std::vector<Push>& order, int workers);
  int64_t pushes() const { return static_cast<int64_t>(order_.size()); }
  int64_t clocks(int worker) const { return static_cast<int64_t>(versions_[static_cast<size_t>(worker)].size()); }
  // The version pulled for that clock.
  int64_t version(int worker, int64_t clock) const {
    return versions_[static_cast<size_t>(worker)][static_cast<size_t>(clock)];
  }
  // Whether an action may follow `applied` pushes: a pull at its recorded version; a push if it is the next one and all
  // pulls of the version that it replaces are done.
  bool may_pull(int worker, int64_t clock, int64_t applied) const;
  bool may_push(int worker, int64_t clock, int64_t applied) const;
  void pulled(int64_t applied) { --pulls_[static_cast<size_t>(applied)]; }
  // Marks all pulls of earlier versions as done.
  void resume_at(int64_t applied) { std::fill_n(pulls_.begin(), applied, 0); }

 private:
  std::vector<Push> order_;
  std::vector<std::vector<int64_t>> versions_;  // [worker][clock]
  std::vector<int64_t> pulls_;                  // by version: pending pulls
};

}  // namespace tessera
