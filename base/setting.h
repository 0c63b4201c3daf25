// Settings: descriptors of the fields of option structs, defined next to each struct. They generate the command line,
// its help, configuration files, JSON, run identities and validation, so a descriptor names the field, not an option.
//
//   Settings field_descriptors(Tune& t) {
//     return {{"voices", &t.voices, "number of voices", Field{.range = {1, 64}}},
//             {"key_mode", &t.key_mode, "major or minor", Field{.goes_with = "voices"}}};  // an enum has its own names
//   }
//   field_descriptors(tune).at("voices").read("--voices", "12");   // Error: --voices: expected an integer in ...
#pragma once
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

struct Bounds {
  double min = -1e300, max = 1e300;
  bool max_excluded = false;
};

// Whether a field is part of a run's identity or record: never, whenever it applies, or only if it also differs from
// its default. Two runs with equal identities are the same run.
enum class IdentityRole : uint8_t { no, yes, unless_default };

struct Field {
  Bounds range = {};                     // bounds of a number, or of the number of positional arguments
  std::string_view choices = {};         // valid strings ("fp32|bf16"); for an enum, the names that users may specify
  std::string_view expected = {};        // "a file": describes the value in messages; empty: UTF-8 text
  std::string_view denied = {};          // "untied": the option that sets it to false
  std::string_view goes_with = {};       // "dp_mode ps-sync or ps-async": the field and values that enable it
  std::string_view group = {};           // in help; default: as in Settings::add()
  bool open = false;                     // derived from other fields if unset, so it has no default
  bool in_file = true, in_words = true;  // in_file false: per call, not stored; in_words false: not an option
  bool repeated = false, place = false;  // repeated: may be passed several times; place: a positional argument
  bool of_weights = false;               // a property of trained weights
  IdentityRole same = IdentityRole::no, recorded = IdentityRole::no;
  std::string_view (*renames)(std::string_view name) = nullptr;  // maps aliases of an enum's names
  double* fraction = nullptr;  // if nonzero, replaces the number: 0.03 from "3%", 0.25 from "0.25e"
  char unit_suffix = 0;        // the suffix, '%' or 'e'
};

// An enum value. If its names are digits, it is presented as a number.
struct Choice {
  void* at;
  int64_t (*get)(const void*);
  void (*set)(void*, int64_t);
  std::span<const std::string_view> names;
  std::string* file;  // receives any other string, as a file name; may be null
  std::string_view name() const { return names[static_cast<size_t>(get(at))]; }
  bool is_number() const { return names.front() == "0"; }
};

struct ValueRef : std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*, std::optional<double>*,
                               std::optional<std::string>*, std::vector<int64_t>*, std::vector<std::string>*, Choice> {
  using variant::variant;
  template <class Enum>
  requires std::is_enum_v<Enum> ValueRef(Enum* value, std::string* file = nullptr)
      : variant(Choice{value, [](const void* p) { return static_cast<int64_t>(*static_cast<const Enum*>(p)); },
                       [](void* p, int64_t i) { *static_cast<Enum*>(p) = static_cast<Enum>(i); }, value_names(*value),
                       file}) {}
};

// Points into the struct and must not outlive it.
struct Setting {
  std::string_view name;
  ValueRef at;
  std::string_view help = {};  // names other fields in backticks
  Field field = {};

  std::string word() const;  // the option's name: "sync-every", "untied"
  bool is_flag() const { return std::holds_alternative<bool*>(at); }
  bool is_text() const;           // quoted in files
  std::string_view kind() const;  // "integer", "number", "flag", "choice", "text", "integers" or "texts"
  std::string choices() const;    // "fp32|bf16"; empty: none
  // Throws Error: "`where`: expected X, got Y".
  void read(const std::string& where, const std::string& text) const;
  // The value as users write it; empty if there is none.
  std::string text() const;
  // The value as written in KEY = VALUE files.
  std::string written() const;
  void assign(const Setting& same) const;  // copies the value from another struct of the same type
};

class Settings {
 public:
  Settings() = default;
  Settings(std::initializer_list<Setting> settings) {
    for (const Setting& s : settings) add(s);
  }
  void add(const Setting& setting);
  // `group` applies to settings without a group.
  void add(std::string_view group, const Settings& settings);
  void append(const Settings& others) { all_.insert(all_.end(), others.all_.begin(), others.all_.end()); }
  // Moves the field `name` to directly follow the field `after`.
  void move(std::string_view name, std::string_view after);
  // Sorts by group, in this order; stable within a group.
  void sort(std::span<const std::string_view> groups);

  const Setting* find(std::string_view name) const;
  const Setting* find_word(std::string_view word) const;
  const Setting& at(std::string_view name) const;
  std::vector<std::string> names() const;
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  std::vector<Setting> all_;
};

// Whether the other fields' values enable this field.
bool applies(const Setting& setting, const Settings& all);
// Throw FieldError: check_minimum() for integers below their range that are not the default, check_read() for unused
// fields that differ from their default.
void check_minimum(const Settings& all, const Settings& defaults);
void check_read(const Settings& all, const Settings& defaults);
// The fields that differ: "dp=2 zero=3".
std::string difference(const Settings& from, const Settings& defaults);

// Throws like Setting::read().
int64_t parse_integer(const std::string& where, const std::string& text, const Bounds& range);
std::vector<std::string> split(std::string_view text, char at);

}  // namespace tessera
