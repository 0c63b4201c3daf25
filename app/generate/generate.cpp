// The commands `generate` and `evaluate`.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "app/resolve.h"
#include "app/run/pretrained.h"
#include "base/json.h"
#include "data/mixture.h"
#include "data/text.h"
#include "hub/peft.h"
#include "train/evaluate.h"

namespace tessera {

namespace {

// No random initialization, because all values are loaded.
std::unique_ptr<LanguageModel> make_frozen(const ModelConfig& config) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->freeze();
  for (Parameter* p : model->parameters()) p->init = Init::zeros();
  return model;
}

class Conversation {
 public:
  // A template with which the model was trained counts as the model's own. Throws Error (usage) for invalid
  // combinations of options, and as ask() does.
  Conversation(const GenerateOptions& o, const Tokenizer& tokenizer, const Pretrained& from)
      : tokenizer_(tokenizer),
        how_{.style = o.chat_template, .ends = !o.no_bos, .special = o.special, .vocab = from.config.vocab} {
    if (o.chat && (!o.prompts.empty() || o.prompts_file))
      throw Error(
          "--chat: reads the conversation from standard input and cannot be combined with --prompt or --prompts");
    if (!has_template() && (o.chat || o.system)) how_.style = ChatTemplate::automatic;
    if (how_.style == ChatTemplate::automatic && from.chat_template != ChatTemplate::none)
      how_.style = from.chat_template;
    if (has_template()) ask({}, how_, tokenizer_);
    if (o.system) turns_.push_back({Role::system, *o.system});
  }

  bool has_template() const { return how_.style != ChatTemplate::none; }
  // Tokens of the conversation up to this prompt. Throws as ask() does.
  Asked asked(const std::string& prompt) const {
    std::vector<Message> turns = turns_;
    turns.push_back({Role::user, prompt});
    return ask(turns, how_, tokenizer_);
  }
  void add(const std::string& prompt, const std::string& answer) {
    turns_.insert(turns_.end(), {{Role::user, prompt}, {Role::assistant, answer}});
  }

 private:
  const Tokenizer& tokenizer_;
  ExampleOptions how_;
  std::vector<Message> turns_;
};

// The next non-empty line of standard input, on all ranks; nullopt at the end of input.
std::optional<std::string> next_line(Communicator& world) {
  std::string line;
  const bool typed = ::isatty(STDIN_FILENO) == 1;
  while (world.rank() == 0 && line.empty()) {
    if (typed) std::fputs("> ", stderr);
    const bool more = read_line(line);
    if (typed && !more) std::fputs("\n", stderr);
    if (!more) break;
    if (line.ends_with('\r')) line.pop_back();
    if (line.starts_with("\uFEFF")) line.erase(0, 3);  // byte order mark
  }
  if (world.size() > 1) line = broadcast_text(world, line, 0);
  return line.empty() ? std::nullopt : std::optional(line);
}

// The printed text, which ends before a stop string or an end token.
class Shown {
 public:
  Shown(const Tokenizer& tokenizer, const GenerateOptions& o, const Asked& asked)
      : decoder_(tokenizer, o.format == "json" ? StreamDecoder::Broken::replaced : StreamDecoder::Broken::escaped),
        stop_(o.stop) {
    if (o.ignore_end) return;
    ends_ = generation_ends(tokenizer);
    ends_.insert(ends_.end(), asked.ends.begin(), asked.ends.end());
    stop_.insert(stop_.end(), asked.stops.begin(), asked.stops.end());
  }

  // Returns false after the end of the text.
  bool add(int32_t token) {
    if (std::ranges::find(ends_, token) != ends_.end()) {
      ended_ = "end";
      return false;
    }
    ++tokens_;
    return add_text(decoder_.add(token));
  }
  void finish() {
    if (ended_ == kLength) add_text(decoder_.end());
    ready_ = text_.size();
  }
  // Returns new text that cannot be part of a stop string.
  std::string take() {
    std::string out = text_.substr(taken_, ready_ - taken_);
    taken_ = ready_;
    return out;
  }
  const std::string& text() const { return text_; }
  int64_t tokens() const { return tokens_; }
  std::string_view ended() const { return ended_; }

 private:
  static constexpr std::string_view kLength = "length";

  bool add_text(const std::string& more) {
    text_ += more;
    size_t first = std::string::npos;
    for (const std::string& stop : stop_) first = std::min(first, text_.find(stop, ready_));
    const bool stopped = first != std::string::npos;
    if (stopped) text_.resize(first), ended_ = "stop";
    ready_ = stopped ? text_.size() : text_.size() - partial_stop();
    return !stopped;
  }
  // The length of the longest suffix that may begin a stop string.
  size_t partial_stop() const {
    size_t longest = 0;
    for (const std::string& stop : stop_)
      for (size_t n = std::min(stop.size() - 1, text_.size() - taken_); n > longest; --n)
        if (text_.ends_with(std::string_view(stop).substr(0, n))) longest = n;
    return longest;
  }

