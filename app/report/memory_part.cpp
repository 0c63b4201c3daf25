// What each rank held during a step, by category.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kWide = 580, kHeight = 190, kLeft = 74, kTop = 8, kBottom = 24;
constexpr size_t kMostRanks = 16;

int64_t total(const Held& h) {
  int64_t sum = 0;
  for (const int64_t b : h.bytes) sum += b;
  return sum;
}

// What was held in the step, from its first moment to its last.
std::vector<Held> samples_of(const Rank& rank, const StepSpan& step) {
  std::vector<Held> out;
  for (const Held& h : rank.memory) {
    if (h.time > step.end) break;
    if (h.time <= step.begin) out.clear();
    out.push_back(h);
  }
  if (out.empty()) return out;
  out.front().time = std::max(out.front().time, step.begin);
  out.push_back(out.back());
  out.back().time = step.end;
  return out;
}

struct Scale {
  double begin = 0, end = 1, most = 1;
  double x(double time) const { return kLeft + (kWide - kLeft - 6) * (time - begin) / (end - begin); }
  double y(double bytes) const { return kHeight - kBottom - (kHeight - kTop - kBottom) * bytes / most; }
};

// The area of one category on top of those before it. What was noted at a moment was held from there on.
std::string area(const std::vector<Held>& samples, size_t category, const Scale& s) {
  std::string upper, lower;
  for (size_t i = 0; i < samples.size(); ++i) {
    double below = 0;
    for (size_t c = 0; c < category; ++c) below += static_cast<double>(samples[i].bytes[c]);
    const double above = below + static_cast<double>(samples[i].bytes[category]);
    const double from = s.x(samples[i].time), to = i + 1 < samples.size() ? s.x(samples[i + 1].time) : from;
    upper += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", from, s.y(above), to, s.y(above));
    lower.insert(0, fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", to, s.y(below), from, s.y(below)));
  }
  return fmt::format("<polygon class=\"m{}\" points=\"{}{}\"/>\n", category, upper, lower);
}

std::string words_of(const Held& h, const StepSpan& step) {
  std::string out =
      fmt::format("at {} | {} held", short_time(h.time - step.begin), short_bytes(static_cast<double>(total(h))));
  for (size_t c = 0; c < h.bytes.size(); ++c)
    out += fmt::format(" | {} {}", name_of(static_cast<Category>(c)), short_bytes(static_cast<double>(h.bytes[c])));
  return out;
}

std::string rank_picture(const Rank& rank, const StepSpan& step, double most) {
  const std::vector<Held> samples = samples_of(rank, step);
  const Scale s{step.begin, std::max(step.end, step.begin + 1e-9), most};
  std::string out = fmt::format("<figure><figcaption>{}</figcaption>\n", escaped(rank.name)) +
                    open_svg(kHeight, rank.name + ": memory", kWide);
  for (const double tick : ticks(0, most, 4)) {
    out += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft, kWide - 6,
                       s.y(tick), s.y(tick));
    out += text_at(kLeft - 6, s.y(tick) + 4, "end", short_bytes(tick));
  }
  for (size_t c = 0; c < kCategories; ++c) out += area(samples, c, s);
  for (size_t i = 0; i + 1 < samples.size(); ++i)  // what is pointed at
    out += box({s.x(samples[i].time), kTop, s.x(samples[i + 1].time) - s.x(samples[i].time), kHeight - kTop - kBottom},
               "glass", words_of(samples[i], step));
  for (const double tick : ticks(0, step.end - step.begin, 5))
    if (const double x = s.x(step.begin + tick); x < kWide - 24)
      out += text_at(x, kHeight - 8, tick > 0 ? "mid" : "start", fmt::format("{:.4g} ms", tick));
  return out + "</svg></figure>\n";
}

std::string peaks_table(const Record& r) {
  std::string out = "<table id=\"peaks\"><thead><tr><th>most bytes at one time</th>";
  for (size_t c = 0; c < kCategories; ++c)
    out += fmt::format("<th class=\"n\">{}</th>", name_of(static_cast<Category>(c)));
  out += "<th class=\"n\">all at once</th></tr></thead>\n<tbody>\n";
  for (const Rank& rank : r.ranks) {
    out += fmt::format("<tr><td>{}</td>", escaped(rank.name));
    for (const int64_t b : rank.peaks) out += fmt::format("<td class=\"n\">{}</td>", grouped(b));
    out += fmt::format("<td class=\"n\"><b>{}</b></td></tr>\n", grouped(rank.peak));
  }
  return out + "</tbody></table>\n";
}

}  // namespace

std::string memory_part(const Record& r, const StepSpan& step) {
  std::string out = fmt::format(
      "<section id=\"memory\">\n<h2>Memory in step {}</h2>\n<p>The height of a colour is what a rank held of that "
      "kind, "
      "noted after each action and communication; all ranks have one scale. Activations pile up in forward passes and "
      "fall in backward ones; the table has the peaks of the whole run, also those within an action.</p>\n",
      step.step);
  std::vector<LegendEntry> entries;
  for (size_t c = 0; c < kCategories; ++c)
    entries.push_back({fmt::format("m{}", c), std::string(name_of(static_cast<Category>(c)))});
  out += legend(entries) + "<div class=\"pair\">\n";
  int64_t most = 1;
  const size_t drawn = std::min(kMostRanks, r.ranks.size());
  for (size_t i = 0; i < drawn; ++i)
    for (const Held& h : samples_of(r.ranks[i], step)) most = std::max(most, total(h));
  for (size_t i = 0; i < drawn; ++i) out += rank_picture(r.ranks[i], step, static_cast<double>(most) * 1.05);
  out += "</div>\n";
  if (r.ranks.size() > kMostRanks)
    out += fmt::format("<p class=\"note\">The first {} of {} ranks are drawn.</p>\n", kMostRanks, r.ranks.size());
  return out + peaks_table(r) + "</section>\n";
}

}  // namespace tessera::report
