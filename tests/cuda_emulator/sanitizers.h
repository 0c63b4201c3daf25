// Sanitizer annotations for fibers and shared memory.
#pragma once
#include <cstddef>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace tessera::emulator {

// AddressSanitizer must be notified of every stack switch.
#ifdef __SANITIZE_ADDRESS__
inline void leave_for(void** fake_stack, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(fake_stack, bottom, size);
}
inline void arrived(void* fake_stack, const void** bottom, size_t* size) {
  __sanitizer_finish_switch_fiber(fake_stack, bottom, size);
}
inline void allow(const void* p, size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
inline void forbid(const void* p, size_t bytes) { __asan_poison_memory_region(p, bytes); }
#else
inline void leave_for(void**, const void*, size_t) {}
inline void arrived(void*, const void**, size_t*) {}
inline void allow(const void*, size_t) {}
inline void forbid(const void*, size_t) {}
#endif

// For ThreadSanitizer each fiber is a separate thread, and only barriers order the fibers of a block: two accesses
// without a barrier between them are a race. (Blocks are ordered, because they reuse the same shared memory.)
using FiberId = void*;
#ifdef __SANITIZE_THREAD__
inline FiberId make_fiber_id() { return __tsan_create_fiber(0); }
inline void forget(FiberId k) { __tsan_destroy_fiber(k); }
inline FiberId current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_fiber(FiberId k) { __tsan_switch_to_fiber(k, __tsan_switch_to_fiber_no_sync); }
inline void release_order(void* point) { __tsan_release(point); }
inline void acquire_order(void* point) { __tsan_acquire(point); }
#else
inline FiberId make_fiber_id() { return nullptr; }
inline void forget(FiberId) {}
inline FiberId current_fiber() { return nullptr; }
inline void switch_fiber(FiberId) {}
inline void release_order(void*) {}
inline void acquire_order(void*) {}
#endif

}  // namespace tessera::emulator
