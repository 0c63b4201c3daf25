// The colours, and the rules that use them by name.
#include "app/report/style.h"

#include <fmt/format.h>

#include <sstream>

namespace tessera::report {
namespace {

struct Colour {
  const char *name, *light, *dark;
};
constexpr Colour kColours[] = {
    {"ground", "#fbfbfa", "#14171c"}, {"card", "#ffffff", "#1b1f26"},  {"ink", "#1d2129", "#e3e6ea"},
    {"soft", "#535b67", "#a3acb8"},   {"line", "#dfe2e6", "#323842"},  {"idle", "#eef0f2", "#252a33"},
    {"on", "#ffffff", "#0e1115"},     {"F", "#2f6db5", "#6ea8ea"},     {"B", "#c25a1c", "#ee9257"},
    {"I", "#a87a06", "#dcb548"},      {"W", "#2f7d4e", "#6cc08c"},     {"opt", "#7d5bb3", "#ae90e2"},
    {"fin", "#78808d", "#8b94a1"},    {"msg", "#5b6b7d", "#8d9db0"},   {"wait", "#b9c0c9", "#59626f"},
    {"pp", "#2f4b7c", "#b9c8ec"},     {"dp", "#1a7d7d", "#4fbdbd"},    {"tp", "#b8487d", "#e07aab"},
    {"cp", "#8a6a3a", "#c09d68"},     {"world", "#878e98", "#79828f"}, {"m0", "#2f6db5", "#6ea8ea"},
    {"m1", "#c25a1c", "#ee9257"},     {"m2", "#7d5bb3", "#ae90e2"},    {"m3", "#2f7d4e", "#6cc08c"},
    {"m4", "#94770f", "#dcb548"},     {"m5", "#7b838e", "#79828f"},    {"warn", "#fdf1dc", "#3a2f17"},
};

constexpr const char* kPageRules = R"css(* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1268px; margin: 0 auto; padding: 20px 16px 60px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 28px 20px; margin: 0 0 18px; }
h1 { font-size: 24px; margin: 6px 0 2px; } h2 { font-size: 19px; margin: 4px 0 6px; } h3 { font-size: 14px; margin: 16px 0 4px; font-weight: 600; }
p { max-width: 900px; margin: 4px 0 10px; } .model { color: var(--soft); } .note { color: var(--soft); font-size: 13px; }
.warn { background: var(--warn); border-radius: 6px; padding: 8px 12px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(225px, 1fr)); gap: 8px 24px; margin: 12px 0 0; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.glass { fill: transparent; } .glass:hover { fill: var(--ink); fill-opacity: .08; }
svg.dim rect[data-mb] { opacity: .3; } svg.dim rect.same { opacity: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; max-width: none; }
.legend span { display: inline-flex; align-items: center; gap: 6px; } svg.key { width: 12px; height: 12px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 10px 20px; }
figure { margin: 0; max-width: 720px; } figcaption { font-size: 14px; font-weight: 600; margin: 8px 0 4px; }
table { border-collapse: collapse; margin: 14px 0 6px; font-size: 14px; } th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); }
th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle; } td:first-child, .n { white-space: nowrap; } .n { text-align: right; font-variant-numeric: tabular-nums; }
tr.sum td { font-weight: 600; border-bottom: 0; } tr.head td { font-weight: 600; padding-top: 14px; } svg.bar { width: 420px; height: 14px; }
#tip { position: fixed; display: none; pointer-events: none; z-index: 9; background: var(--ink); color: var(--ground);
  padding: 6px 10px; border-radius: 6px; font-size: 12.5px; line-height: 1.4; white-space: pre; }
@media (max-width: 700px) { section { overflow-x: auto; padding: 12px; } section > svg { min-width: 640px; } }
@media print { section { break-inside: avoid; } }
)css";

