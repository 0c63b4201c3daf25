// The part of a world that one cannot pretend.
#include "parallel/comm/fake_transport.h"

namespace tessera {

std::unique_ptr<Transport> FakeTransport::split(int, int) {
  throw Error("[comm] fake ranks cannot be split: the colors of the others are not known");
}

}  // namespace tessera
