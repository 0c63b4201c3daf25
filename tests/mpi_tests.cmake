# The tests of the MPI transport: a program of ours under mpirun. The library frees not all that it holds, so the address
# sanitizer does not look for leaks there.
add_executable(mpi_program ${CMAKE_CURRENT_SOURCE_DIR}/parallel/mpi/mpi_program.cpp)
target_link_libraries(mpi_program PRIVATE tessera_parallel fmt::fmt)
set(mpi_script ${CMAKE_CURRENT_SOURCE_DIR}/parallel/mpi/mpi_test.sh)
set(mpi_tests mpi_faults)
foreach(ranks 2 3 4)
  add_test(NAME mpi_operations_${ranks} COMMAND ${mpi_script} $<TARGET_FILE:mpi_program> operations ${ranks})
  list(APPEND mpi_tests mpi_operations_${ranks})
endforeach()
add_test(NAME mpi_faults COMMAND ${mpi_script} $<TARGET_FILE:mpi_program> faults)
add_test(NAME mpi_two_hosts COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/parallel/mpi/two_hosts_test.sh $<TARGET_FILE:mpi_program> $<TARGET_FILE:tessera>)
list(APPEND mpi_tests mpi_two_hosts)
set_tests_properties(${mpi_tests} PROPERTIES TIMEOUT 200 SKIP_RETURN_CODE 77 ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1")
