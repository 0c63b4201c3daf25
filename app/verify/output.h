// The printed results of `verify`.
#pragma once
#include <string>

#include "app/options.h"
#include "verify/defects/defects.h"

namespace tessera {

// `defect` is what was planted; null: nothing.
std::string verify_json(const VerifyResult& result, const TrainOptions& options, const Job& job, const Defect* defect);
// The bounds that broke.
std::string broken_text(const VerifyResult& result);
// The likely cause of broken bounds, and why it is likely.
std::string diagnosis_text(const VerifyResult& result);
// The defect that was planted, and where.
std::string defect_text(const Defect& defect, const Job& job);
// All defects, by name.
std::string defect_list();
// The player's turn, where there is a terminal: waits for a line, and says whether it names the defect or its cause.
void ask_player(const Defect& defect);

}  // namespace tessera
