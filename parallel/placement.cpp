// Conversions between placements, and their table.
#include "parallel/placement.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera {
namespace {

using Kind = Placement::Kind;

// One conversion on one rank, with sizes inferred and dims non-negative.
struct Step {
  Communicator& axis;
  Placement from, to;
  bool background = false;

  int n() const { return axis.size(); }
  Range own(const Placement& s) const { return chunk_range(s.full_size, n(), axis.rank()); }
  int64_t widest(const Placement& s) const { return (s.full_size + n() - 1) / n(); }
  bool even(const Placement& s) const { return s.full_size % n() == 0; }

  Work reduce(const Tensor& x) const {
    if (background) return axis.start_all_reduce(x);
    axis.all_reduce(x);
    return {};
  }
  Work reduce_scatter(const Tensor& x, const Tensor& chunk, int64_t rows = 1) const {
    if (background) return axis.start_reduce_scatter(x, chunk, rows);
    axis.reduce_scatter(x, chunk, Reduction::sum, rows);
    return {};
  }
  Work gather(const Tensor& chunk, const Tensor& all, int64_t rows = 1) const {
    if (background) return axis.start_all_gather(chunk, all, rows);
    axis.all_gather(chunk, all, rows);
    return {};
  }
  // Whether the collective can read or write chunks along s's dim directly in x: contiguous, or as slices of each row.
  bool in_place(const Placement& s, int64_t rows) const { return even(s) && (rows == 1 || axis.supports_row_slices()); }
};

Shape with_dim(Shape shape, int dim, int64_t size) {
  shape[dim] = size;
  return shape;
}

// Number of rows of x that chunks along `dim` split; 1 if chunks are contiguous.
int64_t count_rows(const Tensor& x, int dim) {
  int64_t rows = 1;
  for (int d = 0; d < dim; ++d) rows *= x.dim(d);
  return std::max<int64_t>(rows, 1);
}

// Copies the region common to both.
void copy_corner(Tensor to, Tensor from) {
  for (int d = 0; d < to.ndim(); ++d) {
    const int64_t size = std::min(to.dim(d), from.dim(d));
    to = to.narrow(d, 0, size);
    from = from.narrow(d, 0, size);
  }
  if (to.numel() > 0) to.copy_from(from);
}

Tensor zeros_like(const Tensor& x, const Shape& shape) {
  Tensor y = x.make(shape);
  y.fill(0);
  return y;
}

// Communication buffer with one block per rank.
struct Blocks {
  Tensor all;
  Blocks(const Tensor& x, int n, Shape shape) {
    Shape all_shape{n};
    for (const int64_t d : shape) all_shape.push_back(d);
    all = x.make(all_shape, x.dtype(), Category::communication);
  }
  Tensor operator[](int r) const { return all.select(0, r); }
};

PendingRedistribute pass_on(Tensor x, const Step&) { return PendingRedistribute(std::move(x)); }

// Copies the chunk if that frees the full tensor.
PendingRedistribute own_chunk(Tensor x, const Step& step) {
  const Range r = step.own(step.to);
  const bool last = x.unique();
  x = x.narrow(step.to.dim, r.begin, r.size());
  return PendingRedistribute(last ? x.clone() : x.contiguous());
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): all conversions have one type
PendingRedistribute only_on_rank_0(Tensor x, const Step& step) {
  return PendingRedistribute(step.axis.rank() == 0 ? x : zeros_like(x, x.shape()));
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): all conversions have one type
PendingRedistribute zeros_around(Tensor x, const Step& step) {
  const Range r = step.own(step.from);
  Tensor y = zeros_like(x, with_dim(x.shape(), step.from.dim, step.from.full_size));
  copy_corner(y.narrow(step.from.dim, r.begin, r.size()), x);
  return PendingRedistribute(std::move(y));
}

PendingRedistribute all_reduce(Tensor x, const Step& step) {
  Tensor y = x.unique() && x.is_contiguous() ? std::move(x) : x.clone();
  Work pending = step.reduce(y);
  return {std::move(pending), std::move(y)};
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): all conversions have one type
PendingRedistribute all_gather(Tensor x, const Step& step) {
  const int dim = step.from.dim;
  Tensor y = x.make(with_dim(x.shape(), dim, step.from.full_size));
  if (const int64_t rows = count_rows(x, dim); step.in_place(step.from, rows)) {
    Work pending = step.gather(x.contiguous(), y, rows);
    return {std::move(pending), std::move(y)};
  }
  const Shape widest = with_dim(x.shape(), dim, step.widest(step.from));
  Tensor mine = x.contiguous();
  if (!step.even(step.from)) {
    mine = zeros_like(x, widest);
    copy_corner(mine, x);
  }
  const Blocks blocks(x, step.n(), widest);
  Work pending = step.gather(mine, blocks.all);
  return {std::move(pending), std::move(y), [blocks, dim, size = step.from.full_size, n = step.n()](const Tensor& all) {
            for (int r = 0; r < n; ++r) {
              const Range theirs = chunk_range(size, n, r);
              copy_corner(all.narrow(dim, theirs.begin, theirs.size()), blocks[r]);
            }
            return all;
          }};
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): all conversions have one type
PendingRedistribute reduce_scatter(Tensor x, const Step& step) {
  const int dim = step.to.dim;
  const Shape widest = with_dim(x.shape(), dim, step.widest(step.to));
  Tensor sum = x.make(widest);
  if (const int64_t rows = count_rows(x, dim); step.in_place(step.to, rows)) {
    Work pending = step.reduce_scatter(x.contiguous(), sum, rows);
    return {std::move(pending), std::move(sum)};
  }
  Blocks blocks(x, step.n(), widest);
  if (!step.even(step.to)) blocks.all.fill(0);
  for (int r = 0; r < step.n(); ++r) {
    const Range theirs = chunk_range(step.to.full_size, step.n(), r);
    copy_corner(blocks[r], x.narrow(dim, theirs.begin, theirs.size()));
  }
  Work pending = step.reduce_scatter(blocks.all, sum);
  return {std::move(pending), std::move(sum), [dim, size = step.own(step.to).size()](const Tensor& widest_sum) {
            return widest_sum.narrow(dim, 0, size).contiguous();
          }};
}

PendingRedistribute all_to_all(Tensor x, const Step& step) {
  if (step.from == step.to) return PendingRedistribute(std::move(x));
  const int a = step.from.dim, b = step.to.dim;
  const Shape widest = with_dim(with_dim(x.shape(), a, step.widest(step.from)), b, step.widest(step.to));
  Blocks out(x, step.n(), widest), in(x, step.n(), widest);
  if (!step.even(step.from) || !step.even(step.to)) out.all.fill(0);
  for (int r = 0; r < step.n(); ++r) {
    const Range theirs = chunk_range(step.to.full_size, step.n(), r);
    copy_corner(out[r], x.narrow(b, theirs.begin, theirs.size()));
  }
  step.axis.all_to_all(out.all, in.all);
  Tensor y = x.make(with_dim(with_dim(x.shape(), a, step.from.full_size), b, step.own(step.to).size()));
  for (int r = 0; r < step.n(); ++r) {
    const Range theirs = chunk_range(step.from.full_size, step.n(), r);
    copy_corner(y.narrow(a, theirs.begin, theirs.size()), in[r]);
  }
  return PendingRedistribute(std::move(y));
}

// x with the chunks of a mirrored placement in rank order, or from rank order.
Tensor reordered(const Tensor& x, const Placement& s, int n, bool to_rank_order) {
  const int64_t size = x.dim(s.dim) / (2 * n);
  Tensor out = x.make(x.shape());
  for (int64_t chunk = 0; chunk < 2 * n; ++chunk) {
    const int64_t at = chunk < n ? 2 * chunk : 2 * (2 * n - 1 - chunk) + 1;  // in rank order
    const int64_t from = to_rank_order ? chunk : at, to = to_rank_order ? at : chunk;
    out.narrow(s.dim, to * size, size).copy_from(x.narrow(s.dim, from * size, size));
  }
  return out;
}

using Conversion = PendingRedistribute (*)(Tensor, const Step&);
constexpr std::array<std::array<Conversion, 4>, 4> kTable = {{
    // to R       to I        to S            to P
    {pass_on, pass_on, own_chunk, only_on_rank_0},       // from R
    {pass_on, pass_on, own_chunk, only_on_rank_0},       // from I
    {all_gather, all_gather, all_to_all, zeros_around},  // from S
    {all_reduce, all_reduce, reduce_scatter, pass_on},   // from P
}};

class Resolver {
 public:
  Resolver(const Tensor& x, Communicator& axis, const Placement& from, const Placement& to)
      : x_(x), axis_(axis), from_(from), to_(to) {}

