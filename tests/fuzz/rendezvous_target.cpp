// The hello that a rank sends first to the rendezvous, and the rendezvous address.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/tcp/transport.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

// The first byte is the world size; a hello and an address follow.
const Target target("rendezvous", [](std::string_view bytes) {
  Hello hello;
  const size_t head = std::min(bytes.size(), sizeof(hello) + 1);
  if (head > 1) std::memcpy(&hello, bytes.data() + 1, head - 1);
  std::vector<bool> there(bytes.empty() ? 1 : 1 + static_cast<unsigned char>(bytes[0]) % 8);
  there[0] = true;
  const std::string why = refusal(hello, there);
  require(!why.empty() || (hello.ranks == there.size() && hello.rank > 0 && hello.rank < there.size()),
          "only missing ranks are admitted");
  const std::string address(bytes.substr(head));
  if (address.empty()) throw InputError(std::string(kWhat) + ": no address");
  named([&] {
    const auto [host, port] = parse_address(address);
    require(!host.empty() && !port.empty() && port.size() <= address.size(), "an address has a host and a port");
  });
});

}  // namespace tessera::fuzz
