// Parses tokenizer.json and the files next to it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/tokenizer/described.h"
#include "data/tokenizer/hub_file.h"

namespace tessera {
namespace hub {

namespace {

// Larger than in any known model; a file beyond these limits would cost minutes and gigabytes.
constexpr size_t kMaxTokens = 600'000, kMaxMerges = 600'000, kLongestAdded = 1000;

using Json = nlohmann::json;

bool flag(const Json& json, const char* key, bool otherwise, const std::string& what) {
  const Json& value = value_at(json, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) bad_input("{}: '{}' must be true or false, not {}", what, key, shown(value));
  return value.get<bool>();
}

// Parses "<0x0A>".
std::optional<uint8_t> parse_byte(std::string_view spelling) {
  if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return std::nullopt;
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  const size_t high = kDigits.find(spelling[3]), low = kDigits.find(spelling[4]);
  if (std::max(high, low) == std::string_view::npos) return std::nullopt;
  return static_cast<uint8_t>(16 * high + low);
}

bool is_blank(const Json& text) { return text.is_string() && text.get_ref<const std::string&>().empty(); }

class Model {
 public:
  Model(const File& file, const std::string& what, Description& d)
      : model_(value_at(file.json, "model")), what_(what), d_(d) {
    flags();
    number_tokens(file.vocab.members, value_at(file.json, "added_tokens"));
    if (d_.byte_level && fallback_set_ &&
        std::find(d_.byte_tokens.begin(), d_.byte_tokens.end(), -1) != d_.byte_tokens.end())
      fail("'byte_fallback' and a ByteLevel pre_tokenizer without a token for every byte; expected only one of these");
    read_merges();
    if (const Json& name = value_at(model_, "unk_token"); name.is_string() && !is_blank(name)) {
      // As in the library, a missing unknown token is an error only when it is needed.
      d_.unknown = d_.vocab.find(name.get_ref<const std::string&>());
    }
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw InputError(what_ + ": " + why); }

