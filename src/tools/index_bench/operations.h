// A stream of operations on a prefix index, in memory and as a file that other indexes can be driven with.
#ifndef TOKROUTE_SRC_TOOLS_INDEX_BENCH_OPERATIONS_H_
#define TOKROUTE_SRC_TOOLS_INDEX_BENCH_OPERATIONS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tokroute/fwd.h"

namespace tokroute::index_bench {

enum class OperationKind : std::uint8_t { kMatch = 0, kStore = 1, kRemove = 2, kClear = 3, kRemoveEndpoint = 4 };

struct Operation {
  OperationKind kind = OperationKind::kMatch;
  EndpointId endpoint = {};             // Not of a match.
  std::optional<BlockKey> parent = {};  // Of a store: the block before the first key. None: the prompt's first blocks.
  std::uint64_t first_key = 0;          // Into OperationStream::keys.
  std::uint32_t key_count = 0;
  std::uint32_t tag = 0;  // What the generator wants to know of a match afterwards. Not in files.
  double at = 0;          // When, in a replay by deadlines: 0 .. 1 of the window. Not in files.

  bool is_match() const noexcept { return kind == OperationKind::kMatch; }
};

// Where keys lie in a stream.
struct KeyRange {
  std::uint64_t first = 0;
  std::uint32_t count = 0;
};

struct OperationStream {
  std::uint32_t endpoints = 0;   // Slots are below this.
  std::int32_t block_size = 16;  // Unit: tokens.
  std::vector<Operation> records;
  std::vector<BlockKey> keys;  // Records may share them.

  std::span<const BlockKey> KeysOf(const Operation& operation) const noexcept {
    return {keys.data() + operation.first_key, operation.key_count};
  }
  std::span<const BlockKey> KeysOf(KeyRange range) const noexcept { return {keys.data() + range.first, range.count}; }
  KeyRange AddKeys(std::span<const BlockKey> added);
  void Match(KeyRange range, std::uint32_t tag = 0);
  void Store(EndpointId endpoint, std::optional<BlockKey> parent, KeyRange range);
  void Remove(EndpointId endpoint, KeyRange range);
  // Stores keys[begin, end) of a chain that lies at `chain`, `batch` blocks an event.
  void StoreChain(EndpointId endpoint, KeyRange chain, std::uint32_t begin, std::uint32_t end, std::uint32_t batch);
  // Spreads the records evenly over the replay window.
  void SpreadEvenly() noexcept;
};

// What a chain's block `begin` follows.
std::optional<BlockKey> ParentOf(const OperationStream& stream, KeyRange chain, std::uint32_t begin) noexcept;

// The content hash that a file gives a block beside its chained key: equal keys, equal content.
std::uint64_t LocalHashOf(BlockKey key) noexcept;

// The file format is in benchmarks/README.md. It has incarnations only by the order of events: an endpoint that is
// named again after it was removed is the next one in its slot.
//
// The file appears complete or not at all.
absl::Status WriteStream(const std::string& path, const OperationStream& stream);
// kNotFound if the file cannot be opened; kInvalidArgument naming what is wrong and where (record number, byte).
absl::StatusOr<OperationStream> ReadStream(const std::string& path);

}  // namespace tokroute::index_bench

#endif  // TOKROUTE_SRC_TOOLS_INDEX_BENCH_OPERATIONS_H_
