// Sanitizing of error messages, and suggestions.
#include "base/error.h"

#include <algorithm>

#include "base/utf8.h"

namespace tessera {

namespace {

constexpr size_t kLongest = 1000, kTail = 300;
constexpr std::string_view kCut = " [...] ";

bool inside_character(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

std::string shortened(const std::string& text) {
  if (text.size() <= kLongest) return text;
  size_t head = kLongest - kTail - kCut.size(), tail = text.size() - kTail;
  while (head > 0 && inside_character(text[head])) --head;
  while (tail < text.size() && inside_character(text[tail])) ++tail;
  return text.substr(0, head).append(kCut).append(text, tail);
}

// Escapes invalid UTF-8 and all control characters (C0, DEL, C1) not in `allowed`.
std::string escape_controls(std::string_view text, std::string_view allowed) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t begin = i;
    const std::optional<char32_t> c = next_code_point(text, i);
    if (!c)
      append_escaped(out, text[i++]);
    else if ((*c < 0x20 || (*c >= 0x7F && *c < 0xA0)) && allowed.find(static_cast<char>(*c)) == allowed.npos)
      append_escaped(out, static_cast<char>(*c));
    else
      out.append(text, begin, i - begin);
  }
  return out;
}

}  // namespace

void require_object(const void* object, const char* what) {
  if (object == nullptr) throw Error(std::string(what) + ": expected an object, got null");
}

void reject(const char* function, const std::string& expected, const std::string& got) {
  throw Error("[" + std::string(function) + "] expected " + expected + ", got " + got);
}

size_t checked_index(const char* function, const char* what, int64_t index, int64_t count) {
  if (index < 0 || index >= count) reject(function, what + (" below " + std::to_string(count)), std::to_string(index));
  return static_cast<size_t>(index);
}

std::string one_line(const std::string& message) { return shortened(escape_controls(message, "")); }

std::string for_terminal(std::string_view text) { return escape_controls(text, "\n\t"); }

// Suggestions by edit distance.

namespace {

// Terms of other programs whose spelling is too different for the edit distance.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"cuda", "gpu"},
    {"native", "nccl"},
    {"bf16", "fp16 float16 half bfloat16"},
    {"fp32", "float32 float"},
    {"fp64", "float64 double"},
    {"lr", "learning-rate"},
    {"batch", "batch-size global-batch-size"},
    {"ranks", "world-size"},
    {"tp", "tensor-parallel tensor-model-parallel-size"},
    {"pp", "pipeline-parallel pipeline-model-parallel-size"},
    {"cp", "context-parallel context-parallel-size"},
    {"ep", "expert-parallel expert-model-parallel-size"},
    {"sp", "sequence-parallel"},
    {"channels", "hidden-size d-model"},
    {"context", "seq-length seq-len"},
    {"steps", "max-steps train-iters"},
    {"dtype", "precision"},
    {"clip", "grad-clip max-grad-norm"},
    {"microbatches", "gradient-accumulation-steps"},
};

size_t distance(std::string_view a, std::string_view b) {  // Levenshtein
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t up = row[j];
      row[j] = std::min({up + 1, row[j - 1] + 1, corner + (a[i - 1] == b[j - 1] ? 0 : 1)});
      corner = up;
    }
  }
  return row[b.size()];
}

std::string question(std::string_view name) { return "; did you mean '" + std::string(name) + "'?"; }

}  // namespace

std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known) {
  std::string word(typed);
  for (char& c : word)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  const std::string dashes(word.starts_with("--") ? 2 : 0, '-');
  const std::string between = " " + word.substr(dashes.size()) + " ";
  for (const auto& [name, others] : kOtherNames)
    if (const std::string ours = dashes + std::string(name);
        (" " + std::string(others) + " ").find(between) != std::string::npos &&
        std::ranges::find(known, ours) != known.end())
      return question(ours);
  for (const std::string& k : known)  // a prefix is not a typo: --lay is --layers, not --lr
    if (word.size() > 3 && k.starts_with(word)) return question(k);
  if (word.empty() || word.size() > 64) return "";  // matches nothing, and the search would be slow
  const std::string* best = nullptr;
  size_t nearest = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& k : known)
    if (const size_t d = distance(word, k); d < nearest) {
      nearest = d;
      best = &k;
    }
  return best ? question(*best) : "";
}

std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known) {
  return did_you_mean(typed, std::vector<std::string>(known.begin(), known.end()));
}

void expect_at_least(int64_t minimum, const char* field, int64_t found) {
  if (found < minimum)
    throw FieldError(field, "expected at least " + std::to_string(minimum) + ", got " + std::to_string(found));
}

std::string alternatives(std::span<const std::string_view> names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i)
    out.append(i == 0 ? "" : i + 1 < names.size() ? ", " : " or ").append(names[i]);
  return out;
}

std::string multiples_near(int64_t n, int64_t wanted) {
  const int64_t below = wanted / n * n;
  if (below == wanted && wanted > 0) return std::to_string(wanted);
  return (below < 1 ? "" : std::to_string(below) + " or ") + std::to_string(below + n);
}

}  // namespace tessera
