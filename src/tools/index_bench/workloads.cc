#include "tools/index_bench/workloads.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "tools/index_bench/random.h"
#include "tools/index_bench/reference.h"

namespace tokroute::index_bench {
namespace {

std::uint64_t Scaled(double full, double scale, std::uint64_t least) {
  return std::max(least, static_cast<std::uint64_t>(std::llround(full * scale)));
}

std::vector<BlockKey> Fresh(FreshKeys& keys, std::uint64_t count) {
  std::vector<BlockKey> made(count);
  for (BlockKey& key : made) key = keys.Next();
  return made;
}

// `count` different ones of 0 .. n - 1.
std::vector<std::uint32_t> Choose(Random& random, std::uint32_t count, std::uint32_t n) {
  std::vector<std::uint32_t> all(n);
  for (std::uint32_t i = 0; i < n; ++i) all[i] = i;
  count = std::min(count, n);
  for (std::uint32_t i = 0; i < count; ++i) std::swap(all[i], all[i + random.Below(n - i)]);
  all.resize(count);
  return all;
}

// A chain as one endpoint holds it.
struct Instance {
  KeyRange chain;
  EndpointId endpoint;
};

// Stores many instances at a time, one event of a random one after the other, as engines' events arrive.
class Interleaver {
 public:
  Interleaver(OperationStream& stream, Random& random, std::size_t window, std::uint32_t batch, double duplicates)
      : stream_(stream), random_(random), window_(window), batch_(batch), duplicates_(duplicates) {}
  void Add(const Instance& instance) {
    open_.push_back({instance, 0});
    while (open_.size() >= window_) Step();
  }
  void Finish() {
    while (!open_.empty()) Step();
  }

 private:
  struct Open {
    Instance instance;
    std::uint32_t stored = 0;
  };
  void Step() {
    Open& open = open_[random_.Below(open_.size())];
    const Instance& instance = open.instance;
    const std::uint32_t end = std::min(open.stored + batch_, instance.chain.count);
    stream_.StoreChain(instance.endpoint, instance.chain, open.stored, end, batch_);
    if (random_.Chance(duplicates_)) {
      stream_.StoreChain(instance.endpoint, instance.chain, open.stored, end, batch_);
    }
    open.stored = end;
    if (end < instance.chain.count) return;
    std::swap(open, open_.back());
    open_.pop_back();
  }

