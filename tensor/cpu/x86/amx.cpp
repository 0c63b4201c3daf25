// Asking the processor and the system for the tiles, and for pair products.
#include "tensor/cpu/x86/amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "tensor/cpu/vectorize.h"

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
  if (!bf16_tiles || !has_pair_products() || !system_saves_tiles()) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_pair_products() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return instruction_set() == InstructionSet::avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 &&
           (a >> 5 & 1) != 0;
  }();
  return has;
}

bool has_amx() {
  static const bool has = ask();
  return has;
}

}  // namespace tessera::cpu
