// Results of an audit as text, JSON, an HTML page and an SVG figure. `head` describes the recording and the reference,
// one line each.
#pragma once
#include <string>
#include <string_view>

#include "verify/audit/compare.h"

namespace tessera {

std::string_view to_string(audit::Verdict verdict);
// "grad of model.norm.weight, rank 1, elements [0, 16)"
std::string location_text(const audit::Divergence& divergence);
std::string audit_text(const audit::AuditResult& result, const std::string& head);
// One line; docs/audit.md describes the keys.
std::string audit_json(const audit::AuditResult& result);

// Matrices of tensors by layers, one per kind of tensor. Colour: error over tolerance.
std::string audit_page(const audit::AuditResult& result, const std::string& head);
std::string audit_figure(const audit::AuditResult& result, const std::string& head);

}  // namespace tessera
