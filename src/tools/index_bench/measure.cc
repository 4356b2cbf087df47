#include "tools/index_bench/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#endif

#include "absl/strings/str_cat.h"
#include "tools/index_bench/floors.h"
#include "tools/index_bench/memory.h"
#include "tools/index_bench/random.h"
#include "tools/index_bench/statistics.h"

namespace tokroute::index_bench {
namespace {

// How often the scheduler took the processor from this thread so far.
std::int64_t InvoluntarySwitches() noexcept {
#if defined(__linux__)
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
  return 0;
}

// While one lives, this thread stays on the `which`-th processor that it may run on. For threads that must run at the
// same time: a scheduler on a busy machine likes to leave them on one.
class OnProcessor {
 public:
  explicit OnProcessor(int which) noexcept {
#if defined(__linux__)
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &before_) || which-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      moved_ = sched_setaffinity(0, sizeof one, &one) == 0;
      return;
    }
#else
    static_cast<void>(which);
#endif
  }
  ~OnProcessor() {
#if defined(__linux__)
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
#endif
  }
  OnProcessor(const OnProcessor&) = delete;
  OnProcessor& operator=(const OnProcessor&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t before_{};
  bool moved_ = false;
#endif
};

std::string ToText(std::span<const Holder> holders) {
  std::string text = absl::StrCat(holders.size(), " holders");
  for (std::size_t i = 0; i < holders.size() && i < 8; ++i) {
    absl::StrAppend(&text, i == 0 ? ": " : ", ", holders[i].endpoint.slot, "/", holders[i].endpoint.incarnation, " ",
                    holders[i].blocks);
  }
  return text;
}

bool Same(std::span<const Holder> a, std::span<const Holder> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Holder& x, const Holder& y) { return x.endpoint == y.endpoint && x.blocks == y.blocks; });
}

// Whether the phase of writes ends with this record.
bool EndsWrites(const OperationStream& stream, std::size_t record) {
  return !stream.records[record].is_match() &&
         (record + 1 == stream.records.size() || stream.records[record + 1].is_match());
}

// Many streams alternate between single writes and matches: only phases that are worth a look are.
constexpr std::size_t kLeastPhase = 64;

// The phases of a stream: writes, then matches. begin <= matches <= end.
struct Phase {
  std::size_t begin = 0, matches = 0, end = 0;
};
std::vector<Phase> PhasesOf(const OperationStream& stream) {
  std::vector<Phase> phases;
  for (std::size_t i = 0; i < stream.records.size();) {
    Phase phase{.begin = i};
    while (i < stream.records.size() && !stream.records[i].is_match()) ++i;
    phase.matches = i;
    while (i < stream.records.size() && stream.records[i].is_match()) ++i;
    phase.end = i;
    phases.push_back(phase);
  }
  return phases;
}

// Where the second half, by blocks, of the stores and of the removals among these records begins.
struct Halves {
  std::size_t stores = 0, removals = 0;
};
Halves SecondHalves(const OperationStream& stream, std::size_t begin, std::size_t end) {
  const auto from = [&](OperationKind kind) {
    std::uint64_t all = 0, seen = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (stream.records[i].kind == kind) all += stream.records[i].key_count;
    }
    std::size_t i = begin;
    for (; i < end && seen * 2 < all; ++i) {
      if (stream.records[i].kind == kind) seen += stream.records[i].key_count;
    }
    return i;
  };
  return {from(OperationKind::kStore), from(OperationKind::kRemove)};
}

Checkpoint Look(const Subject& subject, std::size_t record) {
  const SubjectStats stats = subject.Stats();
  return {.record = record,
          .distinct_blocks = stats.distinct_blocks,
          .holder_blocks = stats.holder_blocks,
          .counted_bytes = CountedBytes(),
          .stats_bytes = stats.bytes};
}

