# How a layer (one folder) becomes a library, how programs and tests become binaries, and the flags that all code here is
# built with. Flags are no part of what a user's program gets of the library (cmake/tessera_library.cmake).

include(CheckCXXCompilerFlag)
add_library(tessera_flags INTERFACE)
if(TESSERA_CUDA_EMULATED)
  target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR}/tests/cuda_emulator)  # before what it stands in for
endif()
target_include_directories(tessera_flags INTERFACE ${PROJECT_SOURCE_DIR})
if(TESSERA_WITH_CUDA AND NOT TESSERA_CUDA_EMULATED)
  target_link_libraries(tessera_flags INTERFACE CUDA::cudart)
endif()
# -ffp-contract=off: an element has the same bits in a vector body, in its tail and on every instruction set; where a
# fused multiply-add is wanted it is written. -Wno-psabi: our vector types never cross a call that is not inlined.
target_compile_options(tessera_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math>)
# Of clang: pragmas of g++; and functions that are constexpr because nvcc compiles such for the device (tensor/math.h).
target_compile_options(tessera_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unknown-pragmas$<SEMICOLON>-Wno-invalid-constexpr>)
# Off in a newcomer's build: a compiler that is newer than these lines may know new warnings.
option(TESSERA_WERROR "Warnings are errors" OFF)
if(TESSERA_WERROR)
  target_compile_options(tessera_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# g++ 12 and 13 see an overlap, and a copy that is too long, inside std::string's own operator+ (GCC bug 105651); the
# library's own pragmas against that are not kept in precompiled headers.
target_compile_options(tessera_flags INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict$<SEMICOLON>-Wno-stringop-overflow$<SEMICOLON>-Wno-stringop-overread$<SEMICOLON>-Wno-array-bounds>)
# A test's time goes by in the libraries, and so does that of layers which talk to people (tessera_layer): their own code
# is compiled in half the time with -Og. Layers without long loops over numbers take a third less with -O1, or a tenth
# with -O2. With all three, g++ sees values that are not set where all are; and g++ 13 refuses a precompiled header made
# with -O3 to a file compiled with -Og or -O1, unless two options that -O2 brings on x86 are set for it.
target_compile_options(tessera_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:$<IF:$<BOOL:$<TARGET_PROPERTY:TESSERA_OPTIMISED>>,$<TARGET_PROPERTY:TESSERA_OPTIMISED>,-O3>>)

# The sanitizers' checks hide from g++ 12 what is initialised, inside its own std::regex too: that warning is off with them.
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

# The headers that nearly every file includes are compiled once: a third of a build's time. A file includes what it uses all
# the same: builds without them (another project's, clang-tidy's) must work.
option(TESSERA_PRECOMPILE "Compile the standard library's headers once for all files" ${PROJECT_IS_TOP_LEVEL})
set(tessera_standard <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <filesystem> <fmt/format.h>
  <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <set> <span> <sstream> <string> <string_view>
  <thread> <utility> <vector>)
set(tessera_test_standard ${tessera_standard} <gtest/gtest.h>)

# tessera_precompile(target owner libraries...): `target` uses what is compiled once for `owner`, whose headers these are.
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

# Several files of a layer are one unit for the compiler, which reads their headers once: half of a first build's time.
# Who changes files builds without: -DTESSERA_UNITY=OFF. The files of exercises stay alone (lab/check.cpp).
option(TESSERA_UNITY "Compile several files of a layer together" ${PROJECT_IS_TOP_LEVEL})
file(STRINGS ${PROJECT_SOURCE_DIR}/lab/exercises.cpp tessera_exercises REGEX "\"[a-z_0-9/]+[.]cpp\"")
list(TRANSFORM tessera_exercises REPLACE "^.*\"([a-z_0-9/]+[.]cpp)\".*$" "\\1")
set(tessera_alone ${tessera_exercises} parallel/comm/memory.cpp)  # where ranks' sums are loops over numbers
set_source_files_properties(parallel/comm/memory.cpp PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O3>)

# tessera_units(name sources...): sixteen files a unit (the largest takes g++ 1.3 GB). A backend's folder has a unit of its own, so that the others hold the
# same files whatever is built, and names that collide are seen by all who build.
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

# tessera_layer(name PUBLIC layers... PRIVATE libraries...): the library tessera_<name> of every .cpp under <name>/ (and
# .cu, with CUDA), but for the files of a backend that is off. Static, or shared with -DBUILD_SHARED_LIBS=ON, so that
# several programs hold the kernels once (bench/pack.sh).
function(tessera_layer name)
  file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${name}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/main/[^/]*[.]cpp$")  # of programs
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
      list(FILTER sources EXCLUDE REGEX "/cuda/driver/")  # what speaks to the driver and NVIDIA's libraries
      # unrolling is nvcc's; every multiplication and addition of a kernel is written as one
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
    if(name MATCHES "^(app|bench|hub|lab|settings|train|verify)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-Og;${as_header}")
    elseif(name MATCHES "^(autograd|data|models|nn)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-O1;${as_header}")
    elseif(name MATCHES "^(parallel|planner)$")
      set_target_properties(tessera_${name} PROPERTIES TESSERA_OPTIMISED "-O2;${as_header}")
    endif()
  endif()
  if(TESSERA_UNITY)
    tessera_units(${name} ${sources})
  endif()
endfunction()

# tessera_program(name sources...): a program in bin/ of the build folder.
function(tessera_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE tessera_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endfunction()

# tessera_tests(name libraries...): the GoogleTest binary test_<name> of tests/<name>/*.cpp, one entry of ctest. Where
# TESSERA_TESTS_WITH is a word, of the files of tests only those that have it: a packed build has those for a GPU.
set(TESSERA_TESTS_WITH "" CACHE STRING "Build only the files of tests that have this word, such as Gpu")
function(tessera_tests name)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${name}/*.cpp)
  foreach(source IN LISTS sources)
    file(STRINGS ${source} tests REGEX "^TEST(_F|_P)?[(]")
    file(STRINGS ${source} wanted REGEX "${TESSERA_TESTS_WITH}" LIMIT_COUNT 1)
    if(TESSERA_TESTS_WITH AND tests AND NOT wanted)
      list(REMOVE_ITEM sources ${source})
    endif()
  endforeach()
  if(NOT sources)
    return()
  endif()
  add_executable(test_${name} ${sources})
  target_link_libraries(test_${name} PRIVATE tessera_flags ${ARGN} fmt::fmt GTest::gtest GTest::gtest_main)
  set_target_properties(test_${name} PROPERTIES TESSERA_OPTIMISED -Og)
  tessera_precompile(test_${name} tessera_test_standard GTest::gtest)
  target_compile_definitions(test_${name} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND test_${name} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
endfunction()
