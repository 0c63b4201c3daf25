# Targets of layers (one library per directory), programs and tests, and the compile flags of Tessera's own code, which are
# not propagated to users of the library (cmake/tessera_library.cmake).

include(CheckCXXCompilerFlag)
add_library(tessera_flags INTERFACE)
if(TESSERA_CUDA_EMULATED)
  target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR}/tests/cuda_emulator)  # takes precedence over the real headers
endif()
target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR})
if(TESSERA_WITH_CUDA AND NOT TESSERA_CUDA_EMULATED)
  target_link_libraries(tessera_flags INTERFACE CUDA::cudart)
endif()
# -ffp-contract=off: elements are bitwise identical in vector bodies, tails and on all instruction sets; fused multiply-adds
# are explicit. -Wno-psabi: vector types are passed only to inlined functions.
target_compile_options(tessera_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math>)
# clang only: g++ pragmas, and functions declared constexpr for device compilation by nvcc (tensor/math.h).
target_compile_options(tessera_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unknown-pragmas$<SEMICOLON>-Wno-invalid-constexpr>)
# Off by default, because newer compilers may have new warnings.
option(TESSERA_WERROR "Treat warnings as errors" OFF)
if(TESSERA_WERROR)
  target_compile_options(tessera_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# g++ 12 and 13 report false overlaps and overlong copies inside std::string operator+ (GCC bug 105651); the library's
# pragmas against that are lost in precompiled headers.
target_compile_options(tessera_flags INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict$<SEMICOLON>-Wno-stringop-overflow$<SEMICOLON>-Wno-stringop-overread$<SEMICOLON>-Wno-array-bounds>)
# Tests and user-interface layers (tessera_layer) spend their time in the libraries: -Og halves their compile time. Layers
# without long numeric loops compile in a third less with -O1, a tenth less with -O2. At these levels g++ reports false
# uninitialized values; and g++ 13 rejects a precompiled header built with -O3 for -Og or -O1 files unless two options that
# -O2 implies on x86 are set.
target_compile_options(tessera_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:$<IF:$<BOOL:$<TARGET_PROPERTY:TESSERA_OPTIMISED>>,$<TARGET_PROPERTY:TESSERA_OPTIMISED>,-O3>>)

# With sanitizers, g++ 12 reports false uninitialized values, also inside std::regex, so that warning is off.
if(TESSERA_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
endif()
if(TESSERA_SANITIZE STREQUAL "address")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined> $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=address,undefined)
elseif(TESSERA_SANITIZE STREQUAL "thread")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=thread>)
  add_link_options(-fsanitize=thread)
elseif(NOT TESSERA_SANITIZE STREQUAL "")
  message(FATAL_ERROR "TESSERA_SANITIZE is '${TESSERA_SANITIZE}'; expected empty, address or thread")
endif()

# Precompiled common headers save a third of the build time. Files must still include what they use, for builds without
# precompiled headers (subprojects, clang-tidy).
option(TESSERA_PRECOMPILE "Precompile common headers" ${PROJECT_IS_TOP_LEVEL})
set(tessera_standard <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <filesystem> <fmt/format.h>
  <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <set> <span> <sstream> <string> <string_view>
  <thread> <utility> <vector>)
set(tessera_test_standard ${tessera_standard} <gtest/gtest.h>)

# tessera_precompile(target owner libraries...): `target` reuses the precompiled headers of `owner`.
function(tessera_precompile target owner)
  if(NOT TESSERA_PRECOMPILE)
    return()
  endif()
  if(NOT TARGET ${owner})
    file(TOUCH ${PROJECT_BINARY_DIR}/${owner}.cpp)
    add_library(${owner} OBJECT ${PROJECT_BINARY_DIR}/${owner}.cpp)
    get_target_property(optimised ${target} TESSERA_OPTIMISED)
    get_target_property(shared ${target} POSITION_INDEPENDENT_CODE)
    set_target_properties(${owner} PROPERTIES TESSERA_OPTIMISED "${optimised}" POSITION_INDEPENDENT_CODE "${shared}")
    target_link_libraries(${owner} PRIVATE tessera_flags fmt::fmt ${ARGN})
    target_precompile_headers(${owner} PRIVATE ${${owner}})
  endif()
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:fmt::fmt>)
  target_precompile_headers(${target} REUSE_FROM ${owner})
endfunction()

# Unity builds of several files of a layer halve the time of a first build. For development use -DTESSERA_UNITY=OFF.
option(TESSERA_UNITY "Compile several files of a layer together" ${PROJECT_IS_TOP_LEVEL})
# The files of exercises (lab/exercises.cpp) are compiled separately, because a learner's file replaces one (lab/check.cpp).
# A test of lab compares this list with the exercises.
set(tessera_exercises
  parallel/comm/algorithms.cpp
  parallel/comm/ring.cpp
  parallel/ddp.cpp
  parallel/experts/expert_parallel.cpp
  parallel/gradient_norm.cpp
  parallel/pipeline/one_f_one_b.cpp
  parallel/pipeline/zero_bubble.cpp
  parallel/placement.cpp
  parallel/ring_attention.cpp
  parallel/vocab_parallel.cpp
  parallel/zero.cpp)
