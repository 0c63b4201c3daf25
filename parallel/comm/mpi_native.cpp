// MPI's own collectives, in place where MPI can. Sums of bfloat16 are made in float32 and rounded at each addition, in
// the order that the library chooses.
#include <mpi.h>

#include <climits>
#include <cstring>
#include <vector>

#include "parallel/comm/mpi_transport.h"
#include "parallel/comm/sums.h"

namespace tessera {
namespace {

void add_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::sum, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}
void max_bfloat16(void* in, void* inout, int* count, MPI_Datatype*) {
  reduce_into(DType::bfloat16, Reduction::max, static_cast<std::byte*>(inout), static_cast<std::byte*>(in), *count);
}

class Operation {
 public:
  explicit Operation(const Call& call) {
    const bool sums = call.reduction == Reduction::sum;
    if (call.dtype == DType::bfloat16)
      mpi_check(MPI_Op_create(sums ? add_bfloat16 : max_bfloat16, 1, &own_), "MPI_Op_create");
    op_ = own_ != MPI_OP_NULL ? own_ : sums ? MPI_SUM : MPI_MAX;
  }
  ~Operation() {
    if (own_ != MPI_OP_NULL) MPI_Op_free(&own_);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  MPI_Op get() const { return op_; }

 private:
  MPI_Op own_ = MPI_OP_NULL, op_ = MPI_OP_NULL;
};

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return MPI_DOUBLE;
    case DType::float32:
      return MPI_FLOAT;
    case DType::bfloat16:
      return MPI_UINT16_T;
    case DType::int32:
      return MPI_INT32_T;
    case DType::uint8:
      return MPI_UINT8_T;
    default:
      return MPI_INT64_T;
  }
}

struct Collective {
  MPI_Comm comm;
  const Call& call;
  int n = 1, rank = 0;
  int64_t element = size_of(call.dtype);
  MPI_Datatype type = type_of(call.dtype);
  int count = static_cast<int>(call.count);
  std::vector<int> counts, places;  // of the pieces

  Collective(MPI_Comm c, const Call& what) : comm(c), call(what) {
    MPI_Comm_size(comm, &n);
    MPI_Comm_rank(comm, &rank);
    for (int r = 0; r < n; ++r) {
      const Range range = piece(call.count, n, r);
      counts.push_back(static_cast<int>(range.size()));
      places.push_back(static_cast<int>(range.begin));
    }
  }
  int64_t begin() const { return places[static_cast<size_t>(rank)] * element; }
  int own() const { return counts[static_cast<size_t>(rank)]; }

  void reduce_scatter() const {
    const Operation op(call);
    std::vector<std::byte> total(static_cast<size_t>(own() * element));  // `out` may lie inside `in`
    mpi_check(MPI_Reduce_scatter(call.in, total.data(), counts.data(), type, op.get(), comm), "MPI_Reduce_scatter");
    if (!total.empty()) std::memcpy(call.out, total.data(), total.size());
  }
  void all_gather() const {
    const bool in_place = call.in == call.out + begin();
    mpi_check(MPI_Allgatherv(in_place ? MPI_IN_PLACE : call.in, own(), type, call.out, counts.data(), places.data(),
                             type, comm),
              "MPI_Allgatherv");
  }
  void reduce() const {
    const Operation op(call);
    const bool at_root = rank == call.root;
    mpi_check(MPI_Reduce(at_root ? MPI_IN_PLACE : call.in, at_root ? call.out : nullptr, count, type, op.get(),
                         call.root, comm),
              "MPI_Reduce");
  }
  void gather() const {
    const bool in_place = rank == call.root && call.in == call.out + begin();
    mpi_check(MPI_Gatherv(in_place ? MPI_IN_PLACE : call.in, own(), type, call.out, counts.data(), places.data(), type,
                          call.root, comm),
              "MPI_Gatherv");
  }
  void scatter() const {
    const bool in_place = rank == call.root && call.out == call.in + begin();
    mpi_check(MPI_Scatterv(call.in, counts.data(), places.data(), type,
                           in_place ? MPI_IN_PLACE : static_cast<void*>(call.out), own(), type, call.root, comm),
              "MPI_Scatterv");
  }
  void run() const;
};

void Collective::run() const {
  switch (call.op) {
    case Op::all_reduce: {
      const Operation op(call);
      return mpi_check(MPI_Allreduce(MPI_IN_PLACE, call.out, count, type, op.get(), comm), "MPI_Allreduce");
    }
    case Op::reduce_scatter:
      return reduce_scatter();
    case Op::all_gather:
      return all_gather();
    case Op::broadcast:
      return mpi_check(MPI_Bcast(call.out, count, type, call.root, comm), "MPI_Bcast");
    case Op::reduce:
      return reduce();
    case Op::gather:
      return gather();
    case Op::scatter:
      return scatter();
    case Op::all_to_all:
      return mpi_check(MPI_Alltoall(call.in, own(), type, call.out, own(), type, comm), "MPI_Alltoall");
    default:
      return mpi_check(MPI_Barrier(comm), "MPI_Barrier");
  }
}

}  // namespace

void mpi_collective(MPI_Comm comm, const Call& call) {
  if (call.count > INT_MAX)
    throw Error("[mpi] " + describe(call) + ": MPI's own collective takes at most " + std::to_string(INT_MAX) +
                " elements; use another algorithm");
  Collective(comm, call).run();
}

}  // namespace tessera
