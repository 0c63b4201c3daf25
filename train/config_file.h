// The fields of a run's configuration, and config.toml, which stores them.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/setting.h"
#include "train/config.h"

namespace tessera {

using Args = std::vector<std::pair<std::string, std::string>>;  // (name in files and on the command line, value)
using FieldNames = std::set<std::string, std::less<>>;

inline constexpr const char* kBaseHelp =
    "base model of the adapters: a Hugging Face folder or a run [the model recorded in the adapters]";
inline constexpr const char* kSpecialHelp =
    "encode the names of special tokens in the data as special tokens rather than as text";
inline constexpr const char* kNoBosHelp =
    "omit the special tokens, such as BOS, that the tokenizer adds before and after a text";

// In the order of help and files.
Settings field_descriptors(TrainConfig& config);

// The fields that `chosen` accepts, with their values as in files. `all` are the descriptors of `config` and possibly
// of other structs. `set`: the derived fields (Field::open) to include, those that a user set; null: all that apply.
Args values(const TrainConfig& config, const FieldNames* set, const Settings& all,
            bool (*chosen)(const Setting& setting));
// The keys and values of to_toml().
Args config_values(TrainConfig config, const FieldNames* set = nullptr);
// The configuration as TOML; apply_config_file() restores the same values.
std::string to_toml(const TrainConfig& config, const FieldNames* set = nullptr);

// Applies a TOML file. Throws InputError if it cannot be read; otherwise as apply_config().
FieldNames apply_config_file(TrainConfig& config, const std::string& path);
// Applies configuration text in the format of read_config() and returns the names of its fields; `path` names the file
// in messages. Throws Error (usage) with line and column for syntax errors, unknown keys (with the nearest known key),
// and values of the wrong type or range.
FieldNames apply_config(TrainConfig& config, std::string_view file, const std::string& path);

}  // namespace tessera