  Step resolve() const {
    Step step{axis_, with_same_dim(from_), with_same_dim(to_)};
    if (step.from.kind == Kind::sharded) {
      const int64_t has = x_.dim(step.from.dim);
      if (step.from.full_size == 0) step.from.full_size = has * axis_.size();
      if (step.own(step.from).size() != has)
        complain("rank " + std::to_string(axis_.rank()) + " of " + std::to_string(axis_.size()) + " has " +
                 std::to_string(has) + " of " + std::to_string(step.from.full_size) + " along dim " +
                 std::to_string(step.from.dim) + "; expected " + std::to_string(step.own(step.from).size()));
    }
    if (step.to.kind == Kind::sharded) {
      const int64_t size = step.from == step.to ? step.from.full_size : x_.dim(step.to.dim);
      if (step.to.full_size != 0 && step.to.full_size != size)
        complain("dim " + std::to_string(step.to.dim) + " has " + std::to_string(size) + "; expected " +
                 std::to_string(step.to.full_size));
      step.to.full_size = size;
    }
    for (const Placement& s : {step.from, step.to}) {
      if (!s.mirrored) continue;
      if (step.from.kind == step.to.kind && !(step.from == step.to)) complain("no conversion of mirrored chunks");
      if (s.full_size % (2 * axis_.size()) != 0)
        complain(std::to_string(s.full_size) + " elements have no " + std::to_string(2 * axis_.size()) +
                 " equal chunks");
    }
    return step;
  }

