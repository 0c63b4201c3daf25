# tessera_embed(target folder): the text of every .toml in the folder, in the program itself, so that an installed one needs
# no files: a source with `kFiles` of the folder's header, {name, text} in the order of names.
function(tessera_embed target folder)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.toml)
  list(SORT files)
  set(entries "")
  foreach(file IN LISTS files)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    get_filename_component(name ${file} NAME_WE)
    file(READ ${file} text)
    string(APPEND entries "      {\"${name}\", R\"toml(${text})toml\"},\n")
  endforeach()
  get_filename_component(name ${folder} NAME)
  set(source ${PROJECT_BINARY_DIR}/${target}_${name}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "// Made of ${folder}/*.toml.
#include \"planner/case.h\"

namespace tessera::planner {

const std::vector<File>& ${name}_files() {
  static const std::vector<File> files{
@entries@  };
  return files;
}

}  // namespace tessera::planner
")
  target_sources(${target} PRIVATE ${source})
endfunction()
