// Two nodes, and what they share: the communication that one starts and the other waits for.
#include "parallel/rows_underway.h"

#include <memory>
#include <numeric>
#include <utility>

namespace tessera {

RowArrays::RowArrays(const Tensor& x, const std::vector<int64_t>& rows_sent, const std::vector<int64_t>& rows_received)
    : in(x.contiguous()), sent(rows_sent), received(rows_received) {
  const int64_t width = x.dim(1);
  out = x.make({std::accumulate(received.begin(), received.end(), int64_t{0}), width});
  for (int64_t& n : sent) n *= width;
  for (int64_t& n : received) n *= width;
}

namespace {

struct Underway {
  Tensor out;
  Pending done;
  Tensor arrived() {
    done.wait();
    return std::exchange(out, {});
  }
};

Underway start(const Tensor& x, Communicator& axis, const std::vector<int64_t>& sent,
               const std::vector<int64_t>& received) {
  const RowArrays rows(x, sent, received);
  return {rows.out, axis.start_all_to_all(rows.in, rows.out, rows.sent, rows.received)};
}

}  // namespace

std::function<Var()> start_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received) {
  const auto there = std::make_shared<Underway>(start(x.value(), axis, sent, received)),
             home = std::make_shared<Underway>();
  const Var begun =
      record_one("start_rows", there->out, {x.edge()}, [home](Grads& g) { g.give(0, home->arrived()); }).edge();
  return [=, &axis] {
    return record_one("rows", there->arrived(), {begun}, [=, &axis](Grads& g) {
      *home = start(g.output(), axis, received, sent);
      g.give(0, g.take_output());  // has the shape of a gradient; the one that counts comes home
    });
  };
}

}  // namespace tessera
