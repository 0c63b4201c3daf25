// A file without a name, which the first rank of a host makes and the others map through /proc, as they map each
// other's arrays (parallel/comm/peer_memory.h).
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "parallel/comm/mpi_world.h"
#include "tensor/file_system.h"

namespace tessera {
namespace {

constexpr int64_t kPage = 4096;

// The place of the file, and how it is known again: another process may have the same number elsewhere.
struct Offer {
  int64_t process = 0;
  int descriptor = -1;
  dev_t device = 0;
  ino_t inode = 0;
};

Offer offer_of(int descriptor) {
  struct stat info {};
  if (descriptor < 0 || ::fstat(descriptor, &info) != 0) return {};
  return {getpid(), descriptor, info.st_dev, info.st_ino};
}

}  // namespace

std::unique_ptr<MpiWindow> MpiWindow::make(MPI_Comm one_host, int64_t bytes_each, std::string& why) {
  int n = 0, rank = 0;
  MPI_Comm_size(one_host, &n);
  MPI_Comm_rank(one_host, &rank);
  std::unique_ptr<MpiWindow> window(new MpiWindow);
  window->each_ = (bytes_each + kPage - 1) / kPage * kPage;
  window->bytes_ = static_cast<size_t>(n * window->each_);
  int file = -1;
  Offer offer;
  if (rank == 0) {
    file = memfd_create("tessera", MFD_CLOEXEC);
    if (file >= 0 && ::ftruncate(file, n * window->each_) == 0) offer = offer_of(file);
  }
  const int cause = errno;
  mpi_check(MPI_Bcast(&offer, sizeof(Offer), MPI_BYTE, 0, one_host), "MPI_Bcast");
  errno = cause;
  if (rank != 0 && offer.descriptor >= 0) file = open_of_process(offer.process, offer.descriptor);
  const Offer found = offer_of(file);
  int good = 0;
  if (offer.descriptor < 0)
    why = rank == 0 ? std::string("cannot make memory to share: ") + std::strerror(errno) : "";
  else if (file < 0)
    why = "cannot map the memory of process " + std::to_string(offer.process) + ": " + std::strerror(errno);
  else if (found.device != offer.device || found.inode != offer.inode)
    why = "process " + std::to_string(offer.process) + " is not the rank that says so";
  else if (const int failed = window->map(file, rank); failed != 0)
    why = "no room for " + std::to_string(window->each_) + " bytes of memory to share: " + std::strerror(failed);
  else
    good = 1;
  mpi_check(MPI_Allreduce(MPI_IN_PLACE, &good, 1, MPI_INT, MPI_MIN, one_host), "MPI_Allreduce");
  if (file >= 0) ::close(file);
  return good != 0 ? std::move(window) : nullptr;
}

// Each rank makes the room for its own segment, which so lies in the memory that is near to it.
int MpiWindow::map(int file, int rank) {
  if (const int cause = make_room(file, rank * each_, (rank + 1) * each_); cause != 0) return cause;
  void* const p = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (p == MAP_FAILED) return errno;
  base_ = static_cast<std::byte*>(p);
  return 0;
}

MpiWindow::~MpiWindow() {
  if (base_) ::munmap(base_, bytes_);
}

}  // namespace tessera
