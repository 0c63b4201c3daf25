// Making folders, and tokenizers in them.
#include "app/model_folder.h"

#include <fmt/format.h>

#include <map>

#include "data/files.h"
#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera {
namespace fs = std::filesystem;

void make_model_folder(const std::string& out, const std::function<void(const fs::path& made)>& fill) {
  fs::path folder = fs::absolute(out).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  const auto refuse = [&] {
    throw OutputError(fmt::format("--out: {} exists already; expected a new name", folder.string()));
  };
  std::error_code error;
  if (fs::exists(folder, error)) refuse();
  make_directories(folder.parent_path());
  const TemporaryDirectory beside(folder);
  const fs::path made = beside.path() / "model";
  make_directories(made);
  fill(made);
  fs::rename(made, folder, error);
  if (error && fs::exists(folder)) refuse();
  if (error) throw OutputError(fmt::format("cannot make {}: {}", folder.string(), error.message()));
}

void write_tokenizer(const fs::path& folder, const Tokenizer& tokenizer) {
  const std::map<std::string, std::string> files = tokenizer.files();
  for (const auto& [name, text] : files) write_file(folder / name, text);
  if (files.empty()) write_file(folder / "tokenizer.json", tokenizer.to_json());
}

}  // namespace tessera
