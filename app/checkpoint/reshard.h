// `checkpoint reshard`: a run whose files are in parts, one for each rank of a layout, or whole again.
#pragma once
#include <filesystem>
#include <functional>
#include <string>

#include "app/options.h"
#include "data/tokenizer.h"

namespace tessera {

// The newest checkpoint of FROM as a new run; with no layout among the options its files are whole. One tensor is in
// memory at a time. Throws Error (usage) for a layout that cannot be, InputError, and OutputError.
void reshard(const CheckpointOptions& o);

// `checkpoint quantize`: a model whose layers are in 4 bits, as a folder that other programs load too.

// Throws Error (usage) for a model that has adapters or is quantised already, and for groups or sizes that the format
// cannot hold; InputError and OutputError.
void quantize(const CheckpointOptions& options);

// Folders of models that commands give out: whole or absent.

// Makes a folder of this name by what `fill` writes into one beside it, which then gets the name. Throws OutputError
// naming --out where there is something of that name already.
void make_model_folder(const std::string& out, const std::function<void(const std::filesystem::path& made)>& fill);

// As other programs know it, or as only we do.
void write_tokenizer(const std::filesystem::path& folder, const Tokenizer& tokenizer);

}  // namespace tessera
