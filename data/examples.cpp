// Examples: loading and tokenization.
#include "data/examples.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/utf8.h"
#include "data/jinja/template.h"
#include "data/json_rows.h"
#include "data/shards.h"

namespace tessera {

namespace fs = std::filesystem;
static std::shared_ptr<const Rows> make_windows(TokenFile tokens, int64_t context, const std::string& what) {
  if (tokens.size() < 2)
    bad_input("{}: {} tokens; expected at least 2, because the first token is not predicted", what, tokens.size());
  return std::make_shared<const Windows>(std::move(tokens), context);
}

// Large texts use a temporary file that is deleted with its last reader.
static TokenFile read_tokens(const Text& text, const Tokenizer& tokenizer, const ExampleOptions& o,
                             std::vector<std::string>& notes) {
  constexpr size_t kInMemory = size_t{16} << 20;
  std::vector<int32_t> tokens;
  std::optional<TemporaryDirectory> folder;
  std::optional<TokenWriter> file;
  const auto name = [&] { return folder->path() / "text.tok"; };
  TextEncoder encoder(
      tokenizer, text.name,
      [&](std::span<const int32_t> more) {
        check_in_table(more, o.vocab, tokenizer, text.name);
        if (file) return file->add(more);
        tokens.insert(tokens.end(), more.begin(), more.end());
        if (tokens.size() < kInMemory) return;
        make_directories(cache_directory());
        folder.emplace(cache_directory() / "evaluated");
        file.emplace(name(), tokenizer.vocab_size());
        file->add(std::exchange(tokens, {}));
      },
      o.ends, size_t{8} << 20, o.special);
  text.read([&](std::string_view chunk) { encoder.add(chunk); });
  encoder.finish();
  if (const std::string note = special_note(encoder.special_names(), o.special); !note.empty()) notes.push_back(note);
  if (!file) return TokenFile::from_tokens(tokens, tokenizer.vocab_size(), text.name);
  file->finish();
  return TokenFile::open(name());
}

EvaluationText evaluation_text(const std::string& spec, const Tokenizer& tokenizer, const ExampleOptions& o) {
  EvaluationText out;
  if (names_examples(spec)) {
    const auto examples = all_examples(spec, tokenizer, o, out.notes);
    out.bytes = examples->bytes();
    out.rows = examples;
    return out;
  }
  if (names_shards(spec)) {
    const std::string file = find_shards(spec).val.string();
    out = evaluation_text(file, tokenizer, o);
    out.notes.push_back(fmt::format("{}: evaluated on {}", spec, file));
    return out;
  }
  if (names_directory(spec)) {
    const Dataset dataset = Dataset::open(spec);
    if (dataset.tokenizer->identity() != tokenizer.identity())
      throw Error(fmt::format("{}: its tokenizer differs from the model's", spec));
    out.bytes = dataset.val_bytes;
    dataset.check_tokens(o.vocab);
    out.rows = make_windows(dataset.val, o.context, spec);
    return out;
  }
  TokenFile tokens;
  if (is_llmc_file(spec)) {
    tokens = TokenFile::open_llmc(spec, tokenizer.vocab_size());
    const auto check = [&](std::span<const int32_t> some) { check_in_table(some, o.vocab, tokenizer, spec); };
    tokens.chunks(0, tokens.size(), check);
    out.bytes = token_bytes(tokens, 0, tokens.size(), tokenizer);
  } else {
    if (const std::string note = check_table(spec); !note.empty()) out.notes.push_back(note);
    const Text text = load_text_file(spec);
    tokens = read_tokens(text, tokenizer, o, out.notes);
    out.bytes = text.size();
  }
  out.rows = make_windows(std::move(tokens), o.context, spec);
  return out;
}

namespace {

struct Rendered {
  std::string where;  // file and line
  std::vector<Segment> segments;
  bool own = false;           // uses the model's own template
  EncodedExample made = {};   // of a tokenized row
  bool is_text = false;       // a text row, which may contain a rendered template
  int64_t content_bytes = 0;  // of messages printed by the model's own template
  std::string role = {};      // an unknown role, whose messages are not responses
};

// The tokenizer's own template, which `automatic` selects for messages; null if it has none.
std::unique_ptr<const ModelTemplate> own_template(const ExampleOptions& o, const Tokenizer* tokenizer,
                                                  const std::string& what) {
  if (o.style != ChatTemplate::automatic || !tokenizer || tokenizer->chat_template().empty()) return nullptr;
  try {
    return std::make_unique<const ModelTemplate>(*tokenizer);
  } catch (const InputError& e) {
    throw Error(
        fmt::format("`template` for {}: {}; expected chatml, llama3, alpaca or none, got auto", what, e.what()));
  }
}

// Untrainable rows: counted if `skipped`, otherwise an error.
struct BadLines {
  bool skipped;
  int64_t count = 0;
  std::string first = {};

