# Packages built by `cpack`: a relocatable archive with its shared libraries, and a .deb for the Debian or Ubuntu release of
# the build. Both contain the files of `cmake --install` and those required by exercises, notebooks and Python without a
# checkout (package_contents.cmake).

set(release unknown)
if(EXISTS /etc/os-release)
  file(STRINGS /etc/os-release lines REGEX "^(ID|VERSION_ID)=")
  list(TRANSFORM lines REPLACE "^[A-Z_]+=\"?([^\"]*)\"?$" "\\1")
  list(SORT lines ORDER DESCENDING)
  list(JOIN lines "" release)  # debian12, ubuntu24.04
endif()

set(CPACK_PACKAGE_VENDOR Tessera)
set(CPACK_PACKAGE_CONTACT "The maintainers of Tessera <maintainers@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Trains small transformers under every parallel layout and proves the runs equal")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_PACKAGE_FILE_NAME tessera-${PROJECT_VERSION}-${release}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_GENERATOR TXZ DEB)
set(CPACK_THREADS 0)  # xz on all cores
set(CPACK_STRIP_FILES ON)
set(CPACK_MONOLITHIC_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_VERSION ${PROJECT_VERSION}~${release})
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# Compiling exercises requires fmt's headers. Further dependencies of programs that use the library are reported by
# find_package(tessera).
string(REGEX MATCH "^[0-9]+" major "${CMAKE_CXX_COMPILER_VERSION}")
set(CPACK_DEBIAN_PACKAGE_DEPENDS "g++ (>= 4:${major}), libfmt-dev")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "openmpi-bin, python3-venv")
set(CPACK_INSTALL_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/package_contents.cmake)
set(CPACK_TESSERA_SOURCE ${PROJECT_SOURCE_DIR})
set(CPACK_TESSERA_BUILD ${PROJECT_BINARY_DIR})
set(CPACK_TESSERA_LIBDIR ${CMAKE_INSTALL_LIBDIR})
set(CPACK_TESSERA_LAYERS ${layers})
set(CPACK_TESSERA_EXERCISES ${tessera_exercises})
include(CPack)
