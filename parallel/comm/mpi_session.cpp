// MPI_Init_thread and MPI_Finalize.
#include "parallel/comm/mpi_session.h"

#include <mpi.h>

#include <array>

#include "parallel/comm/call.h"

namespace tessera {

MpiSession::MpiSession() {
  int running = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&running);
  if (running) {
    MPI_Query_thread(&provided);
  } else {
    mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    owner_ = true;
  }
  if (provided >= MPI_THREAD_MULTIPLE) return;
  if (owner_) MPI_Finalize();
  throw Error("[mpi] this MPI library gives thread level " + std::to_string(provided) +
              "; expected MPI_THREAD_MULTIPLE, which communication in the background needs");
}

MpiSession::~MpiSession() {
  if (owner_) MPI_Finalize();
}

void mpi_check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(std::string(call) + ": " + std::string(text.data(), static_cast<size_t>(length)));
}

}  // namespace tessera
