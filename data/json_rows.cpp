// Splitting of files into rows, and detection of example files.
#include "data/json_rows.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "data/compressed_text.h"
#include "data/shards.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

using InOrder = nlohmann::ordered_json;
constexpr size_t kMaxRow = size_t{64} << 20;
// Limits for an object that is split: serialization recurses, and its ordered keys are compared pairwise.
constexpr int64_t kMaxDepth = 64, kMaxKeys = 20'000;
constexpr std::string_view kByteOrder = "\xEF\xBB\xBF", kBlanks = " \t\r\n";

bool is_list(const InOrder& value) { return value.is_array() && !value.empty(); }
bool is_object(const InOrder& value) { return value.is_object() && !value.empty(); }
bool is_message(const InOrder& value) {
  return value.is_object() && (value.contains("role") || value.contains("from"));
}

// The rows of one object: columns (to_dict() of `datasets`; to_json() of pandas with orient columns, index, split or
// table), rows by name, or one list of rows among other keys. Empty if the object is itself a row.
std::vector<InOrder> table_rows(const InOrder& all, const std::string& what) {
  std::vector<InOrder> rows;
  const auto every = [&](const auto& f) { return std::ranges::all_of(all, f); };
  const auto at = [&](const char* key) { return all.contains(key) ? all[key] : InOrder(); };
  for (const char* const text : {"text", "prompt", "completion", "instruction", "output"})
    if (at(text).is_string()) return {};
  if (std::ranges::any_of(all, [](const InOrder& v) { return is_list(v) && is_message(v.front()); })) return {};
  if (const InOrder columns = at("columns"), lines = at("data");
      is_list(columns) && is_list(lines) && is_list(lines[0])) {
    for (const InOrder& line : lines)
      for (size_t c = 0; c < std::min(line.size(), columns.size()) && columns[c].is_string(); ++c)
        (c == 0 ? rows.emplace_back() : rows.back())[columns[c].get<std::string>()] = line[c];
    return rows;
  }
  std::vector<std::string> lists;
  for (const auto& [key, value] : all.items())
    if (is_list(value) && value.front().is_object()) lists.push_back(key);
  if (lists.size() > 1)
    bad_input("{}: several lists of rows ({}); expected one; 'jq -c \".{}[]\" FILE' extracts one", what,
              fmt::join(lists, ", "), lists.front());
  if (lists.size() == 1) return all[lists.front()];
  const size_t count = all.front().size();
  if (every([&](const InOrder& v) { return is_list(v) && v.size() == count; }) &&
      !every([](const InOrder& v) { return v.front().is_number(); })) {
    rows.resize(count);
    for (const auto& [key, column] : all.items())
      for (size_t r = 0; r < count; ++r) rows[r][key] = column[r];
  } else if (every(is_object)) {
    const auto value_names = [](const InOrder& of) {
      std::vector<std::string> names;
      for (const auto& [name, value] : of.items()) names.push_back(name);
      return names;
    };
    const std::vector<std::string> names = value_names(all.front());
    const bool columns = names.front().find_first_not_of("0123456789") == std::string::npos &&
                         every([&](const InOrder& v) { return value_names(v) == names; });
    if (!columns) return {all.begin(), all.end()};
    rows.resize(count);
    for (const auto& [key, column] : all.items()) {
      auto row = rows.begin();
      for (const InOrder& value : column) (*row++)[key] = value;
    }
  }
  return rows;
}

// Without the compression extension.
fs::path plain_name(const fs::path& file) {
  return file.extension() == ".gz" || file.extension() == ".zst" ? file.stem() : file.filename();
}

class RowSplitter {
 public:
  RowSplitter(const std::string& what, const LineFunction& f) : what_(what), f_(f) {}

  void add(std::string_view chunk) {
    for (size_t at = 0; at < chunk.size(); ++at) {
      if (in_text_ && !escaped_) {
        size_t end = at;
        while (end < chunk.size() && chunk[end] != '"' && chunk[end] != '\\' && chunk[end] != '\n') ++end;
        store(chunk.substr(at, end - at));
        if ((at = end) == chunk.size()) return;
      }
      add(chunk[at]);
      if (chunk[at] == '\n') ++line_;
    }
  }
  void finish() {
    if (in_list_ && !list_ended_) bad_input("{}:{}: the list of rows is not closed after this line", what_, begin_);
    if (!row_.empty()) end_row();
    if (first_.empty()) return;
    if (keys_ > kMaxKeys)
      bad_input(
          "{}: one object of more than {} keys; expected one row per line, as written by pandas with "
          "orient='records', lines=True",
          what_, kMaxKeys);
    require_memory_for_json(first_, what_);
    const InOrder all = max_depth_ > kMaxDepth ? InOrder() : InOrder::parse(first_, nullptr, false);
    const std::vector<InOrder> rows = is_object(all) ? table_rows(all, what_) : std::vector<InOrder>();
    if (rows.empty()) return f_(first_, first_begin_);
    for (size_t r = 0; r < rows.size(); ++r) f_(rows[r].dump(), static_cast<int64_t>(r) + 1);
  }