// One to a line, so that they can be told apart; the classes of a line come before its brace.
constexpr const char* kPictureRules = R"css(text { font-size: 12px; fill: var(--soft); }
text.end { text-anchor: end; }
text.mid { text-anchor: middle; }
text.on { fill: var(--on); text-anchor: middle; pointer-events: none; }
text.name { fill: var(--ink); font-weight: 600; }
text.title { fill: var(--ink); font-weight: 600; font-size: 15px; }
.card { fill: var(--card); stroke: var(--line); }
.grid { stroke: var(--line); stroke-width: 1; }
.limit { stroke: var(--B); stroke-width: 2; }
.loss { fill: none; stroke: var(--F); stroke-width: 1.8; }
.loss2 { fill: none; stroke: var(--B); stroke-width: 1.8; stroke-dasharray: 6 3; }
.loss-key { fill: var(--F); }
.loss-key2 { fill: var(--B); }
.val { fill: var(--card); stroke: var(--F); stroke-width: 2; }
.val2 { fill: var(--card); stroke: var(--B); stroke-width: 2; }
.idle { fill: var(--idle); }
.wait { fill: var(--wait); }
.k-F { fill: var(--F); }
.k-B { fill: var(--B); }
.k-I { fill: var(--I); }
.k-W { fill: var(--W); }
.k-opt { fill: var(--opt); }
.k-fin { fill: var(--fin); }
.k-msg { fill: var(--msg); }
.a-pp { fill: var(--pp); }
.a-dp { fill: var(--dp); }
.a-tp { fill: var(--tp); }
.a-cp { fill: var(--cp); }
.a-world { fill: var(--world); }
.m0 { fill: var(--m0); }
.m1 { fill: var(--m1); }
.m2 { fill: var(--m2); }
.m3 { fill: var(--m3); }
.m4 { fill: var(--m4); }
.m5 { fill: var(--m5); }
.pass { stroke: var(--card); stroke-width: 1; }
.area { stroke: var(--card); stroke-width: 0.6; }
.c1 { fill-opacity: .8; }
.c2 { fill-opacity: .62; }
)css";

std::string variables(const char* Colour::*which) {
  std::string out;
  for (const Colour& c : kColours) out += fmt::format(" --{}: {};", c.name, c.*which);
  return out;
}

// The rule with its colours written out.
std::string coloured(std::string rule, const char* Colour::*which) {
  for (const Colour& c : kColours) {
    const std::string name = fmt::format("var(--{})", c.name);
    for (size_t at; (at = rule.find(name)) != std::string::npos;) rule.replace(at, name.size(), c.*which);
  }
  return rule;
}

// Whether an element has the rule's class.
bool uses(const std::string& body, const std::string& rule) {
  const size_t dot = rule.find('.'), brace = rule.find(" {");
  if (dot == std::string::npos || dot > brace) return true;
  const std::string name = rule.substr(dot + 1, brace - dot - 1);
  for (size_t at = 0; (at = body.find(name, at)) != std::string::npos; at += name.size()) {
    const char before = body[at - 1], after = body[at + name.size()];
    if ((before == '"' || before == ' ') && (after == '"' || after == ' ')) return true;
  }
  return false;
}

}  // namespace

std::string page_style() {
  const std::string light = variables(&Colour::light), dark = variables(&Colour::dark);
  return "\n:root { color-scheme: light dark;" + light +
         " }\n@media screen and (prefers-color-scheme: dark) { :root {" + dark + " } }\n" + kPageRules + kPictureRules;
}

std::string figure_style(const std::string& body) {
  std::string light, dark;
  std::istringstream rules(kPictureRules);
  for (std::string rule; std::getline(rules, rule);) {
    if (!uses(body, rule)) continue;
    light += coloured(rule, &Colour::light) + "\n";
    if (rule.find("var(") != std::string::npos) dark += coloured(rule, &Colour::dark) + "\n";
  }
  return "\ntext { font-family: system-ui, sans-serif; }\n" + light +
         "@media screen and (prefers-color-scheme: dark) {\n" + dark + "}\n";
}

}  // namespace tessera::report
