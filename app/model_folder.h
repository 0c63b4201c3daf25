// Folders of models that commands give out: whole or absent.
#pragma once
#include <filesystem>
#include <functional>
#include <string>

#include "data/tokenizer.h"

namespace tessera {

// Makes a folder of this name by what `fill` writes into one beside it, which then gets the name. Throws OutputError
// naming --out where there is something of that name already.
void make_model_folder(const std::string& out, const std::function<void(const std::filesystem::path& made)>& fill);

// As other programs know it, or as only we do.
void write_tokenizer(const std::filesystem::path& folder, const Tokenizer& tokenizer);

}  // namespace tessera
