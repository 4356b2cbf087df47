// approx-prefix-cache-producer: a real index behind its real producer, filled by real dispatches.
// precise-prefix-cache-producer: a real index, filled by events.
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tokroute/prefix/approximate_prefix.h"
#include "tokroute/router.h"
#include "tools/conformance/case_runners.h"
#include "tools/conformance/feeders.h"
#include "tools/conformance/llmd_params.h"

namespace tokroute::conformance {
namespace {

// A case needs something that does not exist yet.
struct NotYet {
  std::string what;
};

class PrefixSequence {
 public:
  explicit PrefixSequence(llmd::ApproximatePrefixParams params) : params_(params) {}

  Json Run(const std::string& kind, const Json& step) {
    Json actual = Json::object();
    if (kind == "produce") {
      actual["match"] = Produce(step);
    } else if (kind == "routed") {
      Routed(step);
    } else if (kind == "endpointGone") {
      (void)fleet_.Remove(fleet_.Find(step.at("endpoint").get<std::string>()));
    } else {
      throw std::invalid_argument("no such step: " + kind);
    }
    if (const absl::Status audit = index_->Audit(); !audit.ok()) throw std::runtime_error(std::string(audit.message()));
    actual["lruEntries"] = HeldBlocks();
    return actual;
  }

 private:
  struct Prompt {
    std::vector<TokenId> tokens;
    std::string model, salt;
    Request AsRequest() const { return {.tokens = tokens, .model = model, .cache_salt = salt}; }
  };

  // One index has one block size, so it is made when the first candidates have said theirs.
  //
  // The vectors' smallest blocks are smaller than an index takes. Such a case is run with every token repeated and
  // every block as many times as large, which keeps full blocks full, partial ones partial and equal prefixes equal.
  void Make(const Json& endpoints) {
    const Json first = endpoints.empty() ? Json::object() : endpoints[0];
    block_size_ = params_.BlockSize(IntegerOr(ChildOr(first, "metrics"), "cacheBlockSizeTokens", 0));
    repeat_ = block_size_ >= kMinBlockSize ? 1 : (kMinBlockSize + block_size_ - 1) / block_size_;
    const auto index = PrefixIndex::Create(params_.IndexOptions(block_size_ * repeat_));
    if (!index.ok()) throw std::invalid_argument(std::string(index.status().message()));
    index_ = *index;
    auto router =
        MakeRouter(fleet_, {}, Producers(ApproximatePrefix(index_)), Named("look", Policy(MatchReader(found_))),
                   Named("serve", Policy(ToldPicker(primary_))), Named("prefill", Policy(ToldPicker(prefill_))));
    if (!router.ok()) throw std::invalid_argument(std::string(router.status().message()));
    router_.emplace(*std::move(router));
  }

  Prompt ReadPrompt(const Json& step) const {
    const Json& prompts = step.at("prompts");
    if (prompts.size() != 1) throw NotYet{"several prompts in one request"};
    const std::vector<TokenId> given = ReadTokens(prompts[0]);
    const std::int64_t most = params_.MaxMatchTokens(block_size_);
    if (most >= 0 && static_cast<std::int64_t>(given.size()) > most)
      throw NotYet{"a cap on the prefix that is looked at"};
    // A cap below one block stops llm-d from looking at any.
    if (most >= 0 && most < block_size_) throw NotYet{"a cap on the prefix that is looked at"};
    Prompt prompt{.tokens = {}, .model = TextOr(step, "model", ""), .salt = TextOr(step, "cacheSalt", "")};
    for (const TokenId token : given)
      prompt.tokens.insert(prompt.tokens.end(), static_cast<std::size_t>(repeat_), token);
    return prompt;
  }

