// From a JSONL file to examples.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "data/examples.h"
#include "tensor/error.h"

namespace tessera {
namespace {

struct Rendered {
  std::string where;  // file and line
  std::vector<Piece> pieces;
};

// What `automatic` means for messages, beside a tokenizer that knows how its model was talked to.
ChatTemplate style_of_messages(const ExampleOptions& o, const Tokenizer* tokenizer, const std::string& what) {
  if (o.style != ChatTemplate::automatic || !tokenizer || tokenizer->chat_template().empty()) return o.style;
  if (const auto found = recognised(tokenizer->chat_template())) return *found;
  throw Error(
      fmt::format("`template` for {}: the tokenizer's own template is none of chatml, llama3 and alpaca; "
                  "expected one of these or none by name, found auto",
                  what));
}

// Lines that cannot be trained on: an error, or counted.
class BadLines {
 public:
  explicit BadLines(bool skipped) : skipped_(skipped) {}

  template <class F>
  void attempt(const F& f) {
    try {
      f();
    } catch (const InputError& e) {
      if (!skipped_) throw;
      if (count_++ == 0) first_ = e.what();
    }
  }
  void note(std::vector<std::string>& notes) const {
    if (count_ == 0) return;
    notes.push_back(fmt::format("{} skipped; the first: {}",
                                count_ == 1 ? "1 bad line is" : fmt::format("{} bad lines are", count_), first_));
  }
  int64_t count() const { return count_; }
  const std::string& first() const { return first_; }

 private:
  bool skipped_;
  int64_t count_ = 0;
  std::string first_;
};

std::vector<Rendered> read_rendered(const std::filesystem::path& file, const ExampleOptions& o,
                                    const Tokenizer* tokenizer, BadLines& bad) {
  std::vector<Rendered> out;
  std::optional<ChatTemplate> of_messages;
  const auto style = [&](const Example& example) {
    if (example.shape != Example::Shape::messages) return o.style;
    if (!of_messages) of_messages = style_of_messages(o, tokenizer, file.string());
    return *of_messages;
  };
  for_each_line(file, [&](std::string_view line, int64_t number) {
    bad.attempt([&] {
      const std::string where = fmt::format("{}:{}", file.string(), number);
      const Example example = parse_example(line, where);
      out.push_back({where, render(example, style(example), where)});
    });
  });
  return out;
}

// What a tokenizer learns from, where the file gets one of its own.
std::string text_of(std::span<const Rendered> examples) {
  std::string out;
  for (const Rendered& e : examples)
    for (const Piece& piece : e.pieces) out += piece.text;
  return out;
}

class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, const ExampleOptions& options) : tokenizer_(tokenizer), options_(options) {}

  // Words are cut where a response begins, so that a prompt has the tokens that it has when nothing follows yet.
  EncodedExample encode(const Rendered& example) {
    EncodedExample out;
    std::string text;
    bool trained = false;
    const auto flush = [&] {
      add(out, text.empty() ? std::vector<int32_t>() : encode_text(text, example.where), trained);
      text.clear();
    };
    for (const Piece& piece : example.pieces) {
      const bool as_target = piece.response || !options_.responses_only;
      const std::optional<int32_t> token = special(piece);
      if (token || as_target != trained) flush();
      trained = as_target;
      if (token)
        add(out, {*token}, trained);
      else
        text += piece.text;
    }
    flush();
    return cut(std::move(out), example.where);
  }
  // What there is to say about all of them.
  void note(std::vector<std::string>& notes) const {
    if (cut_ > 0)
      notes.push_back(fmt::format("{} examples are longer than the context and are cut after {} tokens", cut_,
                                  options_.context + 1));
    if (!as_text_.empty())
      notes.push_back(fmt::format("the tokenizer has no {}; written as text, which a message could hold too",
                                  fmt::join(as_text_, ", ")));
    if (endless_) notes.emplace_back("the tokenizer has no token that ends a text: a model cannot learn where to stop");
  }

