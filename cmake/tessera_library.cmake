# The library tessera::tessera with headers <tessera/...>, and its installation.

set(layers base tensor autograd nn optim parallel models data train verify)

# The include directory contains only tessera/, because a user's program may have its own nn/ or data/. Backend headers are
# excluded: they require headers that may be missing, and tessera.h does not include them.
set(headers tessera.h)
foreach(layer IN LISTS layers)
  file(GLOB_RECURSE found RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${layer}/*.h)
  list(APPEND headers ${found})
endforeach()
list(FILTER headers EXCLUDE REGEX "/(cuda|mpi|nccl)/|^base/json[.]h$")
set(include ${PROJECT_BINARY_DIR}/include)
set(sources ${headers})
list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
set(copies ${headers})
list(TRANSFORM copies PREPEND ${include}/tessera/)
set(script ${PROJECT_SOURCE_DIR}/cmake/prefix_headers.cmake)
add_custom_command(OUTPUT ${PROJECT_BINARY_DIR}/headers.stamp BYPRODUCTS ${copies} DEPENDS ${sources} ${script}
  COMMAND ${CMAKE_COMMAND} -D FROM=${PROJECT_SOURCE_DIR} -D TO=${include} -D "HEADERS=${headers}" -P ${script}
  COMMAND ${CMAKE_COMMAND} -E touch ${PROJECT_BINARY_DIR}/headers.stamp
  COMMENT "Writing the headers of the library" VERBATIM)
add_custom_target(tessera_headers ALL DEPENDS ${PROJECT_BINARY_DIR}/headers.stamp)

add_library(tessera_library INTERFACE)
add_library(tessera::tessera ALIAS tessera_library)
add_dependencies(tessera_library tessera_headers)
target_compile_features(tessera_library INTERFACE cxx_std_20)
target_include_directories(tessera_library SYSTEM INTERFACE $<BUILD_INTERFACE:${include}>)
set(targets ${layers})
list(TRANSFORM targets PREPEND tessera_)
target_link_libraries(tessera_library INTERFACE ${targets})
if(NOT TESSERA_INSTALL)
  return()
endif()

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
set_target_properties(tessera_library PROPERTIES EXPORT_NAME tessera)
install(DIRECTORY ${include}/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS tessera_library ${targets} EXPORT tessera INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT tessera NAMESPACE tessera:: DESTINATION ${package} FILE tessera-targets.cmake)
configure_file(cmake/tessera-config.cmake.in package/tessera-config.cmake @ONLY)
write_basic_package_version_file(package/tessera-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/tessera-config.cmake ${PROJECT_BINARY_DIR}/package/tessera-config-version.cmake
  cmake/Finddnnl.cmake DESTINATION ${package})
