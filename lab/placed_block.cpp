// Submodules of a block as lists of operations, the table of valid placements, and the run.
#include "lab/placed_block.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>

#include "autograd/ops.h"
#include "base/setting.h"
#include "parallel/comm/launch.h"
#include "parallel/mesh.h"
#include "parallel/placement.h"

namespace tessera::lab {

namespace {

using Names = std::vector<std::string>;

constexpr int64_t kBatch = 4, kTokens = 8, kHeads = 4, kWidth = 16;
constexpr double kBound = 1e-12;

struct Entry {
  std::string_view key, rows;
};

// Operations: kind, inputs, output.
constexpr Entry kParts[] = {
    {"mlp", "linear x up.weight up.bias h|product h down.weight z|sum z down.bias y"},
    {"attention", "linear x qkv.weight qkv.bias qkv|attend qkv o|product o proj.weight a|sum a proj.bias y"},
    {"block",
     "normed x norm1.weight norm1.bias n1|linear n1 qkv.weight qkv.bias qkv|attend qkv o|product o proj.weight a|"
     "sum x a proj.bias r|normed r norm2.weight norm2.bias n2|linear n2 up.weight up.bias h|product h down.weight z|"
     "sum r z down.bias y"}};

// Valid placements of an operation's inputs and, last, its output. A sum with three inputs requires equal placements of
// the first two.
constexpr Entry kTable[] = {{"normed", "I I I I|S(1) R R S(1)|S(0) R R S(0)|R R R R"},
                            {"linear", "R S(0) S(0) S(2)|S(0) R R S(0)|S(1) R R S(1)|I I I I|R R R R"},
                            {"product", "S(2) S(1) P|R S(0) S(2)|S(0) R S(0)|S(1) R S(1)|I I I|R R R|P R P"},
                            {"attend", "S(2) S(2)|S(0) S(0)|I I|R R"},
                            {"sum", "I I I|S(1) R S(1)|S(0) R S(0)|S(2) S(0) S(2)|R R R|P P P"}};

// Likely cause by (actual, expected) placement; S matches every S(d), * any placement.
constexpr std::array<std::array<std::string_view, 3>, 7> kCauses = {{
    {"I", "R",
     "I requires that every rank has the full gradient; here the gradients are partial sums that are not reduced: "
     "I->R reduces them in the backward pass"},
    {"R", "I",
     "R requires a partial gradient on each rank; here every rank has the full gradient, which is then summed"},
    {"*", "P", "a sum over a sharded dim is a partial sum on each rank, P, until it is reduced"},
    {"P", "*", "only sums accept partial sums: reduce the operand first, by P->I or P->S(1)"},
    {"S", "S", "sharded along a different dim than the other operand: outputs of a weight are dim 0, inputs dim 1"},
    {"S", "*", "sharded, but the other operand requires the full tensor"},
    {"*", "S", "unsharded, but the other operand is sharded"},
}};

// Sizes in units of the channels of x; other tensors are vectors or activations with the channels of x.
struct Sizes {
  std::string_view name;
  int64_t outputs, inputs;
};
constexpr Sizes kSizes[] = {{"qkv", 3, 0},         {"h", 4, 0},         {"qkv.weight", 3, 1}, {"qkv.bias", 3, 0},
                            {"proj.weight", 1, 1}, {"up.weight", 4, 1}, {"up.bias", 4, 0},    {"down.weight", 1, 4}};

std::string_view find_entries(std::span<const Entry> entries, std::string_view key) {
  const auto found = std::ranges::find(entries, key, &Entry::key);
  return found == entries.end() ? "" : found->rows;
}

bool is_cut(const Placement& p) { return p.kind == Placement::Kind::sharded; }

std::string failure_cause(const std::string& found, const std::string& expected) {
  const auto fits = [](std::string_view entry, const std::string& p) { return entry == "*" || entry[0] == p[0]; };
  for (const auto& [from, to, text] : kCauses)
    if (fits(from, found) && fits(to, expected)) return std::string(text);
  return "";
}

struct Placed {
  std::string name;
  std::vector<std::pair<Placement, Placement>> on = {};  // per axis: placement as computed and as used

