// AnyFilter, AnyScorer, AnyPicker, AnyLoadProducer, AnyRequestProducer: plugins whose type is known only at run time.
// They model the concepts themselves, so that a policy built at run time is the same Policy: one virtual call per stage,
// not a second code path.
//
//   tokroute::FilterChain filters;          // As many as a configuration asks for.
//   filters.Add(PrefixCacheAffinityFilter(gate));
//   tokroute::WeightedSum scorers;
//   scorers.Add(TokenLoadScorer{}, 2);
//   auto policy = tokroute::Policy(std::move(filters), std::move(scorers), tokroute::AnyPicker(MaxScorePicker{}));
//
// All are move-only; a moved-from one may only be destroyed or assigned to. Not for compile-time policies: naming the
// types is faster and checks more.
#ifndef TOKROUTE_ERASED_H_
#define TOKROUTE_ERASED_H_

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tokroute/concepts.h"
#include "tokroute/endpoint.h"
#include "tokroute/internal/column_table.h"

namespace tokroute::internal {

// kInvalidArgument that names the plugin and the signal that no producer fills (or fills with another type).
absl::Status MissingSignal(std::string_view plugin, const SignalInfo& signal, const ColumnLayout& layout);

template <class P>
absl::Status CheckPart(const P& part) {
  if constexpr (requires { { part.Check() } -> std::convertible_to<absl::Status>; }) return part.Check();
  return absl::OkStatus();
}

template <class P>
std::string_view PartName(const P& part) noexcept {
  if constexpr (requires { { part.name() } -> std::convertible_to<std::string_view>; }) {
    return part.name();
  } else {
    return NameOf<P>();
  }
}

// Raw scores are cleaned before weighting: NaN becomes 0, the rest is clamped to 0..1. Branch-free.
inline float CleanScore(float raw, std::uint32_t& clamped) noexcept {
  float score = raw > 0.0F ? raw : 0.0F;  // NaN compares false.
  score = score < 1.0F ? score : 1.0F;
  clamped += score != raw ? 1U : 0U;
  return score;
}

// A part and the positions of its columns. For a runtime part the positions live inside it.
template <class P, class Consumes = typename P::Consumes>
struct BoundPart {
  explicit BoundPart(P p) : part(std::move(p)) {}
  P part;
  Positions<Consumes> positions;
  absl::Status Bind(const ColumnLayout& layout) {
    if (absl::Status status = CheckPart(part); !status.ok()) return status;
    const SignalInfo* missing = positions.Resolve(layout);
    return missing == nullptr ? absl::OkStatus() : MissingSignal(PartName(part), *missing, layout);
  }
  CandidatesFor<Consumes> View(Survivors* survivors, const ColumnTable& table) const noexcept {
    return positions.View(survivors, table);
  }
};
template <class P>
struct BoundPart<P, RuntimeSignals> {
  explicit BoundPart(P p) : part(std::move(p)) {}
  P part;
  absl::Status Bind(const ColumnLayout& layout) { return part.Bind(layout); }
  ErasedCandidates View(Survivors* survivors, const ColumnTable& table) const noexcept { return {survivors, &table}; }
};

}  // namespace tokroute::internal

