// Reads untrusted logs: validates each line, then replays the log without parameters.
#include "parallel/async/push_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <system_error>

#include "base/write_file.h"

namespace tessera {

namespace {

constexpr int64_t kMaxWorkers = 1024;  // limits the memory that a few lines can request

class Lines {
 public:
  Lines(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  std::vector<int64_t> next(std::string_view pattern) {
    ++number_;
    const size_t end = text_.find('\n');
    if (end == std::string_view::npos) refuse(pattern, text_.empty() ? "the end of the file" : "no newline");
    const std::string_view line = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    std::vector<int64_t> out;
    const char *at = line.data(), *const last = at + line.size();
    for (const char c : pattern) {
      if (c != '#') {
        if (at == last || *at++ != c) refuse(pattern, fmt::format("'{}'", line));
        continue;
      }
      const auto [after, error] = std::from_chars(at, last, out.emplace_back());
      if (error != std::errc() || out.back() < 0) refuse(pattern, fmt::format("'{}'", line));
      at = after;
    }
    if (at != last) refuse(pattern, fmt::format("'{}'", line));
    return out;
  }
  bool done() const { return text_.empty(); }
  [[noreturn]] void refuse(std::string_view expected, std::string_view found) const {
    throw InputError(fmt::format("{}: line {}: expected '{}', got {}", name_, number_, expected, found));
  }

 private:
  std::string_view text_;
  const std::string& name_;
  int64_t number_ = 0;
};

// Each worker's clocks count from 0, and a push's pull follows the worker's previous push.
std::vector<Push> parse_server(Lines& lines, const PushLog& log) {
  const std::vector<int64_t> head = lines.next("server # pushes #");
  if (head[0] != std::ssize(log.servers)) lines.refuse("the servers in ascending order", "a different order");
  std::vector<Push> order;
  std::vector<int64_t> clocks(static_cast<size_t>(log.workers)), earliest(clocks);
  for (int64_t p = 0; p < head[1]; ++p) {
    const std::vector<int64_t> push = lines.next("# # #");
    const int64_t worker = push[0], clock = push[1], version = push[2];
    if (worker >= log.workers)
      lines.refuse(fmt::format("a worker index below {}", log.workers), std::to_string(worker));
    int64_t &next = clocks[static_cast<size_t>(worker)], &oldest = earliest[static_cast<size_t>(worker)];
    if (clock != next || clock >= log.steps)
      lines.refuse(fmt::format("clock {} of {} of worker {}", next, log.steps, worker), std::to_string(clock));
    if (version < oldest || version > p)
      lines.refuse(fmt::format("a version from {} to {}", oldest, p), std::to_string(version));
    ++next;
    oldest = p + 1;
    order.push_back({static_cast<int>(worker), clock, version});
  }
  return order;
}

// Simulates workers and servers without parameters to detect deadlocks.
class Play {
 public:
  explicit Play(const PushLog& log) : log_(log) {
    for (const std::vector<Push>& order : log.servers) {
      orders_.emplace_back(order, log.workers);
      done_.emplace_back(static_cast<size_t>(log.workers));
      applied_.push_back(0);
    }
  }

  bool ends() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t k = 0; k < orders_.size(); ++k)
        for (int w = 0; w < log_.workers; ++w)
          while (moves(k, w)) moved = true;
    }
    for (size_t k = 0; k < orders_.size(); ++k)
      if (applied_[k] != std::ssize(log_.servers[k])) return false;
    return true;
  }

 private:
  // The next action of worker w at server k: pull 0, push 0, pull 1, ...
  bool moves(size_t k, int w) {
    const auto worker = static_cast<size_t>(w);
    int64_t& done = done_[k][worker];
    const int64_t clock = done / 2;
    if (clock == orders_[k].clocks(w)) return false;
    if (done % 2 == 0) {
      // A worker pulls from other servers only after its own server has applied its push.
      if (worker < orders_.size() && done_[worker][worker] < done) return false;
      if (!orders_[k].may_pull(w, clock, applied_[k]) || clock - slowest(k) > log_.staleness) return false;
      orders_[k].pulled(applied_[k]);
    } else {
      for (const std::vector<int64_t>& server : done_)
        if (server[worker] < done) return false;  // the worker has not pulled from all servers
      if (!orders_[k].may_push(w, clock, applied_[k])) return false;
      ++applied_[k];
    }
    ++done;
    return true;
  }

