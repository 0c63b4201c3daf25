// The launcher of `train --restarts`.
#include "app/train/restarts.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "app/output.h"
#include "app/resolve.h"
#include "base/json.h"
#include "base/process.h"
#include "parallel/comm/wait.h"
#include "train/run/run_directory.h"
#include "train/run/signals.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::system_clock;  // comparable with file times
constexpr std::string_view kBlanks = " \t\r";

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

std::string exit_text(int status) {
  if (status > 128) return fmt::format("killed by signal {} ({})", status - 128, strsignal(status - 128));
  if (status == static_cast<int>(Status::communication)) return "a rank or its communication failed (status 3)";
  return fmt::format("status {}", status);
}

std::string_view take_word(std::string_view& line, std::string_view blanks = kBlanks) {
  const size_t begin = std::min(line.find_first_not_of(blanks), line.size());
  const size_t end = std::min(line.find_first_of(blanks, begin), line.size());
  const std::string_view arg = line.substr(begin, end - begin);
  line.remove_prefix(end);
  return arg;
}

std::string describe_ranks(const Plan& p) {
  return fmt::format("{} {} (pp {} x dp {} x cp {} x tp {}), {} {} each", p.ranks(), p.ranks() == 1 ? "rank" : "ranks",
                     p.pp, p.dp, p.cp, p.tp, p.microbatches, p.microbatches == 1 ? "micro-batch" : "micro-batches");
}

// In bytes; 0 if metrics.jsonl does not exist.
uintmax_t size_of_records(const fs::path& run) {
  std::error_code error;
  const uintmax_t size = fs::file_size(run / "metrics.jsonl", error);
  return error ? 0 : size;
}

int64_t last_recorded_step(const fs::path& run) {
  constexpr uintmax_t kTail = 1 << 16;
  std::ifstream file(run / "metrics.jsonl", std::ios::binary);
  if (const uintmax_t size = size_of_records(run); size > kTail) file.seekg(static_cast<std::streamoff>(size - kTail));
  int64_t step = 0;
  for (std::string line; std::getline(file, line);)
    if (const Json record = Json::parse(line, nullptr, false);
        record.is_object() && record.value("event", Json()) == "step")
      step = natural(record.value("step", Json())).value_or(step);
  return step;
}

// The cause of a failure after `since`, from the flight record: "rank 1: ..."; empty if there is none.
std::string flight_cause(const fs::path& run, std::chrono::system_clock::time_point since) {
  std::error_code error;
  const auto written = fs::last_write_time(run / kFlightFile, error);
  if (error || std::chrono::file_clock::to_sys(written) < since) return "";
  std::ifstream file(run / kFlightFile);
  for (std::string line; std::getline(file, line);)
    if (const Json rank = Json::parse(line, nullptr, false); rank.is_object())
      if (const Json cause = rank.value("cause", Json()); cause.is_string() && !cause.get<std::string>().empty())
        return fmt::format("rank {}: {}", rank.value("rank", Json()).dump(), cause.get<std::string>());
  return "";
}

class Launcher {
 public:
  Launcher(const TrainCommand& command, const std::vector<std::string>& args)
      : config_(command.config),
        o_(command.options),
        args_(args),
        run_(config_.run.out ? fs::path(*config_.run.out) : new_run_directory()) {}
  ~Launcher() {
    std::error_code none;
    if (!config_.run.out) fs::remove(run_, none), fs::remove("runs", none);  // removed only if empty
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    const SignalRequests signals;  // the first signal is forwarded to the program, whose end is awaited
    for (int64_t number = 1;; ++number) {
      const Plan plan = plan_now();
      if (number > 1) say(fmt::format("start {} of {}: {}", number, o_.restarts + 1, describe_ranks(plan)));
      const Ended e = start(plan);
      before_ = plan;
      if (number > 1) starting_s_ += e.starting_s;
      if (SignalRequests::stop() != 0 || !is_retryable(e.status)) {
        if (e.status == 0 && restarts_ > 0) report_total();
        return SignalRequests::stop() != 0 && e.status != 0 ? SignalRequests::exit_status() : e.status;
      }
      report_failure(e, number, plan);
      repeated_ += e.step - e.from, again_s_ += e.again_s;
      terminate_remaining();
      if (number > o_.restarts) {
        report_total();
        throw Error(fmt::format("--restarts: all {} restarts failed; last failure: {}; tessera train --resume --out {} "
                                "resumes after step {}",
                                o_.restarts, e.cause, run_.string(), e.from),
                    e.status > 128 ? Status::communication : static_cast<Status>(e.status));
      }
      ++restarts_;
    }
  }

