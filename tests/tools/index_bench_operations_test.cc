// The neutral trace format: what is written, what is read back, and what is refused.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "support/program.h"
#include "tools/index_bench/operations.h"

namespace tokroute::index_bench {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

class StreamFileTest : public testing_support::FolderTest {
 protected:
  std::string Path() const { return File("trace"); }
  std::string Written(const OperationStream& stream) const {
    EXPECT_TRUE(WriteStream(Path(), stream).ok());
    return testing_support::Contents(Path());
  }
  absl::StatusOr<OperationStream> Read(const std::string& bytes) const {
    std::ofstream(Path(), std::ios::binary) << bytes;
    return ReadStream(Path());
  }
  std::string Refusal(const std::string& bytes) const {
    const absl::StatusOr<OperationStream> stream = Read(bytes);
    EXPECT_TRUE(absl::IsInvalidArgument(stream.status())) << stream.status();
    return std::string(stream.status().message());
  }
};

// A match of two blocks, a store behind a block, a removal, a clear, an endpoint that goes and one in its place.
OperationStream Small() {
  OperationStream stream;
  stream.endpoints = 3;
  stream.block_size = 128;
  const std::vector<BlockKey> keys = {0x1122334455667788, 0x99};
  const KeyRange both = stream.AddKeys(keys);
  stream.Match(both);
  stream.Store({2, 1}, std::nullopt, {both.first, 1});
  stream.Store({2, 1}, keys[0], {both.first + 1, 1});
  stream.Remove({2, 1}, {both.first + 1, 1});
  stream.records.push_back({.kind = OperationKind::kClear, .endpoint = {1, 1}});
  stream.records.push_back({.kind = OperationKind::kRemoveEndpoint, .endpoint = {2, 1}});
  stream.Store({2, 2}, std::nullopt, {both.first, 1});
  return stream;
}
constexpr std::size_t kHeader = 24, kFixed = 18, kKey = 16;

TEST_F(StreamFileTest, EveryByteIsWhereTheFormatSays) {
  OperationStream stream;
  stream.endpoints = 3;
  stream.block_size = 128;
  const std::vector<BlockKey> keys = {0x1122334455667788};
  stream.Store({2, 1}, BlockKey{0xABCD}, stream.AddKeys(keys));
  const std::string bytes = Written(stream);
  ASSERT_EQ(bytes.size(), kHeader + kFixed + kKey);
  EXPECT_THAT(bytes, StartsWith("TOKRIDX1"));
  EXPECT_EQ(bytes.substr(8, 16), std::string("\x03\0\0\0\x80\0\0\0\x01\0\0\0\0\0\0\0", 16));
  EXPECT_EQ(bytes.substr(24, 18), std::string("\x01\x02\0\0\0\x01\xCD\xAB\0\0\0\0\0\0\x01\0\0\0", 18));
  std::string local;
  for (int i = 0; i < 8; ++i) local.push_back(static_cast<char>(LocalHashOf(keys[0]) >> (8 * i) & 0xFF));
  EXPECT_EQ(bytes.substr(42, 8), local);
  EXPECT_EQ(bytes.substr(50, 8), "\x88\x77\x66\x55\x44\x33\x22\x11");
}

TEST_F(StreamFileTest, WhatWasWrittenIsReadBack) {
  const OperationStream written = Small();
  const absl::StatusOr<OperationStream> read = Read(Written(written));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->endpoints, written.endpoints);
  EXPECT_EQ(read->block_size, written.block_size);
  ASSERT_EQ(read->records.size(), written.records.size());
  for (std::size_t i = 0; i < written.records.size(); ++i) {
    const Operation &a = written.records[i], &b = read->records[i];
    EXPECT_EQ(a.kind, b.kind) << i;
    EXPECT_EQ(a.endpoint, b.endpoint) << i;  // Incarnations by the order of events.
    EXPECT_EQ(a.parent, b.parent) << i;
    EXPECT_THAT(read->KeysOf(b), testing::ElementsAreArray(written.KeysOf(a))) << i;
  }
  EXPECT_EQ(Written(*read), Written(written));
  EXPECT_LT(read->records[1].at, read->records[2].at);
  EXPECT_LT(read->records.back().at, 1);
}

TEST_F(StreamFileTest, EveryTruncationIsRefused) {
  const std::string bytes = Written(Small());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(Refusal(bytes.substr(0, size)),
                testing::AnyOf(HasSubstr("truncated"), HasSubstr("want a header of 24 bytes")))
        << size;
  }
  EXPECT_THAT(Refusal(bytes + "x"), HasSubstr("1 bytes too many after the last record"));
}

TEST_F(StreamFileTest, ForeignFilesAreRefused) {
  EXPECT_THAT(Refusal(std::string(100, '{')), AllOf(HasSubstr(Path()), HasSubstr("does not begin with TOKRIDX1")));
  EXPECT_TRUE(absl::IsNotFound(ReadStream((folder_ / "missing").string()).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadStream(folder_.string()).status()));
}

TEST_F(StreamFileTest, WhatNoTraceCanSayIsRefused) {
  const std::string good = Written(Small());
  const auto with = [&](std::size_t at, char byte) {
    std::string bytes = good;
    bytes[at] = byte;
    return Refusal(bytes);
  };
  EXPECT_THAT(with(8, 0), HasSubstr("header: want 1 .. 8192 endpoints, got 0"));
  EXPECT_THAT(with(10, 1), HasSubstr("endpoints, got 65539"));
  EXPECT_THAT(with(12, 15), HasSubstr("header: want a block size of 16 .. 512 tokens, got 15"));
  EXPECT_THAT(with(20, 1), HasSubstr("truncated: the header tells of 4294967303 records"));
  EXPECT_THAT(with(kHeader, 5), HasSubstr("record 0 of 7, byte 24: no such kind: 5"));
  const std::size_t store = kHeader + kFixed + 2 * kKey, clear = store + 3 * (kFixed + kKey);
  EXPECT_THAT(with(store + 1, 3), HasSubstr("record 1 of 7, byte 75: want an endpoint below 3, got 3"));
  EXPECT_THAT(with(store + 5, 1), HasSubstr("byte 79: want a parent"));
  EXPECT_THAT(with(store + 5, 2), HasSubstr("want a parent"));
  EXPECT_THAT(with(store + 6, 1), HasSubstr("want a parent"));
  EXPECT_THAT(with(store + 17, 127), HasSubstr("byte 92: truncated"));
  EXPECT_THAT(with(clear + 14, 1), HasSubstr("record 4 of 7, byte 190: want no keys in a record of kind 3, got 1"));
  EXPECT_THAT(with(kHeader + kFixed + kKey + 8, 0), HasSubstr("byte 66: want a key other than 0"));
}

TEST_F(StreamFileTest, WhatCannotBeWrittenLeavesNothing) {
  EXPECT_FALSE(WriteStream((folder_ / "no" / "trace").string(), Small()).ok());
  std::filesystem::create_directory(folder_ / "taken");
  EXPECT_FALSE(WriteStream((folder_ / "taken").string(), Small()).ok());
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) left.push_back(entry.path().filename());
  EXPECT_THAT(left, ElementsAre("taken"));
}

}  // namespace
}  // namespace tokroute::index_bench
