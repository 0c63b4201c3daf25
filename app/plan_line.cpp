// What `plan --help` teaches.
#include "app/plan_line.h"

#include <functional>

#include "app/option_values.h"
#include "app/run_words.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera plan --model llama2-7b --hardware h100 --ranks 8 --batch 256       7B on 8 H100: the best plans, and "
    "why\n"
    "  tessera plan --model llama3-70b --context 8192 --hardware h100 --ranks 64 --batch 512 --html plan.html\n"
    "  tessera plan --model llama2-7b --hardware a100-80 --ranks 8 --batch 64 --tp 2 --zero 1   with fixed choices\n"
    "  tessera plan --model my.json --hardware cluster.toml --software megatron --ranks 3072 --batch 1536\n"
    "  tessera plan --cases cases.jsonl --format json                             predictions of given plans, no "
    "search\n"
    "  tessera plan --model gpt-nano --hardware this --ranks 2 --batch 12 --measure 1,2   on this machine, and "
    "measured\n"
    "An option of the layout fixes that choice; the planner searches the others. my.json has sizes: {\"layers\": 32,\n"
    "\"channels\": 4096, \"heads\": 32, \"ffn\": 11008, \"gated\": true, \"vocab\": 32000, \"context\": 4096, "
    "\"tied\": false,\n"
    "\"positions\": \"rope\"}; cluster.toml has changes to a known machine: base = \"h100\", memory_bytes = "
    "94e9.";

OptionInfo range(double least, double most) {
  return {.name = "", .group = "", .help = "", .least = least, .most = most};
}

std::vector<int64_t> numbers_in(const std::string& name, const std::string& text) {
  std::vector<int64_t> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    out.push_back(parse_integer(name, text.substr(at, end - at), 1, 1000));
    at = end + 1;
  }
  return out;
}

}  // namespace

void add_plan(CLI::App& plan, PlanOptions& o, Findings& wrong) {
  const auto add = [&](const char* name, const char* help, const std::function<void(const std::string&)>& set) {
    add_words(plan, name, help, {set, wrong})->group("Planning");
  };
  const auto path = [](const std::string& name, const std::string& text) {
    if (text.empty()) throw Error(name + ": expected a file, found ''");
    return text;
  };
  add("--hardware",
      "hardware of the ranks: a name such as h100 or a100-80, a TOML file, or this (this machine, measured)",
      [&o](const std::string& t) { o.hardware = t; });
  add("--software", "software that trains: tessera, megatron, deepspeed, fsdp, or a TOML file [tessera]",
      [&o](const std::string& t) { o.software = t; });
  add("--memory", "GB that a rank may use; default: all that the hardware has",
      [&o](const std::string& t) { o.memory_gb = parse_number("--memory", t, range(1e-3, 1e6)); });
  add("--ep", "expert-parallel ranks: they share out the experts of a model; they are cut out of dp x cp",
      [&o](const std::string& t) { o.ep = parse_integer("--ep", t, 1, 1e6); });
  add("--top", "number of plans to show [10]",
      [&o](const std::string& t) { o.top = parse_integer("--top", t, 1, 1000); });
  add("--html", "writes the answer to this file, as one page for any browser",
      [&o, path](const std::string& t) { o.html = path("--html", t); });
  add("--cases", "JSONL file of models, plans and machines: one prediction for each line",
      [&o, path](const std::string& t) { o.cases = path("--cases", t); });
  add("--measure", "runs these plans of the ranking here, for example 1,2,3, and compares prediction and measurement",
      [&o](const std::string& t) { o.measure = numbers_in("--measure", t); });
  plan.add_flag("--calibrate", o.calibrate, "measures this machine again and keeps the result")->group("Planning");
  add("--format", "format of standard output: text|json [text]",
      [&o](const std::string& t) { o.format = parse_choice("--format", t, "text|json"); });
  plan.footer(kExamples);
}

}  // namespace tessera
