// The command `audit`: compares a recorded step of any program with a reference, and reports the first divergence and
// its likely cause as text, JSON and figures.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/audit_report.h"
#include "app/commands.h"
#include "app/output.h"
#include "app/pretrained.h"
#include "base/bad_input.h"
#include "base/files.h"
#include "hub/folder.h"
#include "verify/audit/compare.h"
#include "verify/audit/reference.h"
#include "verify/audit/shards.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using audit::AuditResult;
using audit::Kind;
using audit::Recording;
using audit::Verdict;

std::string describe(const Recording& r) {
  std::string axes;
  for (const auto& [axis, place] : r.ranks()[0].axes)
    if (place.second > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", axis, place.second);
  return fmt::format("step {}, {} rank{}{}", r.step(), r.ranks().size(), r.ranks().size() == 1 ? "" : "s",
                     axes.empty() ? "" : " (" + axes + ")");
}

// Recordings of the reference's step under other conditions, in REFERENCE/repeat_*.
audit::Repeats open_repeats(const fs::path& reference) {
  audit::Repeats out;
  if (!names_directory(reference)) return out;
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(reference))
    if (entry.path().filename().string().starts_with("repeat_")) found.push_back(entry.path());
  std::ranges::sort(found);
  for (const fs::path& path : found) out.push_back(std::make_unique<Recording>(path));
  return out;
}

// Whether the audit recomputes such tensors from others of the same recording.
bool is_recomputed(Kind kind) { return kind == Kind::norm || kind == Kind::clipped_grad || kind == Kind::updated; }

// Before the comparison, which may take long.
void check_parent_directory(const std::optional<std::string>& file) {
  if (!file) return;
  const fs::path parent = fs::path(*file).parent_path();
  if (!parent.empty() && !names_directory(parent)) cannot_write(*file, ENOENT);
}

}  // namespace

int run(const AuditOptions& o) {
  if (o.paths.empty()) bad_usage("PATH: expected a recording and optionally its reference, got none");
  if (o.paths.size() > 2) bad_usage("PATH: expected a recording and its reference, got {} paths", o.paths.size());
  check_parent_directory(o.html);
  check_parent_directory(o.svg);
  const std::string& path = o.paths.at(0);
  const Recording found(path);
  std::string head = fmt::format("{}: {}\n", path, describe(found));
  std::optional<TemporaryDirectory> directory;  // outlives the recordings in it
  std::optional<Recording> reference;
  audit::Repeats repeats;
  audit::LocalErrors local;
  AuditResult r;
  if (o.paths.size() < 2) {
    r = audit::compare(found, found, {});
    r.notes.emplace_back("no reference: only replicas, norm and update are checked");
    if (r.seen.wrong.empty()) r.verdict = Verdict::undecided;
    std::erase_if(r.tensors, [](const audit::TensorResult& t) { return !t.wrong && !is_recomputed(t.key.kind); });
  } else {
    const std::string& expected = o.paths[1];
    if (is_hub_folder(expected)) {
      const Pretrained model = open_pretrained(expected);
      directory.emplace(temporary_directory() / "tessera_audit");
      const audit::ReferenceRuns runs = audit::run_references(found, {model.config, model.tensors}, directory->path());
      reference.emplace(runs.reference, expected);
      local = runs.local;
      for (const fs::path& repeat : runs.repeats) repeats.push_back(std::make_unique<Recording>(repeat));
      head += fmt::format("reference: {} on one rank; {} runs in {}: {}\n", expected, runs.names.size(),
                          duration(runs.seconds), fmt::join(runs.names, ", "));
    } else {
      reference.emplace(expected);
      repeats = open_repeats(expected);
      head += fmt::format("reference: {}: {}, {} repetition{}\n", expected, describe(*reference), repeats.size(),
                          repeats.size() == 1 ? "" : "s");
    }
    r = audit::compare(found, *reference, repeats, local);
    if (directory && found.step() > 1)
      r.notes.push_back(fmt::format("step {}: the reference begins with the recorded parameters", found.step()));
  }
  if (std::string note = audit::identical_shards(found); !note.empty()) r.notes.push_back(std::move(note));
  if (o.html) write_file(*o.html, audit_page(r, head));
  if (o.svg) write_file(*o.svg, audit_figure(r, head));
  print(o.format == "json" ? audit_json(r) : audit_text(r, head));
  if (r.verdict != Verdict::diverges) return 0;
  throw Error(
      fmt::format("audit: {}: {}", path, r.first ? location_text(*r.first) : std::string(r.causes.front().text)),
      Status::verification);
}

}  // namespace tessera
