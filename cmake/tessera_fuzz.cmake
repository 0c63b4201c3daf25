# Fuzzing: tessera_fuzz() builds fuzz_NAME from tests/fuzz/NAME_target.cpp with libFuzzer and the address and undefined
# behaviour sanitizers. Must be included before any target, because all libraries are instrumented.

option(TESSERA_BUILD_FUZZ "Build the fuzz targets (clang only)" OFF)
if(NOT TESSERA_BUILD_FUZZ)
  return()
endif()

if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "TESSERA_BUILD_FUZZ needs clang (-DCMAKE_CXX_COMPILER=clang++); the compiler is ${CMAKE_CXX_COMPILER_ID}")
endif()
if(TESSERA_SANITIZE)
  message(FATAL_ERROR "TESSERA_BUILD_FUZZ selects the sanitizers; expected an empty TESSERA_SANITIZE, got '${TESSERA_SANITIZE}'")
endif()
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS -fsanitize=fuzzer,address,undefined)
check_cxx_source_compiles(
  "#include <cstddef>\n#include <cstdint>\nextern \"C\" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }" TESSERA_HAS_LIBFUZZER)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT TESSERA_HAS_LIBFUZZER)
  string(REGEX MATCH "^[0-9]+" clang_major "${CMAKE_CXX_COMPILER_VERSION}")
  message(FATAL_ERROR "TESSERA_BUILD_FUZZ: clang cannot link -fsanitize=fuzzer,address,undefined; Debian has it in the package libclang-rt-${clang_major}-dev")
endif()

add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
add_link_options(-fsanitize=address,undefined)
add_compile_definitions(__SANITIZE_ADDRESS__=1)  # defined by g++ but not by clang 14
# Threads of an emulated GPU are fibers, hundreds per block: a fake stack for each and coverage counters took most of the
# test time.
set(TESSERA_FIBER_OPTIONS -fsanitize-address-use-after-return=never -fno-sanitize=fuzzer-no-link -O2)

# tessera_fuzz(libraries...): the targets fuzz_NAME, and `fuzz` for all of them.
function(tessera_fuzz)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_target.cpp)
  add_custom_target(fuzz)
  foreach(source IN LISTS sources)
    string(REGEX REPLACE "^.*/([^/]+)_target[.]cpp$" "fuzz_\\1" name ${source})
    tessera_program(${name} ${source} ${PROJECT_SOURCE_DIR}/tests/fuzz/engine/libfuzzer_main.cpp)
    target_link_libraries(${name} PRIVATE ${ARGN})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzz ${name})
  endforeach()
endfunction()