double MedianOf(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::int64_t Checkpoint::Bytes() const noexcept { return std::max(counted_bytes, stats_bytes); }
double Checkpoint::BytesPerHolderBlock() const noexcept {
  return holder_blocks == 0 ? 0 : static_cast<double>(Bytes()) / static_cast<double>(holder_blocks);
}
double Checkpoint::BytesPerDistinctBlock() const noexcept {
  return distinct_blocks == 0 ? 0 : static_cast<double>(Bytes()) / static_cast<double>(distinct_blocks);
}

double WritePhase::StoreNsPerBlock() const {
  return stored_blocks == 0 ? 0 : MedianOf(stored_s) * 1e9 / static_cast<double>(stored_blocks);
}
double WritePhase::RemoveNsPerBlock() const {
  return removed_blocks == 0 ? 0 : MedianOf(removed_s) * 1e9 / static_cast<double>(removed_blocks);
}

double Timed::WriteRate(const OperationStream& stream, std::size_t begin, std::size_t end) const {
  double ns = 0, blocks = 0;
  for (std::size_t i = begin; i < end; ++i) {
    if (stream.records[i].is_match()) continue;
    ns += static_cast<double>(write_ns[i]);
    blocks += static_cast<double>(stream.records[i].key_count);
  }
  return ns > 0 ? blocks * 1e9 / ns : 0;
}

absl::StatusOr<Verified> Verify(const OperationStream& stream, std::int64_t most_compared, bool engine_keys) {
  Verified result;
  const std::int64_t bytes_before = CountedBytes();
  absl::StatusOr<Subject> subject = Subject::Create(stream.block_size, kMaxIndexBytes, engine_keys);
  if (!subject.ok()) return subject.status();
  result.bytes_at_start = CountedBytes() - bytes_before;
  Reference reference(stream.endpoints);
  Subject::Lookup lookup(*subject);
  std::vector<Holder> expected;
  const auto matches = std::count_if(stream.records.begin(), stream.records.end(),
                                     [](const Operation& operation) { return operation.is_match(); });
  const std::int64_t every = std::max<std::int64_t>(1, (matches + most_compared - 1) / most_compared);
  std::int64_t match = 0;
  for (std::size_t i = 0; i < stream.records.size(); ++i) {
    const Operation& operation = stream.records[i];
    const std::span<const BlockKey> keys = stream.KeysOf(operation);
    if (!operation.is_match()) {
      subject->Apply(operation, keys);
      reference.Apply(operation, keys);
      if ((i & 0xFFF) == 0 || EndsWrites(stream, i)) {
        result.peak_bytes = std::max(result.peak_bytes, CountedBytes() - bytes_before);
      }
      continue;
    }
    if (match++ % every != 0) continue;
    lookup.Load(keys);
    lookup.Match();
    reference.Match(keys, expected);
    ++result.compared;
    if (Same(lookup.holders(), expected)) continue;
    if (result.mismatched++ == 0) {
      result.first_mismatch = absl::StrCat("record ", i, ", ", keys.size(), " blocks: want ", ToText(expected),
                                           "; got ", ToText(lookup.holders()));
    }
  }
  result.exercised = reference.exercised();
  result.stats = subject->Stats();
  result.peak_bytes = std::max({result.peak_bytes, CountedBytes() - bytes_before, result.stats.bytes});
  std::vector<std::uint32_t> incarnations(stream.endpoints, 1);
  for (const Operation& operation : stream.records) {
    if (operation.kind == OperationKind::kRemoveEndpoint) {
      incarnations[operation.endpoint.slot] = operation.endpoint.incarnation + 1;
    }
  }
  for (std::uint32_t slot = 0; slot < stream.endpoints; ++slot) {
    subject->Apply({.kind = OperationKind::kRemoveEndpoint, .endpoint = {slot, incarnations[slot]}}, {});
  }
  subject->SweepAll();
  result.bytes_after_removal = CountedBytes() - bytes_before;
  return result;
}

absl::StatusOr<Timed> Time(const OperationStream& stream, const TimedOptions& options) {
  Timed result;
  const std::size_t count = stream.records.size();
  result.write_ns.assign(count, std::numeric_limits<float>::max());
  result.holders.assign(count, 0);
  result.timer_ns = TimerNs();
  const auto timer_ns = static_cast<float>(result.timer_ns);
  const std::vector<Phase> phases = PhasesOf(stream);
  for (const Phase& phase : phases) {
    if (result.phases.empty() || phase.matches - phase.begin >= kLeastPhase) {
      result.phases.push_back({.begin = phase.begin});
    }
    result.phases.back().end = phase.end;
  }
  std::vector<Halves> halves;
  halves.reserve(result.phases.size());
  for (const WritePhase& phase : result.phases) halves.push_back(SecondHalves(stream, phase.begin, phase.end));
  Floors floors(options.floor_bytes, options.seed);
  result.floor_bytes = floors.bytes();
  const bool tagged = std::any_of(stream.records.begin(), stream.records.end(),
                                  [](const Operation& operation) { return operation.tag != 0; });
  // A floor's burst takes about as long as what it stands beside, or the run would be mostly floors.
  const std::size_t line_every = 32, miss_every = std::max<std::size_t>(1, count / 100'000);

  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    const bool last = repetition + 1 == options.repetitions;
    const std::int64_t bytes_before = CountedBytes();
    absl::StatusOr<Subject> subject = Subject::Create(stream.block_size, kMaxIndexBytes, options.engine_keys);
    if (!subject.ok()) return subject.status();
    Subject::Lookup lookup(*subject);
    Random random(options.seed + 1);
    for (WritePhase& phase : result.phases) {
      phase.stored_s.push_back(0);
      phase.removed_s.push_back(0);
      phase.stored_blocks = phase.removed_blocks = 0;
    }
    std::size_t which = 0;
    std::int64_t switches = InvoluntarySwitches();
    float suspicious_ns = 20'000;
    std::size_t lookups = 0;
    const auto time_match = [&](std::size_t record) {
      if (++lookups % miss_every == 0) floors.MeasureMiss();
      lookup.Load(stream.KeysOf(stream.records[record]));
      const std::int64_t allocations = ThreadAllocations(), start = Now();
      lookup.Match();
      const auto ns = static_cast<float>(Now() - start) - timer_ns;
      if (ThreadAllocations() != allocations) {
        const std::int64_t warm = ThreadAllocations();
        lookup.Match();
        result.match_allocations += ThreadAllocations() - warm;
      }
      result.matches.push_back({static_cast<std::uint32_t>(record), std::max(ns, 0.0F)});
      result.holders[record] = static_cast<std::uint32_t>(lookup.holders().size());
    };
    // So that the lookup's own buffers have their size.
    const auto warm_up = [&](std::size_t record) {
      lookup.Load(stream.KeysOf(stream.records[record]));
      lookup.Match();
    };

    for (const Phase& phase : phases) {
      while (phase.begin >= result.phases[which].end) ++which;
      WritePhase& writes = result.phases[which];
      for (std::size_t i = phase.begin; i < phase.matches; ++i) {
        const Operation& operation = stream.records[i];
        if (i % line_every == 0) floors.MeasureLine();
        const std::span<const BlockKey> keys = stream.KeysOf(operation);
        const std::int64_t start = Now();
        subject->Apply(operation, keys);
        const float ns = std::max(0.0F, static_cast<float>(Now() - start) - timer_ns);
        if (operation.kind == OperationKind::kStore && i >= halves[which].stores) {
          writes.stored_s.back() += static_cast<double>(ns) / 1e9;
          writes.stored_blocks += static_cast<std::int64_t>(keys.size());
        } else if (operation.kind == OperationKind::kRemove && i >= halves[which].removals) {
          writes.removed_s.back() += static_cast<double>(ns) / 1e9;
          writes.removed_blocks += static_cast<std::int64_t>(keys.size());
        }
        // Asking for the count of switches costs more than most events: only when one looks bad, and now and then so
        // that a switch is not laid at the door of a much later event.
        if (ns > suspicious_ns || i % 64 == 0) {
          const std::int64_t now = InvoluntarySwitches();
          if (now != std::exchange(switches, now) && ns > suspicious_ns) {
            ++result.preempted;
            continue;
          }
        }
        result.write_ns[i] = std::min(result.write_ns[i], ns);
      }
      if (phase.matches - phase.begin >= kLeastPhase && last) {
        Checkpoint checkpoint = Look(*subject, phase.matches);
        checkpoint.counted_bytes -= bytes_before;
        result.checkpoints.push_back(checkpoint);
      }
      if (!last || phase.matches == phase.end) continue;
      if (options.match_rounds == 1) {
        for (std::size_t i = phase.matches; i < phase.end; ++i) {
          if (result.matches.empty()) warm_up(i);
          time_match(i);
        }
        continue;
      }
      std::vector<std::uint32_t> order;
      for (std::size_t i = phase.matches; i < phase.end; ++i) {
        if (!tagged || stream.records[i].tag != 0) order.push_back(static_cast<std::uint32_t>(i));
        warm_up(i);
      }
      for (int round = 0; round < options.match_rounds; ++round) {
        random.Shuffle(order);
        for (const std::uint32_t record : order) {
          for (int i = 0; i < options.scrub_matches; ++i) {
            warm_up(phase.matches + random.Below(phase.end - phase.matches));
          }
          time_match(record);
        }
      }
    }
    if (last && (result.checkpoints.empty() || result.checkpoints.back().record != count)) {
      Checkpoint checkpoint = Look(*subject, count);
      checkpoint.counted_bytes -= bytes_before;
      result.checkpoints.push_back(checkpoint);
    }
  }
  for (float& ns : result.write_ns) {
    if (ns == std::numeric_limits<float>::max()) ns = 0;  // A match, or preempted every time.
  }
  result.miss_ns = floors.miss_ns();
  result.line_ns = floors.line_ns();
  return result;
}

absl::StatusOr<Concurrent> RunConcurrently(const OperationStream& stream, double window_s) {
  constexpr std::size_t kLead = 256, kPublishEvery = 32;
  Concurrent result;
  absl::StatusOr<Subject> subject = Subject::Create(stream.block_size, kMaxIndexBytes);
  if (!subject.ok()) return subject.status();
  std::vector<std::uint32_t> matches, writes;
  for (std::size_t i = 0; i < stream.records.size(); ++i) {
    const Operation& operation = stream.records[i];
    result.block_ops += operation.key_count;
    (operation.is_match() ? matches : writes).push_back(static_cast<std::uint32_t>(i));
  }
  result.match_ns.resize(matches.size());
  Subject::Lookup lookup(*subject);
  if (!matches.empty()) {  // The reader's buffers get their size.
    lookup.Load(stream.KeysOf(stream.records[matches[0]]));
    lookup.Match();
  }
  const auto timer_ns = static_cast<float>(TimerNs());
  std::atomic<bool> go{false};
  std::atomic<std::size_t> written{0};
  std::int64_t start = 0;
  const auto window_ns = window_s * 1e9;
  // Returns how late it is. Unit: ns.
  const auto wait_for = [&](double at) {
    const std::int64_t deadline = start + static_cast<std::int64_t>(at * window_ns);
    for (;;) {
      const std::int64_t now = Now();
      if (now >= deadline) return now - deadline;
      if (deadline - now > 200'000) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(deadline - now - 100'000));
      } else {
        std::this_thread::yield();
      }
    }
  };
  std::int64_t writer_end = 0, reader_end = 0, writer_lag = 0, reader_lag = 0;
  std::thread writer([&] {
    while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
    for (std::size_t i = 0; i < writes.size(); ++i) {
      const Operation& operation = stream.records[writes[i]];
      if (window_s > 0) writer_lag = std::max(writer_lag, wait_for(operation.at));
      subject->Apply(operation, stream.KeysOf(operation));
      if (i % kPublishEvery == 0) written.store(writes[i], std::memory_order_release);
    }
    written.store(stream.records.size(), std::memory_order_release);
    writer_end = Now();
  });
  std::thread reader([&] {
    while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
    for (std::size_t i = 0; i < matches.size(); ++i) {
      const Operation& operation = stream.records[matches[i]];
      if (window_s > 0) {
        reader_lag = std::max(reader_lag, wait_for(operation.at));
      } else {
        while (written.load(std::memory_order_acquire) + kLead < matches[i]) std::this_thread::yield();
      }
      lookup.Load(stream.KeysOf(operation));
      const std::int64_t began = Now();
      lookup.Match();
      result.match_ns[i] = std::max(0.0F, static_cast<float>(Now() - began) - timer_ns);
    }
    reader_end = Now();
  });
  start = Now();
  go.store(true, std::memory_order_release);
  writer.join();
  reader.join();
  result.seconds = static_cast<double>(std::max({writer_end, reader_end, start + 1}) - start) / 1e9;
  if (window_s > 0) result.issue_lag = static_cast<double>(std::max(writer_lag, reader_lag)) / window_ns;
  return result;
}

