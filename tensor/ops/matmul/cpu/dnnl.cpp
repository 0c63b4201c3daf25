// oneDNN matmul.
#include <algorithm>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <string>
#include <unordered_map>

#include "tensor/ops/matmul/cpu/gemm.h"

namespace tessera::cpu {
namespace {

using dnnl::memory;

memory::data_type to_dnnl_type(DType t) {
  return t == DType::bfloat16 ? memory::data_type::bf16 : memory::data_type::f32;
}

struct Key {
  int64_t m, n, k, a_row, a_col, b_row, b_col, out_row;
  DType in, out, bias;
  bool has_bias, packed;
  int threads;
  auto operator<=>(const Key&) const = default;
};

struct Compiled {
  dnnl::matmul::primitive_desc desc;
  dnnl::matmul primitive;
};

// oneDNN accepts a limit only before its first use in a process.
void limit_instructions() {
#ifdef __x86_64__
  static const bool accepted = [] {
    constexpr dnnl::cpu_isa kLimits[] = {dnnl::cpu_isa::avx2, dnnl::cpu_isa::avx512_core,
                                         dnnl::cpu_isa::avx512_core_bf16};
    return max_isa() == MaxIsa::amx ||
           dnnl::set_max_cpu_isa(kLimits[static_cast<size_t>(max_isa())]) == dnnl::status::success;
  }();
  if (!accepted)
    throw Error("[matmul] TESSERA_MAX_CPU_ISA: oneDNN was initialized before Tessera and no longer accepts a limit");
#endif
}

dnnl::engine make_engine() {
  limit_instructions();
  return {dnnl::engine::kind::cpu, 0};
}

struct Dnnl {
  dnnl::engine engine = make_engine();
  dnnl::stream stream{engine};
  std::map<Key, Compiled> compiled;
};

dnnl::matmul::primitive_desc describe(const Key& key, const dnnl::engine& engine) {
  const memory::data_type in = to_dnnl_type(key.in), out = to_dnnl_type(key.out);
  const memory::desc a({key.m, key.k}, in, memory::dims{key.a_row, key.a_col});
  const memory::desc b = key.packed ? memory::desc({key.k, key.n}, in, memory::format_tag::any)
                                    : memory::desc({key.k, key.n}, in, memory::dims{key.b_row, key.b_col});
  const memory::desc c({key.m, key.n}, out, memory::dims{key.out_row, 1});
  const memory::desc bias({1, key.n}, to_dnnl_type(key.bias), memory::format_tag::ab);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  if (key.has_bias) return {engine, a, b, bias, c, attributes};
  return {engine, a, b, c, attributes};
#else
  if (key.has_bias) return {dnnl::matmul::desc(a, b, bias, c), attributes, engine};
  return {dnnl::matmul::desc(a, b, c), attributes, engine};
#endif
}

const Compiled& compiled_for(const Key& key, Dnnl& lib) {
  const auto found = lib.compiled.find(key);
  if (found != lib.compiled.end()) return found->second;
  try {
    const dnnl::matmul::primitive_desc desc = describe(key, lib.engine);
    return lib.compiled.emplace(key, Compiled{desc, dnnl::matmul(desc)}).first->second;
  } catch (const dnnl::error& e) {
    throw Error("[matmul] oneDNN does not support (" + std::to_string(key.m) + ", " + std::to_string(key.k) + ") x (" +
                std::to_string(key.k) + ", " + std::to_string(key.n) + ") in " + std::string(to_string(key.in)) + ": " +
                e.what());
  }
}

// oneDNN's convention: a dim of size 1 has a stride consistent with the other dim.
std::pair<int64_t, int64_t> matrix_strides(const Tensor& t) {
  int64_t row = t.strides()[0], col = t.strides()[1];
  if (t.dim(0) == 1) row = std::max(row, t.dim(1) * std::max<int64_t>(col, 1));
  if (t.dim(1) == 1) col = row == 1 ? t.dim(0) : 1;
  if (t.dim(0) == 1 && col != 1) row = 1;
  return {row, col};
}

Key cache_key(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, bool packed) {
  const auto [a_row, a_col] = matrix_strides(a);
  const auto [b_row, b_col] = packed ? std::pair<int64_t, int64_t>(0, 0) : matrix_strides(b);
  return {a.dim(0),
          b.dim(1),
          a.dim(1),
          a_row,
          a_col,
          b_row,
          b_col,
          std::max(out.strides()[0], out.dim(1)),
          a.dtype(),
          out.dtype(),
          bias.defined() ? bias.dtype() : out.dtype(),
          bias.defined(),
          packed,
          threads()};
}

void execute(const Compiled& c, Dnnl& lib, Tensor& out, const Tensor& a, std::byte* b, const Tensor& bias) {
  const int64_t scratch_bytes = static_cast<int64_t>(c.desc.scratchpad_desc().get_size());
  const Tensor scratch =
      scratch_bytes > 0 ? a.make({(scratch_bytes + 3) / 4}, DType::int32, Category::workspace) : Tensor();
  if (DryRun::here()) return;
  std::unordered_map<int, memory> args = {
      {DNNL_ARG_SRC, memory(c.desc.src_desc(), lib.engine, a.raw())},
      {DNNL_ARG_WEIGHTS, memory(c.desc.weights_desc(), lib.engine, b)},
      {DNNL_ARG_DST, memory(c.desc.dst_desc(), lib.engine, out.raw())},
  };
  if (bias.defined()) args.emplace(DNNL_ARG_BIAS, memory(c.desc.bias_desc(), lib.engine, bias.raw()));
  if (scratch.defined()) args.emplace(DNNL_ARG_SCRATCHPAD, memory(c.desc.scratchpad_desc(), lib.engine, scratch.raw()));
  c.primitive.execute(lib.stream, args);
  lib.stream.wait();
}

void pack(Packed& packed, const Compiled& c, Dnnl& lib, const Tensor& b) {
  const memory::desc to = c.desc.weights_desc();
  const int64_t bytes = static_cast<int64_t>(to.get_size());
  if (!packed.bytes.defined() || packed.bytes.nbytes() < bytes)
    packed.bytes = b.make({(bytes + 3) / 4}, DType::int32, Category::workspace);
  packed.version = b.storage()->version;
  packed.source = b.raw();
  if (DryRun::here()) return;
  const auto [row, col] = matrix_strides(b);
  memory from({{b.dim(0), b.dim(1)}, to_dnnl_type(b.dtype()), memory::dims{row, col}}, lib.engine, b.raw());
  memory target(to, lib.engine, packed.bytes.raw());
  dnnl::reorder(from, target).execute(lib.stream, from, target);
  lib.stream.wait();
}

// bfloat16 matmul without bfloat16 instructions: in float32 from the same inputs, rounded once.
void emulate(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  const auto as_float = [](const Tensor& t) {
    Tensor f = t.make(t.shape(), DType::float32, Category::workspace);
    f.copy_from(t);
    return f;
  };
  Tensor product = out.make(out.shape(), DType::float32, Category::workspace);
  dnnl_matmul(product, as_float(a), as_float(b), bias.defined() ? as_float(bias) : Tensor());
  out.copy_from(product);
}

bool has_instructions(dnnl::cpu_isa need) {
  limit_instructions();
  const int isa = static_cast<int>(dnnl::get_effective_cpu_isa()), all = static_cast<int>(need);
  return (isa & all) == all;
}

bool emulated(const Tensor& a) { return a.dtype() == DType::bfloat16 && !has_bfloat16_matmul(); }

}  // namespace

void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (emulated(a)) return emulate(out, a, b, bias);
  Dnnl& lib = a.arena()->local<Dnnl>();
  const Key key = cache_key(out, a, b, bias, false);
  execute(compiled_for(key, lib), lib, out, a, b.raw(), bias);
}

