// Chat templates: the language against python3-jinja2, its bounds, and models' own templates applied to examples.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "data/jinja/template.h"
#include "tests/data/support.h"
#include "tests/support/python.h"

namespace tessera {
namespace {

jinja::Value from_json(jinja::RenderContext& work, const nlohmann::ordered_json& json) {
  if (json.is_null()) return jinja::None{};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_number()) return json.get<int64_t>();
  if (json.is_string()) return json.get<std::string>();
  jinja::Values items;
  jinja::Pairs pairs;
  for (const auto& [key, value] : json.items()) {
    items.push_back(from_json(work, value));
    pairs.emplace_back(key, items.back());
  }
  return json.is_array() ? make_sequence(work, items) : make_dict(work, pairs);
}

std::string rendered(const std::string& source, const nlohmann::ordered_json& variables) {
  const jinja::Template made(source, "t");
  jinja::RenderContext work;
  jinja::Variables given;
  for (const auto& [name, value] : variables.items()) given.emplace_back(name, from_json(work, value));
  return made.render(work, given).text;
}

// A template, its text or error, and its variables.
struct Case {
  std::string source, result;
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
};
void expect_refused(const std::vector<Case>& cases) {
  for (const Case& c : cases)
    EXPECT_EQ(error_message([&] { rendered(c.source, c.variables); }, Status::input), c.result)
        << c.source.substr(0, 200);
}

TEST(Jinja, MatchesPythonJinja2) {
  if (const std::string why = test::missing("jinja2"); !why.empty()) GTEST_SKIP() << why;
  const std::filesystem::path source(TESSERA_SOURCE_DIR);
  const test::Exchange exchange;
  exchange.run(source / "tests/compare/chat_templates.py",
               "'" + (source / "tests/data/fixtures/templates").string() + "' 2000 1");
  std::ifstream file(exchange.path("cases.jsonl"));
  int cases = 0, texts = 0, refused = 0;
  for (std::string line; std::getline(file, line); ++cases) {
    const auto one = nlohmann::ordered_json::parse(line);
    SCOPED_TRACE(one["template"].get<std::string>() + "\n" + one["error"].get<std::string>());
    try {
      const std::string text = rendered(one["template"], one["variables"]);
      ++texts;
      EXPECT_EQ(nlohmann::ordered_json(text), one["text"]);
    } catch (const InputError& e) {
      EXPECT_TRUE(one["text"].is_null() || has(e.what(), "supported") || has(e.what(), "unknown") ||
                  has(e.what(), "not defined") || has(e.what(), "cannot ") || has(e.what(), "unexpected"))
          << e.what();
      refused += one["text"].is_null() ? 0 : 1;
    }
  }
  EXPECT_GE(cases, 3900);
  EXPECT_GE(texts, 2900) << "most of the templates produce a text";
  EXPECT_LE(refused, 20) << "few templates are unsupported";
}

// Similar cases with expected results in the source, for machines without Python.
TEST(Jinja, RendersLikeJinja2) {
  const std::vector<Case> cases = {
      {"  {% if true %}\n a\n  {%- endif %}\n{# c #}\nb\n", " ab"},
      {"{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ ',' if not loop.last }}{% else "
       "%}"
       "none{% endfor %}",
       "1/2:1,2/2:3"},
      {"{{ 7 // -2 }} {{ 7 % -2 }} {{ 2 * 3 + 2 }} {{ not 2 < 1 }} {{ 'abc'[::-1] }} {{ [1, 'a', none, 2.0] }}",
       "-4 -1 8 True cba [1, 'a', None, 2.0]"},
      {"{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x %}{% set y = 1 %}{% endfor %}{{ ns.n }}"
       "{{ y is defined }}",
       "3False",
       {{"xs", {1, 2}}}},
      {"{% macro m(a, b='x') %}<{{ a }}{{ b }}{{ caller is defined }}>{% endmacro %}{{ m(1) ~ m(2, b=3) }}",
       "<1xFalse><23False>"},
      {"{% set x = {'a': '<'} | tojson | safe %}{{ x }}{{ x ~ '>' }}{{ x is string }}",
       "{\"a\": \"<\"}{\"a\": \"<\"}>True"},
      {"{{ {'b': ['<é>', 1.5], 'a': none} | tojson }}{{ {'a': 1} | tojson(indent=1) }}",
       "{\"b\": [\"<é>\", 1.5], \"a\": null}{\n \"a\": 1\n}"},
      {"{{ missing }}{{ missing | default('d') }}{{ m.content.strip().split(',')[-1] }}",
       "db",
       {{"m", {{"content", " a,b "}}}}}};
  for (const Case& c : cases) EXPECT_EQ(rendered(c.source, c.variables), c.result) << c.source;
}

TEST(Jinja, ErrorsNameTemplateLine) {
  expect_refused(
      {{"a\nb\n{{ x | nosuch }}", "t:3: unknown filter 'nosuch'"},
       {"{{ x is nosuch }}", "t:1: unknown test 'nosuch'"},
       {"\n{% include 'x' %}", "t:2: unexpected statement 'include'"},
       {"\n\n{% if x %}\n", "t:3: expected 'endif', got 'the end'"},
       {"{{ a\nb }}", "t:2: expected the end of the tag, got 'b'"},
       {"{{ 'a", "t:1: a string is not closed"},
       {"\n{{ x.y }}", "t:2: 'x' is undefined"},
       {"{% for m in ms %}\n{{ m.a.b }}{% endfor %}",
        "t:2: 'a' is undefined",
        {{"ms", {nlohmann::ordered_json::object()}}}},
       {"{{ xs.append(1) }}", "t:1: 'append' is called but not defined", {{"xs", {1}}}},
       {"{{ raise_exception('no\nway') }}", "t:1: the template raises an error: no\\x0away"},
       {"{{ [1] | map('string') }}", "t:1: an iterator cannot be printed; expected a string, or |list after it"},
       {"{% set x = '<' | safe %}\n{{ x + '>' }}",
        "t:2: a string marked as `safe` may only be printed or joined with ~"},
       {"{{ '<' | safe | upper }}", "t:1: 'upper' is not supported on a string marked as `safe`"},
       {"{{ '%s' % 1 }}", "t:1: the operator % of a string and an integer is not supported"},
       {"{{ {1: 2} }}", "t:1: an integer is not supported as a key"},
       {"{{ false[1:] }}", "t:1: a slice of a boolean and an integer is not supported"},
       {"{{ 'a b'.rsplit(' ') }}", "t:1: 'rsplit' is called but not defined"},
       {"{{ 1 < 2 < 3 }}", "t:1: chained comparisons are not supported"},
       {"{{ '4.7' | int }}", "t:1: cannot convert a string to an integer"},
       {"{{ 9223372036854775807 + 1 }}", "t:1: an integer does not fit in 64 bits"}});
  for (const std::string word : {"call m()", "filter upper", "with x = 1", "raw", "extends 'x'", "import 'x' as y",
                                 "from 'x' import y", "block b", "trans", "do x", "autoescape true"})
    expect_refused({{"{% " + word + " %}", "t:1: unexpected statement '" + word.substr(0, word.find(' ')) + "'"}});
}

// Bounds on nesting of the template's text, of its values and of its calls, and on work.
TEST(Jinja, LimitsNestingAndWork) {
  const auto repeated = [](const std::string& text, int times) {
    std::string out;
    for (int i = 0; i < times; ++i) out += text;
    return out;
  };
  const std::string deep = "t:1: nested too deeply, or infinite recursion of a macro",
                    much = "t:1: a tag is too complex",
                    work = "t:1: exceeds the limits on work or output of a template";
  expect_refused(
      {{"{{ " + repeated("(", 10000) + repeated(")", 10000) + " }}", deep},
       {"{{ " + repeated("not ", 100000) + " }}", deep},
       {repeated("{% if x %}", 100000), deep},
       {"{{ 1" + repeated(" + 1", 100000) + " }}", much},
       {"{{ x" + repeated("[0]", 100000) + " }}", much},
       {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", deep},
       {"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", work},
       {"{{ 'a' * 1000000000000 }}", work},
       {"{{ 'ab' * 9223372036854775807 }}", work},
       {"{% set ns = namespace(s='aaaa') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", work},
       {"{% set ns = namespace(s=[1]) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        work},
       {"{% set ns = namespace(s=[1]) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
        "{{ ns.s == ns.s + [] }}",
        work},
       {"{% set ns = namespace(s=[1]) %}{% for a in range(200) %}{% set ns.s = [ns.s] %}{% endfor %}",
        "t:1: values are nested deeper than 100"},
       {"{{ range(100001) }}", "t:1: a range of more than 100000 items"}});
}

// A tokenizer for chats with a template.
class ModelTemplates : public testing::Test {
 protected:
  static ModelTemplate with(const std::string& jinja) {
    const nlohmann::json tokenizer = chat_tokenizer(), config = {{"chat_template", jinja},
                                                                 {"eos_token", "<|im_end|>"},
                                                                 {"bos_token", {{"content", "<|im_start|>"}}}};
    return ModelTemplate(
        HubTokenizer({{"tokenizer.json", tokenizer.dump()}, {"tokenizer_config.json", config.dump()}}, "t/"));
  }
  // Responses in brackets, and plain text in quotes.
  static std::string shown(const std::vector<Segment>& segments) {
    std::string out;
    for (const Segment& p : segments) {
      const std::string text = p.kind == Segment::Kind::text ? "'" + p.text + "'" : p.text;
      out += p.never ? "{" + text + "}" : p.response ? "[" + text + "]" : text;
    }
    return out;
  }
  static std::string refused(const ModelTemplate& t, const Example& example) {
    return error_message([&] { t.render(example, "f:7"); }, Status::input);
  }
  const Example conversation_ = {
      Example::Shape::messages,
      {{Role::user, "a"}, {Role::assistant, "b "}, {Role::user, "c"}, {Role::assistant, "d"}}};
};

TEST_F(ModelTemplates, ResponsesEqualTextAddedByTurns) {
  const ModelTemplate chatml = with(
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
      "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}");
  EXPECT_EQ(shown(chatml.render(conversation_, "f:7")),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b <|im_end|>]\n<|im_start|>user\nc<|im_end|>\n"
            "<|im_start|>assistant\n[d<|im_end|>]\n");
  EXPECT_EQ(shown(chatml.prompt({{Role::system, "s"}, {Role::user, "a"}}, "f:7")),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  // Names of special tokens in a message are plain text.
  EXPECT_EQ(shown(chatml.render(
                {Example::Shape::messages, {{Role::user, "x<|im_end|>y"}, {Role::assistant, "<|im_end|"}}}, "f:7")),
            "<|im_start|>user\nx'<|im_end|>'y<|im_end|>\n<|im_start|>assistant\n[<|im_end|<|im_end|>]\n");
  EXPECT_EQ(refused(chatml, {Example::Shape::messages, {{Role::user, "\uFDD0"}}}),
            "f:7: a message contains a noncharacter, U+FDD0 or U+FDD1");
}

TEST_F(ModelTemplates, GenerationBlocksMarkResponses) {
  const ModelTemplate marked = with(
      "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content if loop.last else '...' }}"
      "{% endgeneration %};{% else %}{{ m.content }} {% endif %}{% endfor %}");
  EXPECT_EQ(shown(marked.render(conversation_, "f:7")), "a A:[...];c A:[d];");
}

// A message of weight 0 (in braces) is not trained on, nor is a prompt that is a list of messages.
TEST_F(ModelTemplates, LocatesUntrainedTurns) {
  const std::string row = R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
      "weight": 0}, {"role": "user", "content": "c", "weight": 0}, {"role": "assistant", "content": "d"}]})";
  const std::string list = R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
      {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]})";
  const std::string turns = "{% for m in messages %}{{ m.role[0] }}:";
  const ModelTemplate bare = with(turns + "{{ m.content }};{% endfor %}");
  const ModelTemplate marked = with(turns +
                                    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
                                    "{% endgeneration %};{% else %}{{ m.content }};{% endif %}{% endfor %}");
  EXPECT_EQ(shown(bare.render(parse_example(row, "f:1"), "f:1")), "u:a;{a:b;}u:c;[a:d;]");
  EXPECT_EQ(shown(bare.render(parse_example(list, "f:1"), "f:1")), "u:a;a:b;u:c;[a:d;]");
  EXPECT_EQ(shown(marked.render(parse_example(row, "f:1"), "f:1")), "u:a;{a:b;}u:c;a:[d];");
  EXPECT_EQ(shown(marked.render(parse_example(list, "f:1"), "f:1")), "u:a;a:b;u:c;a:[d];");
}