 private:
  Placement with_same_dim(Placement p) const {
    if (p.kind != Kind::sharded) return p;
    const int rank = x_.ndim();
    if (p.dim < -rank || p.dim >= rank) complain("dim out of range");
    if (p.dim < 0) p.dim += rank;
    return p;
  }
  [[noreturn]] void complain(const std::string& what) const {
    throw Error("[redistribute] " + axis_.axis() + " axis, " + from_.str() + " -> " + to_.str() + " of " +
                x_.describe() + ": " + what);
  }

  const Tensor& x_;
  Communicator& axis_;
  Placement from_, to_;
};

PendingRedistribute convert(Tensor x, const Step& step) {
  if (step.n() == 1 || step.from == step.to) return PendingRedistribute(std::move(x));
  if (step.to.mirrored) x = reordered(x, step.to, step.n(), true);
  PendingRedistribute made =
      kTable[static_cast<size_t>(step.from.kind)][static_cast<size_t>(step.to.kind)](std::move(x), step);
  if (!step.from.mirrored) return made;
  return std::move(made).then([s = step.from, n = step.n()](const Tensor& all) { return reordered(all, s, n, false); });
}

}  // namespace

std::string Placement::str() const {
  if (kind == Kind::sharded) return "S(" + std::to_string(dim) + ")";
  return kind == Kind::replicated ? "R" : kind == Kind::identical ? "I" : "P";
}

Tensor redistribute(Tensor x, Communicator& axis, Placement from, Placement to) {
  const Step step = Resolver(x, axis, from, to).resolve();
  return convert(std::move(x), step).wait();
}

PendingRedistribute start_redistribute(Tensor x, Communicator& axis, Placement from, Placement to) {
  Step step = Resolver(x, axis, from, to).resolve();
  step.background = true;
  return convert(std::move(x), step);
}

PendingRedistribute PendingRedistribute::then(std::function<Tensor(const Tensor&)> convert) && {
  unpack_ = [first = std::move(unpack_), next = std::move(convert)](const Tensor& arrived) {
    return next(first ? first(arrived) : arrived);
  };
  return std::move(*this);
}

Tensor PendingRedistribute::wait() {
  pending_.wait();
  if (!tensor_.defined()) reject("redistribute", "one call of wait()", "a second one");
  Tensor arrived = std::exchange(tensor_, Tensor());
  if (const auto unpack = std::exchange(unpack_, nullptr)) return unpack(arrived);
  return arrived;
}

Var redistribute(Var x, Communicator& axis, Placement from, Placement to) {
  const Step step = Resolver(x.value(), axis, from, to).resolve();
  if (step.n() == 1 || step.from == step.to) return x;
  const Var edge = x.edge();
  return record_one("redistribute", convert(std::move(x).take(), step).wait(), {edge}, [step](Grads& g) {
    g.set(0, convert(g.take_output(), {step.axis, dual(step.to), dual(step.from)}).wait());
  });
}

}  // namespace tessera
