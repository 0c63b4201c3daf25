// Appending records, and dropping those that a resumed run will make again.
#include "app/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// The records up to a step. A last line without its end was cut by a kill and is dropped.
std::string records_until(const std::filesystem::path& file, int64_t step) {
  const std::string all = read_file(file);
  std::string kept;
  for (size_t at = 0, end; (end = all.find('\n', at)) != std::string::npos; at = end + 1) {
    const std::string line = all.substr(at, end - at);
    const nlohmann::json j = parse_json(line, file.string());
    if (!j.is_object() || !j.value("step", nlohmann::json()).is_number_integer()) {
      if (j.is_object() && j.value("event", nlohmann::json()) == "summary") continue;  // of the run before
      throw InputError(fmt::format("{}: expected records with a step, found {}", file.string(), line));
    }
    if (j["step"].get<int64_t>() <= step) kept += line + "\n";
  }
  return kept;
}

}  // namespace

Metrics::Metrics(const std::filesystem::path& file, int64_t resumed_step) : path_(file) {
  if (std::filesystem::is_regular_file(file)) write_file(file, records_until(file, resumed_step));
  file_ = std::fopen(file.c_str(), "ae");
  if (!file_) throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(errno)));
}

Metrics::~Metrics() {
  if (file_) std::fclose(file_);
}

void Metrics::write(const std::string& json_line) {
  if (std::fputs(json_line.c_str(), file_) < 0 || std::fputc('\n', file_) == EOF || std::fflush(file_) != 0)
    throw OutputError(fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)));
}

}  // namespace tessera
