// Descriptors of a sample struct: accepted and rejected values, and all representations of a value.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/setting_json.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

enum class Mood : uint8_t { calm, loud, very_loud };
constexpr std::array<std::string_view, 3> kMoods = {"calm", "loud", "very-loud"};
constexpr const auto& value_names(Mood) { return kMoods; }
enum class Level { none, one, two };
constexpr std::array<std::string_view, 3> kLevels = {"0", "1", "2"};
constexpr const auto& value_names(Level) { return kLevels; }

struct Tune {
  int64_t voices = 1, bars = 0;
  double speed = 0.5;
  bool sung = false, in_key = true;
  std::string name = "none";
  std::optional<std::string> file;
  std::optional<double> pitch;
  std::vector<int64_t> beats;
  std::vector<std::string> words;
  Mood mood = Mood::calm;
  std::string mood_file;
  Level level = Level::none;
};

Settings field_descriptors(Tune& t) {
  Settings s;
  s.add("Sound", {{"voices", &t.voices, "number of voices", Field{.range = {1, 64}, .same = IdentityRole::yes}},
                  {"bars", &t.bars, "default: as many as the words have",
                   Field{.range = {1, 100}, .open = true, .same = IdentityRole::unless_default}},
                  {"speed", &t.speed, "with `voices`", Field{.range = {0, 1, true}, .in_file = false}},
                  {"sung", &t.sung, "by people", Field{.goes_with = "mood loud or very-loud"}},
                  {"in_key", &t.in_key, "any note", Field{.denied = "off_key"}}});
  s.add("Names", {{"name", &t.name, "title", Field{.choices = "none|first|last", .goes_with = "voices"}},
                  {"file", &t.file, "to write", Field{.expected = "a file"}},
                  {"pitch", &t.pitch, "of the first note", Field{.range = {-1e300, 9}}},
                  {"beats", &t.beats, "strong ones", Field{.range = {1, 8}}},
                  {"words", &t.words, "sung", Field{.same = IdentityRole::unless_default}},
                  {"mood", {&t.mood, &t.mood_file}, "a name or a file"},
                  {"mood_file", &t.mood_file, {}, Field{.in_words = false}},
                  {"level", &t.level, "a number"}});
  return s;
}

std::string refusal(std::string_view name, const std::string& text) {
  Tune t;
  return error_message([&] { field_descriptors(t).at(name).read("--x", text); });
}

TEST(Settings, ValuesOfEveryTypeRoundTripThroughText) {
  Tune t;
  const Settings all = field_descriptors(t);
  for (const auto& [name, text, written] :
       std::vector<std::array<std::string, 3>>{{"voices", "64", "64"},
                                               {"speed", "0", "0.0"},
                                               {"sung", "true", "true"},
                                               {"in_key", "true", "true"},
                                               {"name", "last", "\"last\""},
                                               {"file", "a\"\x01", "\"a\\\"\\u0001\""},
                                               {"pitch", "-3", "-3.0"},
                                               {"beats", "1,8", "1,8"},
                                               {"words", "la,le", "\"la,le\""},
                                               {"mood", "very-loud", "\"very-loud\""},
                                               {"level", "2", "2"}}) {
    all.at(name).read("--x", text);
    EXPECT_EQ(all.at(name).text(), text) << name;
    EXPECT_EQ(all.at(name).written(), written) << name;
  }
  EXPECT_FALSE(t.in_key);  // set by its negation, --off-key
  EXPECT_EQ(all.find_word("off-key"), &all.at("in_key"));
  EXPECT_EQ(t.mood, Mood::very_loud);
  EXPECT_EQ(t.level, Level::two);
  all.at("mood").read("--x", "song.txt");
  EXPECT_EQ(t.mood_file, "song.txt");
  EXPECT_EQ(all.at("mood").text(), "song.txt");
  EXPECT_EQ(all.find_word("mood-file"), nullptr);
  Tune other;
  for (const Setting& s : field_descriptors(other)) s.assign(all.at(s.name));
  EXPECT_EQ(to_json(field_descriptors(other)), to_json(all));
}

TEST(Settings, ErrorsNameExpectedAndActualValue) {
  EXPECT_EQ(refusal("voices", "65"), "--x: expected an integer in [1, 64], got '65'");
  EXPECT_EQ(refusal("speed", "1"), "--x: expected a number in [0, 1), got '1'");
  EXPECT_EQ(refusal("pitch", "10"), "--x: expected a number, got '10'");
  EXPECT_EQ(refusal("sung", "yes"), "--x: expected true or false, got 'yes'");
  EXPECT_EQ(refusal("name", "lats"), "--x: expected none, first, last, got 'lats'; did you mean 'last'?");
  EXPECT_EQ(refusal("file", ""), "--x: expected a file, got ''");
  EXPECT_EQ(refusal("words", "\xe9"), "--x: expected UTF-8, got '\\xe9'");
  EXPECT_EQ(refusal("beats", "1,9"), "--x: expected an integer in [1, 8], got '9'");
  EXPECT_EQ(refusal("level", "3"), "--x: expected an integer in [0, 2], got '3'");
  EXPECT_EQ(refusal("mood", ""), "--x: expected a value, got ''");
}

