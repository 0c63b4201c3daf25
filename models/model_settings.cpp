// The fields of a model's configuration, one entry each.
#include "models/names.h"
#include "settings/setting.h"

namespace tessera {
namespace {

// A size of a model: it is the preset's where nobody says it, and trained weights have it.
Field size(std::string_view name, std::string_view help, Bounds range = {}) {
  return Field{name, help, range}.follows().for_weights().for_identity(Same::unless_usual);
}
Field of_llama(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("family llama");
}
// Something that a model with experts has.
Field of_experts(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("experts");
}
// A field of experts that belongs to the training: other weights may have been trained with another value.
Field of_routing(std::string_view name, std::string_view help) {
  return Field{name, help, {0, 1e6}}.follows().with("experts").for_identity(Same::unless_usual);
}

void add_rotary(Settings& s, RotaryOptions& r) {
  const std::string_view llama3 = "rope_scaling llama3";
  s.add(r.theta, of_llama("rope_theta", "base of the rotary positions' frequencies [10000]", {1, 1e12}));
  s.add(r.scaling, of_llama("rope_scaling", "way for rotary positions to reach a longer context"));
  s.add(r.factor, of_llama("rope_factor", "with `rope_scaling`: how many times longer the context gets [1]", {1, 1e6}));
  s.add(r.low_freq_factor,
        size("rope_low_freq", "with llama3 scaling: divides frequencies of fewer turns per context [1]", {0, 1e6})
            .with(llama3));
  s.add(r.high_freq_factor,
        size("rope_high_freq", "with llama3 scaling: keeps frequencies of more turns per context [4]", {0, 1e6})
            .with(llama3));
  s.add(r.original_context,
        size("rope_original_context", "with llama3 scaling: the context before it [8192]", {1, 1e9}).with(llama3));
}

void add_experts(Settings& s, ExpertConfig& e) {
  s.add(e.count,
        size("experts", "experts of each layer, in place of its feed-forward layer (mixture of experts); 0: none",
             {0, 1e4}));
  s.add(e.per_token, of_experts("experts_per_token", "with `experts`: how many of them a token goes to [2]", {1, 1e4}));
  s.add(e.shared,
        of_experts("shared_experts",
                   "with `experts`: every token also goes to a layer of so many times their width [0]", {0, 1e4}));
  s.add(e.capacity, of_routing("expert_capacity",
                               "with `experts`: an expert takes at most this many times its even share of a sequence, "
                               "and drops the rest; 0 drops none [0]"));
  s.add(e.softmax, of_experts("router_softmax",
                              "with `experts`: weights are shares among the chosen experts, or among all of them "
                              "[chosen]"));
  s.add(e.balance_loss, of_routing("balance_loss", "with `experts`: weight of the loss that balances them [0.01]"));
  s.add(e.z_loss,
        of_routing("z_loss", "with `experts`: weight of the loss that keeps the router's logits small [0.001]"));
}

void add_adapters(Settings& s, LoraConfig& l) {
  s.add(l.rank, {"lora_rank",
                 "trains adapters of this rank (LoRA) and freezes the model of `init`; 0: trains the whole "
                 "model",
                 {0, 1e6}})
      .for_identity(Same::unless_usual);
  s.add(l.alpha, {"lora_alpha", "scales adapters by alpha / rank; default: the rank", {0, 1e6}}).follows();
  s.add(l.dropout, {"lora_dropout", "probability of dropping an input of an adapter", {0, 1, true}})
      .for_identity(Same::unless_usual);
  s.add(l.rank_stabilised, {"lora_rslora", "scales adapters by alpha / sqrt(rank) instead"});
  s.add(l.targets, {"lora_targets",
                    "layers with adapters, separated by commas, or all; default: q_proj,v_proj, and c_attn for gpt2"})
      .follows()
      .for_identity(Same::unless_usual);
}

}  // namespace

ModelConfig whole_sizes(ModelConfig c) {
  c.kv_heads = c.all_heads().key, c.head_dim = c.head_size(), c.ffn = c.hidden();
  return c;
}

Settings settings_of(ModelConfig& c) {
  Settings s;
  s.group("Model");
  s.add(c.family, size("family", "kind of layers; default: that of `model`"));
  s.add(c.layers, size("layers", "transformer blocks", {1, 100000}).for_identity(Same::yes));
  s.add(c.heads, size("heads", "attention heads; must divide the channels", {1, 1e6}).for_identity(Same::yes));
  s.add(c.kv_heads,
        size("kv_heads", "heads of keys and values (grouped-query attention); must divide the heads", {1, 1e6}));
  s.add(c.head_dim, size("head_dim", "channels of one head; default: channels / heads", {1, 1e6}));
  s.add(c.channels, size("channels", "width of the model", {1, 1e6}).for_identity(Same::yes));
  s.add(c.ffn, size("ffn", "hidden channels of a feed-forward layer, or of an expert; default: 4 times the channels",
                    {1, 1e7}));
  s.add(c.context, {"context", "tokens that the model sees at once", {1, 1e9}}).follows().for_identity(Same::yes);
  s.add(c.vocab, size("vocab", "pads the tokenizer's vocabulary to this size", {1, 1e9}).for_identity(Same::yes));
  s.add(c.tied, size("tied", "gives the head its own table; default: that of the tokens").unless("untied"));
  add_rotary(s, c.rotary);
  s.add(c.qkv_bias, of_llama("qkv_bias", "adds biases to q, k and v in the llama family, as Qwen2 does"));
  s.add(c.qk_norm, of_llama("qk_norm", "normalises each head of q and k, as Qwen3 does"));
  s.add(c.norm_eps, size("norm_eps", "epsilon of the norms [1e-5]", {0, 1}));
  add_experts(s, c.experts);
  s.add(c.dropout, {"dropout", "probability of dropping an activation", {0, 1, true}}).for_identity(Same::yes);
  s.group("Fine-tuning");
  add_adapters(s, c.lora);
  s.add(c.quantize.codec,
        {"quantize",
         "keeps frozen weights of the layers in 4 bits (QLoRA): nf4, or gptq for a model that `tessera "
         "checkpoint quantize` made; default: as `init` has them"})
      .follows()
      .for_identity(Same::unless_usual);
  s.add(c.quantize.group,
        {"quantize_group", "with gptq: columns that share a scale, -1 for all; default: 128", {-1, 1e6}})
      .follows()
      .for_identity(Same::unless_usual);
  return s;
}

}  // namespace tessera