  OperationStream& stream_;
  Random& random_;
  std::size_t window_;
  std::uint32_t batch_;
  double duplicates_;
  std::vector<Open> open_;
};

// Removes blocks [begin, end) of a chain, the last first.
void RemoveTailFirst(OperationStream& stream, EndpointId endpoint, KeyRange chain, std::uint32_t begin,
                     std::uint32_t end, std::uint32_t batch) {
  std::vector<BlockKey> removed;
  while (begin < end) {
    const std::uint32_t from = end - begin > batch ? end - batch : begin;
    removed.clear();
    for (std::uint32_t b = end; b > from; --b) removed.push_back(stream.keys[chain.first + b - 1]);
    stream.Remove(endpoint, stream.AddKeys(removed));
    end = from;
  }
}

// A prompt that begins like a chain and goes on with blocks that nobody has.
KeyRange Prompt(OperationStream& stream, FreshKeys& fresh, KeyRange chain, std::uint32_t known, std::uint32_t more) {
  if (more == 0) return {chain.first, known};
  std::vector<BlockKey> prompt(stream.keys.begin() + static_cast<std::ptrdiff_t>(chain.first),
                               stream.keys.begin() + static_cast<std::ptrdiff_t>(chain.first + known));
  for (std::uint32_t i = 0; i < more; ++i) prompt.push_back(fresh.Next());
  return stream.AddKeys(prompt);
}

}  // namespace

OperationStream MakePinned(const WorkloadOptions& options) {
  constexpr std::uint32_t kBatch = 8, kMoreBlocks = 16;
  constexpr std::size_t kWindow = 256;
  OperationStream stream;
  stream.endpoints = 256;
  Random random(options.seed);
  FreshKeys fresh(options.seed);
  const std::uint64_t budget = Scaled(10e6, options.scale, 20'000);
  std::vector<Instance> instances;
  Interleaver store(stream, random, kWindow, kBatch, 0.05);
  for (std::uint64_t held = 0; held < budget;) {
    const double sharing = random.Unit();
    const std::uint32_t holders = sharing < 0.5 ? 1 : sharing < 0.85 ? 8 : 64;
    const std::vector<BlockKey> chain = Fresh(fresh, random.LogUniform(8, 512));
    for (const std::uint32_t slot : Choose(random, holders, stream.endpoints)) {
      std::vector<BlockKey> path = chain;
      for (std::uint64_t i = random.Between(4, 64); i > 0; --i) path.push_back(fresh.Next());
      instances.push_back({stream.AddKeys(path), {slot, 1}});
      store.Add(instances.back());
      held += path.size();
    }
  }
  store.Finish();
  for (const Instance& instance : instances) {
    if (!random.Chance(0.2)) continue;
    stream.Remove(instance.endpoint, {instance.chain.first + random.Between(1, instance.chain.count - 2), 1});
  }
  std::vector<Instance> prompts = instances;
  random.Shuffle(prompts);
  prompts.resize(std::min<std::size_t>(prompts.size(), Scaled(20'000, options.scale, 1'000)));
  std::vector<KeyRange> looked_up;
  for (const Instance& instance : prompts) {
    looked_up.push_back(Prompt(stream, fresh, instance.chain, instance.chain.count, kMoreBlocks));
    stream.Match(looked_up.back());
  }
  std::vector<BlockKey> lost;
  for (const Instance& instance : instances) {
    lost.clear();
    for (const BlockKey key : stream.KeysOf(instance.chain)) {
      if (random.Chance(0.02)) lost.push_back(key);
    }
    if (!lost.empty()) stream.Remove(instance.endpoint, stream.AddKeys(lost));
  }
  for (const KeyRange prompt : looked_up) stream.Match(prompt);
  stream.SpreadEvenly();
  return stream;
}

std::uint32_t TagOf(const GridClass& c) noexcept {
  // 6000 fits 13 bits, 1024 endpoints 11, 100 runs 7, and of hits there are three.
  return (c.prompt_blocks - 1) | (c.runs - 1) << 13 | (c.hit_percent / 50 + 1) << 20 |
         (c.warm_endpoints == 1   ? 0u
          : c.warm_endpoints == 8 ? 1u
                                  : 2u)
             << 22;
}

GridClass ClassOf(std::uint32_t tag) noexcept {
  constexpr std::array<std::uint32_t, 4> kWarm = {1, 8, 0, 0};  // 0: all.
  return {.prompt_blocks = (tag & 0x1FFF) + 1,
          .warm_endpoints = kWarm[tag >> 22 & 3],
          .runs = (tag >> 13 & 0x7F) + 1,
          .hit_percent = ((tag >> 20 & 3) - 1) * 50};
}

OperationStream MakeGrid(const GridCell& cell, const WorkloadOptions& options) {
  constexpr std::uint32_t kBatch = 64, kShared = 8, kProbes = 4, kFork = 2;
  constexpr std::size_t kWindow = 1024, kScrubPrompts = 4096;
  OperationStream stream;
  stream.endpoints = cell.endpoints;
  Random random(options.seed);
  FreshKeys fresh(options.seed);
  const bool small = options.scale < 0.1;
  const std::uint64_t per_endpoint = Scaled(static_cast<double>(cell.blocks), options.scale, 200);
  const std::uint64_t budget = per_endpoint * cell.endpoints;

  // One in nine conversations, held eightfold, makes half of the held blocks.
  std::vector<Instance> filler;
  Interleaver store(stream, random, kWindow, kBatch, 0);
  for (std::uint64_t held = 0; held < budget;) {
    const std::uint64_t blocks = std::min(random.LogUniform(64, small ? 1000 : 6000), budget - held);
    const KeyRange chain = stream.AddKeys(Fresh(fresh, blocks));
    const bool shared = cell.shared && random.Chance(1.0 / 9);
    for (const std::uint32_t slot : Choose(random, shared ? kShared : 1, cell.endpoints)) {
      filler.push_back({chain, {slot, 1}});
      store.Add(filler.back());
      held += chain.count;
    }
  }
  store.Finish();
  stream.Match(filler.front().chain);  // The index's size is noted here.

  struct Probe {
    KeyRange chain;
    GridClass about;
    std::vector<std::uint32_t> warm;
  };
  std::vector<Probe> probes;
  for (const std::uint32_t blocks : kGridPrompts) {
    if (small && blocks > 1000) continue;
    for (const std::uint32_t runs : kGridRuns) {
      for (const std::uint32_t warm : {1u, 8u, cell.endpoints}) {
        const bool all = warm == cell.endpoints;
        if (all && (runs > 3 || warm <= 8)) continue;  // Of 8 endpoints 8 are all.
        for (std::uint32_t i = 0; i < (all ? 1 : kProbes); ++i) {
          probes.push_back({stream.AddKeys(Fresh(fresh, blocks)),
                            {.prompt_blocks = blocks, .warm_endpoints = warm, .runs = runs},
                            Choose(random, warm, cell.endpoints)});
        }
      }
    }
  }
  for (std::uint32_t turn = 0; turn < kGridRuns.back(); ++turn) {
    for (const Probe& probe : probes) {
      const std::uint32_t runs = probe.about.runs, blocks = probe.chain.count;
      if (turn >= runs) continue;
      const std::uint32_t begin = blocks * turn / runs, end = blocks * (turn + 1) / runs;
      for (const std::uint32_t slot : probe.warm) {
        const EndpointId endpoint{slot, 1};
        if (turn > 0 && slot == probe.warm.front()) {
          stream.Store(endpoint, ParentOf(stream, probe.chain, begin), stream.AddKeys(Fresh(fresh, kFork)));
        }
        stream.StoreChain(endpoint, probe.chain, begin, end, kBatch);
      }
    }
  }
  for (const Probe& probe : probes) {
    for (const std::uint32_t hit : {0u, 50u, 100u}) {
      GridClass about = probe.about;
      about.hit_percent = hit;
      const std::uint32_t known = probe.chain.count * hit / 100;
      stream.Match(Prompt(stream, fresh, probe.chain, known, probe.chain.count - known), TagOf(about));
    }
  }
  std::vector<Instance> others = filler;
  random.Shuffle(others);
  for (std::size_t i = 0; i < std::min(kScrubPrompts, others.size()); ++i) stream.Match(others[i].chain);

  random.Shuffle(filler);
  filler.resize(std::max<std::size_t>(1, filler.size() / 4));
  for (const Instance& instance : filler) {
    RemoveTailFirst(stream, instance.endpoint, instance.chain, 0, instance.chain.count, kBatch);
  }
  stream.Match(filler.front().chain);
  for (const Instance& instance : filler) {
    stream.StoreChain(instance.endpoint, instance.chain, 0, instance.chain.count, kBatch);
  }
  stream.SpreadEvenly();
  return stream;
}

namespace {

// A conversation at one endpoint. Its path lies in the stream's keys, longer than what was said so far.
struct Conversation {
  EndpointId endpoint;
  KeyRange path = {};                  // All it will ever say.
  std::uint32_t stored = 0;            // Blocks of it.
  std::vector<KeyRange> doubled = {};  // Stored once more than they should have been.
};

class Churn {
 public:
  explicit Churn(const WorkloadOptions& options)
      : random_(options.seed),
        fresh_(options.seed),
        per_endpoint_(Scaled(60'000, options.scale, 2'000)),
        events_(Scaled(200'000, options.scale, 4'000)),
        remove_every_(events_ / 20),
        clear_every_(events_ / 6) {
    stream_.endpoints = kEndpoints;
    held_.resize(kEndpoints);
    incarnations_.assign(kEndpoints, 1);
    conversations_.resize(kEndpoints);
    for (int i = 0; i < 8; ++i) systems_.push_back(Fresh(fresh_, 64));
  }

  OperationStream Make() {
    for (std::uint64_t turn = 1; turn <= events_; ++turn) {
      Turn();
      if (turn % remove_every_ == 0) RemoveFullest();
      if (turn % clear_every_ == 0) Clear(static_cast<std::uint32_t>(random_.Below(kEndpoints)));
    }
    stream_.SpreadEvenly();
    return std::move(stream_);
  }

 private:
  using Users = absl::flat_hash_map<BlockKey, std::uint32_t, KeyHash>;  // Blocks of an endpoint: how many use them.
  static constexpr std::uint32_t kEndpoints = 64, kBatch = 64, kMostBlocks = 2'000;

  EndpointId Endpoint(std::uint32_t slot) const { return {slot, incarnations_[slot]}; }

  void Turn() {
    const auto slot = static_cast<std::uint32_t>(random_.Below(kEndpoints));
    std::deque<Conversation>& here = conversations_[slot];
    std::size_t which = here.empty() ? 0 : random_.Below(here.size());
    if (here.empty() || random_.Chance(0.1)) {
      Begin(slot);
      which = here.size() - 1;
    }
    Conversation& talk = here[which];
    Look(talk);
    Grow(talk, static_cast<std::uint32_t>(random_.Between(16, 256)));
    if (random_.Chance(0.02)) LoseMiddle(talk);
    while (held_[slot].size() > per_endpoint_ && here.size() > 1) EvictOldest(slot);
  }

  // A new conversation: behind a system prompt, behind a part of another one (a fork), or one that is continued here
  // after it began elsewhere.
  void Begin(std::uint32_t slot) {
    std::vector<BlockKey> path;
    std::uint64_t known = 0;
    const std::deque<Conversation>& others = conversations_[random_.Below(kEndpoints)];
    if (!others.empty() && random_.Chance(0.3)) {
      const Conversation& other = others[random_.Below(others.size())];
      const std::span<const BlockKey> all = stream_.KeysOf(other.path);
      path.assign(all.begin(), all.end());
      if (random_.Chance(0.5)) path.resize(random_.Between(1, std::max(other.stored, 1u)));
      known = other.stored;
    } else {
      path = systems_[random_.Below(systems_.size())];
    }
    const std::uint64_t blocks = random_.LogUniform(128, kMostBlocks);
    while (path.size() < blocks) path.push_back(fresh_.Next());
    Conversation talk{.endpoint = Endpoint(slot), .path = stream_.AddKeys(path)};
    conversations_[slot].push_back(talk);
    Grow(conversations_[slot].back(), static_cast<std::uint32_t>(std::min<std::uint64_t>(known, blocks)));
  }

  void Grow(Conversation& talk, std::uint32_t blocks) {
    const std::uint32_t end = std::min(talk.stored + blocks, talk.path.count);
    Users& users = held_[talk.endpoint.slot];
    // What another conversation has stored here already is used, not stored again.
    const std::span<const BlockKey> keys = stream_.KeysOf(talk.path);
    while (talk.stored < end && users.contains(keys[talk.stored])) ++users[keys[talk.stored++]];
    for (std::uint32_t b = talk.stored; b < end; ++b) ++users[keys[b]];
    while (talk.stored < end) {
      const std::uint32_t middle = std::min(talk.stored + kBatch, end), last = std::min(middle + kBatch, end);
      const bool late = last > middle && random_.Chance(0.02);  // Of two events one comes too early.
      if (late) Store(talk, middle, last);
      Store(talk, talk.stored, middle);
      if (random_.Chance(0.01)) {
        Store(talk, talk.stored, middle);
        talk.doubled.push_back({talk.path.first + talk.stored, middle - talk.stored});
      }
      talk.stored = late ? last : middle;
    }
  }
  void Store(const Conversation& talk, std::uint32_t begin, std::uint32_t end) {
    stream_.StoreChain(talk.endpoint, talk.path, begin, end, kBatch);
  }

  void Look(const Conversation& talk) { stream_.Match({talk.path.first, std::min(talk.stored + 16, talk.path.count)}); }

  void LoseMiddle(const Conversation& talk) {
    if (talk.stored < 3) return;
    const auto lost = static_cast<std::uint32_t>(random_.Between(1, talk.stored - 2));
    stream_.Remove(talk.endpoint, {talk.path.first + lost, 1});
    Look(talk);
    // What is not stored again will be removed a second time in the end.
    if (random_.Chance(1.0 / 3)) Store(talk, lost, lost + 1);
  }

  void EvictOldest(std::uint32_t slot) {
    const Conversation talk = conversations_[slot].front();
    conversations_[slot].pop_front();
    for (const KeyRange range : talk.doubled) stream_.Remove(talk.endpoint, range);
    Users& users = held_[slot];
    std::uint32_t kept = 0;  // Others use these.
    for (std::uint32_t b = 0; b < talk.stored; ++b) {
      const auto user = users.find(stream_.keys[talk.path.first + b]);
      if (--user->second > 0) {
        kept = b + 1;
      } else {
        users.erase(user);
      }
    }
    RemoveTailFirst(stream_, talk.endpoint, talk.path, kept, talk.stored, kBatch);
  }

  void RemoveFullest() {
    const auto fewer = [](const Users& a, const Users& b) { return a.size() < b.size(); };
    const auto fullest =
        static_cast<std::uint32_t>(std::max_element(held_.begin(), held_.end(), fewer) - held_.begin());
    stream_.records.push_back({.kind = OperationKind::kRemoveEndpoint, .endpoint = Endpoint(fullest)});
    ++incarnations_[fullest];
    Emptied(fullest);
  }
  void Clear(std::uint32_t slot) {
    stream_.records.push_back({.kind = OperationKind::kClear, .endpoint = Endpoint(slot)});
    Emptied(slot);
  }
  void Emptied(std::uint32_t slot) {
    if (!conversations_[slot].empty()) Look(conversations_[slot].front());
    conversations_[slot].clear();
    held_[slot].clear();
  }

  Random random_;
  FreshKeys fresh_;
  const std::uint64_t per_endpoint_, events_, remove_every_, clear_every_;
  OperationStream stream_;
  std::vector<Users> held_;
  std::vector<std::uint32_t> incarnations_;
  std::vector<std::deque<Conversation>> conversations_;
  std::vector<std::vector<BlockKey>> systems_;
};

}  // namespace

OperationStream MakeChurn(const WorkloadOptions& options) { return Churn(options).Make(); }

}  // namespace tokroute::index_bench
