// MPI_Init_thread and MPI_Finalize.
#include "parallel/comm/mpi_session.h"

#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

#include "parallel/comm/call.h"
#include "tensor/temporary.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

int64_t number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : 0;
}

// Open MPI sends the messages of one host through a file for each rank in /dev/shm, whose memory comes with the first
// touch: where there is none left then, the system kills the rank. So there must be room for all of them before; where
// there is not, the files go into the folder for temporary files.
void place_messages() {
  constexpr int64_t kFile = (int64_t{4} << 20) + 4096;
  const int64_t needed = number_in("OMPI_COMM_WORLD_LOCAL_SIZE") * kFile;
  std::error_code error;
  const fs::space_info memory = fs::space("/dev/shm", error);
  if (error || static_cast<int64_t>(memory.available) >= needed) return;
  const std::string folder = temporary_folder().string();
  // Before version 5, and from it on.
  constexpr std::array names = {"OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory"};
  for (const char* name : names)
    if (std::getenv(name) != nullptr) return;  // the user has said where
  for (const char* name : names) ::setenv(name, folder.c_str(), 0);
  if (number_in("OMPI_COMM_WORLD_LOCAL_RANK") == 0)
    std::fprintf(stderr,
                 "tessera: /dev/shm has %lld bytes left, and Open MPI wants %lld of it for messages: they go through "
                 "files in %s, which may be slower; Docker gives more by its options shm-size and ipc\n",
                 static_cast<long long>(memory.available), static_cast<long long>(needed), folder.c_str());
}

}  // namespace

MpiSession::MpiSession() : exceptions_(std::uncaught_exceptions()) {
  int running = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&running);
  if (running) {
    MPI_Query_thread(&provided);
  } else {
    place_messages();
    mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    owner_ = true;
  }
  if (provided >= MPI_THREAD_MULTIPLE) return;
  throw Error("[mpi] this MPI library gives thread level " + std::to_string(provided) +
              "; expected MPI_THREAD_MULTIPLE, which communication in the background needs");
}

MpiSession::~MpiSession() {
  if (owner_ && std::uncaught_exceptions() <= exceptions_) MPI_Finalize();
}

void end_mpi_job(const std::string& line, int status, const std::function<void()>& before_the_end) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string text = "tessera: [rank " + std::to_string(rank) + "] " + one_line(line) + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(nullptr);
  before_the_end();
  try {
    std::thread([status] {  // MPI_Abort may wait for a launcher that is busy
      std::this_thread::sleep_for(std::chrono::seconds(5));
      std::_Exit(status);
    })
        .detach();
    MPI_Abort(MPI_COMM_WORLD, status);
  } catch (const std::system_error&) {  // no thread is to be had: the launcher ends the others when this one is gone
  }
  std::_Exit(status);
}

void mpi_check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(std::string(call) + ": " + std::string(text.data(), static_cast<size_t>(length)));
}

}  // namespace tessera
