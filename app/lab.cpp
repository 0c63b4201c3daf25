// The command `lab`: exercises are listed, given out and graded.
#include <fmt/format.h>

#include "app/commands.h"
#include "app/output.h"
#include "lab/check.h"
#include "tensor/error.h"

namespace tessera {
namespace {

std::string list() {
  std::string out;
  for (const lab::Exercise& e : lab::exercises())
    out += fmt::format("  {:>2}  {:<16} {:<52} {}\n", e.number, e.name, e.title, e.file);
  return out + "\ntessera lab start N DIR gives one out; tessera lab check N DIR grades it.\n";
}

int print_verdict(const lab::Verdict& verdict) {
  print(verdict.text);
  return verdict.solved ? 0 : static_cast<int>(Status::verification);
}

}  // namespace

int run_lab(const LabOptions& o) {
  if (o.way == LabOptions::Way::list) {
    print(list());
    return 0;
  }
  const lab::Exercise& e = lab::exercise(o.exercise);
  if (o.way == LabOptions::Way::grade) {
    lab::limit_memory();
    return print_verdict(lab::grade(e));
  }
  if (o.way == LabOptions::Way::check) return print_verdict(lab::check(e, o.folder));
  lab::give_out(e, o.folder);
  print(fmt::format("{}: README.md says what to write; tessera lab check {} {} grades it\n", one_line(o.folder),
                    e.number, one_line(o.folder)));
  return 0;
}

}  // namespace tessera