 private:
  struct Ended {
    int status = 0;
    std::string cause;
    double starting_s = 0, again_s = 0;  // time until the first step; time in repeated steps
    int64_t step = 0, from = 0;          // last completed step; step of the newest checkpoint
  };

  // The plan for the current hostfile; reports changes.
  Plan plan_now() {
    if (!o_.hostfile) return config_.plan;
    const std::vector<Host> hosts =
        for_option("hostfile", *o_.hostfile, [&] { return parse_hosts(read_file(*o_.hostfile), *o_.hostfile); });
    Plan plan = plan_on(config_.plan, count_slots(hosts));
    std::string members =
        fmt::format("{} slots on {} {}", count_slots(hosts), hosts.size(), hosts.size() == 1 ? "host" : "hosts");
    for (size_t i = 0; i < std::min<size_t>(hosts.size(), 8); ++i)
      members += fmt::format("{}{} {}", i == 0 ? ": " : ", ", hosts[i].name, hosts[i].slots);
    if (hosts.size() > 8) members += ", ...";
    if (members != members_) say(members);
    members_ = members;
    if (plan.dp != before_.dp)
      say(fmt::format(
          "{} of {} data ranks: each now computes {} micro-batches with an unchanged batch size; reductions have a "
          "different order from now on, so results equal those of an uninterrupted run only up to rounding",
          plan.dp, config_.plan.dp, plan.microbatches));
    return plan;
  }
  std::vector<std::string> command(const Plan& plan) const {
    std::vector<std::string> out;
    const std::string launch = o_.launch.value_or("");
    for (std::string_view rest = launch, arg; !(arg = take_word(rest, " \t")).empty();) out.emplace_back(arg);
    const std::string mark = "{ranks}";
    for (std::string& arg : out)
      for (size_t at; (at = arg.find(mark)) != arg.npos;) arg.replace(at, mark.size(), std::to_string(plan.ranks()));
    out.push_back(fs::read_symlink("/proc/self/exe").string());
    std::vector<std::string> more;
    if (!config_.run.out) more.insert(more.end(), {"--out", run_.string()});
    if (!config_.run.resume && is_there(run_ / "config.toml")) more.emplace_back("--resume");
    if (o_.hostfile)
      for (const auto& [name, value] :
           {std::pair{"--ranks", plan.ranks()}, {"--dp", plan.dp}, {"--microbatches", plan.microbatches}})
        more.insert(more.end(), {name, std::to_string(value)});
    const std::vector<std::string> args = start_args(args_, more);
    out.insert(out.end(), args.begin(), args.end());
    return out;
  }
  Ended start(const Plan& plan) const {
    constexpr auto kLook = std::chrono::milliseconds(20);
    const Clock::time_point begin = Clock::now();
    std::optional<Clock::time_point> first;  // end of the first step
    std::unique_ptr<StartedProgram> program;
    try {
      program = std::make_unique<StartedProgram>(command(plan));
    } catch (const Error& e) {
      throw Error(fmt::format("--{}: {}", o_.launch ? "launch" : "restarts", e.what()), e.status());
    }
    std::optional<int> status;
    bool notified = false;
    for (uintmax_t records = size_of_records(run_); !(status = program->ended()); std::this_thread::sleep_for(kLook)) {
      if (SignalRequests::stop() != 0 && !std::exchange(notified, true)) program->signal(SignalRequests::stop());
      if (SignalRequests::take_save()) program->signal(SIGUSR1);
      if (const uintmax_t now = size_of_records(run_); !first && now != records) {
        if (now > records) first = Clock::now();
        records = now;  // smaller if records of repeated steps were dropped
      }
    }
    const Clock::time_point end = Clock::now();
    const SavedStep saved = newest_saved(run_);
    Ended e{.status = *status, .cause = exit_text(*status), .from = saved.step};
    if (const std::string more = flight_cause(run_, begin); !more.empty()) e.cause += ": " + more;
    e.starting_s = seconds(first.value_or(end) - begin);
    e.step = std::max(first ? last_recorded_step(run_) : 0, saved.step);
    if (first) e.again_s = std::max(0.0, seconds(end - std::max(*first, saved.at)));
    return e;
  }
  // Ranks of a killed launcher may still run on any host and hold the run's lock.
  void terminate_remaining() const {
    constexpr double kGraceSeconds = 5;
    if (const int ranks = StartedProgram::end_rest(kGraceSeconds); ranks > 0)
      say(fmt::format("terminated {} remaining {} of the last start", ranks, ranks == 1 ? "process" : "processes"));
    if (o_.rank.value_or(0) > 0) return;  // rank 0 holds the lock
    AwakeTimer timer;
    for (bool notified = false;
         RunLock::is_held(run_) && timer.seconds() < config_.plan.timeout && SignalRequests::stop() == 0;
         std::this_thread::sleep_for(std::chrono::milliseconds(100)))
      if (!std::exchange(notified, true))
        say(fmt::format("waiting for {}, which is still writing to {}", RunLock::read(run_), run_.string()));
  }
  void say(const std::string& line) const { say_above_progress(line); }
  void report_failure(const Ended& e, int64_t number, const Plan& plan) const {
    say(fmt::format("start {} of {} failed at step {}: {}; repeating {} steps since {} ({:.1f} s of work)", number,
                    o_.restarts + 1, e.step, e.cause, e.step - e.from,
                    e.from > 0 ? fmt::format("the checkpoint of step {}", e.from) : "the start", e.again_s));
    if (!o_.json()) return;
    print(Json{{"event", "failure"},
               {"start", number},
               {"status", e.status},
               {"cause", e.cause},
               {"step", e.step},
               {"from_step", e.from},
               {"repeated_steps", e.step - e.from},
               {"repeated_s", e.again_s},
               {"ranks", plan.ranks()},
               {"dp", plan.dp},
               {"microbatches", plan.microbatches}}
              .dump() +
          "\n");
  }
  void report_total() const {
    say(fmt::format("{} {}: {} steps repeated; lost {:.1f} s of work and {:.1f} s to restarting", restarts_,
                    restarts_ == 1 ? "restart" : "restarts", repeated_, again_s_, starting_s_));
  }