set(tessera_alone ${tessera_exercises} parallel/comm/memory.cpp)  # contains the loops of reductions
set_source_files_properties(parallel/comm/memory.cpp PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O3>)

# tessera_units(name sources...): sixteen files per unit (at most 1.3 GB for g++). Backend directories are separate units, so
# that other units are independent of the configuration and name collisions are detected in every build.
function(tessera_units name)
  set(count 0)
  foreach(source IN LISTS ARGN)
    if(source MATCHES "[.]cu$" OR source IN_LIST tessera_alone)
      continue()
    elseif(source MATCHES "/(cuda|mpi|nccl|x86)/")
      set(unit ${CMAKE_MATCH_1})
    else()
      math(EXPR unit "${count} / 16")
      math(EXPR count "${count} + 1")
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${unit})
  endforeach()
  set_target_properties(tessera_${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# tessera_layer(name PUBLIC layers... PRIVATE libraries...): the library tessera_<name> of all .cpp files (with CUDA also .cu)
# under <name>/ except disabled backends. Static, or shared with -DBUILD_SHARED_LIBS=ON, to share kernels between programs
# (bench/pack.sh).
function(tessera_layer name)
  file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${name}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/main/[^/]*[.]cpp$")  # main files of programs
  if(NOT TESSERA_WITH_MPI)
    list(FILTER sources EXCLUDE REGEX "/mpi/")
  endif()
  if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    list(FILTER sources EXCLUDE REGEX "/x86/")
  endif()
  if(NOT TESSERA_WITH_NCCL)
    list(FILTER sources EXCLUDE REGEX "/nccl/library[.]cpp$")
  endif()
  if(NOT TESSERA_WITH_CUDNN)
    list(FILTER sources EXCLUDE REGEX "/cudnn_[^/]*[.]cpp$")
  endif()
  if(TESSERA_WITH_CUDA)
    file(GLOB_RECURSE cuda_sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${name}/*.cu)
    list(APPEND sources ${cuda_sources})
    set_source_files_properties(${cuda_sources} PROPERTIES COMPILE_DEFINITIONS TESSERA_FLOAT64_KERNELS=$<BOOL:${TESSERA_FLOAT64_KERNELS}>)
    if(TESSERA_CUDA_EMULATED)
      list(FILTER sources EXCLUDE REGEX "/cuda/driver/")  # code that calls the driver and NVIDIA libraries
      # nvcc unrolls; multiply-adds of kernels are explicit
      set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX
        SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "-xc++;-Wno-unknown-pragmas;$<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>;$<$<STREQUAL:${CMAKE_SYSTEM_PROCESSOR},x86_64>:-mfma>;${TESSERA_FIBER_OPTIONS}")
    endif()
  else()
    list(FILTER sources EXCLUDE REGEX "/cuda/")
  endif()
  add_library(tessera_${name} ${sources})
  target_link_libraries(tessera_${name} PRIVATE $<BUILD_INTERFACE:tessera_flags> ${ARGN})
  tessera_precompile(tessera_${name} tessera_standard)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    check_cxx_compiler_flag(-munroll-only-small-loops TESSERA_UNROLLS_SMALL_LOOPS)  # g++ 13 and later, x86
    set(as_header -Wno-maybe-uninitialized)
    if(TESSERA_UNROLLS_SMALL_LOOPS)
      list(APPEND as_header -munroll-only-small-loops -mvzeroupper)
    endif()
    if(name MATCHES "^(app|bench|hub|lab|train|verify)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-Og;${as_header}")
    elseif(name MATCHES "^(autograd|base|data|models|nn)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-O1;${as_header}")
    elseif(name MATCHES "^(parallel|planner)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-O2;${as_header}")
    endif()
  endif()
  if(TESSERA_UNITY)
    tessera_units(${name} ${sources})
  endif()
endfunction()

# tessera_program(name sources...): a program in bin/ of the build directory.
function(tessera_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE tessera_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endfunction()

# tessera_tests(name libraries...): the GoogleTest binary test_<name> of tests/<name>/*.cpp, one ctest entry.
set(TESSERA_TEST_FILES "" CACHE STRING "Build only these of the files tests/NAME/*_test.cpp, relative to the source directory")
function(tessera_tests name)
  file(GLOB sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${name}/*.cpp)
  if(TESSERA_TEST_FILES)
    set(excluded ${sources})
    list(FILTER excluded INCLUDE REGEX "_test[.]cpp$")
    list(REMOVE_ITEM excluded ${TESSERA_TEST_FILES})
    list(REMOVE_ITEM sources ${excluded})
  endif()
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
  add_executable(test_${name} ${sources})
  target_link_libraries(test_${name} PRIVATE tessera_flags ${ARGN} fmt::fmt GTest::gtest GTest::gtest_main)
  set_target_properties(test_${name} PROPERTIES TESSERA_OPTIMISED -Og)
  tessera_precompile(test_${name} tessera_test_standard GTest::gtest)
  target_compile_definitions(test_${name} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND test_${name} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
endfunction()
