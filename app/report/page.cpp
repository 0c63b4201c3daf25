// The page around the parts. It loads nothing: style and script stand in it.
#include <nlohmann/json.hpp>
#include <string>

#include "app/report/parts.h"
#include "app/report/style.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

// The figures of the pipeline once more, for programs; what is not meaningful is null.
std::string numbers(const Record& r, const StepSpan& step, const std::optional<MeasuredPipeline>& p) {
  nlohmann::ordered_json bubble;
  if (p) {
    bubble["formula"] = p->formula ? nlohmann::ordered_json(*p->formula) : nullptr;
    bubble["equal"] = p->equal.bubble_share();
    bubble["replayed"] = p->replayed.bubble_share();
    bubble["measured"] = r.shared ? nullptr : nlohmann::ordered_json(p->measured.bubble_share());
  }
  const nlohmann::ordered_json all = {{"step", step.step}, {"step_ms", step.end - step.begin}, {"bubble", bubble}};
  return "<script type=\"application/json\" id=\"numbers\">" + all.dump() + "</script>\n";
}

}  // namespace

std::string whole_page(const std::string& title, const std::string& main, const std::string& data) {
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
         "<link rel=\"icon\" href=\"data:,\"/>\n<title>" +
         escaped(title) + "</title>\n<style>" + page_style() + "</style>\n</head>\n<body>\n<main>\n" + main +
         "</main>\n<div id=\"tip\"></div>\n" + data + "<script>" + kScript + "</script>\n</body>\n</html>\n";
}

std::string page(const Record& r) {
  const StepSpan step = median_step(r);
  const std::optional<MeasuredPipeline> pipeline = measure_pipeline(r, step);
  std::string out = head_part(r);
  if (step.step > 0) {
    if (pipeline)
      out += pipeline_part(r, *pipeline, step);
    else if (r.schedule.ranks > 1)
      out +=
          "<section id=\"pipeline\"><h2>Pipeline</h2><p>The trace has no step with all actions of the "
          "schedule.</p></section>\n";
    out += timeline_part(r, step) + memory_part(r, step);
  }
  return whole_page(r.model.substr(0, r.model.find(':')) + ", a run of Tessera",
                    out + bytes_part(r, step) + experts_part(r, step), numbers(r, step, pipeline));
}

}  // namespace tessera::report
