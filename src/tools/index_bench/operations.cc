#include "tools/index_bench/operations.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tokroute/prefix/block_key.h"
#include "tools/index_bench/random.h"

namespace tokroute::index_bench {
namespace {

constexpr std::string_view kMagic = "TOKRIDX1";
constexpr std::size_t kHeaderBytes = 24, kRecordBytes = 18, kKeyBytes = 16;
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

template <class T>
void PutLittleEndian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
}

template <class T>
T GetLittleEndian(const char* bytes) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(static_cast<T>(static_cast<unsigned char>(bytes[i])) << (8 * i)));
  }
  return value;
}

absl::Status CannotWrite(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat("cannot write '", path, "': ", std::strerror(error)));
}

// Bytes of a file, in order, and how many there are left.
class Bytes {
 public:
  Bytes(std::ifstream& in, std::uint64_t size) : in_(in), left_(size) {}
  std::uint64_t left() const { return left_; }
  std::uint64_t offset() const { return offset_; }
  bool Read(char* out, std::size_t bytes) {
    if (bytes > left_ || !in_.read(out, static_cast<std::streamsize>(bytes))) return false;
    left_ -= bytes;
    offset_ += bytes;
    return true;
  }

 private:
  std::ifstream& in_;
  std::uint64_t left_, offset_ = 0;
};

}  // namespace

KeyRange OperationStream::AddKeys(std::span<const BlockKey> added) {
  const KeyRange range{keys.size(), static_cast<std::uint32_t>(added.size())};
  keys.insert(keys.end(), added.begin(), added.end());
  return range;
}

void OperationStream::Match(KeyRange range, std::uint32_t tag) {
  records.push_back({.kind = OperationKind::kMatch, .first_key = range.first, .key_count = range.count, .tag = tag});
}

void OperationStream::Store(EndpointId endpoint, std::optional<BlockKey> parent, KeyRange range) {
  records.push_back({.kind = OperationKind::kStore,
                     .endpoint = endpoint,
                     .parent = parent,
                     .first_key = range.first,
                     .key_count = range.count});
}

void OperationStream::Remove(EndpointId endpoint, KeyRange range) {
  records.push_back(
      {.kind = OperationKind::kRemove, .endpoint = endpoint, .first_key = range.first, .key_count = range.count});
}

void OperationStream::StoreChain(EndpointId endpoint, KeyRange chain, std::uint32_t begin, std::uint32_t end,
                                 std::uint32_t batch) {
  for (; begin < end; begin += batch) {
    Store(endpoint, ParentOf(*this, chain, begin), {chain.first + begin, std::min(batch, end - begin)});
  }
}

void OperationStream::SpreadEvenly() noexcept {
  for (std::size_t i = 0; i < records.size(); ++i) {
    records[i].at = static_cast<double>(i) / static_cast<double>(records.size());
  }
}

std::optional<BlockKey> ParentOf(const OperationStream& stream, KeyRange chain, std::uint32_t begin) noexcept {
  return begin == 0 ? std::nullopt : std::optional(stream.keys[chain.first + begin - 1]);
}

std::uint64_t LocalHashOf(BlockKey key) noexcept { return Mix(key ^ 0x510E527FADE682D1u); }

absl::Status WriteStream(const std::string& path, const OperationStream& stream) {
  const std::string temporary = absl::StrCat(path, ".", ::getpid(), ".tmp");
  std::FILE* const file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) return CannotWrite(path, errno);
  int error = 0;
  std::string buffer;
  buffer.reserve(kBufferBytes + 64);
  const auto flush = [&] {
    if (error == 0 && std::fwrite(buffer.data(), 1, buffer.size(), file) != buffer.size()) error = errno;
    buffer.clear();
  };
  buffer += kMagic;
  PutLittleEndian<std::uint32_t>(buffer, stream.endpoints);
  PutLittleEndian<std::uint32_t>(buffer, static_cast<std::uint32_t>(stream.block_size));
  PutLittleEndian<std::uint64_t>(buffer, stream.records.size());
  for (const Operation& operation : stream.records) {
    PutLittleEndian<std::uint8_t>(buffer, static_cast<std::uint8_t>(operation.kind));
    PutLittleEndian<std::uint32_t>(buffer, operation.endpoint.slot);
    PutLittleEndian<std::uint8_t>(buffer, operation.parent ? 1 : 0);
    PutLittleEndian<std::uint64_t>(buffer, operation.parent.value_or(0));
    PutLittleEndian<std::uint32_t>(buffer, operation.key_count);
    for (const BlockKey key : stream.KeysOf(operation)) {
      PutLittleEndian<std::uint64_t>(buffer, LocalHashOf(key));
      PutLittleEndian<std::uint64_t>(buffer, key);
      if (buffer.size() >= kBufferBytes) flush();
    }
  }
  flush();
  if (std::fclose(file) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  std::remove(temporary.c_str());
  return CannotWrite(path, error);
}

