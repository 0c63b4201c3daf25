// The normalizer, the pre-tokenizer, the post-processor and the decoder of a tokenizer.json.
#include "data/hub_tokenizer/description.h"
#include "data/hub_tokenizer/parse.h"
#include "data/json.h"

namespace tessera::hub {
namespace {

class Steps {
 public:
  Steps(const std::string& what, Description& d) : what_(what), d_(d) {}

  void normalizer(const Json& step) {
    if (step.is_null()) return;
    const Json& type = at(step, "type");
    if (type == "Sequence") {
      for (const Json& part : parts(step, "normalizers")) normalizer(part);
    } else if (type == "NFC") {
      d_.nfc = true;
    } else if (type == "Prepend" && at(step, "prepend") == kMark) {
      d_.prepend_mark = true;
    } else if (type == "Replace" && replaces(step, " ", kMark)) {
      d_.spaces_to_marks = true;
    } else {
      unknown("normalizer", step, "NFC, or the Prepend and Replace of Llama 2");
    }
  }

  void pre_tokenizer(const Json& step) {
    if (step.is_null()) return;
    const Json& type = at(step, "type");
    if (type == "Sequence") {
      for (const Json& part : parts(step, "pretokenizers")) pre_tokenizer(part);
      return;
    }
    if (d_.byte_level || metaspace_)
      throw InputError(fmt::format("{}: the pre_tokenizer's {} is followed by {}; expected it to be the last", what_,
                                   d_.byte_level ? "ByteLevel" : "Metaspace", shown(type)));
    if (type == "ByteLevel") {
      byte_level(step);
    } else if (type == "Split") {
      split(step);
    } else if (type == "Digits") {
      d_.cuts.push_back(flag(step, "individual_digits", false, what_) ? bpe::Pattern::each_digit
                                                                      : bpe::Pattern::digits);
    } else if (type == "Metaspace" && at(step, "replacement") == kMark && d_.cuts.empty()) {
      metaspace_ = d_.spaces_to_marks = true;
      d_.prefix_mark = prefix(step);
      d_.cut_at_marks = flag(step, "split", true, what_);
    } else {
      unknown("pre_tokenizer", step, "ByteLevel, Split, Digits, or Metaspace alone");
    }
  }

  void post_processor(const Json& step) {
    if (step.is_null() || at(step, "type") == "ByteLevel") return;  // ByteLevel changes only offsets
    if (at(step, "type") == "Sequence") {
      for (const Json& part : parts(step, "processors")) post_processor(part);
    } else if (at(step, "type") == "TemplateProcessing") {
      ends(step);
    } else {
      unknown("post_processor", step, "TemplateProcessing or ByteLevel");
    }
  }

  void decoder(const Json& step) {
    const Json& type = at(step, "type");
    if (type == "Sequence") {
      for (const Json& part : parts(step, "decoders")) decoder(part);
    } else if (type == "Metaspace" && at(step, "replacement") == kMark && !d_.byte_level) {
      if (prefix(step) != Prefix::never) d_.strip = Strip::marks_of_first;
    } else if (type == "Strip" && at(step, "content") == " " && at(step, "start") == 1 && at(step, "stop") == 0) {
      d_.strip = Strip::space;
    } else if (!(type == "ByteLevel" && d_.byte_level) && type != "ByteFallback" && type != "Fuse" &&
               !(type == "Replace" && replaces(step, kMark, " "))) {
      unknown("decoder", step, d_.byte_level ? "ByteLevel, as the pre_tokenizer" : "that of Llama 2, or Metaspace");
    }
  }

 private:
  [[noreturn]] void unknown(const char* part, const Json& step, std::string_view expected) const {
    throw InputError(fmt::format("{}: the {} {} is not known here; expected {}", what_, part, shown(step), expected));
  }

  const Json& parts(const Json& step, const char* key) const {
    const Json& list = at(step, key);
    if (!list.is_array()) throw InputError(fmt::format("{}: a Sequence must have a list '{}'", what_, key));
    return list;
  }

  static bool replaces(const Json& step, std::string_view from, std::string_view to) {
    return at(at(step, "pattern"), "String") == from && at(step, "content") == to;
  }

  void byte_level(const Json& step) {
    d_.byte_level = true;
    d_.prefix_space = flag(step, "add_prefix_space", true, what_);
    if (d_.prefix_space && !d_.cuts.empty()) unknown("pre_tokenizer", step, "add_prefix_space false behind others");
    if (flag(step, "use_regex", true, what_)) d_.cuts.push_back(bpe::Pattern::gpt2);
  }

  void split(const Json& step) {
    const Json& regex = at(at(step, "pattern"), "Regex");
    if (!regex.is_string() || at(step, "behavior") != "Isolated" || flag(step, "invert", false, what_))
      unknown("pre_tokenizer", step, "a Split by a Regex, Isolated, not inverted");
    const auto known = bpe::pattern_written(regex.get_ref<const std::string&>());
    if (!known)
      throw InputError(fmt::format("{}: the pattern {} is not known here; expected that of GPT-2, Llama 3 or Qwen 2",
                                   what_, shown(regex)));
    d_.cuts.push_back(*known);
  }

  // Older files have add_prefix_space where newer ones have prepend_scheme.
  Prefix prefix(const Json& step) const {
    const Json& scheme = at(step, "prepend_scheme");
    if (scheme.is_null()) return flag(step, "add_prefix_space", true, what_) ? Prefix::always : Prefix::never;
    if (scheme == "always") return Prefix::always;
    if (scheme == "first") return Prefix::first;
    if (scheme == "never") return Prefix::never;
    throw InputError(fmt::format("{}: 'prepend_scheme' must be always, first or never, not {}", what_, shown(scheme)));
  }

  void ends(const Json& step) {
    bool behind = false;
    for (const Json& part : parts(step, "single")) {
      if (const Json& text = at(part, "Sequence"); !text.is_null()) {
        if (behind || at(text, "id") != "A") unknown("post_processor", step, "'single' with the text A once");
        behind = true;
        continue;
      }
      const Json& name = at(at(part, "SpecialToken"), "id");
      const Json& ids = name.is_string()
                            ? at(at(at(step, "special_tokens"), name.get_ref<const std::string&>().c_str()), "ids")
                            : name;
      if (!ids.is_array())
        throw InputError(fmt::format("{}: the post_processor's {} is no text and no token of its special_tokens", what_,
                                     shown(part)));
      for (const Json& id : ids) {
        const auto token = natural(id);
        if (!token || *token >= std::ssize(d_.tokens))
          throw InputError(fmt::format("{}: the post_processor's token {} is {}; expected at most {}", what_,
                                       shown(name), shown(id), std::ssize(d_.tokens) - 1));
        (behind ? d_.behind : d_.before).push_back(static_cast<int32_t>(*token));
      }
    }
    if (!behind) unknown("post_processor", step, "'single' with the text A once");
  }

  const std::string& what_;
  Description& d_;
  bool metaspace_ = false;
};

}  // namespace

void parse_steps(const Json& json, const std::string& what, Description& d) {
  Steps steps(what, d);
  steps.normalizer(at(json, "normalizer"));
  steps.pre_tokenizer(at(json, "pre_tokenizer"));
  steps.decoder(at(json, "decoder"));
}

void parse_ends(const Json& json, const std::string& what, Description& d) {
  Steps(what, d).post_processor(at(json, "post_processor"));
}

}  // namespace tessera::hub