  bool is_weight() const { return name.find('.') != std::string::npos; }
  bool is_leaf() const { return is_weight() || name == "x"; }
  Shape shape() const {
    const auto found = std::ranges::find(kSizes, name, &Sizes::name);
    const Sizes s = found != std::end(kSizes) ? *found : Sizes{name, 1, 0};
    return !is_weight() ? Shape{kBatch, kTokens, s.outputs * kWidth}
           : s.inputs   ? Shape{s.outputs * kWidth, s.inputs * kWidth}
                        : Shape{s.outputs * kWidth};
  }
  std::string str(size_t axis) const {
    const auto& [from, to] = on[axis];
    return from == to ? from.str() : from.str() + "->" + to.str();
  }
};

Names split_fields(std::string line) {
  std::ranges::replace_if(
      line, [](char c) { return c == '\t' || c == '\r'; }, ' ');
  Names fields = split(std::string_view(line).substr(0, line.find('#')), ' ');
  std::erase(fields, "");
  return fields;
}

struct PlacedModule {
  std::string title;
  std::vector<Names> ops = {};
  std::vector<MeshAxis> axes = {};
  std::vector<Placed> tensors = {};  // in operation order
  int ranks = 1;

  PlacedModule(const Names& fields, const std::string& where) : title(fmt::format("{}", fmt::join(fields, " "))) {
    for (const std::string& word : fields) {
      const Names axis = split(word, '=');
      const bool good = axis.size() == 2 && !axis[0].empty() && (axis[1] == "2" || axis[1] == "4") && ranks < 8 &&
                        std::ranges::count(axes, axis[0], &MeshAxis::name) == 0;
      if (good) ranks *= axes.emplace_back(MeshAxis{axis[0], axis[1][0] - '0'}).size;
    }
    const std::string_view all = find_entries(kParts, fields[0]);
    if (all.empty() || axes.empty() || axes.size() + 1 != fields.size() || ranks > 8)
      throw InputError(
          fmt::format("{}: expected mlp, attention or block, and axes of 2 or 4 ranks, at most 8 ranks in total, such "
                      "as mlp tp=2; got '{}'",
                      where, title));
    for (const std::string& op : split(all, '|')) {
      ops.push_back(split(op, ' '));
      for (size_t i = 1; i < ops.back().size(); ++i)
        if (std::ranges::count(tensors, ops.back()[i], &Placed::name) == 0) tensors.push_back({ops.back()[i]});
    }
  }
  const Placed& operator[](const std::string& name) const { return *std::ranges::find(tensors, name, &Placed::name); }
};

Placement placement_named(std::string_view word, const std::string& where) {
  for (const Placement& p : {R, I, P, S(0), S(1), S(2)})
    if (word == p.str()) return p;
  throw InputError(
      fmt::format("{}: expected R, I, P, S(0), S(1) or S(2), or a conversion such as I->R; got '{}'", where, word));
}

PlacedModule parsed(std::string_view text, const std::string& name) {
  std::optional<PlacedModule> placed;
  const Names lines = split(text, '\n');
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string where = fmt::format("{}: line {}", name, i + 1);
    const Names fields = split_fields(lines[i]);
    if (fields.empty()) continue;
    if (!placed) {
      placed.emplace(fields, where);
      continue;
    }
    Names open;
    for (const Placed& t : placed->tensors)
      if (t.on.empty()) open.push_back(t.name);
    if (std::ranges::count(open, fields[0]) == 0 || fields.size() != placed->axes.size() + 1)
      throw InputError(fmt::format("{}: expected one of {}, and a placement on each of {} axes; got '{}'", where,
                                   fmt::join(open, ", "), placed->axes.size(), lines[i]));
    auto& on = std::ranges::find(placed->tensors, fields[0], &Placed::name)->on;
    for (size_t w = 1; w < fields.size(); ++w) {
      const size_t arrow = fields[w].find("->");
      const Placement from = placement_named(fields[w].substr(0, arrow), where);
      on.emplace_back(from, arrow == std::string::npos ? from : placement_named(fields[w].substr(arrow + 2), where));
    }
  }
  if (!placed) throw InputError(name + ": missing first line; expected a module and its axes, such as mlp tp=2");
  for (const Placed& t : placed->tensors)
    if (t.on.empty()) throw InputError(fmt::format("{}: the line for '{}' is missing", name, t.name));
  return *std::move(placed);
}

std::pair<std::string, std::string> fault_text(const PlacedModule& placed) {
  for (size_t a = 0; a < placed.axes.size(); ++a) {
    const std::string& axis = placed.axes[a].name;
    for (const Placed& t : placed.tensors)
      if (const Placement from = t.on[a].first; t.is_leaf() && (from == R || from == P))
        return {fmt::format("{} on {} starts as {}; expected I or S", t.name, axis, from.str()),
                "persistent tensors are I or S: the gradient of R is a partial sum, which I->R reduces"};
    for (const Names& op : placed.ops) {
      Names found, best;
      for (size_t i = 1; i < op.size(); ++i)
        found.push_back((i + 1 < op.size() ? placed[op[i]].on[a].second : placed[op[i]].on[a].first).str());
      std::ptrdiff_t max_equal = -1;
      for (const std::string& text : split(find_entries(kTable, op[0]), '|')) {
        Names row = split(text, ' ');
        while (row.size() < found.size()) row.insert(row.begin(), row[0]);
        std::ptrdiff_t equal = 0;
        for (size_t i = 0; i < row.size(); ++i) equal += row[i] == found[i];
        if (equal > max_equal) max_equal = equal, best = row;
      }
      const auto [wrong, expected] = std::ranges::mismatch(found, best);
      if (wrong == found.end()) continue;
      return {
          fmt::format("{} on {} is {} in {} ({}); expected {}: {}", op[static_cast<size_t>(wrong - found.begin()) + 1],
                      axis, *wrong, op[0], fmt::join(op.begin() + 1, op.end(), " "), *expected, fmt::join(best, " ")),
          failure_cause(*wrong, *expected)};
    }
    if (const Placement y = placed["y"].on[a].second; y == R || y == P)
      return {fmt::format("y on {} ends as {}; expected I or S", axis, y.str()),
              "y is the x of the next module, and x starts as I or S"};
  }
  return {};
}

// The collective of a conversion (parallel/placement.h), and the bytes sent by an axis relative to the full tensor.
std::pair<const char*, double> collective(const Placement& from, const Placement& to, int n) {
  if (from == to) return {"-", 0};
  if (is_cut(from) && to != P)
    return is_cut(to) ? std::pair{"all-to-all", (n - 1.0) / n} : std::pair{"all-gather", n - 1.0};
  if (from == P) return is_cut(to) ? std::pair{"reduce-scatter", n - 1.0} : std::pair{"all-reduce", 2.0 * (n - 1)};
  return {is_cut(to) ? "slice" : to != P ? "-" : is_cut(from) ? "zero padding" : "rank 0 only", 0};
}

void price(const PlacedModule& placed, PlacementVerdict& out) {
  out.picture = fmt::format("{:<12} {:<4} {:<11} {:<24} {:<15} {:<15} {}\n", "tensor", "axis", "placement",
                            "shards by rank", "forward", "backward", "bytes sent");
  for (const Placed& t : placed.tensors) {
    int64_t own = 8 * t.shape().numel();
    for (size_t a = 0; a < placed.axes.size(); ++a) {
      const auto& [from, to] = t.on[a];
      const int n = placed.axes[a].size;
      const auto forward = collective(from, to, n), backward = collective(dual(to), dual(from), n);
      double bytes = 8.0 * static_cast<double>(t.shape().numel()) * placed.ranks / n;
      for (size_t other = 0; other < placed.axes.size(); ++other)
        if (other != a && is_cut(other < a ? t.on[other].second : t.on[other].first)) bytes /= placed.axes[other].size;
      const int64_t sent = std::llround(bytes * (forward.second + backward.second));
      std::string has;
      for (int r = 0; r < n; ++r) {
        std::string cells(static_cast<size_t>(n), from == P ? '+' : is_cut(from) ? '.' : '#');
        if (is_cut(from)) cells[static_cast<size_t>(r)] = '#';
        has += "[" + cells + "]";
      }
      out.picture += fmt::format("{:<12} {:<4} {:<11} {:<24} {:<15} {:<15} {}\n", a == 0 ? t.name : "",
                                 placed.axes[a].name, t.str(a), has, forward.first, backward.first, sent);
      out.sent += sent;
      if (is_cut(from)) own /= n;
    }
    if (!t.is_weight()) continue;
    out.held += own;
    if (std::ranges::any_of(t.on, [](const auto& p) { return is_cut(p.first) && !is_cut(p.second); }))
      out.gathered.push_back(t.name);
  }
}

Tensor sample(const Placed& t, const std::string& what, const ArenaPtr& arena) {
  std::vector<double> values(static_cast<size_t>(t.shape().numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = Philox::named(1, what + t.name).normal(i);
  return Tensor::of<double>(values, t.shape(), arena);
}

// Layout of qkv: q, k and v of head 0, then of head 1, so that shards contain complete heads.
Var attend(const Var& qkv) {
  const int64_t d = kWidth / kHeads, heads = qkv.dim(2) / (3 * d);
  const Var all = reshape(qkv, {qkv.dim(0), qkv.dim(1), heads, 3 * d});
  const auto slice = [&](int64_t i) { return narrow(all, 3, i * d, d); };
  return reshape(attention(slice(0), slice(1), slice(2)), {qkv.dim(0), qkv.dim(1), heads * d});
}

Var result(const Names& op, const std::vector<Var>& in) {
  if (op[0] == "normed") return norm(in[0], in[1], in[2]);
  if (op.back() == "h") return activate(linear(in[0], in[1], {}), {}, in[2]);
  if (op[0] == "linear") return linear(in[0], in[1], in[2]);
  if (op[0] == "product") return linear(in[0], in[1], {});
  if (op[0] == "attend") return attend(in[0]);
  Var sum = in[0];
  for (size_t i = 1; i < in.size(); ++i) sum = binary<Add>(sum, in[i]);
  return sum;
}

// The shard in the initial placement or, for y, the final one.
Tensor own_shard(Tensor full, const Placed& t, Mesh& mesh) {
  for (size_t a = 0; a < t.on.size(); ++a) {
    const Placement p = t.name == "y" ? t.on[a].second : t.on[a].first;
    const MeshAxis& axis = mesh.axes()[a];
    if (!is_cut(p)) continue;
    const Range own = chunk_range(full.dim(p.dim), axis.size, mesh.coordinate(axis.name));
    full = full.narrow(p.dim, own.begin, own.size()).contiguous();
  }
  return full;
}

std::map<std::string, Tensor> run_module(const PlacedModule& placed, Mesh& mesh, const ArenaPtr& arena) {
  std::map<std::string, Var> leaves, used;
  const auto use = [&](const Placed& t, Var v) {
    for (size_t a = 0; a < placed.axes.size(); ++a)
      v = redistribute(v, mesh[placed.axes[a].name], t.on[a].first, t.on[a].second);
    used[t.name] = std::move(v);
  };
  for (const Placed& t : placed.tensors)
    if (t.is_leaf()) use(t, leaves[t.name] = Var(own_shard(sample(t, "", arena), t, mesh), true));
  for (const Names& op : placed.ops) {
    std::vector<Var> in;
    for (size_t i = 1; i + 1 < op.size(); ++i) in.push_back(used.at(op[i]));
    use(placed[op.back()], result(op, in));
  }
  std::map<std::string, Tensor> out{{"y", used.at("y").value()}};
  backward(used.at("y"), {.seed = own_shard(sample(placed["y"], "gradient of ", arena), placed["y"], mesh)});
  for (const auto& [name, leaf] : leaves) out[name] = leaf.grad();
  return out;
}

double distance(const Tensor& found, const Tensor& expected) {
  if (!found.defined() || found.shape() != expected.shape()) return INFINITY;
  const auto f = found.contiguous().to_vector<double>(), e = expected.contiguous().to_vector<double>();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < f.size(); ++i) difference += (f[i] - e[i]) * (f[i] - e[i]), norm += e[i] * e[i];
  const double relative = difference == 0 ? 0 : std::sqrt(difference / norm);
  return std::isfinite(relative) ? relative : INFINITY;  // NaN compares false
}

void compare_with_one_rank(const PlacedModule& placed, PlacementVerdict& out) try {
  const ArenaPtr host = make_arena();
  std::map<std::string, Tensor> expected;
  std::mutex writing;
  double largest = -1;
  PlacedModule alone = placed;
  for (MeshAxis& axis : alone.axes) axis.size = 1;
  launch({.threads_per_rank = 1}, [&](Communicator& world) {
    Mesh mesh(world, alone.axes);
    expected = run_module(alone, mesh, host);
  });
  launch({.ranks = placed.ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Mesh mesh(world, placed.axes);
    const auto found = run_module(placed, mesh, arena);
    const std::lock_guard lock(writing);
    for (const auto& [name, full] : expected) {
      const double difference = distance(found.at(name), own_shard(full, placed[name], mesh));
      if (difference <= largest) continue;
      largest = difference;
      out.run = fmt::format("maximum difference {:.3g} ({}), bound {}", difference, name, kBound);
    }
    for (const MeshAxis& axis : placed.axes)
      for (const OpCount& c : mesh[axis.name].counts()) out.count += c.sent;
  });
  out.alike = largest <= kBound;
} catch (const Error& e) {
  out.run = e.what();
}

}  // namespace

PlacementVerdict check_placements(std::string_view text, const std::string& name) {
  const PlacedModule placed = parsed(text, name);
  PlacementVerdict out;
  out.title = placed.title + ", x";
  for (const auto& [from, to] : placed["x"].on) out.title += " " + from.str();
  out.title += ", y";
  for (const auto& [from, to] : placed["y"].on) out.title += " " + to.str();
  std::tie(out.found, out.cause) = fault_text(placed);
  price(placed, out);
  compare_with_one_rank(placed, out);
  return out;
}

}  // namespace tessera::lab
