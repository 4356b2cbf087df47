// inflight-load-producer: the ledger of a real router, through the tickets of real dispatches.
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/load/in_flight_load.h"
#include "tokroute/router.h"
#include "tools/conformance/case_runners.h"
#include "tools/conformance/feeders.h"
#include "tools/conformance/llmd_params.h"

namespace tokroute::conformance {
namespace {

class LoadSequence {
 public:
  static absl::StatusOr<std::unique_ptr<LoadSequence>> Create(const Json& params) {
    const absl::StatusOr<llmd::InFlightLoadParams> mapped = llmd::InFlight(params);
    if (!mapped.ok()) return mapped.status();
    auto sequence = std::unique_ptr<LoadSequence>(new LoadSequence);
    const auto told = [&](Leg leg) { return Policy(ToldPicker(sequence->wanted_[static_cast<std::size_t>(leg)])); };
    auto router = MakeRouter(
        sequence->fleet_, {}, Producers(PrefixFeeder(sequence->prefixes_), InFlightLoad(mapped->options)),
        Named("serve", told(Leg::kServe)), Named("prefill", told(Leg::kPrefill)), Named("decode", told(Leg::kDecode)));
    if (!router.ok()) return llmd::InLlmdTerms(router.status());
    sequence->router_ = std::make_unique<Router<NamedEndpoint>>(*std::move(router));
    return sequence;
  }

  // One step's results: the counters, and what the step itself found.
  Json Run(const std::string& kind, const Json& step) {
    Json actual = Json::object();
    if (kind == "endpointAdded") {
      Add(step.at("endpoint").get<std::string>(), IntegerOr(step, "generation", 0));
    } else if (kind == "endpointRemoved") {
      const Key key{step.at("endpoint").get<std::string>(), IntegerOr(step, "generation", 0)};
      (void)fleet_.Remove(added_.at(key));
    } else if (kind == "project") {
      actual["uncachedRequestTokens"] = Project(step);
    } else if (kind == "dispatch") {
      Dispatch(step);
    } else if (kind == "responseChunk") {
      for (const Ticket<NamedEndpoint>& ticket : tickets_.at(step.at("requestId").get<std::string>())) {
        if (step.at("first").get<bool>()) ticket.FirstToken();
        if (step.at("last").get<bool>()) ticket.Finish();
      }
    } else if (kind == "reap") {
      // There is no reaper; a gateway that wants one sets deadlines.
      for (const Ticket<NamedEndpoint>& ticket : tickets_.at(step.at("requestId").get<std::string>())) {
        ticket.Deadline(std::chrono::nanoseconds(1));
      }
      (void)router_->Expire(std::chrono::nanoseconds(1));
    } else {
      throw std::invalid_argument("no such step: " + kind);
    }
    if (const absl::Status audit = router_->Audit(); !audit.ok())
      throw std::runtime_error(std::string(audit.message()));
    actual["inflight"] = InFlight();
    return actual;
  }

 private:
  using Key = std::pair<std::string, std::int64_t>;  // Name and generation.

  LoadSequence() : prefixes_(std::make_shared<PrefixFeeder::Table>()) {
    for (auto& row : wanted_) row = std::make_shared<Row>(0);
  }

  void Add(const std::string& name, std::int64_t generation) {
    const absl::StatusOr<EndpointId> id = fleet_.Add({.endpoint_name = name});
    if (!id.ok()) throw std::invalid_argument(std::string(id.status().message()));
    added_[{name, generation}] = *id;
  }

  // The row of an endpoint of a step, added if the sequence did not say so before, with what the step says it holds of
  // the prompt.
  Row RowOf(const Json& endpoint) {
    const std::string name = endpoint.at("name").get<std::string>();
    if (fleet_.Find(name).incarnation == 0) Add(name, 0);
    const Row row = fleet_.Find(name).slot;
    if (prefixes_->size() <= row) prefixes_->resize(row + 1);
    const Json& prefix = ChildOr(endpoint, "prefix");
    EndpointInputs& held = (*prefixes_)[row];
    held = {};
    held.matched_tokens = IntegerOr(prefix, "matchBlocks", 0) * IntegerOr(prefix, "blockSizeTokens", 0);
    held.weighted_matched_tokens = static_cast<double>(held.matched_tokens);
    return row;
  }

