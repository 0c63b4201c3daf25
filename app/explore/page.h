// The page that `explore` serves: HTML with its style and script inside, made of the files in app/explore/page/.
#pragma once
#include <string_view>

namespace tessera::explore {

extern const std::string_view kPage;

}  // namespace tessera::explore
