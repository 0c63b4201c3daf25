// Operations of files that some file systems do not know: NFS, Lustre, FUSE, and those of containers and of other
// systems' disks (docs/cluster.md).
#pragma once
#include <cstdint>

namespace tessera {

// True of an errno by which a file system says that it does not know an operation, rather than that it failed.
bool is_unknown_operation(int cause);

// Makes sure that the disk has room for the bytes of a file from `from` to `to`, which nobody has written yet. Where
// the file system cannot promise it, zeros are written there. Returns 0 or an errno.
int make_room(int descriptor, int64_t from, int64_t to);

}  // namespace tessera