  Json Produce(const Json& step) {
    const Json& endpoints = step.at("endpoints");
    if (!router_) Make(endpoints);
    std::map<EndpointId, std::string> candidates;
    for (const Json& endpoint : endpoints) {
      const std::string name = endpoint.at("name").get<std::string>();
      if (fleet_.Find(name).incarnation == 0) {
        const std::int64_t blocks = IntegerOr(ChildOr(endpoint, "metrics"), "cacheNumBlocks", 0);
        const std::int64_t capacity = params_.CapacityTokens(block_size_ * repeat_, blocks);
        const auto id = fleet_.Add({.endpoint_name = name, .capacity = capacity});
        if (!id.ok()) throw std::invalid_argument(std::string(id.status().message()));
      }
      candidates[fleet_.Find(name)] = name;
    }
    std::vector<EndpointId> exclude;
    for (const EndpointId id : fleet_.Ids()) {
      if (!candidates.contains(id)) exclude.push_back(id);
    }

    const Prompt& prompt = prompts_[step.at("requestId").get<std::string>()] = ReadPrompt(step);
    const Evaluation evaluation = router_->Evaluate(prompt.AsRequest(), {.policy = "look", .exclude = exclude});
    if (!evaluation.ok()) throw std::runtime_error("refused: " + evaluation.ToString());
    PromptKeys keys;
    PrefixMatch match;
    keys.Reset(index_->key_options(), prompt.AsRequest());
    index_->Match(keys, match);
    // In the case's units again.
    const std::int64_t index_block_size = index_->options().block_size;
    Json matches = Json::object();
    for (const MatchReader::Found& found : *found_) {
      const EndpointId id = IdInRow(found.row);
      if (found.matched_tokens % index_block_size != 0)
        throw std::runtime_error("matched tokens that are no whole blocks");
      matches[candidates.at(id)] = {{"matchBlocks", found.matched_tokens / index_block_size},
                                    {"totalBlocks", match.prompt_blocks()},
                                    {"blockSizeTokens", index_block_size / repeat_}};
    }
    return matches;
  }

  EndpointId IdInRow(Row row) const {
    for (const EndpointId id : fleet_.Ids()) {
      if (id.slot == row) return id;
    }
    throw std::runtime_error("a candidate that is not in the fleet");
  }

  // The index learns at booking and is sure once the response has ended; a vector states what it holds then.
  void Routed(const Json& step) {
    std::vector<LegPolicy> legs = {{Leg::kServe, "serve"}};
    *primary_ = fleet_.Find(step.at("primary").get<std::string>()).slot;
    if (step.contains("prefill")) {
      *prefill_ = fleet_.Find(step.at("prefill").get<std::string>()).slot;
      legs.push_back({Leg::kPrefill, "prefill"});
    }
    const Prompt& prompt = prompts_.at(step.at("requestId").get<std::string>());
    auto routed = router_->Route(prompt.AsRequest(), {.legs = legs});
    if (!routed.ok()) throw std::runtime_error("refused: " + routed.refusal().ToString());
    routed->FirstToken();
    routed->Finish();
  }

  Json HeldBlocks() const {
    Json held = Json::object();
    for (const EndpointId id : fleet_.Ids()) held[fleet_.Get(id)->endpoint_name] = index_->HeldBlocks(id);
    return held;
  }

