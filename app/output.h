// Standard output as a product: what cannot be written there is an error, unless the reader has closed it.
#pragma once
#include <string_view>

namespace tessera {

// Writes the text to standard output at once. False when its reader is gone (`| head -1`), which is the reader's
// choice and no error. Throws OutputError for anything else, such as a full disk.
bool print(std::string_view text);

// Opens /dev/null where descriptor 0, 1 or 2 is closed, before a file gets its number and with it what is printed.
void open_standard_descriptors();

}  // namespace tessera
