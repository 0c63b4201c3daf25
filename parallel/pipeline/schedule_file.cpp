// Schedules as text.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/validate.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// The words of the text's next line, without its comment; the line is taken off.
std::vector<std::string_view> take_line(std::string_view& text) {
  const size_t end = std::min(text.size(), text.find('\n'));
  std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(text.size(), end + 1));
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  while (true) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const size_t length = std::min(line.size(), line.find_first_of(" \t\r"));
    words.push_back(line.substr(0, length));
    line.remove_prefix(length);
  }
}

// Numbers of stages and micro-batches, and the rank of each stage, as the forward passes say.
void measure(Schedule& s) {
  size_t count = 0;
  int64_t stages = 0, microbatches = 0;
  for (const auto& list : s.actions)
    for (const Action& a : list) {
      stages = std::max<int64_t>(stages, a.stage + int64_t{1});
      microbatches = std::max<int64_t>(microbatches, a.microbatch + int64_t{1});
      ++count;
    }
  if (stages == 0) throw InputError(s.name + ": no actions; expected one line for each rank");
  // Each needs two actions or more; where far too few are there, no memory is asked for.
  if (static_cast<double>(stages) * static_cast<double>(microbatches) > 4 * static_cast<double>(count))
    throw InputError(s.name + ": " + std::to_string(count) + " actions are too few for " + std::to_string(stages) +
                     " stages and " + std::to_string(microbatches) + " micro-batches");
  s.ranks = static_cast<int>(s.actions.size());
  s.stages = static_cast<int>(stages);
  s.microbatches = static_cast<int>(microbatches);
  s.rank_of_stage.assign(static_cast<size_t>(stages), 0);
  for (int r = 0; r < s.ranks; ++r)
    for (const Action& a : s.actions[static_cast<size_t>(r)])
      if (a.what == Do::F) s.rank_of_stage[static_cast<size_t>(a.stage)] = r;
}

}  // namespace

Schedule parse_schedule(std::string_view text, const std::string& name) {
  Schedule s{.name = name};
  for (int line = 1; !text.empty(); ++line) {
    const std::vector<std::string_view> words = take_line(text);
    if (words.empty()) continue;
    auto& list = s.actions.emplace_back();
    for (size_t w = 0; w < words.size(); ++w) try {
        list.push_back(Action::parse(words[w]));
      } catch (const Error& e) {
        throw InputError(name + ": line " + std::to_string(line) + ", word " + std::to_string(w + 1) + ": " + e.what());
      }
  }
  measure(s);
  if (const auto fault = find_fault(s)) throw InputError(name + ": " + *fault);
  return s;
}

Schedule read_schedule(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) throw InputError(path.string() + ": is a folder; expected a file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) throw InputError(path.string() + ": cannot be read: " + std::strerror(errno));
  return parse_schedule(text, path.string());
}

std::string to_text(const Schedule& schedule) {
  std::string text = "# " + schedule.name + ": " + std::to_string(schedule.ranks) + " ranks, " +
                     std::to_string(schedule.stages) + " stages, " + std::to_string(schedule.microbatches) +
                     " micro-batches\n";
  for (const auto& list : schedule.actions)
    for (size_t i = 0; i < list.size(); ++i) text += list[i].str() + (i + 1 < list.size() ? " " : "\n");
  return text;
}

}  // namespace tessera
