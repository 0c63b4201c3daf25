// Other processes' memory, seen from this one: a rank of this host says where its arrays lie (Reach), and whoever is
// told maps the file behind them (tensor/region.h, shared_region()) once and for good.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "parallel/comm/call.h"
#include "tensor/region.h"

namespace tessera {

// Where the arrays of a call lie, for other processes of the host. Plain numbers: it stands in shared memory.
struct Reach {
  int64_t process = 0;  // of the rank
  Region::File file = {};
  int64_t size = 0;           // of the file
  int64_t in = -1, out = -1;  // offsets in it; negative: there is no such array
  bool known() const { return file.descriptor >= 0; }
};
// Opens the file behind a descriptor of another process, to read and write; negative and errno where the system does
// not let it.
int open_of_process(int64_t process, int descriptor);

// Of a call of this process; not known where its arrays lie outside regions that others can map.
Reach reach_of(const Call& call);

class PeerMemory {
 public:
  PeerMemory() = default;
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Where the file of `reach` begins in this process. Any thread may ask. Throws CommError naming the cause when the
  // system does not let it be mapped.
  std::byte* base(const Reach& reach);

 private:
  struct Mapping {
    std::byte* base;
    size_t size;
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Mapping> mapped_;  // by process and number of the region
};

}  // namespace tessera
