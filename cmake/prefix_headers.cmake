# Copies HEADERS (relative to the directory FROM) to TO/tessera/ and rewrites includes of "tensor/tensor.h" to
# "tessera/tensor/tensor.h". Unchanged files are not written, to avoid recompilation; obsolete files are removed. Run by
# `cmake -P` (tessera_library.cmake).
file(GLOB_RECURSE gone RELATIVE ${TO}/tessera ${TO}/tessera/*)
foreach(header IN LISTS HEADERS)
  list(REMOVE_ITEM gone ${header})
  file(READ ${FROM}/${header} text)
  string(REGEX REPLACE "#include \"([^\"]+)\"" "#include \"tessera/\\1\"" text "${text}")
  set(before "")
  if(EXISTS ${TO}/tessera/${header})
    file(READ ${TO}/tessera/${header} before)
  endif()
  if(NOT text STREQUAL before)
    file(WRITE ${TO}/tessera/${header} "${text}")
  endif()
endforeach()
foreach(header IN LISTS gone)
  file(REMOVE ${TO}/tessera/${header})
endforeach()
