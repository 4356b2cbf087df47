#include "tokroute/decision.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tokroute/internal/policy_base.h"
#include "internal/text.h"

namespace tokroute {
inline namespace v0 {

using internal::Thousands;
using internal::ToAbsl;

namespace {

std::string Plural(std::int64_t count, const char* one, const char* many) {
  return absl::StrCat(Thousands(count), " ", count == 1 ? one : many);
}

}  // namespace

std::string_view ToString(RefusalReason reason) noexcept {
  switch (reason) {
    case RefusalReason::kNone: return "not refused";
    case RefusalReason::kNoEndpoint: return "no endpoint";
    case RefusalReason::kNotServed: return "model not served";
    case RefusalReason::kAllDrained: return "all drained";
    case RefusalReason::kAllIneligible: return "all ineligible";
    case RefusalReason::kAllExcluded: return "all excluded";
    case RefusalReason::kAllFiltered: return "all filtered";
    case RefusalReason::kNobodyPicked: return "nobody picked";
    case RefusalReason::kBadRequest: return "bad request";
    case RefusalReason::kUnknownPolicy: return "unknown policy";
    case RefusalReason::kOutOfMemory: return "out of memory";
  }
  return "unknown";
}

std::string_view Decision::endpoint_name() const noexcept {
  return record == nullptr ? std::string_view() : std::string_view(record->facts.name);
}

std::string_view Decision::policy_name() const noexcept {
  return policy == nullptr ? std::string_view() : policy->name();
}

std::string_view Decision::filter_name(std::uint32_t i) const noexcept {
  return policy == nullptr ? std::string_view() : policy->FilterName(i);
}

const FilterVerdict* Decision::verdict(std::string_view filter) const noexcept {
  for (std::uint32_t i = 0; i < verdict_count; ++i) {
    if (filter_name(i) == filter) return &verdicts[i];
  }
  return nullptr;
}

std::string Decision::ToString() const {
  std::string text = absl::StrCat("decision ", number, ": ");
  if (leg != Leg::kServe) absl::StrAppend(&text, ToAbsl(tokroute::ToString(leg)), " leg, ");
  absl::StrAppend(&text, "endpoint ", ToAbsl(endpoint_name()), " (slot ", endpoint().slot, ") of ",
                  Plural(candidates, "candidate", "candidates"), " by policy \"", ToAbsl(policy_name()), "\". ");
  std::uint32_t before = candidates;
  for (std::uint32_t i = 0; i < verdict_count; ++i) {
    const FilterVerdict& verdict = verdicts[i];
    absl::StrAppend(&text, ToAbsl(filter_name(i)), " kept ", verdict.kept, " of ", before, " (", ToAbsl(verdict.reason->name),
                    ")");
    const std::string why = policy == nullptr ? std::string() : policy->ExplainFilter(i, verdict);
    absl::StrAppend(&text, why.empty() ? ". " : absl::StrCat(": ", why, ". "));
    before = verdict.kept;
  }
  if (survivors > 1) {
    absl::StrAppend(&text, absl::StrFormat("Its total is %.6g", choice.best));
    if (choice.tied > 1) {
      absl::StrAppend(&text, ", drawn from ", choice.tied, " of equal standing. ");
    } else {
      absl::StrAppend(&text, absl::StrFormat(", the runner-up's %.6g. ", choice.runner_up));
    }
  } else {
    absl::StrAppend(&text, "It was the only one left. ");
  }
  absl::StrAppend(&text, "Of ", Plural(prompt_tokens, "prompt token", "prompt tokens"), ", ", Thousands(matched_tokens),
                  matched_tokens == 1 ? " is" : " are", " cached there and ",
                  Thousands(prompt_tokens > matched_tokens ? prompt_tokens - matched_tokens : 0), " are not.");
  return text;
}

std::string_view Refusal::filter_name() const noexcept {
  return policy == nullptr || reason != RefusalReason::kAllFiltered ? std::string_view() : policy->FilterName(filter);
}

std::string Refusal::ToString() const {
  std::string text = absl::StrCat("refused (", ToAbsl(tokroute::ToString(reason)), "): ");
  switch (reason) {
    case RefusalReason::kNone: return "not refused";
    case RefusalReason::kNoEndpoint: absl::StrAppend(&text, "the fleet has no endpoint"); break;
    case RefusalReason::kNotServed:
      absl::StrAppend(&text, "none of ", Plural(considered, "endpoint serves", "endpoints serves"), " the request's model");
      break;
    case RefusalReason::kAllDrained:
      absl::StrAppend(&text, "every endpoint that serves the model is drained, of ", considered, " in the fleet");
      break;
    case RefusalReason::kAllIneligible:
      absl::StrAppend(&text, "every endpoint that serves the model is ejected or drained, of ", considered, " in the fleet");
      break;
    case RefusalReason::kAllExcluded:
      absl::StrAppend(&text, "the caller excluded all of ", Plural(considered, "candidate", "candidates"));
      break;
    case RefusalReason::kAllFiltered:
      absl::StrAppend(&text, "filter ", ToAbsl(filter_name()), " kept none of ", Plural(considered, "candidate", "candidates"));
      break;
    case RefusalReason::kNobodyPicked:
      absl::StrAppend(&text, "the picker ranked none of ", Plural(considered, "candidate", "candidates"));
      break;
    case RefusalReason::kBadRequest:
      absl::StrAppend(&text, fault.field == nullptr ? "" : fault.field, ": want ", fault.least, " .. ", fault.most, ", got ",
                      fault.value);
      break;
    case RefusalReason::kUnknownPolicy: absl::StrAppend(&text, "the router has no policy of that name"); break;
    case RefusalReason::kOutOfMemory: absl::StrAppend(&text, "no memory for one more ticket"); break;
  }
  if (leg != Leg::kServe) absl::StrAppend(&text, ", ", ToAbsl(tokroute::ToString(leg)), " leg");
  return text;
}

std::string Trace::ToString() const {
  std::string text;
  for (const FilterStep& step : filters) {
    absl::StrAppend(&text, step.filter, " (", ToAbsl(step.reason), ") kept slots");
    for (EndpointId id : step.kept) absl::StrAppend(&text, " ", id.slot);
    absl::StrAppend(&text, "\n");
  }
  for (const Score& score : scores) {
    absl::StrAppend(&text, score.name, ":");
    for (std::size_t i = 0; i < score.raw.size(); ++i) {
      absl::StrAppend(&text, absl::StrFormat(" %s %.6g x %.6g = %.6g,", scorers[i], score.raw[i], weights[i], score.weighted[i]));
    }
    absl::StrAppend(&text, absl::StrFormat(" total %.6g\n", score.total));
  }
  return text;
}

}  // namespace v0
}  // namespace tokroute