  template <class F>
  void attempt(const F& f) {
    try {
      f();
    } catch (const InputError& e) {
      if (!skipped) throw;
      if (count++ == 0) first = e.what();
    }
  }
  void note(std::vector<std::string>& notes) const {
    if (count == 0) return;
    notes.push_back(fmt::format("{} skipped; the first: {}",
                                count == 1 ? "1 bad line is" : fmt::format("{} bad lines are", count), first));
  }
};

// Whether the template contains the key as a word.
bool names_key(std::string_view source, const std::string& key) {
  const auto in_word = [&](size_t at) {
    return at < source.size() && (std::isalnum(static_cast<uint8_t>(source[at])) != 0 || source[at] == '_');
  };
  for (size_t at = source.find(key); at != std::string_view::npos; at = source.find(key, at + 1))
    if (!in_word(at - 1) && !in_word(at + key.size())) return true;
  return false;
}

Rendered render_own(const Example& example, const ModelTemplate& own, const std::string& where, bool responses) {
  Rendered out{
      .where = where, .segments = own.render(example, where, responses), .own = true, .role = example.unknown_role};
  std::string all;
  for (const Segment& segment : out.segments) all += segment.text;
  for (const Message& turn : example.turns)
    if (const std::string_view bare = jinja::stripped(turn.text, true, true);
        turn.training != Message::Training::never && all.find(bare) != std::string::npos)
      out.content_bytes += std::ssize(all.find(turn.text) == std::string::npos ? bare : std::string_view(turn.text));
  return out;
}

// Throws if no row has a key renamed in `o`, unless the files are a validation split.
std::vector<Rendered> read_rendered(const std::vector<fs::path>& files, const std::string& what,
                                    const ExampleOptions& o, const Tokenizer* tokenizer, BadLines& bad,
                                    std::vector<std::string>& notes, bool validates = false) {
  std::vector<Rendered> out;
  std::set<std::string> unread, mapped;
  std::unique_ptr<const ModelTemplate> own;
  bool known = false;
  int64_t bytes = 0;
  const auto read = [&](const fs::path& file, std::string_view line, int64_t number) {
    if ((bytes += std::ssize(line)) > o.max_bytes)
      bad_input(
          "{}: rows of more than {} MB do not fit in memory while they are read; expected fewer rows, or documents, "
          "which `tessera data` converts to a dataset in constant memory",
          file.string(), o.max_bytes / 1'000'000);
    bad.attempt([&] {
      const std::string where = fmt::format("{}:{}", file.string(), number);
      Example example = parse_example(line, where, o.names);
      const bool messages = example.shape == Example::Shape::messages;
      if (messages && !std::exchange(known, true)) own = own_template(o, tokenizer, file.string());
      if (messages && own)
        std::erase_if(example.unread, [&](const std::string& key) {  // the template may use keys that it mentions
          return key.ends_with(kOfMessages) &&
                 names_key(tokenizer->chat_template(), key.substr(1, key.size() - 2 - kOfMessages.size()));
        });
      unread.merge(example.unread);
      mapped.merge(example.mapped);
      if (example.shape != Example::Shape::tokens)
        return void(messages && own ? out.push_back(render_own(example, *own, where, o.responses_only))
                                    : out.push_back({.where = where,
                                                     .segments = render(example, o.style, where),
                                                     .is_text = example.shape == Example::Shape::text}));
      if (!tokenizer)
        throw InputError(
            where + ": the key 'input_ids' requires `tokenizer`: the directory of the tokenizer that produced them");
      out.push_back({where, {}, false, {std::move(example.tokens), std::move(example.trained)}});
    });
  };
  for (const fs::path& file : files)
    for_each_line(file, [&](std::string_view line, int64_t number) { read(file, line, number); });
  for (const auto& [ours, theirs] : o.names.keys)
    if (!validates && !out.empty() && !mapped.contains(theirs))
      bad_input("{}: no row has the key '{}', named in `map`", what, theirs);
  if (!unread.empty()) notes.push_back(fmt::format("unused keys: {}", fmt::join(unread, ", ")).substr(0, 400));
  return out;
}

class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, const ExampleOptions& options) : tokenizer_(tokenizer), options_(options) {}

