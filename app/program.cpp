// The program's entry point: runs a command and reports its errors.
#include "app/program.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <variant>
#include <vector>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/output.h"
#include "app/signals.h"
#include "app/train/restarts.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

int run(const Print& text) {
  print(text.text);
  return 0;
}

template <class... Options>
bool is_any_command(const Command& command) {
  return (std::holds_alternative<Options>(command) || ...);
}

int run(const Command& command, const std::vector<std::string>& args) {
  const bool is_shared =
      is_any_command<Print, TrainCommand, VerifyOptions, GenerateOptions, EvaluateOptions, BenchOptions>(command);
  if (const auto job = mpi_surroundings(); !is_shared && job && job->ranks > 1)
    bad_usage("the job has {} ranks; expected 1, because only train, verify, generate, evaluate and bench support more",
              job->ranks);
  if (const auto* train = std::get_if<TrainCommand>(&command); train && train->options.restarts > 0)
    return run_with_restarts(*train, args);
  return std::visit([](const auto& o) { return run(o); }, command);
}

// OpenMP aborts without a message if the number of threads is far too large.
void check_openmp() {
  constexpr int limit = 1024;  // the bound of --threads-per-rank
  if (cpu::threads() > limit) bad_usage("OMP_NUM_THREADS: expected at most {} threads, got {}", limit, cpu::threads());
}

// Prints the first detected error as the last line.
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
    static_cast<void>(cpu::instruction_set());  // throws if TESSERA_MAX_CPU_ISA is invalid
    return run(parse_command_line(argc, argv), {argv + 1, argv + argc});
  } catch (const Error& e) {
    return fail(error_messages(e), e.status());
  } catch (const std::bad_alloc&) {
    return fail({"out of memory; reduce --batch, increase --microbatches or use --recompute block"},
                Status::communication);
  } catch (const std::filesystem::filesystem_error& e) {
    return fail({failure_cause(e)}, Status::output);
  } catch (const std::system_error& e) {  // such as the process limit
    return fail({failure_cause(e)}, Status::communication);
  } catch (const std::exception& e) {
    return fail({fmt::format("unexpected failure: {}", e.what())}, Status::communication);
  }
}

}  // namespace tessera
