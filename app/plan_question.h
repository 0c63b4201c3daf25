// From options to what the planner is asked.
#pragma once
#include <string>
#include <string_view>

#include "app/options.h"
#include "planner/search.h"

namespace tessera {

struct PlanQuestion {
  planner::Question question;
  std::string model;  // what the user calls it
  double memory() const { return question.hardware.memory_bytes - question.hardware.reserved_bytes; }  // of a rank
};

// Of a preset where it is the tokenizer's: characters, or GPT-2's.
int64_t usual_vocab(std::string_view preset);

// Throws Error (usage) in the words of the options, or that names the file, for what cannot be; InputError for a file
// that cannot be read.
PlanQuestion question_of(const PlanOptions& options);

}  // namespace tessera
