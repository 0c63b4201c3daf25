// Appending records, and dropping those that a resumed run will make again.
#include "app/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
std::string records_until(std::string_view file, int64_t step, const std::string& what) {
  std::string kept;
  for (size_t at = 0, end; (end = file.find('\n', at)) != std::string_view::npos; at = end + 1) {
    const std::string_view line = file.substr(at, end - at);
    const nlohmann::json j = parse_json(line, what);
    const std::optional<int64_t> found = j.is_object() ? natural(j.value("step", nlohmann::json())) : std::nullopt;
    if (!found) {
      if (j.is_object() && j.value("event", nlohmann::json()) == "summary") continue;  // of the run before
      throw InputError(fmt::format("{}: expected records with a step, found {}", what, line));
    }
    if (*found <= step) kept.append(line).append("\n");
  }
  return kept;
}

Metrics::Metrics(const std::filesystem::path& file, int64_t resumed_step) : path_(file) {
  if (std::filesystem::is_regular_file(file))
    write_file(file, records_until(read_file(file), resumed_step, file.string()));
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
