# tessera_page(target directory): embeds page.html as `kPage` of app/explore/explore.h, with placeholders such as
# {style.css} replaced by the files of that name.
function(tessera_page target directory)
  file(READ ${PROJECT_SOURCE_DIR}/${directory}/page.html page)
  file(GLOB parts CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${directory}/*)
  foreach(part IN LISTS parts)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${part})
    get_filename_component(name ${part} NAME)
    file(READ ${part} text)
    string(REPLACE "{${name}}" "${text}" page "${page}")
  endforeach()
  set(source ${PROJECT_BINARY_DIR}/${target}_page.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "// Made of ${directory}/*.
#include \"app/explore/explore.h\"

namespace tessera::explore {

const std::string_view kPage = R\"page(@page@)page\";

}  // namespace tessera::explore
")
  target_sources(${target} PRIVATE ${source})
endfunction()