  void flags() {
    // Early files do not specify a type.
    if (!model_.is_object() || (model_.contains("type") && model_["type"] != "BPE"))
      fail(fmt::format("the model is of type {}; expected BPE", shown(value_at(model_, "type"))));
    if (const Json& dropout = value_at(model_, "dropout"); !dropout.is_null() && dropout != 0)
      fail(fmt::format("'dropout' is {}; expected none", shown(dropout)));
    for (const char* const key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (const Json& text = value_at(model_, key); !text.is_null() && !is_blank(text))
        fail(fmt::format("'{}' is {}; expected none", key, shown(text)));
    d_.fuse_unknown = flag(model_, "fuse_unk", false, what_);
    d_.byte_fallback = flag(model_, "byte_fallback", false, what_);
    d_.ignore_merges = flag(model_, "ignore_merges", false, what_);
    fallback_set_ = d_.byte_fallback;
    if (d_.byte_level) d_.byte_fallback = false;
  }

  std::string token_bytes(const std::string& spelling) const {
    if (d_.spaces_between) return " " + spelling;
    if (d_.byte_level) return bpe::unspell(spelling).value_or(spelling);
    if (const auto byte = parse_byte(spelling); byte && d_.byte_fallback)
      return std::string(1, static_cast<char>(*byte));
    if (!d_.marks_are_spaces) return spelling;
    std::string out = spelling;
    for (size_t mark = out.find(kMark); mark != std::string::npos; mark = out.find(kMark, mark))
      out.replace(mark, kMark.size(), " ");
    return out;
  }

  // Stores a token at its id, which must be free, and returns its bytes.
  const std::string& set(const Json& id, const std::string& spelling) {
    const auto number = natural(id);
    if (spelling.empty()) fail(fmt::format("token {} is empty", shown(id)));
    if (!number || static_cast<size_t>(*number) >= d_.tokens.size() || !d_.tokens[static_cast<size_t>(*number)].empty())
      fail(fmt::format("the token {} has the id {}; expected each of 0 to {} once", shown(spelling), shown(id),
                       d_.tokens.size() - 1));
    return d_.tokens[static_cast<size_t>(*number)] = token_bytes(spelling);
  }

  void number_tokens(const std::vector<std::pair<std::string, Json>>& vocab, const Json& added) {
    if (!value_at(model_, "vocab").is_object() || vocab.empty())
      fail("the model's 'vocab' must be an object that maps tokens to ids");
    if (!added.is_null() && !added.is_array()) fail("'added_tokens' must be a list");
    d_.vocab.reserve(vocab.size());
    for (const auto& [spelling, id] : vocab)
      if (!d_.vocab.add(spelling, static_cast<int32_t>(std::min<int64_t>(natural(id).value_or(INT32_MAX), INT32_MAX))))
        fail(fmt::format("'vocab' has the token {} twice", shown(spelling)));
    size_t missing = 0;  // number of added tokens missing in the vocabulary
    for (const Json& token : added) missing += d_.vocab.find(token_content(token)) < 0 ? 1 : 0;
    if (vocab.size() + missing > kMaxTokens)
      fail(fmt::format("{} tokens; expected at most {}", vocab.size() + missing, kMaxTokens));
    d_.tokens.resize(vocab.size() + missing);
    d_.byte_tokens.assign(256, -1);
    for (const auto& [spelling, id] : vocab) {
      const std::string& bytes = set(id, spelling);
      if (d_.byte_level && bytes.size() == 1 && bpe::spell(bytes) == spelling)
        d_.byte_tokens[static_cast<uint8_t>(bytes[0])] = id.get<int32_t>();
      if (const auto byte = parse_byte(spelling); byte && d_.byte_fallback) d_.byte_tokens[*byte] = id.get<int32_t>();
    }
    for (const Json& token : added) add(token);
  }

  const std::string& token_content(const Json& token) const {
    const Json& content = value_at(token, "content");
    if (!content.is_string()) fail(fmt::format("the added token {} has no 'content'", shown(token)));
    return content.get_ref<const std::string&>();
  }

  void add(const Json& token) {
    const std::string& content = token_content(token);
    if (content.empty() || content.size() > kLongestAdded)
      fail(fmt::format("an added token of {} bytes; expected 1 to {}", content.size(), kLongestAdded));
    const Json& id = value_at(token, "id");
    if (const int32_t known = d_.vocab.find(content); known < 0) {
      set(id, content);
    } else if (id != known) {
      fail(fmt::format("the added token {} has the id {}, but the vocabulary assigns {}", shown(content), shown(id),
                       known));
    }
    const auto is = [&](const char* key, bool otherwise = false) { return flag(token, key, otherwise, what_); };
    d_.added.emplace_back(content, AddedToken{.token = id.get<int32_t>(),
                                              .special = is("special"),
                                              .normalized = is("normalized", !is("special")),
                                              .single_word = is("single_word"),
                                              .left = is("lstrip"),
                                              .right = is("rstrip")});
  }

  // "left right", or ["left", "right"].
  std::pair<std::string_view, std::string_view> halves(const Json& merge, size_t rank) const {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
      return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      if (const size_t space = text.find(' ');
          space != std::string_view::npos && text.find(' ', space + 1) > text.size())
        return {text.substr(0, space), text.substr(space + 1)};
    }
    fail(fmt::format("merge {} is {}; expected two tokens", rank, shown(merge)));
  }

  int32_t find_token_id(std::string_view spelling, size_t rank) const {
    const int32_t found = d_.vocab.find(spelling);
    if (found < 0) fail(fmt::format("merge {} has '{}', which is not in the vocabulary", rank, spelling));
    return found;
  }