  const TrainConfig& config_;
  const TrainOptions& o_;
  const std::vector<std::string>& args_;
  const fs::path run_;
  Plan before_ = config_.plan;
  std::string members_ = {};  // as last reported
  int64_t restarts_ = 0, repeated_ = 0;
  double again_s_ = 0, starting_s_ = 0;
};

constexpr size_t kMaxHosts = 100000, kMaxLetters = 255;
constexpr int64_t kMaxSlots = 100000;

Host parse_host(std::string_view line, const std::string& where) {
  std::string_view name = take_word(line), slots = take_word(line);
  if (slots.starts_with("slots="))
    slots.remove_prefix(std::string_view("slots=").size());
  else if (const size_t colon = name.find(':'); slots.empty() && colon != name.npos)
    slots = name.substr(colon + 1), name = name.substr(0, colon);
  else if (!slots.empty())
    bad_input("{}: expected slots=N after the host, got '{}'", where, slots);
  else
    slots = "1";
  if (name.empty() || name.size() > kMaxLetters)
    bad_input("{}: expected a host name of 1 to {} characters", where, kMaxLetters);
  Host out{.name = std::string(name)};
  const auto [end, error] = std::from_chars(slots.data(), slots.data() + slots.size(), out.slots);
  if (error != std::errc() || end != slots.data() + slots.size() || out.slots < 0 || out.slots > kMaxSlots)
    bad_input("{}: expected 0 to {} slots, got '{}'", where, kMaxSlots, slots);
  if (const std::string_view more = take_word(line); !more.empty())
    bad_input("{}: expected nothing after the number of slots, got '{}'", where, more);
  return out;
}

}  // namespace

