// Broken bounds, causes and defects, for people.
#include "app/verify_output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <iostream>

#include "app/output.h"

namespace tessera {

std::string broken_text(const VerifyResult& r) {
  std::string out = fmt::format("{} bound{} broke:\n", r.failures.size(), r.failures.size() == 1 ? "" : "s");
  for (const std::string& line : r.failures) out += "  " + line + "\n";
  return out + "\n";
}

std::string diagnosis_text(const VerifyResult& r) {
  std::string out;
  for (const Diagnosis& d : r.diagnosis)
    out +=
        fmt::format("{}: {} ({})\n  {}\n", out.empty() ? "Likely cause" : "or", d.text, name_of(d.cause), d.evidence);
  return out.empty() ? "" : out + "\n";
}

std::string defect_text(const Defect& d, const Job& job) {
  return fmt::format("Planted: {}, {}: {}.\n", d.name, d.where(job), d.what);
}

std::string defect_list() {
  std::string out;
  for (const Defect& d : defects()) out += fmt::format("{:<28} {}\n", d.name, d.what);
  return out;
}

void ask_player(const Defect& d) {
  print("What is wrong? A name of `verify --defect list`, or Enter for the diagnosis: ");
  std::string guess;
  if (isatty(STDIN_FILENO) != 0) std::getline(std::cin, guess);
  print("\n");
  if (guess.empty()) return;
  print(guess == d.name || guess == name_of(d.cause) ? "Right.\n\n" : "No.\n\n");
}

}  // namespace tessera