  int64_t slowest(size_t k) const {
    int64_t min_clock = std::numeric_limits<int64_t>::max();
    for (int w = 0; w < log_.workers; ++w)
      if (const int64_t clock = done_[k][static_cast<size_t>(w)] / 2; clock < orders_[k].clocks(w))
        min_clock = std::min(min_clock, clock);
    return min_clock;
  }

  const PushLog& log_;
  std::vector<PushOrder> orders_;
  std::vector<std::vector<int64_t>> done_;  // [server][worker]: pulls and pushes
  std::vector<int64_t> applied_;
};

}  // namespace

std::string to_string(const PushLog& log) {
  std::string out = fmt::format("tessera-pushes version 1 workers {} servers {} staleness {} steps {}\n", log.workers,
                                log.servers.size(), log.staleness, log.steps);
  for (size_t k = 0; k < log.servers.size(); ++k) {
    fmt::format_to(std::back_inserter(out), "server {} pushes {}\n", k, log.servers[k].size());
    for (const Push& p : log.servers[k])
      fmt::format_to(std::back_inserter(out), "{} {} {}\n", p.worker, p.clock, p.version);
  }
  return out;
}

PushLog parse_push_log(std::string_view text, const std::string& name) {
  Lines lines(text, name);
  const std::vector<int64_t> head = lines.next("tessera-pushes version 1 workers # servers # staleness # steps #");
  const int64_t workers = head[0], servers = head[1];
  if (workers < 1 || workers > kMaxWorkers || servers < 1 || servers > workers)
    lines.refuse("at least 1 worker and at least 1 server, at most one server per worker",
                 fmt::format("{} and {}", workers, servers));
  PushLog log{.workers = static_cast<int>(workers), .staleness = head[2], .steps = head[3], .servers = {}};
  for (int64_t k = 0; k < servers; ++k) {
    log.servers.push_back(parse_server(lines, log));
    if (log.servers.back().size() != log.servers[0].size())
      lines.refuse("the same number of pushes for all servers", "different ones");
  }
  if (!lines.done()) lines.refuse("the end of the file", "more");
  if (!Play(log).ends())
    throw InputError(
        fmt::format("{}: no run with a staleness of at most {} can apply pushes in this order", name, log.staleness));
  return log;
}

void write_push_log(const std::filesystem::path& file, const PushLog& log) { write_file(file, to_string(log)); }

std::vector<int64_t> clocks_after(const std::vector<Push>& order, int64_t pushes, int workers) {
  std::vector<int64_t> out(static_cast<size_t>(workers));
  for (int64_t p = 0; p < pushes; ++p) ++out[static_cast<size_t>(order[static_cast<size_t>(p)].worker)];
  return out;
}

// `unequal` counts the (server, worker) pairs whose number of applied pushes differs from the first server's.
std::vector<int64_t> stop_points(const PushLog& log) {
  std::vector<std::vector<int64_t>> more(log.servers.size(), std::vector<int64_t>(static_cast<size_t>(log.workers)));
  int64_t unequal = 0;
  const auto add = [&](size_t server, int worker, int64_t pushes) {
    int64_t& difference = more[server][static_cast<size_t>(worker)];
    unequal -= difference != 0;
    difference += pushes;
    unequal += difference != 0;
  };
  std::vector<int64_t> out{0};
  for (size_t p = 0; p < log.servers[0].size(); ++p) {
    for (size_t k = 1; k < log.servers.size(); ++k) {
      add(k, log.servers[k][p].worker, 1);
      add(k, log.servers[0][p].worker, -1);
    }
    if (unequal == 0) out.push_back(static_cast<int64_t>(p) + 1);
  }
  return out;
}

PushOrder::PushOrder(const std::vector<Push>& order, int workers)
    : order_(order), versions_(static_cast<size_t>(workers)), pulls_(order.size() + 1) {
  for (const Push& push : order) {
    versions_[static_cast<size_t>(push.worker)].push_back(push.version);
    ++pulls_[static_cast<size_t>(push.version)];
  }
}

void PushOrder::resume_at(int64_t applied) { std::fill_n(pulls_.begin(), applied, 0); }

bool PushOrder::may_pull(int worker, int64_t clock, int64_t applied) const {
  return clock < clocks(worker) && versions_[static_cast<size_t>(worker)][static_cast<size_t>(clock)] == applied;
}

bool PushOrder::may_push(int worker, int64_t clock, int64_t applied) const {
  const auto at = static_cast<size_t>(applied);
  return at < order_.size() && order_[at].worker == worker && order_[at].clock == clock && pulls_[at] == 0;
}

}  // namespace tessera