 private:
  static void add(EncodedExample& to, const std::vector<int32_t>& tokens, bool trained) {
    to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
    to.trained.insert(to.trained.end(), tokens.size(), trained);
  }
  std::vector<int32_t> encode_text(const std::string& text, const std::string& where) const {
    try {
      return tokenizer_.encode(text);
    } catch (const Error& e) {
      throw InputError(fmt::format("{}: {}", where, e.what()));
    }
  }
  std::optional<int32_t> special(const Piece& piece) {
    if (piece.kind == Piece::Kind::text) return {};
    if (piece.kind == Piece::Kind::end) {
      const std::optional<int32_t> end = tokenizer_.document_end();
      endless_ = endless_ || !end;
      return end;
    }
    const std::optional<int32_t> token = tokenizer_.special(piece.text);
    if (!token) as_text_.insert(piece.text);
    return token;
  }
  EncodedExample cut(EncodedExample e, const std::string& where) {
    const auto most = static_cast<size_t>(options_.context) + 1;
    const bool had = targets_of(e) > 0;
    if (e.tokens.size() > most) {
      e.tokens.resize(most);
      e.trained.resize(most);
      if (targets_of(e) > 0) ++cut_;
    }
    if (targets_of(e) == 0)
      throw InputError(fmt::format("{}: no token to train on: {}", where,
                                   had ? fmt::format("the response begins behind the context of {} tokens", most - 1)
                                       : "there is no response in it"));
    return e;
  }

  const Tokenizer& tokenizer_;
  const ExampleOptions& options_;
  int64_t cut_ = 0;
  std::set<std::string> as_text_;
  bool endless_ = false;
};

}  // namespace

Dataset load_examples(const std::filesystem::path& file, const TokenizerChoice& choice, const ExampleOptions& o) {
  const std::string what = file.string();
  BadLines bad(o.skip_bad);
  const bool learnt = choice.chosen() == "char" || choice.chosen() == "bpe";  // from the examples
  std::unique_ptr<Tokenizer> tokenizer = learnt ? nullptr : make_tokenizer(choice, "", "", what);
  const std::vector<Rendered> rendered = read_rendered(file, o, tokenizer.get(), bad);
  const auto require_two = [&](size_t count) {
    if (count < 2)
      throw InputError(fmt::format(
          "{}: {} examples to train on; expected at least 2, one of them for validation{}", what, count,
          bad.count() > 0 ? fmt::format(" (skipped bad lines: {}, the first: {})", bad.count(), bad.first()) : ""));
  };
  const auto trained = [](size_t count) { return count - std::max<size_t>(count / 10, 1); };
  require_two(rendered.size());
  const std::span<const Rendered> all(rendered);
  Dataset d;
  d.source = what;
  d.tokenizer = learnt ? make_tokenizer(choice, text_of(all), text_of(all.first(trained(all.size()))), what)
                       : std::move(tokenizer);
  Encoder encoder(*d.tokenizer, o);
  std::vector<EncodedExample> encoded;
  for (const Rendered& example : rendered) bad.attempt([&] { encoded.push_back(encoder.encode(example)); });
  require_two(encoded.size());
  bad.note(d.notes);
  encoder.note(d.notes);
  const auto cut = encoded.begin() + static_cast<std::ptrdiff_t>(trained(encoded.size()));
  d.val_examples = std::make_shared<ExampleRows>(std::vector(cut, encoded.end()), o.context, o.packed);
  encoded.erase(cut, encoded.end());
  d.train_examples = std::make_shared<ExampleRows>(encoded, o.context, o.packed);
  d.train_bytes = std::ssize(d.tokenizer->decode(d.train_examples->target_tokens()));
  d.val_bytes = std::ssize(d.tokenizer->decode(d.val_examples->target_tokens()));
  return d;
}

std::shared_ptr<const ExampleRows> all_examples(const std::filesystem::path& file, const Tokenizer& tokenizer,
                                                const ExampleOptions& o, std::vector<std::string>& notes) {
  BadLines bad(o.skip_bad);
  Encoder encoder(tokenizer, o);
  std::vector<EncodedExample> encoded;
  for (const Rendered& example : read_rendered(file, o, &tokenizer, bad))
    bad.attempt([&] { encoded.push_back(encoder.encode(example)); });
  if (encoded.empty()) throw InputError(fmt::format("{}: no example in it", file.string()));
  bad.note(notes);
  encoder.note(notes);
  return std::make_shared<ExampleRows>(encoded, o.context, o.packed);
}

}  // namespace tessera
