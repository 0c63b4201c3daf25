// What a user may have meant by a name that there is not.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// The entry of `known` nearest to `typed`, when it is near enough to be a slip of the finger or another program's word
// for it ("gpu", "fp16"), as "; did you mean 'x'?"; else nothing.
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known);
std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known);

}  // namespace tessera