TEST(Settings, DescriptorsValidateValues) {
  Tune t, defaults;
  const auto low_value = [&] {
    return error_message([&] { check_minimum(field_descriptors(t), field_descriptors(defaults)); });
  };
  const auto read = [&] {
    return error_message([&] { check_read(field_descriptors(t), field_descriptors(defaults)); });
  };
  EXPECT_EQ(low_value(), "nothing was thrown");
  EXPECT_EQ(read(), "nothing was thrown");
  t.bars = -1;
  EXPECT_EQ(low_value(), "`bars`: expected at least 0, got -1");
  t.bars = 0, t.voices = 0;
  EXPECT_EQ(low_value(), "`voices`: expected at least 1, got 0");
  t.name = "last";
  EXPECT_EQ(read(), "`name`: requires `voices`, got 0; nearest valid value: none, the default");
  t.voices = 2, t.sung = true;
  EXPECT_EQ(read(), "`sung`: requires `mood` loud or very-loud, got calm; nearest valid value: false, the default");
  t.mood = Mood::loud;
  EXPECT_EQ(read(), "nothing was thrown");
  EXPECT_EQ(difference(field_descriptors(t), field_descriptors(defaults)), "voices=2 sung=true name=last mood=loud");
}

TEST(Settings, RoundTripThroughJson) {
  Tune t, back;
  t.beats = {1, 2}, t.file = "f", t.mood = Mood::loud, t.level = Level::one, t.in_key = false;
  const std::string json = to_json(field_descriptors(t)).dump();
  EXPECT_EQ(json,
            R"({"voices":1,"bars":0,"speed":0.5,"sung":false,"in_key":false,"name":"none","file":"f","beats":[1,2],)"
            R"("words":[],"mood":"loud","level":1})");
  take_json(field_descriptors(back), json, "a tune");
  EXPECT_EQ(to_json(field_descriptors(back)).dump(), json);
  const auto wrong = [&](const char* text) {
    return error_message([&] { take_json(field_descriptors(back), text, "a tune"); });
  };
  EXPECT_EQ(wrong("[1]"), "a tune: expected a JSON object, got [1]");
  EXPECT_EQ(wrong(R"({"voices": 1.5})"), "`voices`: expected an integer, got 1.5");
  EXPECT_EQ(wrong(R"({"level": 3})"), "`level`: expected 0, 1 or 2, got 3");
  EXPECT_EQ(wrong(R"({"mood": "lout"})"), "`mood`: expected calm, loud, very-loud, got \"lout\"; did you mean 'loud'?");
  EXPECT_EQ(wrong(R"({"beats": [true]})"), "`beats`: expected an integer, got true");
  EXPECT_TRUE(wrong(R"({"voicse": 1})").ends_with("level; did you mean 'voices'?"));
}

TEST(Settings, DescriptorsProvideIdentityFieldsAndJson) {
  Tune t, defaults;
  EXPECT_EQ(identity_fields(field_descriptors(t), field_descriptors(defaults)).dump(), R"({"voices":1})");
  t.words = {"la"}, t.speed = 0.1;
  EXPECT_EQ(identity_fields(field_descriptors(t), field_descriptors(defaults)).dump(),
            R"({"voices":1,"words":["la"]})");
  const auto entry = [&](const char* name) {
    return make_entry(field_descriptors(defaults).at(name), [](const std::string& help) { return help + "!"; }).dump();
  };
  EXPECT_EQ(entry("speed"), R"({"name":"speed","group":"Sound","kind":"number","default":0.5,"least":0.0,"below":1.0,)"
                            R"("in_file":false,"help":"with `voices`!"})");
  EXPECT_EQ(entry("bars"), R"({"name":"bars","group":"Sound","kind":"integer","least":1.0,"most":100.0,)"
                           R"("help":"default: as many as the words have!"})");
  EXPECT_EQ(entry("name"), R"({"name":"name","group":"Names","kind":"choice","default":"none",)"
                           R"("choices":["none","first","last"],"help":"title!"})");
}

TEST(Settings, DescriptorsAreSortedByGroupAndMovable) {
  Tune t;
  Settings all = field_descriptors(t);
  constexpr std::array<std::string_view, 2> groups = {"Names", "Sound"};
  all.sort(groups);
  all.move("speed", "name");
  EXPECT_EQ(all.names()[1], "speed");
  EXPECT_EQ(all.names().back(), "in_key");
}

}  // namespace
}  // namespace tessera
