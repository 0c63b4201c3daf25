// What a rank of Tessera calls in a step, kernel by kernel and exchange by exchange, from the sizes alone: what the
// constants of a measured machine are multiplied with. A test of the house of kernels: models/decoder.h, nn/layers.cpp.
#pragma once
#include <vector>

#include "planner/machine.h"
#include "planner/predict.h"

namespace tessera::planner {

struct KernelCalls {
  Kernel kernel = Kernel::add;
  Sizes sizes = {};
  double count = 1;
};
struct ExchangeCalls {
  Exchange exchange = Exchange::all_reduce;
  int64_t ranks = 1;
  double bytes = 0;  // of the whole array, or sent
  double count = 1;
};
struct Work {
  std::vector<KernelCalls> kernels = {};
  std::vector<ExchangeCalls> tp = {}, cp = {};
};
Work operator+(Work a, const Work& b);
Work operator*(Work a, double times);

// Of one micro-batch.
struct StageWork {
  Work forward, input, weight, again;  // again: what recomputation adds to the backward pass, or to its first half
};
std::vector<StageWork> stage_work(const Case& c, DType dtype);

// What follows the passes of a step, on the fullest rank, and what the data axis does beside them.
struct UpdateWork {
  Work kernels;
  std::vector<ExchangeCalls> data;            // once a step
  std::vector<ExchangeCalls> data_of_stages;  // in every micro-batch: sums of stage 2 and 3, parameters of stage 3
  double messages = 0;                        // small ones between all ranks: loss, norm
};
std::vector<UpdateWork> update_work(const Case& c, DType dtype);  // of each pipeline rank

double seconds(const Machine& machine, const Work& work, DType dtype, int64_t threads, double busy, int64_t ranks);
double seconds(const Machine& machine, const std::vector<ExchangeCalls>& calls, double busy, int64_t ranks);

}  // namespace tessera::planner
