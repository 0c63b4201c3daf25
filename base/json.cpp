// Builds values from the events of nlohmann's parser, which expose details lost in the values.
#include "base/json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/bad_input.h"
#include "base/files.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr size_t kDeepest = 64;
constexpr std::string_view kOfNumbers = "+-.0123456789eE", kBefore = " \t\r\n:,[";

// A number outside double's range, or Python's NaN or Infinity, at which nlohmann's parser stops.
struct Huge {
  size_t ordinal;  // index among the numbers in the text, from 1
  size_t begin, size;
};

std::vector<Huge> huge_numbers(std::string_view text) {
  std::vector<Huge> out;
  for (size_t at = 0, numbers = 0; at < text.size(); ++at) {
    if (text[at] == '"') {
      for (++at; at < text.size() && text[at] != '"'; ++at)
        if (text[at] == '\\') ++at;
    } else if (text[at] == '-' || (text[at] >= '0' && text[at] <= '9') || text[at] == 'N' || text[at] == 'I') {
      const size_t sign = text[at] == '-' ? 1 : 0;
      size_t size = std::min(text.find_first_not_of(kOfNumbers, at), text.size()) - at;
      bool none = false;  // not a JSON number
      for (const std::string_view word : {"NaN", "Infinity"})
        if (text.substr(at + sign).starts_with(word) && (at == 0 || kBefore.find(text[at - 1]) != kBefore.npos)) {
          size = sign + word.size();
          none = true;
        }
      const std::string_view digits = text.substr(at, size);
      ++numbers;
      if (none || ((size > 300 || digits.find_first_of("eE") != std::string_view::npos) &&
                   std::isinf(std::strtod(std::string(digits).c_str(), nullptr))))
        out.push_back({numbers, at, size});
      at += std::max<size_t>(size, 1) - 1;
    }
  }
  return out;
}

class Events final : public nlohmann::json_sax<Json> {
 public:
  Events(std::string_view text, const std::string& what, JsonFile manner, const std::vector<Huge>& huge,
         JsonAside* aside)
      : text_(text), what_(what), strict_(manner == JsonFile::ours), huge_(huge), aside_(aside) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return number(value); }
  bool number_unsigned(number_unsigned_t value) override { return number(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    // The parser converts an integer beyond 64 bits to double.
    if (digits.find_first_of(".eE") != string_t::npos) return number(value);
    refuse(fmt::format("the integer {} does not fit in 64 bits", digits));
    return number(Json::value_t::discarded);
  }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(Json::value_t::object); }
  bool key(string_t& name) override {
    if (skipped_ > 0) return true;
    if (open_.back() == put_aside_) {
      slot_ = &aside_->members.emplace_back(std::move(name), Json::value_t::discarded).second;
      return true;
    }
    const auto [place, fresh] = open_.back()->get_ref<Json::object_t&>().emplace(name, Json::value_t::discarded);
    slot_ = &place->second;
    if (open_.size() == 1) outer_ = place->first;
    if (fresh && aside_ && open_.size() == 2 && outer_ == aside_->outer && name == aside_->inner) put_aside_ = slot_;
    if (fresh) return true;
    refuse(fmt::format("duplicate key '{}' in one object", name));
    *slot_ = Json::value_t::discarded;
    skips_next_ = true;
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(Json::value_t::array); }
  bool end_array() override { return close(); }
  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    if (const std::string_view kind = known_kind(text_); !kind.empty())
      bad_input("{}: not valid JSON: it is {}", what_, kind);
    std::string near;
    for (const char c : token.substr(0, 40)) near += c >= ' ' && c < 0x7f ? c : '?';
    bad_input("{}: not valid JSON at byte {}, near '{}'", what_, position, near);
  }

  Json root;

 private:
  void refuse(const std::string& why) const {
    if (strict_) bad_input("{}: {}", what_, why);
  }

  // Destination of the next value; null if skipped.
  Json* place() {
    if (skipped_ > 0 || std::exchange(skips_next_, false)) return nullptr;
    if (open_.empty()) return &root;
    return open_.back()->is_array() ? &open_.back()->emplace_back() : slot_;
  }
  bool put(Json value) {
    if (Json* const at = place()) *at = std::move(value);
    return true;
  }
  bool number(Json value) {
    ++numbers_;
    if (next_huge_ == huge_.size() || huge_[next_huge_].ordinal != numbers_) return put(std::move(value));
    ++next_huge_;
    return put(Json::value_t::discarded);
  }
  bool open(Json::value_t container) {
    Json* const at = place();
    if (at && open_.size() < kDeepest) {
      *at = container;
      open_.push_back(at);
      return true;
    }
    if (at) {
      refuse(fmt::format("JSON nested deeper than {}", kDeepest));
      *at = Json::value_t::discarded;
    }
    ++skipped_;
    return true;
  }
  bool close() {
    if (skipped_ > 0)
      --skipped_;
    else
      open_.pop_back();
    return true;
  }

  const std::string_view text_;
  const std::string& what_;
  const bool strict_;
  const std::vector<Huge>& huge_;
  JsonAside* const aside_;
  const Json* put_aside_ = nullptr;  // the object whose members are extracted
  std::string_view outer_;
  std::vector<Json*> open_;
  Json* slot_ = nullptr;     // destination of the last key's value
  bool skips_next_ = false;  // the value belongs to a duplicate key
  size_t skipped_ = 0;       // open containers inside a skipped value
  size_t numbers_ = 0, next_huge_ = 0;
};

}  // namespace

