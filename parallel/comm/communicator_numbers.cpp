// Numbers over ranks, and smaller groups.
#include <utility>

#include "parallel/comm/communicator.h"

namespace tessera {

void Communicator::over_ranks(std::span<double> x, Reduction reduction) {
  if (size() == 1) return;
  const auto memory = reinterpret_cast<std::byte*>(x.data());
  run({.op = Op::all_reduce,
       .dtype = DType::float64,
       .reduction = reduction,
       .count = std::ssize(x),
       .in = memory,
       .out = memory},
      {}, Algorithm::direct);
}

double Communicator::sum(double x) {
  over_ranks(std::span(&x, 1), Reduction::sum);
  return x;
}
double Communicator::max(double x) {
  over_ranks(std::span(&x, 1), Reduction::max);
  return x;
}
void Communicator::sum(std::span<double> x) { over_ranks(x, Reduction::sum); }

std::unique_ptr<Communicator> Communicator::split(int color, int key, std::string axis) {
  auto made = std::make_unique<Communicator>(transport_->split(color, key), std::move(axis), algorithm_);
  made->set_trace(trace_);
  made->set_held_up(held_up_);
  if (flight_) made->set_flight(flight_);
  return made;
}

void Communicator::count_again(const OpCounts& more) {
  for (size_t op = 0; op < counts_.size(); ++op) {
    counts_[op].calls += more[op].calls;
    counts_[op].sent += more[op].sent;
  }
}

}  // namespace tessera
