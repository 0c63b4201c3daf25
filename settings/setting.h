// Settings: what may be said of a program, one entry for each field of a struct. The entry stands beside the struct and
// names the field, never an option; whoever needs the fields one by one visits the entries: the command line, its help,
// configuration files, JSON, the identity of a run, checks.
//
//   Settings field_descriptors(Tune& t) {
//     Settings s;
//     s.group("Sound");
//     s.add(t.voices, {"voices", "number of voices", {1, 64}});
//     s.add(t.key_mode, {"key_mode", "with `voices` above 1: how they agree"});  // an enum has its own names
//     return s;
//   }
//   field_descriptors(tune).at("voices").read("--voices", "12");   // throws Error: --voices: expected a whole number
//   in ...
#pragma once
#include <cstdint>
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
  double least = -1e300, most = 1e300;
  bool most_excluded = false;
};

// Whether a run's identity, or its record, says a field: never, where it applies, or only where it is not as usual too.
// Two runs with the same identity are the same run.
enum class IdentityRole : uint8_t { no, yes, unless_usual };

// One entry, and what else there is to say of it: settings.add(t.key, {"key", "..."}).with("voices").follows(). A help
// names other fields between backticks.
struct Field {
  std::string_view name, help = {};
  Bounds range = {};                // bounds of a number, and of how many words a place takes
  std::string_view choices = {};    // "fp32|bf16": of a text; of an enum's names those that a user may say
  std::string_view expected = {};   // "a file": what a text is; default: a value in UTF-8
  std::string_view denied = {};     // "untied": what users say where the field is false
  std::string_view goes_with = {};  // "dp_mode ps-sync or ps-async": the field and the values beside which it is read
  std::string_view group = {};      // default: Settings::group()
  bool open = false;                // follows from other fields where nobody says it: its default is no value
  bool in_file = true, in_words = true;  // false: about one call of the program, so in no configuration; no option
  bool repeated = false, place = false;  // each word adds a text to a list; said by its place, not by its name
  bool of_weights = false;               // trained weights have it
  IdentityRole same = IdentityRole::no, recorded = IdentityRole::no;
  std::string_view (*renames)(std::string_view name) = nullptr;  // another name of an enum's value, as its own
  double* share = nullptr;  // where "3%" or "0.25e" lies as 0.03 or 0.25, in place of the number; 0: the number holds
  char of_what = 0;         // '%' or 'e', behind a share

  Field& follows() { return open = true, *this; }
  Field& of_call() { return in_file = false, *this; }
  Field& for_programs() { return in_words = false, *this; }
  Field& by_place() { return place = true, *this; }
  Field& many() { return repeated = true, *this; }
  Field& of(std::string_view said) { return choices = said, *this; }
  Field& a(std::string_view thing) { return expected = thing, *this; }
  Field& unless(std::string_view word) { return denied = word, *this; }
  Field& with(std::string_view owner) { return goes_with = owner, *this; }
  Field& in(std::string_view name_of_group) { return group = name_of_group, *this; }
  Field& for_identity(IdentityRole when) { return same = when, *this; }
  Field& for_record(IdentityRole when) { return recorded = when, *this; }
  Field& for_weights() { return of_weights = true, *this; }
  Field& or_share(double& part, char whole) { return share = &part, of_what = whole, *this; }
  Field& renaming(decltype(renames) how) { return renames = how, *this; }
};

// A value of an enum. Names that are digits are numbers to a user.
struct Choice {
  void* at;
  int64_t (*get)(const void*);
  void (*set)(void*, int64_t);
  std::span<const std::string_view> names;
  std::string* file;  // not null: what is none of the names is the name of a file, which lies here
  std::string_view name() const { return names[static_cast<size_t>(get(at))]; }
  bool is_number() const { return names.front() == "0"; }
};

// A field of one struct. It points into the struct and does not outlive it.
class Setting {
 public:
  using Place = std::variant<int64_t*, double*, bool*, std::string*, std::optional<int64_t>*, std::optional<double>*,
                             std::optional<std::string>*, std::vector<int64_t>*, std::vector<std::string>*, Choice>;
  Field field;
  Place at;

  std::string word() const;  // the word that a user says: "sync-every", "untied"
  bool is_flag() const { return std::holds_alternative<bool*>(at); }
  bool is_text() const;           // written in quotes
  std::string_view kind() const;  // "integer", "number", "flag", "choice", "text", "integers" or "texts"
  std::string choices() const;    // "fp32|bf16"; empty: none
  // Takes a user's words. Throws Error that begins with `where` and says what was expected and found.
  void read(const std::string& where, const std::string& text) const;
  // The value in a user's words; empty where there is none.
  std::string text() const;
  // The value as KEY = VALUE files have it.
  std::string written() const;
  void assign(const Setting& same) const;  // takes the value in another struct of that type
};

class Settings {
 public:
  // Whatever is added from here on belongs to it.
  Settings& group(std::string_view name);
  template <class T>
  Field& add(T& value, const Field& field) {
    if constexpr (std::is_enum_v<T>)
      return insert(field, choice(value));
    else
      return insert(field, &value);
  }
  template <class Enum>
  Field& add_or_file(Enum& value, std::string& file, const Field& field) {
    Choice named = choice(value);
    named.file = &file;
    return insert(field, named);
  }
  Settings& add(const Settings& others);
  Field& add(const Setting& other) { return all_.push_back(other), all_.back().field; }
  // Puts one of them behind another.
  void move(std::string_view name, std::string_view after);
  // Groups in this order, and within each the order that they were added in.
  void sort(std::span<const std::string_view> groups);

  const Setting* find(std::string_view name) const;
  const Setting* find_word(std::string_view word) const;
  const Setting& at(std::string_view name) const;
  std::vector<std::string> names() const;
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  template <class Enum>
  static Choice choice(Enum& value) {
    return {&value, [](const void* p) { return static_cast<int64_t>(*static_cast<const Enum*>(p)); },
            [](void* p, int64_t i) { *static_cast<Enum*>(p) = static_cast<Enum>(i); }, value_names(value), nullptr};
  }
  Field& insert(Field field, Setting::Place at);

  std::string_view group_;
  std::vector<Setting> all_;
};

// Whether the field is read beside the others' values.
bool applies(const Setting& setting, const Settings& all);
// Throws FieldError for a whole number below its range, but for the usual one; and for a value that nothing reads and
// that is not the usual one.
void check_least(const Settings& all, const Settings& usual);
void check_read(const Settings& all, const Settings& usual);
// "dp=2 zero=3": the fields that differ.
std::string difference(const Settings& from, const Settings& usual);

// A whole number by itself. Throws as Setting::read().
int64_t parse_integer(const std::string& where, const std::string& text, const Bounds& range);
std::vector<std::string> split(std::string_view text, char at);

}  // namespace tessera