  StreamDecoder decoder_;
  std::vector<std::string> stop_;
  std::vector<int32_t> ends_;
  std::string_view ended_ = kLength;
  std::string text_;
  size_t ready_ = 0, taken_ = 0;
  int64_t tokens_ = 0;
};

std::vector<std::string> read_prompts(const GenerateOptions& o) {
  std::vector<std::string> out = o.prompts;
  if (o.prompts_file) {
    std::string all = for_option("prompts", *o.prompts_file, [&] { return read_text(*o.prompts_file); });
    if (all.starts_with("\uFEFF")) all.erase(0, 3);
    std::istringstream text(all);
    for (std::string line; std::getline(text, line);) {
      if (line.ends_with('\r')) line.pop_back();
      if (!line.empty()) out.push_back(line);
    }
    if (out.empty()) bad_input("{}: contains no prompts; expected one per line", *o.prompts_file);
  }
  if (out.empty()) out.emplace_back("\n");
  for (const std::string& prompt : out)
    if (prompt.empty()) throw Error("--prompt: expected at least one character, got an empty prompt");
  for (const std::string& stop : o.stop)
    if (stop.empty()) throw Error("--stop: expected at least one character, got an empty string");
  return out;
}

std::string other_settings(const Tokenizer& tokenizer, const GenerateOptions& o) {
  const nlohmann::json settings = nlohmann::json::parse(tokenizer.generation_config());
  const nlohmann::json taken{{"temperature", o.temperature},
                             {"top_k", o.top_k},
                             {"top_p", o.top_p},
                             {"min_p", o.min_p},
                             {"repetition_penalty", o.repetition_penalty},
                             {"do_sample", o.temperature > 0}};
  std::string out;
  for (const auto& [key, value] : settings.items())
    if (!key.ends_with("_token_id") && !key.starts_with("_") && !key.starts_with("output_") && key != "use_cache" &&
        key != "transformers_version" && key != "cache_implementation" && !is_nothing(value) &&
        value_at(taken, key) != value)
      out += fmt::format("{}{} {}", out.empty() ? "" : ", ", one_line(key), shown(value, 40));
  return out.empty() ? "" : fmt::format("generation settings of the model that options override: {}\n", out);
}

// Throws Error (usage) if the embedding table lacks a token.
std::vector<int32_t> read_tokens(const std::string& prompt, const Inference& model, const GenerateOptions& o) {
  std::vector<int32_t> out =
      model.tokenizer->encode_with(prompt, {.special_in_text = o.special, .add_ends = !o.no_bos});
  for (const int32_t token : out)
    if (token >= model.from.config.vocab)
      bad_usage("--prompt: token {}, '{}', is outside the model's embedding table of {} rows", token,
                model.tokenizer->decode(std::span(&token, 1)), model.from.config.vocab);
  return out;
}

std::string to_json(const std::string& prompt, const Shown& shown) {
  return nlohmann::ordered_json{
      {"prompt", prompt}, {"text", shown.text()}, {"tokens", shown.tokens()}, {"ended", shown.ended()}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// `shown`: prompts are printed before their continuations.
struct Prompts {
  std::vector<std::string> texts;
  std::vector<Asked> asked;
  bool shown;
};

// Reports that the prompt named by `which` exceeds the context and is truncated to its last tokens.
void report_unread(const std::string& which, const Asked& asked, int64_t context) {
  const int64_t count = std::ssize(asked.tokens);
  if (count > context)
    say(fmt::format("{} has {} tokens; the first {} are ignored, because the context length is {}", which, count,
                    count - context, context));
}

// Generates and prints a text per prompt. Collective: all ranks receive the first text.
std::string write_texts(const Inference& model, const GenerateOptions& o, TrainState& shard, const Prompts& prompts,
                        uint64_t seed) {
  Communicator& world = shard.groups.world;
  const SampleOptions options{.temperature = o.temperature,
                              .top_k = o.top_k,
                              .top_p = o.top_p,
                              .min_p = o.min_p,
                              .repetition_penalty = o.repetition_penalty,
                              .seed = seed,
                              .vocab = model.tokenizer->vocab_size()};
  const size_t count = prompts.texts.size();
  const bool json = o.format == "json", streams = !json && count == 1, prints = world.rank() == 0;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<Shown> shown;
  for (const Asked& asked : prompts.asked) {
    tokens.push_back(asked.tokens);
    shown.emplace_back(*model.tokenizer, o, asked);
  }
  const auto before = [&](size_t p) { return prompts.shown ? prompts.texts[p] : std::string(); };
  Generator generator(shard);
  const auto start = std::chrono::steady_clock::now();
  if (streams && prints) print(before(0));
  double first = 0;
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  generator.write(tokens, o.tokens, options, [&](size_t p, int32_t token) {
    if (first == 0) first = elapsed();
    const bool on = shown[p].add(token);
    const bool open = !streams || !prints || print(shown[p].take());
    return on && (open || world.size() > 1);
  });
  const double seconds = elapsed();
  double written = 0;
  int64_t long_texts = 0;
  for (size_t p = 0; p < count; ++p) {
    shown[p].finish();
    const int64_t read = std::ssize(tokens[p]) + shown[p].tokens() - 1, context = model.run.config.model.context;
    if (generator.own(p) && std::ssize(tokens[p]) <= context && read > context) ++long_texts;
    const int root =
        shard.groups.mesh.rank_at({0, static_cast<int>(p % static_cast<size_t>(model.run.config.plan.dp)), 0, 0});
    const std::string one = json ? to_json(prompts.texts[p], shown[p]) + "\n" : before(p) + shown[p].text() + "\n";
    const std::string full = world.size() > 1 && !streams ? broadcast_text(world, one, root) : one;
    if (prints && !streams) print(full);
    if (prints && !streams && !json && p + 1 < count) print("\n");
    if (generator.own(p)) written += static_cast<double>(shown[p].tokens());
  }
  if (streams && prints) print(shown[0].take() + "\n");
  if (long_texts > 0)
    say(fmt::format("{} longer than the context of {} tokens; once it is full, the earliest tokens are ignored",
                    count == 1 ? "the text is" : fmt::format("{} of {} texts are", long_texts, count),
                    model.run.config.model.context));
  const Plan& plan = model.run.config.plan;
  written = world.size() > 1 ? world.sum(written) / static_cast<double>(plan.pp * plan.tp) : written;
  const double all = static_cast<double>(count),
               rest = written - all;  // without each text's first token
  if (prints && !o.chat)
    say(fmt::format("{} tokens from {}, {} tokens/s; time to first token {:.3f} s", written, model.from.path.string(),
                    format_si(rest > 0 ? rest / (seconds - first) : written / seconds), first));
  return o.chat && world.size() > 1 ? broadcast_text(world, shown[0].text(), 0) : shown[0].text();
}

struct Found {
  std::string name;
  double ratio = 1;
  EvaluationText text;
  double loss = 0;

  double tokens() const { return static_cast<double>(text.rows->targets()); }
  double bits() const { return loss * tokens() / std::log(2.0) / static_cast<double>(text.bytes); }
};

std::vector<Found> load_texts(const Inference& model) {
  const auto one = [&](const std::string& spec) {
    return for_option("data", spec,
                      [&] { return evaluation_text(spec, *model.tokenizer, example_options(model.run.config)); });
  };
  const std::optional<std::vector<Weighted>> mixture = mixture_in(model.run.config.data.source);
  std::vector<Found> out;
  if (!mixture) out.push_back({.name = "", .text = one(model.run.config.data.source)});
  for (const Weighted& w : mixture.value_or(std::vector<Weighted>()))
    out.push_back({.name = w.name, .ratio = w.weight, .text = one(w.spec)});
  return out;
}

std::string to_text(const Found& f) {
  return fmt::format("loss {:.4f} nats per token, {} tokens in windows of {}; {:.4f} bits per byte", f.loss,
                     f.text.rows->targets(), f.text.rows->context(), f.bits());
}

nlohmann::ordered_json result_json(const Found& f) {
  return {{"loss", f.loss}, {"tokens", f.text.rows->targets()}, {"bits_per_byte", f.bits()}};
}

std::string result(bool json, const std::vector<Found>& all) {
  if (all.size() == 1) return (json ? result_json(all[0]).dump() : to_text(all[0])) + "\n";
  double loss = 0, bytes = 0, ratios = 0;
  int64_t tokens = 0;
  for (const Found& f : all) {
    ratios += f.ratio;
    loss += f.ratio * f.loss;
    bytes += f.ratio * static_cast<double>(f.text.bytes) / f.tokens();
    tokens += f.text.rows->targets();
  }
  const double bits = loss / std::log(2.0) / bytes;
  loss /= ratios;
  if (json) {
    nlohmann::ordered_json out{{"loss", loss}, {"tokens", tokens}, {"bits_per_byte", bits}};
    for (const Found& f : all) out["datasets"][f.name] = result_json(f);
    return out.dump() + "\n";
  }
  std::string out = fmt::format("loss {:.4f} nats per token (weighted mean); {:.4f} bits per byte\n", loss, bits);
  for (const Found& f : all) out += fmt::format("  {}: {}\n", one_line(f.name), to_text(f));
  return out;
}

}  // namespace

Inference open_inference(const std::string& from, const Args& args) {
  Inference out;
  const auto base = std::ranges::find(args, "base", [](const auto& arg) { return arg.first; });
  out.from = open_pretrained(from, base == args.end() ? Base() : Base(base->second));
  if (is_peft_folder(from) && !out.from.base_hash.empty()) known_base(out.from, from);
  out.tokenizer = Tokenizer::open_folder(out.from.tokenizer());
  TypedOptions run;
  run.optim.dtype = out.from.dtype == DType::bfloat16 ? DType::bfloat16 : DType::float32;
  run.data.source = "";
  for (const auto& [name, text] : args) set_option(run, name, text);
  const bool no_axes = !run.ranks && !run.is_set("dp") && !run.is_set("tp") && !run.is_set("pp") && !run.is_set("cp");
  if (no_axes && !starts_processes(run)) run.ranks = 1;  // instead of the size of an MPI job
  take_model(run, out.from.config);
  if (!out.from.merged.empty() && run.model.quantize.codec != Codec::none)
    bad_usage("--quantize: expected none for a model with merged adapters ({}), got {}", out.from.merged,
              value_name(run.model.quantize.codec));
  if (out.from.dtype == DType::bfloat16 && !run.is_set("dtype"))
    out.from.notes.push_back(one_line(out.from.path.string()) +
                             ": stored and computed in bf16; use --dtype fp32 to compute in fp32");
  say_notes(out.from.notes);
  if (run.optim.dtype == DType::float64)
    throw Error("--dtype: fp64 is supported only by tessera verify; expected fp32 or bf16");
  constexpr int64_t kSequences = 4;  // sequences per rank and batch
  TrainConfig config = resolve(run);
  if (!run.is_set("batch")) config.optim.batch = kSequences * config.plan.dp;
  check_sizes(config);
  check_plan(run, config);
  config.make = make_frozen;
  check_memory_for_inference(config);
  out.run = {std::move(config), run.own, run.set};
  return out;
}

std::unique_ptr<Trainer> inference_trainer(const Inference& inference, Communicator& world) {
  const TrainConfig& job = inference.run.config;
  auto shard = std::make_unique<Trainer>(
      job, synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, 0), world);
  read_values(shard->state().strategy().resident_units(), first_weights(inference.from, job.model));
  world.barrier();
  return shard;
}

int run(const GenerateOptions& o) {
  const std::vector<std::string> texts = o.chat ? std::vector<std::string>() : read_prompts(o);
  const Inference model = open_inference(o.from, o.args);
  const Conversation initial(o, *model.tokenizer, model.from);
  Prompts prompts{texts, {}, !initial.has_template()};
  for (const std::string& prompt : texts)
    prompts.asked.push_back(initial.has_template() ? initial.asked(prompt) : Asked{read_tokens(prompt, model, o)});
  for (size_t p = 0; p < texts.size(); ++p)
    report_unread(texts.size() > 1 ? fmt::format("prompt {}", p + 1) : "the prompt", prompts.asked[p],
                  model.run.config.model.context);
  std::fputs(for_terminal(other_settings(*model.tokenizer, o)).c_str(), stderr);
  launch(launch_options("generate", model.run, model.run.config.plan), [&](Communicator& world) {
    const std::unique_ptr<Trainer> shard = inference_trainer(model, world);
    if (!o.chat) {
      write_texts(model, o, shard->state(), prompts, static_cast<uint64_t>(o.seed));
      return;
    }
    Conversation conversation = initial;
    for (auto seed = static_cast<uint64_t>(o.seed);; ++seed) {
      const std::optional<std::string> line = next_line(world);
      if (!line) return;
      const Asked asked = conversation.asked(*line);
      if (world.rank() == 0) report_unread("the conversation", asked, model.run.config.model.context);
      conversation.add(*line, write_texts(model, o, shard->state(), {{*line}, {asked}, false}, seed));
    }
  });
  return 0;
}

int run(const EvaluateOptions& o) {
  const Inference model = open_inference(o.from, o.args);
  if (model.run.config.data.source.empty()) throw Error("--data: missing; expected text, tokens or examples");
  check_example_options(model.run.config.data);
  const std::vector<Found> texts = load_texts(model);
  for (const Found& f : texts)
    for (const std::string& note : f.text.notes) say(note);
  launch(launch_options("evaluate", model.run, model.run.config.plan), [&](Communicator& world) {
    const std::unique_ptr<Trainer> shard = inference_trainer(model, world);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Found> found = texts;
    double tokens = 0;
    for (Found& f : found) {
      f.loss = shard->mean_loss(*f.text.rows, {}).value();
      tokens += f.tokens();
    }
    if (world.rank() != 0) return;
    print(result(model.run.options.json(), found));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    say(fmt::format("{} tokens/s", format_si(tokens / seconds)));
  });
  return 0;
}

}  // namespace tessera