 private:
  void add(char c) {
    const bool blank = kBlanks.find(c) != std::string_view::npos;
    if (row_.empty()) {
      if (mark_ < kByteOrder.size() && c == kByteOrder[mark_]) return void(++mark_);
      mark_ = kByteOrder.size();
      if (blank || (c == ',' && started_)) return;  // list items may also be written one per line
      if (list_ended_) bad_input("{}:{}: unexpected content after the list of rows", what_, line_);
      list_ended_ = in_list_ && c == ']';
      if (list_ended_) return;
      begin_ = line_;
      if (!std::exchange(started_, true) && c == '[') return void(in_list_ = true);
    } else if (over_line_ && !blank) {  // a truncated row ends with its line
      over_line_ = false;
      constexpr std::string_view opens = "{[,:", closes = "}],:";
      if (opens.find(last_) == std::string_view::npos && closes.find(c) == std::string_view::npos) {
        end_row();
        return add(c);
      }
    }
    if (c == '\n' && !in_list_) {
      if (in_text_ || depth_ == 0) return end_row();
      over_line_ = true;
    }
    if (in_list_ && !in_text_ && depth_ == 0 && (c == ',' || c == ']')) {
      list_ended_ = c == ']';
      return end_row();
    }
    store({&c, 1});
    if (!blank) last_ = c;
    if (in_text_) {
      in_text_ = escaped_ || c != '"';
      escaped_ = !escaped_ && c == '\\';
    } else {
      in_text_ = c == '"';
      if (c == ':' && rows_ == 0 && depth_ <= 2) ++keys_;
      if (c == '{' || c == '[') max_depth_ = std::max(max_depth_, ++depth_);
      if ((c == '}' || c == ']') && depth_ > 0 && --depth_ == 0 && !in_list_) end_row();
    }
  }

  void store(std::string_view text) {
    if (row_.size() + text.size() > kMaxRow) bad_input("{}:{}: a row of more than {} MiB", what_, line_, kMaxRow >> 20);
    if (row_.size() > 2 * checked_) {
      checked_ = row_.size();
      require_memory(fmt::format("{}:{}: a row", what_, line_), static_cast<int64_t>(checked_), 2 * kParsedGrowth);
    }
    row_ += text;
  }

  // Holds back the first of consecutive values: if it is the only one, it may be a table.
  void end_row() {
    if (!in_list_ && std::exchange(rows_, rows_ + 1) == 0) {
      first_.swap(row_), first_begin_ = begin_;
    } else {
      if (!first_.empty()) f_(std::exchange(first_, {}), first_begin_);
      f_(row_, begin_);
    }
    row_.clear();
    depth_ = 0, in_text_ = escaped_ = over_line_ = false;
  }

  const std::string& what_;
  const LineFunction& f_;
  std::string row_ = {}, first_ = {};
  int64_t line_ = 1, begin_ = 0, first_begin_ = 0, rows_ = 0;
  int64_t depth_ = 0, max_depth_ = 0;  // nesting of brackets in a row
  int64_t keys_ = 0;                   // in the first row and its nested objects
  size_t mark_ = 0;                    // byte order mark
  size_t checked_ = 1 << 19;           // longest row for which memory was checked
  char last_ = 0;                      // last character other than white space
  bool started_ = false, in_list_ = false, list_ended_ = false, over_line_ = false, in_text_ = false, escaped_ = false;
};

}  // namespace

void for_each_line(const std::filesystem::path& file, const LineFunction& f) {
  const std::string what = file.string();
  RowSplitter rows(what, f);
  read_text_chunks(file, [&](std::string_view chunk) { rows.add(chunk); });
  rows.finish();
}

void for_each_line(std::string_view bytes, const std::string& what, const LineFunction& f) {
  RowSplitter rows(what, f);
  rows.add(bytes);
  rows.finish();
}

bool holds_examples(const std::filesystem::path& file) {
  const std::string start = text_start(file);
  const auto next = [&](size_t from) { return std::min(start.find_first_not_of(kBlanks, from), start.size()); };
  const auto is = [&](size_t at, std::string_view any) { return at < start.size() && any.find(start[at]) != any.npos; };
  const size_t first = next(start.starts_with(kByteOrder) ? kByteOrder.size() : 0), second = next(first + 1);
  if ((is(first, "{") && is(second, "\"")) || (is(first, "[") && is(second, "{"))) return true;
  const fs::path name = plain_name(file);
  return name.extension() == ".jsonl" || name.extension() == ".ndjson" ||
         (name.extension() == ".json" && is(first, "[") && is(second, "\""));
}

