// The fields of a model's configuration, described (settings/setting.h), and what their values are called: by a user,
// in JSON, in messages.
#pragma once
#include "models/families.h"
#include "models/language_model.h"
#include "tensor/error.h"

namespace tessera {

constexpr std::array<std::string_view, 2> kRouterSoftmaxNames = {"chosen", "all"};
constexpr std::array<std::string_view, 3> kRopeScalingNames = {"none", "linear", "llama3"};
constexpr std::array<std::string_view, 3> kCodecNames = {"none", "nf4", "gptq"};

constexpr const auto& names_of(RouterSoftmax) { return kRouterSoftmaxNames; }
constexpr const auto& names_of(RopeScaling) { return kRopeScalingNames; }
constexpr const auto& names_of(Codec) { return kCodecNames; }

template <class Enum>
constexpr std::string_view text_of(Enum value) {
  return name_in(names_of(value), value);
}

class Settings;
Settings settings_of(ModelConfig& config);
// The sizes of `config`, with those that follow from others filled in.
ModelConfig whole_sizes(ModelConfig config);

}  // namespace tessera
