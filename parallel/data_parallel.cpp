// Everything to rank 0, and back.
#include "parallel/data_parallel.h"

#include "tensor/error.h"

namespace tessera {

// Everything on rank 0, nothing on the others.
DataParallel::DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(model, axis, arena, options, {.name = "dataparallel", .kept = Kept::at_root}) {
  if (options.zero != 0)
    throw FieldError("zero", "dataparallel keeps everything on rank 0, so there is no stage " +
                                 std::to_string(options.zero) + " of it; expected 0, or ddp instead of dataparallel");
  if (axis.kind() != "threads")
    throw Error("[data parallel] dataparallel is for threads of one process, found " + std::string(axis.kind()) +
                "; use ddp");
  const auto category = [&](Category of_root) { return root() ? of_root : Category::communication; };
  all_ = make_stretch(category(Category::parameters), category(Category::gradients));
  if (root()) shards_ = residents_;
  layout_.reductions = {{{0, all_.grads.numel()}, all_.grads.numel()}};
}

// Parameters that no gradient reached have zeros.
void DataParallel::finish_gradients() {
  model_.zero_missing_gradients();
  axis_.reduce(all_.grads, 0);
}

void DataParallel::share_parameters() {
  axis_.broadcast(all_.values, 0);
  if (!root()) ++all_.values.storage()->version;  // packed copies of the old values are stale
}

}  // namespace tessera
