// Instruction sets supported by the CPU and the system, limited by TESSERA_MAX_CPU_ISA.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "tensor/cpu/vectorize.h"

namespace tessera::cpu {
namespace {

constexpr long kRequestPermission = 0x1023;  // arch_prctl's ARCH_REQ_XCOMP_PERM (Linux, asm/prctl.h)
constexpr long kTileData = 18;               // state component XFEATURE_XTILEDATA

[[gnu::target("xsave")]] bool system_saves_tiles() {
  return (_xgetbv(0) & (uint64_t{3} << 17)) == uint64_t{3} << 17;  // tile configuration and tile data
}

MaxIsa parse_max_isa() {
  const char* const set = std::getenv("TESSERA_MAX_CPU_ISA");
  if (set == nullptr) return MaxIsa::amx;
  const std::string_view name = set;
  if (name == "avx2") return MaxIsa::avx2;
  if (name == "avx512") return MaxIsa::avx512;
  if (name == "avx512_bf16") return MaxIsa::avx512_bf16;
  if (name == "amx") return MaxIsa::amx;
  throw Error("TESSERA_MAX_CPU_ISA: expected avx2, avx512, avx512_bf16 or amx, got '" + std::string(name) + "'");
}

InstructionSet best_instruction_set() {
  const bool avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && max_isa() >= MaxIsa::avx512) return InstructionSet::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::avx2;
  return InstructionSet::baseline;
}

bool can_use_tiles() {
  if (max_isa() < MaxIsa::amx) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool bf16_tiles = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  if (!bf16_tiles || !has_pair_products() || !system_saves_tiles()) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

MaxIsa max_isa() {
  static const MaxIsa max = parse_max_isa();
  return max;
}

InstructionSet instruction_set() {
  static const InstructionSet best = best_instruction_set();
  return best;
}

bool has_pair_products() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return instruction_set() == InstructionSet::avx512 && max_isa() >= MaxIsa::avx512_bf16 &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
  }();
  return has;
}

bool has_amx() {
  static const bool has = can_use_tiles();
  return has;
}

}  // namespace tessera::cpu
