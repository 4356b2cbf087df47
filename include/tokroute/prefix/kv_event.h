// KV events: what engines tell of their caches, in the index's terms.
//
//   const KvSource source{endpoint_id};                          // Device memory of one endpoint (or data-parallel
//   rank). index.Stored(source, parent_key, keys);                      // They follow the parent; nullopt: the
//   prompt's first. index.Removed(source, keys); index.Cleared(endpoint_id);
//
// Nothing here knows a wire format: a decoder turns an engine's batch into these calls, one event at a time and in
// order.
#ifndef TOKROUTE_PREFIX_KV_EVENT_H_
#define TOKROUTE_PREFIX_KV_EVENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tokroute/fwd.h"

namespace tokroute {
inline namespace v0 {

// Where a block lies. Names of media are the decoder's business (GPU, CPU, DISK, ...); none given means kDevice.
enum class StorageTier : std::uint8_t { kDevice, kHost, kDisk, kUnknown };
inline constexpr std::size_t kStorageTiers = 4;

constexpr std::string_view ToString(StorageTier tier) noexcept {
  switch (tier) {
    case StorageTier::kDevice: return "device";
    case StorageTier::kHost: return "host";
    case StorageTier::kDisk: return "disk";
    case StorageTier::kUnknown: return "unknown";
  }
  return "invalid";
}

// What a matched block of each tier counts for affinity. 0 .. 1. Defaults: llm-d's for device and host (kvblock scorer:
// gpu 1.0, cpu 0.8, unknown names 1.0); disk is ours. Rounded to multiples of 2^-32, so that sums are exact in any
// order.
struct TierWeights {
  double device = 1.0, host = 0.8, disk = 0.25, unknown = 1.0;
  constexpr std::array<double, kStorageTiers> InOrder() const noexcept { return {device, host, disk, unknown}; }
};

// Whose memory an event is about. Ranks of one host are endpoints of their own, with caches of their own.
struct KvSource {
  EndpointId endpoint = {};
  StorageTier tier = StorageTier::kDevice;
};

// What became of an event. Everything but kApplied and kUnknownParent marks the endpoint as wanting a resync.
enum class KvResult : std::uint8_t {
  kApplied,        // The index says what the event said.
  kUnknownParent,  // Stored behind a parent that the index does not have (yet): kept, unreachable, for a while.
  kConflict,       // A key was known behind another parent. The first stays; the event's rest was left out.
  kNoRoom,         // The memory cap: the event's rest was left out.
  kUnknownSource,  // An endpoint that cannot be, was removed or was replaced. Nothing changed.
  kMalformed,      // A tier or a key (0) that is none, or a parent among its own keys. Nothing changed.
  kNotExact,       // An approximate index takes no events. Nothing changed.
  kBlockSize,      // The engine's blocks are not one or several of the index's (EngineKeys only). Nothing changed.
};

constexpr std::string_view ToString(KvResult result) noexcept {
  switch (result) {
    case KvResult::kApplied: return "applied";
    case KvResult::kUnknownParent: return "unknown_parent";
    case KvResult::kConflict: return "conflict";
    case KvResult::kNoRoom: return "no_room";
    case KvResult::kUnknownSource: return "unknown_source";
    case KvResult::kMalformed: return "malformed";
    case KvResult::kNotExact: return "not_exact";
    case KvResult::kBlockSize: return "block_size";
  }
  return "invalid";
}

// What a batch's sequence number says about those before it.
enum class KvSequence : std::uint8_t {
  kNext,       // Apply the batch.
  kDuplicate,  // Seen, or late: leave it out.
  kGap,        // Batches are missing (also when the first number is not 0): apply it; the endpoint wants a resync.
  kRestarted,  // Back at 0: the engine restarted in place. The endpoint was cleared; apply the batch.
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_PREFIX_KV_EVENT_H_
