# tessera_embed(target directory ending namespace header): embeds all files with that extension, so that an installed
# program requires no data files. Accessed by DIRECTORY_files() of the header: {name, text} sorted by name.
function(tessera_embed target directory ending namespace header)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${directory}/*.${ending})
  list(SORT files)
  set(entries "")
  foreach(file IN LISTS files)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    get_filename_component(name ${file} NAME_WE)
    file(READ ${file} text)
    string(APPEND entries "      {\"${name}\", R\"text(${text})text\"},\n")
  endforeach()
  get_filename_component(name ${directory} NAME)
  string(REPLACE / _ source ${directory})
  set(source ${PROJECT_BINARY_DIR}/embedded_${source}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "// Made of ${directory}/*.${ending}.
#include \"${header}\"

namespace ${namespace} {

const std::vector<EmbeddedFile>& ${name}_files() {
  static const std::vector<EmbeddedFile> files{
@entries@  };
  return files;
}

}  // namespace ${namespace}
")
  target_sources(${target} PRIVATE ${source})
endfunction()

# tessera_embed_bytes(target directory): embeds the bytes of all files between the symbols tessera_NAME_begin and
# tessera_NAME_end, where NAME ends at the first dot. Included by the assembler, without compile time.
function(tessera_embed_bytes target directory)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${directory}/*)
  set(text "// Made of ${directory}.\n")
  foreach(file IN LISTS files)
    get_filename_component(name ${file} NAME_WE)
    string(APPEND text "asm(R\"(
.section .rodata
.globl tessera_${name}_begin, tessera_${name}_end
.hidden tessera_${name}_begin, tessera_${name}_end
tessera_${name}_begin: .incbin \"${file}\"
tessera_${name}_end: .byte 0
.previous)\");\n")
  endforeach()
  get_filename_component(name ${directory} NAME)
  set(source ${PROJECT_BINARY_DIR}/${target}_${name}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "${text}")
  set_source_files_properties(${source} PROPERTIES OBJECT_DEPENDS "${files}" SKIP_PRECOMPILE_HEADERS ON)
  target_sources(${target} PRIVATE ${source})
endfunction()
