// Rows of a mixture of experts on their way between ranks, while something else is computed:
//
//   forward    start_rows(x) --- what is made between --- rows()     the rows travel meanwhile
//   backward   their gradients have come <--- its backward pass --- their gradients set out
//
// The backward pass goes through nodes from the newest to the oldest, so what is made between the two calls lies
// between them there too.
#pragma once
#include <functional>
#include <vector>

#include "autograd/var.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// The arrays of an exchange of rows (R, C): so many of `in` for each rank, and so many of `out` from it; in elements.
struct RowArrays {
  RowArrays(const Tensor& x, const std::vector<int64_t>& rows_sent, const std::vector<int64_t>& rows_received);
  Tensor in, out;
  std::vector<int64_t> sent, received;
};

// Rows of x (R, C) set out: the first sent[0] to rank 0, and so on; received[r] come from rank r. The function gives
// those when they have come, and is to be called once. The gradient goes the other way. Every rank of the axis, which
// must outlive the graph, makes the same calls.
std::function<Var()> start_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received);

}  // namespace tessera
