// Rows for two reporters of Google Benchmark.
#include "bench/outputs.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera::bench {
namespace {

std::optional<std::string> take(std::vector<std::string>& words, std::string_view flag) {
  std::optional<std::string> value;
  const std::string begin = fmt::format("--{}=", flag);
  std::erase_if(words, [&](const std::string& word) {
    if (!word.starts_with(begin)) return false;
    value = word.substr(begin.size());
    return true;
  });
  return value;
}

std::unique_ptr<benchmark::BenchmarkReporter> reporter(const std::string& format) {
  if (format == "json") return std::make_unique<benchmark::JSONReporter>();
  return std::make_unique<benchmark::ConsoleReporter>(benchmark::ConsoleReporter::OO_None);
}

// The field has another name since version 1.8.
template <class Run>
std::string error_of(const Run& row) {
  if constexpr (requires { row.error_message; })
    return row.error_message;
  else
    return row.skip_message;
}

}  // namespace

OutputChoice take_output_choice(std::vector<std::string>& words) {
  const char* const usual = std::getenv("BENCHMARK_OUT");  // read by Google Benchmark too
  OutputChoice out{.file = take(words, "benchmark_out").value_or(usual != nullptr ? usual : "")};
  out.format = take(words, "benchmark_out_format").value_or(out.format);
  if (out.format != "json" && out.format != "console")
    throw Error(fmt::format("--benchmark_out_format: expected json or console, found '{}'", out.format));
  words.emplace_back("--benchmark_out=");
  std::error_code error;
  if (const std::filesystem::path folder = out.file.parent_path();
      !folder.empty() && !std::filesystem::is_directory(folder, error))
    throw OutputError(fmt::format("--benchmark_out: {} is no folder", folder.string()));
  return out;
}

std::optional<double> take_min_time(std::vector<std::string>& words) {
  const std::optional<std::string> given = take(words, "benchmark_min_time");
  if (!given) return {};
  const char* const end = given->data() + given->size();
  double seconds = 0;
  const auto [rest, error] = std::from_chars(given->data(), end, seconds);
  if (error != std::errc() || seconds <= 0 || (rest != end && std::string_view(rest, end) != "s"))
    throw Error(fmt::format("--benchmark_min_time: expected seconds, as 0.1 or 0.1s, found '{}'", *given));
  return seconds;
}

Outputs::Outputs(const OutputChoice& choice, Print print, std::function<Rows()> last)
    : choice_(choice),
      last_(std::move(last)),
      printed_(std::move(print)),
      shown_(&printed_),
      display_(benchmark::CreateDefaultDisplayReporter()) {
  shown_.exceptions(std::ios::badbit);  // what print throws
  SetOutputStream(&shown_);
  display_->SetOutputStream(&shown_);
  if (choice_.file.empty()) return;
  file_ = reporter(choice_.format);
  file_->SetOutputStream(&written_);
}

bool Outputs::ReportContext(const Context& context) {
  return (!file_ || file_->ReportContext(context)) && display_->ReportContext(context);
}

// A row has our name, without Google Benchmark's words about how it was timed.
void Outputs::ReportRuns(const std::vector<Run>& rows) {
  Rows named = rows;
  for (Run& row : named) {
    benchmark::BenchmarkName& name = row.run_name;
    name.min_time = name.iterations = name.time_type = "";
    if (first_error_.empty() && !error_of(row).empty()) first_error_ = name.str() + ": " + error_of(row);
  }
  show(named);
}

void Outputs::show(const Rows& rows) {
  if (rows.empty()) return;
  display_->ReportRuns(rows);
  if (file_) file_->ReportRuns(rows);
}

void Outputs::Finalize() {
  show(last_());
  display_->Finalize();
  if (file_) file_->Finalize();
}

void Outputs::write_file() const {
  if (file_) tessera::write_file(choice_.file, written_.str());
}

Outputs::Printed::int_type Outputs::Printed::overflow(int_type c) {
  const char letter = traits_type::to_char_type(c);
  print_({&letter, 1});
  return traits_type::not_eof(c);
}

std::streamsize Outputs::Printed::xsputn(const char* text, std::streamsize size) {
  print_({text, static_cast<size_t>(size)});
  return size;
}

}  // namespace tessera::bench
