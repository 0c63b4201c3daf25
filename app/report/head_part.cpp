// What ran, and the curve of its loss.
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

std::string fact(const std::string& name, const std::string& value) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(name), escaped(value));
}

}  // namespace

std::string head_part(const Record& r) {
  std::string out = fmt::format(
      "<section id=\"run\">\n<h1>A training run of Tessera</h1>\n<p class=\"model\">{}</p>\n<dl>\n", escaped(r.model));
  out += fact("written", r.written) + fact("steps", grouped(r.steps));
  if (r.tokens_per_s > 0) out += fact("tokens/s", grouped(std::llround(r.tokens_per_s)) + " (median step)");
  if (!r.losses.empty()) out += fact("loss at the end", fmt::format("{:.4f}", r.losses.back().value));
  if (!r.validations.empty()) out += fact("validation loss", fmt::format("{:.4f}", r.validations.back().value));
  for (const auto& [name, value] : r.plan) out += fact(name, value);
  out += fact("cores", fmt::format("{} for {} threads of ranks", r.cores, r.threads));
  out += fact("traced", r.kept) + fact("times", r.clock);
  out +=
      "</dl>\n</section>\n<section id=\"loss\">\n<h2>Loss</h2>\n<p>The line is the training loss of each step, the "
      "dots "
      "are the mean loss over the whole validation split. A line that falls while the dots rise has begun to learn "
      "the text by heart.</p>\n";
  if (r.losses.empty()) return out + "<p>No step was recorded.</p>\n</section>\n";
  return out + legend(loss_legend({&r})) + inline_svg(loss_picture({&r}, kWidth)) + "</section>\n";
}

}  // namespace tessera::report
