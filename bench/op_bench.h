// The group `op/`: every op of the op table, forward and backward.
//
//   op/matmul/forward/fp32
//
// Each row gives the bytes that the op must move at least (operands and results, once), the arithmetic of its products,
// and `share`: of the time that the slower of the two would take at the machine's measured ceilings.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/row.h"
#include "tensor/device.h"

namespace tessera::bench {

struct OpRows {
  std::vector<Row> rows;
  // Measures the ceilings, unless they were: "ceiling_fp32" and what it is, for each dtype that `wanted` has rows of.
  std::function<std::vector<std::pair<std::string, std::string>>(const std::vector<Row>& wanted)> ceilings;
};

OpRows op_rows(Device device);

}  // namespace tessera::bench