std::string check_table(const fs::path& file) {
  constexpr std::pair<std::string_view, std::string_view> kTables[] = {
      {".csv", "CSV"}, {".tsv", "TSV"}, {".yaml", "YAML"}, {".yml", "YAML"}};
  const auto* const found =
      std::ranges::find(kTables, plain_name(file).extension(), &std::pair<std::string_view, std::string_view>::first);
  if (found == std::end(kTables)) return "";
  const std::string start = text_start(file);
  const bool yaml = found->second == "YAML";
  std::set<std::string> columns;
  std::string word;
  for (const char c : yaml ? start : start.substr(0, start.find('\n')) + "\n") {
    if (std::isalnum(static_cast<uint8_t>(c)) != 0 || c == '_') {
      word += c;
      continue;
    }
    if (!yaml || c == ':') columns.insert(word);
    word.clear();
  }
  const auto any = [&](const char* one, const char* other) { return columns.contains(one) && columns.contains(other); };
  for (const auto& [one, other] : {std::pair("input_ids", "input_ids"),
                                   {"messages", "messages"},
                                   {"conversations", "conversations"},
                                   {"prompt", "completion"},
                                   {"instruction", "output"},
                                   {"text", "text"}})
    if (any(one, other))
      bad_input(
          "{}: {} with the columns of examples ({}); expected rows of JSON; {}; text needs another extension (.txt)",
          file.string(), found->second, one, kConvertsRows);
  return fmt::format("{}: {}, read as plain text; if its rows are examples, {}", file.string(), found->second,
                     kConvertsRows);
}

namespace {

// Follows the rules of the `datasets` library.
std::string_view split_name(const std::string& path) {
  constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"train", "train"}, {"training", "train"}, {"validation", "val"}, {"valid", "val"}, {"dev", "val"},
      {"val", "val"},     {"test", "test"},      {"testing", "test"},   {"eval", "test"}, {"evaluation", "test"}};
  std::string word;
  for (const char c : path + ".") {
    if (std::isalpha(static_cast<uint8_t>(c)) != 0) {
      word += static_cast<char>(std::tolower(static_cast<uint8_t>(c)));
      continue;
    }
    const auto* const found = std::ranges::find(kWords, word, &std::pair<std::string_view, std::string_view>::first);
    if (found != std::end(kWords)) return found->second;
    word.clear();
  }
  return "";
}

ExampleFiles files_below(const fs::path& folder) {
  std::map<std::string_view, std::vector<fs::path>> by_split;
  std::string a_table;
  std::error_code error;
  std::vector<fs::path> all;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (is_system_file(it->path()))
      it.disable_recursion_pending();
    else if (is_plain_file(it->path()))
      all.push_back(it->path());
  }
  std::ranges::sort(all);
  for (const fs::path& file : all) {
    const std::string_view split = split_name(file.lexically_relative(folder).string());
    const fs::path name = plain_name(file);
    if (name.extension() == ".parquet" || name.extension() == ".arrow") a_table = file.string();
    if (name.extension() == ".jsonl" || name.extension() == ".ndjson" ||
        (name.extension() == ".json" && !split.empty() && holds_examples(file)))
      by_split[split.empty() ? "train" : split].push_back(file);
  }
  if (by_split.empty() && !a_table.empty())
    bad_input("{}: expected rows of JSON, got {}; {}", folder.string(), a_table, kConvertsRows);
  ExampleFiles out{by_split["train"], by_split["val"], by_split["test"]};
  if (out.val.empty()) out.val.swap(out.unused);
  if (out.train.empty()) out.train.swap(out.val);
  return out;
}

}  // namespace

ExampleFiles example_files(const std::string& spec) {
  if (names_directory(spec)) return is_there(fs::path(spec) / "dataset.json") ? ExampleFiles() : files_below(spec);
  if (is_there(spec)) return holds_examples(spec) ? ExampleFiles{{spec}} : ExampleFiles();
  if (spec.find('=') != std::string::npos) return {};  // a mixture
  ExampleFiles out;
  for (size_t at = 0; at < spec.size();) {
    const size_t end = std::min(spec.find(',', at), spec.size());
    const std::string one = spec.substr(at, end - at);
    const std::vector<fs::path> matching = matching_files(one, "`data` ");
    for (const fs::path& file : matching.empty() ? std::vector<fs::path>{one} : matching)
      if (holds_examples(file))
        out.train.push_back(file);
      else if (out.train.empty())
        return {};
      else
        bad_input("{}: expected examples, as in {}", file.string(), out.train.front().string());
    at = end + 1;
  }
  return out;
}

bool names_examples(const std::string& spec) { return !example_files(spec).train.empty(); }

}  // namespace tessera