void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed& packed) {
  if (emulated(a)) return emulate(out, a, b, bias);
  Dnnl& lib = a.arena()->local<Dnnl>();
  const Key key = cache_key(out, a, b, bias, true);
  const Compiled& c = compiled_for(key, lib);
  // Blocks of 64 columns pad a weight of 8 columns to eight times its size.
  if (static_cast<int64_t>(c.desc.weights_desc().get_size()) > 2 * b.nbytes()) return dnnl_matmul(out, a, b, bias);
  if (packed.source != b.raw() || packed.version != b.storage()->version || packed.threads != key.threads) {
    pack(packed, c, lib, b);
    packed.threads = key.threads;
  }
  execute(c, lib, out, a, packed.bytes.raw(), bias);
}

bool has_bfloat16_matmul() {
  static const bool has = has_instructions(dnnl::cpu_isa::avx512_core);
  return has;
}

bool packing_is_profitable() {
  static const bool pays = has_instructions(dnnl::cpu_isa::avx512_core_amx);
  return pays;
}

std::string matmul_library() {
  const dnnl_version_t* v = dnnl_version();
  const char* name = "sse41";
  if (has_instructions(dnnl::cpu_isa::avx2)) name = "avx2";
  if (has_instructions(dnnl::cpu_isa::avx512_core)) name = "avx512";
  if (has_instructions(dnnl::cpu_isa::avx512_core_bf16)) name = "avx512_bf16";
  if (has_instructions(dnnl::cpu_isa::avx512_core_amx)) name = "amx";
  return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch) + ", " +
         name;
}

}  // namespace tessera::cpu
