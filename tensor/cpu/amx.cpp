// Asking the processor and the system for the tiles.
#include "tensor/cpu/amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tessera::cpu {
namespace {

constexpr long kRequestPermission = 0x1023;  // arch_prctl's ARCH_REQ_XCOMP_PERM (Linux, asm/prctl.h)
constexpr long kTileData = 18;               // the state component (XFEATURE_XTILEDATA)

[[gnu::target("xsave")]] bool system_saves_tiles() {
  return (_xgetbv(0) & (uint64_t{3} << 17)) == uint64_t{3} << 17;  // tile configuration and tile data
}

bool ask() {
  const char* const chosen = std::getenv("TESSERA_AMX");
  if (chosen != nullptr && std::string_view(chosen) == "0") return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool bf16_tiles = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  if (!bf16_tiles || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a >> 5 & 1) == 0) return false;  // AVX512_BF16
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") || !system_saves_tiles()) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_amx() {
  static const bool has = ask();
  return has;
}

}  // namespace tessera::cpu
