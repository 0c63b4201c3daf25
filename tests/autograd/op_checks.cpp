// Problems drawn, run and compared.
#include "tests/autograd/op_checks.h"

namespace tessera::test {

std::vector<OpRow> op_table() {
  std::vector<OpRow> all;
  add_elementwise_rows(all);
  add_rows(all);
  add_expert_rows(all);
  return all;
}

Values draw_values(const Problem& p, DType dtype, Random& random) {
  Values values;
  for (const Operand& o : p.operands) {
    std::vector<double> v(static_cast<size_t>(o.shape.numel()));
    for (double& x : v) {
      x = random.uniform(o.low, o.high);
      if (dtype == DType::float32) x = static_cast<double>(static_cast<float>(x));
      if (dtype == DType::bfloat16) x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(x))));
    }
    values.push_back(std::move(v));
  }
  return values;
}

Tensor strided(const Tensor& t) {
  if (t.rank() < 2) {
    Tensor wide = t.make({t.numel(), 3});
    wide.fill(9);
    Tensor view = wide.narrow(1, 1, 1).reshape(t.shape());
    view.copy_from(t);
    return view;
  }
  Shape padded = t.shape();
  std::swap(padded[0], padded[1]);
  padded[0] += 2;
  Tensor whole = t.make(padded);
  whole.fill(9);
  Tensor view = whole.narrow(0, 1, t.dim(1)).transpose(0, 1);
  view.copy_from(t);
  return view;
}

Outcome run(const Problem& p, const std::vector<Tensor>& operands) {
  std::vector<Var> vars;
  for (const Tensor& t : operands) vars.emplace_back(t, true);
  const Var y = p.op(vars);
  Outcome out{y.value().clone(), {}};
  Tensor seed = Tensor::empty(y.shape(), y.dtype(), y.value().arena());
  const Tensor weights = Tensor::empty(y.shape(), DType::float64, y.value().arena()->host());
  for (int64_t i = 0; i < weights.numel(); ++i) weights.data<double>()[i] = std::cos(static_cast<double>(3 * i + 1));
  seed.copy_from(weights);
  backward(y, {.seed = seed});
  for (const Var& v : vars) out.grads.push_back(v.grad());
  return out;
}

std::vector<Tensor> tensors_of(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena) {
  std::vector<Tensor> t;
  for (size_t i = 0; i < values.size(); ++i)
    t.push_back(Tensor::of<double>(values[i], p.operands[i].shape, arena).to(dtype));
  return t;
}

double weighted(const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += std::cos(static_cast<double>(3 * i + 1)) * y[i];
  return sum;
}

double distance(const std::vector<double>& a, const std::vector<double>& b, double floor) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), floor);
}

std::vector<double> doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

namespace {
bool both(const Tensor& a, const Tensor& b) { return a.defined() == b.defined() && (!a.defined() || same_bits(a, b)); }
}  // namespace

bool same_bits(const Outcome& a, const Outcome& b) {
  bool same = same_bits(a.value, b.value) && a.grads.size() == b.grads.size();
  for (size_t i = 0; same && i < a.grads.size(); ++i) same = both(a.grads[i], b.grads[i]);
  return same;
}

void for_each_problem(const std::vector<OpRow>& table, const std::function<void(const Problem&, Random&)>& f) {
  constexpr uint64_t kDraws = 16;  // random problems per op
  for (const OpRow& row : table)
    for (uint64_t seed = 0; seed < kDraws; ++seed) {
      Random random(seed);
      Problem p = row.draw(random);
      p.name = row.name;
      std::string what = row.name + " #" + std::to_string(seed);
      for (const Operand& o : p.operands) what += " " + o.shape.str();
      SCOPED_TRACE(what);
      f(p, random);
      if (testing::Test::HasFatalFailure()) return;
    }
}

Tensor value_of(const Problem& p, const std::vector<Tensor>& operands) {
  const NoGrad no_grad;
  std::vector<Var> vars;
  for (const Tensor& t : operands) vars.emplace_back(t);
  return p.op(vars).value();
}

SomeRows some_rows(const std::vector<Tensor>& operands, Random& random) {
  const int64_t all = operands[0].dim(0), first = random.between(0, all - 1);
  return {first, random.between(1, all - first), all};
}

std::vector<Tensor> SomeRows::of(std::vector<Tensor> operands) const {
  for (Tensor& t : operands)
    if (t.rank() > 1 && t.dim(0) == all) t = t.narrow(0, first, count);
  return operands;
}

}  // namespace tessera::test
