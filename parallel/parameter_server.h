// The synchronous parameter server: workers push gradients to the servers, which add and update; workers pull the new
// parameters (Li et al. 2014, OSDI, "Scaling distributed machine learning with the parameter server"). K servers sit on
// ranks 0 .. K-1 beside the workers: every rank is a worker, a server keeps a K-th of each unit's optimizer state, and
// a step ends for everyone when the servers have handed out the parameters. It trains bit for bit like DDP.
//
//        worker 0   worker 1   worker 2   worker 3         every worker: all parameters, all gradients
//            |          |          |          |
//            +----+-----+----+-----+----+-----+            push: each its gradients, cut over the servers
//                 v          v
//             server 0   server 1                          g = g_0 + g_1 + g_2 + g_3, one optimizer step of the half
//                 |          |
//            +----+-----+----+-----+----+-----+            pull: each server's half to everyone
//            v          v          v          v
//
// placements     parameters I, gradients P -> summed at their server, optimizer state S(0) over the first K ranks
// memory/rank    parameters and gradients whole; optimizer state 1/K on a server, none on the other ranks
// volume         S bytes of gradients come in from n - 1 workers and S bytes of parameters go out to n - 1: (n - 1) S
// and
//                (n - 1) S in all, whatever K is. A server receives and sends (n - 1) S / K, which is the bottleneck;
//                a worker sends and receives S (a server (K - 1)/K of it, the rest it keeps)
//
// A server adds in rank order and rounds once, whatever --all-reduce says. Micro-batches are accumulated by the workers
// and pushed once per step, after the last backward pass: unlike DDP nothing travels while it runs.
#pragma once
#include "parallel/data_strategy.h"

namespace tessera {

class ParameterServer final : public DataStrategy {
 public:
  // options.servers is 1 to axis.size(). Throws Error otherwise.
  ParameterServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void finish_gradients() override;  // push
  void share_parameters() override;  // pull

 private:
  // Calls f(server, its part of unit u) for every part that has elements, in an order that all ranks share.
  template <class F>
  void for_each_part(const F& f) const;
};

}  // namespace tessera