  EncodedExample encode(const Rendered& example) {
    EncodedExample out = read_tokens(example);
    for (const Segment& segment : example.segments)
      if (segment.is_content && as_target(segment)) out.bytes += std::ssize(segment.text);
    if (example.own || example.segments.empty())  // segments do not separate markers from responses
      out.bytes = example.own && !options_.responses_only ? example.content_bytes : target_bytes(out, 1);
    return cut(std::move(out), example);
  }
  // A segment between two special tokens is encoded as one text, as in transformers, so a response continues its
  // prompt.
  EncodedExample read_tokens(const Rendered& example) {
    EncodedExample out = example.made;
    Run run;
    bool first = true, strips = false;
    if (options_.ends && !example.own && !example.segments.empty() && example.segments[0].kind == Segment::Kind::text)
      for (const int32_t token : tokenizer_.beginning()) add(out, {token}, as_target(example.segments[0]));
    const auto flush = [&] {
      if (run.text.empty()) return;
      const EncodeOptions how{.special_in_text = run.names || options_.special || example.is_text,
                              .begins = !example.own || out.tokens.empty() || is_special(out.tokens.back()),
                              .first = std::exchange(first, false)};
      try {
        add(out, std::exchange(run, {}), how);
      } catch (const Error& e) {
        bad_input("{}: {}", example.where, e.what());
      }
    };
    for (const Segment& s : example.segments) {
      if (s.kind == Segment::Kind::text) tokenizer_.count_special(s.text, example.is_text ? read_names_ : names_);
      const bool names = example.own && s.kind == Segment::Kind::marker;
      const std::optional<int32_t> token = example.own ? std::nullopt : special(s);
      const bool follows = s.kind == Segment::Kind::end && !run.text.empty();
      const auto [left, right] = token ? tokenizer_.strips(*token) : std::pair(false, false);
      if (left) run.strip_end();
      if (token || names != run.names) flush();
      run.names = names;
      const std::string_view text = stripped(s.text, strips, false, is_white_space);
      strips = token ? right : strips && text.empty();
      if (!token)
        run.add(text, as_target(s));
      else if (!follows || out.tokens.back() != *token)  // a text may already end with its end token, as in TRL
        add(out, {*token}, as_target(s)), first = false;
    }
    flush();
    check_in_table(out.tokens, options_.vocab, tokenizer_, example.where);
    if (const auto largest = std::ranges::max_element(out.tokens);
        largest != out.tokens.end() && *largest >= tokenizer_.vocab_size())
      bad_input("{}: token {} is outside the tokenizer's vocabulary of {}", example.where, *largest,
                tokenizer_.vocab_size());
    return out;
  }
  void note(std::vector<std::string>& notes) const {
    if (cut_ > 0)
      notes.push_back(
          fmt::format("{} examples exceed the context and are truncated to {} tokens", cut_, options_.context + 1));
    if (!as_text_.empty())
      notes.push_back(fmt::format("the tokenizer has no {}; it is encoded as text, which messages may also contain",
                                  fmt::join(as_text_, ", ")));
    if (const std::string note = special_note(names_, options_.special); !note.empty()) notes.push_back(note);
    if (const std::string note = special_note(read_names_, true); !note.empty()) notes.push_back(note);
    if (endless_) notes.emplace_back("the tokenizer has no end-of-text token: a model cannot learn where to stop");
  }

