// From options to what the planner is asked.
#pragma once
#include <string>
#include <string_view>

#include "app/options.h"
#include "planner/search.h"

namespace tessera {

struct PlanQuestion {
  planner::Question question;
  std::string model;  // the user's name for it
  // Bytes that a rank can use.
  double memory() const { return question.hardware.memory_bytes - question.hardware.reserved_bytes; }
};

// The usual vocabulary: for a preset that of its tokenizer, which is characters or GPT-2's.
int64_t usual_vocab(std::string_view preset);

// Throws Error (usage) in the words of the options, or that names the file, for what cannot be; InputError for a file
// that cannot be read.
PlanQuestion question_of(const PlanOptions& options);

}  // namespace tessera
