// A subcommand for each way.
#include "app/lab_options.h"

#include <CLI/CLI.hpp>

namespace tessera {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  tessera lab                     the exercises\n"
    "  tessera lab start 2 my-ring     makes README.md, the page of exercise 2, and ring.cpp, where you write a "
    "function\n"
    "  tessera lab check 2 my-ring     builds it and says whether it is solved, or what is wrong: status 0 or 1\n"
    "  my-ring/build/tessera train --dp 2 --all-reduce ring   trains with your function in it\n"
    "docs/lab.md shows a whole exercise.";

void add_words(CLI::App* action, LabOptions& o, bool in_a_folder, const char* folder) {
  action->add_option("N", o.exercise, "number or name of an exercise")->required()->type_name("");
  if (in_a_folder) action->add_option("DIR", o.folder, folder)->required()->type_name("");
  action->allow_extras();
}

}  // namespace

void add_lab(CLI::App& app, LabOptions& o) {
  CLI::App* lab = app.add_subcommand("lab", "Exercises on parallel training: functions of Tessera to write again");
  lab->add_subcommand("list", "List the exercises, as without an action");
  add_words(lab->add_subcommand("start", "Give an exercise out: its page, and the file in which you write a function"),
            o, true, "folder to make");
  add_words(lab->add_subcommand("check", "Build your function, and grade it"), o, true, "folder of lab start");
  add_words(lab->add_subcommand("grade", "Grade the function that this program was built with"), o, false, "");
  lab->require_subcommand(0, 1);
  lab->footer(kExamples);
}

void choose_what(const CLI::App& command, LabOptions& o) {
  using Way = LabOptions::Way;
  const auto chosen = command.get_subcommands();
  const std::string name = chosen.empty() ? "" : chosen.front()->get_name();
  o.way = name == "start" ? Way::start : name == "check" ? Way::check : name == "grade" ? Way::grade : Way::list;
}

}  // namespace tessera