namespace tokroute {
inline namespace v0 {

class AnyFilter {
 public:
  using Consumes = RuntimeSignals;
  template <Filter F>
    requires(!std::same_as<F, AnyFilter>)
  AnyFilter(F filter)  // NOLINT: implicit, as std::function is.
      : model_(std::make_unique<Model<F>>(std::move(filter))) {}
  FilterVerdict Narrow(const Request& r, ErasedCandidates c, Stage& stage) const { return model_->Narrow(r, c, stage); }
  absl::Status Bind(const internal::ColumnLayout& layout) { return model_->Bind(layout); }
  std::string_view name() const noexcept { return model_->Name(); }
  std::string Explain(const FilterVerdict& verdict) const { return model_->Explain(verdict); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual absl::Status Bind(const internal::ColumnLayout&) = 0;
    virtual FilterVerdict Narrow(const Request&, ErasedCandidates, Stage&) const = 0;
    virtual std::string_view Name() const noexcept = 0;
    virtual std::string Explain(const FilterVerdict&) const = 0;
  };
  template <class F>
  struct Model final : Base {
    explicit Model(F f) : bound(std::move(f)) {}
    absl::Status Bind(const internal::ColumnLayout& layout) override { return bound.Bind(layout); }
    FilterVerdict Narrow(const Request& r, ErasedCandidates c, Stage& stage) const override {
      return bound.part.Narrow(r, bound.View(c.survivors, *c.table), stage);
    }
    std::string_view Name() const noexcept override { return internal::PartName(bound.part); }
    std::string Explain(const FilterVerdict& verdict) const override {
      if constexpr (requires { { bound.part.Explain(verdict) } -> std::same_as<std::string>; }) {
        return bound.part.Explain(verdict);
      }
      return {};
    }
    internal::BoundPart<F> bound;
  };
  std::unique_ptr<Base> model_;
};

class AnyScorer {
 public:
  using Consumes = RuntimeSignals;
  template <Scorer S>
    requires(!std::same_as<S, AnyScorer>)
  AnyScorer(S scorer)  // NOLINT: implicit.
      : model_(std::make_unique<Model<S>>(std::move(scorer))), scores_(new float[kMaxEndpoints]) {}

  // One virtual call: every survivor is scored into a buffer of this object, which the returned function reads.
  // So one AnyScorer serves one decision at a time, as everything under a router's lock does.
  auto Score(const Request& r, ErasedCandidates c) const {
    model_->Score(r, c, scores_.get());
    return [scores = static_cast<const float*>(scores_.get())](Row row) { return scores[row]; };
  }
  absl::Status Bind(const internal::ColumnLayout& layout) { return model_->Bind(layout); }
  std::string_view name() const noexcept { return model_->Name(); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual absl::Status Bind(const internal::ColumnLayout&) = 0;
    virtual void Score(const Request&, ErasedCandidates, float* scores) const = 0;
    virtual std::string_view Name() const noexcept = 0;
  };
  template <class S>
  struct Model final : Base {
    explicit Model(S s) : bound(std::move(s)) {}
    absl::Status Bind(const internal::ColumnLayout& layout) override { return bound.Bind(layout); }
    void Score(const Request& r, ErasedCandidates c, float* scores) const override {
      const auto score = bound.part.Score(r, bound.View(c.survivors, *c.table));
      for (Row row : c) scores[row] = score(row);
    }
    std::string_view Name() const noexcept override { return internal::PartName(bound.part); }
    internal::BoundPart<S> bound;
  };
  std::unique_ptr<Base> model_;
  std::unique_ptr<float[]> scores_;
};

class AnyPicker {
 public:
  using Consumes = RuntimeSignals;
  template <Picker P>
    requires(!std::same_as<P, AnyPicker>)
  AnyPicker(P picker)  // NOLINT: implicit.
      : model_(std::make_unique<Model<P>>(std::move(picker))) {}
  Choice Pick(const Request& r, ErasedCandidates c, std::span<const double> totals, Stage& stage,
              std::span<Row> targets) const {
    return model_->Pick(r, c, totals, stage, targets);
  }
  absl::Status Bind(const internal::ColumnLayout& layout) { return model_->Bind(layout); }
  std::string_view name() const noexcept { return model_->Name(); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual absl::Status Bind(const internal::ColumnLayout&) = 0;
    virtual Choice Pick(const Request&, ErasedCandidates, std::span<const double>, Stage&, std::span<Row>) const = 0;
    virtual std::string_view Name() const noexcept = 0;
  };
  template <class P>
  struct Model final : Base {
    explicit Model(P p) : bound(std::move(p)) {}
    absl::Status Bind(const internal::ColumnLayout& layout) override { return bound.Bind(layout); }
    Choice Pick(const Request& r, ErasedCandidates c, std::span<const double> totals, Stage& stage,
                std::span<Row> targets) const override {
      return bound.part.Pick(r, bound.View(c.survivors, *c.table), totals, stage, targets);
    }
    std::string_view Name() const noexcept override { return internal::PartName(bound.part); }
    internal::BoundPart<P> bound;
  };
  std::unique_ptr<Base> model_;
};

// As many filters as you like, run in order as if they were written out in the policy.
class FilterChain {
 public:
  FilterChain& Add(AnyFilter filter) {
    filters_.push_back(std::move(filter));
    return *this;
  }
  std::span<AnyFilter> filters() noexcept { return filters_; }
  std::span<const AnyFilter> filters() const noexcept { return filters_; }

 private:
  std::vector<AnyFilter> filters_;
};

// As many weighted scorers as you like, summed in order as if they were written out in the policy.
class WeightedSum {
 public:
  struct Term {
    AnyScorer scorer;
    float weight = 1;
  };
  // Weight: finite, >= 0; checked when a router takes the policy.
  WeightedSum& Add(AnyScorer scorer, double weight = 1) {
    terms_.push_back({std::move(scorer), static_cast<float>(weight)});
    return *this;
  }
  std::span<Term> terms() noexcept { return terms_; }
  std::span<const Term> terms() const noexcept { return terms_; }

 private:
  std::vector<Term> terms_;
};

// A load producer of any type. Its columns are `produces()`; the router hands it the whole table.
class AnyLoadProducer {
 public:
  using Produces = RuntimeSignals;
  using Own = WritableColumns<RuntimeSignals>;
  template <LoadProducer L>
    requires(!std::same_as<L, AnyLoadProducer>)
  AnyLoadProducer(L producer)  // NOLINT: implicit.
      : model_(std::make_unique<Model<L>>(std::move(producer))) {}
  absl::Status Check() const { return model_->Check(); }
  std::span<const internal::SignalInfo> produces() const noexcept { return model_->Produces(); }
  void Bind(const internal::ColumnLayout& layout) { model_->Bind(layout); }
  void Price(const Request& r, Booking& b) const noexcept { model_->Price(r, b); }
  void OnBooked(Own own, const Request& r, const Booking& b) noexcept { model_->OnBooked(*own.table, r, b); }
  void OnFirstToken(Own own, const Booking& b) noexcept { model_->OnFirstToken(*own.table, b); }
  void OnReleased(Own own, const Booking& b, const Outcome& o) noexcept { model_->OnReleased(*own.table, b, o); }
  bool Takes(std::string_view fact) const noexcept { return model_->Takes(fact); }
  // `fact` points to a value of the type whose kName Takes() said yes to.
  void OnFact(Own own, Row row, const void* fact) noexcept { model_->OnFact(*own.table, row, fact); }
  std::span<const internal::SignalInfo> audited() const noexcept { return model_->Audited(); }
  std::string_view name() const noexcept { return model_->Name(); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual absl::Status Check() const = 0;
    virtual std::span<const internal::SignalInfo> Produces() const noexcept = 0;
    virtual std::span<const internal::SignalInfo> Audited() const noexcept = 0;
    virtual void Bind(const internal::ColumnLayout&) = 0;
    virtual void Price(const Request&, Booking&) const noexcept = 0;
    virtual void OnBooked(const internal::ColumnTable&, const Request&, const Booking&) noexcept = 0;
    virtual void OnFirstToken(const internal::ColumnTable&, const Booking&) noexcept = 0;
    virtual void OnReleased(const internal::ColumnTable&, const Booking&, const Outcome&) noexcept = 0;
    virtual bool Takes(std::string_view fact) const noexcept = 0;
    virtual void OnFact(const internal::ColumnTable&, Row, const void*) noexcept = 0;
    virtual std::string_view Name() const noexcept = 0;
  };
  template <class List>
  struct InfoList;
  template <class... S>
  struct InfoList<Signals<S...>> {
    static constexpr std::array<internal::SignalInfo, sizeof...(S)> kInfo{internal::InfoOf<S>()...};
  };
  template <class L>
  struct Model final : Base {
    explicit Model(L l) : producer(std::move(l)) {}
    absl::Status Check() const override { return internal::CheckPart(producer); }
    std::span<const internal::SignalInfo> Produces() const noexcept override {
      return InfoList<typename L::Produces>::kInfo;
    }
    std::span<const internal::SignalInfo> Audited() const noexcept override {
      if constexpr (requires { typename L::Audited; }) return InfoList<typename L::Audited>::kInfo;
      return {};
    }
    void Bind(const internal::ColumnLayout& layout) override { (void)positions.Resolve(layout); }
    void Price(const Request& r, Booking& b) const noexcept override {
      if constexpr (requires { producer.Price(r, b); }) {
        static_assert(noexcept(producer.Price(r, b)));
        producer.Price(r, b);
      }
    }
    void OnBooked(const internal::ColumnTable& t, const Request& r, const Booking& b) noexcept override {
      producer.OnBooked(positions.Own(t), r, b);
    }
    void OnFirstToken(const internal::ColumnTable& t, const Booking& b) noexcept override {
      producer.OnFirstToken(positions.Own(t), b);
    }
    void OnReleased(const internal::ColumnTable& t, const Booking& b, const Outcome& o) noexcept override {
      producer.OnReleased(positions.Own(t), b, o);
    }
    bool Takes(std::string_view fact) const noexcept override {
      if constexpr (requires { typename L::Fact; }) return fact == L::Fact::kName;
      return false;
    }
    void OnFact(const internal::ColumnTable& t, Row row, const void* fact) noexcept override {
      if constexpr (requires { typename L::Fact; }) {
        producer.OnFact(positions.Own(t), row, *static_cast<const typename L::Fact*>(fact));
      }
    }
    std::string_view Name() const noexcept override { return internal::PartName(producer); }
    L producer;
    internal::Positions<typename L::Produces> positions;
  };
  std::unique_ptr<Base> model_;
};

// A request producer of any type. Receipts and workspaces are bytes that the router keeps for it.
class AnyRequestProducer {
 public:
  using Produces = RuntimeSignals;
  using Own = WritableColumns<RuntimeSignals>;
  // A receipt's room in a ticket. Unit: bytes.
  static constexpr std::size_t kReceiptBytes = 40;
  struct Receipt {
    alignas(8) std::byte bytes[kReceiptBytes];
  };
  struct Space {
    virtual ~Space() = default;
  };
  struct Workspace {  // What Fill leaves for Record. One per thread that is routing; made by its first Fill.
    std::unique_ptr<Space> space;
  };

  template <RequestProducer L>
    requires(!std::same_as<L, AnyRequestProducer>)
  AnyRequestProducer(L producer)  // NOLINT: implicit.
      : model_(std::make_unique<Model<L>>(std::move(producer))) {
    static_assert(sizeof(typename L::Receipt) <= kReceiptBytes && alignof(typename L::Receipt) <= 8,
                  "a receipt has room for 40 bytes");
  }
  absl::Status Check() const { return model_->Check(); }
  std::span<const internal::SignalInfo> produces() const noexcept { return model_->Produces(); }
  void Bind(const internal::ColumnLayout& layout) { model_->Bind(layout); }
  RequestFault Check(const Request& r) const noexcept { return model_->CheckRequest(r); }
  void Fill(const Request& r, const FleetView& f, Workspace& w, Own own) noexcept {
    if (w.space == nullptr) w.space = model_->MakeSpace();
    model_->Fill(r, f, *w.space, *own.table);
  }
  void FillNew(const Request& r, Own own, Row row) noexcept { model_->FillNew(r, *own.table, row); }
  // Only after a Fill with the same workspace.
  Receipt Record(const Request& r, const FleetView& f, Workspace& w, const Booking& b) noexcept {
    Receipt receipt;
    RecordTo(receipt, r, f, w, b);
    return receipt;
  }
  // The same, made in place: a copy would be read back while its halves are still on their way to memory.
  void RecordTo(Receipt& receipt, const Request& r, const FleetView& f, Workspace& w, const Booking& b) noexcept {
    receipt = {};
    if (w.space != nullptr) model_->Record(r, f, *w.space, b, receipt.bytes);
  }
  void OnFirstToken(Receipt& receipt) noexcept { model_->OnFirstToken(receipt.bytes); }
  void OnReleased(Receipt& receipt, const Outcome& o) noexcept { model_->OnReleased(receipt.bytes, o); }
  // The old receipt is released as aborted; the new one belongs to the booking `to`.
  Receipt Move(Receipt& receipt, const FleetView& f, const Booking& to) noexcept {
    Receipt moved = receipt;
    model_->Move(moved.bytes, f, to);
    return moved;
  }
  void Remember(const Request& conversation, const FleetView& f, Workspace& w, EndpointId at) noexcept {
    if (w.space == nullptr) w.space = model_->MakeSpace();
    model_->Remember(conversation, f, *w.space, at);
  }
  void OnEndpointAdded(EndpointId id, const EndpointFacts& facts) noexcept { model_->OnEndpointAdded(id, facts); }
  void OnFleetChanged(const FleetView& f) noexcept { model_->OnFleetChanged(f); }
  std::string_view name() const noexcept { return model_->Name(); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual absl::Status Check() const = 0;
    virtual std::span<const internal::SignalInfo> Produces() const noexcept = 0;
    virtual void Bind(const internal::ColumnLayout&) = 0;
    virtual std::unique_ptr<Space> MakeSpace() const = 0;
    virtual RequestFault CheckRequest(const Request&) const noexcept = 0;
    virtual void Fill(const Request&, const FleetView&, Space&, const internal::ColumnTable&) noexcept = 0;
    virtual void FillNew(const Request&, const internal::ColumnTable&, Row) noexcept = 0;
    virtual void Record(const Request&, const FleetView&, Space&, const Booking&, std::byte*) noexcept = 0;
    virtual void OnFirstToken(std::byte*) noexcept = 0;
    virtual void OnReleased(std::byte*, const Outcome&) noexcept = 0;
    virtual void Move(std::byte*, const FleetView&, const Booking&) noexcept = 0;
    virtual void Remember(const Request&, const FleetView&, Space&, EndpointId) noexcept = 0;
    virtual void OnEndpointAdded(EndpointId, const EndpointFacts&) noexcept = 0;
    virtual void OnFleetChanged(const FleetView&) noexcept = 0;
    virtual std::string_view Name() const noexcept = 0;
  };
  template <class List>
  struct InfoList;
  template <class... S>
  struct InfoList<Signals<S...>> {
    static constexpr std::array<internal::SignalInfo, sizeof...(S)> kInfo{internal::InfoOf<S>()...};
  };
  template <class L>
  struct Model final : Base {
    using TypedReceipt = typename L::Receipt;
    struct TypedSpace final : Space {
      typename L::Workspace own;
    };
    explicit Model(L l) : producer(std::move(l)) {}
    absl::Status Check() const override { return internal::CheckPart(producer); }
    std::span<const internal::SignalInfo> Produces() const noexcept override {
      return InfoList<typename L::Produces>::kInfo;
    }
    void Bind(const internal::ColumnLayout& layout) override { (void)positions.Resolve(layout); }
    std::unique_ptr<Space> MakeSpace() const override { return std::make_unique<TypedSpace>(); }
    RequestFault CheckRequest(const Request& r) const noexcept override {
      if constexpr (requires { { producer.Check(r) } -> std::same_as<RequestFault>; }) return producer.Check(r);
      return {};
    }
    void Fill(const Request& r, const FleetView& f, Space& w, const internal::ColumnTable& t) noexcept override {
      producer.Fill(r, f, static_cast<TypedSpace&>(w).own, positions.Own(t));
    }
    void FillNew(const Request& r, const internal::ColumnTable& t, Row row) noexcept override {
      if constexpr (requires { producer.FillNew(r, positions.Own(t), row); }) {
        producer.FillNew(r, positions.Own(t), row);
      }
    }
    void Record(const Request& r, const FleetView& f, Space& w, const Booking& b,
                std::byte* receipt) noexcept override {
      new (receipt) TypedReceipt(producer.Record(r, f, static_cast<TypedSpace&>(w).own, b));
    }
    void OnFirstToken(std::byte* receipt) noexcept override { producer.OnFirstToken(*As(receipt)); }
    void OnReleased(std::byte* receipt, const Outcome& o) noexcept override { producer.OnReleased(*As(receipt), o); }
    void Move(std::byte* receipt, const FleetView& f, const Booking& to) noexcept override {
      if constexpr (requires { { producer.Move(*As(receipt), f, to) } -> std::same_as<TypedReceipt>; }) {
        const TypedReceipt moved = producer.Move(*As(receipt), f, to);
        new (receipt) TypedReceipt(moved);
      } else {
        producer.OnReleased(*As(receipt), Outcome{.aborted = true});
        new (receipt) TypedReceipt();
      }
    }
    void Remember(const Request& conversation, const FleetView& f, Space& w, EndpointId at) noexcept override {
      auto& own = static_cast<TypedSpace&>(w).own;
      if constexpr (requires { producer.Remember(conversation, f, own, at); }) {
        producer.Remember(conversation, f, own, at);
      }
    }
    void OnEndpointAdded(EndpointId id, const EndpointFacts& facts) noexcept override {
      if constexpr (requires { producer.OnEndpointAdded(id, facts); }) producer.OnEndpointAdded(id, facts);
    }
    void OnFleetChanged(const FleetView& f) noexcept override {
      if constexpr (requires { producer.OnFleetChanged(f); }) producer.OnFleetChanged(f);
    }
    std::string_view Name() const noexcept override { return internal::PartName(producer); }
    static TypedReceipt* As(std::byte* receipt) noexcept {
      return std::launder(reinterpret_cast<TypedReceipt*>(receipt));
    }
    L producer;
    internal::Positions<typename L::Produces> positions;
  };
  std::unique_ptr<Base> model_;
};

static_assert(Filter<AnyFilter> && Scorer<AnyScorer> && Picker<AnyPicker>);
static_assert(LoadProducer<AnyLoadProducer> && RequestProducer<AnyRequestProducer>);

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_ERASED_H_
