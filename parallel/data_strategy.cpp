// The choice of a strategy.
#include "parallel/data_strategy.h"

#include "parallel/ddp.h"
#include "parallel/parameter_server.h"
#include "parallel/zero.h"

namespace tessera {

std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options) {
  if (options.mode == "ps-sync") return std::make_unique<ParameterServer>(model, axis, arena, options);
  if (options.zero == 0) return std::make_unique<Ddp>(model, axis, arena, options);
  return std::make_unique<Zero>(model, axis, arena, options);
}

}  // namespace tessera