  void read_merges() {
    const Json& merges = value_at(model_, "merges");
    if (!merges.is_array()) fail("the model's 'merges' must be a list");
    if (merges.size() > kMaxMerges) fail(fmt::format("{} merges; expected at most {}", merges.size(), kMaxMerges));
    d_.merges.reserve(merges.size());
    d_.marks_begin_words = !d_.byte_level && !d_.ignore_merges && d_.vocab.find(kMark) >= 0;
    std::string joined;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
      const auto [left, right] = halves(merges[rank], rank);
      joined.assign(left).append(right);
      const bpe::Merge merge{.left = find_token_id(left, rank), .right = find_token_id(right, rank)};
      if (!d_.merges.add(merge, find_token_id(joined, rank)))
        fail(fmt::format("merge {} (into '{}') appears twice", rank, joined));
      if (right.starts_with(kMark) && !left.ends_with(kMark)) d_.marks_begin_words = false;
    }
  }

  const Json& model_;
  const std::string& what_;
  Description& d_;
  bool fallback_set_ = false;
};

class Steps {
  using Split = bpe::Split;
  using enum bpe::Behaviour;
  using enum Change::Kind;

 public:
  Steps(const std::string& what, Description& d) : what_(what), d_(d) {}

  void normalizer(const Json& step) {
    if (step.is_null()) return;
    const Json& type = value_at(step, "type");
    if (type == "Sequence") {
      for (const Json& child : children(step, "normalizers")) normalizer(child);
    } else if (type == "Strip") {
      if (flag(step, "strip_left", true, what_)) d_.changes.push_back({strip_left});
      if (flag(step, "strip_right", true, what_)) d_.changes.push_back({strip_right});
    } else if (const auto known = named(kChanges, type)) {
      const Json& text = value_at(step, *known == prepend ? "prepend" : "content");
      const bool has_text = *known == prepend || *known == replace;
      if (has_text && !text.is_string()) unknown("normalizer", step, "a string to insert");
      d_.changes.push_back({*known, has_text ? text.get<std::string>() : "",
                            *known == replace ? std::optional(pattern(step)) : std::nullopt});
    } else {
      unknown("normalizer", step, "NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend or Replace");
    }
  }

  void pre_tokenizer(const Json& step) {
    if (step.is_null()) return;
    const Json& type = value_at(step, "type");
    if (type == "Sequence") {
      for (const Json& child : children(step, "pretokenizers")) pre_tokenizer(child);
      return;
    }
    if (d_.byte_level || (metaspace_ && type == "ByteLevel"))
      bad_input("{}: the pre_tokenizer's {} is followed by {}; expected it last", what_,
                d_.byte_level ? "ByteLevel" : "Metaspace", shown(type));
    if (type == "ByteLevel") {
      byte_level(step);
    } else if (type == "Split") {
      d_.cuts.push_back(pattern(step, behaviour(step), flag(step, "invert", false, what_)));
    } else if (type == "Digits") {
      const bool single = flag(step, "individual_digits", false, what_);
      d_.cuts.push_back(Split::from_regex("\\p{N}", single ? isolated : contiguous));
    } else if (type == "Punctuation") {
      d_.cuts.push_back(Split::from_regex(R"([\p{P}$+<=>^`|~])", behaviour(step)));
    } else if (type == "Whitespace") {
      d_.cuts.push_back(Split::from_regex(fmt::format(R"([{0}]+|[^{0}\s]+)", bpe::kLibraryWord), removed, true));
    } else if (type == "WhitespaceSplit") {
      d_.cuts.push_back(Split::from_regex("\\s", removed));
    } else if (type == "CharDelimiterSplit" && value_at(step, "delimiter").is_string()) {
      d_.cuts.push_back(Split::from_text(value_at(step, "delimiter").get_ref<const std::string&>(), removed));
    } else if (type == "Metaspace" && value_at(step, "replacement") == kMark && d_.cuts.empty()) {
      metaspace_ = d_.marks_spaces = true;
      d_.prefix_mark = prefix(step);
      if (flag(step, "split", true, what_)) d_.cuts.push_back(Split::from_text(kMark, merged_with_next));
    } else {
      unknown("pre_tokenizer", step,
              "ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit, or Metaspace "
              "before others");
    }
  }