absl::StatusOr<OperationStream> ReadStream(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream in(path, std::ios::binary);
  if (error || !in) return absl::NotFoundError(absl::StrCat("'", path, "' cannot be read"));
  Bytes bytes(in, size);

  std::array<char, kHeaderBytes> header{};
  if (!bytes.Read(header.data(), kHeaderBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "': not an index trace: want a header of ", kHeaderBytes,
                                                   " bytes, got ", size, " bytes in all"));
  }
  if (std::string_view(header.data(), kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': not an index trace: does not begin with ", std::string(kMagic)));
  }
  OperationStream stream;
  stream.endpoints = GetLittleEndian<std::uint32_t>(&header[8]);
  const auto block_size = GetLittleEndian<std::uint32_t>(&header[12]);
  const auto record_count = GetLittleEndian<std::uint64_t>(&header[16]);
  if (stream.endpoints < 1 || stream.endpoints > kMaxEndpoints) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': header: want 1 .. ", kMaxEndpoints, " endpoints, got ", stream.endpoints));
  }
  if (block_size < kMinBlockSize || block_size > kMaxBlockSize) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "': header: want a block size of ", kMinBlockSize, " .. ",
                                                   kMaxBlockSize, " tokens, got ", block_size));
  }
  stream.block_size = static_cast<std::int32_t>(block_size);

  std::uint64_t record = 0;
  const auto bad = [&](std::uint64_t offset, const auto&... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': record ", record, " of ", record_count, ", byte ", offset, ": ", what...));
  };
  if (record_count > bytes.left() / kRecordBytes) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "': truncated: the header tells of ", record_count,
                                                   " records, which the file's ", size, " bytes cannot hold"));
  }
  stream.records.reserve(record_count);
  std::vector<std::uint32_t> incarnations(stream.endpoints, 1);
  std::string buffer;
  for (; record < record_count; ++record) {
    const std::uint64_t at = bytes.offset();
    std::array<char, kRecordBytes> fixed{};
    if (!bytes.Read(fixed.data(), kRecordBytes)) return bad(at, "truncated");
    const auto kind = GetLittleEndian<std::uint8_t>(&fixed[0]);
    const auto slot = GetLittleEndian<std::uint32_t>(&fixed[1]);
    const auto has_parent = GetLittleEndian<std::uint8_t>(&fixed[5]);
    const auto parent = GetLittleEndian<std::uint64_t>(&fixed[6]);
    const auto count = GetLittleEndian<std::uint32_t>(&fixed[14]);
    if (kind > static_cast<std::uint8_t>(OperationKind::kRemoveEndpoint)) return bad(at, "no such kind: ", kind);
    if (slot >= stream.endpoints) {
      return bad(at + 1, "want an endpoint below ", stream.endpoints, ", got ", slot);
    }
    Operation operation{.kind = static_cast<OperationKind>(kind), .first_key = stream.keys.size(), .key_count = count};
    const bool is_store = operation.kind == OperationKind::kStore;
    if (has_parent > 1 || (has_parent == 1) != (parent != 0) || (has_parent == 1 && !is_store)) {
      return bad(at + 5, "want a parent (1 and a key other than 0; stores only) or none (0 and 0)");
    }
    const bool has_keys = operation.is_match() || is_store || operation.kind == OperationKind::kRemove;
    if (!has_keys && count != 0) return bad(at + 14, "want no keys in a record of kind ", kind, ", got ", count);
    if (bytes.left() / kKeyBytes < count) return bad(bytes.offset(), "truncated: want ", count, " keys");
    if (!operation.is_match()) {
      operation.endpoint = {.slot = slot, .incarnation = incarnations[slot]};
      if (operation.kind == OperationKind::kRemoveEndpoint) ++incarnations[slot];
    }
    if (has_parent == 1) operation.parent = parent;
    buffer.resize(std::size_t{count} * kKeyBytes);
    const std::uint64_t keys_at = bytes.offset();
    if (!bytes.Read(buffer.data(), buffer.size())) return bad(keys_at, "truncated");
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto key = GetLittleEndian<std::uint64_t>(&buffer[i * kKeyBytes + 8]);
      if (key == 0) return bad(keys_at + i * kKeyBytes + 8, "want a key other than 0");
      stream.keys.push_back(key);
    }
    stream.records.push_back(operation);
  }
  if (bytes.left() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "': ", bytes.left(), " bytes too many after the last record"));
  }
  stream.SpreadEvenly();
  return stream;
}

}  // namespace tokroute::index_bench