absl::StatusOr<Removals> MeasureRemovals(std::uint32_t endpoints, std::uint64_t blocks, std::uint64_t seed) {
  constexpr std::uint32_t kBatch = 64;
  OperationStream stream;
  stream.endpoints = endpoints;
  FreshKeys fresh(seed);
  Random random(seed);
  std::vector<KeyRange> last(endpoints);  // A prompt that only this endpoint holds.
  for (std::uint64_t held = 0; held < blocks * endpoints;) {
    std::vector<BlockKey> keys(random.LogUniform(64, 2000));
    for (BlockKey& key : keys) key = fresh.Next();
    const auto slot = static_cast<std::uint32_t>(held / blocks);
    last[slot] = stream.AddKeys(keys);
    stream.StoreChain({slot, 1}, last[slot], 0, last[slot].count, kBatch);
    held += keys.size();
  }
  absl::StatusOr<Subject> subject = Subject::Create(stream.block_size, kMaxIndexBytes);
  if (!subject.ok()) return subject.status();
  for (const Operation& operation : stream.records) subject->Apply(operation, stream.KeysOf(operation));

  struct Sighting {
    std::int64_t gone_at = 0, switches = 0;
  };
  std::vector<Sighting> sightings(endpoints);
  std::atomic<std::uint32_t> seen{0}, done{0};  // Endpoints that the reader has seen, and seen go.
  Removals result;
  std::thread reader([&] {
    const OnProcessor there(1);
    Subject::Lookup lookup(*subject);
    for (std::uint32_t slot = 0; slot < endpoints; ++slot) {
      const std::span<const BlockKey> prompt = stream.KeysOf(last[slot]);
      const auto is_held = [&] {
        lookup.Load(prompt);
        lookup.Match();
        return !lookup.holders().empty();
      };
      const bool held = prompt.empty() || is_held();
      const std::int64_t switches = InvoluntarySwitches();
      seen.store(slot + 1, std::memory_order_release);
      while (held && !prompt.empty() && is_held()) {
      }
      sightings[slot] = {Now(), InvoluntarySwitches() - switches};
      done.store(slot + 1, std::memory_order_release);
    }
  });
  const OnProcessor here(0);  // Not before the reader starts, who would inherit it.
  for (std::uint32_t slot = 0; slot < endpoints; ++slot) {
    while (seen.load(std::memory_order_acquire) <= slot) std::this_thread::yield();
    const std::int64_t switches = InvoluntarySwitches(), start = Now();
    subject->Apply({.kind = OperationKind::kRemoveEndpoint, .endpoint = {slot, 1}}, {});
    const std::int64_t end = Now();
    const bool switched = InvoluntarySwitches() != switches;
    while (done.load(std::memory_order_acquire) <= slot) std::this_thread::yield();
    if (switched || sightings[slot].switches != 0 || last[slot].count == 0) continue;
    result.call_ns.push_back(static_cast<float>(end - start));
    result.visible_ns.push_back(static_cast<float>(std::max<std::int64_t>(0, sightings[slot].gone_at - start)));
  }
  reader.join();
  return result;
}

}  // namespace tokroute::index_bench