// If all of a text is trained on, no turn must be located.
TEST_F(ModelTemplates, FullTextTrainingRequiresNoTurnPositions) {
  const ModelTemplate last = with("{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}");
  EXPECT_EQ(refused(last, conversation_),
            "f:7: message 2: the chat template prints its text never; expected once and unmodified, or generation "
            "blocks in the template");
  EXPECT_EQ(shown(last.render(conversation_, "f:7", false)), "-;-;-;d;");
}

// Messages are passed on as in transformers 5.24: a null key is omitted, thoughts have one name.
TEST_F(ModelTemplates, NormalizesReasoningKeys) {
  const ModelTemplate thinks =
      with("{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.content is defined }};{% endfor %}");
  for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
    const std::string row = fmt::format(R"({{"messages": [{{"role": "assistant", "content": "b", "{}": "x"}}]}})", key);
    EXPECT_EQ(shown(thinks.render(parse_example(row, "f:1"), "f:1", false)), "x/x/True;") << key;
  }
  const std::string calls = R"({"messages": [{"role": "assistant", "content": null, "tool_calls": [1]}]})";
  EXPECT_EQ(shown(thinks.render(parse_example(calls, "f:1"), "f:1", false)), "//False;");
}

TEST_F(ModelTemplates, RejectsPartialSpecialTokenNames) {
  const Example cut = {Example::Shape::messages, {{Role::assistant, "x<|im_end|>y"}}};
  const std::string message = "f:7: the chat template prints only part of a special token's name in a message";
  EXPECT_EQ(refused(with("{% for m in messages %}{{ m.content.split('im_end')[0] }}{% endfor %}"), cut), message);
  EXPECT_EQ(refused(with("{% for m in messages %}{{ m.content.split('im_end')[1] }}{% endfor %}"), cut), message);
  const std::string large = R"({"messages": [{"role": "assistant", "content": "b"}], "tools": [18446744073709551615]})";
  EXPECT_EQ(refused(with("{{ tools }}"), parse_example(large, "f:1")),
            "f:7: the integer 18446744073709551615 is too large");
}

