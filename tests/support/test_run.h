// How a test run is set up: which sanitizer is on, and the seed.
#ifndef TOKROUTE_TESTS_SUPPORT_TEST_RUN_H_
#define TOKROUTE_TESTS_SUPPORT_TEST_RUN_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define TOKROUTE_TEST_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define TOKROUTE_TEST_SANITIZED 1
#endif

namespace tokroute::testing_support {

#if defined(TOKROUTE_TEST_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// The seed of a randomised test: TOKROUTE_TEST_SEED, or else the test's own. Printed, so that a failure can be repeated.
inline std::uint64_t TestSeed(std::uint64_t fallback) {
  const char* text = std::getenv("TOKROUTE_TEST_SEED");
  const std::uint64_t seed = text == nullptr ? fallback : std::strtoull(text, nullptr, 0);
  std::printf("seed: TOKROUTE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace tokroute::testing_support

#endif  // TOKROUTE_TESTS_SUPPORT_TEST_RUN_H_
