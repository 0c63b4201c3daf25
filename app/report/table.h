// Results as rows and columns, which three writers print: as text, as HTML, and as JSON.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::report {

// Has separate texts for page and text output.
struct Cell {
  Cell(const char* both) : page(both), text(both) {}
  Cell(const std::string& both) : page(both), text(both) {}
  Cell(const std::string& on_page, const std::string& in_text, const std::string& style = "")
      : page(on_page), text(in_text), css(style) {}
  std::string page, text, css = {};
  std::string html = {};                // after the text
  nlohmann::ordered_json in_json = {};  // null: the text
};
inline Cell value_cell(const std::string& text, nlohmann::ordered_json in_json) {
  Cell out(text);
  out.in_json = std::move(in_json);
  return out;
}
struct Column {
  Cell head;
  bool number = false;
  size_t width = 0;  // in text output; 0: only on a page
  bool on_page = true;
  std::string key = {};  // in JSON; empty: not there
};
struct Row {
  static constexpr const char* kHead = "head";
  std::vector<Cell> cells;
  std::string css = {};
  std::string above = {};  // text output: above the row, or in place of the cells of a kHead row
};
struct Table {
  std::string id;
  std::vector<Column> columns;
  std::vector<Row> rows = {};
  std::string above = {};  // text output: lines above and below
  std::string below = {};
  size_t indent = 0;    // in text output, of the rows
  bool fitted = false;  // in text output, columns fit their contents, and the heading is indented like the rows
  std::string title = {};
  std::string note = {};
};

std::string as_text(const Table& table);
std::string as_html(const Table& table);
// A list of objects with the keys of the columns.
nlohmann::ordered_json to_json(const Table& table);

}  // namespace tessera::report