// Rows in the format of OpenAI's function calling: calls without content, arguments as a string, answers of tools.
// Templates read arguments as mappings, so vLLM parses them before it renders.
TEST_F(ModelTemplates, PassesToolsToTheTemplate) {
  const ModelTemplate tools = with(
      "{{ tools | tojson }}\n{% for m in messages %}{{ m.role }}{{ '/' + m.name if m.name }}:{% if m.content is "
      "undefined %}"
      "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% else %}"
      "{{ m.content }}{% endif %};{% endfor %}");
  const std::string row = R"({"messages": [{"role": "user", "content": "a", "name": "<|im_end|>"},
      {"role": "assistant", "content": null, "refusal": null, "tool_calls": [{"id": "1", "type": "function",
       "function": {"name": "f", "arguments": "{\"z\": [1, 2.0], \"a\": null}"}}]},
      {"role": "tool", "content": "t", "tool_call_id": "1"}, {"role": "assistant", "content": "b"}],
      "tools": [{"type": "function", "function": {"name": "f", "a": 1}}], "parallel_tool_calls": false})";
  const Example example = parse_example(row, "f:1");
  EXPECT_EQ(shown(tools.render(example, "f:1")),
            "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"a\": 1}}]\nuser/'<|im_end|>':a;"
            "[assistant:f({\"z\": [1, 2.0], \"a\": null});]tool:t;[assistant:b;]");
  EXPECT_THROW(render(example, ChatTemplate::chatml, "f:1"), InputError);
  const std::string twice = R"({"messages": [{"role": "assistant", "tool_calls": [{"id": 1, "id": 2}]}]})";
  EXPECT_THROW(parse_example(twice, "f:1"), InputError) << "a duplicate key cannot be read";
}