std::vector<std::string> start_args(const std::vector<std::string>& args, const std::vector<std::string>& more) {
  constexpr std::array<std::string_view, 3> ours = {"--restarts", "--launch", "--hostfile"};
  std::vector<std::string> out;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string_view arg = args[i], name = arg.substr(0, arg.find('='));
    if (std::ranges::find(ours, name) == ours.end())
      out.push_back(args[i]);
    else if (name.size() == arg.size())
      ++i;  // the value is the next argument
  }
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

Plan plan_on(Plan plan, int64_t slots) {
  const int64_t each = plan.ranks() / plan.dp, all = plan.dp * plan.microbatches;
  const auto fits = [&](int64_t dp) {
    const int64_t data = dp * plan.cp;
    return all % dp == 0 && data % plan.ep == 0 && (plan.shard_ranks == 0 || data % plan.shard_ranks == 0);
  };
  int64_t min_dp = 1, dp = std::min(plan.dp, slots / each);
  while (!fits(min_dp)) ++min_dp;  // at most plan.dp
  while (dp > min_dp && !fits(dp)) --dp;
  if (dp < min_dp)
    throw Error(fmt::format("--hostfile: the hosts have {} slots; expected at least {} (pp {} x dp {} x cp {} x tp {})",
                            slots, min_dp * each, plan.pp, min_dp, plan.cp, plan.tp),
                Status::communication);
  plan.dp = dp, plan.microbatches = all / dp;
  return plan;
}

SavedStep newest_saved(const fs::path& run) {
  SavedStep out;
  std::error_code error;
  // Complete checkpoints are renamed to step-N.
  for (fs::directory_iterator it(run / "checkpoints", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("step-") || name.find(".tmp-") != name.npos) continue;
    const int64_t step = std::strtoll(name.c_str() + std::strlen("step-"), nullptr, 10);
    if (step <= out.step) continue;
    std::error_code gone;
    const auto written = fs::last_write_time(it->path() / "manifest.json", gone);
    if (!gone) out = {step, std::chrono::file_clock::to_sys(written)};
  }
  return out;
}

bool is_retryable(int status) {
  constexpr std::array ours = {Status::usage, Status::input, Status::not_finite, Status::output};
  // The last four: a shell or launcher did not find the program, or the user sent a signal.
  constexpr std::array others = {0, 126, 127, 128 + SIGINT, 128 + SIGTERM};
  return std::ranges::find(ours, static_cast<Status>(status)) == ours.end() &&
         std::ranges::find(others, status) == others.end();
}

int run_with_restarts(const TrainCommand& command, const std::vector<std::string>& args) {
  return Launcher(command, args).run();
}

std::vector<Host> parse_hosts(std::string_view text, const std::string& what) {
  std::vector<Host> out;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(kBlanks) == line.npos) continue;
    if (out.size() == kMaxHosts) bad_input("{}: expected at most {} hosts", what, kMaxHosts);
    out.push_back(parse_host(line, fmt::format("{}: line {}", what, number)));
  }
  return out;
}

int64_t count_slots(const std::vector<Host>& hosts) {
  int64_t all = 0;
  for (const Host& host : hosts) all += host.slots;
  return all;
}

}  // namespace tessera
