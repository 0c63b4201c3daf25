# Finds oneDNN as DNNL::dnnl by header and library, because the CMake config of Debian 12 requires the development files of
# OpenCL, which Tessera does not use.
find_path(dnnl_INCLUDE_DIR dnnl.hpp)
find_library(dnnl_LIBRARY dnnl)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(dnnl REQUIRED_VARS dnnl_LIBRARY dnnl_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "oneDNN is in the package libdnnl-dev")
if(dnnl_FOUND AND NOT TARGET DNNL::dnnl)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES IMPORTED_LOCATION ${dnnl_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${dnnl_INCLUDE_DIR})
endif()
mark_as_advanced(dnnl_INCLUDE_DIR dnnl_LIBRARY)