  static Request RequestOf(const Json& step) {
    return {.prompt_tokens = IntegerOr(step, "promptTokens", 0),
            .max_output_tokens = llmd::ClientMaxOutputTokens(IntegerOr(step, "clientMaxOutputTokens", -1))};
  }

  Routed<NamedEndpoint> RouteTo(const Request& request, const std::vector<LegPolicy>& legs) {
    Routed<NamedEndpoint> routed = router_->Route(request, {.legs = legs});
    if (!routed.ok()) throw std::runtime_error("refused: " + routed.refusal().ToString());
    return routed;
  }

  void Dispatch(const Json& step) {
    std::vector<LegPolicy> legs;
    for (const auto& item : step.at("targets").items()) {
      if (item.value().is_null()) continue;  // The profile found nobody.
      const Leg leg = item.key() == "prefill" ? Leg::kPrefill : item.key() == "decode" ? Leg::kDecode : Leg::kServe;
      // The policy ranked further targets; the first one is dispatched to.
      *wanted_[static_cast<std::size_t>(leg)] = RowOf(item.value().at(0));
      legs.push_back({leg, ToString(leg)});
    }
    // A second dispatch of one id is a second ticket, which its gateway holds beside the first.
    tickets_[step.at("requestId").get<std::string>()].push_back(RouteTo(RequestOf(step), legs).Take());
  }

  // What a dispatch would add: it is dispatched and taken back, and nothing must have stayed.
  Json Project(const Json& step) {
    Json added = Json::object();
    for (const Json& endpoint : step.at("endpoints")) {
      const Row row = RowOf(endpoint);
      const std::string name = endpoint.at("name").get<std::string>();
      const Json before = InFlight();
      *wanted_[static_cast<std::size_t>(Leg::kServe)] = row;
      {
        const Ticket<NamedEndpoint> ticket = RouteTo(RequestOf(step), {{Leg::kServe, "serve"}}).Take();
        added[name] =
            InFlight().at(name).at("tokens").get<std::int64_t>() - before.at(name).at("tokens").get<std::int64_t>();
      }
      if (InFlight() != before) throw std::runtime_error("a dropped ticket left something behind");
    }
    return added;
  }

  Json InFlight() const {
    Json counters = Json::object();
    for (const EndpointId id : fleet_.Ids()) {
      counters[fleet_.Get(id)->endpoint_name] = {{"tokens", router_->Read<UncachedTokensInFlight>(id).value()},
                                                 {"requests", router_->Read<ActiveRequests>(id).value()}};
    }
    return counters;
  }

  Fleet<NamedEndpoint> fleet_;
  std::shared_ptr<PrefixFeeder::Table> prefixes_;
  std::shared_ptr<Row> wanted_[4];  // By leg.
  std::unique_ptr<Router<NamedEndpoint>> router_;
  std::map<Key, EndpointId> added_;
  std::map<std::string, std::vector<Ticket<NamedEndpoint>>> tickets_;
};

}  // namespace

Result RunInFlightLoadSequence(const Json& one_case) {
  const absl::StatusOr<std::unique_ptr<LoadSequence>> sequence = LoadSequence::Create(ChildOr(one_case, "params"));
  if (!sequence.ok()) return Result::Of(sequence.status());
  std::size_t number = 0;
  for (const Json& step : one_case.at("steps")) {
    ++number;
    if (step.size() != 1 + step.count("expect")) throw std::invalid_argument("a step that is not one action");
    for (const auto& item : step.items()) {
      if (item.key() == "expect") continue;
      const Json actual = (*sequence)->Run(item.key(), item.value());
      const std::string found = Disagreement(ChildOr(step, "expect"), actual);
      if (!found.empty()) return Result::Failed(absl::StrCat("step ", number, " (", item.key(), "): ", found));
    }
  }
  return {};
}

}  // namespace tokroute::conformance