 private:
  struct Run {
    std::string text = {};
    std::vector<std::pair<size_t, bool>> spans = {};  // end of each segment, and whether it is trained
    bool names = false;                               // EncodeOptions::special_in_text

    void add(std::string_view more, bool trained) {
      if (more.empty()) return;
      text += more;
      if (!spans.empty() && spans.back().second == trained) spans.pop_back();
      spans.emplace_back(text.size(), trained);
    }
    void strip_end() {
      text.resize(stripped(text, false, true, is_white_space).size());
      while (!spans.empty() && (spans.size() == 1 ? 0 : spans.rbegin()[1].first) >= text.size()) spans.pop_back();
      if (!spans.empty()) spans.back().first = text.size();
    }
  };

  // A token with at least one byte in a trained segment is a target, as in the masks of transformers' chat templates.
  // To find the end of a segment in bytes of tokens, the text up to that end is encoded separately.
  void add(EncodedExample& to, const Run& run, const EncodeOptions& how) const {
    const std::vector<int32_t> tokens = tokenizer_.encode_with(run.text, how);
    if (run.spans.size() == 1) return add(to, tokens, run.spans[0].second);
    const auto bytes_in = [&](const std::vector<int32_t>& all) {
      return std::accumulate(all.begin(), all.end(), size_t{0},
                             [&](size_t sum, int32_t token) { return sum + tokenizer_.token_bytes(token).size(); });
    };
    std::vector<size_t> ends;
    for (size_t p = 0; p + 1 < run.spans.size(); ++p)
      ends.push_back(bytes_in(tokenizer_.encode_with(std::string_view(run.text).substr(0, run.spans[p].first), how)));
    ends.push_back(std::numeric_limits<size_t>::max());
    size_t begin = 0, span = 0;
    for (const int32_t token : tokens) {
      const size_t end = begin + tokenizer_.token_bytes(token).size();
      while (ends[span] <= begin) ++span;
      bool trained = run.spans[span].second;
      for (size_t p = span; ends[p] < end; ++p) trained = trained || run.spans[p + 1].second;
      add(to, {token}, trained);
      begin = end;
    }
  }
  static void add(EncodedExample& to, const std::vector<int32_t>& tokens, bool trained) {
    to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
    to.trained.insert(to.trained.end(), tokens.size(), trained);
  }
  bool is_special(int32_t token) const { return tokenizer_.special(tokenizer_.token_bytes(token)) == token; }
  // Counts targets from token `from` on, except special tokens.
  int64_t target_bytes(const EncodedExample& e, size_t from) const {
    int64_t bytes = 0;
    for (size_t t = from; t < e.tokens.size(); ++t)
      if (e.trained[t] && !is_special(e.tokens[t])) bytes += std::ssize(tokenizer_.token_bytes(e.tokens[t]));
    return bytes;
  }
  bool as_target(const Segment& s) const { return !s.never && (s.response || !options_.responses_only); }
  std::optional<int32_t> special(const Segment& segment) {
    if (segment.kind == Segment::Kind::text) return {};
    if (segment.kind == Segment::Kind::end) {
      const std::optional<int32_t> end = tokenizer_.document_end();
      endless_ = endless_ || !end;
      return end;
    }
    const std::optional<int32_t> token = tokenizer_.special(segment.text);
    if (!token) as_text_.insert(segment.text);
    return token;
  }
  EncodedExample cut(EncodedExample e, const Rendered& example) {
    const auto limit = static_cast<size_t>(options_.context) + 1;
    const bool had = count_targets(e) > 0;
    if (e.tokens.size() > limit) {
      // Exact if all targets are content; otherwise template text is assumed to be spread evenly.
      const int64_t all = target_bytes(e, 1);
      e.bytes = all > 0 ? e.bytes * (all - target_bytes(e, limit)) / all : 0;
      e.tokens.resize(limit);
      e.trained.resize(limit);
      if (count_targets(e) > 0) ++cut_;
    }
    if (count_targets(e) == 0)
      bad_input(
          "{}: no token to train on: {}{}", example.where,
          had ? fmt::format("the response begins after the context of {} tokens", limit - 1) : "it has no response",
          had || example.role.empty()
              ? ""
              : fmt::format("; `roles` {}=assistant trains on messages of this role", example.role));
    return e;
  }