// Templates like those of Qwen3 (an empty thought only in the last turn, thoughts of earlier turns removed), Phi-3 (an
// additional end token after the last turn), gpt-oss (a different end token after the last turn) and R1 (the generation
// prompt begins a thought).
TEST_F(ModelTemplates, LocatesResponsesWithoutCommonPrefix) {
  const std::string user = "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% else %}A:";
  const std::string asks = "{% endif %}{% endfor %}{% if add_generation_prompt %}A:";
  const auto rendered = [&](const std::string& answer, const std::string& ending, const Example& example) {
    return shown(with(user + answer + asks + ending).render(example, "f:7"));
  };
  const std::string thinks =
      "{% if loop.last and '</think>' not in m.content %}<think></think>{% endif %}"
      "{{ m.content if loop.last else m.content.split('</think>')[-1] }}";
  Example thought = conversation_;
  thought.turns[1].text = "<think>x</think>b", thought.turns[3].text = "<think>y</think>d";
  EXPECT_EQ(rendered(thinks + "<|im_end|>\n", "{% endif %}", conversation_),
            "<|im_start|>aA:[b <|im_end|>]\n<|im_start|>cA:[<think></think>d<|im_end|>]\n");
  EXPECT_EQ(rendered(thinks + "<|im_end|>\n", "{% endif %}", thought),
            "<|im_start|>aA:[b<|im_end|>]\n<|im_start|>cA:[<think>y</think>d<|im_end|>]\n");
  EXPECT_EQ(rendered(thinks + "<|im_end|>\n", "<think></think>{% endif %}", thought),
            "<|im_start|>aA:[b<|im_end|>]\n<|im_start|>cA:<think>[y</think>d<|im_end|>]\n");
  EXPECT_EQ(rendered("{{ m.content }}<|im_end|>\n", "{% else %}</s>{% endif %}", conversation_),
            "<|im_start|>aA:[b <|im_end|>]\n<|im_start|>cA:[d<|im_end|>\n</s>]");
  EXPECT_EQ(rendered("{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}", "{% endif %}", conversation_),
            "<|im_start|>aA:[b <|im_end|>]<|im_start|>cA:[d</s>]");
  // A call without text, in a turn with an empty thought only at the end.
  Example calls = conversation_;
  calls.turns[1] = {.role = Role::assistant, .text = "", .more = R"({"tool_calls": [1]})", .silent = true};
  const std::string call =
      "{% if loop.last %}<t></t>{% endif %}{{ m.content }}{% if m.tool_calls %}"
      "{{ '\\n' if m.content }}call{% endif %}<|im_end|>\n";
  EXPECT_EQ(rendered(call, "{% endif %}", calls),
            "<|im_start|>aA:[call<|im_end|>]\n<|im_start|>cA:[<t></t>d<|im_end|>]\n");
  EXPECT_NE(refused(with(user + "{{ m.content + m.content }}{{ loop.last }};" + asks + "{% endif %}"), conversation_)
                .find("f:7: message 2: the chat template prints its text more than once"),
            std::string::npos);
}

TEST_F(ModelTemplates, PropagatesTemplateErrors) {
  const ModelTemplate strict =
      with("{% if messages[0].role != 'system' %}\n{{ raise_exception('no system') }}{% endif %}");
  EXPECT_EQ(refused(strict, conversation_), "f:7: chat_template:2: the template raises an error: no system");
  EXPECT_THROW(with("{{ messages | nosuch }}"), InputError);
}

}  // namespace
}  // namespace tessera
