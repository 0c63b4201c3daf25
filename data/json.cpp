// Strict JSON on top of nlohmann's parser: a first pass over the events refuses what the second would quietly change.
#include "data/json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

class StrictEvents final : public nlohmann::json_sax<Json> {
 public:
  explicit StrictEvents(const std::string& what) : what_(what) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t& digits) override {
    // The parser makes a double of an integer that does not fit.
    if (digits.find_first_of(".eE") == string_t::npos) fail(fmt::format("the integer {} is beyond 64 bits", digits));
    return true;
  }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) fail(fmt::format("the key '{}' stands twice in one object", name));
    return true;
  }
  bool end_object() override { return keys_.pop_back(), true; }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return keys_.pop_back(), true; }
  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    std::string shown;
    for (const char c : token.substr(0, 40)) shown += c >= ' ' && c < 0x7f ? c : '?';
    fail(fmt::format("not valid JSON at byte {}, near '{}'", position, shown));
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw InputError(fmt::format("{}: {}", what_, why)); }
  bool open() {
    if (keys_.size() == 64) fail("JSON nested deeper than 64");
    keys_.emplace_back();
    return true;
  }

  const std::string& what_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open; an array's stays empty
};

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  // nlohmann's parser takes a NUL for the end and would not see what follows it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw InputError(fmt::format("{}: not valid JSON at byte {}: a NUL", what, nul));
  StrictEvents events(what);
  if (!Json::sax_parse(text, &events)) throw InputError(fmt::format("{}: not valid JSON", what));
  return Json::parse(text);
}

std::optional<int64_t> natural(const Json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{1} << 62) return std::nullopt;
  return value.get<int64_t>();
}

}  // namespace tessera
