// Text samples, trimmed to complete sentences.
#include "app/train/text_sample.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "app/pretrained.h"
#include "models/sample.h"
#include "train/device.h"
#include "train/run/signals.h"

namespace tessera {

namespace {

constexpr int64_t kSampleTokens = 300;

constexpr std::string_view kSpaces = " \n\r\t";

// The full stop of a title does not end a sentence.
bool is_title(std::string_view before_point) {
  size_t begin = before_point.size();
  while (begin > 0 && std::isalpha(static_cast<unsigned char>(before_point[begin - 1]))) --begin;
  constexpr std::array<std::string_view, 6> titles = {"Mr", "Mrs", "Ms", "Dr", "St", "Esq"};
  return std::ranges::find(titles, before_point.substr(begin)) != titles.end();
}

// The position after the sentence that ends at `at`, or 0.
size_t end_at(std::string_view text, size_t at) {
  if (std::string_view(".!?").find(text[at]) == text.npos || (text[at] == '.' && is_title(text.substr(0, at))))
    return 0;
  const size_t end = std::min(text.find_first_not_of("\"')_", at + 1), text.size());
  return end == text.size() || kSpaces.find(text[end]) != kSpaces.npos ? end : 0;
}

// npos if no sentence begins after `end`.
size_t next_sentence(std::string_view text, size_t end) {
  const size_t begin = std::min(text.find_first_not_of(kSpaces, end), text.size());
  const size_t word = begin < text.size() && (text[begin] == '"' || text[begin] == '\'') ? begin + 1 : begin;
  return word < text.size() && text[word] >= 'A' && text[word] <= 'Z' ? begin : text.npos;
}

}  // namespace

std::string complete_sentences(const std::string& text) {
  size_t first = std::string::npos, last = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t end = end_at(text, i);
    if (end == 0) continue;
    if (first == std::string::npos)
      first = next_sentence(text, end);
    else
      last = end;
  }
  return first != std::string::npos && last > first && 3 * (last - first) >= text.size()
             ? text.substr(first, last - first)
             : text;
}

std::string sample_text(const TrainCall& call, const ModelConfig& config) {
  if (call.command.options.json() || call.command.config.run.no_save || call.command.options.quiet) return "";
  std::vector<std::string> passed_over;
  const std::unique_ptr<LanguageModel> model = build_model(call.command.config.make, config);
  const Plan& plan = call.command.config.plan;  // except its kernels: decoding token by token uses Tessera's own
  model->freeze();                              // avoids memory for gradients
  model->materialize(0, rank_arena(plan.device, 0), call.command.config.optim.dtype, DType::float32);
  load_model(*model, find_checkpoint(call.directory.path(), passed_over));
  StreamDecoder text(*call.dataset.tokenizer, StreamDecoder::Broken::escaped);
  std::string written;
  const std::vector<int32_t> prompt = call.dataset.prompt();
  const SampleOptions options{.temperature = 0.7,
                              .top_p = 0.9,
                              .seed = static_cast<uint64_t>(call.command.config.optim.seed),
                              .vocab = call.dataset.tokenizer->vocab_size()};
  sample(*model, prompt, kSampleTokens, options, [&](int32_t token) {
    written += text.add(token);
    return SignalRequests::stop() == 0;
  });
  written += text.end();
  return call.dataset.val_examples ? written : complete_sentences(written);
}

}  // namespace tessera