  const Tokenizer& tokenizer_;
  const ExampleOptions& options_;
  int64_t cut_ = 0;
  std::set<std::string> as_text_;
  std::map<std::string, int64_t> names_;       // of special tokens, in messages
  std::map<std::string, int64_t> read_names_;  // of special tokens, in text rows
  bool endless_ = false;
};

std::shared_ptr<const ExampleRows> find_examples(const std::vector<fs::path>& files, const std::string& what,
                                                 const Tokenizer& tokenizer, const ExampleOptions& o,
                                                 std::vector<std::string>& notes, bool validates = false) {
  BadLines bad{o.skip_bad};
  Encoder encoder(tokenizer, o);
  std::vector<EncodedExample> encoded;
  for (const Rendered& example : read_rendered(files, what, o, &tokenizer, bad, notes, validates))
    bad.attempt([&] { encoded.push_back(encoder.encode(example)); });
  if (encoded.empty()) bad_input("{}: contains no examples", what);
  bad.note(notes);
  encoder.note(notes);
  return std::make_shared<ExampleRows>(encoded, o.context, o.packed);
}

std::string joined(const std::vector<fs::path>& files) {
  std::string out;
  for (const fs::path& f : files) out += (out.empty() ? "" : ", ") + f.string();
  return out;
}

}  // namespace

Asked ask(const std::vector<Message>& turns, const ExampleOptions& o, const Tokenizer& tokenizer) {
  const std::string what = "the conversation";
  const auto own = own_template(o, &tokenizer, what);
  if (!own && o.style == ChatTemplate::automatic)
    throw Error("`template`: the model has none; expected chatml, llama3, alpaca or none, got auto");
  Example answered{Example::Shape::messages, turns};
  if (turns.empty()) answered.turns.push_back({Role::user, "x"});
  answered.turns.push_back({Role::assistant, "x"});
  std::vector<Segment> segments;
  try {
    segments = own ? own->render(answered, what) : render(answered, o.style, what);
  } catch (const InputError&) {
    if (!own) throw;  // otherwise the model's settings may define the end
  }
  while (!segments.empty() && !segments.back().response) segments.pop_back();
  const Segment last = segments.empty() ? Segment() : segments.back();
  while (!segments.empty() && segments.back().response) segments.pop_back();
  Asked out;
  if (!turns.empty())
    out.tokens = Encoder(tokenizer, o)
                     .read_tokens({what, own ? own->prompt(turns, what) : std::move(segments), own != nullptr})
                     .tokens;
  const size_t content_at = own ? last.text.find('x') : std::string::npos;
  const std::string tail = last.text.substr(content_at == std::string::npos ? 0 : content_at + 1);
  std::optional<int32_t> end;
  if (last.kind == Segment::Kind::end) end = tokenizer.document_end();
  for (size_t at = 0; at < tail.size() && !end; ++at) end = tokenizer.special(tail.substr(at));
  if (end)
    out.ends.push_back(*end);
  else if (!own && last.kind == Segment::Kind::marker)
    out.stops.push_back(tail);
  else if (const std::string_view text = jinja::stripped(tail, true, true);
           own && content_at != std::string::npos && !text.empty())
    out.stops.emplace_back(text);
  return out;
}

