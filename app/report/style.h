// How pictures and the page around them look: one list of colours and rules for both, in light and in dark.
#pragma once
#include <string>

namespace tessera::report {

// For a page: the pictures in it and all around them. It is light on paper.
std::string page_style();
// For a picture that stands alone as an SVG file. Of the rules those are there whose classes `body` uses; they have
// their colours in them, since readers of SVG other than browsers know no variables, and again for dark screens.
std::string figure_style(const std::string& body);

}  // namespace tessera::report
