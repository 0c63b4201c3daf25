// Checks of what a rank records about itself: later code reads only fields of the expected types.
#include "verify/audit/info.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"

namespace tessera::audit {

using Json = nlohmann::json;

namespace {

constexpr int64_t kMaxHeads = int64_t{1} << 31;
using Coordinates = std::map<std::string, std::pair<int64_t, int64_t>>;

// Missing fields and null are the same.
void expect(const Json& object, const char* field, const char* expected, const std::string& what,
            bool (*right)(const Json&)) {
  const Json& value = value_at(object, field);
  if (!value.is_null() && !right(value)) bad_input("{}: {}: expected {}, got {}", what, field, expected, shown(value));
}

bool is_number(const Json& value) { return value.is_number(); }
bool is_natural(const Json& value) { return natural(value).has_value(); }
bool is_text(const Json& value) { return value.is_string(); }
bool is_list(const Json& value) { return value.is_array(); }
bool is_object(const Json& value) { return value.is_object(); }

void check_optimizer(const Json& info, const std::string& what) {
  expect(info, "optimizer", "an object", what, is_object);
  const Json& optimizer = value_at(info, "optimizer");
  const std::string here = what + ": optimizer";
  expect(optimizer, "class", "text", here, is_text);
  expect(optimizer, "step", "a number from 0", here, is_natural);
  expect(optimizer, "groups", "a list", here, is_list);
  for (const Json& group : value_at(optimizer, "groups")) {
    if (!group.is_object()) bad_input("{}: groups: expected objects, got {}", here, shown(group));
    for (const char* field : {"lr", "eps", "momentum", "weight_decay", "dampening"})
      expect(group, field, "a number", here, is_number);
    expect(group, "betas", "two numbers", here,
           [](const Json& v) { return v.is_array() && v.size() == 2 && v[0].is_number() && v[1].is_number(); });
    expect(group, "parameters", "a list of names", here, is_list);
  }
}

}  // namespace

RankInfo parse_info(const std::string& text, const std::string& file, int64_t ranks) {
  const std::string what = file + ": info";
  RankInfo out{.axes = {}, .info = parse_json(text, what, JsonFile::others)};
  const Json& info = out.info;
  if (!info.is_object()) bad_input("{}: expected an object, got {}", what, shown(info));
  expect(info, "axes", "an object", what, is_object);
  for (const auto& [axis, place] : value_at(info, "axes").items()) {
    const bool pair = place.is_array() && place.size() == 2 && natural(place[0]) && natural(place[1]);
    if (!pair || *natural(place[0]) >= *natural(place[1]) || *natural(place[1]) > ranks)
      bad_input("{}: axes: expected {{\"{}\": [coordinate, size]}} of at most {} ranks, got {}", what, axis, ranks,
                shown(place));
    out.axes[axis] = {*natural(place[0]), *natural(place[1])};
    if (axis.starts_with("dp")) out.data = out.data * *natural(place[1]) + *natural(place[0]);
    if (out.data >= ranks)
      bad_input("{}: axes: expected at most {} data ranks, got {}", what, ranks, shown(info["axes"]));
  }
  expect(info, "microbatches", "a number from 0", what, is_natural);
  expect(info, "losses", "a list", what, is_list);
  for (const Json& loss : value_at(info, "losses")) {
    if (!loss.is_object()) bad_input("{}: losses: expected objects, got {}", what, shown(loss));
    const std::string here = what + ": losses";
    for (const char* field : {"value", "tokens"}) expect(loss, field, "a number", here, is_number);
    expect(loss, "scale", "a positive number", here,
           [](const Json& v) { return v.is_number() && v.get<double>() > 0; });
    expect(loss, "reduction", "text", here, is_text);
  }
  check_optimizer(info, what);
  expect(info, "clip", "an object", what, is_object);
  for (const char* field : {"norm", "max_norm"})
    expect(value_at(info, "clip"), field, "a number", what + ": clip", is_number);
  expect(info, "recomputed", "a list", what, is_list);
  expect(info, "heads", "two numbers", what, [](const Json& v) {
    return v.is_array() && v.size() == 2 && natural(v[0]) && natural(v[1]) && *natural(v[0]) < kMaxHeads &&
           *natural(v[1]) < kMaxHeads;
  });
  return out;
}

void check_ranks(const std::vector<RankInfo>& ranks, const std::function<std::string(size_t rank)>& what) {
  int64_t product = 1;
  for (const auto& [axis, place] : ranks[0].axes)
    if (product < std::ssize(ranks)) product *= place.second;
  std::map<Coordinates, size_t> known;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const char* field : {"framework", "detail", "family"})
      if (const Json& here = value_at(ranks[r].info, field), &first = value_at(ranks[0].info, field); here != first)
        bad_input("{}: info: {}: expected {} as on rank 0, got {}", what(r), field, shown(first), shown(here));
    Coordinates sizes, others;
    for (const auto& [axis, place] : ranks[r].axes) sizes[axis] = {0, place.second};
    for (const auto& [axis, place] : ranks[0].axes) others[axis] = {0, place.second};
    if (sizes != others)
      bad_input("{}: info: axes: expected the axes and sizes of rank 0, {}, got {}", what(r),
                shown(value_at(ranks[0].info, "axes")), shown(value_at(ranks[r].info, "axes")));
    const auto [same, fresh] = known.emplace(ranks[r].axes, r);
    if (!fresh && product >= std::ssize(ranks))
      bad_input("{}: info: axes: expected other coordinates than rank {}, got {}", what(r), same->second,
                shown(value_at(ranks[r].info, "axes")));
  }
}

}  // namespace tessera::audit
