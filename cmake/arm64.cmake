# Cross toolchain for 64-bit Arm Linux: Debian's cross compiler, the libraries of tests/arm/root.sh in TESSERA_ARM_ROOT, and
# qemu-user to run programs. Not needed on Arm machines.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_ARM_ROOT)
set(CMAKE_SYSROOT ${TESSERA_ARM_ROOT})
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
# 384 GiB of address space: qemu-user tracks every reserved page, and tracking 1 TiB exhausts the memory.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -R 0x6000000000 -L ${TESSERA_ARM_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${TESSERA_ARM_ROOT})
set(ENV{PKG_CONFIG_LIBDIR} ${TESSERA_ARM_ROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${TESSERA_ARM_ROOT}/usr/share/pkgconfig)