  void post_processor(const Json& step) {
    if (step.is_null() || value_at(step, "type") == "ByteLevel") return;  // changes only offsets
    if (value_at(step, "type") == "Sequence") {
      for (const Json& child : children(step, "processors")) post_processor(child);
    } else if (value_at(step, "type") == "TemplateProcessing") {
      ends(step);
    } else if (value_at(step, "type") == "RobertaProcessing" || value_at(step, "type") == "BertProcessing") {
      for (const auto& [key, list] : {std::pair{"cls", &d_.before}, {"sep", &d_.after}}) {
        const Json& pair = value_at(step, key);  // a name and an id
        const auto id = pair.is_array() && pair.size() == 2 ? natural(pair[1]) : std::nullopt;
        if (!id || *id >= std::ssize(d_.tokens)) unknown("post_processor", step, "'cls' and 'sep' of the vocabulary");
        list->push_back(static_cast<int32_t>(*id));
      }
    } else {
      unknown("post_processor", step, "TemplateProcessing, RobertaProcessing, BertProcessing or ByteLevel");
    }
  }

  void decoder(const Json& step) {
    const Json& type = value_at(step, "type");
    if (step.is_null()) {
      d_.spaces_between = true;
      d_.strip = Strip::space;
    } else if (type == "Sequence") {
      for (const Json& child : children(step, "decoders")) decoder(child);
    } else if (type == "Metaspace" && value_at(step, "replacement") == kMark && !d_.byte_level) {
      d_.marks_are_spaces = true;
      if (prefix(step) != Prefix::never) d_.strip = Strip::marks_of_first;
    } else if (type == "Strip" && value_at(step, "content") == " " && value_at(step, "start") == 1 &&
               value_at(step, "stop") == 0) {
      d_.strip = Strip::space;
    } else if (type == "Replace" && value_at(value_at(step, "pattern"), "String") == kMark &&
               value_at(step, "content") == " ") {
      d_.marks_are_spaces = true;
    } else if (!(type == "ByteLevel" && d_.byte_level) && type != "ByteFallback" && type != "Fuse") {
      unknown("decoder", step, d_.byte_level ? "ByteLevel, as the pre_tokenizer" : "that of Llama 2, or Metaspace");
    }
  }

 private:
  [[noreturn]] void unknown(const char* kind, const Json& step, std::string_view expected) const {
    bad_input("{}: the {} {} is not supported; expected {}", what_, kind, shown(step), expected);
  }

  const Json& children(const Json& step, const char* key) const {
    const Json& list = value_at(step, key);
    if (!list.is_array()) bad_input("{}: a Sequence must have a list '{}'", what_, key);
    return list;
  }

  void byte_level(const Json& step) {
    d_.byte_level = true;
    d_.prefix_space = flag(step, "add_prefix_space", true, what_);
    if (d_.prefix_space && !d_.cuts.empty()) unknown("pre_tokenizer", step, "add_prefix_space false after others");
    if (flag(step, "use_regex", true, what_)) d_.cuts.push_back(Split::from_regex(bpe::kGpt2));
  }

  static constexpr std::pair<std::string_view, Change::Kind> kChanges[] = {{"NFC", nfc},
                                                                           {"NFD", nfd},
                                                                           {"NFKC", nfkc},
                                                                           {"NFKD", nfkd},
                                                                           {"Lowercase", lowercase},
                                                                           {"StripAccents", strip_accents},
                                                                           {"Prepend", prepend},
                                                                           {"Replace", replace}};
  static constexpr std::pair<std::string_view, bpe::Behaviour> kBehaviours[] = {
      {"Isolated", isolated},
      {"Removed", removed},
      {"MergedWithPrevious", merged_with_previous},
      {"MergedWithNext", merged_with_next},
      {"Contiguous", contiguous}};

  template <class T, size_t N>
  static std::optional<T> named(const std::pair<std::string_view, T> (&known)[N], const Json& name) {
    for (const auto& [key, value] : known)
      if (name == key) return value;
    return std::nullopt;
  }

  bpe::Behaviour behaviour(const Json& step) const {
    const auto known = named(kBehaviours, value_at(step, "behavior"));
    if (!known) unknown("pre_tokenizer", step, "a 'behavior' such as Isolated");
    return *known;
  }

