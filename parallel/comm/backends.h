// Which transports this build holds, decided when it was configured: `if constexpr (kWithMpi)` never names what is
// not there.
#pragma once

namespace tessera {

inline constexpr bool kWithMpi = TESSERA_WITH_MPI;
inline constexpr bool kWithNccl = TESSERA_WITH_NCCL;

}  // namespace tessera