// Estimates the memory that the C library allocates for the nodes of both kinds of tree (sorted and insertion-ordered)
// and for growing arrays.
void require_memory_for_json(std::string_view text, const std::string& what) {
  constexpr size_t kSmall = size_t{1} << 14;
  constexpr int64_t kGrowth = 4;  // values built from the tree coexist with it
  if (text.size() <= kSmall) return;
  std::array<int64_t, 256> bytes{};
  bytes['['] = bytes['{'] = 64, bytes[','] = 32, bytes[':'] = 96, bytes['"'] = 24;
  int64_t all = std::ssize(text);
  for (size_t at = 0; at < text.size(); ++at) {
    all += bytes[static_cast<uint8_t>(text[at])];
    if (text[at] == '"')
      for (++at; at < text.size() && text[at] != '"'; ++at)
        if (text[at] == '\\') ++at;
  }
  require_memory(what + " as a tree of JSON values", all, kGrowth);
}

Json parse_json(std::string_view text, const std::string& what, JsonFile manner, JsonAside* aside) {
  // nlohmann's parser stops at a NUL and ignores the rest.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    bad_input("{}: not valid JSON at byte {}: NUL byte", what, nul);
  require_memory_for_json(text, what);
  const std::vector<Huge> huge = manner == JsonFile::others ? huge_numbers(text) : std::vector<Huge>();
  std::string without;
  if (!huge.empty()) without = text;
  for (const Huge& h : huge) without.replace(h.begin, h.size, h.size, ' ')[h.begin] = '0';
  Events events(text, what, manner, huge, aside);
  if (!Json::sax_parse(huge.empty() ? text : without, &events)) bad_input("{}: not valid JSON", what);
  return std::move(events.root);
}

const Json& value_at(const Json& json, std::string_view key) {
  static const Json null;
  const auto found = json.is_object() ? json.find(key) : json.end();
  return found == json.end() ? null : *found;
}

std::string shown(const Json& value, size_t max_bytes) {
  if (value.is_discarded())
    return "a value that contains NaN, a duplicate key, an integer beyond 64 bits or more than 64 levels of nesting";
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= max_bytes ? text : text.substr(0, max_bytes) + "...";
}

bool is_nothing(const Json& value) {
  return value.is_null() || value == Json(false) || ((value.is_array() || value.is_object()) && value.empty());
}

std::optional<int64_t> natural(const Json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{1} << 62) return std::nullopt;
  return value.get<int64_t>();
}

}  // namespace tessera