Dataset load_examples(const std::filesystem::path& spec, const TokenizerChoice& choice, const ExampleOptions& o) {
  const std::string what = spec.string();
  const ExampleFiles files = example_files(what);
  const bool held_file = !o.held.file.empty() || !files.val.empty();
  if (o.held.file.empty() && !files.val.empty()) o.held.refuse(what);
  BadLines bad{o.skip_bad};
  std::unique_ptr<Tokenizer> tokenizer = choice.learns() ? nullptr : make_tokenizer(choice, what);
  Dataset d;
  const std::vector<Rendered> rendered = read_rendered(files.train, what, o, tokenizer.get(), bad, d.notes);
  if (held_file && o.held.file.empty())
    d.notes.push_back(fmt::format("{}: validated on {}{}", what, joined(files.val),
                                  files.unused.empty() ? "" : "; not read: " + joined(files.unused)));
  const auto require_enough = [&](size_t count) {
    if (count < (held_file ? 1 : 2))
      bad_input("{}: {} training examples; expected at least {}{}", what, count,
                held_file ? "1" : "2, one for validation",
                bad.count > 0 ? fmt::format(" (skipped bad lines: {}, the first: {})", bad.count, bad.first) : "");
  };
  const auto trained = [&](size_t count) {
    if (held_file) return count;
    const double held = static_cast<double>(count) * o.held.fraction;
    return count - std::clamp<size_t>(static_cast<size_t>(held * (1 + 1e-12)), 1, count - 1);
  };
  require_enough(rendered.size());
  const std::span<const Rendered> all(rendered);
  d.source = what;
  const size_t train_count = trained(all.size());
  const auto texts = [&](const SplitChunk& f) {
    for (size_t e = 0; e < all.size(); ++e)
      for (const Segment& segment : all[e].segments) f(segment.text, e >= train_count);
  };
  d.tokenizer = choice.learns() ? make_tokenizer(choice, what, texts) : std::move(tokenizer);
  Encoder encoder(*d.tokenizer, o);
  std::vector<EncodedExample> encoded;
  for (const Rendered& example : rendered) bad.attempt([&] { encoded.push_back(encoder.encode(example)); });
  require_enough(encoded.size());
  bad.note(d.notes);
  encoder.note(d.notes);
  const auto cut = encoded.begin() + static_cast<std::ptrdiff_t>(trained(encoded.size()));
  d.val_examples = !held_file ? std::make_shared<ExampleRows>(std::vector(cut, encoded.end()), o.context, o.packed)
                   : o.held.file.empty()
                       ? find_examples(files.val, what, *d.tokenizer, o, d.notes, true)
                       : find_examples(example_files(o.held.file).train, o.held.file, *d.tokenizer, o, d.notes, true);
  encoded.erase(cut, encoded.end());
  d.train_examples = std::make_shared<ExampleRows>(encoded, o.context, o.packed);
  d.train_bytes = d.train_examples->bytes();
  d.val_bytes = d.val_examples->bytes();
  return d;
}

std::shared_ptr<const ExampleRows> all_examples(const std::filesystem::path& spec, const Tokenizer& tokenizer,
                                                const ExampleOptions& o, std::vector<std::string>& notes) {
  const ExampleFiles files = example_files(spec.string());
  if (files.val.empty()) return find_examples(files.train, spec.string(), tokenizer, o, notes);
  notes.push_back(fmt::format("{}: evaluated on {}", spec.string(), joined(files.val)));
  return find_examples(files.val, spec.string(), tokenizer, o, notes);
}

}  // namespace tessera