  const llmd::ApproximatePrefixParams params_;
  std::int64_t block_size_ = 0, repeat_ = 1;
  Fleet<NamedEndpoint> fleet_;
  std::shared_ptr<PrefixIndex> index_;
  std::shared_ptr<std::vector<MatchReader::Found>> found_ = std::make_shared<std::vector<MatchReader::Found>>();
  std::shared_ptr<Row> primary_ = std::make_shared<Row>(0), prefill_ = std::make_shared<Row>(0);
  std::optional<Router<NamedEndpoint>> router_;
  std::map<std::string, Prompt> prompts_;
};

}  // namespace

Result RunApproximatePrefixSequence(const Json& one_case) {
  absl::StatusOr<llmd::ApproximatePrefixParams> params = llmd::ApproximatePrefixProducer(ChildOr(one_case, "params"));
  if (!params.ok()) return Result::Of(params.status());
  params->min_block_size_tokens =
      IntegerOr(ChildOr(one_case, "testOverrides"), "minBlockSizeTokens", params->min_block_size_tokens);
  PrefixSequence sequence(*params);
  std::size_t number = 0;
  try {
    for (const Json& step : one_case.at("steps")) {
      ++number;
      if (step.size() != 1 + step.count("expect")) throw std::invalid_argument("a step that is not one action");
      for (const auto& item : step.items()) {
        if (item.key() == "expect") continue;
        const std::string found = Disagreement(ChildOr(step, "expect"), sequence.Run(item.key(), item.value()));
        if (!found.empty()) return Result::Failed(absl::StrCat("step ", number, " (", item.key(), "): ", found));
      }
    }
  } catch (const NotYet& missing) {
    return Result::Skipped(missing.what);
  }
  return {};
}

Result RunPrecisePrefixMatch(const Json& one_case) {
  const absl::StatusOr<llmd::PrecisePrefixParams> params = llmd::PrecisePrefixProducer(ChildOr(one_case, "params"));
  if (!params.ok()) return Result::Of(params.status());
  const auto made = PrefixIndex::Create(params->IndexOptions());
  if (!made.ok()) return Result::Of(made.status());
  PrefixIndex& index = **made;

  // The vectors say who holds each block of a prompt, not what is in it.
  const Json& blocks = one_case.at("index");
  std::vector<TokenId> tokens(static_cast<std::size_t>(one_case.at("request").at("promptBlocks").get<std::int64_t>() *
                                                       params->block_size_tokens));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i);
  PromptKeys prompt;
  prompt.Reset(index.key_options(), {.tokens = tokens});
  const std::span<const BlockKey> keys = prompt.Ensure(prompt.block_count());
  std::map<std::string, EndpointId> endpoints;
  std::map<StorageTier, std::string> tier_names;
  std::map<std::string, std::size_t> speculative;  // How many blocks of an endpoint, from the first on.
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (const Json& holder : blocks[i]) {
      const std::string name = holder.at("endpoint").get<std::string>();
      const auto number = static_cast<std::uint32_t>(endpoints.size());
      const EndpointId id = endpoints.emplace(name, EndpointId{number, 1}).first->second;
      if (holder.value("speculative", false)) {
        if (speculative[name]++ != i) throw std::invalid_argument("speculative blocks that are no prefix");
        continue;
      }
      const std::string tier = holder.at("tier").get<std::string>();
      tier_names[llmd::PrecisePrefixParams::Tier(tier)] = tier;
      const KvResult result = index.Stored({id, llmd::PrecisePrefixParams::Tier(tier)},
                                           i > 0 ? std::optional(keys[i - 1]) : std::nullopt, keys.subspan(i, 1));
      // The vectors' gaps are blocks whose parents nobody may hold.
      if (result != KvResult::kApplied && result != KvResult::kUnknownParent) {
        throw std::runtime_error(absl::StrCat("event refused, result ", static_cast<int>(result)));
      }
    }
  }
  for (const auto& [name, count] : speculative) {
    PromptKeys part;
    part.Reset(index.key_options(), {.block_keys = keys.first(count), .block_size = index.options().block_size});
    if (!index.Record(endpoints.at(name), part, nullptr)) throw std::runtime_error("speculation refused");
  }

  PrefixMatch match;
  index.Match(prompt, match);
  Json actual = Json::object();
  for (const auto& [name, id] : endpoints) {
    Json& endpoint = actual[name] = {{"matchBlocks", 0},
                                     {"cachedBlocks", 0},
                                     {"cachedBlocksByTier", Json::object()},
                                     {"totalBlocks", match.prompt_blocks()},
                                     {"blockSizeTokens", index.options().block_size}};
    for (const PrefixMatch::Holder& holder : match.holders()) {
      if (holder.endpoint != id) continue;
      endpoint["matchBlocks"] = llmd::PrecisePrefixParams::WholeBlocks(holder.weighted_blocks);
      endpoint["cachedBlocks"] = holder.blocks;
      for (const auto& [tier, tier_name] : tier_names) {
        const std::int32_t held = holder.tier_blocks[static_cast<std::size_t>(tier)];
        if (held > 0) endpoint["cachedBlocksByTier"][tier_name] = held;
      }
      if (holder.tier_blocks[kStorageTiers] > 0)
        endpoint["cachedBlocksByTier"]["speculative"] = holder.tier_blocks[kStorageTiers];
    }
  }
  if (const absl::Status audit = index.Audit(); !audit.ok()) return Result::Of(audit);
  return Result::Of(Disagreement(one_case.at("expect").at("match"), actual));
}

}  // namespace tokroute::conformance
