// The model alpha + beta S of a communication (Hockney 1994), fitted to what was measured.
#pragma once
#include <optional>
#include <vector>

namespace tessera::bench {

struct Sample {
  double bytes = 0, seconds = 0;
};

struct Fit {
  double latency = 0, bytes_per_s = 0;  // alpha, 1 / beta
  double worst = 0;                     // the largest relative error of a sample
};

// Least squares of the relative errors of all samples, so that a microsecond counts among microseconds; latency is not
// below 0. Nothing where samples of three sizes or more are not there, or time does not grow with size.
std::optional<Fit> fit(const std::vector<Sample>& samples);

}  // namespace tessera::bench
