// From argv to an exit status.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/options.h"
#include "app/output.h"
#include "app/signals.h"
#include "app/train/restarts.h"
#include "parallel/comm/launch.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/error.h"
#include "tensor/findings.h"

namespace tessera {
namespace {

int run(const Command& command, const std::vector<std::string>& words) {
  if (const auto* text = std::get_if<Print>(&command)) {
    print(text->text);
    return 0;
  }
  if (const auto* train = std::get_if<TrainOptions>(&command))
    return train->restarts > 0 ? run_with_restarts(*train, words) : run_train(*train);
  if (const auto* verify = std::get_if<VerifyOptions>(&command)) return run_verify(*verify);
  if (const auto* bench = std::get_if<BenchOptions>(&command)) return run_bench(*bench);
  if (const auto* generate = std::get_if<GenerateOptions>(&command)) return run_generate(*generate);
  if (const auto* evaluate = std::get_if<EvaluateOptions>(&command)) return run_evaluate(*evaluate);
  if (const auto job = mpi_surroundings(); job && job->ranks > 1)
    throw Error(fmt::format(
        "the job has {} ranks; expected one: only train, verify, generate, evaluate and bench share their work",
        job->ranks));
  if (const auto* plan = std::get_if<PlanOptions>(&command)) return run_plan(*plan);
  if (const auto* report = std::get_if<ReportOptions>(&command)) return run_report(*report);
  if (const auto* checkpoint = std::get_if<CheckpointOptions>(&command)) return run_checkpoint(*checkpoint);
  if (const auto* explore = std::get_if<ExploreOptions>(&command)) return run_explore(*explore);
  if (const auto* lab = std::get_if<LabOptions>(&command)) return run_lab(*lab);
  return run_data(std::get<DatasetOptions>(command));
}

// OpenMP itself dies of 100,000, without a word of ours.
void check_openmp() {
  constexpr int most = 1024;  // as of --threads-per-rank
  if (cpu::threads() > most)
    throw Error(fmt::format("OMP_NUM_THREADS: expected at most {} threads, found {}", most, cpu::threads()));
}

// The first, which was noticed before the others, stands in the last line.
int fail(std::vector<std::string> messages, Status status) {
  std::fflush(stdout);
  std::rotate(messages.begin(), messages.begin() + 1, messages.end());
  std::string lines;
  for (const std::string& message : messages) lines += fmt::format("tessera: {}\n", one_line(with_options(message)));
  std::fputs(lines.c_str(), stderr);
  return static_cast<int>(status);
}

}  // namespace

int run_program(int argc, const char* const* argv) {
  try {
    open_standard_descriptors();
    watch_signals();
    check_openmp();
    return run(parse_command_line(argc, argv), {argv + 1, argv + argc});
  } catch (const Error& e) {
    return fail(messages_of(e), e.status());
  } catch (const std::bad_alloc&) {
    return fail({"out of memory; a smaller --batch, more --microbatches or --recompute block need less"},
                Status::communication);
  } catch (const std::filesystem::filesystem_error& e) {
    return fail({fmt::format("{}: {}", e.path1().string(), e.code().message())}, Status::output);
  } catch (const std::exception& e) {
    return fail({fmt::format("unexpected failure: {}", e.what())}, Status::communication);
  }
}

}  // namespace tessera