  Split pattern(const Json& step, bpe::Behaviour how = isolated, bool invert = false) const {
    const Json& value = value_at(step, "pattern");
    const Json &regex = value_at(value, "Regex"), &text = value_at(value, "String");
    if (text.is_string()) return Split::from_text(text.get_ref<const std::string&>(), how, invert);
    if (!regex.is_string()) unknown("step", step, "a 'pattern' with a Regex or a String");
    try {
      return Split::from_regex(regex.get_ref<const std::string&>(), how, invert);
    } catch (const Error& e) {
      bad_input("{}: the pattern {} is not supported: {}", what_, shown(regex), e.what());
    }
  }

  // Older files specify add_prefix_space instead of prepend_scheme.
  Prefix prefix(const Json& step) const {
    const Json& scheme = value_at(step, "prepend_scheme");
    if (scheme.is_null()) return flag(step, "add_prefix_space", true, what_) ? Prefix::always : Prefix::never;
    if (scheme == "always") return Prefix::always;
    if (scheme == "first") return Prefix::first;
    if (scheme == "never") return Prefix::never;
    bad_input("{}: 'prepend_scheme' must be always, first or never, not {}", what_, shown(scheme));
  }

  void ends(const Json& step) {
    bool text_seen = false;
    for (const Json& child : children(step, "single")) {
      if (const Json& text = value_at(child, "Sequence"); !text.is_null()) {
        if (text_seen || value_at(text, "id") != "A") unknown("post_processor", step, "'single' with one sequence A");
        text_seen = true;
        continue;
      }
      const Json& name = value_at(value_at(child, "SpecialToken"), "id");
      const Json& ids =
          name.is_string()
              ? value_at(value_at(value_at(step, "special_tokens"), name.get_ref<const std::string&>()), "ids")
              : name;
      if (!ids.is_array())
        bad_input("{}: the post_processor's {} is neither a sequence nor in its special_tokens", what_, shown(child));
      for (const Json& id : ids) {
        const auto token = natural(id);
        if (!token || *token >= std::ssize(d_.tokens))
          bad_input("{}: the post_processor's token {} is {}; expected at most {}", what_, shown(name), shown(id),
                    std::ssize(d_.tokens) - 1);
        (text_seen ? d_.after : d_.before).push_back(static_cast<int32_t>(*token));
      }
    }
    if (!text_seen) unknown("post_processor", step, "'single' with one sequence A");
  }

  const std::string& what_;
  Description& d_;
  bool metaspace_ = false;
};

}  // namespace

Description describe(const File& file, const std::string& what) {
  const Json& json = file.json;
  if (!value_at(json, "model").is_object()) throw InputError(what + ": not a tokenizer.json (it has no 'model')");
  Description d;
  Steps steps(what, d);
  steps.normalizer(value_at(json, "normalizer"));
  steps.pre_tokenizer(value_at(json, "pre_tokenizer"));
  steps.decoder(value_at(json, "decoder"));
  const Model model(file, what, d);
  steps.post_processor(value_at(json, "post_processor"));
  return d;
}

}  // namespace hub

using hub::Json, hub::kTokenizer, hub::kConfig, hub::kNames, hub::kTemplate, hub::kGeneration;

namespace {

constexpr std::string_view kClass = "PreTrainedTokenizerFast";  // name in transformers 4, also accepted by 5
constexpr uintmax_t kMaxBytes = 100'000'000;                    // three times the largest known file
constexpr std::array kFiles{kTokenizer, kConfig, kNames, kTemplate, kGeneration};

// A string, or the content of an added token.
const Json& name_at(const Json& config, const char* key) {
  const Json& value = value_at(config, key);
  return value.is_object() ? value_at(value, "content") : value;
}

// The only template, or, of several, the one named "default".
std::string read_template(const Json& value, const std::string& what) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array())
    for (const Json& named : value)
      if (value_at(named, "name") == "default" && value_at(named, "template").is_string())
        return value_at(named, "template").get<std::string>();
  bad_input("{}: 'chat_template' must be a string, or a list with one named default", what);
}

}  // namespace

