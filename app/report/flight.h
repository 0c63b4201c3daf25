// What the ranks of a run that failed had come to: the file `flight.json` (parallel/comm/flight.h) as a table, with the
// ranks beside each other, operation by operation of each axis.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::report {

struct FlightOperation {
  std::string axis, operation;
  int64_t number = 0, bytes = 0;
  double begun = 0, ended = -1;  // seconds since the rank began; negative: it was still in it
};
struct RankFlight {
  int64_t rank = 0;
  std::string cause;
  std::vector<FlightOperation> operations;
};

// In the order of ranks; those that wrote nothing are not there, and `ranks` is how many there were. Throws InputError.
struct Flights {
  int64_t ranks = 0;
  std::vector<RankFlight> written;
};
Flights parse_flights(std::string_view file, const std::string& what);

// A row for each of the last operations of an axis: which ranks have done it, which were in it, which did not come, and
// which did something else in its place.
std::string flight_text(const Flights& flights);
std::string flight_page(const Flights& flights);

}  // namespace tessera::report
