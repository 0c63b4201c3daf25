// `plan --cases`: predictions of given plans, without a search.
#pragma once
#include <string>

namespace tessera {

// Prints one JSON object for each line of the file, in order. Throws Error and InputError that name the line.
int predict_cases(const std::string& path);

}  // namespace tessera