HubTokenizer::HubTokenizer(Files files, const std::string& what)
    : HubTokenizer(std::move(files), hub::File(files.at(kTokenizer), what + kTokenizer), what) {}

HubTokenizer::HubTokenizer(Files&& files, const hub::File& file, const std::string& what)
    : DescribedTokenizer("hub", hub::describe(file, what + kTokenizer), what + kTokenizer), files_(std::move(files)) {
  read_config(what);
  generation_ends(*this);
}

std::string read_tokenizer_file(const std::filesystem::path& file) {
  std::error_code error;
  const auto size = std::filesystem::file_size(file, error);
  if (!error && size > kMaxBytes) bad_input("{} has {} bytes; expected at most {}", file.string(), size, kMaxBytes);
  return read_file(file);
}

bool HubTokenizer::is_file(std::string_view name) {
  return std::find(kFiles.begin(), kFiles.end(), name) != kFiles.end();
}

void HubTokenizer::read_config(const std::string& what) {
  const Json config = hub::joined_settings(files_, what);
  const std::string where = what + kConfig;
  bos_ = named(config, "bos_token", where), eos_ = named(config, "eos_token", where);
  pad_ = named(config, "pad_token", where, false);
  for (const auto& [key, value] : config.items())
    if (const Json& token = name_at(config, key.c_str()); key.ends_with("_token") && token.is_string())
      names_[key] = token.get<std::string>();
  chat_template_ = read_template(value_at(config, "chat_template"), where);
  if (!eos_) eos_ = special("<|endoftext|>");
  if (eos_ && !files_.contains(kConfig)) names_["eos_token"] = to_string(*eos_);
  const auto jinja = files_.find(kTemplate);
  if (jinja == files_.end()) return;
  if (find_invalid_utf8(jinja->second) != std::string::npos) bad_input("{}{}: not UTF-8", what, kTemplate);
  chat_template_ = jinja->second;
}

std::optional<int32_t> HubTokenizer::named(const Json& config, const char* key, const std::string& what,
                                           bool needed) const {
  const Json &value = value_at(config, key), &name = name_at(config, key);
  if (value.is_null() || (!needed && !name.is_string())) return {};
  if (!name.is_string()) bad_input("{}: '{}' must name a token, not {}", what, key, shown(value));
  if (const auto token = special(name.get_ref<const std::string&>())) return token;
  const int32_t found = d_.vocab.find(name.get_ref<const std::string&>());
  if (found < 0 && !needed) return {};
  if (found < 0) bad_input("{}: '{}' is {}, which is not a token of {}", what, key, shown(name), kTokenizer);
  return found;
}

std::string HubTokenizer::generation_config() const {
  Json out = Json::parse(Tokenizer::generation_config());
  if (pad_) out["pad_token_id"] = *pad_;
  const auto found = files_.find(kGeneration);
  const Json settings = found == files_.end() ? Json() : parse_json(found->second, kGeneration, JsonFile::others);
  for (const auto& [key, value] : settings.items())
    if (!value.is_null() && !value.is_discarded()) out[key] = value;
  return out.dump(2) + "\n";
}

HubTokenizer::Files HubTokenizer::files() const {
  Files out = files_;
  out[kGeneration] = generation_config();
  Json config = {{"tokenizer_class", kClass}, {"clean_up_tokenization_spaces", false}};
  if (eos_) config["eos_token"] = to_string(*eos_);
  std::string& text = out.try_emplace(kConfig, config.dump(2) + "\n").first->second;
  constexpr std::string_view kNewest = "\"TokenizersBackend\"";  // unknown to versions before 5
  if (const size_t at = text.find(kNewest); at != std::string::npos)
    text.replace(at, kNewest.size(), '"' + std::string(kClass) + '"');
  return out;
}

std::string HubTokenizer::to_json() const {
  return Json{{"format", kTokenizerFormat}, {"version", 1}, {"kind", "hub"}, {"files", files_}}.dump() + "\n";
}

}  // namespace tessera
