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

constexpr double kHeight = 190, kLeft = 74, kTop = 8, kBottom = 24;
constexpr double kHalf = 580;  // two pictures beside each other
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
  double begin = 0, end = 1, most = 1, width = 1;
  double x(double time) const { return kLeft + (width - kLeft - 6) * (time - begin) / (end - begin); }
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
  return fmt::format("<polygon class=\"m{} area\" points=\"{}{}\"/>\n", category, upper, lower);
}

std::string words_of(const Held& h, const StepSpan& step) {
  std::string out =
      fmt::format("at {} | {} held", short_time(h.time - step.begin), short_bytes(static_cast<double>(total(h))));
  for (size_t c = 0; c < h.bytes.size(); ++c)
    out += fmt::format(" | {} {}", name_of(static_cast<Category>(c)), short_bytes(static_cast<double>(h.bytes[c])));
  return out;
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

int64_t most_held(const Rank& rank, const StepSpan& step) {
  int64_t most = 0;
  for (const Held& h : samples_of(rank, step)) most = std::max(most, total(h));
  return most;
}

Picture rank_memory(const Rank& rank, const StepSpan& step, double most, double width, bool tips) {
  const std::vector<Held> samples = samples_of(rank, step);
  const Scale s{step.begin, std::max(step.end, step.begin + 1e-9), most, width};
  Picture out{.title = rank.name, .width = width, .height = kHeight};
  for (const double tick : ticks(0, most, 5)) {
    out.body += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kLeft,
                            width - 6, s.y(tick), s.y(tick));
    out.body += text_at(kLeft - 6, s.y(tick) + 4, "end", short_bytes(tick));
  }
  for (size_t c = 0; c < kCategories; ++c) out.body += area(samples, c, s);
  for (size_t i = 0; tips && i + 1 < samples.size(); ++i)  // what is pointed at
    out.body +=
        box({s.x(samples[i].time), kTop, s.x(samples[i + 1].time) - s.x(samples[i].time), kHeight - kTop - kBottom},
            "glass", words_of(samples[i], step));
  out.body += time_axis({.left = kLeft, .width = width - 6, .y = kHeight - 8, .span = step.end - step.begin});
  return out;
}

std::vector<LegendEntry> memory_legend() {
  std::vector<LegendEntry> out;
  for (size_t c = 0; c < kCategories; ++c)
    out.push_back({fmt::format("m{}", c), std::string(name_of(static_cast<Category>(c)))});
  return out;
}

std::string memory_part(const Record& r, const StepSpan& step) {
  std::string out = fmt::format(
      "<section id=\"memory\">\n<h2>Memory in step {}</h2>\n<p>The height of a colour is the memory of that kind "
      "that a rank held. It was noted each time that it had changed by 1/32 of its maximum. All ranks have one scale. "
      "Activations grow in "
      "forward passes and shrink in backward passes. The table has the peaks of the whole run.</p>\n",
      step.step);
  out += legend(memory_legend()) + "<div class=\"pair\">\n";
  int64_t most = 1;
  const size_t drawn = std::min(kMostRanks, r.ranks.size());
  for (size_t i = 0; i < drawn; ++i) most = std::max(most, most_held(r.ranks[i], step));
  for (size_t i = 0; i < drawn; ++i)
    out += fmt::format("<figure><figcaption>{}</figcaption>\n", escaped(r.ranks[i].name)) +
           inline_svg(rank_memory(r.ranks[i], step, static_cast<double>(most) * 1.05, kHalf)) + "</figure>\n";
  out += "</div>\n";
  if (r.ranks.size() > kMostRanks)
    out += fmt::format("<p class=\"note\">The first {} of {} ranks are drawn.</p>\n", kMostRanks, r.ranks.size());
  return out + peaks_table(r) + "</section>\n";
}

}  // namespace tessera::report
