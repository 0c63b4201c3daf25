// The scalars of a run by tag, from metrics.jsonl and from TensorBoard's own reader.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/app/program.h"
#include "tests/support/python.h"

namespace tessera::test {

using Curves = std::map<std::string, std::vector<std::pair<int64_t, float>>>;  // steps and values

// Why TensorBoard's reader is not available; empty if it is.
inline std::string tensorboard_missing() { return missing("tensorboard.backend.event_processing.event_accumulator"); }

inline Curves recorded_curves(const fs::path& run) {
  Curves out;
  for (const Json& record : parse_records(read_file(run / "metrics.jsonl"))) {
    if (record.at("event") == "summary") continue;
    for (const auto& [key, value] : record.items())
      if (key != "event" && key != "step" && key != "step_ms")
        out[key].emplace_back(record["step"], value.get<float>());
  }
  return out;
}

// `view` is "shown", or "held" for everything in the files, including repeated steps.
inline Curves read_curves(const fs::path& run, const std::string& view) {
  const Exchange exchange;
  exchange.run(fs::path(TESSERA_SOURCE_DIR) / "tests/compare/read_events.py", "'" + fs::absolute(run).string() + "'");
  const std::vector<char> text = exchange.read<char>("events.json");
  return Json::parse(text).at(view).get<Curves>();
}

}  // namespace tessera::test
