// The messages between a worker and a server of the asynchronous parameter server, point to point.
//
//   worker -> server   pull (clock)                                      then nothing
//                      push (clock, version, scale, loss, norm)          then the gradients that the server keeps
//                      stop                                              to server 0: let all come to one clock and
//                      stop end                                               no more pushes for now
//   server -> worker   values (version)                                  then the parameters that the server keeps
//                      none                                              no parameters: the run stops before its end
//                      waiting                                           not yet: a sign of life
//
// Messages between two ranks arrive in order, so a push is applied before the next pull of its worker is answered. An
// end is answered when all workers have ended.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "parallel/comm/communicator.h"

namespace tessera {

struct AsyncMessage {
  enum Kind : int64_t { pull, push, stop, end, values, none, waiting };
  int64_t kind = pull, clock = 0, version = 0;
  double scale = 1, loss = 0, norm = 0;
};

// A communicator for one worker's connections, and the host's memory for a message. Used by one thread of a rank at a
// time.
class AsyncChannel {
 public:
  AsyncChannel(std::unique_ptr<Communicator> comm, const ArenaPtr& arena)
      : comm_(std::move(comm)),
        memory_(Tensor::empty({sizeof(AsyncMessage) / 8}, DType::int64, arena->host(), Category::communication)) {}

  void send(int to, const AsyncMessage& message) {
    std::memcpy(memory_.raw(), &message, sizeof(message));
    comm_->send(memory_, to);
  }
  AsyncMessage recv(int from) {
    AsyncMessage message;
    comm_->recv(memory_, from);
    std::memcpy(&message, memory_.raw(), sizeof(message));
    return message;
  }
  // Tensors of no elements are not sent.
  int64_t send(int to, const Tensor& x) {
    if (x.numel() > 0) comm_->send(x, to);
    return x.nbytes();
  }
  void recv(int from, const Tensor& x) {
    if (x.numel() > 0) comm_->recv(x, from);
  }

 private:
  std::unique_ptr<Communicator> comm_;
  Tensor memory_;
};

}  // namespace tessera
