// The direct exchange over messages: values, order of sums, bytes. Threads have one without messages, so the collective
// is called by its name.
#include <fmt/format.h>

#include <utility>

#include "lab/compare.h"
#include "lab/exercise.h"
#include "lab/grade/inputs.h"

namespace tessera::lab {
namespace {

std::vector<double> in_rank_order(const Inputs& in, Range range) {
  std::vector<double> out;
  for (int64_t i = range.begin; i < range.end; ++i) {
    float sum = 0;
    for (int r = 0; r < in.ranks; ++r) sum += static_cast<float>(in.at(r, i));
    out.push_back(sum);
  }
  return out;
}

// Results of each rank: what body() makes of its array and its piece, and the bytes that it says were sent.
using Body = std::function<int64_t(Transport& t, Call call, Tensor whole, Tensor own)>;
std::vector<Inputs::Result> exchange(const Inputs& in, bool result_is_whole, const Body& body) {
  std::vector<int64_t> sent(static_cast<size_t>(in.ranks));
  auto results = in.run(
      [&](Communicator& world, Tensor whole, Tensor own) {
        sent[static_cast<size_t>(world.rank())] = body(world.transport(), {.count = in.count}, whole, own);
        return result_is_whole ? whole : own;
      },
      Op::barrier, Algorithm::direct);
  for (size_t r = 0; r < results.size(); ++r) results[r].sent = sent[r];
  return results;
}

void expect_direct_bytes(const std::string& where, const Inputs& in, Op op, int rank, int64_t found) {
  const int64_t all = in.count * 4, own = in.range(rank).size() * 4, n = in.ranks;
  const Call call{.op = op, .count = in.count};
  const bool gathers = op == Op::all_gather;
  expect_bytes(
      where, found, sent_directly(call, in.ranks, rank),
      gathers ? "its piece to each of the others" : "of each other rank's piece once, S less its own",
      {{"the whole array goes to every other rank; each needs its own piece alone", (n - 1) * all},
       {"a rank sends to itself too", gathers ? n * own : all},
       {"the number of bytes is not counted: send() of this struct counts, and that of `memory` does not", 0}});
}

void check_messages_of_reduce_scatter(const Inputs& in) {
  const auto results = exchange(in, false, [](Transport& t, Call call, Tensor whole, Tensor own) {
    call.op = Op::reduce_scatter;
    call.in = whole.address();
    call.out = own.address();
    return direct_by_messages(t, call);
  });
  for (int r = 0; r < in.ranks; ++r) {
    const std::string where = in.where("reduce-scatter", r);
    in.expect_kept(where, results[static_cast<size_t>(r)]);
    expect_values(where, results[static_cast<size_t>(r)].values, in_rank_order(in, in.range(r)), in.guesses_of_sum(r),
                  in.ranks);
    expect_direct_bytes(where, in, Op::reduce_scatter, r, results[static_cast<size_t>(r)].sent);
  }
}

void check_messages_of_all_gather(const Inputs& in) {
  const auto results = exchange(in, true, [&](Transport& t, Call call, Tensor whole, Tensor) {
    const Range own = in.range(t.rank());
    const Tensor mine = whole.narrow(0, own.begin, own.size()).clone();
    whole.fill(kUntouched);
    call.op = Op::all_gather;
    call.in = mine.address();
    call.out = whole.address();
    return direct_by_messages(t, call);
  });
  for (int r = 0; r < in.ranks; ++r) {
    const std::string where = in.where("all-gather", r);
    in.expect_gathered(where, results[static_cast<size_t>(r)].values);
    expect_direct_bytes(where, in, Op::all_gather, r, results[static_cast<size_t>(r)].sent);
  }
}

void check_messages_of_all_reduce(const Inputs& in) {
  const auto results = exchange(in, true, [](Transport& t, Call call, Tensor whole, Tensor) {
    call.op = Op::all_reduce;
    call.in = call.out = whole.address();
    return direct_by_messages(t, call);
  });
  for (int r = 0; r < in.ranks; ++r) {
    const std::string where = in.where("all-reduce", r);
    expect_values(where, results[static_cast<size_t>(r)].values, in_rank_order(in, {0, in.count}), {}, in.ranks);
    expect_direct_bytes(where, in, Op::all_reduce, r, results[static_cast<size_t>(r)].sent);
  }
}

}  // namespace

Held grade_messages() {
  for_inputs([](const Inputs& in) {
    check_messages_of_reduce_scatter(in);
    check_messages_of_all_gather(in);
    check_messages_of_all_reduce(in);
  });
  return {"sums over 2, 3 and 5 ranks of 1 to 1003 numbers, pieces even and uneven, some of them empty",
          "order: ranks are added from 0 up, to the bit", "bytes: each half sends (n - 1) / n of the array"};
}

}  // namespace tessera::lab
